"""Each optimizer in the trainer's step, against a plain loop with its library's."""

from __future__ import annotations

import copy
import dataclasses
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from bucketline.files.run_marker import CHECKPOINTS
from bucketline.loader.latent_scale import LatentScale
from bucketline.train.checkpoint import copied, folder_of_step, load_optimizer, load_weights, write
from bucketline.train.compile import graphs_compiled
from bucketline.train.config import Objective, TrainConfig
from bucketline.train.ema import Average
from bucketline.train.models.load import load
from bucketline.train.models.weights import WholeModel
from bucketline.train.noise import NoiseSchedule, Prep
from bucketline.train.optim import NAMED, learning_rate_at, make_optimizer
from bucketline.train.parallel import repeated_blocks
from bucketline.train.step import Training, begin_step, loss_of, train_step
from tests.unit.train.outputs.test_checkpoint import state
from tests.unit.train.tiny_run import config, facts, make_batch, write_unet

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from bucketline.loader import Batch

STEPS = 4
DECAY = 0.1
# Torchao's steps take longest.
OTHERS = ("torch.optim:Adafactor", "torch.optim:NAdam")  # the second has a product over the steps in its state
EVERY = [pytest.param(name, marks=[pytest.mark.slow] * (name == "adamw-8bit")) for name in (*NAMED, *OTHERS)]


def make_training(folder: Path, name: str, **changes: Any) -> Training:
    asked = config(
        folder,
        **{
            "optimizer": name,
            "learning_rate": 1.0 if name == "prodigy" else 1e-4,
            "accumulation": 1,
            "clip_norm": None,
            "warmup_steps": 2,
            "weight_decay": DECAY,
            **changes,
        },
    )
    # Its largest weights have more than the 4096 values from which a moment has 8 bits.
    family, model = load(write_unet(folder, block_out_channels=[8, 32]), facts(), seed=0)
    optimizer = make_optimizer(asked, model, compiled=False)
    schedule = NoiseSchedule.from_alphas_cumprod(torch.linspace(0.999, 0.01, 1000), torch.device("cpu"))
    return Training(
        config=asked,
        family=family,
        model=model,
        optimizer=optimizer,
        average=Average(model, 0.9),
        prep=Prep(scale=LatentScale(scale=0.5, shift=0.25), schedule=schedule, objective=Objective.EPSILON),
        autocast=torch.autocast("cpu", torch.bfloat16, enabled=False),
    )


def batches(num: int = STEPS) -> list[Batch]:
    return [dataclasses.replace(make_batch(2, first=2 * step), step=step) for step in range(num)]


def groups(parameters: list[nn.Parameter]) -> list[dict[str, Any]]:
    return [{"params": parameters, "weight_decay": DECAY}]


def plain_adamw(model: nn.Module) -> list[Any]:
    return [torch.optim.AdamW(groups(list(model.parameters())), betas=(0.9, 0.999), fused=True)]


def plain_8bit(model: nn.Module) -> list[Any]:
    from torchao.optim import AdamW8bit

    return [AdamW8bit(groups(list(model.parameters())), betas=(0.9, 0.999))]


def plain_nadam(model: nn.Module) -> list[Any]:
    return [torch.optim.NAdam(groups(list(model.parameters())), betas=(0.8, 0.99), decoupled_weight_decay=True)]


def plain_muon(model: nn.Module) -> list[Any]:
    matrices = [one for block in repeated_blocks(model) for one in block.parameters() if one.ndim == 2]
    rest = [one for one in model.parameters() if not any(one is other for other in matrices)]
    return [
        torch.optim.Muon(matrices, weight_decay=DECAY, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(groups(rest), betas=(0.9, 0.999), fused=True),
    ]


def plain_prodigy(model: nn.Module) -> list[Any]:
    from prodigyopt import Prodigy

    own = groups(list(model.parameters()))
    return [Prodigy(own, use_bias_correction=True, safeguard_warmup=True, slice_p=11)]


PLAIN: dict[str, Callable[[nn.Module], list[Any]]] = {
    "adamw": plain_adamw,
    "adamw-8bit": plain_8bit,
    "muon": plain_muon,
    "prodigy": plain_prodigy,
    "torch.optim:NAdam": plain_nadam,
}


def by_the_library(training: Training, optimizers: list[Any], asked: TrainConfig) -> None:
    """Train as anybody would with the library."""
    for step, batch in enumerate(batches()):
        for group in (group for optimizer in optimizers for group in optimizer.param_groups):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(learning_rate_at(step, asked))
            else:
                group["lr"] = learning_rate_at(step, asked)
        loss_of(training, batch).backward()  # type: ignore[no-untyped-call]
        with torch.compiler.set_stance("force_eager"):  # torchao's would be compiled
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()


@pytest.mark.parametrize("name", PLAIN)
def test_a_run_is_that_of_a_plain_loop_with_the_librarys_optimizer(tmp_path: Path, name: str) -> None:
    arguments = ("betas=(0.8,0.99)", "decoupled_weight_decay=true") if name == "torch.optim:NAdam" else ()
    own, plain = (make_training(tmp_path, name, optimizer_arg=arguments) for _ in range(2))
    before = copy.deepcopy(own.model.state_dict())
    stream = iter(batches())
    for step in range(STEPS):
        train_step(own, stream, step)
    by_the_library(plain, PLAIN[name](plain.model), plain.config)
    for key, tensor in plain.model.state_dict().items():
        torch.testing.assert_close(own.model.state_dict()[key], tensor, rtol=1e-6, atol=1e-8)
    moved = [not torch.equal(before[key], tensor) for key, tensor in own.model.state_dict().items()]
    assert sum(moved) > 0.9 * len(moved)


@pytest.mark.parametrize("name", EVERY)
def test_a_gradient_that_is_not_finite_changes_neither_weights_nor_state(tmp_path: Path, name: str) -> None:
    plain, spoiled = (make_training(tmp_path, name) for _ in range(2))
    good = batches(3)
    bad = dataclasses.replace(good[1], columns={"target": torch.full_like(good[1].latents, float("inf"))})
    for step, batch in enumerate((good[0], bad, good[2])):
        outcome = train_step(spoiled, iter([batch]), step)
        assert bool(outcome.grad_norm.isfinite()) is (step != 1)
        if step != 1:
            train_step(plain, iter([batch]), step)
    for key, tensor in plain.model.state_dict().items():
        assert torch.equal(spoiled.model.state_dict()[key], tensor)


@pytest.mark.parametrize("name", EVERY)
def test_a_saved_state_goes_on_to_the_bit(tmp_path: Path, name: str) -> None:
    """By a checkpoint; channels_last, as on a GPU."""
    whole, resumed = (make_training(tmp_path, name) for _ in range(2))
    for training in (whole, resumed):
        training.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    stream = batches()
    for step in range(2):
        train_step(whole, iter([stream[step]]), step)
    weights, folder = WholeModel(folder="unet"), tmp_path / CHECKPOINTS / folder_of_step(2)
    copies = copied(weights, whole.model, Average(whole.model, 0.9), whole.optimizer)
    write(folder, weights, weights.config(whole.model), copies, state(2), card="", keep=1)
    load_weights(folder, weights, resumed.model)
    load_optimizer(folder, resumed.model, resumed.optimizer)
    for step in (2, 3):
        for training in (whole, resumed):
            train_step(training, iter([stream[step]]), step)
    for key, tensor in whole.model.state_dict().items():
        assert torch.equal(resumed.model.state_dict()[key], tensor)


def test_compiled_8_bit_steps_are_compiled_before_the_first_and_equal_the_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from bucketline.train.optimizers.adamw_8bit import make_8bit

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))  # traced as ever, by no C compiler
    found = []
    for compiled in (True, False):
        drawn = torch.Generator().manual_seed(0)
        weight = nn.Parameter(torch.randn(64, 64, generator=drawn))
        begun = graphs_compiled()
        optimizer = make_8bit(nn.Module(), groups([weight]), config(tmp_path, learning_rate=0.1), compiled=compiled)
        before = graphs_compiled()
        assert (before > begun) is compiled
        for step in range(3):
            begin_step(optimizer, step, 0.01 * step)
            weight.grad = torch.randn(64, 64, generator=drawn)
            optimizer.step()
        assert graphs_compiled() == before
        found.append(weight.detach())
    torch.testing.assert_close(found[0], found[1])
    torch.compiler.reset()
