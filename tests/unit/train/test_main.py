"""The entry point: what it imports before it is asked to train, and what it answers to senseless requests."""

from __future__ import annotations

import ast
import sys
import time
from pathlib import Path

import pytest

from bucketline.errors import UsageError
from bucketline.train.main import main
from tests.commands import ROOT, spawn
from tests.unit.train.tiny_run import as_arguments, config

TRAIN = ROOT / "train"
MAIN = TRAIN / "main.py"


def test_main_defines_nothing_but_main() -> None:
    """It exists twice, as `__main__` and as `bucketline.train.main`: anything else in it would be two different things."""
    body = ast.parse(MAIN.read_text(encoding="utf-8")).body
    assert [node.name for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef)] == ["main"]
    others = [node for node in body if not isinstance(node, ast.FunctionDef | ast.ImportFrom | ast.Expr | ast.If)]
    assert others == []


def test_no_file_of_train_has_the_name_of_a_standard_module() -> None:
    """Torchrun puts train/ first on `sys.path`, where it would shadow that module."""
    names = {path.stem for path in TRAIN.iterdir()} - {"__init__", "__pycache__"}
    assert names.isdisjoint(sys.stdlib_module_names)


def test_only_the_entry_point_of_train_reads_the_environment() -> None:
    """Only `command_line.torchrun_ranks` does, and the entry point for torch's allocator."""
    assert [path.name for path in TRAIN.rglob("*.py") if "environ" in path.read_text(encoding="utf-8")] == ["main.py"]


def test_help_imports_neither_torch_nor_diffusers() -> None:
    program = (
        f"import sys; sys.argv = ['main.py', '--help']; sys.path.insert(0, {str(TRAIN)!r})\n"
        "import runpy\n"
        "try: runpy.run_path('train/main.py', run_name='__main__')\n"
        "except SystemExit as end: assert end.code == 0, end.code\n"
        "heavy = {'torch', 'diffusers', 'accelerate', 'matplotlib', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = spawn(["sh", "-c", 'cd "$0" && exec "$1" -c "$2"', ROOT, sys.executable, program]).done()
    assert "--batch" in done.out


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch": "0"}, "--batch is '0', expected rows, such as 8, or"),
        ({"store": ()}, "no --store is given, expected one or more"),
        ({"save_every": "0"}, "--save-every is '0', expected steps, such as 1000, a time, such as 30m, or both: 1000,30m"),
        ({"learning_rate": float("nan")}, "--learning-rate is nan"),
        ({"ema": "1.5"}, "--ema is 1.5: decay is 1.5, expected 0 to 1"),
        ({"save_every": "30m,0"}, "--save-every is '30m,0', expected steps"),
        ({"timesteps": "mode:2"}, "--timesteps is mode:2: scale is 2.0, expected -1 to 1.75"),
        ({"betas": "0.9,1"}, "--betas is 0.9,1: beta2 is 1.0, expected 0 to below 1"),
        ({"noise_offset": -0.1}, "--noise-offset is -0.1, expected 0 or more"),
        ({"lora_dropout": 0.1}, "--lora-dropout is 0.1, but --lora-rank is not given"),
        ({"dora": True}, "dora is True, but --lora-rank is not given"),
        ({"dora": True, "lora_rank": 4, "base": "nf4"}, "--base is nf4, and dora is set, expected plain LoRA"),
        ({"dora": True, "lora_rank": 4, "sharding": "fsdp"}, "dora is True, and --sharding is fsdp, expected ddp"),
        ({"clip_norm": 0.0}, "--clip-norm is 0.0"),
        ({"image_prompts": ("few",), "num_images": 0}, "--image-prompts is few, and --num-images is 0"),
        ({"batch": None}, "no batch size given: pass --batch: rows, such as 8, or as many as fit 4MP"),
        ({"batch": "2/2"}, "--batch is '2/2', expected rows, such as 8, or"),
        ({"sharding": "hsdp"}, "--sharding is 'hsdp', expected ddp, fsdp, "),
        ({"sharding": "fsdp:1"}, "--sharding is 'fsdp:1', expected ddp, fsdp, fsdp:machine, or fsdp:RANKS from 2 on"),
        ({"keep_gathered": True}, "keep_gathered is True, and --sharding is ddp"),
        ({"max_steps": None}, "no length is given: pass --max-steps, such as --max-steps 20000, or --epochs"),
        ({"max_steps": 4, "epochs": 2.0}, "--max-steps is 4 and --epochs is 2, expected one of them"),
        ({"max_steps": None, "epochs": 0.0}, "--epochs is 0.0, expected a number above 0"),
        ({"max_steps": None, "epochs": 2.0, "follow": True}, "--epochs is 2 with --follow, .*; give --max-steps"),
        ({"timestep_range": "0.8:0.2"}, r"--timestep-range is 0\.8:0\.2: low is 0\.8, expected less than high, 0\.2"),
        ({"timestep_range": "0:2"}, r"--timestep-range is 0:2: high is 2\.0, expected 0 to 1"),
    ],
)
def test_a_senseless_option_is_refused_naming_it(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        config(tmp_path, **changes)


def test_a_senseless_option_ends_with_2_and_a_message_without_a_traceback(tmp_path: Path) -> None:
    arguments = as_arguments(config(tmp_path))
    arguments[arguments.index("--batch=2")] = "--batch=0"
    done = spawn([sys.executable, MAIN, *arguments])
    assert (done.code, done.out) == (2, "")
    said = "error: --batch is '0', expected rows, such as 8, or as many as fit 4MP (of 1024 x 1024 px) or 16ktok"
    assert done.err.startswith(said)
    assert done.err.count("\n") == 1


@pytest.mark.parametrize("option", ["--batch=0", "--batch=many"])
def test_of_several_ranks_the_first_one_prints_what_all_find_wrong(
    tmp_path: Path, option: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    waits: list[float] = []
    monkeypatch.setattr(time, "sleep", waits.append)
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        with pytest.raises(SystemExit) as end:
            main([*as_arguments(config(tmp_path)), option])
        assert end.value.code == 2
        assert bool(waits) is (rank > 0), "torchrun ends all ranks with the first, which has to say why"
        said = capsys.readouterr()
        assert ("--batch is " in said.err, said.out) == (rank == 0, "")


@pytest.mark.slow
def test_stores_are_given_by_the_option_again_and_again_and_a_failure_ends_with_1_and_a_message(tmp_path: Path) -> None:
    asked = config(tmp_path, store=(tmp_path / "one.store", Path(f"{tmp_path}/two.store:3"), tmp_path / "three.store"))
    done = spawn([sys.executable, MAIN, *as_arguments(asked)])
    assert (done.code, done.out) == (1, "")
    assert f"{tmp_path / 'one.store'} is not a store" in done.err
    assert "Traceback" not in done.err
