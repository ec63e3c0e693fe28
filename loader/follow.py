"""Following stores that still grow: look for newer generations in the background, and whether they can be read.

A plan over a generation is that of any loader which opens it: at step s, a loader that has followed the stores reads what a
loader of that generation reads at step s. So once nothing more is packed, the plan is an ordinary one, and it need not be known
when that is.
"""

from __future__ import annotations

import time
import warnings
from typing import TYPE_CHECKING, NamedTuple

from bucketline.errors import BucketlineError, UsageError
from bucketline.joinable_thread import JoinableThread
from bucketline.loader.collate.columns import make_conditioning
from bucketline.loader.mixture import WeightedStore, join
from bucketline.loader.plan.cache_needs import refuse_small_caches
from bucketline.loader.plan.make_plan import plan_of
from bucketline.store.format.manifest import generations

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bucketline.loader.config import LoaderConfig
    from bucketline.loader.plan.plan import Plan
    from bucketline.store.read.store import OpenShards

LOOK_EVERY_S = 1.0  # at a folder's names
ASK_EVERY_S = 15.0  # an object storage


def at_generations(
    shares: Sequence[WeightedStore], wanted: Sequence[int | None], config: LoaderConfig
) -> tuple[WeightedStore, ...]:
    """Return stores at other generations: `wanted` of each, or the newest for None."""
    return tuple(
        share
        if share.store.manifest.generation == generation
        else WeightedStore(store=share.store.reopened(generation, config.remote()), repeats=share.repeats)
        for share, generation in zip(shares, wanted, strict=True)
    )


def with_caches(shares: Sequence[WeightedStore]) -> tuple[WeightedStore, ...]:
    """Return stores at the same generations, those opened again whose cache was removed."""
    return tuple(
        share
        if (source := share.store.source) is None or not source.is_removed
        else WeightedStore(store=share.store.reopened(share.store.manifest.generation, source.options), repeats=share.repeats)
        for share in shares
    )


def newest_generations(shares: Sequence[WeightedStore], config: LoaderConfig) -> tuple[WeightedStore, ...]:
    """Return the stores at their newest generations."""
    wanted = [max(generations(share.store.path), default=None) if share.store.is_local else None for share in shares]
    return at_generations(shares, wanted, config)


class Readable(NamedTuple):
    """Stores that a loader can read, and its plan over them."""

    rows: OpenShards
    plan: Plan


def expect_readable(shares: Sequence[WeightedStore], config: LoaderConfig, world_size: int, *, is_served: bool) -> Readable:
    """Return stores joined and the plan over them, after checking that a loader with this configuration can read them.

    `is_served`: by a service, whose cache is its own.
    """
    if config.row_weights and len(config.row_weights) != len(shares):
        raise UsageError(f"row_weights has {len(config.row_weights)} numbers, expected one for each of {len(shares)} stores")
    rows = join(shares, plain_reads=config.plain_reads)
    plan = plan_of(rows, config, world_size)
    make_conditioning(rows, rows.buckets(config.split), config)
    if not is_served:
        refuse_small_caches(rows, plan, world_size)
    return Readable(rows, plan)


class GenerationWatch:
    """Looks for newer generations of a loader's stores, in a thread of its own, every few seconds."""

    def __init__(self, config: LoaderConfig, world_size: int, *, is_served: bool) -> None:
        self._config, self._world_size, self._is_served = config, world_size, is_served
        self._next = 0.0
        self._thread: JoinableThread | None = None
        self._found: tuple[int, ...] | None = None
        self._refused: tuple[int, ...] | None = None
        self._warning: str | None = None  # for the caller's thread

    def newer(self, shares: Sequence[WeightedStore]) -> tuple[int, ...] | None:
        """Return newer generations than the shares', one for each store, that can be read; never waits for a disk or server."""
        if self._thread is not None and not self._thread.is_alive():  # or it is another process's
            self._thread = None
        if self._thread is None and time.monotonic() >= self._next:
            is_local = all(share.store.is_local for share in shares)
            self._next = time.monotonic() + (LOOK_EVERY_S if is_local else ASK_EVERY_S)
            self._thread = JoinableThread(self._look, args=(tuple(shares),), name="bucketline-watch")
            self._thread.start()
        if (warning := self._warning) is not None:
            self._warning = None
            warnings.warn(warning, stacklevel=2)
        found = self._found
        return found if found is not None and found != _numbers(shares) else None

    def _look(self, shares: Sequence[WeightedStore]) -> None:
        try:
            newest = newest_generations(shares, self._config)
        except BucketlineError:  # a server that does not answer now; what is read already stays readable
            return
        numbers = _numbers(newest)
        if numbers in (_numbers(shares), self._refused):
            return
        try:
            expect_readable(newest, self._config, self._world_size, is_served=self._is_served)
        except BucketlineError as error:
            self._refused = numbers
            self._warning = f"generation {', '.join(map(str, numbers))} is not taken up: {error}"
            return
        self._found = numbers


def _numbers(shares: Sequence[WeightedStore]) -> tuple[int, ...]:
    return tuple(share.store.manifest.generation for share in shares)
