"""Rows and captions by plain reads (`preadv`) into buffers that the caller gives; no torch, and nothing of a shard is mapped.

For media that may fail: what would end the process under a memory map (a file truncated while it is read, a disk that gives
an error) is an exception here. About half of the map's speed when hot (`bench/hot_gather.py`).
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np

from bucketline.errors import CorruptError
from bucketline.store.block import CHECKSUM, row_checksum

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType

    from numpy.typing import NDArray

    from bucketline.store.block import Column
    from bucketline.store.reader import Located, LocatedCaptions, OpenShards


class FileGather:
    """Gathers rows and captions of one open store. With `threads`, shards are read side by side: for cold or distant media."""

    def __init__(self, store: OpenShards, threads: int = 1) -> None:
        """Start the threads, if there are to be more than one."""
        self._store = store
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="bucketline-read") if threads > 1 else None

    def close(self) -> None:
        """End the threads."""
        if self._pool is not None:
            self._pool.shutdown()

    def __enter__(self) -> FileGather:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def rows(self, located: Located, column: Column, out: NDArray[Any]) -> None:
        """Read one column of some rows into `out`, `[B, …]` C-contiguous, of B rows' bytes.

        Raises:
            StoreError: where a shard's file is missing or its medium fails.
            CorruptError: where a shard's file ends too early, or is another shard's.
        """
        spec = self._store.specs[located.bucket]
        self._read(located.shard, located.offsets(spec, column.name), _rows_of(out, len(located.row), column.row_bytes))

    def read(
        self, shard: NDArray[np.int64], offsets: NDArray[np.int64], num_bytes: NDArray[np.int64] | int, out: NDArray[Any]
    ) -> None:
        """Read what lies at some bytes of shards' files, `[B]` each, into the rows of `out`, `[B, …]`, zeros beyond it.

        `num_bytes`: of each, a row's of `out` at most, or one number for all.

        Raises:
            StoreError, CorruptError: as `rows`.
        """
        whole = _rows_of(out, len(shard), out.nbytes // max(1, len(shard)))
        if isinstance(num_bytes, int) and (not whole or num_bytes == len(whole[0])):
            self._read(shard, offsets, whole)
            return
        lengths = np.broadcast_to(num_bytes, shard.shape).tolist()
        for row, own in zip(whole, lengths, strict=True):
            if own < len(row):
                np.frombuffer(row, dtype="u1")[own:] = 0
        self._read(shard, offsets, [row[:own] for row, own in zip(whole, lengths, strict=True)])

    def tokens(self, located: LocatedCaptions, column: Column, out: NDArray[Any], mask: NDArray[np.bool_]) -> None:
        """Read captions' tokens into `out`, `[B, L, …]`, zeros beyond each caption's own, and say which are, `[B, L]`.

        Raises:
            CorruptError: where a caption's `starts` are impossible, or it has more than L tokens; else as `rows`.
        """
        shard = located.shard
        starts = np.empty((len(shard), 2), dtype="<i8")
        self._read(shard, located.starts_offsets(), _rows_of(starts, len(shard), 16))
        self._store.check_starts(located, starts, mask.shape[1])
        count = starts[:, 1] - starts[:, 0]
        np.less(np.arange(mask.shape[1]), count[:, None], out=mask)
        self.read(shard, self._store.token_offsets(located, column.name, starts[:, 0]), count * column.row_bytes, out)

    def _read(self, shard: NDArray[np.int64], offsets: NDArray[np.int64], outs: list[memoryview]) -> None:
        by_shard: dict[int, tuple[list[int], list[memoryview]]] = {}
        for ordinal, offset, out in zip(shard.tolist(), offsets.tolist(), outs, strict=True):
            own = by_shard.setdefault(ordinal, ([], []))
            own[0].append(offset)
            own[1].append(out)

        def read(ordinal: int) -> None:
            self._store.shards[ordinal].read_into(*by_shard[ordinal])

        for _ in self._pool.map(read, by_shard) if self._pool else map(read, by_shard):
            pass  # a failure in a thread is raised here


def check_rows(store: OpenShards, located: Located, values: Mapping[str, NDArray[Any]]) -> None:
    """Hold whole rows, all columns `[B, …]` of each, against their checksums.

    Raises:
        CorruptError: at the first row whose bytes are not those that were written; its sample is named.
    """
    spec = store.specs[located.bucket]
    flat = {name: _rows_of(own, len(located.row), spec.column(name).row_bytes) for name, own in values.items()}
    for n, stored in enumerate(flat[CHECKSUM]):
        if row_checksum(spec, {name: rows[n] for name, rows in flat.items()}) != int.from_bytes(stored, "little"):
            shard, row = store.shards[int(located.shard[n])], int(located.row[n])
            name = shard.name_of(located.bucket, row)
            raise CorruptError(
                f"sample {name!r}, row {row} of {located.bucket} in shard {shard.name}: its bytes are not those that were "
                "written; `store drop` it and pack its source again"
            )


def _rows_of(out: NDArray[Any], num_rows: int, row_bytes: int) -> list[memoryview]:
    """Give a buffer of B rows as bytes, a row at a time."""
    if not out.flags.c_contiguous or out.nbytes != num_rows * row_bytes:
        raise ValueError(f"the buffer has {out.nbytes} bytes, expected {num_rows} rows of {row_bytes} bytes, C-contiguous")
    whole = out.reshape(-1).view("u1").data
    return [whole[at : at + row_bytes] for at in range(0, num_rows * row_bytes, row_bytes)] if row_bytes else [whole] * num_rows
