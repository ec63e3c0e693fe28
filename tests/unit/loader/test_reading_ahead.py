"""A loader that has been started reads ahead before its first batch is requested, and makes each plan once."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from bucketline.loader import Loader, LoaderConfig, loader
from bucketline.loader.plan.plan import plan_of
from bucketline.store import Store
from tests.kit import add_samples, make_store, samples_of, store_writer

CONFIG = LoaderConfig(batch_size=2, accumulation=2, seed=3)


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The plans that have been made."""
    made: list[object] = []

    def noting(*given: object) -> object:
        made.append(given)
        return plan_of(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(loader, "plan_of", noting)
    return made


def first(one: Loader, count: int = 5) -> list[torch.Tensor]:
    return [batch.ids for batch, _ in zip(one.forever(), range(count), strict=False)]


def test_batches_wait_before_the_first_is_asked_for_and_are_the_same(store: Store) -> None:
    with Loader(store, CONFIG) as plain, Loader(store, CONFIG) as ahead:
        expected = first(plain)
        stream = ahead.start()
        deadline = time.monotonic() + 30
        while ahead.stats().ready == 0 and time.monotonic() < deadline:
            time.sleep(0.001)
        assert ahead.stats().ready > 0
        assert ahead.start() is stream
        assert all(torch.equal(*pair) for pair in zip(first(ahead), expected, strict=True))


def test_a_loader_that_was_started_elsewhere_reads_where_its_state_is_by_then(store: Store) -> None:
    with Loader(store, CONFIG) as plain, Loader(store, CONFIG) as ahead:
        first(plain, 4)
        ahead.start()
        ahead.load_state_dict(plain.state_dict())
        assert all(torch.equal(*pair) for pair in zip(first(ahead), first(plain), strict=True))


def test_an_open_a_like_one_and_a_newer_generation_make_a_plan_once_each(tmp_path: Path, plans: list[object]) -> None:
    store = make_store(tmp_path / "s.store", samples_of({"train/64x64": 6}, "a/"))
    with Loader(store.path, CONFIG, follow=True) as one:
        assert len(plans) == 1
        with Loader(store.path, CONFIG, like=one) as other:
            assert other.plan is one.plan
            assert all(torch.equal(*pair) for pair in zip(first(other), first(one), strict=True))
        assert len(plans) == 1
        with store_writer(tmp_path / "s.store") as writer:
            add_samples(writer, samples_of({"train/64x64": 4}, "b/"))
        with Loader(store.path, CONFIG, like=one) as other:
            assert other.state_dict()["stores"] == one.state_dict()["stores"], "not the generation that is there by now"
        next(iter(one))
        assert len(plans) == 2
