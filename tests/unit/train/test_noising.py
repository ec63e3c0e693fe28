"""Keyed draws: what a sample gets depends only on its key."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from diffusers.training_utils import compute_density_for_timestep_sampling, compute_loss_weighting_for_sd3

from bucketline.loader import Batch
from bucketline.loader.latent_scale import LatentScale
from bucketline.loader.plan.rng import Purpose, normal
from bucketline.store.format.columns import LatentKind
from bucketline.train.config import Objective, ObjectiveOptions
from bucketline.train.noise import (
    FlowSchedule,
    Noised,
    NoiseSchedule,
    Prep,
    draw_timesteps,
    sample_noise,
    weights_of_errors,
)
from bucketline.train.values import LossWeight, Timesteps, TimestepSampling, Weighting
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


@pytest.mark.parametrize(
    ("density", "theirs"),
    [
        (
            ObjectiveOptions(timesteps=Timesteps(name=TimestepSampling.LOGIT_NORMAL, mean=0.5, std=1.5)),
            {"weighting_scheme": "logit_normal", "logit_mean": 0.5, "logit_std": 1.5},
        ),
        *(
            (
                ObjectiveOptions(timesteps=Timesteps(name=TimestepSampling.MODE, scale=scale)),
                {"weighting_scheme": "mode", "mode_scale": scale},
            )
            for scale in (1.29, -0.8)
        ),
        (ObjectiveOptions(), {"weighting_scheme": "none"}),
    ],
    ids=["logit_normal", "mode", "mode towards the ends", "uniform"],
)
def test_timesteps_are_spread_as_diffusers_draws_them(density: ObjectiveOptions, theirs: dict[str, Any]) -> None:
    """Held by the deciles of both, over 40,000 draws."""
    found = draw_timesteps(density, torch.arange(40_000) * 7919, 1000)
    generator = torch.Generator().manual_seed(0)
    drawn = compute_density_for_timestep_sampling(batch_size=40_000, generator=generator, **theirs)
    deciles = torch.linspace(0.1, 0.9, 9)
    difference = found.float().quantile(deciles) / 1000 - drawn.quantile(deciles)
    assert float(difference.abs().max()) < 0.02
    assert int(found.min()) >= 0
    assert int(found.max()) <= 999


def of_moments(num: int, *, first: int = 0) -> Batch:
    """Make a batch whose stored channels are a mean and a log-variance."""
    return dataclasses.replace(make_batch(num, first=first), latent_kind=LatentKind.MOMENTS)


def test_a_latent_is_drawn_from_its_moments_as_diffusers_draws_it_and_anew_at_each_step() -> None:
    prep, batch = make_prep(), of_moments(3)
    posterior: Any = DiagonalGaussianDistribution(batch.latents.float())
    own = normal(batch.keys, Purpose.POSTERIOR, shape=(1, 8, 8))
    clean = (posterior.mean + posterior.std * own - 0.25) * 0.5
    noise = normal(batch.keys, Purpose.NOISE, shape=(1, 8, 8))
    found = prep.for_training(batch)
    share = torch.linspace(0.999, 0.01, 1000)[found.timesteps].view(-1, 1, 1, 1)
    torch.testing.assert_close(found.noisy, share.sqrt() * clean + (1 - share).sqrt() * noise)
    later = dataclasses.replace(batch, keys=batch.keys + 1)
    assert not torch.equal(normal(later.keys, Purpose.POSTERIOR, shape=(1, 8, 8)), own)


def test_moments_of_two_ranks_are_drawn_as_those_of_one() -> None:
    prep = make_prep()
    ranks = joined([prep.for_training(of_moments(2, first=first)) for first in (0, 2)])
    for found, expected in zip(ranks, joined([prep.for_training(of_moments(4))]), strict=True):
        assert torch.equal(found, expected)


def test_a_held_out_samples_latent_is_drawn_the_same_each_time() -> None:
    prep, batch = make_prep(), of_moments(3)
    later = dataclasses.replace(batch, keys=batch.keys + 99, step=5)
    first, second = (prep.for_validation(one, sample_noise(one), 300).noisy for one in (batch, later))
    assert torch.equal(first, second)


def test_errors_are_weighted_where_that_is_asked_for_and_only_in_training() -> None:
    schedule = NoiseSchedule.from_alphas_cumprod(torch.linspace(0.999, 0.01, 1000), torch.device("cpu"))
    options = ObjectiveOptions(loss_weight=LossWeight(name=Weighting.MIN_SNR, gamma=5.0))
    prep = Prep(scale=SCALE, schedule=schedule, objective=Objective.EPSILON, options=options)
    noised = prep.for_training(make_batch(8))
    assert noised.weight is not None
    mixing = schedule.at(noised.timesteps, 8, 8)
    wanted = weights_of_errors(options.loss_weight, Objective.EPSILON, mixing)
    assert wanted is not None
    assert torch.equal(noised.weight, wanted)
    assert make_prep().for_training(make_batch(8)).weight is None


def test_a_flows_errors_are_weighted_by_the_noise_that_was_drawn() -> None:
    schedule = FlowSchedule(num_timesteps=1000, shift=3.0, patch_size=1)
    options = ObjectiveOptions(loss_weight=LossWeight(name=Weighting.COSMAP))
    prep = Prep(scale=SCALE, schedule=schedule, objective=Objective.FLOW, options=options)
    noised = prep.for_training(make_batch(8))
    wanted = compute_loss_weighting_for_sd3("cosmap", noised.timesteps / 1000)
    assert noised.weight is not None
    torch.testing.assert_close(noised.weight, wanted)
