"""`loader seen`: what it says, which lines `plans.jsonl` has, and what it refuses."""

from __future__ import annotations

import json
import shutil
from itertools import islice
from typing import TYPE_CHECKING, Any

import pytest

from bucketline.errors import StateError
from bucketline.loader import Loader, LoaderConfig
from bucketline.loader.seen import PLANS, append_plan
from bucketline.store import Store
from bucketline.store.remote.objects import ObjectFolder
from bucketline.store.sync.push_pull import push
from tests.commands import Ran, call
from tests.kit import make_store, samples_of

if TYPE_CHECKING:
    from pathlib import Path

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
    """Return the steps of each sample, from the batches."""
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
    assert "first/val/64x64/0.png: seen never in 30 steps, in val/64x64" in lines
    assert "nobody.png: seen never in 30 steps, in no generation that the run read" in lines
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
    assert seen(state, store.path, "--ids", tmp_path / "ids.txt").out.count(": seen never") == 3


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
    ran = seen(path, store.path, "--all")
    assert ran.code == 1
    assert message in ran.err


def test_exactly_one_question_is_asked(store: Store, tmp_path: Path) -> None:
    state = saved(tmp_path / "s.json", state_after(store, 1))
    for options in ([], ["--id", "a", "--all"]):
        seen(state, store.path, *options).fails("expected either --id (or --ids) or --all", code=2)


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
