"""The average of the weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from bucketline.train.config import EmaPlace
from bucketline.train.optim import Average, decay_at, rounded

PLACES = pytest.mark.parametrize("place", EmaPlace)


def averaged(model: nn.Linear, average: Average) -> torch.Tensor:
    with average.applied():
        return model.weight.detach().clone()


def test_the_decay_rises_with_the_steps_up_to_the_one_asked_for() -> None:
    assert decay_at(0, 0.9999) == pytest.approx(0.1)
    assert decay_at(90, 0.9999) == pytest.approx(0.91)
    assert decay_at(10**7, 0.9999) == pytest.approx(0.9999)


@PLACES
def test_the_average_follows_the_weights_by_the_decay(place: EmaPlace) -> None:
    model = nn.Linear(3, 2)
    average = Average(model, 0.5, place=place)
    before = averaged(model, average)
    with torch.no_grad():
        model.weight.add_(1.0)
    average.update(step=1000)
    torch.testing.assert_close(averaged(model, average), before + 0.5)


def test_the_average_follows_weights_that_were_given_new_memory() -> None:
    """Accelerate does so when it prepares a model, and an average over the old memory would stand still."""
    model = nn.Linear(3, 2)
    average = Average(model, 0.0)
    model.weight.data = model.weight.data.clone() + 1.0
    average.update(step=1000)
    assert torch.equal(averaged(model, average), model.weight)


@PLACES
def test_weights_of_any_layout_are_exchanged_with_their_averages_and_the_same_bits_again_after(place: EmaPlace) -> None:
    model = nn.Conv2d(5, 7, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    average = Average(model, 0.5, place=place)
    first = [parameter.detach().clone() for parameter in model.parameters()]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 / 3)
    before = [(parameter.detach().clone(), parameter.data_ptr()) for parameter in model.parameters()]
    for _ in range(2):
        with average.applied():
            assert all(torch.equal(*pair) for pair in zip(model.parameters(), first, strict=True))
        for parameter, (weight, memory) in zip(model.parameters(), before, strict=True):
            assert torch.equal(parameter, weight)
            assert parameter.data_ptr() == memory  # compiled blocks and optimizers hold it


class NoMemory(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Let every allocation fail."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (
            torch.ops.aten.empty,
            torch.ops.aten.empty_like,
            torch.ops.aten._to_copy,
            torch.ops.aten.clone,
        ):
            raise torch.OutOfMemoryError
        return func(*args, **(kwargs or {}))


@PLACES
def test_the_weights_come_back_though_memory_has_ended_meanwhile(place: EmaPlace) -> None:
    model = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    average = Average(model, 0.5, place=place)
    with torch.no_grad():
        model.weight.mul_(1 / 3)
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    with NoMemory(), pytest.raises(torch.OutOfMemoryError), average.applied():
        pass
    assert torch.equal(model.weight, weights[0])
    applied = average.applied()
    applied.__enter__()
    assert not torch.equal(model.weight, weights[0])
    with NoMemory():
        applied.__exit__(None, None, None)
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), weights, strict=True))


@PLACES
def test_an_update_every_few_steps_has_the_decay_of_all_of_them(place: EmaPlace) -> None:
    """Of weights that stand still, it is the same average; the host's is the device's to the bit."""
    model = nn.Linear(3, 2)
    each, third = Average(model, 0.9), Average(model, 0.9, place=place, every=3)
    with torch.no_grad():
        model.weight.add_(1.0)
    for step in range(6):
        each.update(step)
        before = averaged(model, third)
        third.update(step)
        assert torch.equal(averaged(model, third), before) is (step % 3 != 2)
    torch.testing.assert_close(averaged(model, third), averaged(model, each))


def test_without_an_average_the_weights_themselves_are_evaluated() -> None:
    model = nn.Linear(3, 2)
    average = Average(model, None)
    average.update(0)
    assert torch.equal(averaged(model, average), model.weight)
    assert average._averages == []


@pytest.mark.parametrize("sign", [1, -1])
def test_values_are_rounded_to_a_neighbour_in_bf16_and_right_on_average(sign: int) -> None:
    value = sign * (1.0 + 2.0**-7 / 4)  # a quarter of the way from one bf16 to the next
    found = rounded(torch.full((200, 2, 10, 10), value).to(memory_format=torch.channels_last))
    assert found.is_contiguous(memory_format=torch.channels_last)
    assert set(found.flatten().tolist()) == {sign * 1.0, sign * (1.0 + 2.0**-7)}
    torch.testing.assert_close(found.mean().item(), value, rtol=2e-4, atol=0)


def test_what_a_bf16_holds_stays_and_infinities_stay_infinite() -> None:
    values = torch.cat([torch.randn(1000).bfloat16().float(), torch.tensor([0.0, -0.0, float("inf"), -float("inf")])])
    assert torch.equal(rounded(values), values)


@PLACES
def test_a_bf16_average_moves_by_less_than_its_last_bit_on_average(place: EmaPlace) -> None:
    model = nn.Linear(64, 64, bias=False, dtype=torch.bfloat16)
    nn.init.ones_(model.weight)
    average = Average(model, 0.999, place=place)
    with torch.no_grad():
        model.weight.fill_(2.0)
    for step in range(9991, 10_091):
        average.update(step)
    mean = averaged(model, average).float().mean().item()
    assert abs(mean - (2.0 - 0.999**100)) < 0.005  # rounded to the nearest it would be 1
