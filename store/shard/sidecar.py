"""A shard's small sidecar files (extents, index, dropped rows): mapped safetensors, checked page by page on first access.

Opening reads only the header, so that its cost is independent of the number of rows; with plain reads, the complete file is
read and nothing is mapped. The first tensor, `page_checksum`, holds the header's checksum and one per 4,096 bytes of what
follows it. A value is used only after its page has been checked.
"""

from __future__ import annotations

import json
import os
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from bucketline.errors import CorruptError, StoreError
from bucketline.files.paths import open_regular
from bucketline.store.format.block import (
    DTYPES,
    LENGTH_BYTES,
    MAX_HEADER_BYTES,
    Tensor,
    bytes_digest,
    checksum,
    header_bytes_for,
    lay_out,
    read_header,
    write_header,
)
from bucketline.store.shard import mapped
from bucketline.store.shard.mapped import AddressRange, MapRefusedError, map_file

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from numpy.typing import NDArray

PAGE_BYTES = 4096
PAGE_CHECKSUM = "page_checksum"


def encode_paged(tensors: Sequence[tuple[str, str, NDArray[Any]]], metadata: Mapping[str, object]) -> bytes:
    """Return the file's bytes. Tensors are (name, dtype, values) in descending item size; metadata values become JSON."""
    body = b"".join(np.ascontiguousarray(values, dtype=DTYPES[dtype]).tobytes() for _, dtype, values in tensors)
    num_pages = -(-len(body) // PAGE_BYTES)
    placed = lay_out(
        [(PAGE_CHECKSUM, "U64", (1 + num_pages,)), *((name, dtype, values.shape) for name, dtype, values in tensors)]
    )
    texts = {key: json.dumps(value, separators=(",", ":")) for key, value in metadata.items()}
    header = write_header(placed, texts, header_bytes_for(placed, texts))
    sums = [checksum(header), *(checksum(body[at : at + PAGE_BYTES]) for at in range(0, len(body), PAGE_BYTES))]
    return header + np.array(sums, dtype="<u8").tobytes() + body


@contextmanager
def open_listed(path: Path, expected_bytes: int | None) -> Iterator[int]:
    """Yield the descriptor of a file that the manifest lists, after checking its length, unless that is None."""
    try:
        fd = open_regular(path)
    except FileNotFoundError as error:
        raise StoreError(
            f"{path} is missing, the manifest lists it; restore it, reopen the store if `store compact --gc` removed it, "
            "or run `store repair` and pack again"
        ) from error
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error.strerror}") from error
    try:
        found = os.fstat(fd).st_size
        if expected_bytes not in (None, found):
            raise CorruptError(
                f"{path} has {found} bytes, the manifest says {expected_bytes}; "
                "restore it, or run `store repair` and pack again"
            )
        yield fd
    finally:
        os.close(fd)


def read_exactly(path: Path, fd: int, offset: int, out: memoryview) -> None:
    """Fill `out` with a file's bytes from `offset`, with plain reads: a failing medium raises an error."""
    done = 0
    try:
        while done < len(out) and (count := os.preadv(fd, [out[done:]], offset + done)):
            done += count
    except OSError as error:
        raise StoreError(
            f"{path} cannot be read at byte {offset + done}: {error.strerror}; the medium may be failing"
        ) from error
    if done != len(out):
        raise CorruptError(f"{path} ends at byte {offset + done}, expected at least {offset + len(out)}")


class PagedFile:
    """An open sidecar. `take` and `slice` check the pages that they read."""

    def __init__(self, path: Path, expected_bytes: int, kind: str, *, plain_reads: bool = False) -> None:
        """Map the file and check its header; with `plain_reads`, or if no more maps are allowed, read it instead."""
        with open_listed(path, expected_bytes) as fd:
            if expected_bytes == 0:
                raise CorruptError(f"{path} is empty")
            data: memoryview | None = None
            if not plain_reads and mapped.may_map_one():
                with suppress(MapRefusedError):
                    data = map_file(fd, expected_bytes)
            if data is None:
                data = memoryview(bytearray(expected_bytes))
                read_exactly(path, fd, 0, data)
            self._read(path, data.toreadonly(), kind)

    @classmethod
    def over(cls, path: Path | str, data: memoryview, kind: str) -> PagedFile:
        """Return the sidecar in `data`, a file that is mapped already. `path` is what errors name: it may be a URL."""
        file = cls.__new__(cls)
        file._read(path, data, kind)
        return file

    def _read(self, path: Path | str, data: memoryview, kind: str) -> None:
        self.path, self._map = path, data
        tensors, texts, self._data_at = read_header(data[: LENGTH_BYTES + MAX_HEADER_BYTES], len(data), str(path))
        try:
            self.metadata: dict[str, Any] = {key: json.loads(text) for key, text in texts.items()}
        except (ValueError, RecursionError) as error:
            raise CorruptError(f"{path}: its metadata is not JSON") from error
        if self.metadata.get("format") != kind or not tensors or tensors[0].name != PAGE_CHECKSUM:
            raise CorruptError(f"{path} is not a {kind} file")
        self._tensors: dict[str, Tensor] = {tensor.name: tensor for tensor in tensors}
        self._body_at = tensors[0].end
        self.body_begin = self._data_at + tensors[0].end  # file offset of the first page
        sums = self._values(tensors[0])
        num_pages = -(-(tensors[-1].end - self._body_at) // PAGE_BYTES)
        if len(sums) != 1 + num_pages:
            raise CorruptError(f"{path} has {len(sums)} checksums for its header and {num_pages} pages")
        if checksum(self._map[: self._data_at]) != int(sums[0]):
            raise CorruptError(f"{path}: its header does not match its checksum; run `store verify`")
        self._pages = sums[1:]
        self._checked = np.zeros(num_pages, dtype=bool)
        self._num_unchecked = num_pages
        self._columns = {tensor.name: self._values(tensor) for tensor in tensors}
        for name, values in self._columns.items():
            if values.ndim == 0:
                raise CorruptError(f"{path}: the tensor {name!r} is a single value, expected a list")

    def __len__(self) -> int:
        return len(self._map)

    def digest(self) -> str:
        """Return the digest of the complete file; reads all of it."""
        return bytes_digest(self._map)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._columns)

    def has(self, name: str) -> bool:
        return name in self._columns

    def begin(self, name: str) -> int:
        """Return a tensor's byte offset in the file."""
        self.column(name)
        return self._data_at + self._tensors[name].begin

    def column(self, name: str) -> NDArray[Any]:
        """Return a tensor as an *unchecked* view, for searches; the caller proves the result with `take`."""
        if name not in self._columns:
            raise CorruptError(f"{self.path} lacks the tensor {name!r}")
        return self._columns[name]

    def take(self, name: str, at: NDArray[np.int64]) -> NDArray[Any]:
        """Return a copy of a tensor's entries `at` (along the first axis), after checking their pages."""
        values = self.column(name)
        if self._num_unchecked and len(at):
            tensor = self._tensors[name]
            item_bytes = tensor.num_bytes // len(values)
            first = tensor.begin - self._body_at + at * item_bytes
            self.check(np.unique(np.concatenate([first, first + item_bytes - 1]) // PAGE_BYTES))
        taken: NDArray[Any] = values[at]
        return taken

    def slice(self, name: str, begin: int, end: int) -> NDArray[Any]:
        """Return a tensor's entries `begin` to `end` as a view, after checking their pages."""
        values = self.column(name)
        if self._num_unchecked and end > begin:
            tensor = self._tensors[name]
            item_bytes = tensor.num_bytes // len(values)
            at = tensor.begin - self._body_at
            self.check(np.arange((at + begin * item_bytes) // PAGE_BYTES, (at + end * item_bytes - 1) // PAGE_BYTES + 1))
        part: NDArray[Any] = values[begin:end]
        return part

    def _values(self, tensor: Tensor) -> NDArray[Any]:
        dtype = DTYPES[tensor.dtype]
        count = tensor.num_bytes // dtype.itemsize
        try:
            values = np.frombuffer(self._map, dtype=dtype, count=count, offset=self._data_at + tensor.begin)
            return values.reshape(tensor.shape)
        except ValueError as error:  # a shape that numpy refuses, even with few items
            raise CorruptError(f"{self.path}: the tensor {tensor.name!r} has an impossible shape") from error

    def check_all(self) -> None:
        self.check(np.arange(len(self._pages)))

    def check(self, pages: NDArray[np.int64]) -> None:
        """Verify the checksums of pages that have not been checked yet."""
        for page in pages[~self._checked[pages]]:
            begin = self._data_at + self._body_at + int(page) * PAGE_BYTES
            if checksum(self._map[begin : begin + PAGE_BYTES]) != int(self._pages[page]):
                raise CorruptError(f"{self.path}: page {int(page)} does not match its checksum; run `store verify`")
            self._checked[page] = True
        # recounted, not decremented: threads that check the same page would count it twice
        self._num_unchecked = int(np.count_nonzero(~self._checked))


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
