"""Every order mixes within an epoch, and epochs differ: what came first does not come first again."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from bucketline.loader.config import Remainder
from bucketline.loader.plan.epoch_steps import ShardRuns
from bucketline.loader.plan.plan import Plan, PlanBucket

SHARDS, ROWS, BATCH, WINDOW, EPOCHS = 64, 512, 64, 1024, 5
SHARD = np.repeat(np.arange(SHARDS), ROWS)


def orders(window: int | None, lanes: int, seed: int) -> list[NDArray[np.int64]]:
    """Return the rows of each epoch, in the order in which they are read."""
    runs = ShardRuns(shard=np.arange(SHARDS), repeat=np.zeros(SHARDS, dtype=np.int64), num_rows=np.full(SHARDS, ROWS))
    bucket = PlanBucket(name="train/64x64", num_rows=SHARDS * ROWS, global_batch=BATCH)
    more: dict[str, Any] = {"window": window, "lanes": lanes, "runs": (runs,)}
    plan = Plan(seed=seed, remainder=Remainder.DROP, buckets=(bucket,), source="s", **more)
    ends = [plan.steps_before(epoch) for epoch in range(EPOCHS + 1)]
    return [np.concatenate([step.rows for step in plan.draw([(k, 0) for k in range(*pair)])]) for pair in pairwise(ends)]


@pytest.mark.parametrize(
    ("window", "lanes", "neighbours", "shards", "spread"),
    [
        (None, 1, 0.003, 38, 0.95),
        (WINDOW, 1, 0.1, 12, 0.05),
        (WINDOW, 8, 0.02, 38, 0.3),
    ],
)
def test_an_order_mixes_within_an_epoch_and_epochs_differ(
    window: int | None, lanes: int, neighbours: float, shards: int, spread: float
) -> None:
    """Neighbours in one batch at most, shards in a batch and a shard's spread over a full shuffle's at least."""
    for seed in (1, 2):
        epochs = orders(window, lanes, seed)
        for rows in epochs:
            assert len(np.unique(rows)) == len(rows) == SHARDS * ROWS
            position = np.argsort(rows)
            apart = np.diff(position // BATCH)[np.diff(SHARD) == 0]
            assert (apart == 0).mean() <= neighbours
            assert np.mean([len(np.unique(batch)) for batch in SHARD[rows].reshape(-1, BATCH)]) >= shards
            of_shards = position.reshape(SHARDS, ROWS).std(axis=1).mean()
            assert of_shards / (len(rows) / np.sqrt(12)) >= spread
        first = WINDOW * lanes
        again = [np.isin(one[: first // 2], other[:first]).mean() for one, other in pairwise(epochs)]
        assert np.mean(again) < first / len(epochs[0]) + 0.15, "hardly more than by chance"
