"""How large a cache an order needs: the ring of two windows, the window that is chosen, and what is refused."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from bucketline.errors import StateError
from bucketline.loader import Loader, LoaderConfig
from bucketline.loader.config import LEAST_WINDOW, USUAL_WINDOW
from bucketline.loader.mixture import Mixture
from bucketline.loader.plan import plan as cache_needs
from bucketline.loader.plan.plan import CacheNeeds, Plan, cache_for, make_plan, plan_of
from bucketline.store import Store
from bucketline.store.remote.cache.folder import USUAL_RING_BYTES, ring_share
from tests.kit import make_store, samples_of

LINE = 4096


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
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
    return LoaderConfig(**{"batch_size": 4, "window": 4096, **more})


def most_at_once(store: Store | Mixture, plan: Plan, machines: int) -> int:
    """Return the most bytes of lines that one machine's rows are in, over as many steps as read two windows of each lane."""
    parts = [plan.draw([(step, 0)], machines)[0] for step in range(plan.steps_before(1))]
    lines = list[set[tuple[int, int]]]()
    for part in parts:
        located = store.bucket(part.bucket).locate(part.rows)
        lines.append(set(zip(located.shard.tolist(), (located.data // LINE).tolist(), strict=True)))
    steps = max(1, 2 * (plan.window or 0) * plan.lanes // machines // len(parts[0].rows))
    return max(len(set().union(*lines[at : at + steps])) for at in range(len(lines))) * LINE


@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.parametrize("window", [16, 64, 200])
def test_the_lines_in_use_at_a_time_are_about_those_of_two_windows(store: Store, lanes: int, window: int) -> None:
    plan = plan_of(store, config(lanes=lanes, window=window), lanes)
    needs = CacheNeeds(store, plan, lanes)
    used = needs.in_use(window)
    assert most_at_once(store, plan, lanes) * 0.7 <= min(used, needs.share_bytes)
    assert used <= 2.5 * most_at_once(store, plan, lanes)


def test_a_smaller_cache_has_a_smaller_window_and_one_that_holds_all_has_none(store: Store) -> None:
    needs = CacheNeeds(store, plan_of(store, config(), 2), 2)
    size, whole = needs.whole_bytes, cache_for(needs.whole_bytes)
    plans = [
        make_plan(store, config(window=None), world_size=2, cache_bytes=cache) for cache in (whole, size, size // 2, size // 8)
    ]
    windows = [plan.window or 0 for plan in plans]
    assert plans[0].window is None
    assert plans[0].digest == plan_of(store, config(window=None), 2).digest
    assert windows[1:] == sorted(windows[1:], reverse=True)
    assert LEAST_WINDOW <= windows[-1] < windows[1] <= USUAL_WINDOW
    given = make_plan(store, config(window=100), world_size=2, cache_bytes=size // 8)
    assert given.window == 100


@pytest.mark.parametrize(
    ("options", "order", "other"),
    [
        ({"window": None}, "with all rows shuffled", "set a window (--window 4096)"),
        ({"window": 400}, "in windows of 400 rows", "mix fewer rows at a time (--window)"),
        ({"window": 0, "batch_size": 16}, "in stored order", "use smaller batches (--batch-size)"),
    ],
)
def test_an_order_that_needs_a_larger_cache_is_refused_with_one_that_suffices(
    store: Store, options: dict[str, Any], order: str, other: str
) -> None:
    needs = CacheNeeds(store, plan_of(store, config(**options), 1), 1)
    words = needs.why_too_small(2 * LINE)
    assert words is not None
    assert f"{order}, lines would be fetched again and again; have a cache of" in words
    assert words.endswith(f"(--cache-bytes), or {other}")
    size = re.search(r"a cache of (\d+)MiB", words)
    assert size is not None
    assert needs.why_too_small(int(size[1]) << 20) is None


def test_the_room_that_a_cache_pins_is_next_to_its_ring() -> None:
    for size in (1 << 20, 5 << 30, 700 << 30):
        assert cache_for(size) - ring_share(cache_for(size)) >= size
        assert cache_for(size) <= size + USUAL_RING_BYTES


def test_a_state_has_the_window_and_a_loader_without_one_takes_it(store: Store) -> None:
    with Loader(store, config(window=100)) as first, Loader(store, config(window=None)) as other:
        state = first.state_dict()
        assert other.plan.window is None
        other.load_state_dict(state)
        assert other.plan.digest == first.plan.digest
        other.load_state_dict(other.state_dict())
        before = {**state, "settings": {**state["settings"], "window": USUAL_WINDOW}}  # type: ignore[dict-item]
        with pytest.raises(StateError, match="plan was"):  # of the usual window, not of the chosen one
            other.load_state_dict(before)
        with Loader(store, config(window=None)) as shuffled:
            other.load_state_dict(shuffled.state_dict())
            assert other.plan.digest == shuffled.plan.digest
