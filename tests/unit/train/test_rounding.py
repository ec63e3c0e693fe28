"""Stochastic rounding to bf16: right on average, and the same again for the same seed and step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bucketline.train.ema import Average, Rounding
from bucketline.train.optimizers import rounded_adamw
from bucketline.train.optimizers.rounded_adamw import RoundedAdamW
from bucketline.train.step import begin_step
from bucketline.train.values import EmaPlace
from tests.unit.train.tiny_run import config


def rounded(values: torch.Tensor, rounding: Rounding, step: int) -> torch.Tensor:
    rounding.begin(step)
    found = rounding.rounded(values)
    assert torch.equal(found.bfloat16().float(), found)
    return found.bfloat16()


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
    found = Rounding(0).rounded(values)
    assert found.stride() == values.stride()
    torch.testing.assert_close(found, values, rtol=2.0**-7, atol=0)


def test_a_bf16_average_moves_by_less_than_its_last_bit_on_average() -> None:
    model = torch.nn.Linear(64, 64, bias=False, dtype=torch.bfloat16)
    torch.nn.init.ones_(model.weight)
    for place in EmaPlace:
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


SHAPES = ((64, 3), (7,), (2, 8, 3, 3), (1,))


def optimizer_of(*weights: torch.nn.Parameter, decay: float = 0.01, rate: float = 1e-2) -> RoundedAdamW:
    return RoundedAdamW([{"params": [*weights], "weight_decay": decay}], config(Path(), learning_rate=rate))


def stepped(num: int = 3) -> tuple[list[torch.nn.Parameter], torch.optim.Optimizer]:
    """Return weights after some steps, one of them channels_last."""
    draws = torch.Generator().manual_seed(0)
    weights = [torch.nn.Parameter(torch.randn(shape, generator=draws).bfloat16()) for shape in SHAPES]
    weights[2].data = weights[2].data.to(memory_format=torch.channels_last)
    optimizer = optimizer_of(*weights)
    for step in range(num):
        begin_step(optimizer, step, 1e-2)
        for weight in weights:
            weight.grad = torch.empty_like(weight).copy_(torch.randn(weight.shape, generator=draws))
        optimizer.step()
    return weights, optimizer


def test_weights_that_are_updated_together_get_the_bits_of_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    together, optimizer = stepped()
    monkeypatch.setattr(rounded_adamw, "CHUNK_VALUES", 1)
    apart, other = stepped()
    assert optimizer.state[together[2]]["exp_avg"].stride() == together[2].stride()
    for one, weight in zip(together, apart, strict=True):
        assert torch.equal(one, weight)
        assert all(torch.equal(value, other.state[weight][name]) for name, value in optimizer.state[one].items())


class Kernels(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operations that compute, without views."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += not (func.is_view or "detach" in func.name() or "split" in func.name())
        return func(*args, **(kwargs or {}))


def test_a_step_costs_as_many_kernels_for_few_weights_as_for_many() -> None:
    found = []
    for count in (2, 40):
        weights = [torch.nn.Parameter(torch.ones(8, 8, dtype=torch.bfloat16)) for _ in range(count)]
        optimizer = optimizer_of(*weights)
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        optimizer.step()  # makes the moments
        with Kernels() as seen:
            optimizer.step()
        found.append(seen.number)
    assert found[0] == found[1] < 16


@pytest.mark.parametrize("chunk_values", [1, 5, 1000])
@pytest.mark.parametrize("is_first_wide", [True, False])
def test_weights_of_both_widths_are_updated_alike(
    monkeypatch: pytest.MonkeyPatch, chunk_values: int, *, is_first_wide: bool
) -> None:
    """A model in bf16 can have norms that stay in 32 bits, together with others or by themselves."""
    monkeypatch.setattr(rounded_adamw, "CHUNK_VALUES", chunk_values)
    dtypes = [torch.float32, torch.bfloat16] * 2 if is_first_wide else [torch.bfloat16, torch.float32] * 2
    weights = [torch.nn.Parameter(torch.ones(4, dtype=dtype)) for dtype in dtypes]
    optimizer = optimizer_of(*weights, decay=0.0, rate=2.0**-4)
    begin_step(optimizer, 0, 2.0**-4)
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    for weight, dtype in zip(weights, dtypes, strict=True):
        assert weight.dtype is dtype
        torch.testing.assert_close(weight.detach().float(), torch.full((4,), 1 - 2.0**-4), rtol=2.0**-7, atol=0)


def test_torchaos_rounding_keeps_a_second_moment_for_ever() -> None:
    """Why the step is our own: its weights are rounded stochastically, its moments to the nearest."""
    from torchao.optim import _AdamW

    weight = torch.nn.Parameter(torch.zeros(64, dtype=torch.bfloat16))
    optimizer = _AdamW([weight], lr=1e-9, bf16_stochastic_round=True)
    with torch.compiler.set_stance("force_eager"):
        for step in range(31):
            weight.grad = torch.full_like(weight, float(step == 0))
            optimizer.step()
    moment = optimizer.state[weight]["exp_avg_sq"]
    assert moment.dtype is torch.bfloat16
    assert float(moment.max()) == float(moment.min()) == float(torch.tensor(1e-3).bfloat16())
