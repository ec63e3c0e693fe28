"""Objectives and noise schedule against diffusers' own functions and against the formulas of their sources."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers import DDPMScheduler, FlowMatchEulerDiscreteScheduler
from diffusers.pipelines.flux.pipeline_flux import calculate_shift
from diffusers.training_utils import compute_loss_weighting_for_sd3, compute_snr

from bucketline.train.config import Objective
from bucketline.train.noise import (
    FlowSchedule,
    Mixing,
    NoiseSchedule,
    add_noise,
    squared_error,
    target,
    weights_of_errors,
)
from bucketline.train.values import LossWeight, Weighting

CPU = torch.device("cpu")


def drawn() -> tuple[Any, torch.Tensor, torch.Tensor, torch.Tensor, Mixing]:
    """Return diffusers' scheduler, timesteps, clean latents, noise, and the shares of signal and noise."""
    scheduler = DDPMScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear")
    schedule = NoiseSchedule.from_alphas_cumprod(scheduler.alphas_cumprod, CPU)
    generator = torch.Generator().manual_seed(0)
    clean, noise = (torch.randn(4, 2, 3, 5, generator=generator) for _ in range(2))
    timesteps = torch.tensor([0, 1, 500, 999])
    return scheduler, timesteps, clean, noise, schedule.at(timesteps, 3, 5)


def test_noise_is_added_as_diffusers_adds_it() -> None:
    scheduler, timesteps, clean, noise, mixing = drawn()
    torch.testing.assert_close(add_noise(clean, noise, mixing), scheduler.add_noise(clean, noise, timesteps))


def test_epsilon_is_the_noise_itself() -> None:
    _, _, clean, noise, mixing = drawn()
    assert target(Objective.EPSILON, clean, noise, mixing) is noise


def test_v_is_diffusers_velocity() -> None:
    scheduler, timesteps, clean, noise, mixing = drawn()
    found = target(Objective.V_PREDICTION, clean, noise, mixing)
    torch.testing.assert_close(found, scheduler.get_velocity(clean, noise, timesteps))


def test_v_and_x_t_give_back_clean_and_noise_as_the_paper_says() -> None:
    _, _, clean, noise, mixing = drawn()
    noisy = add_noise(clean, noise, mixing)
    v = target(Objective.V_PREDICTION, clean, noise, mixing)
    torch.testing.assert_close(mixing.signal * noisy - mixing.noise * v, clean, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(mixing.noise * noisy + mixing.signal * v, noise, atol=1e-5, rtol=1e-5)


def test_a_flows_target_is_the_velocity_from_image_to_noise() -> None:
    """Along the straight path, x_t changes by it per unit of the noise's share."""
    clean, noise = (torch.randn(4, 2, 3, 5) for _ in range(2))
    schedule = FlowSchedule(num_timesteps=1000, shift=1.0, patch_size=1)
    early, late = (schedule.at(torch.full((4,), index), 3, 5) for index in (299, 799))
    moved = add_noise(clean, noise, late) - add_noise(clean, noise, early)
    torch.testing.assert_close(moved, 0.5 * target(Objective.FLOW, clean, noise, early), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_a_flows_timesteps_are_those_that_diffusers_scheduler_has(shift: float) -> None:
    scheduler: Any = FlowMatchEulerDiscreteScheduler(shift=shift)
    found = FlowSchedule(num_timesteps=1000, shift=shift, patch_size=2).at(torch.arange(1000), 8, 8)
    torch.testing.assert_close(found.noise.flatten(), scheduler.sigmas.flip(0))
    torch.testing.assert_close(found.timesteps, scheduler.timesteps.flip(0), rtol=1e-5, atol=1e-3)
    clean, noise = (torch.randn(2, 2, 3, 5) for _ in range(2))
    mixing = FlowSchedule(num_timesteps=1000, shift=shift, patch_size=1).at(torch.tensor([10, 700]), 3, 5)
    told = scheduler.timesteps.flip(0)[[10, 700]]
    torch.testing.assert_close(add_noise(clean, noise, mixing), scheduler.scale_noise(clean, told, noise))


@pytest.mark.parametrize("kind", ["exponential", "linear"])
@pytest.mark.parametrize("size", [(32, 32), (64, 96), (128, 128)])
def test_a_flows_shift_by_size_is_that_of_flux_and_sd3_in_diffusers(kind: str, size: tuple[int, int]) -> None:
    scheduler: Any = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, time_shift_type=kind)
    mu = calculate_shift((size[0] // 2) * (size[1] // 2))
    wanted = scheduler.time_shift(mu, 1.0, scheduler.sigmas.flip(0))
    by_size = {"base_shift": 0.5, "max_shift": 1.15, "base_image_seq_len": 256, "max_image_seq_len": 4096}
    schedule = FlowSchedule(num_timesteps=1000, shift={**by_size, "time_shift_type": kind}, patch_size=2)
    found = schedule.at(torch.arange(1000), *size)
    torch.testing.assert_close(found.noise.flatten(), wanted)
    torch.testing.assert_close(found.timesteps, wanted * 1000, rtol=1e-5, atol=1e-3)


def min_snr(objective: Objective, mixing: Mixing, gamma: float) -> torch.Tensor:
    found = weights_of_errors(LossWeight(name=Weighting.MIN_SNR, gamma=gamma), objective, mixing)
    assert found is not None
    return found


@pytest.mark.parametrize("gamma", [1.0, 5.0])
def test_min_snr_weights_are_those_of_diffusers_training_scripts(gamma: float) -> None:
    scheduler = DDPMScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear")
    timesteps = torch.arange(1000)
    snr = compute_snr(scheduler, timesteps)
    least = torch.stack([snr, gamma * torch.ones_like(snr)], dim=1).min(dim=1)[0]
    mixing = NoiseSchedule.from_alphas_cumprod(scheduler.alphas_cumprod, CPU).at(timesteps, 8, 8)
    torch.testing.assert_close(min_snr(Objective.EPSILON, mixing, gamma), least / snr)
    torch.testing.assert_close(min_snr(Objective.V_PREDICTION, mixing, gamma), least / (snr + 1))


@pytest.mark.parametrize("weighting", [Weighting.COSMAP, Weighting.SIGMA_SQRT])
def test_a_flows_weights_are_those_of_diffusers_training_scripts(weighting: Weighting) -> None:
    scheduler: Any = FlowMatchEulerDiscreteScheduler(shift=3.0)
    sigmas = scheduler.sigmas.flip(0)
    mixing = FlowSchedule(num_timesteps=1000, shift=3.0, patch_size=2).at(torch.arange(1000), 8, 8)
    found = weights_of_errors(LossWeight(name=weighting), Objective.FLOW, mixing)
    torch.testing.assert_close(found, compute_loss_weighting_for_sd3(weighting.replace("-", "_"), sigmas))


def test_min_snr_weights_are_numbers_where_there_is_noise_alone() -> None:
    mixing = NoiseSchedule.from_alphas_cumprod(torch.tensor([0.5, 0.0]), CPU).at(torch.arange(2), 8, 8)
    assert min_snr(Objective.EPSILON, mixing, 5.0).tolist() == [1.0, 1.0]
    assert min_snr(Objective.V_PREDICTION, mixing, 5.0).tolist() == [pytest.approx(0.5), 0.0]


def test_squared_error_is_a_mean_per_sample_in_32_bits() -> None:
    prediction = torch.tensor([[[[1.0, 3.0]]], [[[0.0, 0.0]]]], dtype=torch.bfloat16)
    wanted = torch.tensor([[[[0.0, 1.0]]], [[[2.0, 0.0]]]])
    found = squared_error(prediction, wanted)
    assert found.dtype == torch.float32
    assert found.tolist() == [pytest.approx(2.5), pytest.approx(2.0)]
