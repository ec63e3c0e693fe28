"""Iterating by epochs: the part of the loader that knows no stores.

One `for` is one epoch. The batches of all epochs are one stream, which stays open between two epochs, so that the first batches
of the next one are ready when its `for` begins.
"""

from __future__ import annotations

import os
import time
import warnings
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, NoReturn, Protocol

from bucketline.errors import DeliveryError, StateError, UsageError
from bucketline.loader.batch import Batch, as_fields
from bucketline.loader.collate.buffer_pool import carve
from bucketline.loader.config import LoaderConfig
from bucketline.loader.plan.cursor import Cursor
from bucketline.loader.stats import Stats
from bucketline.option_types import expect, expect_int

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch
    from torch import Tensor

    from bucketline.loader.collate.buffer_pool import FilledBuffer
    from bucketline.loader.latent_scale import RecordedScale
    from bucketline.loader.plan.epoch_steps import Epoch, EpochSteps
    from bucketline.loader.state import LoaderState
    from bucketline.store.format.columns import LatentKind
    from bucketline.store.remote.cache.fetch_threads import FetchStats

CLOSED = "close() was called"  # which ends an iterator without an error


class Stream(Protocol):
    """Filled micro-batches from a position to the end of all epochs."""

    def next(self) -> tuple[FilledBuffer, Tensor] | None: ...

    def note_queue(self, stats: Stats) -> None: ...

    def close(self) -> None: ...


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
        """Begin before the first batch."""
        self._span = self._steps.span(0)  # the epoch of the last `for`, or the one that a state or `set_epoch` has chosen
        self._is_begun = False  # a `for` has read some of it; so the next one begins the next epoch
        self._cursor = Cursor(step=0, micro_step=0, num_steps=self._steps.num_steps)
        self._iterator: object = None  # the present one
        self._ended_by = CLOSED  # why there is none, or another one
        self._stream: Stream | None = None
        self._stream_pid = os.getpid()
        self._counts = Stats()

    @abstractmethod
    def _begin_stream(self) -> Stream:
        """Begin to read at the cursor."""

    @abstractmethod
    def _renew(self) -> bool:
        """Plan the next epoch by the newest generation, if the stores are followed; return True if it is another one."""

    def __iter__(self) -> Iterator[Batch]:
        """Iterate over one epoch: the next one, or what remains of the one that `load_state_dict` was given.

        After a `break`, the next epoch is the one that follows. If the loader itself fails, it continues at the same batch.
        """
        return self._batches(crosses=False)

    def forever(self) -> Iterator[Batch]:
        """Iterate over the rest of all epochs, from the batch after the last one delivered. Endless without `epochs`."""
        return self._batches(crosses=True)

    def _batches(self, *, crosses: bool) -> Iterator[Batch]:
        mine = self._take_iterator()
        if not crosses:
            self._enter_next_epoch()
            if self._span.first == self._span.end:
                warnings.warn(self._steps.without_batch(), stacklevel=2)
        self._counts = Stats()
        is_over = False
        try:
            while True:
                if self._iterator is not mine:
                    if is_over or self._ended_by == CLOSED:
                        return
                    raise UsageError(self._replaced())
                if self._cursor.step >= self._span.end and not (crosses and self._cross()):
                    self._is_begun = self._is_begun or not crosses  # an epoch without steps has been read
                    return
                filled, flat = self._next_filled()
                batch = filled_batch(filled, flat, self._latent_kind, self._recorded_scale)
                after = self._cursor.after(filled.step, filled.micro_step, self.config.accumulation)
                del filled, flat  # or the generator would hold the buffer until the next one
                self._is_begun = True
                self._cursor = after  # last, so that Ctrl-C before this skips no batch
                is_over = after.step == self._span.end and not (crosses and self._has_next())
                yield batch
                del batch
        finally:
            if self._iterator is mine:
                self._iterator = None
                if self._cursor.step != self._span.end or self._cursor.step == self._steps.num_steps:
                    self._end_stream()

    def start(self) -> Stream:
        """Begin to read ahead, unless that has begun; the next iteration continues from there if it begins at this batch."""
        if self._stream is None or self._stream_pid != os.getpid():
            self._stream, self._stream_pid = self._begin_stream(), os.getpid()
        return self._stream

    def _next_filled(self) -> tuple[FilledBuffer, Tensor]:
        """Pop the next micro-batch of the stream; begin one if there is none, or it is of the process that forked this one."""
        try:
            stream = self.start()
            asked = time.perf_counter()
            delivered = stream.next()
            if delivered is not None:
                self._expect_next(delivered[0])
        except Exception:  # a MemoryError too
            self._is_begun = False  # the caller did not leave the epoch: the next iteration continues at this batch
            raise
        if delivered is None:
            self._is_begun = False
            raise DeliveryError(
                f"the batches ended before step {self._cursor.step}, and the epoch has steps to {self._span.end - 1}; was the "
                "loader closed in another thread? Iterate again: it continues at the same batch"
            )
        self._counts.count(delivered[0], asked)
        return delivered

    def _expect_next(self, filled: FilledBuffer) -> None:
        """Check that a micro-batch is the one at the cursor, whoever filled it."""
        step, micro_step = self._cursor.step, self._cursor.micro_step
        if filled.step != step or filled.micro_step != micro_step:
            raise DeliveryError(
                f"step {filled.step}, micro-batch {filled.micro_step} came, expected step {step}, micro-batch {micro_step}; "
                "iterate again: it continues there"
            )

    def _is_done(self) -> bool:
        """Return True if nothing of the present epoch remains."""
        return self._cursor.step >= self._span.end and (self._is_begun or self._span.first < self._span.end)

    @property
    def is_between_epochs(self) -> bool:
        """True if an epoch has ended and another one follows, of which no batch was delivered."""
        return self._is_done() and self._has_next()

    def _following(self) -> int:
        return 0 if self.config.rewind else self._span.number + 1

    def _has_next(self) -> bool:
        """Return True if an epoch follows the present one."""
        return self._steps.epochs is None or self._following() < self._steps.epochs

    @property
    def epoch(self) -> int:
        """Return the number of the epoch that is being read, from 0; if none is, of the one that the next `for` reads."""
        is_over = self._iterator is None and (self._is_begun or self._is_done())
        return self._following() if is_over else self._span.number

    def _epoch_of_state(self) -> int:
        """Return the epoch of the next micro-batch: after `load_state_dict`, the first `for` reads what remains of it."""
        return self._following() if self._is_done() else self._span.number

    def _enter_next_epoch(self) -> None:
        """Move to the next epoch, unless a state or `set_epoch` has chosen one that no `for` has begun."""
        if self._is_begun or self._is_done():
            self._expect_epoch(self._following())
            self._begin_next()
        self._expect_epoch(self._span.number)

    def _cross(self) -> bool:
        """Move to the next epoch that has steps; return True if there is one."""
        while self._cursor.step >= self._span.end:
            if not self._has_next():
                return False
            self._begin_next()
        return True

    def _begin_next(self) -> bool:
        """Move to the next epoch; return True if it is of another generation."""
        number, is_new = self._following(), self._renew()
        self._move_to(number)
        return is_new

    def _expect_epoch(self, number: int) -> None:
        epochs = self._steps.epochs
        if epochs is not None and number >= epochs:
            self._iterator = None
            each = "epoch was" if epochs == 1 else "epochs were"
            raise UsageError(
                f"all {epochs} {each} delivered (epochs={epochs}), and each `for` reads another one; set epochs to how many "
                "you read, or to None; set rewind=True to read the same batches in each `for`, as for validation; or call "
                "set_epoch(0) to start over"
            )

    def _move_to(self, number: int) -> None:
        """Move to the first step of an epoch."""
        span = self._steps.span(number)
        if (span.first, 0) != (self._cursor.step, self._cursor.micro_step):
            self._end_stream()
            self._cursor = Cursor(step=span.first, micro_step=0, num_steps=self._steps.num_steps)
        self._span, self._is_begun = span, False

    def _resume(self, found: LoaderState) -> None:
        """Continue at a saved state's batch."""
        step = found.step
        if self.config.rewind and step == self._steps.num_steps:
            step = 0
        self._span = self._span_of(found.epoch, step)
        self._is_begun = False
        self._cursor = Cursor(step=step, micro_step=found.micro_step, num_steps=self._steps.num_steps)

    def _span_of(self, epoch: int | None, step: int) -> Epoch:
        """Return the epoch of a saved position, which is given by its number if the state has one."""
        if epoch is not None:
            span = self._steps.span(epoch if self._steps.epochs is None else min(epoch, self._steps.epochs))
            if span.first <= step < span.end or span.first == step == span.end:
                return span
        epochs, num_steps = self._steps.epochs, self._steps.num_steps
        is_over = epochs is not None and num_steps is not None and step >= num_steps
        return self._steps.span(epochs if is_over and epochs is not None else self._steps.number_at(step))

    def _expect_position(self, found: LoaderState) -> None:
        """Check that a saved position means the same by this loader's `epochs`."""
        num_steps, here = self._steps.num_steps, (found.step, found.micro_step)
        if num_steps is not None and found.step > num_steps:
            raise StateError(f"the state is at step {found.step}, this loader ends after {num_steps} steps; give more epochs")
        if found.epochs == self._steps.epochs:
            return
        if found.epochs is not None and here > (self._steps.steps_before(found.epochs), 0):
            raise StateError(
                f"the state is of a loader with epochs={found.epochs}, whose last batches were padded, and this one has "
                f"epochs={self._steps.epochs}, which would read their rows again; resume it with epochs={found.epochs}, or "
                f"begin with set_epoch({found.epochs}) and without a state"
            )
        if self._steps.epochs is not None and here > (self._steps.steps_before(self._steps.epochs), 0):
            raise StateError(
                f"the state is at step {found.step}, after {self._steps.epochs} epochs of a loader with epochs={found.epochs}; "
                "give more epochs"
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
        if epoch != self._span.number or self._is_begun or self._iterator is not None:
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

    def _take_iterator(self) -> object:
        """Return the mark of a new iterator, which replaces the present one."""
        self._iterator, self._ended_by = object(), "another iterator of the same loader was started"
        return self._iterator

    def _end_iteration(self, why: str) -> None:
        self._iterator, self._ended_by = None, why
        self._end_stream()

    def _end_stream(self) -> None:
        if self._stream is not None:
            stream, self._stream = self._stream, None
            stream.note_queue(self._counts)
            stream.close()

    def _replaced(self) -> str:
        return (
            f"this iterator has ended: {self._ended_by}, and a loader has one iterator at a time. Make another loader for each "
            "loop that runs at the same time, such as validation within an epoch; or start a new iterator"
        )


def filled_batch(filled: FilledBuffer, flat: Tensor, latent_kind: LatentKind, scale: RecordedScale) -> Batch:
    """Make a batch from a filled buffer's description and its bytes on the caller's device."""
    return Batch(
        step=filled.step,
        micro_step=filled.micro_step,
        epoch=filled.epoch,
        bucket=filled.bucket,
        latent_kind=latent_kind,
        recorded_scale=scale,
        **as_fields(carve(flat, filled.fields)),
    )


def check_ranks(config: object, rank: object, world_size: int) -> None:
    """Check the types of what every loader is given."""
    expect("config", config, LoaderConfig, "a LoaderConfig: Loader(stores, LoaderConfig(batch_size=8))")
    expect_int("rank", rank)
    expect_int("world_size", world_size)
    if world_size < 1:
        raise UsageError(f"world_size is {world_size}, expected 1 or more: the number of ranks of the run")
