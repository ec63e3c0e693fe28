"""Run files and presets: read, written, refused; the scripts in `examples/runs/`; and runs that are resumed by their folder."""

from __future__ import annotations

import ast
import contextlib
import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from bucketline.errors import StoreError, UsageError
from bucketline.options import options_of
from bucketline.train.config import TrainConfig, parse
from bucketline.train.main import main
from bucketline.train.run_file import as_run_file, config_as_json, preset_names
from bucketline.typed_json import as_toml
from tests.commands import ROOT, spawn
from tests.kit import make_store, samples_of
from tests.unit.train.tiny_run import as_arguments, config

if TYPE_CHECKING:
    from collections.abc import Callable


SCRIPTS = ROOT / "examples" / "runs"
NEEDED = ("--store", "a.store", "--model", "m", "--output-dir", "o", "--max-steps", "5")


def configured(*arguments: str) -> TrainConfig:
    return parse([*NEEDED, *arguments], "train")


@pytest.fixture
def written(tmp_path: Path) -> Callable[..., str]:
    def write(text: str, name: str = "own.toml") -> str:
        (tmp_path / name).write_text(text, encoding="utf-8")
        return str(tmp_path / name)

    return write


@pytest.mark.parametrize("name", [*preset_names(), str(ROOT / "demo" / "train.toml")])
def test_every_preset_is_a_valid_configuration(name: str) -> None:
    config = configured(name)
    assert config.learning_rate is not None
    assert config.learning_rate < 2e-4 or "/" in name
    assert (config.lora_rank is not None) is name.endswith("-lora")
    assert config.batch_size is not None
    assert config.files == (name,)


def test_there_is_a_preset_for_each_family_and_its_adapters_and_a_script_that_runs_it_on_many_gpus(tmp_path: Path) -> None:
    families = ("flux", "pixart", "sd", "sd3", "sdxl")
    assert set(preset_names()) == {*families, *(f"{name}-lora" for name in families), "dit"}
    assert sorted(path.stem for path in SCRIPTS.glob("*.sh")) == preset_names()
    fake = tmp_path / "torchrun"  # which prints what it was given
    fake.write_text("#!/bin/sh\nprintf '%s|' \"$@\"\n", encoding="utf-8")
    fake.chmod(0o755)
    program = 'export PATH="$0:$PATH"; for script in "$@"; do "$script" --max-steps 7; echo; done'
    done = spawn(["sh", "-c", program, tmp_path, *(SCRIPTS / f"{name}.sh" for name in preset_names())]).done()
    for name, line in zip(preset_names(), done.out.splitlines(), strict=True):
        assert line == f"-m|bucketline.train|{name}|--max-steps|7|"


def test_options_on_the_command_line_win_wherever_they_stand_then_later_files(written: Callable[..., str]) -> None:
    more = ("--learning-rate", "3e-4", "--recompute", "0.5", "--batch-size", "4096tok")
    for arguments in ([*more, "sdxl-lora"], ["sdxl-lora", *more]):
        config = configured(*arguments)
        assert (config.learning_rate, config.recompute, config.lora_rank) == (3e-4, 0.5, 16)
        assert (str(config.batch_size), config.for_loader().batch_tokens) == ("4ktok", 4096)
    first = written('store = ["b.store"]\nverify = false\n[batches]\nbatch_size = 2\nseed=1\naccumulation = 3\n', "first.toml")
    second = written("[batches]\nseed = 2\naccumulation = 4\n", "second.toml")
    config = configured(first, second, "--accumulation=5", "--verify")
    assert (str(config.batch_size), config.seed, config.accumulation, config.verify) == ("2", 2, 5, True)
    assert [str(store) for store in config.store] == ["a.store"]
    steps, epochs = written("batch_size = 1\nmax_steps = 3\n", "first.toml"), written("epochs = 2\n", "second.toml")
    config = parse([*NEEDED[:-2], steps, epochs], "train")
    assert (config.max_steps, config.epochs) == (None, 2)
    assert configured(steps, epochs).epochs is None, "--max-steps is in place of the file's"


def test_a_run_file_is_a_whole_run_also_of_a_windows_editor(tmp_path: Path) -> None:
    text = """store = ["a.store", "b.store:3@0.5"]
model = "m"
output_dir = "o"
max-steps = 9
[section]
batch_size = 2
timesteps = "logit-normal:-0.5,1"
recompute = 1
save-every = "None"
"""
    (tmp_path / "own.toml").write_bytes(b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode())
    config = parse([str(tmp_path / "own.toml")], "train")
    assert [str(store) for store in config.store] == ["a.store", "b.store:3@0.5"]
    assert (config.max_steps, config.timesteps.mean) == (9, -0.5)
    assert (config.timesteps.name, config.save_every) == ("logit-normal", None)
    assert config.recompute == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[optimizer]\nlorra_rank = 4", r"own\.toml has 'lorra_rank', .*'lora_rank'"),
        ("qqq = 4", "has 'qqq', which is not an option of a file$"),
        ("lr_warmup_steps = 9", "'lr_warmup_steps', .* here it is warmup_steps"),
        ('preset = "sd"', "has 'preset', .*name a preset or a run file without an option"),
        ("resume = true", "has 'resume', which is not an option of a file"),
        ("seed = 1\n[batches]\nseed = 2", r"own\.toml has seed twice"),
        ("seed = true", "own.toml: seed is 'True', expected a whole number"),
        ("seed = [1]", r"seed.*\[1\]"),
        ("seed = 2026-01-01", "seed .*2026-01-01.*whole number"),
        ("accumulation = 2.5", "accumulation .*2.5.* whole number"),
        ('learning-rate = "fast"', "own.toml.* learning_rate .*'fast'.* number"),
        ('precision = "fp4"', "precision .*'fp4'.* auto, fp32"),
        ("batch_size = 1\nema = 1.5", "--ema is 1.5: decay is 1.5"),
        ("seed = ", "is not TOML: Invalid value"),
        pytest.param(f"seed = {'[' * 3000}", "is not TOML: maximum recursion", id="deep"),
        ("base = true", "base is 'True', expected int8, fp8, nf4, off"),
    ],
)
def test_a_mistake_in_a_run_file_is_named(text: str, message: str, written: Callable[..., str]) -> None:
    with pytest.raises(UsageError, match=message):
        configured(written(text))


def test_a_preset_that_is_not_there_is_named_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no preset 'sdlx'; did you mean 'sdxl'\?; expected dit, flux, .* or the path of a"):
        configured("sdlx")
    with pytest.raises(UsageError, match=r"did you mean 'report'.*the commands are memory, presets, report"):
        parse(["reports"], "train", ["memory", "presets", "report"])
    with pytest.raises(UsageError, match=r"own\.toml cannot be read: .*No such file or directory"):
        configured(str(tmp_path / "own.toml"))


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[object, str, str]:
    with pytest.raises(SystemExit) as end:
        main(["presets", *arguments], "bucketline train")
    said = capsys.readouterr()
    return end.value.code, said.out, said.err


def test_presets_are_listed_and_printed_as_they_may_be_given_again(
    written: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    _, listed, _ = printed(capsys)
    assert [line.split()[0] for line in listed.splitlines()] == preset_names()
    assert "sdxl-lora    SDXL, LoRA adapters.\n" in listed
    assert configured(written(printed(capsys, "sdxl-lora")[1])).lora_rank == 16
    code, _, said = printed(capsys, "sdlx")
    assert (code, "did you mean 'sdxl'" in said) == (2, True)


@pytest.mark.parametrize("service", ["http://here:1", "tcp://here", "", "unix:"])
def test_a_service_that_is_no_address_is_refused_with_the_options(service: str) -> None:
    with pytest.raises(UsageError, match=r"service is '?.*'?, expected a `loader serve`|is not an address"):
        configured("--service", service, "--batch-size", "1")


CHOSEN: dict[str, Any] = {
    "memory": "24GB",
    "sharding": "fsdp",
    "push_to_hub": "me/a",
    "batch_size": "4MP/8",
    "ema": "0.99:cpu",
}


def test_a_written_file_gives_the_same_options_whatever_was_chosen(written: Callable[..., str]) -> None:
    chosen = configured(
        *("sdxl-lora", "--store", 'b "c".store:3', "--recompute", "0.5", "--clip-norm", "None", "--follow", "--seed", "3"),
        *("--learning-rate", "1e-5", "--track-with", "tensorboard", "--timesteps", "mode:0.5", "--cache-bytes", "1.5TB"),
        *(word for name, value in CHOSEN.items() for word in (f"--{name.replace('_', '-')}", value)),
    )
    assert CHOSEN.items() <= config_as_json(chosen).items()
    text = as_run_file(chosen, "Mine")
    assert replace(parse([written(text)], "train"), files=chosen.files) == chosen
    assert "learning_rate = 1e-05" in text.splitlines()
    assert "accumulation" not in text
    every = [one.field for one in options_of(TrainConfig) if one.field not in ("files", "resume", "new_plan")]
    values = "".join(f"{name} = {as_toml(getattr(chosen, name))}\n" for name in every)
    assert replace(parse([written(values)], "train"), files=chosen.files) == chosen, "each default may be set"


def test_a_run_is_resumed_by_its_folder_and_options_next_to_it_win(tmp_path: Path) -> None:
    run = tmp_path / "a"
    run.mkdir()
    before = configured("sd-lora", "--flip", "0.5", "--clip-norm", "None")
    (run / "run.toml").write_text(as_run_file(before, "It"), encoding="utf-8")
    for arguments in (["--resume", str(run), "--max-steps", "9"], ["--max-steps", "9", f"--resume={run}"]):
        assert parse(arguments, "train") == replace(before, output_dir=run, resume=True, max_steps=9, files=())
    assert parse(["--resume", str(run), "--epochs", "2"], "train").max_steps is None
    for arguments, message in (
        (["--resume", str(run), "--output-dir", "b"], r"--resume is .*a and --output-dir is b; a run continues in its folder"),
        (["--resume", str(tmp_path / "none")], r"there is no run in .*none to resume: it has no run\.toml"),
        (["--resume", str(run), "--ema", "2"], "--ema is 2: decay is 2"),
    ):
        with pytest.raises(UsageError, match=message):
            parse(arguments, "train")
    bare = configured("--resume", "--batch-size", "2")
    assert (bare.resume, str(bare.output_dir), str(bare.batch_size)) == (True, "o", "2")


def test_places_are_recorded_absolute_and_names_and_texts_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("prompts.txt").touch()
    long = "a barn, at dusk: " + 400 * "x"
    config = replace(
        configured("--batch-size", "1"),
        store=("b.store:3@0.5", "s3://bucket/c.store"),
        image_prompts=("prompts.txt", long),
        model_config="org/model",
    )
    found = config.with_absolute_paths()
    assert [str(one) for one in found.store] == [f"{tmp_path}/b.store:3@0.5", "s3://bucket/c.store"]
    assert found.image_prompts == (f"{tmp_path}/prompts.txt", long)
    assert (found.model, found.output_dir, found.model_config) == (tmp_path / "m", tmp_path / "o", "org/model")


# The entry point: what it imports before it is asked to train, and what it answers to senseless requests.


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
    assert "--batch-size" in done.out


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_size": "0"}, "--batch-size is '0', expected rows, such as 8, or"),
        ({"store": ()}, "no --store is given, expected one or more"),
        ({"save_every": 0}, "--save-every is 0, expected 1 or more"),
        ({"learning_rate": float("nan")}, "--learning-rate is nan"),
        ({"ema": "1.5"}, "--ema is 1.5: decay is 1.5, expected 0 to 1"),
        ({"timesteps": "mode:2"}, "--timesteps is mode:2: scale is 2.0, expected -1 to 1.75"),
        ({"betas": "0.9,1"}, "--betas is 0.9,1: beta2 is 1.0, expected 0 to below 1"),
        ({"noise_offset": -0.1}, "--noise-offset is -0.1, expected 0 or more"),
        ({"base": "nf4"}, "--base is nf4, but --lora-rank is not given"),
        ({"base": "nf4", "lora_rank": 4, "sharding": "fsdp"}, "--base is nf4, and --sharding is fsdp, expected ddp"),
        ({"clip_norm": 0.0}, "--clip-norm is 0.0"),
        ({"image_prompts": ("few",), "num_images": 0}, "--image-prompts is few, and --num-images is 0"),
        ({"batch_size": None}, "no batch size given: pass --batch-size: rows, such as 8, or as many as fit 4MP"),
        ({"batch_size": "2/2"}, "--batch-size is '2/2', expected rows, such as 8, or"),
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
    arguments[arguments.index("--batch-size=2")] = "--batch-size=0"
    done = spawn([sys.executable, MAIN, *arguments])
    assert (done.code, done.out) == (2, "")
    said = "error: --batch-size is '0', expected rows, such as 8, or as many as fit 4MP (of 1024 x 1024 px) or 16ktok"
    assert done.err.startswith(said)
    assert done.err.count("\n") == 1


@pytest.mark.parametrize("option", ["--batch-size=0", "--batch-size=many"])
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
        assert ("--batch-size is " in said.err, said.out) == (rank == 0, "")


@pytest.mark.slow
def test_stores_are_given_by_the_option_again_and_again_and_a_failure_ends_with_1_and_a_message(tmp_path: Path) -> None:
    asked = config(tmp_path, store=(tmp_path / "one.store", Path(f"{tmp_path}/two.store:3"), tmp_path / "three.store"))
    done = spawn([sys.executable, MAIN, *as_arguments(asked)]).fails(f"{tmp_path / 'one.store'} is not a store")
    assert done.out == ""
    assert "Traceback" not in done.err


def test_the_model_is_the_one_that_the_store_was_packed_with_unless_another_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("b.store", "m"):
        (tmp_path / name).mkdir()
    asked = [*NEEDED[:2], *NEEDED[4:], "--batch-size", "2"]
    with pytest.raises(StoreError, match=r"a\.store is not a store: "):
        parse(asked, "train")
    make_store(tmp_path / "a.store", samples_of({"train/64x64": 1}))
    with pytest.raises(UsageError, match="needs --model"):
        parse(asked, "train")
    for model, found in (
        (tmp_path / "m", None),
        (tmp_path / "gone", "was packed with .*/gone, which is no"),
        ("org/m", "org/m"),
        (tmp_path / ("m" * 300), "which is no"),
        (f"{tmp_path}/m\0", "which is no"),
    ):
        note = {"model": str(model), "model_config": None}
        (tmp_path / "a.store" / "packed_model.json").write_text(json.dumps(note), encoding="utf-8")
        with pytest.raises(UsageError, match=f"{found}.*; give --model") if found else contextlib.nullcontext():
            assert parse(asked, "train").model == model
        assert parse([*asked, "--model", "other"], "train").model == Path("other")
    for store in "ab":
        note = {"model": str(tmp_path / ("m" if store == "a" else "b.store")), "model_config": None}
        (tmp_path / f"{store}.store" / "packed_model.json").write_text(json.dumps(note), encoding="utf-8")
    assert parse(asked, "train").model == tmp_path / "m"
    with pytest.raises(UsageError, match=r"a.store was packed with .*/m, b.store with .*/b.store; give --model MODEL"):
        parse([*asked, "--store", "b.store"], "train")
