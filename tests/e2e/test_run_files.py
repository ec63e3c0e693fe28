"""A run that is typed; the same from a file that `--write` made; the same in parts, by `--resume RUN` and nothing else."""

from __future__ import annotations

import json
import shutil
import tomllib
from dataclasses import fields
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

from bucketline.loader.recorded_run import from_start
from bucketline.train.config import TrainConfig
from bucketline.train.export import _start_of
from bucketline.train.main import main
from bucketline.train.run_file import PLACES
from tests.commands import Ran, call, called
from tests.unit.train.tiny_run import losses, make_training_store, write_unet


def trainer(*arguments: str) -> Ran:
    """Call `bucketline train` in this process."""

    def run(given: list[str]) -> int:
        main(given, "bucketline train")
        return 0

    return called(run, *arguments)


@pytest.mark.slow
def test_a_run_from_a_file_and_one_resumed_by_its_folder_equal_the_typed_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make_training_store(tmp_path / "tiny.store")
    write_unet(tmp_path / "model")
    typed = [
        *("sd-lora", "--store", "tiny.store", "--model", "model", "--batch", "2", "--accumulation", "2", "--max-steps", "5"),
        *("--log-every", "1", "--num-images", "0", "--learning-rate", "1e-3", "--validate-every", "2"),
        *("--lr-schedule", "cosine"),
    ]
    trainer(*typed, "--output-dir", "typed").done()

    assert "run it by" in trainer(*typed, "--output-dir", "filed", "--write", "run.toml").done().out
    assert not (tmp_path / "filed").exists()
    trainer("run.toml").done()
    assert losses(tmp_path / "filed") == losses(tmp_path / "typed")

    parts = [*typed, "--output-dir", "parts", "--lr-schedule", "cosine@5"]
    trainer(*parts, "--max-steps", "2").done()
    trainer("--resume", "parts", "--seed", "1").fails("--seed is 1", "was trained with 0; use --seed 0", code=2)
    assert "step 2: nothing to train" in trainer("--resume", "parts").done().out
    trainer("--resume", "parts", "--max-steps", "4").done()
    trainer("--resume", "parts", "--max-steps", "5").done()
    assert losses(tmp_path / "parts") == losses(tmp_path / "typed")

    resolved = tomllib.loads((tmp_path / "parts" / "run.toml").read_text(encoding="utf-8"))
    assert resolved["optimizer"]["lr_schedule"] == "cosine@5"
    assert resolved["run"] == {"store": ["tiny.store"], "model": "model", "output_dir": "parts", "max_steps": 5}
    trainer("typed/run.toml", "--output-dir", "again").done()
    assert losses(tmp_path / "again") == losses(tmp_path / "typed")
    trainer("typed/run.toml").fails("typed already has a run; continue it with --resume", code=2)


@pytest.mark.slow
def test_a_run_is_resumed_seen_and_exported_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Relative paths that it has recorded are of the folder in which it was started, also if that was moved with all in it."""
    project, other = tmp_path / "project", tmp_path / "other"
    make_training_store(project / "data" / "tiny.store")
    write_unet(project / "model")
    other.mkdir()
    monkeypatch.chdir(project)
    typed = [
        *("sd-lora", "--store", "data/tiny.store:2", "--model", "model", "--batch", "2", "--accumulation", "2"),
        *("--log-every", "1", "--num-images", "0", "--learning-rate", "1e-3", "--lr-schedule", "cosine@4"),
    ]
    trainer(*typed, "--max-steps", "4", "--output-dir", "whole").done()
    trainer(*typed, "--max-steps", "1", "--output-dir", "runs/a").done()
    shutil.copytree(project, tmp_path / "moved")
    alone = shutil.copytree(project / "runs" / "a", tmp_path / "alone" / "run")
    absolute = shutil.copytree(project / "runs" / "a", tmp_path / "absolute")

    monkeypatch.chdir(other)
    trainer("--resume", "../project/runs/a", "--max-steps", "2").done()
    recorded = json.loads((project / "runs" / "a" / "config.json").read_bytes())
    assert recorded["started_in"] == str(other)
    assert recorded["config"]["store"] == [f"{project}/data/tiny.store:2"]
    monkeypatch.chdir(project / "runs")
    trainer("--resume", "a", "--max-steps", "4").done()
    assert losses(project / "runs" / "a") == losses(project / "whole")
    monkeypatch.chdir(other)
    assert len(call("loader", "seen", "--run", "../project/whole", "--all").done().out.splitlines()) > 13
    (weights,) = Path("../project/whole/checkpoints").glob("*/lora")
    assert _start_of(weights) == project / "model"

    config = tmp_path / "moved" / "runs" / "a" / "config.json"  # as before there was `started_in`, in a folder that was moved
    document = json.loads(config.read_bytes())
    assert document.pop("started_in") == str(project)
    config.write_text(json.dumps(document), encoding="utf-8")
    shutil.rmtree(project / "data")
    trainer("--resume", "../moved/runs/a", "--max-steps", "4").done()
    assert losses(tmp_path / "moved" / "runs" / "a") == losses(project / "whole")

    (tmp_path / "moved" / "data" / "tiny.store").rename(other / "own.store")  # the run by itself, on another machine
    trainer("--resume", str(alone), "--max-steps", "4").fails("data/tiny.store is not a store", code=1)
    trainer("--resume", str(alone), "--max-steps", "4", "--store", "own.store:2", "--model", "../moved/model").done()
    assert losses(alone) == losses(project / "whole")
    document["config"]["output_dir"], document["started_in"] = str(absolute), str(tmp_path / "moved")
    (absolute / "config.json").write_text(json.dumps(document), encoding="utf-8")
    (other / "own.store").rename(tmp_path / "moved" / "data" / "tiny.store")
    trainer("--resume", "../absolute", "--max-steps", "4").done()
    assert losses(absolute) == losses(project / "whole")


def test_every_option_that_is_a_path_is_found_from_the_folder_of_the_start() -> None:
    paths = {name for name, hint in get_type_hints(TrainConfig).items() if Path in (hint, *get_args(hint))}
    assert paths - {"output_dir", "write"} <= {*PLACES} <= {one.name for one in fields(TrainConfig)}


@pytest.mark.parametrize(
    ("word", "found"),
    [
        ("a.store", "{start}/a.store"),
        ("a.store:3@0.5", "{start}/a.store:3@0.5"),
        ("b.store", "b.store"),
        ("unix:a.sock", "unix:{start}/a.sock"),
        ("unix:b.sock", "unix:b.sock"),
        ("s3://bucket/a.store", "s3://bucket/a.store"),
        ("/a.store", "/a.store"),
        ("a barn, at dusk: " + 400 * "x", "a barn, at dusk: " + 400 * "x"),
        ("auto", "auto"),
        ("x@1@2", "x@1@2"),
        ("", ""),
    ],
)
def test_what_is_in_the_folder_of_the_start_is_taken_from_there(word: str, found: str, tmp_path: Path) -> None:
    (tmp_path / "a.store").mkdir()
    (tmp_path / "a.sock").touch()
    assert from_start(word, tmp_path) == found.format(start=tmp_path)
    assert from_start(word, None) == word
