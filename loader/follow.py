"""Following stores that still grow: each epoch reads the newest generation.

An epoch of a generation is that of any loader which opens it. So once nothing more is packed, the plan is an ordinary one, and
it need not be known when that is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from bucketline.errors import BucketlineError, UsageError
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
    """Return the stores at their newest generations; as they are, if these cannot be read now."""
    wanted = [max(generations(share.store.path), default=None) if share.store.is_local else None for share in shares]
    try:
        return at_generations(shares, wanted, config)
    except BucketlineError:  # a server that does not answer now; what is read already stays readable
        return tuple(shares)


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
