"""The stages of a micro-batch: pending, with a copy plan, and as a filled buffer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from bucketline.loader.collate.buffer_layout import BufferLayout
    from bucketline.loader.collate.buffer_pool import Field
    from bucketline.loader.collate.gather import GatherIndex
    from bucketline.store import Bucket
    from bucketline.store.read.located import Located, LocatedCaptions


@dataclass(slots=True, kw_only=True, eq=False)
class PendingBatch:
    """A micro-batch that will be filled: its planned rows, and their locations as far as they are known yet."""

    step: int
    micro_step: int
    epoch: int
    bucket: Bucket
    rows: NDArray[np.int64]  # [B] of the bucket
    weight: NDArray[np.float32]  # [B]
    keys: NDArray[np.int64]  # [B]
    located: Located
    window: list[PendingBatch] = field(default_factory=list)  # those located together with it and not filled yet
    is_cold: bool = False  # read ahead, because it must come from the disk
    captions: LocatedCaptions | None = None  # if cold: known once the rows' caption numbers were read
    is_asked: bool = False  # if cold: everything is requested, the small columns long enough ago to have arrived
    copy_plan: CopyPlan | None = None  # set once only the copy is left to do


@dataclass(frozen=True, slots=True, kw_only=True)
class FilledBuffer:
    """A filled buffer and the description of its content."""

    buffer: Tensor  # [buffer_bytes] uint8
    fields: list[Field]
    num_bytes: int
    step: int
    micro_step: int
    epoch: int
    bucket: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainRead:
    """A large column to be read with plain reads: the position of each row's bytes in its shard's file."""

    shard: NDArray[np.int64]  # [B]
    offsets: NDArray[np.int64]  # [B]
    num_bytes: NDArray[np.int64] | int  # per row, [B], or one length for all


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyPlan:
    """A micro-batch that is ready to be copied."""

    layout: BufferLayout
    large: dict[str, GatherIndex | PlainRead]  # by field
    small: NDArray[np.uint8]  # [small_bytes], all small fields
    evidence: Evidence


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """The inputs of a copy plan, for `verify`: those of the complete window, in which this micro-batch is `begin` to `end`."""

    begin: int
    end: int
    captions: LocatedCaptions  # [N]
    stored: Mapping[str, NDArray[np.uint8]]  # small columns as read, [N, row_bytes]
