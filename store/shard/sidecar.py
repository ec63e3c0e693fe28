"""The sidecar of a shard, and other small safetensors files: mapped, and checked whole when they are opened.

The first tensor, `checksum`, holds the checksum of the header and that of all that follows this tensor, so that a file that no
manifest lists yet proves itself. One that a manifest lists is compared with the digest there instead.
"""

from __future__ import annotations

import json
import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from bucketline.errors import CorruptError, StoreError
from bucketline.files.paths import open_regular
from bucketline.forks import cached_property
from bucketline.store.format.block import (
    CHECKSUM,
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
from bucketline.store.format.manifest import dropped_path
from bucketline.store.shard.mapped import AddressRange, distinct

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path
    from typing import TypeAlias

    from numpy.typing import NDArray

    from bucketline.store.format.manifest import FileEntry, Manifest, ShardEntry, ShardPaths

    Read: TypeAlias = Callable[[Path, FileEntry], bytes]


def encode_sidecar(tensors: Sequence[tuple[str, str, NDArray[Any]]], metadata: Mapping[str, object]) -> bytes:
    """Return the file's bytes. Tensors are (name, dtype, values) in descending item size; metadata values become JSON."""
    body = b"".join(np.ascontiguousarray(values, dtype=DTYPES[dtype]).tobytes() for _, dtype, values in tensors)
    placed = lay_out([(CHECKSUM, "U64", (2,)), *((name, dtype, values.shape) for name, dtype, values in tensors)])
    texts = {key: json.dumps(value, separators=(",", ":")) for key, value in metadata.items()}
    header = write_header(placed, texts, header_bytes_for(placed, texts))
    return header + np.array([checksum(header), checksum(body)], dtype="<u8").tobytes() + body


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


def read_listed(path: Path, listed: FileEntry) -> bytes:
    """Return the bytes of a file that the manifest lists, with plain reads; they are not compared yet."""
    data = bytearray(listed.num_bytes)
    with open_listed(path, listed.num_bytes) as fd:
        read_exactly(path, fd, 0, memoryview(data))
    return bytes(data)


def refuse_other(path: Path | str, data: bytes | memoryview, listed: FileEntry) -> None:
    """Check that a file's bytes are those that the manifest lists."""
    if (len(data), found := bytes_digest(data)) != (listed.num_bytes, listed.digest):
        raise CorruptError(
            f"{path} is not the file that the manifest lists: its digest is {found}, expected {listed.digest}; restore the "
            "file that belongs there, or run `store verify`"
        )


class Sidecar:
    """An open sidecar, checked whole."""

    def __init__(self, path: Path | str, data: bytes | memoryview, kind: str, listed: FileEntry | None = None) -> None:
        """Check the bytes of a file, which is mapped or read; `path` is what errors name: it may be a URL.

        `listed` is what the manifest says of the file; without it, the file's own checksums are compared.
        """
        self.path, self._data = path, memoryview(data).toreadonly()
        if listed is not None:
            refuse_other(path, self._data, listed)
        if not len(data):
            raise CorruptError(f"{path} is empty")
        tensors, self._texts, self._data_at = read_header(self._data[: LENGTH_BYTES + MAX_HEADER_BYTES], len(data), str(path))
        self._tensors: dict[str, Tensor] = {tensor.name: tensor for tensor in tensors}
        if self.about("format") != kind or not tensors or tensors[0].name != CHECKSUM:
            raise CorruptError(f"{path} is not a {kind} file")
        if listed is None:
            parts = self._data[: self._data_at], self._data[self._data_at + tensors[0].end :]
            if self.column(CHECKSUM).tolist() != [checksum(part) for part in parts]:
                raise CorruptError(f"{path} does not match its checksums")

    @property
    def metadata(self) -> dict[str, Any]:
        return {key: self.about(key) for key in self._texts}

    def about(self, key: str) -> Any:  # noqa: ANN401 - parsed JSON
        """Return a value of the metadata, None if it is not there. All of them may be a thousand buckets' columns."""
        try:
            return json.loads(self._texts.get(key, "null"))
        except (ValueError, RecursionError) as error:
            raise CorruptError(f"{self.path}: its metadata is not JSON") from error

    def tensor(self, name: str) -> Tensor:
        """Return a tensor's place and form."""
        if name not in self._tensors:
            raise CorruptError(f"{self.path} lacks the tensor {name!r}")
        return self._tensors[name]

    def begin(self, name: str) -> int:
        """Return a tensor's byte offset in the file."""
        return self._data_at + self.tensor(name).begin

    def column(self, name: str) -> NDArray[Any]:
        """Return a tensor as a view of the file."""
        tensor, dtype = self.tensor(name), DTYPES[self.tensor(name).dtype]
        count, begin = tensor.num_bytes // dtype.itemsize, self._data_at + tensor.begin
        try:
            values = np.frombuffer(self._data, dtype=dtype, count=count, offset=begin).reshape(tensor.shape)
        except ValueError as error:  # a shape that numpy refuses, even with few items
            raise CorruptError(f"{self.path}: the tensor {name!r} has an impossible shape") from error
        if values.ndim == 0:
            raise CorruptError(f"{self.path}: the tensor {name!r} is a single value, expected a list")
        return values


class Sidecars:
    """The files of one kind, by shard. Letters: B requested values, each with a shard `[B]` and an index `[B]` in its file."""

    def __init__(
        self,
        kind: str,
        columns: Sequence[str],
        files: Sequence[tuple[ShardPaths, FileEntry]],
        check: Callable[[int, Sidecar], None],
        *,
        plain_reads: bool,
        fetch: Callable[[Sequence[int]], None] | None = None,
    ) -> None:
        """Reserve addresses, or memory with `plain_reads`; nothing is opened yet.

        `files` has each shard's paths, and the file's entry; `columns` the tensors to read, all of one dtype. `check` is called
        with a shard's ordinal and file when it is opened, `fetch` before files are opened, with their shards' ordinals.
        """
        self._fetch = fetch
        self._kind, self._columns, self._listed, self._check_opened = kind, columns, files, check
        self._files: dict[int, Sidecar] = {}
        sizes = [listed.num_bytes for _, listed in files]

        def opened(ordinal: int) -> AbstractContextManager[int]:
            return open_listed(files[ordinal][0].meta, sizes[ordinal])

        def read(ordinal: int, fd: int, out: memoryview) -> None:
            read_exactly(files[ordinal][0].meta, fd, 0, out)

        self._range = AddressRange(sizes, opened, read=read if plain_reads else None)
        self._bytes = self._range.bytes_view()
        self._begin = {name: np.zeros(len(files), dtype=np.int64) for name in columns}  # of each tensor: offset in the range
        self._is_open = np.zeros(len(files), dtype=bool)

    def open(self, shard: NDArray[np.int64]) -> None:
        """Map and check the files of some shards, `[B]`, unless already done."""
        if self._is_open[shard].all():
            return
        missing = distinct(shard[~self._is_open[shard]])
        if self._fetch is not None:
            self._fetch(missing.tolist())
        self._range.map(missing)  # or reads them into their places
        for ordinal in missing.tolist():
            paths, listed = self._listed[ordinal]
            begin = int(self._range.first_byte[ordinal])
            file = Sidecar(paths.meta, self._bytes[begin : begin + listed.num_bytes].data, self._kind, listed)
            self._check_opened(ordinal, file)
            for name in self._columns:
                if file.begin(name) % DTYPES[file.tensor(name).dtype].itemsize:
                    raise CorruptError(f"{file.path}: the tensor {name!r} does not begin at a multiple of its items' length")
                self._begin[name][ordinal] = begin + file.begin(name)
            self._files[ordinal] = file
            self._is_open[ordinal] = True

    def file(self, ordinal: int) -> Sidecar:
        self.open(np.array([ordinal]))
        return self._files[ordinal]

    def values(self, name: str, shard: NDArray[np.int64], at: NDArray[np.int64], dtype: np.dtype[Any]) -> NDArray[Any]:
        """Return values of a tensor of files that are open, `[B]`."""
        found: NDArray[Any] = self._bytes.view(dtype)[self._begin[name][shard] // dtype.itemsize + at]
        return found


# ------------------------------------------------------------------------------------------------------------- dropped rows
# The dropped rows of a generation: one file for all of its shards, `generations/G-DIGEST.dropped`, checked whole when read.

DROPPED_FORMAT = "bucketline.dropped/1"
_NONE = np.empty(0, dtype="<u4")


def encode_dropped(rows: Sequence[NDArray[np.uint32]]) -> bytes:
    """Return the file's bytes, given the sorted rows of each shard's buckets: shards in the manifest's order, then buckets."""
    joined, about = np.concatenate(rows).astype("<u4"), {"format": DROPPED_FORMAT}
    placed = lay_out([("rows", "U32", joined.shape)])
    return write_header(placed, about, header_bytes_for(placed, about)) + joined.tobytes()


class DroppedRows:
    """The dropped rows of one generation. The file is read at the first request; in object storage, by one GET."""

    def __init__(self, store: Path, manifest: Manifest, read: Read | None = None) -> None:
        """Open nothing yet. `store`: the folder of the store's files on this machine; `read`: from object storage."""
        self._listed, self._read, self._shards = manifest.dropped, read or read_listed, manifest.shards
        self.path = None if self._listed is None else dropped_path(store, self._listed)

    def of(self, shard: str, group: str) -> NDArray[np.uint32]:
        """Return the sorted row numbers of a bucket's dropped rows in a shard, by its name.

        Raises:
            StoreError: if the file is missing or cannot be read.
            CorruptError: if it is not the file that the manifest lists.
        """
        first, count = self._places.get(shard, {}).get(group, (0, 0))
        return self._rows[first : first + count] if count else _NONE

    @cached_property
    def _places(self) -> dict[str, dict[str, tuple[int, int]]]:
        """Return the first position and the count of each bucket's rows in the file, by shard."""
        places: dict[str, dict[str, tuple[int, int]]] = {}
        at = 0
        for entry in self._shards:
            for group, count in dropped_counts(entry):
                places.setdefault(entry.name, {})[group] = at, count
                at += count
        return places

    @cached_property
    def _rows(self) -> NDArray[np.uint32]:
        """Return all rows, checked: sorted and existing in each bucket of each shard."""
        assert self._listed is not None
        assert self.path is not None
        data = self._read(self.path, self._listed)
        if (found := bytes_digest(memoryview(data))) != self._listed.digest:
            raise CorruptError(
                f"{self.path} is not the file that the manifest lists: its digest is {found}; restore it from a copy of the "
                "store, or `store restore` an earlier generation: `store repair` drops every shard with dropped rows"
            )
        head = memoryview(data)[: LENGTH_BYTES + MAX_HEADER_BYTES]
        tensors, about, begin = read_header(head, len(data), str(self.path))
        places = [(entry.groups[group].rows, count) for entry in self._shards for group, count in dropped_counts(entry)]
        limits, counts = np.array(places, dtype=np.int64).T
        form = [(own.name, own.dtype, tuple(own.shape)) for own in tensors]
        if about.get("format") != DROPPED_FORMAT or form != [("rows", "U32", (int(counts.sum()),))]:
            raise CorruptError(f"{self.path} does not have the {int(counts.sum())} rows that the manifest says are dropped")
        rows = np.frombuffer(data, dtype="<u4", offset=begin)
        ends = np.cumsum(counts)
        is_next = np.ones(len(rows), dtype=bool)
        is_next[1:] = rows[1:] > rows[:-1]
        is_next[(ends - counts)] = True
        if not is_next.all() or (rows[ends - 1] >= limits).any():
            raise CorruptError(f"{self.path}: its rows are not in order, or do not exist")
        return rows


def dropped_counts(entry: ShardEntry) -> list[tuple[str, int]]:
    """Return a shard's buckets with dropped rows and how many these are, in the file's order."""
    return [(name, group.dropped) for name, group in sorted(entry.groups.items()) if group.dropped]
