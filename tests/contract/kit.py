"""The kit of the contracts: stores that are files, and everything that a user can read from a store, as JSON."""

from __future__ import annotations

import hashlib
import json
import tarfile
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.commands import ROOT, call

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tests.commands import Ran

DATA = ROOT / "tests" / "data" / "stores"
EXPECTED = DATA / "expected.json"
VERSIONS = {
    "images": 1,
    "compact": 2,
    "columns": 3,
    "images_added": 4,
    "columns_added": 4,
    "ragged": 3,
}  # of the format, by store
EXPORTS = ("webdataset", "safetensors", "kohya", "mds")
OF_A_SHARD = ("row", "caption_rows", "file")  # what a record says that depends on the shard
COLUMNS_OF_A_SHARD = ("checksum", "captions", "ragged/")  # and what a row has: a checksum of all, and numbers of other rows


def unpacked(name: str, folder: Path) -> Path:
    """Unpack one of the stores of `tests/data/stores` into a folder, and return its path."""
    with tarfile.open(DATA / f"{name}.tar.xz") as tar:
        tar.extractall(folder, filter="data")
    return folder / f"{name}.store"


def done(command: str, *args: object) -> Ran:
    """Run a command that must succeed."""
    return call(command, *args).done()


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:12]


def files_in(folder: Path) -> dict[str, str]:
    """Return a digest of each file below a folder."""
    return {str(path.relative_to(folder)): digest(path.read_bytes()) for path in sorted(folder.rglob("*")) if path.is_file()}


def tensors_in(path: Path) -> list[tuple[str, dict[str, Any]]]:
    """Return a sample's tensors, by name, as the package safetensors reads them: dtype, shape and data."""
    import safetensors

    deserialize: Any = safetensors.deserialize
    return sorted((name, own) for name, own in deserialize(path.read_bytes()) if not name.startswith(COLUMNS_OF_A_SHARD))


def rows_of(store: Path | str, scratch: Path, *options: object) -> dict[str, str]:
    """Return a digest of each live sample's record, columns and captions, as `store export` writes them, by id."""
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        out = Path(folder, "exported")
        done("store", "export", store, out, "--format", "safetensors", *options)
        found = {}
        for line in (out / "samples.jsonl").read_text(encoding="utf-8").splitlines():
            record = json.loads(line)
            kept = {name: value for name, value in record.items() if name not in OF_A_SHARD}
            tensors = {
                name: [own["dtype"], own["shape"], digest(own["data"])] for name, own in tensors_in(out / record["file"])
            }
            found[record["id"]] = digest(json.dumps([kept, tensors], sort_keys=True).encode())
        return found


def info(store: Path | str, scratch: Path) -> Any:
    del scratch
    found = done("store", "info", store, "--json").json
    del found["disk_bytes"]  # a file system's own
    return found


def ls(store: Path | str, scratch: Path) -> Any:
    del scratch
    return [json.loads(line) for line in done("store", "ls", store, "--json").out.splitlines()]


def get(store: Path | str, scratch: Path) -> Any:
    """Return the record of the last sample that is listed, and a digest of its file."""
    out = scratch / "got.safetensors"
    record = done("store", "get", store, ls(store, scratch)[-1]["id"], "-o", out, "--json").json
    return {"record": record, "file": digest(out.read_bytes())}


def verify(store: Path | str, scratch: Path) -> Any:
    del scratch
    return done("store", "verify", store, "--json").json


def export(store: Path | str, scratch: Path) -> Any:
    """Return what each format's export prints and writes, or why it refuses."""
    found: dict[str, Any] = {}
    for kind in EXPORTS:
        ran = call("store", "export", store, scratch / kind, "--format", kind, "--json")
        files = files_in(scratch / kind) if ran.code == 0 else ran.err
        found[kind] = [ran.code, {**ran.json, "output": kind} if ran.code == 0 else None, files]
    return found


def plan(store: Path | str, scratch: Path) -> Any:
    del scratch
    return done("loader", "plan", store, "--batch", 2, "--list", "--json").json


def generations(store: Path | str, scratch: Path) -> Any:
    """Return how many samples each generation has, and a digest of all their columns."""
    del scratch
    import numpy as np

    from bucketline.store import Store

    found: dict[str, Any] = {}
    for number in range(1, Store.open(store).manifest.generation + 1):
        of_generation = Store.open(store, number)
        parts = [str(of_generation.manifest.samples).encode()]
        for bucket in of_generation.buckets():
            rows = np.arange(bucket.num_rows)
            parts += ["\n".join([bucket.name, *bucket.sample_ids(rows)]).encode()]
            parts += [bucket.read(rows, column.name, verify=True).tobytes() for column in bucket.columns]
        found[str(number)] = [of_generation.manifest.samples, digest(b"\0".join(parts))]
    return found


def epoch(store: Path | str, scratch: Path) -> Any:
    """Return a loader's first epoch: each batch's bucket and samples, and a digest of each tensor of all batches."""
    del scratch
    import torch

    from bucketline.loader import Loader, LoaderConfig
    from bucketline.store import Store

    opened = Store.open(store)
    roles = tuple(sorted(column.role for column in opened.manifest.columns.values() if not column.role.endswith("/flipped")))
    roles += tuple(own for own in sorted(opened.manifest.added) if own not in roles)
    options = LoaderConfig(
        batch_size=2,
        epochs=1,
        seed=3,
        verify=True,
        columns=("target", *(role for role in roles if role != "target")),
        ragged=tuple(opened.manifest.ragged),
    )
    order: list[Any] = []
    tensors: dict[str, bytes] = {}
    with Loader(opened, options) as loader:
        for batch in loader:
            order.append([batch.step, batch.bucket, [bytes(one.tolist()).hex()[:8] for one in batch.ids]])
            for name, tensor in batch.by_name().items():
                values = tensor.contiguous().view(torch.uint8).numpy() if tensor.dim() else tensor.numpy()
                shape = f"{tensor.dtype} {tuple(tensor.shape)}".encode()
                tensors[name] = hashlib.sha256(tensors.get(name, b"") + shape + values.tobytes()).digest()
    return {"order": order, "tensors": {name: value.hex()[:12] for name, value in sorted(tensors.items())}}


READINGS: Mapping[str, Callable[[Path | str, Path], Any]] = {
    "info": info,
    "ls": ls,
    "get": get,
    "verify": verify,
    "export": export,
    "plan": plan,
    "generations": generations,
    "epoch": epoch,
}
