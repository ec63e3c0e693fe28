"""The run scripts in `examples/runs/`: each runs, with a `torchrun` that prints its arguments, and is parsed."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from bucketline.train.config import TrainConfig, parse
from tests.commands import ROOT, spawn

if TYPE_CHECKING:
    from pathlib import Path

RUNS = sorted((ROOT / "examples" / "runs").iterdir())
NEEDED = ("--store", "a.store", "--model", "m", "--output-dir", "o", "--max-steps", "5")


def configured(script: Path, folder: Path, *more: str) -> TrainConfig:
    """Run a script with a `torchrun` that prints what it was given, and parse that."""
    fake = folder / "torchrun"
    fake.write_text(f"#!{sys.executable}\nimport sys\nprint('\\0'.join(sys.argv[1:]), end='')\n", encoding="utf-8")
    fake.chmod(0o755)
    done = spawn(["sh", "-c", 'PATH="$0:$PATH" exec "$@"', folder, script, *NEEDED, *more])
    assert done.code == 0, done.err
    first, module, *arguments = done.out.split("\0")
    assert (first, module) == ("-m", "bucketline.train")
    return parse(arguments, "train")


@pytest.mark.parametrize("script", RUNS, ids=lambda path: path.stem)
def test_every_run_is_a_valid_configuration(script: Path, tmp_path: Path) -> None:
    config = configured(script, tmp_path)
    assert config.max_steps == 5
    assert config.precision == "bf16"
    assert config.learning_rate is not None
    assert config.learning_rate < 2e-4
    assert (config.lora_rank is not None) is script.stem.endswith("-lora")
    assert script.name in script.read_text(encoding="utf-8")


def test_options_on_the_command_line_win(tmp_path: Path) -> None:
    more = ("--learning-rate", "3e-4", "--no-gradient-checkpointing", "--batch-size", "None", "--batch-tokens", "4096")
    config = configured(ROOT / "examples" / "runs" / "sdxl-lora.sh", tmp_path, *more)
    assert (config.learning_rate, config.gradient_checkpointing, config.lora_rank) == (3e-4, False, 16)
    assert (config.batch_size, config.batch_tokens) == (None, 4096)
