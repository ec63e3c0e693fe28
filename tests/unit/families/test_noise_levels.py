"""A flow's noise by size in training against that at which its pipeline draws."""

from __future__ import annotations

import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from diffusers.pipelines.flux2.pipeline_flux2 import compute_empirical_mu

from bucketline.families.family import StoreFacts
from bucketline.families.flux2 import Flux2
from bucketline.families.ideogram4 import Ideogram4
from bucketline.families.schedules import shifted
from bucketline.train.noise import FlowSchedule
from tests.family_models import FORMS, open_pipeline
from tests.kit import edit_json
from tests.unit.families.oracle import one_step
from tests.unit.families.packed import Packed
from tests.unit.families.test_outputs import trainer_of

STEPS = 50
OWN_SPACING = {
    **dict.fromkeys(("sd3", "sd3 without T5", "prx", "prx dc", "auraflow"), 0.05),  # the last step is shifted twice
    "qwenimage": 0.02,  # the last step is moved to 0.02
    "hidream_image": 0.003,  # solvers with steps from a table of 1000
    "sana": 0.001,
}
"""The distance of a step from one of equal shares, for pipelines whose scheduler spaces steps in its own way."""


def furthest(packed: Packed, output: Path) -> float:
    """Return the largest difference between the noise of the pipeline's steps and that of training at as large shares."""
    with trainer_of(packed, output) as trainer:
        schedule, pipeline = trainer.training.prep.schedule, open_pipeline(packed.model, packed.form)
        _, *size = trainer.training.family.store.latent_sizes[0]
        height, width = FORMS[packed.form].size
        asked = {**FORMS[packed.form].call, "num_inference_steps": STEPS}
        one_step(pipeline, ["a red cat"], height=height, width=width, **asked)
        drawn = pipeline.scheduler.sigmas[:STEPS].flip(0).float()
        assert isinstance(schedule, FlowSchedule)
        indices = torch.arange(1, STEPS + 1) * (schedule.num_timesteps // STEPS) - 1
        return float((schedule.at(indices, *size).noise.flatten() - drawn).abs().max())


FLOWS = [name for name in FORMS if name not in ("sd", "sdxl", "pixart_alpha", "pixart_sigma")]


@pytest.mark.parametrize("form", FLOWS, indirect=True)
def test_the_noise_of_training_is_that_of_the_pipelines_own_steps(packed: Packed, tmp_path: Path) -> None:
    assert furthest(packed, tmp_path / "run") <= OWN_SPACING.get(packed.form, 1e-5)


@pytest.mark.parametrize("form", ["krea2"], indirect=True)
def test_a_distilled_krea_2_has_the_one_shift_of_its_pipeline(packed: Packed, tmp_path: Path) -> None:
    distilled = replace(packed, model=shutil.copytree(packed.model, tmp_path / "model"))
    edit_json(distilled.model / "model_index.json", is_distilled=True)
    assert furthest(distilled, tmp_path / "run") <= 1e-5


@pytest.mark.parametrize("form", ["flux2", "krea2", "ideogram4"], indirect=True)
def test_a_scheduler_of_one_shift_is_read_as_the_pipeline_reads_it(packed: Packed, tmp_path: Path) -> None:
    """Such as that of a pipeline that was exported from a run with a shift."""
    exported = replace(packed, model=shutil.copytree(packed.model, tmp_path / "model"))
    edit_json(exported.model / "model_index.json", is_distilled=True)
    edit_json(exported.model / "scheduler" / "scheduler_config.json", shift=2.0, use_dynamic_shifting=False)
    assert furthest(exported, tmp_path / "run") <= 1e-5


@pytest.mark.parametrize("side", [16, 64, 128, 132, 256])
def test_flux_2_is_shifted_by_its_pipelines_formula_below_and_above_its_bend(side: int) -> None:
    levels = Flux2({}, StoreFacts(latent_channels=4, text={})).noise_levels({})
    shares = torch.arange(1, 1001) / 1000
    wanted = shifted(shares, math.exp(compute_empirical_mu(side * side // 4, STEPS)))
    torch.testing.assert_close(levels(shares, side, side), wanted, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("px_per_latent", [8, 16])
def test_ideograms_noise_is_a_normal_distributions_of_a_mean_by_pixels(px_per_latent: int) -> None:
    """As its training script draws it: sigmoid of half the log of pixels ÷ 512², and 1.5 times a normal number."""
    facts = StoreFacts(latent_channels=4, text={}, px_per_latent=px_per_latent)
    levels = Ideogram4({}, facts).noise_levels({})
    drawn = torch.randn(4000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    shares = torch.special.ndtr(drawn)  # as likely as each other
    mean = 0.5 * torch.tensor((128 * px_per_latent) * (64 * px_per_latent) / 512**2).log()
    torch.testing.assert_close(levels(shares, 128, 64), (mean + 1.5 * drawn).sigmoid(), rtol=0, atol=6e-4)
    ends = levels(torch.tensor([1e-9, 1.0]), 128, 64)
    assert ends.tolist() == pytest.approx([5.5e-4, 1 - 1.23e-4], rel=1e-2)


@pytest.mark.parametrize("form", ["flux", "flux2", "ideogram4"], indirect=True)
def test_a_shift_that_is_given_takes_the_place_of_a_familys_noise_levels(packed: Packed, tmp_path: Path) -> None:
    with trainer_of(packed, tmp_path / "run", shift=2.0) as trainer:
        schedule = trainer.training.prep.schedule
        found = schedule.at(torch.tensor([249, 999]), 16, 16)
        torch.testing.assert_close(found.noise.flatten(), torch.tensor([0.4, 1.0]))
