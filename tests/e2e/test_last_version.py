"""Today's code reads, changes and continues what 0.1.0 wrote; `tests/data/last_version/README.md` has the files.

Bytes that were stored must come back bit for bit on any machine. What is computed may be rounded differently by another CPU
than by the one that made the files, so a continued run is compared bit for bit with a run of today's on the same machine.
"""

from __future__ import annotations

import copy
import json
import os
import tarfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from bucketline.errors import StateError
from bucketline.loader import Loader, LoaderConfig, WeightedStore
from bucketline.store import Store
from bucketline.train import checkpoint, trainer
from bucketline.train.main import main as train_main
from bucketline.train.outputs import saved_tensors
from bucketline.train.outputs.weights import weights_of
from bucketline.train.step import train_step
from tests.commands import ROOT, call
from tests.data.last_version import (
    ALL_MORE,
    LORA_SAVED_AT,
    LORA_STEPS,
    MADE_AT,
    PACK,
    SAVED_AT,
    STEPS,
    TRAIN,
    batch_as_json,
    metrics_as_json,
    samples_as_json,
    weights_as_json,
)
from tests.models import png

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from bucketline.train.outputs.weights import Weights
    from bucketline.train.step import StepOutcome, Training

FILES = ROOT / "tests" / "data" / "last_version"
EXPECTED: dict[str, Any] = json.loads((FILES / "expected.json").read_bytes())


@pytest.fixture(autouse=True)
def _files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unpack the files into the current folder, where version 0.1.0 saw them."""
    with tarfile.open(FILES / "last_version.tar.xz") as tar:
        tar.extractall(tmp_path, filter="data")
    monkeypatch.chdir(tmp_path)


def verify(store: str, samples: int) -> None:
    report = call("store", "verify", store, "--json").json
    assert (report["corrupt"], report["strays"]) == ([], [])
    assert sum(map(len, samples_as_json(Store.open(store)).values())) == samples


def by_id(samples: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    return {name: digest for bucket in samples.values() for name, digest in bucket.items()}


@pytest.mark.parametrize(
    ("store", "generation"), [("photos.store", 1), ("photos.store", 5), ("more.store", 1), ("moments.store", 1)]
)
def test_every_sample_of_a_generation_is_read_as_it_was(store: str, generation: int) -> None:
    assert samples_as_json(Store.open(store, generation)) == EXPECTED[store][str(generation)]


def test_the_store_is_sound_and_described() -> None:
    verify("photos.store", 19)
    report = call("store", "info", "photos.store", "--json").json
    assert (report["generation"], report["samples"]) == (5, 19)


def known_then(state: Mapping[str, Any], old: Mapping[str, object]) -> dict[str, object]:
    """Return the part of a state that the last version wrote, which had no history, and named the order by a word."""
    words = {"settings": {name: value for name, value in state["settings"].items() if name not in ("window", "shuffle")}}
    return {name: {**state, **words}[name] for name in old if name != "version"}


def opened(case: str) -> tuple[list[WeightedStore], LoaderConfig, Any]:
    """Return the stores, the configuration and the ranks of a case, with the order as it is called now."""
    saved = EXPECTED["loaders"][case]
    config = {name: value for name, value in saved["config"].items() if name not in ("shuffle", "shuffle_window")}
    window = {"none": 0, "blocks": 16}.get(saved["config"].get("shuffle"))
    stores = [WeightedStore(store=Store.open(path, at), repeats=repeats) for path, at, repeats in saved["stores"]]
    ranks = {"rank": saved.get("rank", 0), "world_size": saved.get("world_size", 1)}
    return stores, LoaderConfig(**config, window=window), ranks


BLOCKS = "second of two ranks, blocks, a budget"


def test_a_state_in_blocks_goes_on_by_a_new_plan() -> None:
    stores, config, ranks = opened(BLOCKS)
    state = EXPECTED["loaders"][BLOCKS]["state"]
    with Loader(stores, config, **ranks) as loader:
        with pytest.raises(StateError, match=r"with a shuffle 'blocks' that this one does not have .*--new-plan"):
            loader.load_state_dict(state)
        loader.start_anew(state)
        assert next(iter(loader)).step == state["step"]


@pytest.mark.parametrize("case", [case for case in EXPECTED["loaders"] if case != BLOCKS])
def test_a_loader_continues_from_a_state_with_the_same_batches(case: str) -> None:
    saved = EXPECTED["loaders"][case]
    stores, config, ranks = opened(case)
    with Loader(stores, config, **ranks) as loader:
        batches = loader.forever()
        for _ in range(saved["before"]):
            next(batches)
        assert known_then(loader.state_dict(), saved["state"]) == known_then(saved["state"], saved["state"])
    with Loader(stores, config, **ranks) as loader:
        loader.load_state_dict(saved["state"])
        delivered = [batch_as_json(batch) for batch, _ in zip(loader.forever(), saved["batches"], strict=False)]
    assert delivered == saved["batches"]


def test_samples_are_dropped_compacted_merged_and_exported() -> None:
    expected = by_id(EXPECTED["photos.store"]["5"])
    assert call("store", "drop", "photos.store", "coffee/08.jpg").code == 0
    del expected["coffee/08.jpg"]
    assert call("store", "compact", "photos.store", "--gc", "--older-than", "0s").code == 0
    assert by_id(samples_as_json(Store.open("photos.store"))) == expected
    verify("photos.store", 18)

    assert call("store", "merge", "merged.store", "photos.store", "more.store").code == 0
    merged = by_id(samples_as_json(Store.open("merged.store")))
    adopted = by_id(EXPECTED["more.store"]["2"])
    assert merged == {**expected, **{name: adopted[name] for name in merged if name not in expected}}
    verify("merged.store", len(expected) + len(by_id(EXPECTED["more.store"]["1"])))

    assert call("store", "export", "photos.store", "exported", "--format", "safetensors").code == 0
    rows = [json.loads(line) for line in Path("exported", "samples.jsonl").read_text(encoding="utf-8").splitlines()]
    assert {row["id"] for row in rows} == expected.keys()
    assert all("latent_flipped" in load_file(path) for path in Path("exported").rglob("*.safetensors"))
    assert call("store", "export", "photos.store", "tars", "--format", "webdataset").code == 0


def test_the_same_pack_finds_nothing_new() -> None:
    before = Path("photos.store", "manifest.json").read_bytes()
    report = call("ingest", "pack", "photos", "photos.store", *PACK, "--json").json
    assert (report["packed"], report["unchanged"], report["rejected"]) == (0, 19, 0)
    assert Path("photos.store", "manifest.json").read_bytes() == before


def test_a_pack_adds_an_image_and_encodes_only_the_text_of_a_changed_caption() -> None:
    Path("photos", "new.png").write_bytes(png(40, 60))
    caption = Path("photos", "cat", "01.txt")
    caption.write_text("the cat of a woman\n", encoding="ascii")
    os.utime(caption, (MADE_AT, MADE_AT))
    before, latent = by_id(EXPECTED["photos.store"]["5"]), latent_of("cat/01.jpg")
    report = call("ingest", "pack", "photos", "photos.store", *PACK, "--json").json
    assert (report["packed"], report["unchanged"], report["generation"]) == (2, 18, 6)
    after = by_id(samples_as_json(Store.open("photos.store")))
    assert {name for name in after if after[name] != before.get(name)} == {"new.png", "cat/01.jpg"}
    assert latent_of("cat/01.jpg") == latent
    verify("photos.store", 20)


def test_a_store_that_was_made_without_a_limit_of_the_crop_keeps_none() -> None:
    Path("photos", "strip.png").write_bytes(png(24, 1200))  # its crop loses 97 %
    for packed in (1, 0):
        report = call("ingest", "pack", "photos", "photos.store", *PACK, "--json").json
        assert (report["packed"], report["rejected"], report["dropped"]) == (packed, 0, 0)
    ran = call("ingest", "pack", "photos", "photos.store", *PACK, "--max-crop", "0.75")
    assert ran.code == 1
    assert "the store does not record its rules.max_crop, this run has 0.75" in ran.err
    assert call("ingest", "pack", "photos", "photos.store", *PACK, "--max-crop", "1", "--json").json["unchanged"] == 20


@pytest.mark.parametrize(
    ("options", "lines"),
    [
        (
            ("--crop", "random", "--dtype", "BF16"),
            ["--crop center, this run has --crop random", "--dtype fp16, this run has --dtype bf16"],
        ),
        (("--max-tokens", "5"), ["--max-tokens 12, this run has --max-tokens 5"]),
    ],
)
def test_a_pack_with_other_options_is_refused_with_both_values(options: tuple[str, ...], lines: list[str]) -> None:
    Path("photos", "new.png").write_bytes(png(40, 60))  # the tokenizers, and so the length, are compared if they are loaded
    ran = call("ingest", "pack", "photos", "photos.store", *PACK, *options)
    assert ran.code == 1
    assert ran.err.splitlines()[1 : 1 + len(lines)] == [f"  {line}" for line in lines]


def latent_of(sample_id: str) -> bytes:
    """Return a sample's latent and that of its mirror image, as they are stored."""
    store = Store.open("photos.store")
    _, record = store.sample(sample_id)
    bucket = store.bucket(record.bucket)
    row = bucket.sample_ids(np.arange(bucket.num_rows)).index(sample_id)
    return b"".join(bucket.read(np.array([row]), name).tobytes() for name in ("latent", "latent_flipped"))


def test_a_pack_adopts_what_a_killed_one_left() -> None:
    adopted = EXPECTED["more.store"]["2"]
    report = call("ingest", "pack", "more", "more.store", *PACK, "--json").json
    kept = len(by_id(adopted))
    assert (report["packed"], report["unchanged"]) == (ALL_MORE - kept, kept)
    assert samples_as_json(Store.open("more.store", 2)) == adopted
    assert len(by_id(EXPECTED["more.store"]["1"])) < kept < ALL_MORE
    verify("more.store", ALL_MORE)


OPTIONS_NOW = {
    "--accum ": "--accumulation ",
    "--batch-size ": "--batch ",
    "--checkpoint-every 4": "--save-every 4,30m",
    "--val-timesteps 2": "",  # in a file now
    "--min-snr-gamma 5": "--loss-weight min-snr:5",
}
"""Options of version 0.1.0 as they are spelt today."""


def train(like: str, output: str, max_steps: int, *options: str, store: str = "photos.store") -> None:
    """Run the trainer with the options that version 0.1.0 was given, by their names of today."""
    given = TRAIN[like].replace("photos.store", store)
    for then, now in OPTIONS_NOW.items():
        given = given.replace(then, now)
    Path("few.toml").write_text("val_timesteps = 2\n", encoding="utf-8")
    train_main(
        ["few.toml", *given.split(), "--num-images", "0", "--output-dir", output, "--max-steps", str(max_steps), *options]
    )


@pytest.mark.slow
def test_a_store_is_trained_on_and_packed_on_after_it_was_compacted_and_merged() -> None:
    """Compacting keeps the order of the rows, so training gives the same weights, to the last bit."""
    last = f"checkpoints/step-{SAVED_AT:08d}"
    train("run", "before", SAVED_AT)
    shards = {shard.name for shard in Store.open("photos.store").manifest.shards}
    assert call("store", "compact", "photos.store", "--gc", "--older-than", "0s").code == 0
    assert not shards & {shard.name for shard in Store.open("photos.store").manifest.shards}
    train("run", "after", SAVED_AT)
    assert weights_as_json(Path("after", last)) == weights_as_json(Path("before", last))

    Path("photos", "new.png").write_bytes(png(40, 60))
    report = call("ingest", "pack", "photos", "photos.store", *PACK, "--json").json
    assert (report["packed"], report["unchanged"]) == (1, 19)
    verify("photos.store", 20)

    assert call("store", "merge", "merged.store", "photos.store", "more.store").code == 0
    merged = Store.open("merged.store")
    assert merged.manifest.format_version == 5
    assert call("store", "compact", "merged.store").code == 0
    verify("merged.store", merged.manifest.samples)
    train("run", "merged", SAVED_AT, store="merged.store")
    report = call("ingest", "pack", "more", "merged.store", *PACK, "--json").json
    assert (report["packed"], report["unchanged"]) == (
        ALL_MORE - len(by_id(EXPECTED["more.store"]["1"])),
        len(by_id(EXPECTED["more.store"]["1"])),
    )
    verify("merged.store", 20 + ALL_MORE)


@pytest.mark.parametrize(
    ("like", "saved_at", "steps"),
    [("run", SAVED_AT, STEPS), pytest.param("lora", LORA_SAVED_AT, LORA_STEPS, marks=pytest.mark.slow)],
)
def test_a_run_resumes_to_the_last_bit(
    like: str, saved_at: int, steps: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run of today's takes over the old tensors after the step of the old checkpoint; from there on both are the same."""
    old, last = Path(like) / "checkpoints" / checkpoint.folder_of_step(saved_at), f"checkpoints/step-{steps:08d}"
    train(like, like, steps, "--resume")
    assert "warning" not in capsys.readouterr().err

    compared: list[bool] = []

    def step_with_old_tensors(training: Training, batches: Iterator[Any], step: int) -> StepOutcome:
        if step == saved_at:
            weights = weights_of(training.family, adapters=training.config.lora_rank is not None)
            today = tensors_of(weights, training)
            saved_tensors.load_weights(old, weights, training.model)
            if training.average.is_kept:
                with training.average.applied():
                    saved_tensors.load_weights(old, weights, training.model, averaged=True)
            saved_tensors.load_saved_optimizer(old, training.optimizer)
            compared.append(compare(today, tensors_of(weights, training)))
        return train_step(training, batches, step)

    monkeypatch.setattr(trainer, "train_step", step_with_old_tensors)
    train(like, "today", steps)
    (is_same,) = compared

    assert weights_as_json(Path(like, last)) == weights_as_json(Path("today", last))
    first, second = (torch.load(Path(run, last, checkpoint.OPTIMIZER_FILE), weights_only=True) for run in (like, "today"))
    assert compare(first, second)
    resumed, today = metrics_as_json(Path(like)), metrics_as_json(Path("today"))
    assert resumed[-2:] == today[-2:]  # a window and a validation; the window before them began before the checkpoint
    expect_close(resumed, EXPECTED["runs"][like]["metrics"])
    if is_same:  # this CPU rounds like the one that made the files, so the old version's later results are the same as well
        assert weights_as_json(Path(like, last)) == EXPECTED["runs"][like]["weights"]
        assert resumed == EXPECTED["runs"][like]["metrics"]


def tensors_of(weights: Weights, training: Training) -> dict[str, Any]:
    def copied() -> dict[str, torch.Tensor]:
        return {name: tensor.detach().clone() for name, tensor in weights.tensors(training.model).items()}

    with training.average.applied():
        average = copied()
    return {"model": copied(), "average": average, "optimizer": copy.deepcopy(training.optimizer.state_dict())}


def compare(first: dict[str, Any], second: dict[str, Any]) -> bool:
    """Expect the same names, shapes and dtypes and nearly the same numbers; return whether they are the same bits."""
    (names, left), (other_names, right) = (zip(*sorted(flat(tensors)), strict=True) for tensors in (first, second))
    assert names == other_names
    for one, other in zip(left, right, strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
    # all together: Adam amplifies the rounding of a gradient that is next to nothing
    difference = sum(float((one - other).double().square().sum()) for one, other in zip(left, right, strict=True))
    assert difference < 1e-6 * sum(float(one.double().square().sum()) for one in left)
    return all(torch.equal(one, other) for one, other in zip(left, right, strict=True))


def flat(tensors: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor of nested dicts, by its path."""
    if isinstance(tensors, torch.Tensor):
        yield name, tensors
    elif isinstance(tensors, dict):
        for key, value in tensors.items():
            yield from flat(value, f"{name}.{key}")


def expect_close(found: Any, expected: Any) -> None:
    """Expect the same JSON, numbers to three digits."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for name in expected:
            expect_close(found[name], expected[name])
    elif isinstance(expected, list):
        for one, other in zip(found, expected, strict=True):
            expect_close(one, other)
    else:
        assert found == pytest.approx(expected, rel=1e-3)


def test_a_checkpoint_of_today_has_what_an_old_one_has() -> None:
    """Names, order and plan are the format: what a resume compares must stay as it was written."""
    train("run", "today", SAVED_AT)
    (before, after) = (Path(run) / "checkpoints" / checkpoint.folder_of_step(SAVED_AT) for run in ("run", "today"))
    listed = [json.loads((folder / checkpoint.DIGESTS).read_bytes())["files"].keys() for folder in (before, after)]
    assert listed[1] - {"scheduler/scheduler_config.json"} == listed[0]  # new since, so that a run may begin there
    old, new = (json.loads((folder / checkpoint.STATE).read_bytes()) for folder in (before, after))
    assert old.keys() == new.keys()
    assert known_then(new["loader"], old["loader"]) == known_then(old["loader"], old["loader"])
    assert {name: old[name] for name in old.keys() - {"window", "config", "loader"}} == {
        name: new[name] for name in new.keys() - {"window", "config", "loader"}
    }
    assert old["window"].keys() == new["window"].keys()
    for name in ("first_step", "buckets", "learning_rate"):
        assert old["window"][name] == new["window"][name]
