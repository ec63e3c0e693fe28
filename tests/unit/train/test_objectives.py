"""Objectives and noise schedule against diffusers' own functions and against the formulas of their sources."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers import DDPMScheduler

from bucketline.train.objectives import NoiseSchedule, Objective, Shares, add_noise, squared_error, target

CPU = torch.device("cpu")


def drawn() -> tuple[Any, torch.Tensor, torch.Tensor, torch.Tensor, Shares]:
    """Give diffusers' scheduler, timesteps, clean latents, noise, and the shares of signal and noise."""
    scheduler = DDPMScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear")
    schedule = NoiseSchedule.from_alphas_cumprod(scheduler.alphas_cumprod, CPU)
    generator = torch.Generator().manual_seed(0)
    clean, noise = (torch.randn(4, 2, 3, 5, generator=generator) for _ in range(2))
    timesteps = torch.tensor([0, 1, 500, 999])
    return scheduler, timesteps, clean, noise, schedule.at(timesteps, 3, 5)


def test_noise_is_added_as_diffusers_adds_it() -> None:
    scheduler, timesteps, clean, noise, shares = drawn()
    torch.testing.assert_close(add_noise(clean, noise, shares), scheduler.add_noise(clean, noise, timesteps))


def test_epsilon_is_the_noise_itself() -> None:
    _, _, clean, noise, shares = drawn()
    assert target(Objective.EPSILON, clean, noise, shares) is noise


def test_v_is_diffusers_velocity() -> None:
    scheduler, timesteps, clean, noise, shares = drawn()
    found = target(Objective.V_PREDICTION, clean, noise, shares)
    torch.testing.assert_close(found, scheduler.get_velocity(clean, noise, timesteps))


def test_v_and_x_t_give_back_clean_and_noise_as_the_paper_says() -> None:
    _, _, clean, noise, shares = drawn()
    noisy = add_noise(clean, noise, shares)
    v = target(Objective.V_PREDICTION, clean, noise, shares)
    torch.testing.assert_close(shares.signal * noisy - shares.noise * v, clean, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(shares.noise * noisy + shares.signal * v, noise, atol=1e-5, rtol=1e-5)


def test_squared_error_is_a_mean_per_sample_in_32_bits() -> None:
    prediction = torch.tensor([[[[1.0, 3.0]]], [[[0.0, 0.0]]]], dtype=torch.bfloat16)
    wanted = torch.tensor([[[[0.0, 1.0]]], [[[2.0, 0.0]]]])
    found = squared_error(prediction, wanted)
    assert found.dtype == torch.float32
    assert found.tolist() == [pytest.approx(2.5), pytest.approx(2.0)]
