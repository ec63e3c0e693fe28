"""Run files and presets: read, written, refused; the scripts in `examples/runs/`; and runs that are resumed by their folder."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from bucketline.errors import UsageError
from bucketline.options import options_of
from bucketline.train.config import Precision, TrainConfig, parse
from bucketline.train.main import main
from bucketline.train.run_file import as_run_file, config_as_json, preset_names
from bucketline.train.values import TimestepSampling
from tests.commands import ROOT, spawn

if TYPE_CHECKING:
    from pathlib import Path

SCRIPTS = ROOT / "examples" / "runs"
NEEDED = ("--store", "a.store", "--model", "m", "--output-dir", "o", "--max-steps", "5")


def configured(*arguments: str) -> TrainConfig:
    return parse([*NEEDED, *arguments], "train")


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_is_a_valid_configuration(name: str) -> None:
    config = configured(name)
    assert config.learning_rate is not None
    assert config.learning_rate < 2e-4
    assert (config.lora_rank is not None) is name.endswith("-lora")
    assert config.batch is not None
    assert config.files == (name,)


def test_the_demos_preset_is_one() -> None:
    config = configured(str(ROOT / "demo" / "train.toml"))
    assert (str(config.batch), config.images_every, config.lora_rank) == ("16", 50, None)


def test_there_is_a_preset_for_each_family_and_its_adapters() -> None:
    families = ("flux", "pixart", "sd", "sd3", "sdxl")
    assert set(preset_names()) == {*families, *(f"{name}-lora" for name in families), "dit"}


def test_every_preset_has_a_script_that_runs_it_on_many_gpus(tmp_path: Path) -> None:
    assert sorted(path.stem for path in SCRIPTS.iterdir()) == preset_names()
    fake = tmp_path / "torchrun"  # which prints what it was given
    fake.write_text("#!/bin/sh\nprintf '%s|' \"$@\"\n", encoding="utf-8")
    fake.chmod(0o755)
    program = 'export PATH="$0:$PATH"; for script in "$@"; do "$script" --max-steps 7; echo; done'
    done = spawn(["sh", "-c", program, tmp_path, *(SCRIPTS / f"{name}.sh" for name in preset_names())]).done()
    for name, line in zip(preset_names(), done.out.splitlines(), strict=True):
        assert line == f"-m|bucketline.train|{name}|--max-steps|7|"


def test_options_on_the_command_line_win_wherever_they_stand(tmp_path: Path) -> None:
    more = ("--learning-rate", "3e-4", "--recompute", "0.5", "--batch", "4096tok")
    for arguments in ([*more, "sdxl-lora"], ["sdxl-lora", *more]):
        config = configured(*arguments)
        assert (config.learning_rate, config.recompute, config.lora_rank) == (3e-4, 0.5, 16)
        assert (str(config.batch), config.for_loader().batch_tokens) == ("4ktok", 4096)
    own = tmp_path / "own.toml"
    own.write_text('store = ["b.store"]\nverify = false\nbatch = 2\n', encoding="utf-8")
    config = configured("--verify", str(own))
    assert ([str(store) for store in config.store], config.verify) == (["a.store"], True)


def test_a_run_file_is_a_whole_run(tmp_path: Path) -> None:
    own = tmp_path / "own.toml"
    own.write_text(
        """store = ["a.store", "b.store:3@0.5"]
model = "m"
output_dir = "o"
max-steps = 9
batch = 2
timesteps = "logit-normal:-0.5,1"
recompute = 1
save-every = "None"
""",
        encoding="utf-8",
    )
    config = parse([str(own)], "train")
    assert [str(store) for store in config.store] == ["a.store", "b.store:3@0.5"]
    assert (config.max_steps, config.timesteps.mean) == (9, -0.5)
    assert (config.timesteps.name, config.save_every) == (TimestepSampling.LOGIT_NORMAL, None)
    assert config.recompute == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lorra_rank = 4", r"own\.toml has 'lorra_rank', .*'lora_rank'"),
        ("[optimizer]\nlorra_rank = 4", r"own\.toml, \[optimizer\] has 'lorra_rank', .*'lora_rank'"),
        ("[optimizer]\nlora_rank = 4", r"own\.toml, \[optimizer\] has lora_rank, which belongs to \[method\]"),
        (
            "[optimiser]\nseed = 1",
            r"has the section \[optimiser\], which does not exist; did you mean 'optimizer'\?; expected run",
        ),
        ("qqq = 4", "has 'qqq', which is not an option$"),
        ("lr_warmup_steps = 9", "has 'lr_warmup_steps', which is not an option; here it is --warmup-steps"),
        ('preset = "sd"', "has 'preset', which is not an option; name a preset or a run file without an option"),
        ("resume = true", "has resume, which is for the command line only"),
        ("seed = 1\n[batches]\nseed = 2", r"own\.toml, \[batches\] has seed twice"),
        ("seed = true", r"own\.toml has seed = True, expected INT"),
        ("seed = [1]", r"seed.*\[1\]"),
        ("seed = 2026-01-01", "seed .*2026-01-01.*whole number"),
        ("accumulation = 2.5", "accumulation .*2.5.* whole number"),
        ('learning-rate = "fast"', "own.toml.* learning_rate .*'fast'.* number"),
        ('precision = "fp4"', "precision .*'fp4'.* auto, fp32"),
        ('export-dtype = "F8"', "export_dtype .*'F8'.* fp32, fp16, bf16"),
        ('verify = "yes"', "verify = 'yes'.* true or false"),
        ("batch = 1\nema = 1.5", r"--ema is 1.5: decay is 1.5, expected .*\(--ema is set in .*own\.toml, \[optimizer\]\)$"),
        ("seed = ", "is not TOML: Invalid value"),
        pytest.param(f"seed = {'[' * 3000}", "is not TOML: maximum recursion", id="deep"),
        ("base = true", r"base = True, expected int8\|fp8\|nf4\|off$"),
        ("follow = false", r"follow = False, expected"),
        ("batch = 1\nlora_alpha = 1", r"--lora-alpha is 1.*\(--lora-alpha is set in .*own\.toml, \[method\]\)$"),
    ],
)
def test_a_mistake_in_a_run_file_is_named_with_its_place(text: str, message: str, tmp_path: Path) -> None:
    own = tmp_path / "own.toml"
    own.write_text(text, encoding="utf-8")
    with pytest.raises(UsageError, match=message):
        configured(str(own))


def test_a_preset_that_is_not_there_is_named_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no preset 'sdlx'; did you mean 'sdxl'\?; expected dit, flux, .* or the path of a"):
        configured("sdlx")
    with pytest.raises(UsageError, match=r"did you mean 'report'.*the commands are memory, presets, report"):
        parse(["reports"], "train", ["memory", "presets", "report"])
    with pytest.raises(UsageError, match=r"own\.toml cannot be read: No such file or directory"):
        configured(str(tmp_path / "own.toml"))


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[object, str, str]:
    with pytest.raises(SystemExit) as end:
        main(["presets", *arguments], "bucketline train")
    said = capsys.readouterr()
    return end.value.code, said.out, said.err


def test_presets_are_listed_and_printed_as_they_may_be_given_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, listed, _ = printed(capsys)
    assert [line.split()[0] for line in listed.splitlines()] == preset_names()
    assert "sdxl-lora    SDXL, LoRA adapters.\n" in listed
    own = tmp_path / "own.toml"
    own.write_text(printed(capsys, "sdxl-lora")[1], encoding="utf-8")
    assert configured(str(own)).lora_rank == 16
    code, _, said = printed(capsys, "sdlx")
    assert (code, "did you mean 'sdxl'" in said) == (2, True)


@pytest.mark.parametrize("service", ["http://here:1", "tcp://here", "", "unix:"])
def test_a_service_that_is_no_address_is_refused_with_the_options(service: str) -> None:
    with pytest.raises(UsageError, match=r"service is '?.*'?, expected a `loader serve`|is not an address"):
        configured("--service", service, "--batch", "1")
    assert configured("--service", "none", "--batch", "1").service_address() is None


def test_a_written_file_gives_the_same_options_whatever_was_chosen(tmp_path: Path) -> None:
    chosen = configured(
        *("sdxl-lora", "--store", 'b "c".store:3', "--batch", "4MP/8", "--recompute", "0.5", "--clip-norm", "None"),
        *("--learning-rate", "1e-5", "--track-with", "tensorboard", "--seed", "0"),
        *("--memory", "24gb", "--save-every", "1000, 90m", "--follow=64", "--sharding", "fsdp:8", "--ema", "0.99:cpu"),
        *("--push-to-hub", "me/a:exports", "--export-every", "5", "--timesteps", "mode:0.5", "--cache-bytes", "1.5TB"),
    )
    recorded = config_as_json(chosen)
    assert {name: recorded[name] for name in ("memory", "save_every", "follow", "sharding", "push_to_hub", "batch", "ema")} == {
        "memory": "24GB",
        "save_every": "1000,90m",
        "follow": 64,
        "sharding": "fsdp:8",
        "push_to_hub": "me/a:exports",
        "batch": "4MP/8",
        "ema": "0.99:cpu",
    }
    assert recorded == config_as_json(chosen), "what is recorded is spelt as today already"
    text = as_run_file(chosen, "Mine", given=("seed",), derived={"learning_rate": "as it was"})
    (tmp_path / "run.toml").write_text(text, encoding="utf-8")
    assert replace(parse([str(tmp_path / "run.toml")], "train"), files=chosen.files) == chosen
    lines = text.splitlines()
    assert "seed = 0" in lines
    assert "# accumulation = 1" in lines
    assert lines[lines.index("learning_rate = 1e-05") - 1] == "# as it was"
    kept = {line.removeprefix("# ").partition(" = ")[0] for line in lines if " = " in line}
    assert {one.field for one in options_of(TrainConfig)} - kept == {"files", "write", "resume", "new_plan"}
    uncommented = "\n".join(re.sub(r"^# (?=[a-z_]+ = [^ ])", "", line) for line in lines)
    (tmp_path / "all.toml").write_text(uncommented, encoding="utf-8")
    assert replace(parse([str(tmp_path / "all.toml")], "train"), files=chosen.files) == chosen, "each default may be set"


def test_write_makes_a_file_and_trains_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.toml"
    asked = [*NEEDED, "--batch", "3", "--warmup-steps", "100", "--write", str(path)]
    main(asked, "bucketline train")
    assert f"bucketline train {path}" in capsys.readouterr().out
    assert "\nwarmup_steps = 100\n" in path.read_text(encoding="utf-8"), "given, though it is the default"
    assert parse([str(path)], "train") == replace(parse(asked, "train"), files=(str(path),), write=None)
    with pytest.raises(SystemExit):
        main(asked, "bucketline train")
    assert f"--write is {path}, which exists" in capsys.readouterr().err


def test_later_files_and_the_command_line_override(tmp_path: Path) -> None:
    first, second = tmp_path / "first.toml", tmp_path / "second.toml"
    first.write_text("[batches]\nbatch = 2\nseed = 1\naccumulation = 3\n", encoding="utf-8")
    second.write_text("[batches]\nseed = 2\naccumulation = 4\n", encoding="utf-8")
    config = configured(str(first), str(second), "--accumulation=5")
    assert (str(config.batch), config.seed, config.accumulation) == ("2", 2, 5)
    first.write_text('[run]\nmax_steps = 3\n[memory]\nprecision = "BFloat16"\n', encoding="utf-8")
    second.write_text("[run]\nepochs = 2\n", encoding="utf-8")
    config = parse([*NEEDED[:-2], "--batch", "1", str(first), str(second)], "train")
    assert (config.max_steps, config.epochs, config.precision) == (None, 2, Precision.BF16)
    assert parse([*NEEDED, "--batch", "1", str(second)], "train").epochs is None, "--max-steps is in place of the file's"


def test_a_run_is_resumed_by_its_folder_and_options_next_to_it_win(tmp_path: Path) -> None:
    run = tmp_path / "a"
    run.mkdir()
    recorded = {**config_as_json(configured("sd-lora", "--flip", "0.5")), "clip_norm": None, "output_dir": "elsewhere"}
    (run / "config.json").write_text(json.dumps({"config": recorded}), encoding="utf-8")
    for arguments in (["--resume", str(run), "--max-steps", "9"], ["--max-steps", "9", f"--resume={run}"]):
        config = parse(arguments, "train")
        assert (config.output_dir, config.resume, config.max_steps) == (run, True, 9)
        assert (str(config.batch), config.lora_rank, config.flip, config.clip_norm) == ("8", 16, 0.5, None)
        assert [str(store) for store in config.store] == ["a.store"]
    with pytest.raises(UsageError, match=r"--resume is .*a and --output-dir is b; a run continues in its folder"):
        parse(["--resume", str(run), "--output-dir", "b"], "train")
    with pytest.raises(UsageError, match=r"there is no run in .*none to resume: .*config\.json cannot be read \(No such file"):
        parse(["--resume", str(tmp_path / "none")], "train")
    with pytest.raises(UsageError, match=r"--ema is 2: decay is 2"):
        parse(["--resume", str(run), "--ema", "2"], "train")
    bare = configured("--resume", "--batch", "2")
    assert (bare.resume, str(bare.output_dir), str(bare.batch)) == (True, "o", "2")


def test_a_run_file_of_a_windows_editor_is_read(tmp_path: Path) -> None:
    own = tmp_path / "own.toml"
    own.write_bytes(b"\xef\xbb\xbfbatch = 1\r\nseed = 4\r\n")
    assert configured(str(own)).seed == 4
