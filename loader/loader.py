"""The loader: batches of one bucket each, in the plan's order, filled ahead by one thread.

with Loader("photos.store", LoaderConfig(batch_size=8), device=torch.device("cuda")) as loader:
    for batch in loader:
        ...
"""

from __future__ import annotations

import atexit
import threading
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch

from bucketline.errors import PlanError, StateError, UsageError
from bucketline.loader.batch import Batch
from bucketline.loader.device import CudaCopier
from bucketline.loader.filler import Filled, Filler
from bucketline.loader.handover import Handover
from bucketline.loader.lookahead import Lookahead
from bucketline.loader.plan import make_plan
from bucketline.loader.ring import Ring, carve
from bucketline.loader.state import STATE_VERSION, LoaderState, as_json, check_state, global_batch_of, name_stores
from bucketline.loader.stores import join, open_shares

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor

    from bucketline.loader.config import LoaderConfig
    from bucketline.loader.stores import Stores

MIN_DEPTH, MAX_DEPTH = 2, 64


class Loader:
    """An iterable of one rank's micro-batches. One iterator at a time: a second one ends the first."""

    def __init__(
        self,
        stores: Stores,
        config: LoaderConfig,
        *,
        rank: int = 0,
        world_size: int = 1,
        device: torch.device | None = None,
    ) -> None:
        """Plan over the stores' generations; nothing is read before iteration starts.

        `stores` is one (open, or its path) or several; a `StoreShare` says how often a pass reads a store's rows.

        Raises:
            UsageError: where `rank` is not one of `world_size`, or the same store is given twice.
            PlanError: where there is not a single step to make.
            StoreError: where a store cannot be opened.
            FingerprintError: where two stores were made differently.
        """
        if not 0 <= rank < world_size:
            raise UsageError(f"rank is {rank} of {world_size} ranks, expected 0 to {world_size - 1}")
        self.shares = open_shares(stores)
        store = join(self.shares)
        self.config = config
        self.device = device or torch.device("cpu")
        if self.device.type not in ("cpu", "cuda"):
            raise UsageError(f"device is {self.device}, expected cpu or cuda")
        self._world_size = world_size
        self.plan = make_plan(store, config, world_size=world_size)
        self._marks, self._global_batch = name_stores(self.shares), global_batch_of(self.plan)
        self._num_steps = None if config.epochs is None else self.plan.steps_before(config.epochs)
        if self._num_steps == 0 or not self.plan.has_steps:
            raise PlanError(self.plan.without_step())
        self._filler = Filler(store, self.plan, config, rank, world_size)
        depth = config.prefetch_bytes // self._filler.slab_bytes
        self._depth = min(max(depth, MIN_DEPTH), MAX_DEPTH)
        on_cuda = self.device.type == "cuda"
        self._ring = Ring(self._filler.slab_bytes, self._depth + 2, pinned=on_cuda)
        self._copier = CudaCopier(self.device, self._ring) if on_cuda else None
        self._step = self._micro_step = 0
        self._producer: _Producer | None = None

    def __iter__(self) -> Iterator[Batch]:
        """Go on where the state stands. After the last of `epochs`, the next iteration begins anew."""
        self.close()
        if self._step == self._num_steps:
            self._step = self._micro_step = 0
        producer = _Producer(self._filler, self._ring, self._copier, self._depth, self.config.accumulation)
        self._producer = producer
        try:
            producer.start(self._step, self._micro_step, self._num_steps)
            while (batch := producer.next()) is not None:
                self._step, self._micro_step = batch.step, batch.micro_step + 1
                if self._micro_step == self.config.accumulation:
                    self._step, self._micro_step = self._step + 1, 0
                yield batch
        finally:
            producer.close()

    def __len__(self) -> int:
        """Give the micro-batches of all `epochs` together.

        Raises:
            TypeError: where the loader has no end.
        """
        if self._num_steps is None:
            raise TypeError("a loader with epochs=None has no length")
        return self._num_steps * self.config.accumulation

    def state_dict(self) -> dict[str, object]:
        """Give the state, as JSON takes it, under 1 KB: counts the micro-batches that the caller has consumed."""
        return as_json(self._state())

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Go on from a saved state, at the next iteration.

        Raises:
            StateError: where it belongs to another plan, naming the field, the saved and the present value.
        """
        self.close()
        found = check_state(state, self._state())
        if self._num_steps is not None and found.step > self._num_steps:
            raise StateError(
                f"the state is at step {found.step}, this loader ends after {self._num_steps} steps; give more epochs"
            )
        self._step, self._micro_step = found.step, found.micro_step

    def _state(self) -> LoaderState:
        return LoaderState(
            version=STATE_VERSION,
            step=self._step,
            micro_step=self._micro_step,
            accumulation=self.config.accumulation,
            world_size=self._world_size,
            global_batch=self._global_batch,
            settings=self.config.deciding(),
            stores=self._marks,
            plan=self.plan.digest,
        )

    def close(self) -> None:
        """End the iteration that is under way; its thread is gone when this returns."""
        if self._producer is not None:
            self._producer.close()
            self._producer = None

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if "_producer" in self.__dict__:
            self.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ready:
    """A filled micro-batch on its way to the caller; `event` ends its copy to a CUDA device."""

    filled: Filled
    flat: Tensor
    event: torch.cuda.Event | None


_RUNNING: weakref.WeakSet[_Producer] = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    """End every filling thread before the interpreter goes: one that is inside torch then would abort the process."""
    for producer in list(_RUNNING):
        producer.close()


class _Producer:
    """The thread that fills ahead. It knows nothing of the loader, so that a dropped loader ends it."""

    def __init__(self, filler: Filler, ring: Ring, copier: CudaCopier | None, depth: int, accumulation: int) -> None:
        self._filler, self._ring, self._copier, self._accumulation = filler, ring, copier, accumulation
        self._ready: Handover[_Ready] = Handover(depth)
        self._thread: threading.Thread | None = None

    def start(self, step: int, micro_step: int, num_steps: int | None) -> None:
        started = threading.Event()
        self._thread = threading.Thread(
            target=self._run, args=(step, micro_step, num_steps, started), name="bucketline-filler", daemon=True
        )
        _RUNNING.add(self)
        num_threads = torch.get_num_threads()
        try:
            self._thread.start()
            started.wait()
        finally:
            torch.set_num_threads(num_threads)

    def next(self) -> Batch | None:
        """Give the next batch, or None at the end. A failure of the thread is raised here."""
        ready = self._ready.take()
        if ready is None:
            return None
        flat = ready.flat
        if self._copier is not None:
            flat = self._copier.receive(flat, cast("torch.cuda.Event", ready.event))
        filled = ready.filled
        return Batch(
            step=filled.step,
            micro_step=filled.micro_step,
            epoch=filled.epoch,
            bucket=filled.bucket,
            **carve(flat, filled.fields),
        )

    def close(self) -> None:
        self._ready.close()
        thread = self._thread
        if thread is not None and thread.ident is not None and thread is not threading.current_thread():
            thread.join()

    def _run(self, step: int, micro_step: int, num_steps: int | None, started: threading.Event) -> None:
        # One thread that copies is enough, and torch's own pool belongs to the trainer. The setting is this thread's,
        # and the default of threads to come, which `start` puts back.
        torch.set_num_threads(1)
        started.set()
        try:
            for coming in Lookahead(self._filler, _micro_steps(step, micro_step, num_steps, self._accumulation)):
                if not self._ready.put(self._deliver(self._filler.fill(self._ring.take(), coming))):
                    return
            self._ready.end()
        except BaseException as error:  # noqa: BLE001 - handed to the caller, who raises it
            self._ready.end(error)

    def _deliver(self, filled: Filled) -> _Ready:
        if self._copier is not None:
            flat, event = self._copier.copy(filled.slab, filled.num_bytes)
            return _Ready(filled=filled, flat=flat, event=event)
        return _Ready(filled=filled, flat=self._ring.lend(filled.slab), event=None)


def _micro_steps(step: int, micro_step: int, num_steps: int | None, accumulation: int) -> Iterator[tuple[int, int]]:
    """Give the micro steps from a place on: (step, micro step)."""
    while num_steps is None or step < num_steps:
        yield step, micro_step
        micro_step += 1
        if micro_step == accumulation:
            step, micro_step = step + 1, 0
