"""Stores that versions 1 to 4 of the format wrote, and what they hold; `make.py` of commit 0e567ee1 made them, in bab84ecf."""

from __future__ import annotations

import hashlib
import tarfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bucketline.loader import Loader, LoaderConfig
from bucketline.store import Store
from bucketline.store.format.manifest import generations
from tests.kit import everything

if TYPE_CHECKING:
    from tests.kit import Held

NAMES = ("1", "2", "3", "3-ragged", "4")


def unpacked(name: str, folder: Path) -> Path:
    """Return the store of a version, such as `1`, in a folder."""
    with tarfile.open(Path(__file__).with_name(f"{name}.tar.xz")) as tar:
        tar.extractall(folder, filter="data")
    return folder / name


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
