"""Stochastic rounding to bf16: right on average, and the same again for the same seed and step."""

from __future__ import annotations

import torch

from bucketline.train.config import Ema
from bucketline.train.ema import Average
from bucketline.train.optimizers.adamw import make_bf16
from bucketline.train.optimizers.stepping import Options
from bucketline.train.rounding import Rounding


def rounded(values: torch.Tensor, rounding: Rounding, step: int) -> torch.Tensor:
    target = torch.empty_like(values, dtype=torch.bfloat16)
    rounding.begin(step)
    rounding.round_(target, values)
    return target


def test_values_are_rounded_to_a_neighbour_and_right_on_average() -> None:
    value = 1.0 + 2.0**-7 / 4  # a quarter of the way from one bf16 to the next
    for sign in (1, -1):
        found = rounded(torch.full((40_000,), sign * value), Rounding(0), 0)
        assert set(found.tolist()) == {sign * 1.0, sign * (1.0 + 2.0**-7)}
        torch.testing.assert_close(found.float().mean().item(), sign * value, rtol=2e-4, atol=0)


def test_what_a_bf16_holds_stays_and_infinities_stay_infinite() -> None:
    values = torch.randn(1000).bfloat16().float()
    assert torch.equal(rounded(values, Rounding(3), 5).float(), values)
    edge = torch.tensor([0.0, -0.0, float("inf"), -float("inf")])
    assert torch.equal(rounded(edge, Rounding(3), 5).float(), edge)


def test_the_numbers_follow_from_seed_purpose_and_step() -> None:
    values = torch.randn(2000)
    first = rounded(values, Rounding(1), 7)
    assert torch.equal(rounded(values, Rounding(1), 7), first)
    for other, step in ((Rounding(2), 7), (Rounding(1, purpose=1), 7), (Rounding(1), 8)):
        assert not torch.equal(rounded(values, other, step), first)


def test_a_memory_layout_stays() -> None:
    values = torch.randn(2, 8, 3, 3).to(memory_format=torch.channels_last)
    target = torch.empty_like(values, dtype=torch.bfloat16)
    Rounding(0).round_(target, values)
    torch.testing.assert_close(target.float(), values, rtol=2.0**-7, atol=0)


def test_a_bf16_average_moves_by_less_than_its_last_bit_on_average() -> None:
    model = torch.nn.Linear(64, 64, bias=False, dtype=torch.bfloat16)
    torch.nn.init.ones_(model.weight)
    for place in (Ema.DEVICE, Ema.CPU):
        average = Average(model, 0.999, place=place)
        with torch.no_grad():
            model.weight.fill_(2.0)
        for step in range(9991, 10_091):
            average.update(step)
        with average.applied():
            mean = model.weight.float().mean().item()
        assert abs(mean - (2.0 - 0.999**100)) < 0.005  # rounded to the nearest it would be 1
        with torch.no_grad():
            model.weight.fill_(1.0)


def test_a_bf16_second_moment_falls_as_the_gradients_do() -> None:
    """Rounded to the nearest it stays for ever: a thousandth is less than half of its last bit."""
    weight = torch.nn.Parameter(torch.zeros(4096))
    options = Options(learning_rate=0.0, rounding=Rounding(0), rounds_weights=False, compiled=False)
    optimizer = make_bf16(torch.nn.Module(), [{"params": [weight], "weight_decay": 0.0}], options)
    for step in range(301):
        weight.grad = torch.full_like(weight, float(step == 0))
        options.rounding.begin(step)
        optimizer.step()
    moment = optimizer.state[weight]["exp_avg_sq"]
    assert moment.dtype is torch.bfloat16
    torch.testing.assert_close(moment.float().mean().item(), 1e-3 * 0.999**300, rtol=0.01, atol=0)
