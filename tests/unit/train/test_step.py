"""One optimizer step against one written out by hand."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path

import pytest
import torch

from bucketline.train.config import LossWeight, ObjectiveOptions
from bucketline.train.noise import squared_error
from bucketline.train.step import train_step, update
from tests.unit.train.tiny_run import make_batch, make_training


def test_a_step_looks_through_no_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Listing the parameters of SDXL takes 5 ms; they are known from the start."""
    training = make_training(tmp_path)
    assert [id(one) for one in training.trained] == [id(one) for one in training.model.parameters()]
    monkeypatch.setattr(torch.nn.Module, "named_modules", None)
    train_step(training, iter([make_batch(2)]), 0)


def test_a_step_equals_one_written_by_hand(tmp_path: Path) -> None:
    training = make_training(tmp_path)
    model = copy.deepcopy(training.model)
    batch = make_batch(4)
    outcome = train_step(training, iter([batch]), 0)

    from bucketline.loader.plan.order import Purpose, normal, uniform

    noise = normal(batch.keys, Purpose.NOISE, shape=(2, 8, 8))
    timesteps = (uniform(batch.keys, Purpose.TIMESTEP) * 1000).long()
    share = torch.linspace(0.999, 0.01, 1000)[timesteps].view(-1, 1, 1, 1)
    clean = (batch.latents.float() - 0.25) * 0.5
    noisy, v = share**0.5 * clean + (1 - share) ** 0.5 * noise, share**0.5 * noise - (1 - share) ** 0.5 * clean
    prediction = model(noisy, timesteps, batch.tokens.float(), return_dict=False)[0]
    loss = torch.nn.functional.mse_loss(prediction, v)
    loss.backward()  # type: ignore[no-untyped-call]
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01).step()
    assert float(outcome.loss) == pytest.approx(float(loss.detach()), rel=1e-5)
    assert float(outcome.grad_norm) == pytest.approx(float(norm), rel=1e-4)
    for found, expected in zip(training.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)


def test_min_snr_weights_each_samples_error(tmp_path: Path) -> None:
    training = make_training(tmp_path)
    options = ObjectiveOptions(loss_weight=LossWeight(name="min-snr", gamma=5.0))
    training = dataclasses.replace(training, prep=dataclasses.replace(training.prep, options=options))
    batch = make_batch(4)
    noised = training.prep.for_training(batch)
    with torch.no_grad():
        prediction = training.family.predict(training.model, noised.noisy, noised.timesteps, batch)
    assert noised.weight is not None
    wanted = (squared_error(prediction, noised.target) * noised.weight).mean()
    assert float(train_step(training, iter([batch]), 0).loss) == pytest.approx(float(wanted), rel=1e-5)


def test_accumulating_two_batches_is_one_batch_of_both(tmp_path: Path) -> None:
    whole, parts = make_training(tmp_path), make_training(tmp_path, accumulation=2)
    first = train_step(whole, iter([make_batch(4)]), 0)
    halves = [make_batch(2), dataclasses.replace(make_batch(2, first=2), micro_step=1)]
    second = train_step(parts, iter(halves), 0)
    assert float(first.loss) == pytest.approx(float(second.loss), rel=1e-5)
    assert float(first.grad_norm) == pytest.approx(float(second.grad_norm), rel=1e-4)


@pytest.mark.parametrize("clip_norm", [0.1, None])
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_step_whose_gradient_is_not_finite_changes_neither_weights_nor_moments(
    tmp_path: Path, clip_norm: float | None, value: float
) -> None:
    plain, spoiled = make_training(tmp_path), make_training(tmp_path)
    spoiled = dataclasses.replace(spoiled, config=dataclasses.replace(spoiled.config, clip_norm=clip_norm))
    plain = dataclasses.replace(plain, config=spoiled.config)
    good = [dataclasses.replace(make_batch(2, first=number), step=number) for number in range(3)]
    bad = dataclasses.replace(good[1], columns={"target": torch.full_like(good[1].latents, value)})
    for number, batch in enumerate((good[0], bad, good[2])):
        outcome = train_step(spoiled, iter([batch]), number)
        assert bool(outcome.grad_norm.isfinite()) is (number != 1)
        if number != 1:
            train_step(plain, iter([batch]), number)
    for name, tensor in plain.model.state_dict().items():
        assert torch.equal(spoiled.model.state_dict()[name], tensor)
    first, second = (training.optimizer.state_dict()["state"] for training in (plain, spoiled))
    for number, entry in first.items():
        assert all(torch.equal(second[number][name], tensor) for name, tensor in entry.items())
    with spoiled.averaged() as average:
        assert all(tensor.isfinite().all() for tensor in average.state_dict().values())


def test_a_first_step_that_is_not_finite_leaves_nothing_to_fused_sgd() -> None:
    """Torch makes the momentum of memory as it is, and a step that is skipped on the device does not fill it."""
    weights = torch.nn.Parameter(torch.zeros(4096))
    optimizer = torch.optim.SGD([weights], lr=1.0, momentum=0.9, fused=True)
    kept = [torch.full((4096,), float("nan")) for _ in range(64)]  # what the next allocation may find
    del kept
    for value in (float("nan"), 1.0):
        weights.grad = torch.full((4096,), value)
        update(optimizer, [weights], clip_norm=None)
    assert torch.equal(weights.detach(), -torch.ones(4096))
