"""The columns that a micro-batch has, their layout in its buffer, and the buffers, allocated once and lent to the caller.

Letters: B rows, L tokens (padded).
"""

from __future__ import annotations

import functools
import math
import mmap
import queue
import threading
import weakref
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from bucketline.errors import StoreError, UsageError
from bucketline.loader.batch import BATCH_PRESENT_PREFIX, BATCH_RAGGED_PREFIX, COLUMN_PREFIX, FIXED_PREFIX, LATENTS
from bucketline.loader.config import TextForm
from bucketline.loader.plan.order import Purpose, uniform_on_host
from bucketline.store.format.block import (
    AUDIO,
    CLASS_LABELS,
    FLIPPED_SUFFIX,
    MASK,
    PRESENT_PREFIX,
    RAGGED_PREFIX,
    SAME,
    SEEN_EMPTY,
    SEEN_IMAGES,
    TARGET,
    TOKENS,
    EntriesOf,
    LatentKind,
    fixed_columns,
    flipped_role,
    is_reference,
    references_of,
    role_of,
    stored_name,
)
from bucketline.store.format.text import F8_E4M3, GROUP, TEXT_GROUP, e4m3_values
from bucketline.torch_dtypes import TORCH_DTYPES

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from bucketline.loader.batch import Batch
    from bucketline.loader.config import LoaderConfig
    from bucketline.loader.mixture import Mixture
    from bucketline.store import Bucket, Column, Store
    from bucketline.store.format.text import RaggedSpec


# ----------------------------------------------------------------------------------------------------------------- buffer pool
# Buffers: memory allocated once, that batches are gathered into and lent to the caller from.
#
# A buffer goes back to the pool when the last tensor over it is gone. That is noticed on the numpy array that lends the
# buffer's memory to the tensors: a tensor's own finalizer runs while other tensors still share its storage, this array's does
# not. A finalizer may run inside any allocation, so it only puts the buffer on a `SimpleQueue`, and takes no lock.

ALIGN_BYTES = 64
HUGE_PAGE_BYTES = 2 << 20
_NUMPY_DTYPES = {  # those that numpy has; others are seen as integers first
    dtype: torch.empty(0, dtype=dtype).numpy().dtype
    for dtype in (
        *(torch.float64, torch.float32, torch.float16, torch.complex64),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    )
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """A tensor of a batch: its name, and the position of its bytes in the buffer."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int  # a multiple of ALIGN_BYTES
    num_bytes: int
    seen_dtype: np.dtype[Any] = field(init=False, compare=False)  # that numpy sees it with

    def __post_init__(self) -> None:
        seen = _NUMPY_DTYPES.get(self.dtype)
        object.__setattr__(self, "seen_dtype", np.dtype(f"i{self.dtype.itemsize}") if seen is None else seen)


@dataclass(frozen=True, slots=True, kw_only=True)
class FilledBuffer:
    """A filled buffer and the description of its content."""

    buffer: Tensor  # [buffer_bytes] uint8
    fields: list[Field]
    num_bytes: int  # of the fields, from the buffer's start
    step: int
    micro_step: int
    epoch: int
    bucket: str


def buffer_offsets(fields: list[tuple[str, torch.dtype, tuple[int, ...]]]) -> tuple[list[Field], int]:
    """Place tensors in a buffer, each aligned; return the fields and the total bytes that they need."""
    placed, at = [], 0
    for name, dtype, shape in fields:
        num_bytes = dtype.itemsize * math.prod(shape)
        placed.append(Field(name=name, dtype=dtype, shape=shape, begin=at, num_bytes=num_bytes))
        at += -(-num_bytes // ALIGN_BYTES) * ALIGN_BYTES
    return placed, at


def carve(flat: Tensor, fields: Sequence[Field]) -> dict[str, Tensor]:
    """Return the fields of a buffer (or of its copy on a device) as tensors that share its memory.

    In the host's memory numpy makes the views: torch would release Python's lock at each call, and another thread might keep
    it for 5 ms each time (`bench/cases/hot.py`).
    """
    if flat.device.type == "cpu":
        memory, tensors = flat.numpy(), {}
        for field in fields:
            seen = torch.from_numpy(np.ndarray(field.shape, field.seen_dtype, memory, field.begin))
            tensors[field.name] = seen if field.dtype in _NUMPY_DTYPES else seen.view(field.dtype)
        return tensors
    whole = len(flat) // ALIGN_BYTES * ALIGN_BYTES  # a buffer may be longer than its fields need
    if whole != len(flat):
        flat = flat[:whole]
    by_dtype: dict[torch.dtype, Tensor] = {}
    tensors = {}
    for field in fields:
        dtype = field.dtype
        items = by_dtype.get(dtype)
        if items is None:
            items = by_dtype[dtype] = flat.view(dtype)
        tensors[field.name] = items.as_strided(field.shape, _strides(field.shape), field.begin // dtype.itemsize)
    return tensors


@functools.lru_cache(maxsize=1024)
def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor.

    >>> _strides((2, 3, 4))
    (12, 4, 1)
    """
    return tuple(math.prod(shape[n + 1 :]) for n in range(len(shape)))


def _in_huge_pages(num_bytes: int) -> NDArray[np.uint8]:
    """Allocate memory, `[num_bytes]`, that the system may back with huge pages: 2 MiB at the first touch, not 4 KiB.

    The first touch of a page costs more than copying a page: half of the time of a first pass (measured once).
    """
    whole = -(-num_bytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    if whole - num_bytes > num_bytes // 4:  # what would be lost; its end comes in small pages
        whole = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    if num_bytes < HUGE_PAGE_BYTES:
        return np.empty(num_bytes, dtype=np.uint8)
    memory = mmap.mmap(-1, whole + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    bytes_ = np.frombuffer(memory, dtype=np.uint8)
    begin = -bytes_.ctypes.data % HUGE_PAGE_BYTES
    return bytes_[begin : begin + num_bytes]


class BufferPool:
    """Buffers of one size. Taking one never waits: if all are lent, another one is allocated."""

    def __init__(self, buffer_bytes: int, num_buffers: int, *, pinned: bool) -> None:
        self.buffer_bytes = buffer_bytes
        self._num_buffers = num_buffers
        self._pinned = pinned
        self._made = 0
        self._free: queue.SimpleQueue[Tensor] = queue.SimpleQueue()

    @property
    def num_made(self) -> int:
        """Buffers that this pool knows: free, being filled, ready or held."""
        return self._made

    def acquire(self) -> Tensor:
        """Return a free buffer, `[buffer_bytes]` uint8."""
        try:
            while self._free.qsize() > self._num_buffers:  # a caller held many and let them go
                self._free.get_nowait()
                self._made -= 1
            return self._free.get_nowait()
        except queue.Empty:
            self._made += 1
            if self._pinned:
                return torch.empty(self.buffer_bytes, dtype=torch.uint8, pin_memory=True)
            return torch.from_numpy(_in_huge_pages(self.buffer_bytes))

    def release(self, buffer: Tensor) -> None:
        """Return a buffer to the pool that was not lent, or whose copy is done."""
        self._free.put(buffer)

    def lend(self, buffer: Tensor) -> Tensor:
        """Return a tensor over the buffer's memory; the buffer returns to the pool when that memory is no longer used."""
        lent = np.frombuffer(buffer.numpy().data, dtype=np.uint8)
        weakref.finalize(lent, self._free.put, buffer).atexit = False
        return torch.from_numpy(lent)


# --------------------------------------------------------------------------------------------------------------- buffer layout

COPY_ALIGN_BYTES = 16  # where a copy may begin; see `Gather.copy`


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestedGroup:
    """A group of entries that is delivered: the captions, or a ragged group."""

    spec: RaggedSpec
    shown: RaggedSpec  # the columns that are delivered: the same, but for quantised text
    number: str | None  # the name of the rows' column with the number of their entry; None if captions have entries
    optional: bool
    longest: int  # L at most

    @property
    def is_text(self) -> bool:
        return self.spec.group == TEXT_GROUP

    @property
    def is_seen(self) -> bool:
        """True if a batch's tokens are joined of this group's and the captions'."""
        return self.spec.group in (RAGGED_PREFIX + SEEN_IMAGES, RAGGED_PREFIX + SEEN_EMPTY)

    @property
    def is_of_empty(self) -> bool:
        """True if only rows with the empty caption have an entry: its states, after those of the row's images."""
        return self.spec.group == RAGGED_PREFIX + SEEN_EMPTY

    @property
    def prefix(self) -> str:
        """Begin of the names of a ragged group's fields in a buffer."""
        return f"{BATCH_RAGGED_PREFIX}{self.spec.group.removeprefix(RAGGED_PREFIX)}."

    @property
    def mask(self) -> str:
        """Name of the field that says which tokens are an entry's own."""
        return "token_mask" if self.is_text else f"{self.prefix}mask"

    def token_field(self, column: str) -> str:
        """Return the name of a token column's field; that of a caption's first one is `tokens`."""
        if self.is_text:
            return TOKENS if column == self.spec.tokens[0].name else column
        return f"{self.prefix}columns.{column}"

    def fixed_field(self, column: str) -> str:
        return FIXED_PREFIX + column if self.is_text else f"{self.prefix}fixed.{column}"


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferLayout:
    """The positions of a micro-batch's tensors in its buffer."""

    fields: list[Field]
    by_name: dict[str, Field]
    small_begin: int  # start of the small fields, which extend to the end of what is delivered
    num_bytes: int  # that are delivered
    gathered: dict[str, Field]  # where columns are copied to: their fields, or other places if tokens are dequantised then
    buffer_bytes: int  # with these other places

    @property
    def is_dequantised(self) -> bool:
        return self.gathered is not self.by_name

    @property
    def small_bytes(self) -> int:
        return self.num_bytes - self.small_begin


def is_class_conditional(text: RaggedSpec) -> bool:
    """Return True if a store's captions are classes."""
    return text.tokens[0].name == CLASS_LABELS


def _dtype_of(spec: RaggedSpec, column: Column) -> torch.dtype:
    """Return the dtype of a group's column: of quantised F8_E4M3 its bits, for which every device has all operations."""
    return torch.uint8 if spec.is_quantised and column.dtype == F8_E4M3 else TORCH_DTYPES[column.dtype]


def make_layout(
    columns: Mapping[str, Column],
    optional: Iterable[str],
    groups: Sequence[tuple[RequestedGroup, int]],
    num_rows: int,
) -> BufferLayout:
    """Return the layout of a micro-batch of B rows. The small fields' layout does not depend on the `columns`.

    `columns` are the rows' by field, `optional` the roles of those that rows may lack, `groups` the captions and the ragged
    groups that are requested, each with its L. Tokens that are to be dequantised are copied to the upper half of their field,
    and their scales to the buffer's end.
    """
    large = [(field, TORCH_DTYPES[column.dtype], (num_rows, *column.shape)) for field, column in columns.items()]
    small: list[tuple[str, torch.dtype, tuple[int, ...]]] = [
        ("original_size", torch.int32, (num_rows, 2)),
        ("crop", torch.int32, (num_rows, 2)),
        ("target_size", torch.int32, (num_rows, 2)),
        ("weight", torch.float32, (num_rows,)),
        ("keys", torch.int64, (num_rows,)),
        ("ids", torch.uint8, (num_rows, 16)),
        ("flipped", torch.bool, (num_rows,)),
        *((BATCH_PRESENT_PREFIX + role, torch.bool, (num_rows,)) for role in optional),
    ]
    for group, length in groups:
        spec = group.shown
        large += [(group.token_field(c.name), _dtype_of(spec, c), (num_rows, length, *c.shape)) for c in spec.tokens]
        large += [(group.fixed_field(c.name), _dtype_of(spec, c), (num_rows, *c.shape)) for c in spec.fixed]
        small += [] if group.is_text else [(f"{group.prefix}lengths", torch.int32, (num_rows,))]
        small += [(group.mask, torch.bool, (num_rows, length))]
        small += [(f"{group.prefix}present", torch.bool, (num_rows,))] if group.optional else []
    fields, num_bytes = buffer_offsets([*large, *small])
    by_name = {field.name: field for field in fields}
    text, tokens = groups[0][0], by_name[TOKENS]
    if is_class_conditional(text.spec):  # the same bytes, as class labels
        fields = [*fields, replace(tokens, name=CLASS_LABELS, shape=(num_rows,))]
    gathered, buffer_bytes = by_name, num_bytes
    if text.shown.tokens != text.spec.tokens:
        places, buffer_bytes = _stored_places(text.spec, tokens, num_bytes)
        gathered = {**by_name, **places}
    return BufferLayout(
        fields=fields,
        by_name=by_name,
        small_begin=by_name["original_size"].begin,
        num_bytes=num_bytes,
        gathered=gathered,
        buffer_bytes=buffer_bytes,
    )


def _stored_places(text: RaggedSpec, out: Field, num_bytes: int) -> tuple[dict[str, Field], int]:
    """Return where the stored form of the tokens of field `out` is copied to, and the bytes of the buffer with it."""
    scale = text.tokens[1]
    num_rows, length, width = out.shape
    half = num_rows * length * width
    begin = -(-(out.begin + half) // COPY_ALIGN_BYTES) * COPY_ALIGN_BYTES  # the field's own alignment leaves room for that
    stored = Field(name="tokens", dtype=_dtype_of(text, text.tokens[0]), shape=out.shape, begin=begin, num_bytes=half)
    (placed,), scale_bytes = buffer_offsets([(scale.name, TORCH_DTYPES[scale.dtype], (num_rows, length, *scale.shape))])
    end = -(-num_bytes // ALIGN_BYTES) * ALIGN_BYTES
    return {"tokens": stored, scale.name: replace(placed, begin=end)}, end + scale_bytes


# ------------------------------------------------------------------------------------------------------------ dequantise field
# Dequantise tokens on the CPU, in a batch's buffer. Letters: L tokens (padded), D token width, S scales.

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


# --------------------------------------------------------------------------------------------------------------------- columns
# The columns of a batch: those requested, captions chosen by keyed draws, flips and crops; checks that the store has them.

_FIXED = {column.name for column in fixed_columns(1)}


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestedColumn:
    """A column that is delivered."""

    role: str
    field: str  # of the buffer
    name: str  # in the blocks
    mirrored: str  # the name of the column that replaces it in a flipped row, or its own
    present: str | None  # the name of the column that says which rows have it; None if all do
    in_buckets: frozenset[str] | None = None  # whose rows have it; None: all


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditioning:
    """A loader's settings for columns, captions, ragged groups, flips and padding."""

    columns: tuple[RequestedColumn, ...]
    caption_dropout: float
    flip: float
    pad_multiple: int | None  # None: every batch has the longest L
    groups: tuple[RequestedGroup, ...]  # the captions, then ragged groups

    def padded(self, group: RequestedGroup, longest: int) -> int:
        """Return L of a group in a batch whose longest entry has `longest` tokens."""
        if self.pad_multiple is None:
            return group.longest
        return 0 if longest == 0 and group.is_seen else _rounded(longest, self.pad_multiple)

    def columns_of(self, bucket: Bucket) -> tuple[RequestedColumn, ...]:
        """Return the columns that a bucket's rows have: not each has all references, nor each store of a mixture a mask."""
        return tuple(column for column in self.columns if column.in_buckets is None or bucket.name in column.in_buckets)

    def flips(self, keys: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return which rows are delivered as their mirror image, `[B]`."""
        if self.flip == 0.0:
            return np.zeros(len(keys), dtype=bool)
        return uniform_on_host(keys, Purpose.FLIP) < self.flip


def make_conditioning(store: Store | Mixture, buckets: Iterable[Bucket], config: LoaderConfig) -> Conditioning:
    """Return the conditioning of a configuration after comparing it with the store."""
    columns = _requested_columns(store, list(buckets), config)
    if is_class_conditional(store.text) and (config.pad_to or config.pad_multiple):
        name = "pad_to" if config.pad_to else "pad_multiple"
        raise UsageError(
            f"{name} is {config.pad_to or config.pad_multiple}, and {store.where} has classes, not captions; leave it out"
        )
    seen, before, least = _seen_groups(store, config), 0, store.max_tokens
    if seen:
        before = seen[0].longest
        least = before + max(store.max_tokens, seen[1].longest)
    if config.pad_to is not None and config.pad_to < least:
        what = "caption of {} has {} tokens" if not seen else "images and caption of {} have {} tokens together"
        raise UsageError(
            f"pad_to is {config.pad_to}, and the longest {what.format(store.where, least)}, which would "
            f"be cut; expected {least} or more (or pack with --max-tokens {config.pad_to - before})"
        )
    longest = config.pad_to - before if config.pad_to else store.max_tokens
    if config.pad_multiple is not None:
        longest = _rounded(longest, config.pad_multiple)
    shown = store.text if TextForm(config.text) is TextForm.STORED and not seen else store.text.delivered
    text = RequestedGroup(spec=store.text, shown=shown, number=None, optional=False, longest=longest)
    return Conditioning(
        columns=columns,
        caption_dropout=config.caption_dropout,
        flip=config.flip,
        pad_multiple=config.pad_multiple,
        groups=(text, *seen, *_requested_groups(store, config)),
    )


def _seen_groups(store: Store | Mixture, config: LoaderConfig) -> tuple[RequestedGroup, ...]:
    """Return the groups that are joined with the captions if the text sees the images: those of images, of no caption."""
    names = (SEEN_IMAGES, SEEN_EMPTY)
    if not store.ragged.keys() >= {*names}:
        return ()
    if config.flip:
        raise UsageError(
            f"flip is {config.flip}, and the text of {store.where} was encoded with the images as they are, not mirrored; "
            "expected 0"
        )
    if asked := [name for name in config.ragged if name in names]:
        raise UsageError(f"ragged has {asked[0]!r}, which is a part of batch.tokens; leave it out")
    specs = {name: store.ragged_spec(name) for name in names}
    return tuple(
        RequestedGroup(spec=spec, shown=spec, number=spec.group, optional=False, longest=store.max_entry_tokens[name])
        for name, spec in specs.items()
    )


def _rounded(longest: int, multiple: int) -> int:
    return max(1, -(-longest // multiple)) * multiple


def _requested_groups(store: Store | Mixture, config: LoaderConfig) -> tuple[RequestedGroup, ...]:
    requested = []
    for name in config.ragged:
        if name not in store.ragged or config.ragged.count(name) > 1:
            raise UsageError(
                f"ragged is {list(config.ragged)!s:.200}, and {store.where} has {list(store.ragged)}; expected some of these, "
                "each once"
            )
        group, spec = store.ragged[name], store.ragged_spec(name)
        is_of_rows = group.of is EntriesOf.ROWS
        if config.flip and is_of_rows and group.mirrored != SAME:
            raise UsageError(
                f"flip is {config.flip}, and the ragged group {name!r} of {store.where} has no entries of mirror images; "
                f"expected 0, or a store that was written with mirrored={SAME!r} for it"
            )
        requested.append(
            RequestedGroup(
                spec=spec,
                shown=spec,
                number=spec.group if is_of_rows else None,
                optional=group.optional,
                longest=store.max_entry_tokens[name],
            )
        )
    return tuple(requested)


def _requested_columns(store: Store | Mixture, buckets: Sequence[Bucket], config: LoaderConfig) -> tuple[RequestedColumn, ...]:
    if len(set(config.columns)) != len(config.columns):
        raise UsageError(f"columns is {list(config.columns)}; expected each role once")
    names = {bucket.name: {column.name for column in bucket.columns} for bucket in buckets}
    requested = []
    for role in config.columns or _usual_roles({*store.added}.union(*names.values())):
        name = stored_name(role)
        mirrored = stored_name(flipped_role(role)) if config.flip and role != AUDIO else name
        having = [bucket.name for bucket in buckets if _has(bucket, name)]
        may_lack = name not in store.added and (is_reference(role) or (role == MASK and not config.columns))
        own = having if may_lack and any(name in of_bucket for of_bucket in names.values()) else [*names]
        for bucket in own:
            of_bucket = names[bucket]
            _refuse_lacking(store, [name, mirrored], bucket)
            if name not in of_bucket or role_of(name) != role or role.endswith(FLIPPED_SUFFIX):
                stored = sorted(map(role_of, of_bucket - _FIXED))
                roles = [role for role in stored if not role.endswith(FLIPPED_SUFFIX) and not role.startswith(PRESENT_PREFIX)]
                raise UsageError(f"columns has {role!r:.80}, and {store.where} has {roles} in {bucket}; expected some of these")
            if mirrored not in of_bucket:
                together = "" if role == TARGET else f": its {role} would not be that of a flipped row"
                raise UsageError(
                    f"flip is {config.flip}, and {store.where} has no {mirrored} in {bucket}{together}; expected 0, "
                    "or a store that was packed with --flip"
                )
        present = PRESENT_PREFIX + name
        requested.append(
            RequestedColumn(
                role=role,
                field=LATENTS if role == TARGET else COLUMN_PREFIX + role,
                name=name,
                mirrored=mirrored,
                present=present if any(present in of_bucket for of_bucket in names.values()) else None,
                in_buckets=None if len(own) == len(names) else frozenset(own),
            )
        )
    return tuple(requested)


def _usual_roles(stored: Iterable[str]) -> list[str]:
    """Return the roles that are read if none is requested: the target, its references and its mask, if they are stored."""
    return [TARGET, *references_of(stored), *({MASK} & {*stored})]


def _has(bucket: Bucket, name: str) -> bool:
    """Return True if a bucket's rows have a column; a reference of sizes 0 they do not have."""
    return any(column.name == name and (column.row_bytes or not is_reference(name)) for column in bucket.columns)


def _refuse_lacking(store: Store | Mixture, names: Sequence[str], bucket: str) -> None:
    """Check that all rows of a bucket have those of some columns that were added."""
    for name in names:
        if name in store.added:
            try:
                store.bucket(bucket).column(name)
            except StoreError as error:
                raise UsageError(f"columns has {role_of(name)!r:.80}: {error}; or leave it out of columns") from error


def latent_kind(store: Store | Mixture) -> LatentKind:
    """Return the kind of a store's latents from its manifest; `MODE` if the manifest does not name one."""
    vae = store.encoders.get("vae")
    recorded = vae.get("latents") if isinstance(vae, dict) else None
    if recorded is None:
        return LatentKind.MODE
    if recorded not in set(LatentKind):
        raise StoreError(
            f"{store.where}: its manifest has encoders.vae.latents {recorded!r:.40}, expected one of {', '.join(LatentKind)}; "
            "update bucketline"
        )
    return LatentKind(str(recorded))


EMPTY = -1


def choose_captions(num_captions: NDArray[np.int64], keys: NDArray[np.int64], dropout: float = 0.0) -> NDArray[np.int64]:
    """Draw a caption index for each row, `[B]`; EMPTY if the caption is dropped or the sample has none.

    `num_captions`: `[B]`, stored captions. `keys`: `[B]`, as in `Batch.keys`. `dropout`: probability of the empty caption.
    """
    chosen = (uniform_on_host(keys, Purpose.CAPTION) * num_captions).astype(np.int64)
    dropped = uniform_on_host(keys, Purpose.CAPTION_DROPOUT) < dropout
    return np.where(dropped | (num_captions == 0), EMPTY, chosen)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenCaption:
    """A row's sample and the caption that was chosen for it."""

    id: str
    text: str  # "" if it was dropped, or the sample has none
    num_captions: int  # of the sample


def captions_of(stores: Sequence[Store], batch: Batch, dropout: float = 0.0) -> list[ChosenCaption]:
    """Return the captions of a batch's rows, `[B]`, by repeating the loader's draw; `dropout` as the loader had it."""
    records = [_record(stores, digest.tobytes()) for digest in batch.ids.cpu().numpy()]
    chosen = choose_captions(np.array([len(texts) for _, texts in records]), batch.keys.cpu().numpy(), dropout)
    return [
        ChosenCaption(id=name, text="" if n == EMPTY else texts[n], num_captions=len(texts))
        for (name, texts), n in zip(records, chosen.tolist(), strict=True)
    ]


def _record(stores: Sequence[Store], digest: bytes) -> tuple[str, tuple[str, ...]]:
    for store in stores:
        if entry := store.find_digest(digest):
            return entry[1].id, entry[1].captions[: store.manifest.max_captions]
    raise AssertionError(f"no sample has the digest {digest.hex()} of a batch's row")


def resized_width(source: NDArray[np.int64], bucket: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the widths of the resized images, `[B]`, from source and bucket sizes, `[B, 2]` each, height first.

    >>> resized_width(np.array([[300, 500], [500, 300]]), np.array([[192, 256], [192, 256]])).tolist()
    [320, 256]
    """
    height, width = source.T
    bucket_height, bucket_width = bucket.T
    scaled = (2 * width * bucket_height + height) // (2 * height)  # rounded half up
    wide: NDArray[np.int64] = np.where(bucket_height * width >= bucket_width * height, scaled, bucket_width)
    return wide


def mirrored_left(left: NDArray[np.int64], source: NDArray[np.int64], bucket: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the left edges of the same crops in the mirrored images, `[B]`; below 0 if an image is not wide enough."""
    return resized_width(source, bucket) - left - bucket[:, 1]
