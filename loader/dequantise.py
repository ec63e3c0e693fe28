"""Quantised tokens as F16: on any device, in one expression that compiles; and on the CPU, in a batch's buffer.

Both give the bits that `store.format.text_codec` defines. Letters: B rows, L tokens (padded), D token width, S scales.
"""

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
_F16_OF_E4M3 = 256.0  # F8_E4M3's bits, moved into the places of F16's, are 2⁻⁸ times the value


def dequantised(tokens: Tensor, scale: Tensor) -> Tensor:
    """Return quantised tokens, `[B, L, D]` int8 or uint8 (the bits of F8_E4M3), times their scales, `[B, L, S]`, as float16."""
    if tokens.dtype is torch.uint8:
        bits = tokens.int()
        halves = ((bits & 0x7F) << 7 | (bits & 0x80) << 8).to(torch.int16).view(torch.float16)
        return (halves.float() * _F16_OF_E4M3 * scale).half()
    each = scale.float().unsqueeze(-1)
    if tokens.shape[-1] % GROUP == 0:
        return (tokens.float().view(*scale.shape, GROUP) * each).flatten(-2).half()
    return (tokens.float() * each.expand(*scale.shape, GROUP).flatten(-2)[..., : tokens.shape[-1]]).half()


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
