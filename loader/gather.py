"""Rows out of the store's memory map into a slab: one native call per column and batch, over all shards at once.

The map is seen as `as_strided((positions, row_elements), (1, 1))`, a matrix whose row i is the row that begins at element
i; `torch.index_select` on it copies any set of rows, wherever they lie, and holds no lock of Python's meanwhile.
"""

from __future__ import annotations

import math
import warnings
from typing import TYPE_CHECKING

import numpy as np
import torch

from bucketline.errors import CorruptError
from bucketline.store.address_range import ZERO_BYTES, AddressRange
from bucketline.store.block import CAPTIONS

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from bucketline.store import Column, Store
    from bucketline.store.reader import Located

TORCH_DTYPES = {
    "F64": torch.float64,
    "I64": torch.int64,
    "U64": torch.int64,
    "F32": torch.float32,
    "I32": torch.int32,
    "U32": torch.int32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I16": torch.int16,
    "U16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class Gather:
    """Gathers rows and captions of one open store. Maps shards as they are first needed."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._range = AddressRange(store.shards)
        view = self._range.bytes_view()
        view.flags.writeable = False
        self._bytes = _as_tensor(view)

    def rows(self, located: Located, column: Column, out: Tensor) -> None:
        """Copy one column of some rows into `out`, `[B, …]` contiguous, of the column's dtype."""
        self._range.map(located.shard)
        spec = self._store.manifest.specs[located.bucket]
        begin = self._range.first_byte[located.shard] + located.offsets(spec, column.name)
        self._select(begin, column.item_bytes, math.prod(column.shape), out)

    def caption_rows(self, located: Located) -> NDArray[np.int64]:
        """Read the caption rows of some rows, `[B, V]`, -1 where a sample has fewer."""
        column = self._store.manifest.specs[located.bucket].column(CAPTIONS)
        out = torch.empty((len(located.row), *column.shape), dtype=torch.int32)
        self.rows(located, column, out)
        return out.numpy().astype(np.int64)

    def tokens(self, shard: NDArray[np.int64], caption: NDArray[np.int64], column: Column, out: Tensor, mask: Tensor) -> None:
        """Copy captions' tokens into `out`, `[B, L, D]`, zeros beyond each caption's own, and say which are, `[B, L]` bool.

        Raises:
            CorruptError: where a caption's `starts` are impossible, or it has more than L tokens.
        """
        self._range.map(shard)
        located = self._store.locate_captions(shard, caption)
        first_byte = self._range.first_byte[shard]
        starts = torch.empty((len(shard), 2), dtype=torch.int64)
        self._select(first_byte + located.starts_offsets(), 8, 2, starts)
        first, end = starts.numpy().T
        length = out.shape[1]
        bad = (first < 0) | (end < first) | (end > located.tokens) | (end - first > length)
        if bad.any():
            at = int(np.argmax(bad))
            name = self._store.shards[shard[at]].name
            raise CorruptError(
                f"shard {name}: caption {int(caption[at])} has the `starts` {int(first[at])} and {int(end[at])} "
                f"in a block of {int(located.tokens[at])} tokens, at most {length} to a caption; run `store verify`"
            )
        token = np.arange(length, dtype=np.int64)
        present = token < (end - first)[:, None]
        begin = first_byte + self._store.token_offsets(located, column.name, first)
        # the range begins with zeros: a padding token is gathered from there
        offsets = np.where(present, begin[:, None] + token * column.row_bytes, 0)
        mask.copy_(torch.from_numpy(present))
        self._select(offsets.reshape(-1), column.item_bytes, math.prod(column.shape), out)

    def _select(self, begin: NDArray[np.int64], item_bytes: int, row_elements: int, out: Tensor) -> None:
        if row_elements * item_bytes > ZERO_BYTES and not begin.all():
            raise AssertionError(f"a row of {row_elements} items of {item_bytes} bytes is longer than the zeros for padding")
        if (begin % item_bytes).any():
            # a block of less than half a page lies inside one of LMDB's leaf pages, aligned to two bytes only
            item_bytes, row_elements = 1, row_elements * item_bytes
        dtype = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[item_bytes]
        items = self._bytes.view(dtype)
        matrix = items.as_strided((items.numel() - row_elements + 1, row_elements), (1, 1))
        index = torch.from_numpy(begin // item_bytes)
        torch.index_select(matrix, 0, index, out=out.view(dtype).view(len(begin), row_elements))


def _as_tensor(view: NDArray[np.uint8]) -> Tensor:
    """Make a tensor over memory that is only ever read; torch warns of read-only arrays, which has no bearing here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.from_numpy(view)
