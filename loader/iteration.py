"""Iterating over a loader, by epochs or endlessly; its state, with all that must match on a resume.

One `for` is one epoch. The batches of all epochs are one stream, which stays open between two epochs, so that the first batches
of the next one are ready when its `for` begins.
"""

from __future__ import annotations

import hashlib
import json
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, NoReturn

from bucketline.errors import DeliveryError, StateError, UsageError
from bucketline.forks import OwnerProcess
from bucketline.loader.batch import as_fields, checked_batch, with_seen_images
from bucketline.loader.collate.buffers import carve
from bucketline.loader.config import LEAST_WINDOW
from bucketline.loader.mixture import StoreId  # noqa: TC001 - `decode` reads the annotations at run time
from bucketline.loader.plan.epoch_steps import Cursor
from bucketline.loader.prefetch.stream import Stats
from bucketline.option_value import expect_int
from bucketline.store.format.block import SEEN_IMAGES
from bucketline.typed_json import Json, TypedJsonError, decode, encode

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

    import torch
    from torch import Tensor

    from bucketline.loader.batch import Batch, RecordedScale
    from bucketline.loader.collate.buffers import FilledBuffer
    from bucketline.loader.config import LoaderConfig
    from bucketline.loader.plan.epoch_steps import EpochSteps
    from bucketline.loader.plan.plan import Plan
    from bucketline.loader.prefetch.stream import Stream
    from bucketline.loader.service.ring import RingStream
    from bucketline.store.format.block import LatentKind
    from bucketline.store.remote.cache.fetch import FetchStats


# ----------------------------------------------------------------------------------------------------------------------- state
# The loader's state: the next micro-batch, and every setting that must match for that number to mean the same.

STATE_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderState:
    """The content of `Loader.state_dict`. It counts what the caller has consumed, not what was prefetched."""

    version: int
    step: int  # optimizer step of the next micro-batch
    micro_step: int  # its index within the step
    epoch: int  # that the next micro-batch belongs to
    accumulation: int
    world_size: int
    batch: dict[str, Json]  # the options that size it
    global_batch: int | str  # of every bucket; if buckets differ, the smallest, the largest and a digest of all
    settings: dict[str, Json]  # as in `LoaderConfig.deciding`
    stores: tuple[StoreId, ...]
    plan: str  # digest
    epochs: int | None  # after which the plan ends; None: endless

    @property
    def generations(self) -> tuple[int, ...]:
        return tuple(store.generation for store in self.stores)


# Between steps, the same global batch may be divided differently among the ranks.
_MAY_DIFFER = ("accumulation", "world_size")


def global_batch_of(plan: Plan) -> int | str:
    """Return the global batch of a plan's buckets in a short form that is equal only if all of them are."""
    sizes = [bucket.global_batch for bucket in plan.buckets]
    if len(set(sizes)) == 1:
        return sizes[0]
    largest, least = (extreme(plan.buckets, key=lambda bucket: bucket.global_batch) for extreme in (max, min))
    every = json.dumps([[bucket.name, bucket.global_batch] for bucket in plan.buckets])
    digest = hashlib.blake2b(every.encode(), digest_size=8).hexdigest()
    return f"{least.global_batch} ({least.name}) to {largest.global_batch} ({largest.name}), of {len(sizes)} buckets {digest}"


def parse_state(saved: Mapping[str, object]) -> LoaderState:
    if not isinstance(saved, Mapping):
        raise StateError(
            f"the saved loader state is {saved!r:.100} of type {type(saved).__name__}, expected a dict: give what state_dict() "
            "returned"
        )
    version = saved.get("version")
    if type(version) is not int or version != STATE_VERSION:
        raise StateError(
            f"the saved loader state has version {version!r}, expected version {STATE_VERSION}; give the dict that "
            "state_dict() returned, whole"
        )
    try:
        return decode(LoaderState, dict(saved), "loader state")
    except TypedJsonError as error:
        raise StateError(f"the saved loader state is damaged: {error}") from error


def check_state(state: LoaderState, present: LoaderState) -> None:
    """Check that a loader in the state `present` can resume from a saved one."""
    for (name, before), (_, now) in zip(_deciding(state, present), _deciding(present, state), strict=True):
        if before != now or type(before) is not type(now):
            raise StateError(f"the loader's {name} was {before!r} when its state was saved and is {now!r} now; {_advice(name)}")
    if state.micro_step >= state.accumulation:
        raise StateError(f"micro_step is {state.micro_step}, a step has {state.accumulation}")
    for name in _MAY_DIFFER:
        before, now = getattr(state, name), getattr(present, name)
        if state.micro_step and before != now:
            raise StateError(
                f"the state was saved within a step (micro-batch {state.micro_step} of {state.accumulation}); {name} was "
                f"{before} and is {now} now, and may only change between steps"
            )


def saved_choices(saved: LoaderState, plan: Plan) -> dict[str, int | None]:
    """Return the lanes and the window of a saved state that a plan of these buckets can have; `check_state` judges the rest."""
    lanes, window = saved.settings.get("lanes"), saved.settings.get("window", 0)
    if window is None:
        return {"lanes": None, "window": None}
    if type(window) is not int or window < LEAST_WINDOW:
        return {}
    choices: dict[str, int | None] = {"window": window}
    if type(lanes) is int and lanes > 0 and all(bucket.global_batch % lanes == 0 for bucket in plan.buckets):
        choices["lanes"] = lanes
    return choices


def are_of(state: LoaderState, stores: tuple[StoreId, ...]) -> bool:
    """Return True if a state is of these stores, at whatever generations."""
    named = [[(store.store_id, store.repeats) for store in every] for every in (state.stores, stores)]
    return named[0] == named[1]


def _deciding(state: LoaderState, other: LoaderState) -> Iterator[tuple[str, Json]]:
    """Yield (name, value) of the fields that must match, in the same order for both states; None for one that is absent."""
    yield "stores.count", len(state.stores)
    for number, store in enumerate(state.stores[: len(other.stores)]):
        for name in ("store_id", "generation", "repeats", "digest"):
            yield name if len(state.stores) == 1 else f"stores[{number}].{name}", getattr(store, name)
    yield "global_batch", state.global_batch
    for name in sorted({*state.settings, *other.settings}, key=lambda name: (name != "window", name)):  # it decides on lanes
        yield name, state.settings.get(name)
    yield "plan", state.plan


_ADVICE = {
    "global_batch": "choose batch size x accumulation x ranks so that each bucket has the saved number",
    "lanes": "give the saved number, or none, with a global batch that it divides",
    "window": "give the saved number, or none (if that was None: with a cache that holds the stores)",
    **dict.fromkeys(
        ("store_id", "generation", "repeats", "digest", "plan"), "open the store and the generation that the run was planned on"
    ),
}


def _advice(name: str) -> str:
    if name.startswith("stores"):
        return (
            "open the stores that the run was planned on, each at its generation, in the same order and with the same repeats"
        )
    return _ADVICE.get(name, "use the saved value, or start over")


def state_as_json(state: LoaderState) -> dict[str, Any]:
    """Return a state as the JSON object of `Loader.state_dict`."""
    encoded = encode(state)
    assert isinstance(encoded, dict)
    return dict(encoded)


# ------------------------------------------------------------------------------------------------------------------- iteration

CLOSED = "close() was called"  # which ends an iterator without an error


class Reading(Enum):
    """How far the loader has read the present epoch, which decides what the next `for` reads."""

    CHOSEN = "what remains of it"  # it is the first one, or a state or `set_epoch` has chosen it
    BEGUN = "the epoch that follows it"  # a loop has had some of it, or all


class EpochLoader(ABC):
    """An iterable of one rank's micro-batches. One `for` is one epoch.

    It has one iterator at a time. An iterator that another one has replaced raises an error.
    """

    config: LoaderConfig
    device: torch.device
    _latent_kind: LatentKind
    _recorded_scale: RecordedScale
    _steps: EpochSteps

    def _begin_at_first_epoch(self) -> None:
        self._span = self._steps.span(0)  # the present epoch: of the last `for`, or as a state or `set_epoch` has chosen it
        self._reading = Reading.CHOSEN
        self._cursor = Cursor(step=0, micro_step=0, num_steps=self._steps.num_steps)
        self._iterator: object = None  # the present one
        self._ended_by = CLOSED  # why there is none, or another one
        self._stream: Stream | RingStream | None = None
        self._stream_owner = OwnerProcess()
        self._counts = Stats()

    @abstractmethod
    def _begin_stream(self) -> Stream | RingStream:
        """Begin to read at the cursor."""

    @abstractmethod
    def _renew(self) -> bool:
        """Plan the next epoch by the newest generation, if the stores are followed; return True if it is another one."""

    def __iter__(self) -> Iterator[Batch]:
        """Iterate over one epoch: the next one, or what remains of the one that `load_state_dict` was given.

        After a `break`, the next epoch is the one that follows. If the loader itself fails, it continues at the same batch.
        """
        with self._iterating() as mine:
            if self._reading is Reading.BEGUN:
                self._expect_epoch(self._following())
                self._begin_next()
            self._expect_epoch(self._span.number)
            if self._span.first == self._span.end:
                warnings.warn(self._steps.without_batch(), stacklevel=2)
            if (yield from self._rest_of_epoch(mine)):
                self._reading = Reading.BEGUN  # also an epoch without steps

    def forever(self) -> Iterator[Batch]:
        """Iterate over the rest of all epochs, from the batch after the last one delivered. Endless without `epochs`."""
        with self._iterating() as mine:
            while (yield from self._rest_of_epoch(mine, may_cross=True)) and self._has_next():
                self._begin_next()

    @contextmanager
    def _iterating(self) -> Iterator[object]:
        """Replace the present iterator by a new one, given by its mark, until the block ends."""
        self._iterator = mine = object()
        self._ended_by, self._counts = "another iterator of the same loader was started", Stats()
        try:
            yield mine
        finally:
            if self._iterator is mine:
                self._iterator = None
                if self._cursor.step != self._span.end or self._cursor.step == self._steps.num_steps:
                    self._end_stream()

    def _rest_of_epoch(self, mine: object, *, may_cross: bool = False) -> Generator[Batch, None, bool]:
        """Yield what remains of the present epoch; return False if another iterator has replaced this one after the last.

        `may_cross`: the iterator also reads the epochs that follow.
        """
        while self._cursor.step < self._span.end:
            filled, flat = self._next_filled()
            batch = filled_batch(filled, flat, self._latent_kind, self._recorded_scale)
            after = self._cursor.after(filled.step, filled.micro_step, self.config.accumulation)
            del filled, flat  # or the generator would hold the buffer until the next one
            self._reading = Reading.BEGUN
            self._cursor = after  # last, so that Ctrl-C before this skips no batch
            is_over = after.step == self._span.end and not (may_cross and self._has_next())
            yield batch
            del batch
            if self._iterator is not mine:
                if is_over or self._ended_by == CLOSED:
                    return False
                raise UsageError(
                    f"this iterator has ended: {self._ended_by}, and a loader has one iterator at a time. Make another loader "
                    "for each loop that runs at the same time, such as validation within an epoch; or start a new iterator"
                )
        return True

    def start(self) -> Stream | RingStream:
        """Begin to read ahead, unless that has begun; the next iteration continues from there if it begins at this batch."""
        if self._stream is None or not self._stream_owner.is_current:
            self._stream, self._stream_owner = self._begin_stream(), OwnerProcess()
        return self._stream

    def _next_filled(self) -> tuple[FilledBuffer, Tensor]:
        """Pop the next micro-batch of the stream; begin one if there is none, or it is of the process that forked this one."""
        step, micro_step = self._cursor.step, self._cursor.micro_step
        try:
            stream = self.start()
            begun = time.perf_counter()
            if (delivered := stream.next()) is None:
                raise DeliveryError(
                    f"the batches ended before step {step}, and the epoch has steps to {self._span.end - 1}; was the loader "
                    "closed in another thread? Iterate again: it continues at the same batch"
                )
            filled, _ = delivered
            if (filled.step, filled.micro_step) != (step, micro_step):
                raise DeliveryError(
                    f"step {filled.step}, micro-batch {filled.micro_step} came, expected step {step}, micro-batch "
                    f"{micro_step}; iterate again: it continues there"
                )
        except Exception:  # a MemoryError too
            self._reading = Reading.CHOSEN  # the caller did not leave the epoch: the next iteration continues at this batch
            raise
        self._counts.count(filled, begun)
        return delivered

    @property
    def _is_read(self) -> bool:
        """True if a loop has read the present epoch to its end."""
        return self._reading is Reading.BEGUN and self._cursor.step >= self._span.end

    @property
    def is_between_epochs(self) -> bool:
        """True if an epoch has ended and another one follows, of which no batch was delivered."""
        return self._is_read and self._has_next()

    def _following(self) -> int:
        return 0 if self.config.rewind else self._span.number + 1

    def _has_next(self) -> bool:
        return self._steps.epochs is None or self._following() < self._steps.epochs

    @property
    def epoch(self) -> int:
        """Return the number of the epoch that is being read, from 0; if none is, of the one that the next `for` reads."""
        is_over = self._iterator is None and self._reading is Reading.BEGUN
        return self._following() if is_over else self._span.number

    def _epoch_of_state(self) -> int:
        """Return the epoch of the next micro-batch: after `load_state_dict`, the first `for` reads what remains of it."""
        return self._following() if self._is_read else self._span.number

    def _begin_next(self) -> bool:
        """Move to the next epoch; return True if it is of another generation."""
        number, is_new = self._following(), self._renew()
        self._move_to(number)
        return is_new

    def _expect_epoch(self, number: int) -> None:
        epochs = self._steps.epochs
        if epochs is not None and number >= epochs:
            each = "epoch was" if epochs == 1 else "epochs were"
            raise UsageError(
                f"all {epochs} {each} delivered (epochs={epochs}), and each `for` reads another one; set epochs to how many "
                "you read, or to None; set rewind=True to read the same batches in each `for`, as for validation; or call "
                "set_epoch(0) to start over"
            )

    def _move_to(self, number: int) -> None:
        span = self._steps.span(number)
        if (span.first, 0) != (self._cursor.step, self._cursor.micro_step):
            self._end_stream()
            self._cursor = Cursor(step=span.first, micro_step=0, num_steps=self._steps.num_steps)
        self._span, self._reading = span, Reading.CHOSEN

    def _resume(self, state: LoaderState) -> None:
        step, epochs = state.step, self._steps.epochs
        if self.config.rewind and step == self._steps.num_steps:
            step = 0
        span = self._steps.span(state.epoch if epochs is None else min(state.epoch, epochs))
        if not (span.first <= step < span.end or span.first == step == span.end):  # by another plan, or of other epochs
            is_over = self._steps.num_steps is not None and step >= self._steps.num_steps
            span = self._steps.span(epochs if is_over and epochs is not None else self._steps.number_at(step))
        self._span, self._reading = span, Reading.CHOSEN
        self._cursor = Cursor(step=step, micro_step=state.micro_step, num_steps=self._steps.num_steps)

    def _expect_position(self, state: LoaderState) -> None:
        """Check that a saved position means the same by this loader's `epochs`."""
        epochs, here = self._steps.epochs, (state.step, state.micro_step)
        is_same = state.epochs == epochs
        if not is_same and state.epochs is not None and here > (self._steps.steps_before(state.epochs), 0):
            raise StateError(
                f"the state is of a loader with epochs={state.epochs}, whose last batches were padded, and this one has "
                f"epochs={epochs}, which would read their rows again; resume it with epochs={state.epochs}, or begin with "
                f"set_epoch({state.epochs}) and without a state"
            )
        end = None if epochs is None else self._steps.num_steps if is_same else self._steps.steps_before(epochs)
        if end is not None and here > (end, 0):
            raise StateError(
                f"the state is at step {state.step} of a loader with epochs={state.epochs}, and this one ends after {end} "
                f"steps (epochs={epochs}); give more epochs"
            )

    def __len__(self) -> int:
        """Return the number of micro-batches of the epoch that is being read; if none is, of the one that the next `for` reads.

        It counts the whole epoch, also after `load_state_dict`: what resumes an epoch counts from where it stopped (Lightning's
        progress, tqdm's `initial`). With `carry`, epochs differ by a batch a bucket. 0 if all `epochs` have been delivered.
        """
        if self._steps.epochs is not None and self.epoch >= self._steps.epochs:
            return 0
        span = self._steps.span(self.epoch)
        return (span.end - span.first) * self.config.accumulation

    def __getitem__(self, _: object) -> NoReturn:
        """Refuse to be taken for a map-style data set, as `DataLoader` takes what is not an `IterableDataset`."""
        raise UsageError(
            "a Loader has no items by number, expected iteration: `for batch in loader`; for torch's DataLoader, "
            "DataLoader(BatchDataset(loader), batch_size=None)"
        )

    def set_epoch(self, epoch: int) -> None:
        """Let the next `for` read this epoch, counted from 0, and those after it the next ones.

        Not needed: each `for` reads another epoch. After `load_state_dict` within this epoch, the `for` reads what remains.
        """
        expect_int("epoch", epoch, "a number of an epoch, counted from 0")
        epochs = self._steps.epochs
        if epoch < 0 or (epochs is not None and epoch >= epochs):
            expected = "0 or more" if epochs is None else "0, with rewind=True" if self.config.rewind else f"0 to {epochs - 1}"
            raise UsageError(f"epoch is {epoch}, expected {expected}")
        if epoch != self._span.number or self._reading is Reading.BEGUN or self._iterator is not None:
            self._iterator, self._ended_by = None, "set_epoch() was called"
            self._move_to(epoch)

    def stats(self) -> Stats:
        """Return what the current iteration has delivered and how long the caller waited; takes microseconds."""
        if self._stream is not None:
            self._stream.note_queue(self._counts)
        return self._counts.copy(self._fetched())

    @abstractmethod
    def _fetched(self) -> tuple[FetchStats, ...]:
        """Return what was fetched of stores in object storage."""

    def _end_iteration(self, why: str) -> None:
        self._iterator, self._ended_by = None, why
        self._end_stream()

    def _end_stream(self) -> None:
        if self._stream is not None:
            stream, self._stream = self._stream, None
            stream.note_queue(self._counts)
            stream.close()


def filled_batch(filled: FilledBuffer, flat: Tensor, latent_kind: LatentKind, scale: RecordedScale) -> Batch:
    """Make a batch from a filled buffer's description and its bytes on the caller's device."""
    fields = as_fields(carve(flat, filled.fields))
    if SEEN_IMAGES in fields["ragged"]:
        fields = with_seen_images(fields)
    fields.update(step=filled.step, micro_step=filled.micro_step, epoch=filled.epoch, bucket=filled.bucket)
    fields.update(latent_kind=latent_kind, recorded_scale=scale)
    return checked_batch(fields)
