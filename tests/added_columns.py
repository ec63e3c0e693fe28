"""Masks that are added to stores of `tests.kit`: drawn from an id, and compared wherever they come out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bucketline.store import Store
from bucketline.store.remote.urls import RemoteOptions
from bucketline.store.verify.verify import verify


def bucket_of(sample_id: str) -> str:
    """Return the bucket in an id of `samples_of`: of `a/train/64x96/3.png` it is `train/64x96`."""
    return "/".join(sample_id.split("/")[-3:-1])


def mask_of(sample_id: str) -> NDArray[np.uint8]:
    """Return the mask of a sample, `[1, h, w]`, an eighth of its bucket's size."""
    height, width = map(int, bucket_of(sample_id).split("/")[1].split("x"))
    return np.random.default_rng(list(sample_id.encode())).integers(0, 256, (1, height // 8, width // 8), dtype=np.uint8)


def masks_in(place: Path | str, remote: RemoteOptions | None = None, column: str = "mask") -> dict[str, NDArray[Any]]:
    store = Store.open(place, remote=remote)
    found: dict[str, NDArray[Any]] = {}
    for bucket in store.buckets():
        rows = np.arange(bucket.num_rows)
        found |= dict(zip(bucket.sample_ids(rows), bucket.read(rows, column, verify=True), strict=True))
    return found


def expect_masks(place: Path | str, num_samples: int, remote: RemoteOptions | None = None) -> None:
    found = masks_in(place, remote)
    assert len(found) == num_samples
    assert all(np.array_equal(mask, mask_of(sample_id)) for sample_id, mask in found.items())


def expect_clean(path: Path) -> None:
    """Compare every file of a store with its checksums; there is none that does not belong to it."""
    found = verify(Store.open(path), lambda _: None)
    assert (found.corrupt, found.strays) == ((), ())
