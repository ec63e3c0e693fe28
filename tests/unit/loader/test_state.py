"""A saved state continues only where every field that decides the order agrees; each refusal names its field."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

import pytest

from bucketline.errors import StateError
from bucketline.loader import Loader, LoaderConfig, Remainder, WeightedStore
from tests.kit import make_store, samples_of

if TYPE_CHECKING:
    from pathlib import Path

    from bucketline.store import Store

BASE: dict[str, Any] = {"batch_size": 2, "accumulation": 2, "seed": 3}


def state_of(store: Store, **changes: Any) -> dict[str, object]:
    with Loader(store, LoaderConfig(**{**BASE, **changes})) as loader:
        return loader.state_dict()


def refused(store: Store, state: dict[str, object]) -> str:
    with Loader(store, LoaderConfig(**BASE)) as loader, pytest.raises(StateError) as error:
        loader.load_state_dict(state)
    return str(error.value)


@pytest.mark.parametrize(
    ("field", "changes", "values"),
    [
        ("global_batch", {"batch_size": 3}, (6, 4)),
        ("seed", {"seed": 4}, (4, 3)),
        ("remainder", {"remainder": Remainder.PARTIAL}, ("'partial'", "'carry'")),
        ("caption_dropout", {"caption_dropout": 0.1}, (0.1, 0.0)),
        ("window", {"window": 0}, ("0", "None")),
        ("split", {"split": "val"}, ("'val'", "'train'")),
    ],
)
def test_a_state_of_another_configuration_is_refused_with_field_and_both_values(
    store: Store, field: str, changes: dict[str, Any], values: tuple[object, object]
) -> None:
    message = refused(store, state_of(store, **changes))
    assert f"the loader's {field} was {values[0]} when its state was saved and is {values[1]} now" in message


def test_ranks_that_do_not_divide_the_global_batch_alike_are_refused_with_what_to_choose(store: Store) -> None:
    with Loader(store, LoaderConfig(**BASE), rank=1, world_size=3) as loader:
        state = loader.state_dict()
    message = refused(store, state)
    assert "global_batch was 12" in message
    assert "choose batch size x accumulation x ranks so that each bucket has the saved number" in message


def test_a_state_of_another_store_or_generation_is_refused_with_what_to_open(store: Store, tmp_path: Path) -> None:
    from bucketline.store import Store as Opened

    rows = {"train/64x64": 35, "train/96x64": 11, "train/64x128": 1}
    other = make_store(tmp_path / "other", samples_of(rows))
    message = refused(store, state_of(other))
    ids = (other.manifest.store_id, store.manifest.store_id)
    assert f"the loader's store_id was {ids[0]!r} when its state was saved and is {ids[1]!r} now" in message
    assert "open the store and the generation that the run was planned on" in message
    older = Opened.open(store.path, store.manifest.generation - 1)
    assert "the loader's generation was 1 when its state was saved and is 2 now" in refused(store, state_of(older))


LACKING = object()
DAMAGED: list[tuple[str, object, str]] = [
    *(("version", value, f"has version {value!r}, expected version 1; give") for value in (0, 2, "1", None, 1.0, True)),
    *(("step", value, "is damaged: loader state.step is ") for value in (-1, 1.5, "3", None, True)),
    *(("world_size", "1", "state.world_size is '1'"), ("plan", 5, "state.plan is 5"), ("more", 1, "unknown field 'more'")),
    *(
        (field, LACKING, f"lacks the field '{field}'")
        for field in ("step", "micro_step", "accumulation", "global_batch", "plan", "stores", "settings")
    ),
]


@pytest.mark.parametrize(("field", "value", "words"), DAMAGED)
def test_a_damaged_state_or_one_of_another_version_is_refused_by_field(
    store: Store, field: str, value: object, words: str
) -> None:
    state = {**state_of(store), field: value}
    if value is LACKING:
        del state[field]
    assert words in refused(store, state)


def test_within_a_step_the_accumulation_cannot_change(store: Store) -> None:
    state = {**state_of(store), "micro_step": 1, "step": 4}
    with Loader(store, LoaderConfig(**BASE)) as loader:
        loader.load_state_dict(state)
        batch = next(loader.forever())
        assert (batch.step, batch.micro_step) == (4, 1)
    with (
        Loader(store, LoaderConfig(batch_size=4, accumulation=1, seed=3)) as other,
        pytest.raises(StateError, match=r"within a step \(micro-batch 1 of 2\); accumulation was 2 and is 1 now"),
    ):
        other.load_state_dict(state)
    with (  # the same accumulation, shared out among other ranks: other positions would be read again
        Loader(store, LoaderConfig(batch_size=1, accumulation=2, seed=3), world_size=2) as other,
        pytest.raises(StateError, match="world_size was 1 and is 2 now"),
    ):
        other.load_state_dict(state)
    assert "micro_step is 2, a step has 2" in refused(store, {**state, "micro_step": 2})


def test_a_refused_state_changes_nothing(store: Store) -> None:
    with Loader(store, LoaderConfig(**BASE)) as loader:
        batches = loader.forever()
        for _ in range(3):
            next(batches)
        before = loader.state_dict()
        with pytest.raises(StateError):
            loader.load_state_dict({**before, "global_batch": 99, "step": 7})
        assert loader.state_dict() == before


def test_every_field_of_the_configuration_that_decides_what_is_delivered_is_in_the_state(store: Store) -> None:
    """A field that is added later is in it unless it is said to decide nothing; the batch is in it as the global batch."""
    state = state_of(store)
    settings = state["settings"]
    assert isinstance(settings, dict)
    without = {"batch_size", "batch_pixels", "batch_tokens", "batch_multiple", "accumulation", "epochs", "rewind"}
    assert {field.name for field in fields(LoaderConfig)} - set(settings) - without <= {
        "prefetch_bytes",
        "verify",
        "threads",
        "plain_reads",
        "lanes",
        "columns",
        "ragged",
        "text",
        "row_weights",
        *("cache", "cache_bytes", "endpoint", "store_option", "deadline"),
    }
    in_windows = state_of(store, window=4096)["settings"]
    assert isinstance(in_windows, dict)
    assert (in_windows["window"], in_windows["lanes"]) == (4096, 1)


def test_what_decides_nothing_may_change_between_save_and_load(store: Store) -> None:
    state = state_of(store)
    for changes in ({"epochs": 7}, {"prefetch_bytes": 5}, {"verify": True}, {"accumulation": 1}):
        more = {"batch_size": 4} if "accumulation" in changes else {}
        with Loader(store, LoaderConfig(**{**BASE, **changes, **more})) as loader:
            loader.load_state_dict(state)


def test_a_window_that_changed_is_refused(store: Store) -> None:
    state = state_of(store, window=4096)
    config = LoaderConfig(**BASE, window=64)
    with Loader(store, config) as loader, pytest.raises(StateError, match=r"window was 4096 .* and is 64 now"):
        loader.load_state_dict(state)
    with Loader(store, config) as loader, pytest.raises(StateError, match=r"window was None .* and is 64 now.*or none"):
        loader.load_state_dict(state_of(store))


def test_batches_by_a_budget_go_on_with_other_ranks_where_every_buckets_global_batch_is_the_same(store: Store) -> None:
    one = {"batch_size": None, "batch_pixels": 4 * 64 * 96, "batch_multiple": 2, "accumulation": 2}
    state = state_of(store, **one)
    with Loader(store, LoaderConfig(**{**BASE, **one, "accumulation": 1}), world_size=2) as loader:
        loader.load_state_dict({**state, "step": 3})
        assert loader.state_dict()["global_batch"] == state["global_batch"]
    half = {**one, "batch_pixels": 2 * 64 * 96, "accumulation": 4}
    with (
        Loader(store, LoaderConfig(**{**BASE, **half})) as loader,
        pytest.raises(
            StateError, match=r"global_batch was '4 \(train/64x128\) to 12 \(train/64x64\), of 3 .* and is 8 now; .*each"
        ),
    ):  # half the pixels hold 3 rows of 64x64, of which 2 are taken, and one of 64x128, of which 2 are taken all the same
        loader.load_state_dict(state)


def many(path: Path, count: int) -> list[WeightedStore]:
    """Make stores of a few rows in a few buckets each, repeated once, twice, three times and so on."""
    rows = {f"train/{64 + 8 * n}x64": 1 + n for n in range(8)}
    stores = [make_store(path / f"{n}.store", samples_of(rows, f"{n}/")) for n in range(count)]
    return [WeightedStore(store=store, repeats=n + 1) for n, store in enumerate(stores)]


def test_each_store_that_differs_is_named(tmp_path: Path) -> None:
    shares = many(tmp_path, 4)
    config = LoaderConfig(batch_pixels=3 * 64 * 128, seed=(1 << 63) - 1, window=4096, caption_dropout=0.123456789)
    with Loader(shares, config) as loader:
        loader.load_state_dict({**loader.state_dict(), "step": 10**15})
        state = loader.state_dict()
    for number in range(4):
        other = [*shares]
        other[number] = replace(shares[number], repeats=9)
        with Loader(other, config) as loader, pytest.raises(StateError) as error:
            loader.load_state_dict(state)
        message = f"stores[{number}].repeats was {number + 1} when its state was saved and is 9 now"
        assert f"the loader's {message}" in str(error.value)
    for other, message in (
        (shares[:3], "stores.count was 4 when its state was saved and is 3 now"),
        ([shares[1], shares[0], *shares[2:]], "stores[0].store_id was"),
        (shares[:1], "stores.count was 4 when its state was saved and is 1 now"),
    ):
        with Loader(other, config) as loader, pytest.raises(StateError) as error:
            loader.load_state_dict(state)
        assert message in str(error.value)
        assert "open the stores that the run was planned on" in str(error.value)


@pytest.mark.parametrize("window", [None, 64, 0])
def test_a_window_that_is_not_given_is_the_states(store: Store, window: int | None) -> None:
    state = state_of(store, window=window)
    with Loader(store, LoaderConfig(**BASE, window=0 if window == 0 else None)) as loader:
        loader.load_state_dict({**state, "step": 3})
        assert [batch.step for _, batch in zip(range(2), loader, strict=False)] == [3, 3]
        assert loader.config.window == window


def test_another_plan_continues_at_a_states_step_but_not_within_one(store: Store) -> None:
    state = {**state_of(store, window=64), "step": 4}
    with Loader(store, LoaderConfig(**BASE)) as loader:
        loader.start_anew(state)
        assert next(loader.forever()).step == 4
        with pytest.raises(StateError, match="saved within a step"):
            loader.start_anew({**state, "micro_step": 1})
        with pytest.raises(StateError, match="damaged"):
            loader.start_anew({**state, "step": "4"})
