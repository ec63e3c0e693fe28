"""Dequantise tokens on the CPU, in a batch's buffer. Letters: L tokens (padded), D token width, S scales."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import torch

from bucketline.loader.collate.buffer_pool import carve
from bucketline.store.format.text_codec import GROUP, e4m3_values

if TYPE_CHECKING:
    from torch import Tensor

    from bucketline.loader.collate.buffer_pool import Field

CHUNK_ITEMS = 1 << 18  # values converted at a time, so that they stay in the cache (`bench hot --text`)


class _Scratch(threading.local):
    """A thread's memory for a chunk, [CHUNK_ITEMS] float32, and for the codes of one, [CHUNK_ITEMS] int32."""

    def __init__(self) -> None:
        self.values = torch.empty(CHUNK_ITEMS, dtype=torch.float32)
        self.codes = torch.empty(CHUNK_ITEMS, dtype=torch.int32)
        self.table = torch.from_numpy(e4m3_values())


_scratch = _Scratch()


def dequantise_field(buffer: Tensor, stored: Field, scale: Field, out: Field) -> None:
    """Write a buffer's quantised tokens as float16 into the field `out`, whose upper half may be where they are stored.

    A chunk is read completely before it is written, front to back, so nothing is overwritten before it was read.
    """
    width = out.shape[-1]
    tokens, scales = (carve(buffer, [field])[field.name].flatten(0, -2) for field in (stored, scale))
    target = carve(buffer, [out])[out.name].view(-1, width)
    scales, num_tokens = scales.float(), len(tokens)
    step = max(1, CHUNK_ITEMS // width)
    for begin in range(0, num_tokens, step):
        end = min(begin + step, num_tokens)
        count = (end - begin) * width
        values = _scratch.values[:count] if count <= CHUNK_ITEMS else torch.empty(count)
        rows = values.view(end - begin, width)
        if stored.dtype is torch.uint8:
            codes = _scratch.codes[:count] if count <= CHUNK_ITEMS else torch.empty(count, dtype=torch.int32)
            codes.view(end - begin, width).copy_(tokens[begin:end])
            torch.index_select(_scratch.table, 0, codes, out=values)
            rows.mul_(scales[begin:end])
        else:
            rows.copy_(tokens[begin:end])
            _scale_groups(rows, scales[begin:end])
        target[begin:end].copy_(rows)


def _scale_groups(rows: Tensor, scales: Tensor) -> None:
    """Multiply groups of values, `[T, D]`, by their scales, `[T, S]`, in place."""
    whole = rows.shape[1] // GROUP
    if whole * GROUP == rows.shape[1]:
        rows.view(len(rows), whole, GROUP).mul_(scales.unsqueeze(-1))
    else:
        rows.mul_(scales.repeat_interleave(GROUP, dim=1)[:, : rows.shape[1]])
