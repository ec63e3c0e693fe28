"""Disk overhead of a store: `disk_bytes` ÷ `payload_bytes` by row size, and a breakdown of the rest."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bucketline.bench.harness import Case, Mark, Result, run_case

if TYPE_CHECKING:
    from pathlib import Path

    from bucketline.store import Store
    from bucketline.store.shard.reader import SealedShard

MARKS = {8: 1.03, 32: 1.01, 128: 1.01, 512: 1.01}  # by KiB per row, for 1,000 rows or more
# Rows with captions of 20 to 77 tokens or without, with a column more, or with quantised text.
FORMS: dict[str, dict[str, Any]] = {
    "captions": {"tokens": (20, 77)},
    "no captions": {"tokens": None},
    "captions, a column more": {"tokens": (20, 77), "num_features": 64},
    "no captions, a column more": {"tokens": None, "num_features": 64},
    "captions in I8": {"tokens": (20, 77), "text_dtype": "I8"},
}


@dataclass(frozen=True, kw_only=True)
class DiskBytes(Case):
    """Measure the disk space of a store per byte of payload, and break down the overhead.

    Each row size is measured with one caption per sample (20 to 77 tokens of 768 x F16), and with the empty caption for all;
    both again with a second column of 128 bytes, and with captions quantised to I8. Results vary
    only with the file system, so each store is made once.

    Example: python -m bucketline.bench.store.disk_bytes --rows 1024 --row-kib 8 128
    """

    rows: int = 1024
    """Rows of the store's one bucket."""
    row_kib: tuple[int, ...] = (8, 32, 128, 512)
    """KiB per row of latents; each size is measured."""

    def measure(self, folder: Path) -> list[Result]:
        import shutil

        from bucketline.bench.fixtures.synthetic_store import StoreShape, kept_store, latent_shape
        from bucketline.store import Store

        results: list[Result] = []
        for row_kib in self.row_kib:
            for words, form in FORMS.items():
                shape = StoreShape(num_shards=1, rows_per_shard=self.rows, latent_shape=latent_shape(row_kib), **form)
                path = kept_store(folder, shape)
                mark = Mark(bound=MARKS[row_kib], is_at_most=True) if row_kib in MARKS and self.rows >= 1000 else None
                results.extend(_results(Store.open(path), f"{row_kib} KiB, {words}", mark))
                if self.stores is None:
                    shutil.rmtree(path)
        return results


def _results(store: Store, subject: str, mark: Mark | None) -> list[Result]:
    from bucketline.store.read.info import info

    figures = info(store)
    payload = figures["payload_bytes"]
    ratio = figures["disk_bytes"] / payload
    parts = {name: num_bytes / payload for name, num_bytes in overheads(store).items()}
    return [
        _result(subject, ratio, mark),
        *(_result(f"{subject}: {name}", part) for name, part in parts.items()),
    ]


def _result(subject: str, value: float, mark: Mark | None = None) -> Result:
    value = round(value, 6)
    return Result(
        case="disk_bytes",
        subject=subject,
        unit="of payload",
        median=value,
        q1=value,
        q3=value,
        repeats=1,
        limit_ratio=value,
        mark=mark,
    )


def overheads(store: Store) -> dict[str, int]:
    """Return the bytes on the disk beyond the payload, by kind; they add up to `disk_bytes` - `payload_bytes`."""
    from bucketline.store.read.info import disk_bytes

    def on_disk(pattern: str) -> int:
        return sum(path.lstat().st_blocks * 512 for path in store.path.glob(pattern))

    pages = [_pages(shard) for shard in store.shards]
    blocks = sum(shard.in_leaves + shard.in_overflow for shard in pages)
    leaves, overflow = (sum(getattr(shard, name) for shard in pages) for name in ("leaves", "overflow"))
    records = sum(shard.record_bytes for shard in store.manifest.shards)
    parts = {
        "block headers, captions' digests and starts": blocks + records - store.manifest.payload_bytes,
        "blocks rounded up to pages": overflow - sum(shard.in_overflow for shard in pages),
        "leaf pages beyond their records": leaves - records - sum(shard.in_leaves for shard in pages),
        "LMDB's other pages": on_disk("shards/*.lmdb") - leaves - overflow,
        "index": on_disk("shards/*.index"),
        "extents": on_disk("shards/*.extents"),
        "manifest and generations": on_disk("manifest.json") + on_disk("generations/*"),
    }
    return {**parts, "other files": disk_bytes(store.path) - store.manifest.payload_bytes - sum(parts.values())}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pages:
    """The parts of a shard's LMDB file, in bytes."""

    leaves: int  # pages that hold keys, sample records and very small blocks
    overflow: int  # pages that each hold one block or part of one
    in_leaves: int  # blocks
    in_overflow: int  # blocks


def _pages(shard: SealedShard) -> _Pages:
    import lmdb
    import numpy as np

    with lmdb.open(str(shard.paths.lmdb), subdir=False, lock=False, readonly=True, create=False) as env:
        stat = env.stat()
    offset, length = (shard.extents.column(name).astype(np.int64) for name in ("offset", "length"))
    begins_page = offset % stat["psize"] == 16  # after the page's own header
    return _Pages(
        leaves=stat["psize"] * stat["leaf_pages"],
        overflow=stat["psize"] * stat["overflow_pages"],
        in_leaves=int(length[~begins_page].sum()),
        in_overflow=int(length[begins_page].sum()),
    )


def main() -> int:
    """Make the stores, measure and print."""
    return run_case(DiskBytes)


if __name__ == "__main__":
    sys.exit(main())
