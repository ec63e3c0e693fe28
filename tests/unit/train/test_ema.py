"""The average of the weights."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bucketline.train.ema import AveragedModel, decay_at


def test_the_decay_rises_with_the_steps_up_to_the_one_asked_for() -> None:
    assert decay_at(0, 0.9999) == pytest.approx(0.1)
    assert decay_at(90, 0.9999) == pytest.approx(0.91)
    assert decay_at(10**7, 0.9999) == pytest.approx(0.9999)


def test_the_average_follows_the_weights_by_the_decay() -> None:
    model = nn.Linear(3, 2)
    average = AveragedModel(model, 0.5)
    before = average.model.get_parameter("weight").clone()
    with torch.no_grad():
        model.weight.add_(1.0)
    average.update(step=1000)
    torch.testing.assert_close(average.model.get_parameter("weight"), before + 0.5)


def test_the_average_follows_weights_that_were_given_new_memory() -> None:
    """Accelerate does so when it prepares a model, and an average over the old memory would stand still."""
    model = nn.Linear(3, 2)
    average = AveragedModel(model, 0.0)
    model.weight.data = model.weight.data.clone() + 1.0
    average.update(step=1000)
    assert torch.equal(average.model.get_parameter("weight"), model.weight)


def test_the_average_takes_no_gradients() -> None:
    average = AveragedModel(nn.Linear(3, 2), 0.9)
    assert not any(parameter.requires_grad for parameter in average.model.parameters())
