"""Runs that options and manifests rule out are refused before torch is imported."""

from __future__ import annotations

import dataclasses
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from bucketline.errors import BucketlineError, TrainError, UsageError
from bucketline.loader.commands.batch_options import BatchSize
from bucketline.train.config import Precision, WeightDtype
from bucketline.train.refusals import refuse_early
from bucketline.train.trainer import train
from bucketline.train.values import Betas
from tests.commands import ROOT, spawn
from tests.kit import flip_bit, rewrite_manifest
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
        lambda asked: dataclasses.replace(asked, optimizer="muon", betas=Betas(beta2=0.99)),
        "and --betas is 0.9,0.99: leave it out",
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
    train(config(folder, max_steps=1), ALONE)
    refuse_early(without_channels(config(folder, resume=True)), 1)


def test_a_resume_is_refused_by_its_checkpoint_before_and_within_the_run_in_the_same_words(folder: Path) -> None:
    before = config(folder, max_steps=2, accumulation=1, batch="49152px")
    train(before, ALONE)
    run, step = before.output_dir, before.output_dir / "checkpoints" / "step-00000002"
    sizes = (
        "--batch {} --accumulation 1 on 1 rank is 2 rows a step of train/128x128, and {} was trained with --batch 49152px "
        "--accumulation 1 on 1 rank, 3 rows a step; give the same number, or continue with --new-plan"
    )
    for changed, message in (
        ({"seed": 9}, f"--seed is 9, and {step} was trained with 0; use --seed 0, or start a new run in another --output-dir"),
        ({"max_steps": 1}, f"--max-steps is 1, and {step} is already at step 2; use that many or more"),
        ({"batch": "32768px"}, sizes.format("32768px", run)),
        ({"batch": "2"}, sizes.format("2", run)),
    ):
        asked = dataclasses.replace(before, resume=True, **changed)
        for refuse in (lambda asked=asked: refuse_early(asked, 1), lambda asked=asked: train(asked, ALONE)):
            with pytest.raises(UsageError) as refused:
                refuse()
            assert str(refused.value) == message
    same = dataclasses.replace(
        before, batch=BatchSize(batch_pixels=50_000), resume=True
    )  # which are as many rows in both buckets
    refuse_early(same, 1)
    assert train(dataclasses.replace(same, max_steps=3), ALONE).steps_done == 3
    refuse_early(dataclasses.replace(before, batch=BatchSize(batch_size=2), resume=True, new_plan=True, max_steps=4), 1)


def test_a_damaged_checkpoint_refuses_nothing_that_the_one_before_it_allows(folder: Path) -> None:
    asked = config(folder, max_steps=2, save_every="1")
    train(asked, ALONE)
    again = dataclasses.replace(asked, max_steps=1, resume=True)
    with pytest.raises(UsageError, match="is already at step 2"):
        refuse_early(again, 1)
    weights = asked.output_dir / "checkpoints" / "step-00000002" / "unet" / "diffusion_pytorch_model.safetensors"
    flip_bit(weights, weights.stat().st_size - 1)
    refuse_early(again, 1)
    assert train(again, ALONE).steps_done == 1
    shutil.rmtree(asked.output_dir / "checkpoints" / "step-00000001")
    with pytest.raises(TrainError, match="has no complete checkpoint to resume"):
        refuse_early(again, 1)


def test_neither_torch_nor_diffusers_is_imported_for_it(folder: Path) -> None:
    asked = as_arguments(without_channels(config(folder)))
    done = spawn([sys.executable, "-c", PROGRAM, *asked], cwd=str(ROOT))
    assert (done.code, done.err.count("\n")) == (1, 1), done.err
    assert "has no number encoders.vae.latent_channels" in done.err


def test_neither_is_imported_for_what_a_resume_refuses(folder: Path) -> None:
    train(config(folder, max_steps=2), ALONE)
    for option, said in (
        ("--seed=9", "was trained with 0; use --seed 0"),
        ("--max-steps=1", "is already at step 2"),
        (
            "--optimizer=muon",
            "was trained with adamw; use --optimizer adamw, or start a new run from its weights",
        ),
        ("--batch=1MP", "--batch 1MP --accumulation 2 on 1 rank is 128 rows a step of train/128x128"),
    ):
        done = spawn([sys.executable, "-c", PROGRAM, "--resume", folder / "run", option], cwd=str(ROOT))
        assert (done.code, done.err.count("\n")) == (2, 1), done.err
        assert said in done.err
