"""Keyed draws: what a sample gets depends on its key alone."""

from __future__ import annotations

import dataclasses

import torch

from bucketline.train.objectives import NoiseSchedule, Objective
from bucketline.train.prep import LatentScale, Noised, Prep, sample_noise
from tests.unit.train.tiny_run import make_batch

SCALE = LatentScale(scale=0.5, shift=0.25)


def make_prep(objective: Objective = Objective.EPSILON) -> Prep:
    alphas = torch.linspace(0.999, 0.01, 1000)
    schedule = NoiseSchedule.from_alphas_cumprod(alphas, torch.device("cpu"))
    return Prep(scale=SCALE, schedule=schedule, objective=objective)


def joined(parts: list[Noised]) -> list[torch.Tensor]:
    return [torch.cat([getattr(part, name) for part in parts]) for name in ("noisy", "timesteps", "target")]


def test_two_ranks_draw_what_one_rank_draws() -> None:
    prep = make_prep()
    alone = prep.for_training(make_batch(4))
    ranks = joined([prep.for_training(make_batch(2, first=first)) for first in (0, 2)])
    for found, expected in zip(ranks, joined([alone]), strict=True):
        assert torch.equal(found, expected)


def test_draws_leave_the_process_generators_alone() -> None:
    before = torch.get_rng_state()
    make_prep().for_training(make_batch())
    assert torch.equal(torch.get_rng_state(), before)


def test_timesteps_are_uniform_over_the_schedule() -> None:
    """500 batches of 40 keys; each tenth of the schedule should get a tenth of the draws."""
    prep, batch = make_prep(), make_batch(40)
    draws = [prep.for_training(dataclasses.replace(batch, keys=torch.arange(40) + 40 * n)).timesteps for n in range(500)]
    timesteps = torch.cat(draws)
    assert int(timesteps.min()) >= 0
    assert int(timesteps.max()) <= 999
    counts = torch.bincount(timesteps // 100, minlength=10)
    assert (counts - 2000).abs().max() < 5 * 2000**0.5


def test_latents_are_shifted_and_scaled_before_noise_as_the_model_sees_them() -> None:
    batch = make_batch()
    noise = sample_noise(batch)
    noised = make_prep().for_validation(batch, noise, 500)
    share = torch.linspace(0.999, 0.01, 1000)[500]
    clean = (batch.latents.float() - 0.25) * 0.5
    torch.testing.assert_close(noised.noisy, share.sqrt() * clean + (1 - share).sqrt() * noise)


def test_scaling_is_undone_for_the_vae() -> None:
    latents = make_batch().latents
    torch.testing.assert_close(SCALE.invert(SCALE.apply(latents)), latents.float())


def test_a_held_out_samples_noise_does_not_depend_on_its_batch() -> None:
    batch, alone = make_batch(4), make_batch(1, first=2)
    elsewhere = dataclasses.replace(alone, keys=alone.keys + 99, step=5)
    assert torch.equal(sample_noise(batch)[2:3], sample_noise(elsewhere))
