"""Presets: every one makes a configuration, and what is given beside it wins."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import tyro

from bucketline.errors import UsageError
from bucketline.train.config import TrainConfig
from bucketline.train.models.presets import PRESETS, expand

if TYPE_CHECKING:
    from collections.abc import Sequence

NEEDED = ("--store", "a.store", "--model", "m", "--output-dir", "o", "--max-steps", "5")


def parse(*arguments: str) -> TrainConfig:
    settings = (tyro.conf.FlagCreatePairsOff, tyro.conf.EnumChoicesFromValues, tyro.conf.UseAppendAction)
    return tyro.cli(TrainConfig, args=expand([*NEEDED, *arguments]), config=settings)


@pytest.mark.parametrize("name", list(PRESETS))
def test_every_preset_makes_a_configuration_of_its_values(name: str) -> None:
    config = parse("--preset", name)
    for field, value in PRESETS[name][1].items():
        assert getattr(config, field) == value, field
    assert config.preset == name
    assert (config.lora_rank is not None) is name.endswith("-lora")


@pytest.mark.parametrize(
    "given",
    [
        ("--preset", "sdxl-lora", "--learning-rate", "3e-4", "--gradient-checkpointing", "False"),
        ("--learning-rate=3e-4", "--gradient-checkpointing=False", "--preset=sdxl-lora"),
        ("--learning_rate", "3e-4", "--preset", "sdxl-lora", "--gradient_checkpointing", "False"),
    ],
)
def test_what_is_given_beside_a_preset_wins_wherever_it_stands(given: Sequence[str]) -> None:
    config = parse(*given)
    assert (config.learning_rate, config.gradient_checkpointing, config.lora_rank) == (3e-4, False, 16)


def test_another_way_of_giving_the_batch_leaves_the_presets_out() -> None:
    assert "--batch-size" not in expand(["--preset", "sdxl", "--batch-tokens", "4096"])
    assert "--batch-size" in expand(["--preset", "sdxl"])


def test_without_a_preset_nothing_is_added() -> None:
    assert expand(NEEDED) == list(NEEDED)


def test_an_unknown_preset_is_refused_with_those_there_are() -> None:
    with pytest.raises(UsageError, match=r"--preset is 'sdxl-dreambooth', expected one of sd, sd-lora, sdxl, "):
        expand(["--preset", "sdxl-dreambooth"])


def test_the_help_names_every_preset(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("--help")
    words = capsys.readouterr().out.replace(",", " ").replace(".", " ").split()
    assert set(PRESETS) <= set(words)
