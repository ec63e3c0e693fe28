"""Gathering rows from the store's memory map into a buffer: one native call per column and batch, over all shards at once.

The map is viewed as `as_strided((positions, chunk), (1, 1))`, a matrix whose row i is the chunk that begins at item i.
`torch.index_select` on it copies any set of chunks from anywhere in the map, without holding Python's lock.

Plain reads replace the map for all rows if the system refuses the map, and for large columns that come from the disk, where
filling in the map's page tables costs more than copying (docs/NEGATIVE_RESULTS.md). They return the same bytes.
Letters: B rows, V maximum captions per sample, L tokens (padded).
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from bucketline.errors import StoreError
from bucketline.forks import ForkSafeLock
from bucketline.store.read.files import FileGather
from bucketline.store.shard import mapped
from bucketline.store.shard.mapped import ZERO_BYTES, AddressRange, MapRefusedError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    from numpy.typing import NDArray
    from torch import Tensor

    from bucketline.loader.mixture import Mixture
    from bucketline.store import Column, Store
    from bucketline.store.shard.row_locator import Located, LocatedEntries

_SMALL_BYTES = 4096  # columns with fewer bytes per row are stored together in a few pages of their block
MAX_CHUNK_ITEMS = 16384  # of one copy; see `_chunk_items`
_ITEMS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}  # used only for copying
_NUMPY_ITEMS = {size: torch.empty(0, dtype=dtype).numpy().dtype for size, dtype in _ITEMS.items()}


class Gather:
    """Copies values of one open store's rows and captions. Maps each shard on first use."""

    def __init__(self, store: Store | Mixture, *, plain_reads: bool = False) -> None:
        """Reserve addresses for all files. With `plain_reads`, or if the system refuses, use plain reads for everything."""
        self._store = store
        self._is_mapped = np.ones(len(store.files), dtype=bool)  # False once the system refuses a shard's map
        self._is_known = np.zeros(len(store.files), dtype=bool)
        self._are_all_mapped = False
        self._is_refused = False
        self._forms: dict[tuple[int, int], _Form] = {}
        self._mapping = ForkSafeLock()  # several threads may use a shard for the first time
        files = store.files

        def opened(ordinal: int) -> AbstractContextManager[int]:
            return files[ordinal].opened()

        if not plain_reads and not mapped.fits(len(files)):
            self._warn(mapped.advice(len(files)))
            plain_reads = True
        try:
            self._range = AddressRange([] if plain_reads else [file.entry.lmdb.num_bytes for file in files], opened)
        except StoreError as error:
            self._warn(str(error))
            self._range, plain_reads = AddressRange([], opened), True
        self.files = FileGather(store, keep_open=not plain_reads)  # on a medium that may fail, it sees that a file is gone
        if plain_reads:
            self._is_mapped[:], self._is_known[:] = False, True
        view = self._range.bytes_view()
        view.flags.writeable = False
        self._bytes = _as_tensor(view)

    def _warn(self, reason: str) -> None:
        warnings.warn(f"{self._store.where} is read with plain reads, which are slower: {reason}", stacklevel=3)

    def map(self, shard: NDArray[np.int64]) -> bool:
        """Map some shards, `[B]`; return whether all of them are mapped, so that `index_of` may be used."""
        if self._are_all_mapped:
            return True
        if not self._is_known[shard].all():
            with self._mapping:
                for ordinal in mapped.distinct(shard[~self._is_known[shard]]).tolist():
                    try:
                        self._range.map(np.array([ordinal]))
                    except MapRefusedError as error:  # other code has used up the maps since this was opened
                        self._is_mapped[ordinal] = False
                        if not self._is_refused:
                            self._warn(f"{error}; {mapped.advice(self._range.num_unmapped)}")
                        self._is_refused = True
                    self._is_known[ordinal] = True
                self._are_all_mapped = bool((self._is_known & self._is_mapped).all())
        return bool(self._is_mapped[shard].all())

    def read(self, shard: NDArray[np.int64], offsets: NDArray[np.int64], row_bytes: int) -> NDArray[np.uint8]:
        """Return equally long values at byte offsets in shards' files, `[B, row_bytes]`. `shard` and `offsets`: `[B]` each."""
        out = np.empty((len(shard), row_bytes), dtype=np.uint8)
        if not self.map(shard):
            self.files.read(shard, offsets, row_bytes, out)
        elif out.size:
            self.copy(self.index_of(shard, offsets, row_bytes), out)
        return out

    def index_of(self, shard: NDArray[np.int64], offsets: NDArray[np.int64], row_bytes: int) -> GatherIndex:
        """Return the gather index of equally long values at byte offsets, `[B]`, in mapped shards' files."""
        begin = self._range.first_byte[shard] + offsets
        form = self._form_of(begin, row_bytes)
        return GatherIndex(form=form, starts=form.starts(begin), parts=1 if form.parts is None else len(form.parts))

    def padded_index(
        self,
        shard: NDArray[np.int64],
        offsets: NDArray[np.int64],
        token_bytes: int,
        count: NDArray[np.int64],
        length: int,
    ) -> GatherIndex:
        """Return the gather index of captions at byte offsets, `[B]`: `count` tokens each, padded with zeros to `length`.

        Its rows are B x `length` tokens.
        """
        if token_bytes > ZERO_BYTES:
            raise AssertionError(f"a token of {token_bytes} bytes is longer than the zeros for padding")
        begin = self._range.first_byte[shard] + offsets
        form = self._form_of(begin, token_bytes)
        token = np.arange(length, dtype=np.int64)
        # in items, and in place: these are the largest arrays of a window
        starts = (begin >> form.shift)[:, None] + token * (token_bytes >> form.shift)
        starts *= token < count[:, None]  # the range begins with zeros
        if form.parts is not None:
            starts = starts[:, :, None] + form.parts
        parts = 1 if form.parts is None else len(form.parts)
        return GatherIndex(form=form, starts=starts.reshape(-1), parts=parts)

    def _form_of(self, begin: NDArray[np.int64], row_bytes: int) -> _Form:
        item_bytes = _item_bytes(int(np.bitwise_or.reduce(begin)) | row_bytes)
        return self._forms.get((item_bytes, row_bytes)) or self._form(item_bytes, row_bytes)

    def copy(self, gather_index: GatherIndex, memory: NDArray[np.uint8], begin: int = 0) -> None:
        """Copy the rows of a gather index into `memory`, bytes, starting at `begin`, which must be a multiple of 16."""
        # numpy makes the views, because torch would release and reacquire Python's lock for each
        form, starts = gather_index.form, gather_index.starts
        target = np.ndarray((len(starts), form.chunk), dtype=form.dtype, buffer=memory, offset=begin)
        torch.index_select(form.matrix, 0, torch.from_numpy(starts), out=torch.from_numpy(target))

    def ahead_at(self, shard: NDArray[np.int64], offsets: NDArray[np.int64], num_bytes: NDArray[np.int64] | int) -> None:
        """Ask the kernel to read bytes at offsets in shards' files, `[B]` each; return immediately."""
        if self.map(shard):
            self._range.ask_ahead(self._range.first_byte[shard] + offsets, num_bytes)

    def is_resident(self, read: PlainRead) -> bool:
        """Return whether values are in the page cache; True if they are not mapped, since readahead is impossible then."""
        if not self.map(read.shard):
            return True
        return self._range.is_resident(self._range.first_byte[read.shard] + read.offsets, read.num_bytes)

    def ahead(self, located: Located, columns: Sequence[Column] | None = None) -> None:
        """Ask the kernel to read some rows from the disk, all columns or the given ones; return immediately.

        A row's ranges are its own of each large column, and its block's small columns, as far as these are stored together with
        one that is requested.
        """
        if not self.map(located.shard):
            return
        spec = located.spec or self._store.specs[located.bucket]
        requested = spec.columns if columns is None else columns
        first_byte = self._range.first_byte[located.shard]
        for column in requested:
            if column.row_bytes >= _SMALL_BYTES:
                self._range.ask_ahead(first_byte + located.offsets(spec, column.name), column.row_bytes)
        names = {column.name for column in requested}
        for is_small, run in groupby(spec.columns, lambda column: column.row_bytes < _SMALL_BYTES):
            adjacent = list(run)
            if is_small and not names.isdisjoint(column.name for column in adjacent):
                begin = first_byte + located.data + located.rows * spec.prefix_bytes[adjacent[0].name]
                num_bytes = sum(column.row_bytes for column in adjacent) * int(located.rows.max(initial=0))
                self._range.ask_ahead(mapped.distinct(begin), num_bytes)

    def ahead_starts(self, located: LocatedEntries) -> None:
        """Ask the kernel to read captions' or entries' `starts`, which `ahead_tokens` needs, and their fixed columns."""
        if self.map(located.shard):
            first_byte = self._range.first_byte[located.shard]
            self._range.ask_ahead(mapped.distinct(first_byte + located.starts_offsets()), 16)
            for column in located.spec.delivered.fixed:
                self._range.ask_ahead(first_byte + located.fixed_offsets(column.name), column.row_bytes)

    def ahead_tokens(self, located: LocatedEntries, column: Column) -> None:
        """Ask the kernel to read captions' or entries' tokens from the disk."""
        if self.map(located.shard):
            starts = self.read(located.shard, located.starts_offsets(), 16).view("<i8")
            self._store.check_starts(located, starts, int(located.tokens.max(initial=0)))
            begin = self._range.first_byte[located.shard] + located.token_offsets(column.name, starts[:, 0])
            self._range.ask_ahead(begin, (starts[:, 1] - starts[:, 0]) * column.row_bytes)

    def _form(self, item_bytes: int, row_bytes: int) -> _Form:
        row_items = row_bytes // item_bytes
        chunk = _chunk_items(row_items)
        items = self._bytes.view(_ITEMS[item_bytes])
        form = _Form(
            shift=item_bytes.bit_length() - 1,
            parts=np.arange(0, row_items, chunk) if chunk < row_items else None,
            chunk=chunk,
            dtype=_NUMPY_ITEMS[item_bytes],
            matrix=items.as_strided((items.numel() - chunk + 1, chunk), (1, 1)),
        )
        self._forms[item_bytes, row_bytes] = form
        return form


@dataclass(frozen=True, slots=True, kw_only=True)
class _Form:
    """How to copy rows of one length and alignment."""

    shift: int  # log2 of an item's bytes
    parts: NDArray[np.int64] | None  # items from a row's start to each of its chunks; None if it is one chunk
    chunk: int  # items
    dtype: np.dtype[Any]  # of an item
    matrix: Tensor  # [positions, chunk] over the complete range

    def starts(self, begin: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the first item of each chunk of rows at these byte offsets."""
        starts = begin >> self.shift
        return starts if self.parts is None else (starts[:, None] + self.parts).reshape(-1)


@dataclass(frozen=True, slots=True, kw_only=True)
class GatherIndex:
    """Rows of one column that are ready to be copied."""

    form: _Form
    starts: NDArray[np.int64]  # [B x parts]
    parts: int  # chunks per row

    def part(self, begin: int, end: int) -> GatherIndex:
        return GatherIndex(form=self.form, starts=self.starts[begin * self.parts : end * self.parts], parts=self.parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainRead:
    """Rows of one column to be read with plain reads: the position of each one's bytes in its shard's file."""

    shard: NDArray[np.int64]  # [B]
    offsets: NDArray[np.int64]  # [B]
    num_bytes: NDArray[np.int64] | int  # per row, [B], or one length for all


def _item_bytes(bits: int) -> int:
    """Return the widest item, at most 16 bytes, that divides all addresses; `bits` is their bitwise OR."""
    return min(16, bits & -bits)


def _chunk_items(row_items: int) -> int:
    """Return the items per chunk, a divisor of a row's items. Below 32,768, torch divides rows among threads and uses `memcpy`.

    Above that, it divides each row among threads, which reaches 0.68 of memcpy on two threads instead of 0.87 and more.
    """
    least = -(-row_items // MAX_CHUNK_ITEMS)
    parts = next((parts for parts in range(least, 4 * least) if row_items % parts == 0), 1)
    return row_items // parts


def _as_tensor(view: NDArray[np.uint8]) -> Tensor:
    """Return a tensor over read-only memory, without torch's warning: nothing writes to it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.from_numpy(view)


def as_bytes(out: Tensor) -> NDArray[np.uint8]:
    """Return a tensor's memory as an array of bytes, `[B, bytes of a row]`."""
    if not out.numel():
        return np.empty((len(out), 0), dtype=np.uint8)
    return out.contiguous().view(torch.uint8).view(len(out), -1).numpy()
