"""A saved state continues only where every field that decides the order agrees; each refusal names its field."""

from __future__ import annotations

import json
import shutil
from dataclasses import fields, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

import pytest

from bucketline.errors import StateError
from bucketline.loader import Loader, LoaderConfig, Remainder, WeightedStore
from bucketline.loader.seen import PLANS, append_plan
from bucketline.store import Store
from bucketline.store.remote.objects import ObjectFolder
from bucketline.store.sync.push_pull import push
from tests.commands import Ran, call
from tests.kit import make_store, samples_of

if TYPE_CHECKING:
    from pathlib import Path


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


# `loader seen`: what it says, which lines `plans.jsonl` has, and what it refuses.


CONFIG = LoaderConfig(batch_size=2, seed=4)


def saved(path: Path, state: dict[str, object]) -> Path:
    path.write_text(json.dumps(state))
    return path


def state_after(store: Store, count: int, config: LoaderConfig = CONFIG) -> dict[str, object]:
    with Loader(store, config) as loader:
        for _ in islice(loader.forever(), count):
            pass
        return loader.state_dict()


def seen(state: Path, *args: object) -> Ran:
    return call("loader", "seen", *args, "--run", state)


def by_hand(store: Store, count: int, config: LoaderConfig = CONFIG) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    with Loader(store, config) as loader:
        for batch in islice(loader.forever(), count):
            for name in loader.names(batch):
                found.setdefault(name, []).append(batch.step)
    return found


def test_a_sample_is_told_with_its_steps_and_one_that_was_not_seen_as_such(store: Store, tmp_path: Path) -> None:
    state, steps = saved(tmp_path / "s.json", state_after(store, 30)), by_hand(store, 30)
    name = max(steps, key=lambda one: len(steps[one]))
    ran = seen(state, store.path, "--id", name, "--id", "first/val/64x64/0.png", "--id", "nobody.png")
    ran.fails("error: no generation that the run read has 'nobody.png'; ids are paths in the source, with their extension")
    lines = ran.out.splitlines()
    assert lines[0].startswith(f"{name}: seen {len(steps[name])} times in 30 steps, in train/") or len(steps[name]) == 1
    assert [int(line.split()[1]) for line in lines if line.startswith("  step")] == sorted(steps[name])
    assert "first/val/64x64/0.png: never seen in 30 steps, in val/64x64" in lines
    assert "nobody.png: never seen in 30 steps, in no generation that the run read" in lines
    strangers = seen(state, store.path, "--json", *(word for n in range(5) for word in ("--id", f"{n}.png")))
    strangers.fails("error: no generation that the run read has '0.png', '1.png', '2.png' and 2 more; ids are")
    assert [(one["id"], one["count"], one["buckets"]) for one in strangers.json["samples"]] == [
        (f"{n}.png", 0, []) for n in range(5)
    ]
    document = seen(state, store.path, "--id", name, "--json").done().json
    assert document["steps"] == 30
    assert document["unknown"] == []
    (sample,) = document["samples"]
    assert (sample["id"], sample["count"]) == (name, len(steps[name]))
    assert {"step", "rank", "caption", "text", "crop", "flipped", "generation"} <= set(sample["seen"][0])


def test_all_lists_every_sample_of_the_split_once(store: Store, tmp_path: Path) -> None:
    state, steps = saved(tmp_path / "s.json", state_after(store, 12)), by_hand(store, 12)
    listed = [json.loads(line) for line in seen(state, store.path, "--all", "--json").out.splitlines()]
    every = sum(bucket.num_rows for bucket in store.buckets("train"))
    assert len({one["id"] for one in listed}) == len(listed) == every
    assert {one["id"]: (one["first"], one["last"]) for one in listed if one["count"]} == {
        name: (min(own), max(own)) for name, own in steps.items()
    }
    lines = [line.split("\t") for line in seen(state, store.path, "--all").out.splitlines()]
    assert [(name, *map(int, rest)) for name, *rest in lines] == [tuple(one.values()) for one in listed]
    never = [name for name, *rest in lines if rest == ["0"]]
    assert len(never) == every - len(steps) > 0
    (tmp_path / "ids.txt").write_text("\n".join(never[:3]) + "\n")
    assert seen(state, store.path, "--ids", tmp_path / "ids.txt").out.count(": never seen") == 3


@pytest.mark.parametrize("window", [None, 4096, 0])
def test_the_padding_of_the_last_epoch_is_not_counted(store: Store, tmp_path: Path, window: int | None) -> None:
    steps: dict[str, list[int]] = {}
    num_padded = 0
    with Loader(store, LoaderConfig(batch_size=4, epochs=2, window=window)) as loader:
        for _ in range(2):
            for batch in loader:
                real = (batch.weight > 0).tolist()
                num_padded += real.count(False)
                for name in (one for one, is_real in zip(loader.names(batch), real, strict=True) if is_real):
                    steps.setdefault(name, []).append(batch.step)
        state = saved(tmp_path / "s.json", loader.state_dict())
    assert num_padded > 0
    listed = [json.loads(line) for line in seen(state, store.path, "--all", "--json").out.splitlines()]
    assert {one["id"]: (one["count"], one["first"], one["last"]) for one in listed} == {
        name: (len(own), min(own), max(own)) for name, own in steps.items()
    }
    several = [option for name in sorted(steps)[:3] for option in ("--id", name)]
    samples = seen(state, store.path, *several, "--json").json["samples"]
    assert [[one["step"] for one in sample["seen"]] for sample in samples] == [steps[name] for name in sorted(steps)[:3]]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read: No such file"),
        ("no json", "not JSON"),
        ("[1]", "is [1] of type list, expected a dict"),
        ('{"version": 9}', "has version 9, expected version 1"),
    ],
)
def test_what_is_no_state_is_refused(store: Store, tmp_path: Path, content: str | None, message: str) -> None:
    path = tmp_path / "s.json"
    if content is not None:
        path.write_text(content)
    seen(path, store.path, "--all").fails(message)


def test_exactly_one_question_is_asked(store: Store, tmp_path: Path) -> None:
    state = saved(tmp_path / "s.json", state_after(store, 1))
    seen(state, store.path).fails("needs either --id ID or --ids FILE or --all", code=2)
    seen(state, store.path, "--id", "a", "--all").fails("--all is given with --id or --ids", code=2)


def test_a_generation_that_is_gone_leaves_its_steps_unknown(tmp_path: Path) -> None:
    made = make_store(tmp_path / "a.store", samples_of({"train/64x64": 9}), samples_of({"train/64x64": 7}, "more/"))
    state = saved(tmp_path / "s.json", state_after(Store.open(made.path, 2), 6))
    assert seen(state, "--all").code == 0
    (made.path / "generations" / "2.json").unlink()
    ran = seen(state, "--id", "train/64x64/0.png").fails("error: steps 0 to 5 cannot be told")
    assert "has no generation 2 any more" in ran.err


def test_stores_that_have_moved_are_named_and_others_refused(store: Store, tmp_path: Path) -> None:
    own = Store.open(shutil.copytree(store.path, tmp_path / "own.store"))
    state = saved(tmp_path / "s.json", state_after(own, 12))
    local = seen(state, "--all").done().out
    (tmp_path / "own.store").rename(tmp_path / "moved.store")
    assert "own.store" in seen(state, "--all").fails("error: steps 0 to 11 cannot be told").err
    assert seen(state, tmp_path / "moved.store", "--all").done().out == local
    (tmp_path / "bucket").mkdir()
    push(tmp_path / "moved.store", ObjectFolder.open(f"file://{tmp_path}/bucket"))
    remote = seen(state, f"file://{tmp_path}/bucket", "--all", "--cache", tmp_path / "cache").done()
    assert remote.out == local
    (name,) = [line.split("\t")[0] for line in local.splitlines() if line.split("\t")[1] != "0"][:1]
    one, two = (
        seen(state, place, "--id", name, "--cache", tmp_path / "cache").out.replace(str(place), "")
        for place in (tmp_path / "moved.store", f"file://{tmp_path}/bucket")
    )
    assert one == two != ""
    other = make_store(tmp_path / "b.store", samples_of({"train/64x64": 5}))
    ran = seen(state, other.path, "--all").fails(f"the run read {store.manifest.store_id}", code=2)
    assert other.manifest.store_id in ran.err


def lines_of(folder: Path) -> list[tuple[int, int, object]]:
    """Return each line's step, the plan's own number of it, and the number of ranks."""
    lines = [json.loads(line) for line in (folder / PLANS).read_text().splitlines()]
    return [(line["step"], line["loader"]["step"], line["loader"]["world_size"]) for line in lines]


def test_a_line_is_appended_only_if_the_plan_or_the_ranks_change(store: Store, tmp_path: Path) -> None:
    plans = tmp_path / PLANS

    def appended(step: int, world_size: int = 1, *, own: int | None = None, **options: Any) -> list[tuple[int, int, object]]:
        with Loader(store, LoaderConfig(**{"batch_size": 4 // world_size, **options}), world_size=world_size) as loader:
            loader.load_state_dict({**loader.state_dict(), "step": step if own is None else own})
            append_plan(plans, loader, None if own is None else step)
        return lines_of(tmp_path)

    assert appended(0) == appended(5) == [(0, 0, 1)]
    assert appended(8, 2) == [(0, 0, 1), (8, 8, 2)]
    assert appended(8, 2) == appended(9, 2) == [(0, 0, 1), (8, 8, 2)]
    assert appended(12, 2, seed=1) == [(0, 0, 1), (8, 8, 2), (12, 12, 2)]
    assert appended(10, 2, seed=1) == [(0, 0, 1), (8, 8, 2), (10, 10, 2)], "what was planned for later steps is not done"
    assert appended(10, 2, own=20, seed=1) == [(0, 0, 1), (8, 8, 2), (10, 20, 2)], "the plan's own number of the step"
    assert appended(13, 2, own=23, seed=1) == [(0, 0, 1), (8, 8, 2), (10, 20, 2)]
    assert appended(4) == [(0, 0, 1)]
    plans.write_text('{"step": 1}\n')
    with pytest.raises(StateError, match=r"plans.jsonl, line 1, is not the line of a plan"):
        appended(5)


def test_of_a_run_the_steps_of_each_line_are_told_by_its_plan_up_to_a_checkpoint(store: Store, tmp_path: Path) -> None:
    run = tmp_path / "run"
    for step in (7, 12):
        (run / "checkpoints" / f"step-{step:08d}").mkdir(parents=True)
    (run / "checkpoints" / "step-00000090.partial").mkdir()
    steps: dict[str, list[int]] = {}
    for first, config in ((0, CONFIG), (5, LoaderConfig(batch_size=3, seed=9))):
        with Loader(store, config) as loader:
            loader.set_epoch(1 if first else 0)
            append_plan(run / PLANS, loader, first)
            for step, batch in zip(range(first, 5 if first == 0 else 12), loader.forever(), strict=False):
                for name in loader.names(batch):
                    steps.setdefault(name, []).append(step)
    for place, end in ((run, 12), (run / "checkpoints" / "step-00000007", 7)):
        listed = [json.loads(line) for line in seen(place, "--all", "--json").done().out.splitlines()]
        by_end = {name: [step for step in own if step < end] for name, own in steps.items()}
        assert {one["id"]: (one["count"], one["first"], one["last"]) for one in listed if one["count"]} == {
            name: (len(own), min(own), max(own)) for name, own in by_end.items() if own
        }
    name = max(steps, key=lambda one: len(steps[one]))
    document = seen(run, "--id", name, "--json").done().json
    assert [one["step"] for one in document["samples"][0]["seen"]] == steps[name]
    (run / PLANS).write_text((run / PLANS).read_text().partition("\n")[2])
    seen(run, "--all").fails("error: steps 0 to 4 cannot be told: no line tells of them")
    (run / PLANS).unlink()
    seen(run, "--all").fails(f"{run / PLANS} cannot be read")


def test_a_state_that_is_older_than_the_last_line_is_told_by_its_own(store: Store, tmp_path: Path) -> None:
    other = LoaderConfig(batch_size=3, seed=9)
    with Loader(store, CONFIG) as first, Loader(store, other) as second:
        append_plan(tmp_path / PLANS, first, 10)
        [*islice(first.forever(), 5)]
        state = saved(tmp_path / "s.json", first.state_dict())
        second.set_epoch(1)
        append_plan(tmp_path / PLANS, second, 40)
    assert seen(state, "--id", "nobody.png", "--json").json["steps"] == 15
    (tmp_path / PLANS).write_text((tmp_path / PLANS).read_text().splitlines()[1] + "\n")
    seen(state, "--all").fails("no line of", code=1)
