"""Each optimizer in the trainer's step: against its library's, resumed, and refused together with what it excludes."""

from __future__ import annotations

import copy
import dataclasses
import json
import re
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from diffusers import optimization
from safetensors.torch import load_file
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import get_wsd_schedule

from bucketline.errors import MissingExtraError, UsageError
from bucketline.extensions import extra_named
from bucketline.train import step as of_step
from bucketline.train.config import EmaPlace, Precision, WeightDtype
from bucketline.train.log import graphs_compiled
from bucketline.train.optim import (
    NAMED,
    Average,
    decay_at,
    find_optimizer,
    learning_rate_at,
    make_optimizer,
    refuse_combinations,
    rounded,
)
from bucketline.train.optimizers import make_8bit
from bucketline.train.parallel import repeated_blocks
from bucketline.train.step import Training, loss_of, train_step, update
from tests.commands import ROOT
from tests.unit.train.outputs.test_checkpoint import MOMENTS
from tests.unit.train.tiny_run import config, facts, load, make_batch, make_training, train_in_two_parts, write_unet

if TYPE_CHECKING:
    from collections.abc import Callable

    from bucketline.loader import Batch
    from bucketline.train.config import TrainConfig


STEPS = 4
DECAY = 0.1
NADAM = "torch.optim:NAdam"  # it has a product over the steps in its state
BF16: dict[str, Any] = {"weights": WeightDtype.BF16, "precision": Precision.BF16}


def training_by(folder: Path, name: str, **changes: Any) -> Training:
    asked = {"optimizer": name, "learning_rate": 1.0 if name == "prodigy" else 1e-4, "weight_decay": DECAY, **changes}
    # Its largest weights have more than the 4096 values from which a moment has 8 bits.
    loaded = load(write_unet(folder, block_out_channels=[8, 32]), facts(), seed=0)
    return make_training(
        folder,
        loaded=loaded,
        optimizer_of=partial(make_optimizer, config(folder, **asked), compiled=False),
        clip_norm=None,
        warmup_steps=2,
        **asked,
    )


def batches(num: int = STEPS) -> list[Batch]:
    return [dataclasses.replace(make_batch(2, first=2 * step), step=step) for step in range(num)]


def groups(parameters: list[nn.Parameter]) -> list[dict[str, Any]]:
    return [{"params": parameters, "weight_decay": DECAY}]


def plain_8bit(model: nn.Module) -> list[Any]:
    from torchao.optim import AdamW8bit

    return [AdamW8bit(groups(list(model.parameters())), betas=(0.9, 0.999))]


def plain_muon(model: nn.Module) -> list[Any]:
    matrices = [one for block in repeated_blocks(model) for one in block.parameters() if one.ndim == 2]
    rest = [one for one in model.parameters() if not any(one is other for other in matrices)]
    return [
        torch.optim.Muon(matrices, weight_decay=DECAY, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(groups(rest), betas=(0.9, 0.999), fused=True),
    ]


def plain_prodigy(model: nn.Module) -> list[Any]:
    from prodigyopt import Prodigy

    return [Prodigy(groups(list(model.parameters())), use_bias_correction=True, safeguard_warmup=True, slice_p=11)]


PLAIN: dict[str, Callable[[nn.Module], list[Any]]] = {
    "adamw": lambda model: [torch.optim.AdamW(groups(list(model.parameters())), betas=(0.9, 0.999), fused=True)],
    "adamw-8bit": plain_8bit,
    "muon": plain_muon,
    "prodigy": plain_prodigy,
    NADAM: lambda model: [torch.optim.NAdam(groups(list(model.parameters())), betas=(0.8, 0.99), decoupled_weight_decay=True)],
}


@pytest.mark.parametrize("name", PLAIN)
def test_a_run_is_that_of_a_plain_loop_with_the_librarys_optimizer(tmp_path: Path, name: str) -> None:
    arguments = ("betas=(0.8,0.99)", "decoupled_weight_decay=true") if name == NADAM else ()
    own, plain = (training_by(tmp_path, name, optimizer_arg=arguments) for _ in range(2))
    before = copy.deepcopy(own.model.state_dict())
    optimizers = PLAIN[name](plain.model)
    for step, batch in enumerate(batches()):
        train_step(own, iter([batch]), step)
        for group in (group for optimizer in optimizers for group in optimizer.param_groups):
            rate = learning_rate_at(step, plain.config)
            group["lr"] = group["lr"].fill_(rate) if isinstance(group["lr"], torch.Tensor) else rate
        loss_of(plain, batch).backward()  # type: ignore[no-untyped-call]
        with torch.compiler.set_stance("force_eager"):  # torchao's would be compiled
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    for key, tensor in plain.model.state_dict().items():
        torch.testing.assert_close(own.model.state_dict()[key], tensor, rtol=1e-6, atol=1e-8)
    moved = [not torch.equal(before[key], tensor) for key, tensor in own.model.state_dict().items()]
    assert sum(moved) > 0.9 * len(moved)


@pytest.mark.parametrize("name", PLAIN)
def test_a_gradient_that_is_not_finite_changes_neither_weights_nor_state(tmp_path: Path, name: str) -> None:
    plain, spoiled = (training_by(tmp_path, name) for _ in range(2))
    good = batches(3)
    bad = dataclasses.replace(good[1], columns={"target": torch.full_like(good[1].latents, float("inf"))})
    for step, batch in enumerate((good[0], bad, good[2])):
        outcome = train_step(spoiled, iter([batch]), step)
        assert bool(outcome.grad_norm.isfinite()) is (step != 1)
        if step != 1:
            train_step(plain, iter([batch]), step)
    for key, tensor in plain.model.state_dict().items():
        assert torch.equal(spoiled.model.state_dict()[key], tensor)


def test_the_rate_of_prodigy_that_is_told_is_the_one_that_its_step_took(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step ends with the rate of the next one."""
    training = training_by(tmp_path, "prodigy")
    (group,) = training.optimizer.param_groups
    group["d"] = 1.0
    monkeypatch.setattr(training.optimizer, "step", lambda: group.update(d=2 * group["d"]))
    told = [train_step(training, iter([batch]), step).learning_rate for step, batch in enumerate(batches())]
    assert told == [2**step * learning_rate_at(step, training.config) for step in range(STEPS)]


def test_compiled_8_bit_steps_are_compiled_before_the_first_and_equal_the_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))  # traced as ever, by no C compiler
    found = []
    for compiled in (True, False):
        drawn = torch.Generator().manual_seed(0)
        weight = nn.Parameter(torch.randn(64, 64, generator=drawn))
        begun = graphs_compiled()
        optimizer = make_8bit(groups([weight]), config(tmp_path, learning_rate=0.1), compiled=compiled)
        before = graphs_compiled()
        assert (before > begun) is compiled
        for _ in range(3):
            weight.grad = torch.randn(64, 64, generator=drawn)
            optimizer.step()
        assert graphs_compiled() == before
        found.append(weight.detach())
    torch.testing.assert_close(found[0], found[1])
    torch.compiler.reset()


def test_a_step_that_clips_is_one_whose_gradients_were_clipped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """On a GPU the fused step does; the CPU's takes the same factor."""

    def stepped(scale: float, *, in_step: bool) -> torch.Tensor:
        """Return weights after two steps by gradients of that scale, clipped by the step or before it."""
        draws = torch.Generator().manual_seed(0)
        model = nn.ParameterList([torch.randn(8, 8, generator=draws)])
        (weight,) = model.parameters()
        optimizer = make_optimizer(config(tmp_path, learning_rate=1e-2), model, compiled=False)
        for _ in range(2):
            weight.grad = scale * torch.randn(8, 8, generator=draws)
            update(optimizer, [weight], 1.0)
            assert (getattr(optimizer, "grad_scale", None) is not None) == in_step
        return weight.detach()

    scales = (1e-3, 10.0, float("inf"))  # not clipped, clipped, skipped
    expected = [stepped(scale, in_step=False) for scale in scales]
    monkeypatch.setattr(of_step, "is_whole_on_gpu", lambda _: True)
    found = [stepped(scale, in_step=True) for scale in scales]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    assert torch.equal(found[0], expected[0])
    assert not torch.equal(found[1], found[2])


# The documented bytes a weight.

ROW = re.compile(r"^\| `([a-z][a-z0-9-]*)`[^|]*\|[^|]*\| ([0-9.]+) \| ([0-9.]+) \| ([0-9.]+) \| ([0-9.]+|—) \|", re.MULTILINE)
TABLE = {name: values for name, *values in ROW.findall((ROOT / "docs" / "optimizers.md").read_text(encoding="utf-8"))}


class MatrixBlock(nn.Linear):
    """A block of a transformer, by its name."""


def bytes_of(folder: Path, name: str, weights: nn.Module, dtype: WeightDtype = WeightDtype.FP32) -> tuple[str, str]:
    model = nn.Sequential(weights.to(torch.bfloat16 if dtype is WeightDtype.BF16 else torch.float32))
    optimizer = make_optimizer(config(folder, optimizer=name, weights=dtype), model, compiled=False)
    (parameter,) = model.parameters()
    parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    tensors = [value for value in optimizer.state_dict()["state"][0].values() if isinstance(value, torch.Tensor)]
    state = sum(tensor.nbytes for tensor in tensors) / parameter.numel()
    return f"{state:.1f}", f"{state + 2 * parameter.element_size():.1f}"


@pytest.mark.parametrize("name", NAMED)
def test_the_bytes_in_the_table_are_those_of_the_tensors(tmp_path: Path, name: str) -> None:
    assert set(TABLE) == set(NAMED)
    matrix, convolution = MatrixBlock(512, 512, bias=False), nn.Conv2d(128, 128, 3, bias=False)
    state, together = bytes_of(tmp_path, name, matrix)
    rounded = bytes_of(tmp_path, name, matrix, WeightDtype.BF16)[1] if name == "adamw-8bit" else "—"
    assert TABLE[name] == [state, bytes_of(tmp_path, name, convolution)[0], together, rounded]


# Runs.


@pytest.mark.parametrize(
    "chosen",
    [
        pytest.param({"optimizer": "muon"}, id="muon"),
        pytest.param({"optimizer": "prodigy", "lora_rank": 4}, id="prodigy lora"),
        pytest.param({"optimizer": "adamw-8bit", **BF16, "ema": "0.9999:cpu:2"}, id="8bit bf16"),
        *(
            pytest.param(one, marks=pytest.mark.slow)
            for one in (
                *({"optimizer": name} for name in ("adamw-8bit", "prodigy", NADAM, "torch.optim:Adafactor")),
                {"optimizer": "muon", "lora_rank": 4},
                {"optimizer": "adamw-8bit", **BF16, "clip_norm": None},
            )
        ),
    ],
)
def test_a_run_in_two_parts_equals_one_to_the_bit(folder: Path, chosen: dict[str, Any]) -> None:
    write_unet(folder / "model", block_out_channels=[8, 32])  # moments of 8 bits are for weights of 4096 values
    more = {"accumulation": 1, "num_images": 1, "validate_every": 2, "learning_rate": None, "warmup_steps": 2, **chosen}
    whole = config(folder, output_dir=folder / "whole", max_steps=4, **more)
    parts = train_in_two_parts(whole, 2)
    last = "checkpoints/step-00000004"
    part = "lora" if "lora_rank" in chosen else "unet"
    files = [one for end in ("", "_ema") for one in (whole.output_dir / last / (part + end)).glob("[dp]*.safetensors")]
    assert len(files) == 2
    found = [load_file(file) for file in (*files, whole.output_dir / last / MOMENTS)]
    resumed = [load_file(parts / file.relative_to(whole.output_dir)) for file in (*files, whole.output_dir / last / MOMENTS)]
    for own, other in zip(found, resumed, strict=True):
        assert own.keys() == other.keys()
        assert all(torch.equal(tensor, other[name]) for name, tensor in own.items())
    last_weights, average, moments = found
    assert chosen["optimizer"] != "adamw-8bit" or any(name.endswith("exp_avg.codes") for name in moments)
    assert any(not torch.equal(tensor, average[name]) for name, tensor in last_weights.items())
    numbers = [json.loads((run / last / "state.json").read_bytes())["optimizer"] for run in (whole.output_dir, parts)]
    assert numbers[0] == numbers[1]


@pytest.mark.parametrize(
    ("chosen", "world_size", "message"),
    [
        ({"optimizer": "prodigy", "betas": "0.9,0.99"}, 1, "--betas is 0.9,0.99: choose adamw or adamw-8bit"),
        ({"optimizer": "muon", **BF16}, 1, "leave out --weights bf16, or choose adamw-8bit"),
        (BF16, 1, "--optimizer is adamw, .* choose adamw-8bit"),
        (
            {"optimizer": "adamw-8bit", **BF16, "precision": Precision.FP32},
            1,
            r"is fp32 \(also by auto, .*\): give --precision bf16 as well",
        ),
        ({"optimizer": "adamw-8bit", **BF16, "lora_rank": 4}, 1, "--weights is bf16 with --lora-rank 4"),
        ({"optimizer": "adamw-8bit", "sharding": "fsdp"}, 2, "give --sharding ddp, or choose adamw or muon"),
        ({"optimizer": "lion"}, 1, "--optimizer is lion, expected adamw, adamw-8bit, muon, prodigy, or any other"),
        ({"optimizer": "muon", "optimizer_arg": ("momentum=0.9",)}, 1, "muon, and --optimizer-arg is momentum=0.9"),
        ({"optimizer": NADAM, "optimizer_arg": ("eps",)}, 1, "--optimizer-arg is 'eps', expected NAME=VALUE"),
        ({"optimizer": NADAM, "optimizer_arg": ("lr=1",)}, 1, "--optimizer-arg is 'lr=1'; use --learning-rate"),
        ({"optimizer": NADAM, **BF16}, 1, "leave out --weights bf16"),
        ({"optimizer": NADAM, "sharding": "fsdp"}, 2, "give --sharding ddp"),
    ],
)
def test_what_an_optimizer_excludes_is_refused_by_name(
    tmp_path: Path, chosen: dict[str, Any], world_size: int, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        refuse_combinations(config(tmp_path, **{"accumulation": 1, **chosen}), world_size)


class TwoWeights(torch.optim.SGD):
    """As a schedule-free optimizer is."""

    def eval(self) -> None:
        """Exchange the weights."""


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("no_such_package:Lion", (), "cannot be imported: No module named 'no_such_package'. Install"),
        ("torch.optim:Lion", (), "cannot be imported: .*no attribute 'Lion'"),
        ("torch.nn:Linear", (), r"is not a torch\.optim\.Optimizer"),
        (f"{__name__}:TwoWeights", (), "has other weights for evaluation"),
        (NADAM, ("speed=9",), "does not take lr speed=9: .* Fix --optimizer-arg"),
        (NADAM, ("eps=-1",), "does not take lr eps=-1: .* Fix --optimizer-arg"),
    ],
)
def test_another_optimizer_that_cannot_be_used_is_refused(
    tmp_path: Path, name: str, arguments: tuple[str, ...], message: str
) -> None:
    asked = config(tmp_path, optimizer=name, optimizer_arg=arguments)
    refuse_combinations(asked, 1)
    with pytest.raises(UsageError, match=message):
        make_optimizer(asked, nn.Linear(2, 2), compiled=False)


@pytest.mark.parametrize(
    ("name", "library", "extra"), [("adamw-8bit", "torchao.optim", "quantised"), ("prodigy", "prodigyopt", "optimizers")]
)
def test_a_missing_library_is_told_with_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, library: str, extra: str
) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(MissingExtraError, match=rf"pip install 'bucketline\[{extra}\]'"), extra_named("train"):
        find_optimizer(config(tmp_path, optimizer=name))


# The learning rate of each step, held against the schedules of a plain library.


RATED_STEPS, WARM = 20, 4
FALLING = ("cosine", "linear", "wsd:3")


def asked(folder: Path, **changes: Any) -> TrainConfig:
    return config(folder, **{"max_steps": RATED_STEPS, "warmup_steps": WARM, "learning_rate": 1.0, **changes})


def library(schedule: Any, **named: Any) -> list[float]:
    """Return the rates of a library's schedule, without the first of its warm-up, which is 0."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    made = schedule(optimizer=optimizer, **named)
    rates = []
    for _ in range(RATED_STEPS + 1):
        rates.append(made.get_last_lr()[0])
        optimizer.step()
        made.step()
    return [*rates[1 : WARM + 1], *rates[WARM:RATED_STEPS]]


def test_the_learning_rate_warms_up_and_never_asks_how_long_the_run_is(tmp_path: Path) -> None:
    short, long = (config(tmp_path, max_steps=steps, warmup_steps=4, learning_rate=1.0) for steps in (5, 500))
    rates = [learning_rate_at(step, short) for step in range(6)]
    assert rates == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert rates == [learning_rate_at(step, long) for step in range(6)]


@pytest.mark.parametrize(
    ("schedule", "theirs"),
    [
        ("cosine", partial(optimization.get_scheduler, "cosine")),
        ("linear", partial(optimization.get_scheduler, "linear")),
    ],
)
def test_a_schedule_is_the_librarys(tmp_path: Path, schedule: str, theirs: Any) -> None:
    own = [learning_rate_at(step, asked(tmp_path, lr_schedule=schedule)) for step in range(RATED_STEPS)]
    assert own == pytest.approx(library(theirs, num_warmup_steps=WARM, num_training_steps=RATED_STEPS), abs=1e-12)


def test_wsd_is_the_librarys(tmp_path: Path) -> None:
    own = [learning_rate_at(step, asked(tmp_path, lr_schedule="wsd:6")) for step in range(RATED_STEPS)]
    theirs = library(
        get_wsd_schedule, num_warmup_steps=WARM, num_decay_steps=6, num_stable_steps=RATED_STEPS - WARM - 6, decay_type="linear"
    )
    assert own == pytest.approx(theirs, abs=1e-12)
    fifth = [learning_rate_at(step, asked(tmp_path, lr_schedule="wsd")) for step in range(RATED_STEPS)]
    assert fifth[WARM - 1 : RATED_STEPS - 4] == [1.0] * (RATED_STEPS - WARM - 3)
    assert fifth[RATED_STEPS - 4 :] == pytest.approx([1.0, 0.75, 0.5, 0.25])


@pytest.mark.parametrize("warm", [0, 1, WARM, RATED_STEPS - 1, RATED_STEPS, 2 * RATED_STEPS])
@pytest.mark.parametrize("schedule", ["constant", "cosine", "linear", "wsd"])
def test_every_step_of_a_run_has_a_rate_above_0(tmp_path: Path, schedule: str, warm: int) -> None:
    """A step at rate 0 costs as much as any other and changes nothing: not the first of a warm-up, nor a schedule's last."""
    for steps in (1, 2, RATED_STEPS):
        run = asked(tmp_path, lr_schedule=schedule, max_steps=steps, warmup_steps=warm)
        assert min(learning_rate_at(step, run) for step in range(steps)) > 0


@pytest.mark.parametrize("schedule", FALLING)
def test_steps_after_a_schedule_that_ends_at_0_are_refused(tmp_path: Path, schedule: str) -> None:
    message = f"the learning rate is 0 from step 20 on: these steps would change nothing; give --lr-schedule {schedule}@21, or"
    with pytest.raises(UsageError, match=message):
        asked(tmp_path, lr_schedule=f"{schedule}@{RATED_STEPS}", max_steps=RATED_STEPS + 1)
    asked(tmp_path, lr_schedule=f"{schedule}:0.1@{RATED_STEPS}", max_steps=RATED_STEPS + 1)


@pytest.mark.parametrize("schedule", FALLING)
def test_the_horizon_decides_and_not_how_long_the_run_is(tmp_path: Path, schedule: str) -> None:
    short = asked(tmp_path, lr_schedule=f"{schedule}:0.1@{RATED_STEPS}", max_steps=5)
    long = replace(short, max_steps=500)
    rates = [learning_rate_at(step, long) for step in range(2 * RATED_STEPS)]
    assert rates == [learning_rate_at(step, short) for step in range(2 * RATED_STEPS)]
    assert rates[RATED_STEPS:] == pytest.approx([0.1] * RATED_STEPS)
    assert min(rates[:RATED_STEPS]) > 0.1
    assert min(rates[WARM:]) == pytest.approx(0.1)


# The average of the weights.


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
