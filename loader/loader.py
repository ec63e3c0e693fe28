"""The loader: batches of one bucket each, in the plan's order, filled ahead by threads of this process or by a service.

with Loader("photos.store", LoaderConfig(batch_size=8), device=torch.device("cuda")) as loader:
    for batch in loader:
        ...
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import torch

from bucketline.errors import StateError, UsageError
from bucketline.loader.batch import Batch, as_fields
from bucketline.loader.conditioning import latent_kind
from bucketline.loader.delivery import Beginning, Supply
from bucketline.loader.plan import plan_of
from bucketline.loader.providers import InProcessProvider, Reading, ServiceProvider
from bucketline.loader.ring import carve
from bucketline.loader.state import STATE_VERSION, LoaderState, as_json, check_state, global_batch_of, name_stores
from bucketline.loader.stats import LoaderStats, Meter
from bucketline.loader.stores import StoreShare, join, open_shares
from bucketline.store import Store

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from torch import Tensor

    from bucketline.loader.batch import LatentKind
    from bucketline.loader.config import LoaderConfig
    from bucketline.loader.delivery import Delivery
    from bucketline.loader.filler import Filled
    from bucketline.loader.providers import Provider
    from bucketline.loader.stores import Stores


class Loader:
    """An iterable of one rank's micro-batches. One iterator at a time: a second one ends the first.

    It may be handed to a process that is forked or spawned: that one's iterations are its own, from the state as it was.
    """

    def __init__(
        self,
        stores: Stores,
        config: LoaderConfig,
        *,
        rank: int = 0,
        world_size: int = 1,
        device: torch.device | str | None = None,
        service: Path | str | None = None,
    ) -> None:
        """Plan over the stores' generations; nothing is read before iteration starts.

        `stores` is one (open, or its path) or several; a `StoreShare` says how often a pass reads a store's rows.

        `service`: the socket of a `loader serve` that reads this store, or "auto" for a private process that does; this
        process's own threads read unless it is given. The batches are the same.

        Raises:
            UsageError: where `rank` is not one of `world_size`, a store is given twice, or the socket's path is too long.
            PlanError: where there is not a single step to make.
            StoreError: where a store cannot be opened.
            FingerprintError: where two stores were made differently.
        """
        if not 0 <= rank < world_size:
            raise UsageError(f"rank is {rank} of {world_size} ranks, expected 0 to {world_size - 1}")
        self.shares = open_shares(stores)
        store = join(self.shares)
        self.config = config
        self.device = torch.device(device or "cpu")
        if self.device.type not in ("cpu", "cuda"):
            raise UsageError(f"device is {self.device}, expected cpu or cuda")
        self._rank, self._world_size, self._service = rank, world_size, service
        self.plan = plan_of(store, config, world_size)
        self._marks, self._global_batch = name_stores(self.shares), global_batch_of(self.plan)
        self._num_steps = None if config.epochs is None else self.plan.steps_before(config.epochs)
        self._latent_kind = latent_kind(store)
        reading = Reading(
            store=store,
            shares=self.shares,
            plan=self.plan,
            config=config,
            rank=rank,
            world_size=world_size,
            device=self.device,
        )
        self._provider: Provider = InProcessProvider(reading) if service is None else ServiceProvider(reading, service)
        self._step = self._micro_step = 0
        self._delivery: Delivery | None = None
        self._meter, self._supply = Meter(), Supply(ready=0, depth=0, slabs=0)

    def __iter__(self) -> Iterator[Batch]:
        """Go on where the state stands. After the last of `epochs`, the next iteration begins anew."""
        self._end()
        if self._step == self._num_steps:
            self._step = self._micro_step = 0
        self._meter = Meter()
        delivery, pid = self._begin(), os.getpid()
        try:
            while True:
                if os.getpid() != pid:  # the loop goes on in a process that was forked off within it
                    delivery, pid = self._begin(), os.getpid()
                asked = time.perf_counter()
                if (delivered := delivery.next()) is None:
                    return
                self._step, self._micro_step = delivered[0].step, delivered[0].micro_step + 1
                if self._micro_step == self.config.accumulation:
                    self._step, self._micro_step = self._step + 1, 0
                batch = _batch_of(*delivered, self._latent_kind)
                self._meter.note(asked, delivered[0])
                del delivered  # or the generator would hold the slab until the next one
                yield batch
                del batch
        finally:
            if self._delivery is delivery:
                self._end()
            else:  # it was ended, and its supply noted, perhaps long ago
                delivery.close()

    def _begin(self) -> Delivery:
        beginning = Beginning(
            step=self._step, micro_step=self._micro_step, num_steps=self._num_steps, accumulation=self.config.accumulation
        )
        self._delivery = self._provider.begin(beginning)
        return self._delivery

    def __len__(self) -> int:
        """Give the micro-batches of all `epochs` together.

        Raises:
            TypeError: where the loader has no end.
        """
        if self._num_steps is None:
            raise TypeError("a loader with epochs=None has no length")
        return self._num_steps * self.config.accumulation

    def set_epoch(self, epoch: int) -> None:
        """Move to the first step of an epoch, counted from 0; the next iteration begins there, and goes on past its end.

        Raises:
            UsageError: where the loader ends before that epoch.
        """
        if epoch < 0 or (self.config.epochs is not None and epoch >= self.config.epochs):
            expected = "0 or more" if self.config.epochs is None else f"0 to {self.config.epochs - 1}"
            raise UsageError(f"epoch is {epoch}, expected {expected}")
        self._end()
        self._step, self._micro_step = self.plan.steps_before(epoch), 0

    def stats(self) -> LoaderStats:
        """Give what the present iteration delivered so far, and how long the caller waited; costs microseconds."""
        supply = self._supply if self._delivery is None else self._delivery.supply()
        return self._meter.stats(supply)

    def state_dict(self) -> dict[str, object]:
        """Give the state, as JSON takes it, under 1 KB: counts the micro-batches that the caller has consumed."""
        return as_json(self._state())

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Go on from a saved state, at the next iteration.

        Raises:
            StateError: where it belongs to another plan, naming the field, the saved and the present value.
        """
        self._end()
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

    def _end(self) -> None:
        """End the iteration that is under way."""
        if self._delivery is not None:
            delivery, self._delivery = self._delivery, None
            self._supply = delivery.supply()
            delivery.close()

    def close(self) -> None:
        """End the iteration that is under way, and a private service: threads and processes are gone when this returns.

        Batches that are held stay valid, and a later iteration goes on where this one stood.
        """
        self._end()
        self._provider.close()

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if "_delivery" in self.__dict__:
            self.close()

    def __reduce__(self) -> tuple[object, ...]:
        """Give what another process needs to go on from this state: a process that is spawned opens the store itself."""
        stores = [(share.store.path.absolute(), share.store.manifest.generation, share.repeats) for share in self.shares]
        ranks = (self._rank, self._world_size, self.device, self._service)
        return _again, (stores, self.config, ranks, self.state_dict())


def _again(
    stores: list[tuple[Path, int, int]],
    config: LoaderConfig,
    ranks: tuple[int, int, torch.device, Path | str | None],
    state: dict[str, object],
) -> Loader:
    """Make a loader like one of another process, in its state."""
    rank, world_size, device, service = ranks
    shares = [StoreShare(store=Store.open(path, generation), repeats=repeats) for path, generation, repeats in stores]
    loader = Loader(shares, config, rank=rank, world_size=world_size, device=device, service=service)
    loader.load_state_dict(state)
    return loader


def _batch_of(filled: Filled, flat: Tensor, latent_kind: LatentKind) -> Batch:
    """Make the batch out of what was filled and its bytes on the caller's device."""
    return Batch(
        step=filled.step,
        micro_step=filled.micro_step,
        epoch=filled.epoch,
        bucket=filled.bucket,
        latent_kind=latent_kind,
        **as_fields(carve(flat, filled.fields)),
    )
