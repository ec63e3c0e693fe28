"""All shards' sidecars of one kind in one address range: one numpy call reads values of many shards.

A sidecar is mapped (or read, with plain reads) and its header checked when its shard is first used; its pages are checked on
first access.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from bucketline.errors import CorruptError, StoreError
from bucketline.store.shard.address_range import AddressRange
from bucketline.store.shard.sidecar import PAGE_BYTES, PagedFile, open_listed, read_exactly

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from numpy.typing import NDArray


class Sidecars:
    """The files of one kind, by shard. Letters: B requested values, each with a shard `[B]` and an index `[B]` in its file."""

    def __init__(
        self,
        kind: str,
        columns: Sequence[str],
        files: Sequence[tuple[Path, int]],
        check: Callable[[int, PagedFile], None],
        *,
        plain_reads: bool,
        fetch: Callable[[Sequence[int]], None] | None = None,
    ) -> None:
        """Reserve addresses, or memory with `plain_reads`; nothing is opened yet.

        `files` has each shard's path and length, `columns` the tensors to read, all of one dtype. `check` is called with a
        shard's ordinal and file when it is opened. `fetch` is called before files are opened, with their shards' ordinals.
        """
        self._fetch = fetch
        self._kind, self._columns, self._paths, self._check_opened = kind, columns, files, check
        self._files: dict[int, PagedFile] = {}

        def opened(ordinal: int) -> AbstractContextManager[int]:
            return open_listed(*files[ordinal])

        def read(ordinal: int, fd: int, out: memoryview) -> None:
            read_exactly(files[ordinal][0], fd, 0, out)

        self._range = AddressRange([num_bytes for _, num_bytes in files], opened, read=read if plain_reads else None)
        self._bytes = self._range.bytes_view()
        self._begin = {name: np.zeros(len(files), dtype=np.int64) for name in columns}  # of each tensor: offset in the range
        self._body = np.zeros(len(files), dtype=np.int64)  # of the first page: offset in the range
        self._first_page = np.cumsum([0, *(num_bytes // PAGE_BYTES + 1 for _, num_bytes in files)])
        try:
            self._is_checked = np.zeros(int(self._first_page[-1]), dtype=bool)
        except MemoryError as error:
            raise StoreError(f"the sidecars of {len(files)} shards are said to have {self._range.num_bytes} bytes") from error
        self._is_open = np.zeros(len(files), dtype=bool)

    def open(self, shard: NDArray[np.int64]) -> None:
        """Map the files of some shards, `[B]`, and check their headers, unless already done."""
        if self._is_open[shard].all():
            return
        new = np.unique(shard[~self._is_open[shard]]).tolist()
        if self._fetch is not None:
            self._fetch(new)
        for ordinal in new:
            self._range.map(np.array([ordinal]))  # or reads it into its place
            path, num_bytes = self._paths[ordinal]
            begin = int(self._range.first_byte[ordinal])
            file = PagedFile.over(path, self._bytes[begin : begin + num_bytes].data, self._kind)
            self._check_opened(ordinal, file)
            for name in self._columns:
                item_bytes = file.column(name).itemsize
                if file.begin(name) % item_bytes or (file.begin(name) - file.body_begin) % item_bytes:
                    raise CorruptError(f"{path}: the tensor {name!r} does not begin at a multiple of its items' length")
                self._begin[name][ordinal] = begin + file.begin(name)
            self._body[ordinal] = begin + file.body_begin
            self._files[ordinal] = file
            self._is_open[ordinal] = True

    def file(self, ordinal: int) -> PagedFile:
        """Return a shard's sidecar."""
        self.open(np.array([ordinal]))
        return self._files[ordinal]

    def unchecked(self, name: str, shard: NDArray[np.int64], at: NDArray[np.int64], dtype: np.dtype[Any]) -> NDArray[Any]:
        """Return values of a tensor, `[B]`, possibly from unchecked pages: for searches, proved by `checked`."""
        values: NDArray[Any] = self._bytes.view(dtype)[self._begin[name][shard] // dtype.itemsize + at]
        return values

    def checked(self, name: str, shard: NDArray[np.int64], at: NDArray[np.int64], dtype: np.dtype[Any]) -> NDArray[Any]:
        """Return values of a tensor, `[B]`, after checking their pages."""
        page = (self._begin[name][shard] + at * dtype.itemsize - self._body[shard]) // PAGE_BYTES
        place = self._first_page[shard] + page
        if not self._is_checked[place].all():
            new = ~self._is_checked[place]
            for ordinal in np.unique(shard[new]).tolist():
                self._files[ordinal].check(np.unique(page[new & (shard == ordinal)]))
            self._is_checked[place] = True
        return self.unchecked(name, shard, at, dtype)
