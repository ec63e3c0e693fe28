"""Small sidecar files of a shard (extents, index, dropped rows): safetensors, mapped, each page checked at first touch.

Opening reads the header alone, so that its cost does not grow with the rows. The first tensor, `page_checksum`, holds the
header's checksum and one for every 4,096 bytes of what follows it; a value is used only after its page has been compared.
"""

from __future__ import annotations

import json
import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from bucketline.errors import CorruptError, StoreError
from bucketline.store.address_range import map_file
from bucketline.store.digests import checksum
from bucketline.store.tensor_file import (
    DTYPES,
    LENGTH_BYTES,
    MAX_HEADER_BYTES,
    Tensor,
    header_bytes_for,
    lay_out,
    read_header,
    write_header,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

OPEN_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK  # the last, so that a pipe in the place of a file is no wait
PAGE_BYTES = 4096
PAGE_CHECKSUM = "page_checksum"


def encode_paged(tensors: Sequence[tuple[str, str, NDArray[Any]]], metadata: Mapping[str, object]) -> bytes:
    """Give the file's bytes; tensors are (name, dtype, values), in descending item size; metadata values become JSON."""
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
def open_sidecar(path: Path, expected_bytes: int) -> Iterator[int]:
    """Open a file for a moment, to map it.

    Raises:
        StoreError: where the file is missing.
        CorruptError: where its length is not the manifest's.
    """
    try:
        fd = os.open(path, OPEN_FLAGS)
    except FileNotFoundError as error:
        raise StoreError(
            f"{path} is missing, the manifest lists it; restore it, open the store anew if `store compact --gc` removed it, "
            "or pack the source again into a new store"
        ) from error
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error.strerror}") from error
    try:
        found = os.fstat(fd).st_size
        if found != expected_bytes:
            raise CorruptError(f"{path} has {found} bytes, the manifest says {expected_bytes}")
        yield fd
    finally:
        os.close(fd)


class PagedFile:
    """An open sidecar. Values are read through `take` and `slice`, which check what they touch."""

    def __init__(self, path: Path, expected_bytes: int, kind: str) -> None:
        """Map the file and read its header.

        Raises:
            StoreError: where the file is missing.
            CorruptError: where its length is not the manifest's, or its header not that of a `kind` file.
        """
        with open_sidecar(path, expected_bytes) as fd:
            if expected_bytes == 0:
                raise CorruptError(f"{path} is empty")
            self._read(path, map_file(fd, expected_bytes), kind)

    @classmethod
    def over(cls, path: Path, data: memoryview, kind: str) -> PagedFile:
        """Read the header of a file that is mapped already, as `data`.

        Raises:
            CorruptError: where its header is not that of a `kind` file.
        """
        file = cls.__new__(cls)
        file._read(path, data, kind)
        return file

    def _read(self, path: Path, data: memoryview, kind: str) -> None:
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
        self.body_begin = self._data_at + tensors[0].end  # the byte of the file at which the pages begin
        sums = self._values(tensors[0])
        num_pages = -(-(tensors[-1].end - self._body_at) // PAGE_BYTES)
        if len(sums) != 1 + num_pages:
            raise CorruptError(f"{path} has {len(sums)} checksums for its header and {num_pages} pages")
        if checksum(self._map[: self._data_at]) != int(sums[0]):
            raise CorruptError(f"{path}: its header is not what was written; run `store verify`")
        self._pages = sums[1:]
        self._checked = np.zeros(num_pages, dtype=bool)
        self._num_unchecked = num_pages
        self._columns = {tensor.name: self._values(tensor) for tensor in tensors}
        for name, values in self._columns.items():
            if values.ndim == 0:
                raise CorruptError(f"{path}: the tensor {name!r} is a single value, expected a list")

    def __len__(self) -> int:
        return len(self._map)

    def begin(self, name: str) -> int:
        """Give the byte of the file at which a tensor begins."""
        self.column(name)
        return self._data_at + self._tensors[name].begin

    def column(self, name: str) -> NDArray[Any]:
        """Give a tensor as a view of the map, *unchecked*: for searches, whose outcome the caller proves by `take`."""
        if name not in self._columns:
            raise CorruptError(f"{self.path} lacks the tensor {name!r}")
        return self._columns[name]

    def take(self, name: str, at: NDArray[np.int64]) -> NDArray[Any]:
        """Give the entries `at` of a tensor (along its first axis), copied, after checking their pages."""
        values = self.column(name)
        if self._num_unchecked and len(at):
            tensor = self._tensors[name]
            item_bytes = tensor.num_bytes // len(values)
            first = tensor.begin - self._body_at + at * item_bytes
            self.check(np.unique(np.concatenate([first, first + item_bytes - 1]) // PAGE_BYTES))
        taken: NDArray[Any] = values[at]
        return taken

    def slice(self, name: str, begin: int, end: int) -> NDArray[Any]:
        """Give the entries `begin` to `end` of a tensor as a view, after checking their pages."""
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
        except ValueError as error:  # a shape that numpy refuses, however few items it has
            raise CorruptError(f"{self.path}: the tensor {tensor.name!r} has an impossible shape") from error

    def check(self, pages: NDArray[np.int64]) -> None:
        """Compare some pages with their checksums, those that have not been yet.

        Raises:
            CorruptError: naming the first page that is not what was written.
        """
        for page in pages[~self._checked[pages]]:
            begin = self._data_at + self._body_at + int(page) * PAGE_BYTES
            if checksum(self._map[begin : begin + PAGE_BYTES]) != int(self._pages[page]):
                raise CorruptError(f"{self.path}: page {int(page)} is not what was written; run `store verify`")
            self._checked[page] = True
        # counted anew, not counted down: threads that check the same page would count it twice
        self._num_unchecked = int(np.count_nonzero(~self._checked))
