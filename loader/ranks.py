"""Agreement of a run's ranks, by torch.distributed where it is initialised: on the generations that their loaders read."""

from __future__ import annotations

import contextlib
import functools
import os
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist

from bucketline.errors import BucketlineError, PlanError, StoreError, UsageError
from bucketline.loader.mixture import StoreId, at_generations

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from bucketline.loader.mixture import WeightedStore
    from bucketline.loader.plan.plan import Plan

T = TypeVar("T")

DISK_TIME = timedelta(hours=2)
"""Timeout of `host_group`: rank 0 may spend longer than the default ten minutes on its disk, with a checkpoint of 190 GB."""
LOADER_TIME = timedelta(minutes=10)  # for the last rank to make its loader, once the first has


def host_group() -> dist.ProcessGroup:
    """Return the group for decisions and for long waits, made by the first call, on every rank at the same point.

    It is gloo's: NCCL's collectives keep the GPU busy while they wait, and give up after ten minutes.
    """
    return _host_group(dist.group.WORLD)


@functools.cache
def _host_group(_world: dist.ProcessGroup | None, timeout: timedelta = DISK_TIME) -> dist.ProcessGroup:
    group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=timeout)
    return group


def _is_up() -> bool:
    return dist.is_available() and dist.is_initialized()


class _Forked:
    """The group of the process that forked this one: its connections are not this process's to use."""

    group: dist.ProcessGroup | None = None

    @classmethod
    def note(cls) -> None:
        cls.group = dist.group.WORLD if _is_up() else None


os.register_at_fork(after_in_child=_Forked.note)


class OtherRankFailedError(BucketlineError):
    """Another rank failed and reported the reason; this rank only has to exit."""


def gathered(value: T) -> list[T]:
    """Return every rank's value, in rank order."""
    if not _is_up() or dist.get_world_size() == 1:
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value, group=host_group())
    return values


@contextlib.contextmanager
def fail_together() -> Iterator[None]:
    """Run the body on every rank, and continue as soon as all have done so."""
    is_done = False
    try:
        yield
        is_done = True
    finally:
        done = gathered(is_done)
    if not all(done):
        raise OtherRankFailedError(f"rank {done.index(False)} failed")


def agreed(
    opened: Callable[[], tuple[WeightedStore, ...]], rank: int, world_size: int, *, are_chosen: bool
) -> tuple[WeightedStore, ...]:
    """Return a loader's stores, opened at generations that all ranks of its run read: rank 0's.

    Ranks that open a store between two publications would otherwise plan on two generations. Without torch.distributed, none
    can know what the others have opened, and only a first generation is certain. `are_chosen`: the caller has opened them.
    """
    if why := _why_not_agreed(rank, world_size):
        stores = opened()
        if not are_chosen:
            _refuse_uncertain(stores, rank, world_size, why)
        return stores
    _wait_for_all(rank)
    with fail_together():
        stores = opened()
    every = gathered(_identities(stores))
    ids = [[(store.store_id, store.repeats) for store in stores_of] for stores_of in every]
    _expect_alike(every, ids, "give all ranks the same stores, in the same order, with the same repeats")
    if any(stores_of != every[0] for stores_of in every):
        with fail_together():
            stores = at_generations(stores, [store.generation for store in every[0]])
        every = gathered(_identities(stores))
        _expect_alike(every, every, "check that all ranks see the same files")
    return stores


def make_together(make: Callable[[], tuple[T, Plan]], rank: int, world_size: int) -> tuple[T, Plan]:
    """Return what `make` does, once every rank of the run has made the same plan; see `agreed` for the ranks that are asked."""
    if _why_not_agreed(rank, world_size):
        return make()
    with fail_together():
        rows, plan = make()
    expect_same_plan(plan)
    return rows, plan


def expect_same_plan(plan: Plan) -> None:
    """Check that every rank has this plan: otherwise rows would be read twice, and others never.

    Raises:
        PlanError: if they differ.
    """
    plans = gathered((plan.digest, plan.window, plan.lanes))
    for rank, other in enumerate(plans):
        if other != plans[0]:
            (digest, window, lanes), (first, first_window, first_lanes) = other, plans[0]
            raise PlanError(
                f"rank {rank} has the plan {digest} (window {window}, lanes {lanes}), and rank 0 the plan {first} (window "
                f"{first_window}, lanes {first_lanes}); give all ranks the same options and the same BUCKETLINE_CACHE_BYTES"
            )


def _expect_alike(every: Sequence[Sequence[StoreId]], parts: Sequence[object], remedy: str) -> None:
    for rank, part in enumerate(parts):
        if part != parts[0]:
            here, first = (
                ", ".join(f"{s.store_id} x {s.repeats} (generation {s.generation}, digest {s.digest})" for s in stores)
                for stores in (every[rank], every[0])
            )
            raise StoreError(f"rank {rank} has opened the store {here}, and rank 0 the store {first}; {remedy}")


def pinned(stores: Sequence[WeightedStore], generation: int | Sequence[int]) -> tuple[WeightedStore, ...]:
    """Return stores at the generations that a caller gave, one for each store."""
    numbers = tuple(generation) if isinstance(generation, list | tuple) else (generation,)
    if len(numbers) != len(stores) or any(type(number) is not int for number in numbers):
        raise UsageError(
            f"generation is {generation!r:.100}, expected a number for each of {len(stores)} stores, such as "
            f"{tuple(weighted.store.manifest.generation for weighted in stores)}, the newest now"
        )
    return at_generations(stores, numbers)


def _why_not_agreed(rank: int, world_size: int) -> str | None:
    """Return why these ranks cannot agree by torch.distributed; None if they can."""
    if not _is_up():
        return "is not initialised"
    if dist.group.WORLD is _Forked.group:
        return "is of the process that forked this one"
    here = dist.get_rank(), dist.get_world_size()
    return None if here == (rank, world_size) else f"is rank {here[0]} of {here[1]} here"


def expect_agreement(rank: int, world_size: int) -> None:
    """Check that the several ranks of a loader that follows its stores can agree on a generation.

    Raises:
        UsageError: if torch.distributed does not know them.
    """
    if why := _why_not_agreed(rank, world_size):
        raise UsageError(
            f"follow is set for rank {rank} of {world_size}, which must agree with the others on the generation of each epoch, "
            f"and torch.distributed {why}; initialise it with these ranks first"
        )


def _refuse_uncertain(stores: Sequence[WeightedStore], rank: int, world_size: int, why: str) -> None:
    numbers = tuple(weighted.store.manifest.generation for weighted in stores)
    if max(numbers) == 1:
        return
    shown = numbers[0] if len(numbers) == 1 else numbers
    where = ", ".join(weighted.store.where for weighted in stores)
    raise UsageError(
        f"rank {rank} of {world_size} has opened generation {shown} of {where}, and "
        f"torch.distributed {why}: another rank may have opened an earlier one, and would read other buckets at the same step. "
        f"Give every rank the same generation={shown}, or initialise torch.distributed with these ranks first"
    )


def _wait_for_all(rank: int) -> None:
    try:  # in a group of this timeout: the first call makes it, and that waits for the other ranks too
        dist.monitored_barrier(group=_host_group(dist.group.WORLD, LOADER_TIME), timeout=LOADER_TIME)
    except RuntimeError as error:
        raise UsageError(
            f"rank {rank} has waited {LOADER_TIME} for the other ranks' loaders ({error!s:.200}); make a loader of several "
            "ranks on every rank, in the same order, or give its generation="
        ) from error


def _identities(stores: Sequence[WeightedStore]) -> list[StoreId]:
    return [StoreId.of(weighted, path="") for weighted in stores]  # ranks may reach a store by different paths
