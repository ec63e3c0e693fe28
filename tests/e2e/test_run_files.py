"""A run that is typed; the same from the file that each run leaves; the same in parts, by `--resume RUN` from any folder."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from bucketline.train.export import _start_of
from bucketline.train.main import main
from tests.commands import Ran, call, called
from tests.unit.train.tiny_run import losses, make_training_store, write_unet


def trainer(*arguments: str) -> Ran:
    def run(given: list[str]) -> int:
        main(given, "bucketline train")
        return 0

    return called(run, *arguments)


@pytest.mark.slow
def test_a_run_from_a_file_and_one_resumed_by_its_folder_equal_the_typed_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project, other = tmp_path / "project", tmp_path / "other"
    make_training_store(project / "data" / "tiny.store")
    write_unet(project / "model")
    other.mkdir()
    monkeypatch.chdir(project)
    typed = [
        *("sd-lora", "--store", "data/tiny.store:2", "--model", "model", "--batch-size", "2", "--accumulation", "2"),
        *("--log-every", "1", "--num-images", "0", "--learning-rate", "1e-3", "--validate-every", "2", "--max-steps", "5"),
    ]
    whole = [*typed, "--output-dir", "runs/typed", "--lr-schedule", "cosine"]
    trainer(*whole).done()
    monkeypatch.chdir(other)
    trainer("../project/runs/typed/run.toml", "--output-dir", "again").done()
    assert losses(other / "again") == losses(project / "runs" / "typed")
    trainer("../project/runs/typed/run.toml").fails("typed already has a run; continue it with --resume", code=2)

    monkeypatch.chdir(project)
    trainer(*typed, "--output-dir", "runs/parts", "--lr-schedule", "cosine@5", "--max-steps", "2").done()
    monkeypatch.chdir(other)
    run = "../project/runs/parts"
    trainer("--resume", run, "--seed", "1").fails("--seed is 1", "was trained with 0; use --seed 0", code=2)
    assert "has finished: step 2 of 2; raise --max-steps" in trainer("--resume", run).done().out
    trainer("--resume", run, "--max-steps", "4").done()
    trainer("--resume", run, "--max-steps", "5").done()
    assert losses(project / "runs" / "parts") == losses(project / "runs" / "typed")

    given = tomllib.loads((project / "runs" / "parts" / "run.toml").read_text(encoding="utf-8"))
    assert given["run"] | {"output_dir": ""} == {
        "store": [f"{project}/data/tiny.store:2"],
        "model": f"{project}/model",
        "output_dir": "",
        "max_steps": 5,
    }
    recorded = json.loads((project / "runs" / "typed" / "config.json").read_bytes())["config"]
    assert (recorded["store"], recorded["lr_schedule"]) == ([f"{project}/data/tiny.store:2"], "cosine@5")
    assert len(call("loader", "seen", "--run", "../project/runs/typed", "--all").done().out.splitlines()) > 13
    (weights,) = Path("../project/runs/typed/checkpoints").glob("*/lora")
    assert _start_of(weights) == project / "model"

    (project / "data").rename(tmp_path / "data")
    longer = ("--resume", run, "--max-steps", "6", "--lr-schedule", "cosine:0.1@5")
    trainer(*longer).fails("data/tiny.store is not a store", code=1)
    trainer(*longer, "--store", "../data/tiny.store:2").done()
