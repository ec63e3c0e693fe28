"""Make a small store of each version of the format that was once written, 1 to 4, and what their readers read from them.

    python -m tests.data.old_versions.make OUT        writes OUT/N.tar.xz and OUT/expected.json

It runs in a checkout of commit bab84ecf, the last one that writes these versions. The test imports `read_as_json`.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tarfile
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bucketline.loader import Loader, LoaderConfig
from bucketline.store import Store, add_column
from bucketline.store.change.drop import drop
from bucketline.store.format.manifest import generations, read_manifest, write_manifest
from tests.added_columns import mask_of
from tests.building import make_store, samples_of
from tests.free_columns import IMAGE_COLUMNS, items_of
from tests.ragged import AUDIO, LLAMA, POINTS, Schema, make_ragged
from tests.reading import everything
from tests.store_forms import COLUMNS

if TYPE_CHECKING:
    from tests.reading import Held

BUCKETS = {"train/64x96": 5, "train/96x64": 4, "val/64x96": 2}
NAMES = ("1", "2", "3", "3-ragged", "4")


def short_digest(*parts: bytes) -> str:
    joined = hashlib.blake2b(digest_size=8)
    for part in parts:
        joined.update(len(part).to_bytes(8, "little") + part)
    return joined.hexdigest()


def read_as_json(path: Path) -> dict[str, Any]:
    """Return what every generation of a store holds, and what a loader delivers of the newest one, in digests."""
    found: dict[str, Any] = {"generations": {}}
    for number in generations(path):
        store = Store.open(path, number)
        rows = {bucket: {own.record.id: _digest_of(own) for own in held} for bucket, held in everything(store).items()}
        found["generations"][str(number)] = {"digest": store.manifest.digest, "rows": rows}
    with Loader(Store.open(path), LoaderConfig(batch_size=2, seed=3)) as loader:
        epoch = [
            [batch.bucket, [bytes(one.tolist()).hex()[:8] for one in batch.ids], short_digest(*_tensors(batch))]
            for batch in loader
        ]
        found |= {"epoch": epoch, "state": loader.state_dict()}
    return found


def _digest_of(own: Held) -> str:
    parts = (repr(sorted(asdict(own.record).items())), repr(sorted(own.columns.items())))
    return short_digest(*(part.encode() for part in parts), *own.captions)


def _tensors(batch: Any) -> list[bytes]:
    import torch

    return [tensor.contiguous().view(torch.uint8).numpy().tobytes() for _, tensor in sorted(batch.by_name().items())]


def make(folder: Path) -> None:
    """Make the stores: two shards, and a sample dropped from the first."""
    parts = [samples_of(BUCKETS, f"{name}/") for name in "ab"]
    for name in ("1", "2", "4"):
        path = make_store(folder / name, *parts).path
        drop(path, [parts[0][1].id])
    manifest = read_manifest(folder / "2")
    write_manifest(folder / "2", replace(manifest, format_version=2, generation=manifest.generation + 1))
    add_column(folder / "4", "mask", mask_of)
    COLUMNS.make_store(folder / "3", *parts)
    drop(folder / "3", [parts[0][1].id])
    columns = [replace(column, encoder=None) for column in IMAGE_COLUMNS]
    schema = Schema(columns=columns, groups={"audio": AUDIO, "points": POINTS, "llama": LLAMA})
    items = items_of(BUCKETS, columns)
    make_ragged(folder / "3-ragged", schema, items[:6], items[6:])


def main(out: Path) -> None:
    """Make the stores in a folder of their own, read them, and pack them without locks, owners and times."""
    with tempfile.TemporaryDirectory() as work:
        make(Path(work))
        expected = {name: read_as_json(Path(work) / name) for name in NAMES}
        for name in NAMES:
            with tarfile.open(out / f"{name}.tar.xz", "w:xz", preset=9) as tar:
                tar.add(Path(work) / name, name, filter=_plain)
    (out / "expected.json").write_text(json.dumps(expected, indent=1) + "\n", encoding="ascii")


def _plain(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    if member.name.endswith(".lock"):
        return None
    member.uid = member.gid = member.mtime = 0
    member.uname = member.gname = ""
    return member


if __name__ == "__main__":
    main(Path(sys.argv[1]))
