"""The loader: batches of one bucket each, in the plan's order, prefetched by threads of this process or by a service.

with Loader("photos.store", LoaderConfig(batch_size=8), device=torch.device("cuda")) as loader:
    for epoch in range(10):
        for batch in loader:
            ...
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from bucketline.command_line import counted, shown_rows
from bucketline.errors import BucketlineError, StateError, UsageError
from bucketline.loader.batch import RecordedScale
from bucketline.loader.collate.batch_builder import BatchBuilder
from bucketline.loader.collate.buffers import latent_kind, make_conditioning
from bucketline.loader.collate.gather import Gather
from bucketline.loader.config import LoaderConfig
from bucketline.loader.iteration import (
    CLOSED,
    STATE_VERSION,
    EpochLoader,
    LoaderState,
    Reading,
    are_of,
    check_state,
    global_batch_of,
    parse_state,
    saved_choices,
    state_as_json,
)
from bucketline.loader.mixture import (
    StoreId,
    WeightedStore,
    are_open,
    at_generations,
    join,
    newest_generations,
    open_weighted,
)
from bucketline.loader.plan.epoch_steps import Cursor
from bucketline.loader.plan.plan import asked_window, plan_of, refuse_small_caches, reserve_ring
from bucketline.loader.prefetch.stream import Buffers, read_ahead
from bucketline.loader.ranks import agreed, expect_agreement, expect_same_plan, gathered, make_together, pinned
from bucketline.loader.service.client import ServiceBackend, link_to, served_names, served_stores
from bucketline.loader.service.sockets import AUTO, ServiceAddress
from bucketline.loader.service.wire import Request, StoresRequest, sent
from bucketline.option_value import expect, expect_int

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from bucketline.loader.batch import Batch
    from bucketline.loader.mixture import Mixture, Stores
    from bucketline.loader.plan.plan import Plan
    from bucketline.loader.prefetch.stream import Stream
    from bucketline.loader.service.ring import RingStream
    from bucketline.store import Store
    from bucketline.store.format.block import LatentKind
    from bucketline.store.remote.cache.fetch import FetchStats


class Loader(EpochLoader):
    """An iterable of one rank's micro-batches. One `for` is one epoch: each row once, in a new order, with new draws.

    Train for E epochs; `len(loader)` is the number of batches of this epoch, and `batch.epoch` its number:

        loader = Loader("photos.store", LoaderConfig(batch_size=8), device="cuda")
        for epoch in range(E):
            for batch in loader:
                ...

    Validate: the same batches every time, also after a `break`:

        held_out = LoaderConfig(batch_size=8, split="val", remainder="partial", rewind=True)
        validation = Loader("photos.store", held_out, device="cuda")
        for batch in validation:
            ...  # rows of `batch.weight` 0 only fill the last batch of a bucket

    Resume: the first `for` reads what remains of its epoch.

        state = loader.state_dict()  # after any batch; JSON; it counts what the loop has had
        loader.load_state_dict(state)  # of a new loader, also on another number of ranks
        for epoch in range(loader.epoch, E):
            for batch in loader:
                ...

    After a `break` or an exception in the loop, the next `for` reads the next epoch. `loader.forever()` iterates over all
    epochs, for loops that count steps; stopped, it continues where it was. After the last of `epochs`, another `for` is an
    error: the rows that were left over have been padded to batches, and more epochs would repeat them.

    A loader has one iterator at a time; one that another has replaced raises an error. It may be passed to a forked or spawned
    process, which iterates independently, from the state at that time.
    """

    def __init__(
        self,
        stores: Stores | None,
        config: LoaderConfig,
        *,
        rank: int = 0,
        world_size: int = 1,
        device: torch.device | str | int | None = None,
        service: ServiceAddress | Path | str | None = None,
        follow: bool = False,
        like: Loader | None = None,
        generation: int | Sequence[int] | None = None,
    ) -> None:
        """Make a plan over the stores' generations. No row is read before iteration starts.

        `stores` is one store (open, its path or its URL) or several. A `WeightedStore` sets how often a pass reads a store's
        rows. Stores in object storage are reached and cached as `config` says.

        `service`: who reads: a `loader serve` on this machine ("unix:PATH", or only the path) or another ("tcp://HOST:PORT"),
        or "auto" for a child process; a `ServiceAddress` has a token, too. Without it, threads of this process read. The
        batches are the same.

        With `stores` None, they are those that the service was started with: this machine needs none, and no credentials.

        `device`: of the batches; the number of a CUDA device, or None for host memory.

        `follow`: each epoch reads the newest generation of the stores. Several ranks agree on it by torch.distributed.

        `like`: a loader of the same stores and ranks, with a configuration of the same order. Its open stores, at the
        generations that it reads, and its plan are this one's.

        `generation`: of the store that is read, or of each of several; by default the newest. All ranks must read the same:
        where torch.distributed has been initialised with these ranks, they take rank 0's, so each makes its loaders in the same
        order. Where it has not, a store that has had more than one generation needs this number.

        Raises:
            UsageError: if `follow` is set with several ranks that torch.distributed does not know; if `rank` is not
                below `world_size`, a store is given twice, the process does not see the GPU, or `service` is not an address; if
                nothing says that all ranks read the same generation.
            DeliveryError: if `stores` is None and no service can be reached.
            PlanError: if the plan has no step, the lanes of a window do not divide a global batch, or ranks have other plans.
            StoreError: if a store cannot be opened.
            FingerprintError: if two stores were packed with different settings.
        """
        expect("config", config, LoaderConfig, "a LoaderConfig: Loader(stores, LoaderConfig(batch_size=8))")
        expect_int("rank", rank)
        expect_int("world_size", world_size)
        if world_size < 1:
            raise UsageError(f"world_size is {world_size}, expected 1 or more: the number of ranks of the run")
        if not 0 <= rank < world_size:
            raise UsageError(f"rank is {rank} of {world_size} ranks, expected 0 to {world_size - 1}")
        address = None if service is None else ServiceAddress.of(service)
        if follow and world_size > 1:
            expect_agreement(rank, world_size)
        self.follows = follow
        chosen = ("lanes", "window") if config.window != 0 else ()
        self._chosen = [name for name in chosen if getattr(config, name) is None]  # a state may set them
        self.device = device_of(device)
        self._rank, self._world_size, self._service = rank, world_size, address
        self._has_stores = stores is not None
        self._backend: ServiceBackend | None = None
        self._buffers = Buffers(self.device)
        if like is None:
            opened = self._opened(stores, config, generation)
            if world_size == 1 or generation is not None:
                readable = self._readable(opened, config)
            else:
                readable = make_together(lambda: self._readable(opened, config), rank, world_size)
            self._open(opened, config, readable)
        else:
            self._open(like.stores, config, (like._rows, like.plan))
        self._begin_at_first_epoch()

    def _opened(
        self, stores: Stores | None, config: LoaderConfig, generation: int | Sequence[int] | None
    ) -> tuple[WeightedStore, ...]:
        """Return the stores, at the generations that all ranks read."""

        def opened() -> tuple[WeightedStore, ...]:
            if stores is not None:
                return open_weighted(stores, config.remote())
            if self._service is None:
                raise UsageError("stores is None without a service, expected stores, or the service that has them")
            return served_stores(link_to(self._service), StoresRequest())

        if generation is not None:
            return pinned(opened(), generation)
        return self._agreed(opened, are_chosen=stores is not None and are_open(stores))

    def _agreed(self, opened: Callable[[], tuple[WeightedStore, ...]], *, are_chosen: bool) -> tuple[WeightedStore, ...]:
        return opened() if self._world_size == 1 else agreed(opened, self._rank, self._world_size, are_chosen=are_chosen)

    def _readable(self, stores: Sequence[WeightedStore], config: LoaderConfig) -> tuple[Store | Mixture, Plan]:
        """Return stores joined and the plan over them, after checking that this loader can read them."""
        if config.row_weights and len(config.row_weights) != len(stores):
            raise UsageError(
                f"row_weights has {len(config.row_weights)} numbers, expected one for each of {len(stores)} stores"
            )
        rows = join(stores, plain_reads=config.plain_reads)
        plan = plan_of(rows, config, self._world_size)
        make_conditioning(rows, rows.buckets(config.split), config)
        if self._service is None:  # whose cache is its own
            refuse_small_caches(rows, plan, self._world_size)
        return rows, plan

    def _open(self, stores: tuple[WeightedStore, ...], config: LoaderConfig, readable: tuple[Store | Mixture, Plan]) -> None:
        self.stores, (self._rows, plan) = stores, readable
        self._global_batch = global_batch_of(plan)
        self._latent_kind = latent_kind(self._rows)
        self._recorded_scale = RecordedScale(where=self._rows.where, encoders=self._rows.encoders)
        self._set_plan(config, plan)

    def _set_plan(self, config: LoaderConfig, plan: Plan) -> None:
        """Read by a plan; the configuration then names the lanes and the window that it has."""
        self.plan = plan
        if plan.window:
            window = config.window or asked_window(self._rows, plan)
            config = replace(config, lanes=plan.lanes, window=window)
        self.config, self._steps = config, plan.epoch_steps
        if self._backend is not None:
            self._backend.turn_to(self._request())
        elif self._service is not None:
            self._backend = self._backend_at(self._service)
        else:
            gather = Gather(self._rows, plain_reads=config.plain_reads)
            self._builder = BatchBuilder(self._rows, gather, plan, config, self._rank, self._world_size)
            reserve_ring(self._builder, self._rows, plan, self._rank, self._world_size)

    def _backend_at(self, address: ServiceAddress) -> ServiceBackend:
        link = link_to(address, [str(weighted.store.absolute) for weighted in self.stores], self.config)
        return ServiceBackend(link, self._request(), self.device)

    def _request(self) -> Request:
        return Request(
            stores=tuple(StoreId.of(weighted, weighted.store.absolute) for weighted in self.stores),
            config=sent(self.config),
            rank=self._rank,
            world_size=self._world_size,
            plan=self.plan.digest,
            cursor=Cursor(step=0, micro_step=0, num_steps=None),  # replaced by each iteration's
        )

    def _renew(self) -> bool:
        if not self.follows:
            return False
        stores = self._agreed(lambda: newest_generations(self.stores), are_chosen=False)
        numbers = _generations(stores)
        if numbers == _generations(self.stores):
            return False
        readable, why = None, None
        try:
            readable = self._readable(stores, self.config)
        except BucketlineError as error:
            why = str(error)
        refused = [reason for reason in gathered(why) if reason is not None]
        if readable is None or refused:
            warnings.warn(f"generation {', '.join(map(str, numbers))} is not read: {refused[0]}", stacklevel=2)
            return False
        if self._world_size > 1:
            expect_same_plan(readable[1])
        self._end_stream()
        self._open(stores, self.config, readable)
        return True

    def _begin_stream(self) -> Stream | RingStream:
        sources = [weighted.store.source for weighted in self.stores if weighted.store.source is not None]
        if self._backend is None and any(source.is_inherited for source in sources):
            # object storage cannot be read in a forked process
            self._backend = self._backend_at(ServiceAddress(AUTO))
        elif self._backend is None and any(source.is_removed for source in sources):
            self._read_at(_generations(self.stores))
        if self._backend is not None:
            return self._backend.begin(self._cursor)
        return read_ahead(self._builder, self._buffers, self._cursor)

    def _read_at(self, generations: Sequence[int]) -> None:
        stores = at_generations(self.stores, generations)
        self._open(stores, self.config, self._readable(stores, self.config))

    @property
    def rows(self) -> Store | Mixture:
        """The rows of all stores, of every split, joined by bucket."""
        return self._rows

    @property
    def latent_kind(self) -> LatentKind:
        return self._latent_kind

    def names(self, batch: Batch) -> list[str]:
        """Return the sample ids of a batch's rows (paths in the source, with extension), `[B]`; reads each sample's record.

        Raises:
            StoreError: if a row is of another store.
        """
        digests = [digest.tobytes() for digest in batch.ids.cpu().numpy()]
        if self._has_stores:
            return self._rows.ids_of(digests)
        assert isinstance(self._backend, ServiceBackend)
        return served_names(self._backend.link, self._request().stores, digests)

    def _fetched(self) -> tuple[FetchStats, ...]:
        sources = dict.fromkeys(weighted.store.source for weighted in self.stores)
        return tuple(source.stats() for source in sources if source is not None)

    def state_dict(self) -> dict[str, object]:
        """Return the state as JSON values. It counts the micro-batches that the caller has consumed."""
        return state_as_json(self._state())

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Resume from a saved state, with its lanes and window if the configuration names none.

        The next `for` reads what remains of the state's epoch; at an epoch's end, the one that follows.

        Raises:
            StateError: if it belongs to another plan; the message names the field, its saved and its current value.
        """
        self._end_iteration("load_state_dict() was called")
        parsed, present = parse_state(state), self._state()
        may_turn = (self.follows or not self._has_stores) and are_of(parsed, present.stores)
        if may_turn and parsed.generations != present.generations:
            self._read_at(parsed.generations)
        saved = {name: value for name, value in saved_choices(parsed, self.plan).items() if name in self._chosen}
        if any(getattr(self.config, name) != value for name, value in saved.items()):
            config = replace(self.config, **saved)  # type: ignore[arg-type]
            self._set_plan(config, plan_of(self._rows, config, self._world_size))
        check_state(parsed, self._state())
        self._expect_position(parsed)
        self._resume(parsed)

    def renew(self) -> bool:
        """Move to the next epoch if one has just ended; return True if that is of another generation than the last one.

        Every iteration of a loader with `follow` does so. A loop over `forever()` that calls it between two steps, on every
        rank, knows of a newer generation before it has its first batch.
        """
        return self.follows and self.is_between_epochs and self._begin_next()

    def start_anew(self, state: Mapping[str, object]) -> None:
        """Continue at a saved state's step by this loader's own plan, whatever plan the state has.

        Raises:
            StateError: if the state is damaged, or was saved within a step.
        """
        parsed = parse_state(state)
        if parsed.micro_step:
            raise StateError(
                f"the state was saved within a step (micro-batch {parsed.micro_step} of {parsed.accumulation}), and a new plan "
                "begins between steps; resume it by its own plan"
            )
        self._end_iteration("start_anew() was called")
        self._resume(parsed)

    def _state(self) -> LoaderState:
        return LoaderState(
            version=STATE_VERSION,
            step=self._cursor.step,
            micro_step=self._cursor.micro_step,
            epoch=self._epoch_of_state(),
            accumulation=self.config.accumulation,
            world_size=self._world_size,
            batch=self.config.sizing(),
            global_batch=self._global_batch,
            settings=self.config.deciding(),
            stores=tuple(map(StoreId.of, self.stores)),
            plan=self.plan.digest,
            epochs=self.plan.epochs,
        )

    def __repr__(self) -> str:
        state = self._state()
        size = " ".join(f"{name}={value}" for name, value in self.config.sizing().items())
        rank = "" if self._world_size == 1 else f", rank {self._rank} of {self._world_size}"
        buckets = [(bucket.name, bucket.num_rows) for bucket in self.plan.buckets]
        return shown_rows(f"Loader: {size}, epoch {self.epoch}, step {state.step}{rank}", buckets)

    def close(self) -> None:
        """End the current iteration, and a service in a child process. Threads and processes are gone when this returns.

        Batches still held stay valid. As after a `break`, the next `for` reads the next epoch.
        """
        self._end_iteration(CLOSED)
        if self._backend is not None:
            self._backend.close()

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if "_stream" in self.__dict__:
            self.close()

    def __reduce__(self) -> tuple[object, ...]:
        """Return what another process needs to resume from this state; a spawned process opens the store itself."""
        options = {
            "stores": [WeightedStore(each.store.absolute, each.repeats) for each in self.stores] if self._has_stores else None,
            "config": replace(self.config, **dict.fromkeys(self._chosen)),  # type: ignore[arg-type] # the state sets these
            "rank": self._rank,
            "world_size": self._world_size,
            "device": self.device,
            "service": self._service,
            "follow": self.follows,
            "generation": _generations(self.stores),
        }
        # at an epoch's end, the state is at the next one, which nobody has begun
        return _again, (options, self.state_dict(), Reading.CHOSEN if self._is_read else self._reading)


def _again(options: dict[str, Any], state: dict[str, object], reading: Reading) -> Loader:
    loader = Loader(**options)
    loader.load_state_dict(state)
    loader._reading = reading
    return loader


def _generations(stores: Sequence[WeightedStore]) -> list[int]:
    return [weighted.store.manifest.generation for weighted in stores]


def device_of(device: torch.device | str | int | None) -> torch.device:
    """Return the device of a loader's batches: the CPU for None, a CUDA device for its number."""
    expected = "expected cpu, cuda, cuda:N, N or None"
    if device is None:
        return torch.device("cpu")
    if isinstance(device, bool) or not isinstance(device, torch.device | str | int):
        raise UsageError(f"device is {device!r:.80}, {expected}")
    try:
        chosen = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    except (RuntimeError, ValueError, OverflowError) as error:
        raise UsageError(f"device is {device!r:.80}, {expected}") from error
    if chosen.type not in ("cpu", "cuda") or (chosen.index or 0) < 0:
        raise UsageError(f"device is {device!r:.80}, {expected}")
    if chosen.type == "cuda" and (chosen.index or 0) >= (num_gpus := torch.cuda.device_count()):
        raise UsageError(f"device is {chosen}, and this process sees {counted(num_gpus, 'GPU')}, {expected}; see nvidia-smi")
    return chosen
