"""Runs that options and manifests rule out are refused before torch is imported."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from bucketline.errors import BucketlineError, UsageError
from bucketline.train.config import Precision, WeightDtype
from bucketline.train.refusals import refuse_early
from bucketline.train.trainer import train
from bucketline.train.values import Ema
from tests.commands import ROOT, spawn
from tests.kit import rewrite_manifest
from tests.unit.train.tiny_run import ALONE, TEXT_ENCODER, VAE, as_arguments, config

if TYPE_CHECKING:
    from collections.abc import Callable

    from bucketline.train.config import TrainConfig

PROGRAM = """
import sys
from bucketline.train.main import main
try: main(sys.argv[1:])
finally:
    heavy = {'torch', 'diffusers', 'accelerate', 'transformers', 'peft', 'matplotlib'} & set(sys.modules)
    assert not heavy, heavy
"""


def without_channels(asked: TrainConfig) -> TrainConfig:
    rewrite_manifest(Path(asked.store[0]), encoders={"vae": {"scaling_factor": 0.5}, "text_encoder": dict(TEXT_ENCODER)})
    return asked


def with_shift_and_mean(asked: TrainConfig) -> TrainConfig:
    vae = {**VAE, "latents_mean": [0.0, 1.0]}
    rewrite_manifest(Path(asked.store[0]), encoders={"vae": vae, "text_encoder": dict(TEXT_ENCODER)})
    return asked


def among_files(asked: TrainConfig) -> TrainConfig:
    asked.output_dir.mkdir()
    (asked.output_dir / "a.txt").touch()
    return asked


CASES: dict[str, tuple[Callable[[TrainConfig], TrainConfig], str]] = {
    "channels": (without_channels, "tiny.store: its manifest has no number encoders.vae.latent_channels"),
    "two shifts": (with_shift_and_mean, "its manifest has encoders.vae.shift_factor 0.25, expected none"),
    "place": (among_files, "is not empty (it has 'a.txt') and not a run of this trainer"),
    "no store": (lambda asked: dataclasses.replace(asked, store=("no.store",)), "no.store is not a store"),
    "store twice": (lambda asked: dataclasses.replace(asked, store=asked.store * 2), "are the same store"),
    "weight before repeats": (
        lambda asked: dataclasses.replace(asked, store=("a.store@0.5:3",)),
        "a.store@0.5:3: the weight comes last: a.store:3@0.5",
    ),
    "options": (
        lambda asked: dataclasses.replace(asked, optimizer="schedule-free", ema=Ema()),
        "at each step, and --ema is off: leave it out",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_run_is_refused_by_its_options_and_manifests_and_leaves_no_folder(case: str, folder: Path) -> None:
    change, message = CASES[case]
    asked = change(config(folder))
    before = sorted(folder.rglob("*"))
    with pytest.raises(BucketlineError) as refused:
        refuse_early(asked, 1)
    assert message in str(refused.value)
    assert sorted(folder.rglob("*")) == before


def test_what_is_refused_early_is_refused_by_the_run_in_the_same_words(folder: Path) -> None:
    asked = without_channels(config(folder))
    with pytest.raises(BucketlineError) as early:
        refuse_early(asked, 1)
    with pytest.raises(BucketlineError) as late:
        train(asked, ALONE)
    assert str(early.value) == str(late.value)


def test_what_only_a_run_can_know_is_left_to_it(folder: Path) -> None:
    """The device decides the precision, a checkpoint the generations, and a followed store may not be there yet."""
    plain: dict[str, Any] = {"weights": WeightDtype.BF16, "accumulation": 1}
    refuse_early(config(folder, **plain, precision=Precision.AUTO), 1)
    with pytest.raises(UsageError, match="give --precision bf16 as well"):
        refuse_early(config(folder, **plain, precision=Precision.FP32), 1)
    refuse_early(config(folder, store=("later.store",), follow=1), 1)
    resumed = without_channels(config(folder, resume=True))
    (resumed.output_dir / "checkpoints").mkdir(parents=True)
    refuse_early(resumed, 1)


def test_neither_torch_nor_diffusers_is_imported_for_it(folder: Path) -> None:
    asked = as_arguments(without_channels(config(folder)))
    done = spawn([sys.executable, "-c", PROGRAM, *asked], cwd=str(ROOT))
    assert (done.code, done.err.count("\n")) == (1, 1), done.err
    assert "has no number encoders.vae.latent_channels" in done.err
