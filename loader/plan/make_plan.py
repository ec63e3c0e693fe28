"""Make the plan of a store and a configuration: the buckets' batches, the lanes, and the window that a cache allows."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from bucketline.command_line import machines_of
from bucketline.errors import PlanError
from bucketline.loader.config import SHUFFLE_WINDOW, Remainder, Shuffle
from bucketline.loader.plan.cache_needs import most_window, window_for
from bucketline.loader.plan.lanes import ShardRuns
from bucketline.loader.plan.plan import Plan, PlanBucket
from bucketline.option_types import expect
from bucketline.store.read.store import OpenShards

if TYPE_CHECKING:
    from bucketline.loader.config import LoaderConfig


def make_plan(store: OpenShards, config: LoaderConfig, *, world_size: int = 1) -> Plan:
    """Make the plan over one split of a store's generation, or of several joined stores.

    Raises:
        PlanError: if the split has no rows.
        UsageError: if `store` is not an open one.
    """
    expect("store", store, OpenShards, "an open store: make_plan(Store.open('photos.store'), config)")
    buckets = tuple(
        PlanBucket(
            name=bucket.name,
            num_rows=sum(part.per_pass for part in parts) if parts else bucket.num_rows,
            global_batch=config.rows_of(bucket) * config.accumulation * world_size,
            parts=parts,
        )
        for bucket in store.buckets(config.split)
        for parts in [bucket.shares()]
    )
    if config.shuffle is Shuffle.LINES and any(bucket.parts for bucket in buckets):
        raise PlanError(
            f"{store.where} is to be read by shuffle lines, and a pass reads a share of a store's rows, expected whole "
            "repeats: lines deals whole shards. Set shuffle='full' or 'blocks', or give whole repeats"
        )
    if not buckets:
        held = ", ".join(sorted({bucket.split for bucket in store.buckets()})) or "none"
        raise PlanError(
            f"the plan has no step: {store.where} has no rows in the split {config.split!r} (splits with rows: {held}); pack "
            "into it, or name a split that has rows"
        )
    is_lines = config.shuffle is Shuffle.LINES
    lanes = lanes_of(config, world_size)
    runs = [bucket.runs() for bucket in store.buckets(config.split)] if is_lines else []
    plan = Plan(
        seed=config.seed,
        remainder=Remainder(config.remainder),
        buckets=buckets,
        source=store.generations,
        shuffle=Shuffle(config.shuffle),
        shuffle_window=config.shuffle_window or SHUFFLE_WINDOW,
        lanes=lanes,
        epochs=config.num_epochs,
        runs=tuple(ShardRuns(shard=shard, repeat=repeat, num_rows=num_rows) for shard, repeat, num_rows in runs),
    )
    if not is_lines:
        return plan
    window, cache_bytes = plan.shuffle_window, config.remote().cache_bytes
    if config.shuffle_window is None and cache_bytes is not None:
        window = window_for(store, plan, machines_of(world_size), cache_bytes)
    return replace(plan, shuffle_window=min(window, most_window(store)))


def lanes_of(config: LoaderConfig, world_size: int) -> int:
    """Return the lanes of a configuration's plan: one for each machine, unless it says how many."""
    return (config.lanes or machines_of(world_size)) if config.shuffle is Shuffle.LINES else 1


def asked_window(store: OpenShards, plan: Plan) -> int:
    """Return the window that a plan by `lines` was made with: the usual one, if the plan has as much of it as there may be."""
    return SHUFFLE_WINDOW if plan.shuffle_window == min(SHUFFLE_WINDOW, most_window(store)) else plan.shuffle_window


def plan_of(store: OpenShards, config: LoaderConfig, world_size: int) -> Plan:
    """Make the plan of a loader with this configuration. It is the same on every rank and in a service.

    Raises:
        PlanError: if the plan has no step.
    """
    plan = make_plan(store, config, world_size=world_size)
    if plan.num_steps == 0 or not plan.has_steps:
        raise PlanError(plan.without_step())
    return plan


def plan_counts(plan: Plan, epochs: int, split: str) -> dict[str, Any]:
    """Return the steps and rows of some epochs, and each bucket's batches, as `loader plan --json` prints them.

    Raises:
        PlanError: if there is no step.
    """
    if (steps := plan.steps_before(epochs)) == 0:
        raise PlanError(plan.without_step())
    counts = [plan.count(bucket, epochs) for bucket in plan.buckets]
    return {
        "steps": steps,
        "rows": sum(count.batches * count.bucket.global_batch for count in counts),
        "plan": plan.digest,
        "buckets": [
            {
                "name": count.bucket.name,
                "split": split,
                "rows": count.bucket.num_rows,
                "global_batch": count.bucket.global_batch,
                "batches": count.batches,
                "carried": count.carried,
                "repeats": count.repeats,
            }
            for count in counts
        ],
    }
