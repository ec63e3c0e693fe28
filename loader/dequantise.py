"""Quantised tokens as F16, on any device, in one expression that compiles.

It gives the bits that `store.format.text_codec` defines. Letters: B rows, L tokens (padded), D token width, S scales.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from bucketline.store.format.text_codec import GROUP

if TYPE_CHECKING:
    from torch import Tensor

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
