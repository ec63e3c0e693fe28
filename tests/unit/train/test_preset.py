"""Presets: those that come with the package, a user's own, and the scripts in `examples/runs/` that name them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from bucketline.errors import UsageError
from bucketline.train.config import TrainConfig, parse
from bucketline.train.main import main
from bucketline.train.preset import preset_names
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
    config = configured("--preset", name)
    assert config.learning_rate is not None
    assert config.learning_rate < 2e-4
    assert (config.lora_rank is not None) is name.endswith("-lora")
    assert config.batch is not None
    assert config.preset == name


def test_the_demos_preset_is_one() -> None:
    config = configured("--preset", str(ROOT / "demo" / "train.toml"))
    assert (config.batch, config.images_every, config.lora_rank) == ("16", 50, None)


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
        assert line == f"-m|bucketline.train|--preset|{name}|--max-steps|7|"


def test_options_on_the_command_line_win_wherever_they_stand(tmp_path: Path) -> None:
    more = ("--learning-rate", "3e-4", "--recompute", "0.5", "--batch", "4096tok")
    for arguments in ([*more, "--preset", "sdxl-lora"], ["--preset=sdxl-lora", *more]):
        config = configured(*arguments)
        assert (config.learning_rate, config.recompute, config.lora_rank) == (3e-4, 0.5, 16)
        assert (config.batch, config.for_loader().batch_tokens) == ("4ktok", 4096)
    own = tmp_path / "own.toml"
    own.write_text('store = ["b.store"]\nverify = false\nbatch = 2\n', encoding="utf-8")
    config = configured("--verify", "--preset", str(own))
    assert ([str(store) for store in config.store], config.verify) == (["a.store"], True)


def test_a_preset_of_ones_own_is_a_whole_run(tmp_path: Path) -> None:
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
    config = parse(["--preset", str(own)], "train")
    assert [str(store) for store in config.store] == ["a.store", "b.store:3@0.5"]
    assert (config.max_steps, config.timesteps.mean) == (9, -0.5)
    assert (config.timesteps.name, config.save_every) == (TimestepSampling.LOGIT_NORMAL, None)
    assert config.recompute == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lorra_rank = 4", r"has 'lorra_rank', which is not an option; did you mean 'lora-rank'\?"),
        ("cake = 4", "has 'cake', which is not an option"),
        ('shuffle = "lines"', "has 'shuffle', which is not an option; window sets the order"),
        ("lr_warmup_steps = 9", "has 'lr_warmup_steps', which is not an option; here it is --warmup-steps"),
        ('preset = "sd"', "has 'preset', which is not an option"),
        ("[options]\nseed = 1", "has 'options', which is not an option"),
        ("seed = true", r"own\.toml has seed = True, expected a whole number$"),
        ("seed = [1]", r"has seed = \[1\], expected a whole number$"),
        ("seed = 2026-01-01", "has seed = .*, expected a whole number$"),
        ("warmup-steps = 2.5", "has warmup-steps = 2.5, expected a whole number$"),
        ("batch-size = 2", "has 'batch-size', which is not an option; here it is --batch 8"),
        ('learning-rate = "fast"', "own.toml has learning-rate = 'fast', expected a number or \"None\"$"),
        ('compile = "yes"', 'has compile = \'yes\', expected "auto" or "on" or "off"'),
        (
            'ema = "0.9:gpu"\nbatch = 1',
            r"--ema is '0.9:gpu', expected off or DECAY.*, such as 0.9999:cpu:10",
        ),
        ("ema = 1.5\nbatch = 1", r"--ema is 1.5: decay is 1.5, expected 0 to 1"),
        ('export-dtype = "F8"', "has export-dtype = 'F8', expected \"fp32\" or"),
        ("track-with = [1, true]", r"has track-with = \[1, True\], expected a text, or a list of such$"),
        ('resume = "yes"', "has resume = 'yes', expected true or false"),
        ("seed = ", "is not TOML: Invalid value"),
    ],
)
def test_a_mistake_in_a_preset_is_named(text: str, message: str, tmp_path: Path) -> None:
    own = tmp_path / "own.toml"
    own.write_text(text, encoding="utf-8")
    with pytest.raises(UsageError, match=message):
        configured("--preset", str(own))


def test_a_preset_that_is_not_there_is_named_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no preset 'sdlx'; did you mean 'sdxl'\?; expected dit, flux, .* or the path of a"):
        configured("--preset", "sdlx")
    with pytest.raises(UsageError, match="there is no preset ''"):
        configured("--preset")
    with pytest.raises(UsageError, match=r"own\.toml cannot be read: No such file or directory"):
        configured("--preset", str(tmp_path / "own.toml"))


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
    assert configured("--preset", str(own)).lora_rank == 16
    code, _, said = printed(capsys, "sdlx")
    assert (code, "did you mean 'sdxl'" in said) == (2, True)


@pytest.mark.parametrize("service", ["http://here:1", "tcp://here", "", "unix:"])
def test_a_service_that_is_no_address_is_refused_with_the_options(service: str) -> None:
    with pytest.raises(UsageError, match=r"service is '?.*'?, expected a `loader serve`|is not an address"):
        configured("--service", service, "--batch", "1")
    assert configured("--service", "none", "--batch", "1").service_address() is None
