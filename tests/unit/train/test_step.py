"""One optimizer step against one written out by hand."""

from __future__ import annotations

import copy
import dataclasses
import gc
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bucketline.errors import TrainError
from bucketline.loader import Batch, Loader
from bucketline.train import run as run_module
from bucketline.train import step as step_module
from bucketline.train.config import LossWeight, Objective, ObjectiveOptions
from bucketline.train.log import read_metrics
from bucketline.train.noise import squared_error
from bucketline.train.parallel import StopRequest
from bucketline.train.run import train
from bucketline.train.step import ValidationResult, train_step, update, validate
from tests.unit.train.tiny_run import ALONE, config, make_batch, make_training

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from bucketline.train.config import TrainConfig


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


# The steady step does not wait for the device, collect garbage or compile.


# Operations whose result the host has to read before it can continue; on a GPU each of them waits for all that came before.
READS = ("_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "masked_select", "_unique2", "unique_dim")


class HostReads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operations that make the host wait."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()
        self.num_operations = 0

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self.num_operations += 1
        name = func.overloadpacket.__name__
        if name in READS or (name == "index" and any(i is not None and i.dtype == torch.bool for i in args[1])):
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


def test_steps_and_windows_make_the_host_read_nothing(folder: Path) -> None:
    """The host reads of a run (weights checked before the checkpoint, validations) do not grow with its steps."""
    found = {}
    for steps in (2, 6):
        with HostReads() as mode:
            train(config(folder, output_dir=folder / str(steps), max_steps=steps, log_every=2), ALONE)
        found[steps] = mode
    assert found[6].num_operations > found[2].num_operations + 1000
    assert found[6].counts == found[2].counts
    assert found[2].counts["_local_scalar_dense"] > 0


def test_the_mode_counts_a_read() -> None:
    with HostReads() as mode:
        assert float(torch.ones(())) == 1
        _ = torch.ones(3)[torch.ones(3, dtype=torch.bool)]
    assert mode.counts == {"_local_scalar_dense": 1, "index": 1}


def test_garbage_is_collected_between_steps_only_and_as_before_after_the_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    was_on = []
    real = train_step

    def step(*args: Any) -> object:
        was_on.append(gc.isenabled())
        return real(*args)

    monkeypatch.setattr(run_module, "train_step", step)
    thawed: list[bool] = []
    monkeypatch.setattr(gc, "unfreeze", lambda: thawed.append(gc.isenabled()))
    train(config(folder, max_steps=2), ALONE)
    assert was_on == [False, False]
    assert thawed == [False]
    assert gc.isenabled()


def test_what_lies_between_two_steps_counts_and_a_pause_does_not(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that only a step (0.25 s), the agreement after it (1 s) and a validation (100 s) advance."""
    now = [0.0]

    def lasting(seconds: float, plain: Any) -> Any:
        def run(*given: Any, **named: Any) -> Any:
            now[0] += seconds
            return plain(*given, **named)

        return run

    monkeypatch.setattr(run_module, "mark", lambda _: now[0])
    monkeypatch.setattr(run_module, "train_step", lasting(0.25, train_step))
    monkeypatch.setattr(run_module, "validate", lasting(100.0, validate))
    monkeypatch.setattr(StopRequest, "agreed", lasting(1.0, StopRequest.agreed))
    train(config(folder, max_steps=6, log_every=6, validate_every=3, num_images=0), ALONE)
    (line,) = (line for line in read_metrics(folder / "run") if "loss" in line)
    # 0.25 for the first step and the one after the pause, 1.25 for the others
    assert (line["step_s_p50"], line["step_s_p99"]) == (1.25, 1.25)
    assert line["samples_per_s"] == pytest.approx(6 * 4 / (2 * 0.25 + 4 * 1.25))


# One gradient that is not finite is passed over and counted; several in a row end the run.


def spoil(monkeypatch: pytest.MonkeyPatch, steps: Collection[int]) -> None:
    real, at = step_module.loss_of, [-1]
    real_step = step_module.train_step

    def step(training: object, batches: object, number: int) -> object:
        at[0] = number
        return real_step(training, batches, number)  # type: ignore[arg-type]

    def loss(*args: object) -> object:
        found = real(*args)  # type: ignore[arg-type]
        return found * float("inf") if at[0] in steps else found

    monkeypatch.setattr(run_module, "train_step", step)
    monkeypatch.setattr(step_module, "loss_of", loss)


def bucket_at(step: int, asked: TrainConfig) -> str:
    with Loader(asked.store, asked.for_loader()) as loader:
        return next(one.bucket for one in loader.forever() if one.step == step)


def windows(run: Path) -> list[tuple[object, object, bool]]:
    lines = [line for line in read_metrics(run) if "loss" in line]
    return [(line["step"], line["skipped_steps"], isinstance(line["loss"], float)) for line in lines]


@pytest.mark.parametrize("log_every", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_one_infinite_gradient_is_skipped_counted_and_told(
    log_every: int, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil(monkeypatch, {4})
    asked = config(folder, log_every=log_every, num_images=1)
    train(replace(asked, max_steps=5), ALONE)  # in the middle of a window
    assert train(replace(asked, resume=True), ALONE).steps_done == asked.max_steps
    per_step = [(step, int(step == 4), step != 4) for step in range(7)]
    assert windows(asked.output_dir) == (
        per_step if log_every == 1 else [(2, 0, True), (4, 1, True), (5, 0, True), (6, 0, True)]
    )
    err = capsys.readouterr().err
    assert "1 step skipped" in err
    (said,) = re.findall(r"warning: step 4 \(bucket (.+?)\): the loss is inf .* nan, expected finite numbers; the", err)
    assert said == bucket_at(4, asked)


def test_five_in_a_row_end_the_run_and_none_of_them_is_followed_by_a_checkpoint(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(monkeypatch, range(4, 99))
    asked = config(folder, max_steps=40, save_every=2, keep=9)
    with pytest.raises(
        TrainError, match=r"step 4 \(bucket train/\d+x128\).*5 in a row.*continue with --resume.*lower --learning-rate"
    ):
        train(asked, ALONE)
    assert sorted(path.name for path in (asked.output_dir / "checkpoints").iterdir()) == ["step-00000002", "step-00000004"]


def test_a_checkpoint_that_is_due_after_a_skipped_step_is_made_after_the_next_good_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(monkeypatch, {3, 4})
    asked = config(folder, save_every=4, keep=9)
    train(asked, ALONE)
    assert sorted(path.name[-1] for path in (asked.output_dir / "checkpoints").iterdir()) == ["6", "7"]


# Validation: weights respected, and the same whatever the batches.


FAR = 1000


def run(folder: Path, *batches: Batch) -> ValidationResult:
    training = make_training(folder, val_timesteps=3, objective=Objective.EPSILON)
    return validate(training, batches, lambda sums: sums)


def test_the_loss_is_the_same_whatever_the_batches(tmp_path: Path) -> None:
    whole = run(tmp_path, make_batch(4))
    parts = run(tmp_path, make_batch(1), make_batch(3, first=1))
    assert parts.loss == pytest.approx(whole.loss, rel=1e-5)
    assert parts.zero_loss == pytest.approx(whole.zero_loss, rel=1e-6)


def test_a_row_that_only_fills_the_shape_counts_for_nothing(tmp_path: Path) -> None:
    batch = make_batch(3)
    filled = dataclasses.replace(batch, weight=torch.tensor([1.0, 1.0, 0.0]), columns={"target": batch.latents.clone()})
    filled.latents[2] = FAR
    assert run(tmp_path, filled).loss == pytest.approx(run(tmp_path, make_batch(2)).loss, rel=1e-5)


def test_predicting_zero_scores_the_mean_square_of_the_target(tmp_path: Path) -> None:
    assert run(tmp_path, make_batch(64)).zero_loss == pytest.approx(1.0, abs=0.03)


def test_the_mean_over_timesteps_which_are_the_middles_of_equal_parts_is_the_loss(tmp_path: Path) -> None:
    found = run(tmp_path, make_batch(2))
    assert list(found.loss_per_timestep) == [166, 500, 833]
    assert found.loss == pytest.approx(sum(found.loss_per_timestep.values()) / 3)
