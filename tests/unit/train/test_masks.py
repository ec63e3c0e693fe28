"""Losses under masks: the three meanings and their floor, against formulas written out, on any ranks and micro-batches."""

from __future__ import annotations

import copy
import dataclasses
from typing import TYPE_CHECKING, Any

import pytest
import torch

from bucketline.errors import UsageError
from bucketline.train.checkpoint import layout_of
from bucketline.train.config import LossWeight, MaskLoss, ObjectiveOptions
from bucketline.train.lora import add_adapters
from bucketline.train.model import place_model, replicated
from bucketline.train.noise import sample_noise
from bucketline.train.parallel import mean_over_ranks, whole
from bucketline.train.step import loss_of, scale_gradients, train_step, validate
from tests.unit.train.forked import fork_ranks
from tests.unit.train.tiny_run import config, facts, load, make_batch, make_training, write_unet

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from bucketline.loader import Batch
    from bucketline.train.parallel import TrainRanks
    from bucketline.train.step import Training

EVERY = ("plain", "sample", "batch", "plain:0.25", "sample:0.25", "batch:0.25")
ROWS = 8  # of a step; row 2 has a mask of zeros, row 3 of ones, the others some of each and between
MEAN_WEIGHT = 0.75
CPU = torch.device("cpu")


def masked(num: int, first: int = 0, *, blank: bool = False, **more: Any) -> Batch:
    """Return rows of a step with masks and, of every second, half the weight."""
    batch, rows = make_batch(num, first=first), range(first, first + num)
    drawn = [torch.rand(8, 8, generator=torch.Generator().manual_seed(row)) for row in rows]
    masks = [
        torch.zeros(8, 8) if row == 2 or blank else torch.ones(8, 8) if row == 3 else (2 * own - 0.5)
        for row, own in zip(rows, drawn, strict=True)
    ]
    mask = (torch.stack(masks).clamp(0, 1) * 255).round().byte()
    weight = torch.tensor([0.5 if row % 2 else 1.0 for row in rows])
    return dataclasses.replace(batch, columns={**batch.columns, "mask": mask}, weight=weight, **more)


def micro_batches(parts: int, *, blank: bool = False) -> list[Batch]:
    size = ROWS // parts
    return [masked(size, n * size, blank=blank, micro_step=n) for n in range(parts)]


def training_of(folder: Path, asked: str, **changes: Any) -> Training:
    given = {"mask_loss": asked, "loss_weight": "min-snr:5", **changes}
    made = make_training(folder, **given)
    options = ObjectiveOptions(loss_weight=LossWeight(name="min-snr", gamma=5.0))
    return dataclasses.replace(made, prep=dataclasses.replace(made.prep, options=options), mean_weight=MEAN_WEIGHT)


def written_out(training: Training, batch: Batch, asked: str) -> Tensor:
    """Return the loss of a whole step as the formulas have it, with a graph for its gradient."""
    name, _, floor = asked.partition(":")
    noised = training.prep.for_training(batch)
    prediction = training.family.predict(training.model, noised.noisy, noised.timesteps, batch)
    mask = (batch.columns["mask"].float() / 255).clamp(min=float(floor or 0))
    assert noised.weight is not None
    total, area = torch.zeros(()), torch.zeros(())
    for row in range(len(mask)):
        error = ((prediction[row] - noised.target[row]) ** 2 * mask[row]).sum() / prediction[row].numel()
        own = mask[row].sum() / mask[row].numel()
        if name == "sample" and own > 0:
            error = error / own
        total = total + noised.weight[row] * batch.weight[row] / MEAN_WEIGHT * error
        area = area + own
    if name == "batch":
        return total / area if area > 0 else total
    return total / len(mask)


def expect_gradients(training: Training, expected: Training, rel: float = 1e-4) -> None:
    wanted = dict(expected.bare_model.named_parameters())
    for name, one in training.bare_model.named_parameters():
        gradient = wanted[name].grad
        assert one.grad is not None
        assert gradient is not None
        torch.testing.assert_close(whole(one.grad), gradient, rtol=rel, atol=1e-6, msg=name)


class Kept(torch.optim.SGD):
    """An optimizer that leaves weights and gradients as they are."""

    def step(self, _closure: object = None) -> None:  # type: ignore[override]
        pass

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: FBT001, FBT002 - torch's
        pass


def keeping(folder: Path, asked: str, **changes: Any) -> Training:
    """Return a training whose steps change nothing, and leave their gradients to be looked at, unclipped."""
    return training_of(folder, asked, optimizer_of=lambda model: Kept(model.parameters(), lr=1.0), clip_norm=None, **changes)


@pytest.mark.parametrize("asked", EVERY)
@pytest.mark.parametrize("parts", [1, 2, 4])
def test_a_step_has_the_loss_and_gradient_of_the_formula(tmp_path: Path, asked: str, parts: int) -> None:
    training, plain = keeping(tmp_path, asked, accumulation=parts), keeping(tmp_path, asked)
    outcome = train_step(training, iter(micro_batches(parts)), 0)
    loss = written_out(plain, masked(ROWS), asked)
    loss.backward()  # type: ignore[no-untyped-call]
    assert float(outcome.loss) == pytest.approx(float(loss.detach()), rel=1e-6)
    norm = torch.nn.utils.get_total_norm([one.grad for one in plain.trained if one.grad is not None])
    assert float(outcome.grad_norm) == pytest.approx(float(norm), rel=1e-5)
    expect_gradients(training, plain)


@pytest.mark.parametrize("asked", EVERY)
def test_masks_of_ones_are_no_masks_to_the_bit(tmp_path: Path, asked: str) -> None:
    batch = make_batch(4)
    ones = dataclasses.replace(batch, columns={**batch.columns, "mask": torch.full((4, 8, 8), 255, dtype=torch.uint8)})
    found, wanted = (train_step(training_of(tmp_path, asked), iter([one]), 0) for one in (ones, batch))
    assert torch.equal(found.loss, wanted.loss)
    assert torch.equal(found.grad_norm, wanted.grad_norm)


@pytest.mark.parametrize("asked", ["plain", "sample", "batch"])
def test_a_step_of_masks_of_zeros_adds_nothing_and_stays_finite(tmp_path: Path, asked: str) -> None:
    training = keeping(tmp_path, asked, accumulation=2)
    outcome = train_step(training, iter(micro_batches(2, blank=True)), 0)
    assert (float(outcome.loss), float(outcome.grad_norm)) == (0, 0)
    assert all(one.grad is not None and not one.grad.any() for one in training.trained)


def test_what_a_mask_hides_changes_nothing(tmp_path: Path) -> None:
    """Under a mask of zeros and ones, errors where it is zero have no gradient."""
    training = training_of(tmp_path, "plain")
    batch = masked(2)
    hidden = (torch.arange(64).view(8, 8) % 2).byte().expand(2, 8, 8) * 255
    batch = dataclasses.replace(batch, columns={**batch.columns, "mask": hidden})
    noised = training.prep.for_training(batch)
    prediction = torch.randn(2, 2, 8, 8, requires_grad=True)
    training.masked_errors(prediction, noised, batch).sum().backward()  # type: ignore[no-untyped-call]
    assert prediction.grad is not None
    assert torch.equal(prediction.grad.ne(0).all(1), hidden > 0)


@pytest.mark.parametrize("sharding", ["ddp", "fsdp"])
def test_two_ranks_are_one(tmp_path: Path, sharding: str) -> None:
    """The ranks' masks differ, so that a rank's own divisor would be another."""

    def body(ranks: TrainRanks) -> None:
        for asked in EVERY:
            family, model = load(tmp_path / "model", facts(), 0, on_meta=not ranks.is_main)
            placed = config(tmp_path, sharding=sharding, ema="off")
            place_model(model, placed, ranks, CPU, layout_of(family, adapters=False), None)
            if sharding == "ddp":
                model = replicated(model, family, placed, CPU)
            training = keeping(tmp_path, asked, accumulation=2, loaded=(family, model), decay=None)
            one = keeping(tmp_path, asked, loaded=load(tmp_path / "model", facts(), 0))
            own = [masked(2, 4 * ranks.rank + 2 * n, micro_step=n) for n in range(2)]
            found, wanted = train_step(training, iter(own), 0), train_step(one, iter([masked(ROWS)]), 0)
            assert float(mean_over_ranks(found.loss)) == pytest.approx(float(wanted.loss), rel=1e-6)
            assert float(found.grad_norm) == pytest.approx(float(wanted.grad_norm), rel=1e-5)
            expect_gradients(training, one)

    write_unet(tmp_path / "model")
    fork_ranks(tmp_path, body)


@pytest.mark.parametrize("asked", ["sample", "batch:0.1"])
def test_adapters_learn_under_masks(tmp_path: Path, asked: str) -> None:
    made = make_training(tmp_path, mask_loss=asked, lora_rank=2)
    add_adapters(made.model, made.family, made.config)
    training = dataclasses.replace(made, optimizer=Kept(made.model.parameters(), lr=1.0), mean_weight=MEAN_WEIGHT)
    training = dataclasses.replace(training, config=dataclasses.replace(training.config, accumulation=2, clip_norm=None))
    whole_step = dataclasses.replace(training, model=copy.deepcopy(training.model))
    train_step(training, iter(micro_batches(2)), 0)
    assert all("lora" in name for name, one in training.model.named_parameters() if one.grad is not None)
    batch, name = masked(ROWS), training.config.mask_loss.name
    loss = loss_of(whole_step, batch)
    if name == "batch":
        loss = loss / (batch.columns["mask"] / 255).clamp(min=0.1).mean()
    loss.backward()  # type: ignore[no-untyped-call]
    for one, other in zip(training.trained, whole_step.trained, strict=True):
        assert one.grad is not None
        assert other.grad is not None
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("asked", EVERY)
def test_validation_is_the_same_error_over_all_held_out_samples(tmp_path: Path, asked: str) -> None:
    training = training_of(tmp_path, asked, val_timesteps=2)
    batches = [masked(3), dataclasses.replace(masked(5, 3), weight=torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0]))]
    result = validate(training, batches, lambda sums: sums)
    name, _, floor = asked.partition(":")
    total, area = [0.0, 0.0], 0.0
    with torch.no_grad():
        for batch in batches:
            mask = (batch.columns["mask"].float() / 255).clamp(min=float(floor or 0))
            for at, timestep in enumerate((250, 750)):
                noised = training.prep.for_validation(batch, sample_noise(batch), timestep)
                prediction = training.family.predict(training.model, noised.noisy, noised.timesteps, batch)
                errors = ((prediction - noised.target) ** 2 * mask.unsqueeze(1)).mean((1, 2, 3))
                if name == "sample":
                    errors = torch.where(mask.mean((1, 2)) > 0, errors / mask.mean((1, 2)).clamp(min=1e-9), 0.0)
                total[at] += float((errors * batch.weight).sum())
            area += float((batch.weight * (mask.mean((1, 2)) if name == "batch" else 1.0)).sum())
    assert list(result.loss_per_timestep.values()) == pytest.approx([one / area for one in total], rel=1e-5)


def test_validation_of_masks_of_zeros_is_zero(tmp_path: Path) -> None:
    batches = [masked(3, blank=True)]
    assert validate(training_of(tmp_path, "batch"), batches, lambda sums: sums).loss == 0


def test_gradients_of_shards_and_of_16_bits_are_scaled_in_place() -> None:
    one = torch.nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
    one.grad = torch.tensor([1.0, 2.0, 3.0], dtype=torch.bfloat16)
    gradient = one.grad
    scale_gradients([one, torch.nn.Parameter(torch.zeros(1))], torch.tensor(0.5))
    assert torch.equal(gradient, torch.tensor([0.5, 1.0, 1.5], dtype=torch.bfloat16))


def test_how_it_is_spelt() -> None:
    assert MaskLoss.parse("batch:0.1", "--mask-loss") == MaskLoss(name="batch", floor=0.1)
    assert [str(MaskLoss.parse(asked, "it")) for asked in EVERY] == list(EVERY)
    with pytest.raises(UsageError, match=r"--mask-loss is batch:2: floor is 2.0, expected 0 to 1"):
        MaskLoss.parse("batch:2", "--mask-loss")
    with pytest.raises(UsageError, match=r"--mask-loss is 'mean', expected plain\[:FLOOR\] or .* such as batch:0.1"):
        MaskLoss.parse("mean", "--mask-loss")
