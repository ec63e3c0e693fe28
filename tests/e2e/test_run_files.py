"""A run that is typed; the same from a file that `--write` made; the same in parts, by `--resume RUN` and nothing else."""

from __future__ import annotations

import json
import tomllib
from typing import TYPE_CHECKING

import pytest

from bucketline.train.main import main
from tests.commands import Ran, called
from tests.unit.train.tiny_run import losses, make_training_store, write_unet

if TYPE_CHECKING:
    from pathlib import Path


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
    path = tmp_path / "parts" / "config.json"  # as version 0.1.0 left it: no run file, and options by their names then
    document = json.loads(path.read_bytes())
    options = document["config"]
    options |= {"batch_size": 2, "batch_pixels": None, "batch_tokens": None, "accum": options.pop("accumulation")}
    del options["batch"], options["files"], options["write"]
    path.write_text(json.dumps(document), encoding="utf-8")
    (tmp_path / "parts" / "run.toml").unlink()
    trainer("--resume", "parts", "--max-steps", "5").done()
    assert losses(tmp_path / "parts") == losses(tmp_path / "typed")

    resolved = tomllib.loads((tmp_path / "parts" / "run.toml").read_text(encoding="utf-8"))
    assert resolved["optimizer"]["lr_schedule"] == "cosine@5"
    assert resolved["run"] == {"store": ["tiny.store"], "model": "model", "output_dir": "parts", "max_steps": 5}
    trainer("typed/run.toml", "--output-dir", "again").done()
    assert losses(tmp_path / "again") == losses(tmp_path / "typed")
    trainer("typed/run.toml").fails("typed already has a run; continue it with --resume", code=2)
