"""`bucketline train base-error`: what a quantised base changes."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import tyro

from bucketline.command_line import human_bytes, print_json

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bucketline.loader import Batch
    from bucketline.train.config import Base, TrainConfig
    from bucketline.train.trainer import Trainer


@dataclass(frozen=True, kw_only=True)
class BaseError:
    """Measure what quantising a model's frozen weights changes, for each --base of a LoRA run, before the first step.

    Both errors are the norm of the difference, relative to the norm without quantising: of the quantised weights, and of the
    model's predictions for one training batch of the store, at random timesteps. Nothing is written.

    Example: bucketline train base-error --store photos.store --model path/to/sdxl
    """

    store: Path
    """Store to take the batch from."""
    model: Path
    """Model, as for `bucketline train`."""
    model_config: str | None = None
    """As for `bucketline train`."""
    batch_size: int = 8
    """Samples in the batch."""
    seed: int = 0
    """Seed of the samples, their noise and timesteps, and of a model without weights."""
    json: bool = False
    """Print one JSON object."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The findings for one base."""

    base: str
    num_bytes: int  # of the frozen weights, quantised or not
    weight_error: float
    prediction_error: float
    loss: float


def main(args: Sequence[str], prog: str) -> int:
    """Parse the command line, measure, and print a line for each base."""
    asked = tyro.cli(BaseError, args=list(args), prog=prog, config=(tyro.conf.FlagCreatePairsOff,))
    from bucketline.extras import extra_named

    with extra_named("train"):
        found = measure(asked)
    if asked.json:
        print_json({"bases": [asdict(one) for one in found]})
        return 0
    print(f"{'base':<6}{'weights':>12}{'error of weights':>20}{'of predictions':>18}{'loss':>10}")
    for one in found:
        print(
            f"{one.base:<6}{human_bytes(one.num_bytes):>12}{one.weight_error:>20.2%}{one.prediction_error:>18.2%}"
            f"{one.loss:>10.4f}"
        )
    return 0


def measure(asked: BaseError) -> list[Measured]:
    """Return what the model is without quantising, then with each base.

    Raises:
        BucketlineError: if model and store do not match, or cannot be read.
    """
    from bucketline.train.config import Base, Compile, Ema, TrainConfig

    config = TrainConfig(
        store=(asked.store,),
        model=asked.model,
        model_config=asked.model_config,
        output_dir=asked.model / "nothing is written",
        batch_size=asked.batch_size,
        seed=asked.seed,
        max_steps=1,
        lora_rank=1,  # its output is zero before the first step
        ema=Ema.OFF,
        compile=Compile.OFF,
    )
    plain = _trainer(config, None)
    batch = next(iter(plain.loader))
    found = [_measured(plain, plain, batch, "none")]
    for base in Base:
        quantised = _trainer(config, base)
        found.append(_measured(quantised, plain, batch, base))
        quantised.close()
    plain.close()
    return found


def _trainer(config: TrainConfig, base: Base | None) -> Trainer:
    from bucketline.train.outputs.checkpoint import Start
    from bucketline.train.parallel import TrainRanks
    from bucketline.train.setup import start_processes
    from bucketline.train.trainer import Trainer

    asked = replace(config, base=base)
    return Trainer(asked, TrainRanks(rank=0, world_size=1), start_processes(asked), Start(checkpoint=None, state=None))


def _measured(trainer: Trainer, plain: Trainer, batch: Batch, name: str) -> Measured:
    import torch

    from bucketline.train.memory.frozen_base import QuantisedLinear
    from bucketline.train.step import loss_of

    model, before = trainer.training.model, plain.training.model
    difference, whole = 0.0, 0.0
    for place, layer in model.named_modules():
        if isinstance(layer, QuantisedLinear):
            weight = before.get_submodule(place).weight
            assert isinstance(weight, torch.Tensor)
            difference += float((layer.weight - weight.detach()).square().sum())
            whole += float(weight.detach().square().sum())
    noised = plain.training.prep.for_training(batch)
    with torch.no_grad():
        predictions = [
            one.training.predict(one.training.model, noised.noisy, noised.timesteps, noised.conditions(batch)).double()
            for one in (trainer, plain)
        ]
        loss = float(loss_of(trainer.training, batch))
    held = [*model.buffers(), *(parameter for parameter in model.parameters() if not parameter.requires_grad)]
    return Measured(
        base=name,
        num_bytes=sum(tensor.numel() * tensor.element_size() for tensor in held),
        weight_error=(difference / whole) ** 0.5 if whole else 0.0,
        prediction_error=float((predictions[0] - predictions[1]).norm() / predictions[1].norm()),
        loss=loss,
    )
