"""The head of a batch for another process, and its layout in its buffer as JSON; the same in shared memory and in a frame."""

from __future__ import annotations

import functools
import json
import math
import struct
from enum import IntEnum
from typing import TYPE_CHECKING

import torch

from bucketline.loader.collate.buffer_pool import ALIGN_BYTES, Field, FilledBuffer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

HEAD = struct.Struct("<BQQQIQ")  # kind, step, micro step, epoch, length of the layout or message, bytes of tensors
_MAX_KNOWN = 1 << 12


class FrameKind(IntEnum):
    """The kind of a frame."""

    BATCH = 1
    ALIVE = 2  # nothing is ready yet
    END = 3  # with a message as of `failure_as_json`, if a failure ends the iteration


class LayoutWriter:
    """Encodes layouts, each bucket's once."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[object, bytes]] = {}  # by id; the object is kept, so that its id stays unique

    def head(self, filled: FilledBuffer, layout: bytes) -> bytes:
        """Return the head of a batch, and the layout that follows it."""
        sizes = (len(layout), filled.num_bytes)
        return HEAD.pack(FrameKind.BATCH, filled.step, filled.micro_step, filled.epoch, *sizes) + layout

    def encoded(self, filled: FilledBuffer) -> bytes:
        """Return the bucket, bytes and fields of a filled buffer."""
        known = self._known.get(id(filled.fields))
        if known is None or known[0] is not filled.fields:
            if len(self._known) > _MAX_KNOWN:
                self._known.clear()
            known = self._known[id(filled.fields)] = (filled.fields, _layout(filled))
        return known[1]


def _layout(filled: FilledBuffer) -> bytes:
    fields = [
        [field.name, str(field.dtype).removeprefix("torch."), field.shape, field.begin, field.num_bytes]
        for field in filled.fields
    ]
    return json.dumps([filled.bucket, filled.num_bytes, fields]).encode()


def filled_as_laid_out(buffer: Tensor, position: Sequence[int], layout: bytes) -> FilledBuffer:
    """Return the description of a buffer from a layout; `position` is the step, micro step and epoch of its head."""
    bucket, num_bytes, fields = _known(layout)
    step, micro_step, epoch = position
    return FilledBuffer(
        buffer=buffer, fields=fields, num_bytes=num_bytes, step=step, micro_step=micro_step, epoch=epoch, bucket=bucket
    )


def decoded(layout: bytes) -> tuple[str, int, list[Field]]:
    """Return the bucket, bytes and fields that were encoded."""
    bucket, num_bytes, fields = json.loads(layout)
    found = [_field(*one) for one in fields]
    if any(one.begin + one.num_bytes > num_bytes for one in found):
        raise ValueError(f"it has a tensor beyond its {num_bytes} bytes")
    return bucket, num_bytes, found


_known = functools.lru_cache(maxsize=_MAX_KNOWN)(decoded)  # of the batches that are taken; what is refused is not kept


def _field(name: str, dtype: str, shape: list[int], begin: int, num_bytes: int) -> Field:
    found = getattr(torch, dtype, None)
    if not isinstance(found, torch.dtype):
        raise TypeError(f"{dtype} is not a dtype")
    if any(type(number) is not int or number < 0 for number in (*shape, begin, num_bytes)) or begin % ALIGN_BYTES:
        raise ValueError(f"{name} has the shape {shape} and {num_bytes} bytes from {begin}")
    if num_bytes != found.itemsize * math.prod(shape):
        raise ValueError(f"{name} has {num_bytes} bytes for {dtype} {shape}")
    return Field(name=name, dtype=found, shape=tuple(shape), begin=begin, num_bytes=num_bytes)
