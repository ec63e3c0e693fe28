"""`loader seen`: what it says, what old states do not know, and what it refuses."""

from __future__ import annotations

import json
import shutil
from itertools import islice
from typing import TYPE_CHECKING, Any

import pytest

from bucketline.loader import Loader, LoaderConfig, Remainder
from bucketline.store.remote.objects import ObjectFolder
from bucketline.store.sync.push import push
from tests.commands import Ran, call
from tests.kit import make_store, samples_of

if TYPE_CHECKING:
    from pathlib import Path

    from bucketline.store import Store

NEW_FIELDS = ("batch", "generations", "since", "history", "epoch", "epochs")
CONFIG = LoaderConfig(batch_size=2, seed=4)


def saved(path: Path, state: dict[str, object]) -> Path:
    path.write_text(json.dumps(state))
    return path


def state_after(store: Store, count: int, config: LoaderConfig = CONFIG) -> dict[str, object]:
    with Loader(store, config) as loader:
        for _ in islice(loader.forever(), count):
            pass
        return loader.state_dict()


def without_history(state: dict[str, object]) -> dict[str, object]:
    """Return a state as version 0.1.0 saved it."""
    return {**{name: value for name, value in state.items() if name not in NEW_FIELDS}, "version": 2}


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


def test_all_and_never_list_every_sample_of_the_split_once(store: Store, tmp_path: Path) -> None:
    state, steps = saved(tmp_path / "s.json", state_after(store, 12)), by_hand(store, 12)
    listed = [json.loads(line) for line in seen(state, store.path, "--all", "--json").out.splitlines()]
    every = sum(bucket.num_rows for bucket in store.buckets("train"))
    assert len({one["id"] for one in listed}) == len(listed) == every
    assert {one["id"]: (one["first"], one["last"]) for one in listed if one["count"]} == {
        name: (min(own), max(own)) for name, own in steps.items()
    }
    never = seen(state, store.path, "--never").out.splitlines()
    assert sorted(never) == sorted(one["id"] for one in listed if not one["count"])
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


def test_a_loader_that_rewinds_has_seen_all_again(store: Store, tmp_path: Path) -> None:
    config = LoaderConfig(batch_size=3, rewind=True, remainder=Remainder.PARTIAL)
    with Loader(store, config) as loader:
        for _ in range(3):
            for _batch in loader:
                pass
        state = loader.state_dict()
    document = seen(saved(tmp_path / "s.json", state), store.path, "--id", "first/train/64x64/0.png", "--json").json
    assert document["samples"][0]["count"] == 3
    assert [one["times"] for one in document["samples"][0]["seen"]] == [3]


def test_the_steps_of_the_last_release_are_unknown_and_what_follows_is_told(store: Store, tmp_path: Path) -> None:
    state = without_history(state_after(store, 9))
    why = "error: steps 0 to 8 cannot be told: version 0.1.0 read them, and its states kept no history"
    ran = seen(saved(tmp_path / "old.json", state), store.path, "--all")
    assert ran.code == 1
    assert why in ran.err
    read: dict[str, list[int]] = {}
    with Loader(store, CONFIG) as loader:
        loader.load_state_dict(state)
        for batch in islice(loader.forever(), 5):
            for name in loader.names(batch):
                read.setdefault(name, []).append(batch.step)
        later = loader.state_dict()
    ran = seen(saved(tmp_path / "later.json", later), store.path, "--all")
    assert why in ran.err
    lines = [line.split("\t") for line in ran.out.splitlines()]
    assert {name: int(count) for name, count, *_ in lines if int(count)} == {name: len(own) for name, own in read.items()}


def test_a_generation_that_is_gone_leaves_its_steps_unknown(tmp_path: Path) -> None:
    from bucketline.store import Store as Opened

    made = make_store(tmp_path / "a.store", samples_of({"train/64x64": 9}), samples_of({"train/64x64": 7}, "more/"))
    state = saved(tmp_path / "s.json", state_after(Opened.open(made.path, 2), 6))
    assert seen(state, made.path, "--never").code == 0
    (made.path / "generations" / "2.json").unlink()
    ran = seen(state, made.path, "--id", "train/64x64/0.png").fails("error: steps 0 to 5 cannot be told")
    assert "has no generation 2 any more" in ran.err


def test_other_stores_than_the_runs_are_refused_by_name(store: Store, tmp_path: Path) -> None:
    other = make_store(tmp_path / "b.store", samples_of({"train/64x64": 5}))
    ran = seen(saved(tmp_path / "s.json", state_after(store, 3)), other.path, "--never")
    assert ran.code == 1
    assert f"the store {store.manifest.store_id} is not among those given; give all stores of the run" in ran.err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file"),
        ("no json", "is not JSON"),
        ("[1]", "is not a loader's state"),
        ('{"version": 9}', "has version 9, expected version 2 or 4"),
    ],
)
def test_what_is_no_state_is_refused(store: Store, tmp_path: Path, content: str | None, message: str) -> None:
    path = tmp_path / "s.json"
    if content is not None:
        path.write_text(content)
    ran = seen(path, store.path, "--never")
    assert ran.code == 1
    assert message in ran.err


def test_exactly_one_question_is_asked(store: Store, tmp_path: Path) -> None:
    state = saved(tmp_path / "s.json", state_after(store, 1))
    asked: list[list[Any]] = [[], ["--all", "--never"], ["--id", "a", "--all"]]
    for options in asked:
        seen(state, store.path, *options).fails("expected one of --id (or --ids), --all and --never", code=2)


def test_a_store_in_object_storage_tells_the_same(store: Store, tmp_path: Path) -> None:
    (tmp_path / "bucket").mkdir()
    push(shutil.copytree(store.path, tmp_path / "own.store"), ObjectFolder.open(f"file://{tmp_path}/bucket"))
    state = saved(tmp_path / "s.json", state_after(store, 12))
    local = seen(state, store.path, "--all")
    remote = seen(state, f"file://{tmp_path}/bucket", "--all", "--cache", tmp_path / "cache")
    assert (remote.code, remote.out) == (local.code, local.out) == (0, local.out)
    (name,) = [line.split("\t")[0] for line in local.out.splitlines() if line.split("\t")[1] != "0"][:1]
    one, two = (
        seen(state, place, "--id", name, "--cache", tmp_path / "cache").out.replace(str(place), "")
        for place in (store.path, f"file://{tmp_path}/bucket")
    )
    assert one == two != ""
