"""The errors from quantising the frozen weights of a LoRA run, for each `--base`, before the first step."""

from __future__ import annotations

import itertools
import statistics
import sys
from dataclasses import dataclass, replace
from pathlib import Path  # noqa: TC003 - tyro reads it
from typing import TYPE_CHECKING

from bucketline.bench.harness import Case, Result, quartiles, run_case
from bucketline.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bucketline.loader import Batch
    from bucketline.train.config import Base, TrainConfig
    from bucketline.train.trainer import Trainer

NONE = "none"
UNITS = {"bytes of the frozen weights": "MB", "error of weights": "of norm", "error of predictions": "of norm", "loss": "loss"}


@dataclass(frozen=True, kw_only=True)
class BaseError(Case):
    """Measure what quantising a model's frozen weights changes, for each --base of `bucketline train --lora-rank`.

    Errors are the norm of the difference, relative to the norm without quantising: of the quantised weights, and of the model's
    predictions for a training batch at random timesteps. The figures are of `--repeats` batches; `of limit` compares bytes and
    loss with those without quantising.

    Example: python -m bucketline.bench train --base --store photos.store --model path/to/sdxl
    """

    store: Path | None = None
    """Store to take the batches from. Default: a made-up one."""
    model: Path | None = None
    """Model, as for `bucketline train`. Default: a small UNet at random."""
    model_config: str | None = None
    """As for `bucketline train`."""
    batch_size: int = 8
    """Samples in a batch."""
    seed: int = 1
    """Seed of the samples, their noise and timesteps, and of a model without weights."""

    def measure(self, folder: Path) -> list[Result]:
        from bucketline.bench.fixtures.trained_model import kept_model, kept_store
        from bucketline.train.config import Base, Compile, Ema, TrainConfig

        if (self.store is None) is not (self.model is None):
            raise UsageError("--store and --model are for each other, and one of them is missing: give both or neither")
        config = TrainConfig(
            store=(self.store or kept_store(folder, "tiny", self.batch_size),),
            model=self.model or kept_model(folder, "tiny"),
            model_config=self.model_config,
            output_dir=folder / "nothing is written",
            batch_size=self.batch_size,
            seed=self.seed,
            max_steps=self.repeats,
            lora_rank=1,  # its output is zero before the first step
            ema=Ema.OFF,
            compile=Compile.OFF,
        )
        plain = _trainer(config, None)
        batches = list(itertools.islice(plain.loader.forever(), self.repeats))
        figures = {NONE: _measured(plain, plain, batches)}
        for base in Base:
            quantised = _trainer(config, base)
            figures[base] = _measured(quantised, plain, batches)
            quantised.close()
        plain.close()
        return [
            result_of(f"{part}, {base}", unit, found[part], figures[NONE].get(part, (1.0,)))
            for part, unit in UNITS.items()
            for base, found in figures.items()
            if part in found
        ]


def result_of(subject: str, unit: str, values: Sequence[float], limit: Sequence[float]) -> Result:
    """Return the figures of a subject; an error is itself a ratio, and the limit of others are those without quantising."""
    return Result(
        case="train, base",
        subject=subject,
        unit=unit,
        median=statistics.median(values),
        q1=quartiles(values)[0],
        q3=quartiles(values)[1],
        repeats=len(values),
        limit_ratio=statistics.median(values) / statistics.median(limit),
    )


def _trainer(config: TrainConfig, base: Base | None) -> Trainer:
    from bucketline.train.outputs.checkpoint import Start
    from bucketline.train.parallel import TrainRanks
    from bucketline.train.setup import start_processes
    from bucketline.train.trainer import Trainer

    asked = replace(config, base=base)
    return Trainer(asked, TrainRanks(rank=0, world_size=1), start_processes(asked), Start(checkpoint=None, state=None))


def _measured(trainer: Trainer, plain: Trainer, batches: Sequence[Batch]) -> dict[str, list[float]]:
    """Return a trainer's figures by part, one for each batch; errors only if it is not the one without quantising."""
    import torch

    from bucketline.quantised_linear import QuantisedLinear
    from bucketline.train.step import loss_of

    model, before = trainer.training.model, plain.training.model
    held = [*model.buffers(), *(parameter for parameter in model.parameters() if not parameter.requires_grad)]
    found: dict[str, list[float]] = {"bytes of the frozen weights": [sum(tensor.nbytes for tensor in held) / 1e6], "loss": []}
    if trainer is not plain:
        difference, whole = 0.0, 0.0
        for place, layer in model.named_modules():
            if isinstance(layer, QuantisedLinear):
                weight = before.get_submodule(place).weight
                assert isinstance(weight, torch.Tensor)
                difference += float((layer.weight - weight).square().sum())
                whole += float(weight.square().sum())
        found |= {"error of weights": [(difference / whole) ** 0.5 if whole else 0.0], "error of predictions": []}
    for batch in batches:
        noised = plain.training.prep.for_training(batch)
        with torch.no_grad():
            found["loss"].append(float(loss_of(trainer.training, batch)))
            own, other = (
                one.training.predict(one.training.model, noised.noisy, noised.timesteps, noised.conditions(batch)).double()
                for one in (trainer, plain)
            )
        if trainer is not plain:
            found["error of predictions"].append(float((own - other).norm() / other.norm()))
    return found


def main() -> int:
    """Run the case."""
    return run_case(BaseError)


if __name__ == "__main__":
    sys.exit(main())
