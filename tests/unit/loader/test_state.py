"""A saved state goes on only where every field that decides the order agrees; each refusal names its field."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from bucketline.errors import StateError
from bucketline.loader import Loader, LoaderConfig, Remainder
from tests.building import make_store, samples_of

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
    ],
)
def test_a_state_of_another_configuration_is_refused_with_field_and_both_values(
    store: Store, field: str, changes: dict[str, Any], values: tuple[object, object]
) -> None:
    message = refused(store, state_of(store, **changes))
    assert f"the loader's {field} was {values[0]} when its state was saved and is {values[1]} now" in message


def test_a_state_of_the_other_split_is_refused(store: Store) -> None:
    with Loader(store, LoaderConfig(**BASE, split="val")) as loader:
        state = loader.state_dict()
    assert "the loader's split was 'val'" in refused(store, state)


def test_ranks_that_do_not_divide_the_global_batch_alike_are_refused_with_what_to_choose(store: Store) -> None:
    with Loader(store, LoaderConfig(**BASE), rank=1, world_size=3) as loader:
        state = loader.state_dict()
    message = refused(store, state)
    assert "global_batch was 12" in message
    assert "choose batch size x accumulation x ranks to give the saved number" in message


def test_a_state_of_another_store_or_generation_is_refused_with_what_to_open(store: Store, tmp_path: Path) -> None:
    from bucketline.store import Store as Opened

    rows = {"train/64x64": 35, "train/96x64": 11, "train/64x128": 1}
    other = make_store(tmp_path / "other", samples_of(rows))
    message = refused(store, state_of(other))
    assert "the loader's store_id was" in message
    assert "open the store, and the generation of it, that the run was planned on" in message
    older = Opened.open(store.path, store.manifest.generation - 1)
    assert "the loader's generation was 1 when its state was saved and is 2 now" in refused(store, state_of(older))


@pytest.mark.parametrize("version", [0, 2, "1", None])
def test_a_state_of_another_version_is_refused(store: Store, version: object) -> None:
    message = refused(store, {**state_of(store), "version": version})
    assert message == f"the saved loader state has version {version!r}, this is version 1"


@pytest.mark.parametrize(
    ("field", "value"),
    [("step", -1), ("step", 1.5), ("step", "3"), ("step", None), ("step", True), ("seed", 1 << 63), ("plan", 5), ("more", 1)],
)
def test_a_damaged_state_is_refused_by_field(store: Store, field: str, value: object) -> None:
    message = refused(store, {**state_of(store), field: value})
    assert "the saved loader state is damaged" in message
    assert field in message


@pytest.mark.parametrize("field", ["step", "micro_step", "accumulation", "global_batch", "plan", "generation"])
def test_a_state_that_lacks_a_field_is_refused(store: Store, field: str) -> None:
    state = state_of(store)
    del state[field]
    assert f"lacks the field '{field}'" in refused(store, state)


def test_within_a_step_the_accumulation_cannot_change(store: Store) -> None:
    state = {**state_of(store), "micro_step": 1, "step": 4}
    with Loader(store, LoaderConfig(**BASE)) as loader:
        loader.load_state_dict(state)
        batch = next(iter(loader))
        assert (batch.step, batch.micro_step) == (4, 1)
    with (
        Loader(store, LoaderConfig(batch_size=4, accumulation=1, seed=3)) as other,
        pytest.raises(StateError, match=r"within a step \(micro-batch 1 of 2\); accumulation was 2 and is 1 now"),
    ):
        other.load_state_dict(state)
    with (  # the same accumulation, shared out among other ranks: other positions would be read again
        Loader(store, LoaderConfig(batch_size=1, accumulation=2, seed=3), world_size=2) as other,
        pytest.raises(StateError, match="batch_size was 2 and is 1 now"),
    ):
        other.load_state_dict(state)
    assert "micro_step is 2, a step has 2" in refused(store, {**state, "micro_step": 2})


def test_a_refused_state_changes_nothing(store: Store) -> None:
    with Loader(store, LoaderConfig(**BASE)) as loader:
        batches = iter(loader)
        for _ in range(3):
            next(batches)
        before = loader.state_dict()
        with pytest.raises(StateError):
            loader.load_state_dict({**before, "seed": 99, "step": 7})
        assert loader.state_dict() == before
