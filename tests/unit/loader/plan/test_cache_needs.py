"""How large a cache an order needs: the ring of two windows, the window that is chosen, and what is refused."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from bucketline.errors import StateError, UsageError
from bucketline.loader import Loader, LoaderConfig, Shuffle
from bucketline.loader.config import SHUFFLE_WINDOW, WINDOW_BLOCKS
from bucketline.loader.plan import cache_needs
from bucketline.loader.plan.cache_needs import (
    bytes_at_once,
    cache_for,
    in_use,
    num_bytes_of,
    share_of,
    sidecar_bytes_of,
    why_too_small,
)
from bucketline.loader.plan.make_plan import plan_of
from bucketline.store.remote.cache.folder import USUAL_RING_BYTES, ring_share
from tests.building import make_store, samples_of

if TYPE_CHECKING:
    from bucketline.loader.plan.plan import Plan
    from bucketline.store import Store
    from bucketline.store.read.store import OpenShards

LINE = 4096


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """A store of six shards of some 30 lines each."""
    samples = samples_of({"train/64x64": 700, "train/96x64": 300, "val/64x64": 16}, "a/")
    samples = [samples[n] for n in np.random.default_rng(0).permutation(len(samples))]
    return make_store(
        tmp_path_factory.mktemp("needs") / "a.store", *[samples[n : n + 170] for n in range(0, len(samples), 170)]
    )


@pytest.fixture(autouse=True)
def small_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_needs, "LINE_BYTES", LINE)
    monkeypatch.setattr("bucketline.store.remote.cache.folder.USUAL_RING_BYTES", 6 * LINE)


def config(**more: Any) -> LoaderConfig:
    return LoaderConfig(**{"batch_size": 4, "shuffle": Shuffle.LINES, **more})


def most_at_once(store: OpenShards, plan: Plan, machines: int) -> int:
    """Return the most bytes of lines that one machine's rows are in, over as many steps as read two windows of each lane."""
    parts = [plan.draw([(step, 0)], machines)[0] for step in range(plan.steps_before(1))]
    lines = list[set[tuple[int, int]]]()
    for part in parts:
        located = store.bucket(part.bucket).locate(part.rows)
        lines.append(set(zip(located.shard.tolist(), (located.data // LINE).tolist(), strict=True)))
    steps = max(1, 2 * plan.shuffle_window * plan.lanes // machines // len(parts[0].rows))
    return max(len(set().union(*lines[at : at + steps])) for at in range(len(lines))) * LINE


@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.parametrize("window", [16, 64, 200])
def test_the_lines_in_use_at_a_time_are_about_those_of_two_windows(store: Store, lanes: int, window: int) -> None:
    plan = plan_of(store, config(lanes=lanes, shuffle_window=window), lanes)
    used, share = in_use(store, plan, lanes)(window), share_of(store, lanes, lanes)
    assert most_at_once(store, plan, lanes) * 0.7 <= min(used, share)
    assert used <= 2.5 * most_at_once(store, plan, lanes)


def test_a_smaller_cache_has_a_smaller_window_and_one_that_holds_all_the_usual(store: Store) -> None:
    size = num_bytes_of(store) + sidecar_bytes_of(store)
    windows = [
        plan_of(store, config(cache_bytes=str(cache)), 2).shuffle_window
        for cache in (cache_for(size), size, size // 2, size // 8)
    ]
    assert windows[0] == SHUFFLE_WINDOW
    assert windows == sorted(windows, reverse=True)
    assert WINDOW_BLOCKS <= windows[-1] < windows[1]
    given = plan_of(store, config(cache_bytes=str(size // 8), shuffle_window=100), 2)
    assert given.shuffle_window == 100


def test_full_is_refused_with_its_factor_unless_the_cache_holds_the_store(store: Store) -> None:
    num_bytes, rows = num_bytes_of(store), sum(bucket.num_rows for bucket in store.buckets("train"))
    plan = plan_of(store, config(shuffle=Shuffle.FULL), 1)
    assert why_too_small(store, plan, cache_for(num_bytes + sidecar_bytes_of(store)), "train", 1) is None
    words = why_too_small(store, plan, num_bytes // 2, "train", 1)
    assert words is not None
    assert f"its {rows:,} rows" in words
    factor = float(words.split(" times the store")[0].rpartition(" ")[2])
    assert factor == pytest.approx(rows * 2 * LINE * 0.5 / num_bytes, rel=0.1)
    assert "use shuffle lines (--shuffle lines)" in words
    for size in (1 << 20, 5 << 30, 700 << 30):
        assert cache_for(size) - ring_share(cache_for(size)) >= size
        assert cache_for(size) <= size + USUAL_RING_BYTES


def test_what_does_not_fit_is_refused_with_the_cache_and_the_window_that_do(store: Store) -> None:
    plan = plan_of(store, config(shuffle_window=400), 1)
    needed = bytes_at_once(store, plan, 1)
    assert why_too_small(store, plan, needed + sidecar_bytes_of(store), "train", 1) is None
    words = why_too_small(store, plan, needed // 2, "train", 1)
    assert words is not None
    assert "windows of 400 rows of 1 lane have up to" in words
    found = re.search(r"--shuffle-window (\d+)\)$", words)
    assert found is not None
    smaller = replace(plan, shuffle_window=int(found[1]))
    assert why_too_small(store, smaller, needed // 2, "train", 1) is None
    least = why_too_small(store, plan, 8 * LINE, "train", 1)
    assert least is not None
    assert least.endswith("give at least that (--cache-bytes)")


@pytest.mark.parametrize("shuffle", [Shuffle.BLOCKS, Shuffle.NONE])
def test_another_order_needs_room_for_two_batches(shuffle: Shuffle, store: Store) -> None:
    plan = plan_of(store, config(shuffle=shuffle, batch_size=16), 1)
    assert why_too_small(store, plan, num_bytes_of(store) // 2, "train", 1) is None
    words = why_too_small(store, plan, 2 * LINE, "train", 1)
    assert words is not None
    assert f"by shuffle {shuffle}, two batches need" in words


def test_a_state_has_the_window_that_was_chosen(store: Store) -> None:
    size = num_bytes_of(store)
    with Loader(store, config(cache_bytes=str(size // 2))) as first, Loader(store, config()) as other:
        state = first.state_dict()
        assert first.config.shuffle_window == first.plan.shuffle_window
        assert first.plan.digest != other.plan.digest
        other.load_state_dict(state)
        assert other.plan.digest == first.plan.digest
        with (
            Loader(store, config(shuffle_window=17)) as given,
            pytest.raises(StateError, match=r"shuffle_window was \d+ .* is 17 now"),
        ):
            given.load_state_dict(state)
        before = {**state, "settings": {**state["settings"], "shuffle_window": SHUFFLE_WINDOW}}  # type: ignore[dict-item]
        with pytest.raises(StateError, match="plan was"):  # of the usual window, not of the chosen one
            other.load_state_dict(before)


def test_windows_smaller_than_the_least_are_refused() -> None:
    with pytest.raises(UsageError, match="shuffle_window is 3, expected 16 or more"):
        config(shuffle_window=3)
