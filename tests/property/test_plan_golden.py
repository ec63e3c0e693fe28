"""The order of a seed, as literal values: a run of last year continues in the same order today, on any machine.

A change that makes one of these fail changes every order: it needs another PLAN_VERSION, and breaks each saved state.
"""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from bucketline.loader.config import Remainder
from bucketline.loader.plan.epoch_steps import ShardRuns
from bucketline.loader.plan.plan import PLAN_VERSION, Plan, PlanBucket

SIZES = [1, 2, 7, 255, 256, 257, 65_535, 65_536, 65_537, (1 << 17) - 1, 1 << 17, (1 << 17) + 1, 10**6, 10**12, (1 << 40) + 1]
STEPS = [0, 1, 1_000_003, 10**11]


def plan_of(window: int | None, remainder: Remainder, *sizes: int, seed: int = 2026) -> Plan:
    buckets = tuple(PlanBucket(name=f"train/{64 * (k + 1)}x64", num_rows=n, global_batch=4) for k, n in enumerate(sizes))
    runs = tuple(map(in_shards, sizes))
    return Plan(
        seed=seed,
        remainder=remainder,
        buckets=buckets,
        source="s:1:d",
        window=window,
        lanes=2,
        runs=runs,
    )


def in_shards(n: int) -> ShardRuns:
    """Return 40 shards, each some rows longer than the one before it, as far as the rows suffice."""
    ends = np.unique(np.arange(1, 41) ** 2 * n // 1600)
    held = np.diff(ends, prepend=0)
    shard = np.flatnonzero(held)
    return ShardRuns(shard=shard, repeat=np.zeros_like(shard), num_rows=held[shard])


def rows_at(window: int | None, n: int) -> str:
    """Return a digest of the rows at a few steps."""
    plan = plan_of(window, Remainder.CARRY, n)
    return hashlib.blake2b(repr([plan.at(step).rows.tolist() for step in STEPS]).encode(), digest_size=8).hexdigest()


def digest_of(window: int | None, remainder: Remainder) -> str:
    """Return a digest of thousands of rows: 600 steps from several places on, over buckets of all kinds of sizes."""
    plan = plan_of(window, remainder, *SIZES[2:])
    found = hashlib.blake2b(digest_size=16)
    for first in (0, 10**6, 10**10, 3 * 10**11):
        for planned in plan.draw([(first + k, 0) for k in range(150)]):
            found.update(f"{planned.epoch} {planned.bucket} {planned.rows.tolist()} {planned.weight.tolist()};".encode())
    return found.hexdigest()


@pytest.mark.parametrize("n", SIZES)
def test_the_rows_of_a_seed_never_change(n: int) -> None:
    assert (rows_at(None, n), rows_at(4096, n)) == ROWS[n]


@pytest.mark.parametrize("window", [None, 4096, 0])
@pytest.mark.parametrize("remainder", Remainder)
def test_steps_buckets_rows_and_weights_of_a_seed_never_change(window: int | None, remainder: Remainder) -> None:
    assert digest_of(window, remainder) == DIGESTS[window, remainder]


def test_the_digest_of_a_plan_never_changes() -> None:
    assert PLAN_VERSION == 1
    plans = [plan_of(window, Remainder.CARRY, 7, 3) for window in (None, 4096, 0)]
    assert [plan.digest for plan in plans] == PLAN_DIGESTS


ROWS = {
    1: ("95307960fa7319a9", "95307960fa7319a9"),
    2: ("585038a50477ae49", "e609796e0258a0aa"),
    7: ("7fe9f2e75018f20f", "ecbdc7c6533b6ac6"),
    255: ("77b7a3e88bbe1510", "1486be26c7ac67a5"),
    256: ("0b6ec9846c9cce97", "01ea7d44991a4007"),
    257: ("f78c42413e8d4632", "9644c0712bb0de56"),
    65535: ("00bc9d8f6831d7d5", "1d5a23e74ddca720"),
    65536: ("e9abf1de5a09d330", "f8602ee6b6397b6f"),
    65537: ("11fdbc0ff03d088d", "438c5b972a35b97b"),
    131071: ("be02d51d848c3970", "c29873a8df3d201f"),
    131072: ("28f8848549f4a7ce", "e1fa9bc68da36e46"),
    131073: ("5d4bf98e78147890", "853d8b1d0691c09e"),
    1000000: ("b4430efc4de1f603", "888029500cbee69b"),
    1000000000000: ("92b751baff01c0bc", "9f80ffeb050d416f"),
    1099511627777: ("b5b9ac6d976d3fb6", "f9fd700e908f6577"),
}
DIGESTS = {
    (None, Remainder.CARRY): "fa75f8e9550db1e9949f54de832fdc3b",
    (4096, Remainder.CARRY): "5ab0efae38352f532066d67a0192687d",
    (0, Remainder.CARRY): "c1c846af7aa415c38af425ac4472f528",
    (None, Remainder.DROP): "fa75f8e9550db1e9949f54de832fdc3b",
    (4096, Remainder.DROP): "5ab0efae38352f532066d67a0192687d",
    (0, Remainder.DROP): "c1c846af7aa415c38af425ac4472f528",
    (None, Remainder.PARTIAL): "9d9186ae5dc54c502826517c2c287ba4",
    (4096, Remainder.PARTIAL): "d028c19dd8745ac9a99e3ba241bc8d1e",
    (0, Remainder.PARTIAL): "a21ee446b9a142f5bee79e1db977beba",
}
PLAN_DIGESTS = [
    "304f2ccb626d582a525515d34bf653e0",
    "322f9a4d8eb6ffbfa00e66b398b2eb03",
    "501c7f1ed1a27354ef5a9f33dd3aaf1e",
]
