"""Make the plan of a store and a configuration: the buckets' batches, the lanes, and the window that a cache allows."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from bucketline.command_line import machines_of
from bucketline.errors import PlanError
from bucketline.loader.config import USUAL_WINDOW, Remainder
from bucketline.loader.plan.cache_needs import CacheNeeds
from bucketline.loader.plan.lanes import ShardRuns
from bucketline.loader.plan.plan import Plan, PlanBucket
from bucketline.option_types import expect
from bucketline.store.read.store import OpenShards

if TYPE_CHECKING:
    from bucketline.loader.config import LoaderConfig


def make_plan(store: OpenShards, config: LoaderConfig, *, world_size: int = 1, cache_bytes: int | None = None) -> Plan:
    """Make the plan over one split of a store's generation, or of several joined stores.

    If `config.window` is None, the window is chosen by `cache_bytes`, the size of each machine's cache: by default by the
    configuration's, if a store is read at a URL.

    Raises:
        PlanError: if the split has no rows.
        UsageError: if `store` is not an open one.
    """
    expect("store", store, OpenShards, "an open store: make_plan(Store.open('photos.store'), config)")
    of_split = store.buckets(config.split)
    if not of_split:
        held = ", ".join(sorted({bucket.split for bucket in store.buckets()})) or "none"
        raise PlanError(
            f"the plan has no step: {store.where} has no rows in the split {config.split!r} (splits with rows: {held}); pack "
            "into it, or name a split that has rows"
        )
    buckets = tuple(
        PlanBucket(
            name=bucket.name,
            num_rows=sum(part.per_pass for part in parts) if parts else bucket.num_rows,
            global_batch=config.rows_of(bucket) * config.accumulation * world_size,
            parts=parts,
        )
        for bucket in of_split
        for parts in [bucket.shares()]
    )
    plan = Plan(
        seed=config.seed,
        remainder=Remainder(config.remainder),
        buckets=buckets,
        source=store.generations,
        window=0 if config.window == 0 else None,
        epochs=config.num_epochs,
    )
    if cache_bytes is None and any(shard.source is not None for shard in store.shards):
        cache_bytes = config.remote().cache_bytes
    if config.window == 0 or (config.window is None and cache_bytes is None):
        return plan
    runs = [ShardRuns(shard=shard, repeat=repeat, num_rows=rows) for shard, repeat, rows in (own.runs() for own in of_split)]
    machines = machines_of(world_size)
    mixed = replace(plan, window=config.window or USUAL_WINDOW, lanes=config.lanes or machines, runs=tuple(runs))
    needs = CacheNeeds(store, mixed, machines)
    window = config.window
    if window is None and cache_bytes is not None:
        window = needs.window_for(cache_bytes)
    return plan if window is None else replace(mixed, window=min(window, needs.most_window))


def asked_window(store: OpenShards, plan: Plan) -> int | None:
    """Return the window that a plan was made with: the usual one, if the plan has as much of it as there may be."""
    most = CacheNeeds(store, plan, 1).most_window
    return USUAL_WINDOW if plan.window == min(USUAL_WINDOW, most) else plan.window


def plan_of(store: OpenShards, config: LoaderConfig, world_size: int) -> Plan:
    """Make the plan of a loader with this configuration. It is the same on every rank and in a service."""
    plan = make_plan(store, config, world_size=world_size)
    if plan.num_steps == 0 or not plan.has_steps:
        raise PlanError(plan.without_step())
    return plan


def plan_counts(plan: Plan, epochs: int, split: str) -> dict[str, Any]:
    """Return the steps and rows of some epochs, and each bucket's batches, as `loader plan --json` prints them."""
    if (steps := plan.steps_before(epochs)) == 0:
        raise PlanError(plan.without_step())
    counts = [(bucket, plan.batches_before(bucket, epochs)) for bucket in plan.buckets]
    return {
        "steps": steps,
        "rows": sum(batches * bucket.global_batch for bucket, batches in counts),
        "plan": plan.digest,
        "buckets": [
            {
                "name": bucket.name,
                "split": split,
                "rows": bucket.num_rows,
                "global_batch": bucket.global_batch,
                "batches": batches,
                "carried": epochs * bucket.num_rows - batches * bucket.global_batch,
            }
            for bucket, batches in counts
        ],
    }
