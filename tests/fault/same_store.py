"""Holding a store against another of the same images: the same ids, each once, the same buckets, the same latents."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lmdb
import msgpack
import numpy as np
from numpy.typing import NDArray

from bucketline.store import Store
from bucketline.store.verify.verify import verify

TOLERANCE = 4e-3  # of a latent in F16; batches are not of the same images


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    samples: int  # whose latents were compared
    faults: list[str]


def compare(path: Path, whole_path: Path) -> Comparison:
    store = Store.open(path)
    faults = [f"{path} is damaged: {fault}" for fault in verify(store, lambda _: None, 1).corrupt]
    found, twice = _samples(store)
    expected, _ = _samples(Store.open(whole_path))
    faults += [f"{sample_id} is there twice" for sample_id in twice]
    faults += [f"{sample_id} is missing" for sample_id in sorted(expected.keys() - found.keys())]
    faults += [f"{sample_id} is in no other store" for sample_id in sorted(found.keys() - expected.keys())]
    samples = 0
    for sample_id in sorted(expected.keys() & found.keys()):
        (bucket, latent), (wanted, whole) = found[sample_id], expected[sample_id]
        if bucket != wanted:
            faults.append(f"{sample_id} is in {bucket}, expected {wanted}")
            continue
        samples, difference = samples + 1, float(np.abs(latent.astype("f4") - whole.astype("f4")).max())
        if difference > TOLERANCE:
            faults.append(f"{sample_id} has a latent that differs by {difference}")
    return Comparison(samples=samples, faults=faults)


def _samples(store: Store) -> tuple[dict[str, tuple[str, NDArray[Any]]], list[str]]:
    samples: dict[str, tuple[str, NDArray[Any]]] = {}
    twice = []
    for bucket in store.buckets():
        rows = np.arange(bucket.num_rows)
        for sample_id, latent in zip(bucket.sample_ids(rows), bucket.read(rows, "latent", verify=True), strict=True):
            if sample_id in samples:
                twice.append(sample_id)
            samples[sample_id] = (bucket.name, latent)
    return samples, twice


def committed_ids(store: Path) -> set[str]:
    """Return the ids that are in any file of a store that nobody writes: sealed, listed or neither."""
    ids: set[str] = set()
    for path in [*(store / "shards").glob("*.lmdb"), *(store / "pending").glob("*.lmdb")]:
        with lmdb.open(str(path), subdir=False, lock=False, readonly=True) as env, env.begin() as txn:
            ids |= {msgpack.unpackb(value)["id"] for key, value in txn.cursor() if key.startswith(b"sample/")}
            if end := txn.get(b"records"):
                data = memoryview(path.with_suffix(".records").read_bytes())[: int.from_bytes(end[:8], "little")]
                while data:
                    length = int.from_bytes(data[16:20], "little")
                    ids.add(msgpack.unpackb(data[20 : 20 + length])["id"])
                    data = data[20 + length :]
    return ids


def noted_ids(store: Path) -> list[str]:
    """Return the ids whose commit has returned, as `noted_pack` wrote them down next to the store."""
    notes = store.parent.glob(f"{store.name}.committed.*")
    return [line for path in notes for line in path.read_text(encoding="utf-8").split("\n")[:-1]]
