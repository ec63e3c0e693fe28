"""The GPU memory of a run's choices, counted on tensors without memory by the functions that the trainer itself uses."""

from __future__ import annotations

import contextlib
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses import DynamicOutputShapeException, FakeTensorMode

from bucketline.errors import UsageError
from bucketline.families.family import Family, Padding, StoreFacts
from bucketline.families.registry import family_of_model
from bucketline.model_file import cast
from bucketline.train.compile import LengthsOnly, recompute
from bucketline.train.config import Base, Precision, TrainConfig, WeightDtype
from bucketline.train.lowbit.offload import frozen_bytes, offloaded
from bucketline.train.memory.activations import BatchSizes, StepBytes, latent_size, step_bytes, usual_sizes
from bucketline.train.memory.live import LiveBytes
from bucketline.train.models.lora import add_adapters
from bucketline.train.optim import NAMED, make_optimizer
from bucketline.train.parallel import repeated_blocks, separate_blocks
from bucketline.train.values import Ema, EmaPlace

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from torch import nn

    from bucketline.typed_json import Json

RANKS = 8
_NONE = Path("none")
EVERY_BLOCK = 99
_Options = dict[str, Any]
"""Options of a run that differ from the default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes on one device."""

    weights: int
    gradients: int
    moments: int
    average: int

    @property
    def total(self) -> int:
        """The bytes together."""
        return sum(astuple(self))


def choices(rank: int) -> tuple[_Options, ...]:
    """Return the rows of the table of what depends on no batch; `rank`: of the adapters."""
    adapters: _Options = {"lora_rank": rank}
    waiting: _Options = {"recompute": 1.0, "offload_blocks": EVERY_BLOCK}
    return (
        {},
        {"ema": Ema(decay=0.9999, place=EmaPlace.CPU)},
        *({"optimizer": name} for name in NAMED if name != "adamw"),
        {"weights": WeightDtype.BF16, "optimizer": "adamw-8bit", "ema": Ema()},
        {"sharding": "fsdp"},
        adapters,
        *({**adapters, "base": base} for base in (Base.INT8, Base.NF4)),
        {**adapters, **waiting},
        {**adapters, "base": Base.NF4, **waiting},
    )


def savings(rank: int) -> tuple[_Options, ...]:
    """Return the rows of the table of activations; `rank`: of the adapters."""
    recomputing: tuple[_Options, ...] = ({}, {"recompute": 0.5}, {"recompute": 1.0})
    return (*recomputing, {"lora_rank": rank}, {"lora_rank": rank, "recompute": 1.0})


def label(options: _Options) -> str:
    """Return options as a command line has them."""
    words = [
        f"--{name.replace('_', '-')}" + (f" {value:g}" if isinstance(value, float) else f" {value}")
        for name, value in options.items()
    ]
    return f"`{' '.join(words)}`" + f" on {RANKS} GPUs" * ("sharding" in options) if words else "all weights"


class CountedModel:
    """A model whose tensors have shapes and dtypes, but no memory; the trainer's functions run on them."""

    def __init__(self, config: Mapping[str, Json]) -> None:
        """`config`: as diffusers' class has it, with the class's name."""
        self._config = config
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._made: dict[tuple[Any, ...], tuple[Family, nn.Module]] = {}
        self._steps: dict[tuple[Any, ...], StepBytes] = {}
        self._optimizers: dict[tuple[Any, ...], tuple[int, int]] = {}

    def made(self, asked: TrainConfig) -> tuple[Family, nn.Module]:
        """Return the model as a run trains it, and its family; the same for runs that change nothing in it."""
        key = _what_is_made(asked)
        if key not in self._made:
            family, model = built(self._config, asked, torch.device("meta"))
            with self._fake:
                self._made[key] = family, model.to_empty(device="cpu")
        return self._made[key]

    def memory(self, options: _Options) -> Memory:
        """Return what a run with these options has on each device, whatever its batch."""
        return self.held(run_of(options))

    def held(self, asked: TrainConfig, ranks: int = RANKS) -> Memory:
        """Return what a run has on each device, whatever its batch; `ranks`: that share a model that is sharded."""
        _, model = self.made(asked)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        frozen = sum(parameter.nbytes for parameter in model.parameters() if not parameter.requires_grad)
        # two of the blocks that wait are there: the one that runs and the next
        frozen -= sum(sorted(map(frozen_bytes, offloaded(model, asked.offload_blocks or 0)))[:-2])
        share = ranks if asked.is_sharded(ranks) else 1
        held = frozen // share + sum(buffer.nbytes for buffer in model.buffers())
        weights = sum(parameter.nbytes for parameter in trained) // share
        moments = self._optimizer_bytes(asked)[0] // share
        is_averaged = asked.ema.decay is not None and asked.ema.place is not EmaPlace.CPU
        return Memory(weights=held + weights, gradients=weights, moments=moments, average=weights if is_averaged else 0)

    def need(self, asked: TrainConfig, sizes: BatchSizes, ranks: int = 1) -> int:
        """Return the most bytes that a run needs on each of `ranks` devices, for its tensors, with such a micro-batch.

        Raises:
            UsageError: if the sizes depend on values, which only a run has.
        """
        held, passing = self.held(asked, ranks), self._optimizer_bytes(asked)[1]
        counted, gathered, part = asked, 0, 1.0  # of the gradients that a step makes
        if asked.is_sharded(ranks):
            gathered, passing, part = _gathered_bytes(asked, self.made(asked)[1]), passing // ranks, 1 / ranks
            if asked.autocasts and asked.lora_rank is None:  # weights are gathered in the dtype of products, not copied to it
                counted = replace(asked, weights=WeightDtype.BF16, optimizer="adamw")
                part *= 1 if asked.weights is WeightDtype.BF16 else 2  # the shards of gradients are kept in 32 bits
        step = self.step(counted, sizes)
        if asked.accumulation > 1 or (ranks > 1 and not asked.is_sharded(ranks)):  # gradients are there throughout
            in_passes = held.gradients + step.most_without_gradients
        else:  # they come as activations go
            in_passes = int((1 - part) * step.most_without_gradients + part * step.most)
        return held.total - held.gradients + max(in_passes + gathered, held.gradients + passing)

    def activations(self, options: _Options) -> int:
        """Return the bytes that each image of a batch adds: all that the backward pass needs, but for the weights."""
        with self._counted(run_of(options)) as (family, model):
            passes = [step_bytes(model, family, usual_sizes(family, images), backward=False).kept for images in (1, 1, 2)]
        return passes[2] - passes[1]  # the first one keeps tables of positions

    def step(self, asked: TrainConfig, sizes: BatchSizes) -> StepBytes:
        """Return what a step takes in passing, on one device that has the whole model.

        Raises:
            UsageError: if the sizes depend on values, which only a run has.
        """
        key = *_what_is_made(asked), asked.recompute or 0.0, asked.autocasts, sizes
        if key not in self._steps:
            with self._counted(asked) as (family, model):
                self._steps[key] = step_bytes(model, family, sizes, autocasts=asked.autocasts)
        return self._steps[key]

    @contextlib.contextmanager
    def _counted(self, asked: TrainConfig) -> Iterator[tuple[Family, nn.Module]]:
        family, model = self.made(asked)
        model.disable_gradient_checkpointing()  # type: ignore[operator] # of another row
        recompute(model, asked, is_compiled=False)
        try:
            with self._without_memory():
                yield family, model
        except DynamicOutputShapeException as error:
            raise UsageError(
                f"the activations of a {family.model_class} cannot be counted without a run, since their sizes depend on "
                "values; train a few steps with the batch that you want, and read the peak in the run's metrics"
            ) from error

    def _optimizer_bytes(self, asked: TrainConfig) -> tuple[int, int]:
        """Return the bytes of the optimizer's state, and of what a step of it makes in passing."""
        key = *_what_is_made(asked), asked.optimizer
        if key not in self._optimizers:
            _, model = self.made(asked)
            with self._without_memory():
                self._optimizers[key] = _optimizer_bytes(asked, model)
        return self._optimizers[key]

    @contextlib.contextmanager
    def _without_memory(self) -> Iterator[None]:
        with self._fake, LengthsOnly():  # type: ignore[no-untyped-call]
            yield


def _what_is_made(asked: TrainConfig) -> tuple[Any, ...]:
    return asked.lora_rank, asked.lora_targets, asked.dora, asked.lora_dropout, asked.base, asked.weights, asked.precision


def run_of(options: _Options) -> TrainConfig:
    """Return the configuration of a run with these options, in bf16."""
    needed: _Options = {"store": ("none",), "model": _NONE, "output_dir": _NONE, "batch": "1", "max_steps": 1}
    return TrainConfig(**{**needed, "learning_rate": 1.0, "precision": Precision.BF16, **options})


def built(config: Mapping[str, Json], asked: TrainConfig, device: torch.device) -> tuple[Family, nn.Module]:
    """Return a configuration's model as a run trains it, at random, and its family."""
    import diffusers

    kind = str(config["_class_name"])
    with device:
        model: nn.Module = getattr(diffusers, kind).from_config(dict(config))
    family_class = family_of_model(config)
    assert family_class is not None, kind
    facts = StoreFacts(latent_channels=0, text={}, shows_padding=family_class.padding is not Padding.VALID)
    family = family_class(dict(model.config), facts)  # type: ignore[arg-type]
    family.prepare(model)
    if asked.weights is WeightDtype.BF16:
        cast(model, torch.bfloat16)
    if asked.lora_rank is not None:
        add_adapters(model, family, asked)
    if isinstance(asked.base, Base):
        from bucketline.train.lowbit.frozen_base import quantise_base

        quantise_base(model, asked.base, device)
    return family, model.train()


def _gathered_bytes(asked: TrainConfig, model: nn.Module) -> int:
    """Return the bytes of whole weights and gradients that a rank has at a time, whose model is sharded.

    Weights: of what belongs to no block, and of two blocks, the one that runs and the next. Gradients: of one block in the
    dtype of products, and in 32 bits of the one before it, which ranks reduce meanwhile.
    """
    item_bytes = 2 if asked.autocasts else 4
    blocks = [[*block.parameters()] for block in separate_blocks(model)]
    inside = {id(one) for block in blocks for one in block}
    outside = sum(one.numel() for one in model.parameters() if id(one) not in inside)
    weights = sorted(sum(one.numel() for one in block) for block in blocks)
    reduced = max((sum(one.numel() for one in block if one.requires_grad) for block in blocks), default=0)
    gathered = weights if asked.keep_gathered else weights[-2:]
    return item_bytes * (outside + sum(gathered)) + (item_bytes + 4) * reduced


def _optimizer_bytes(asked: TrainConfig, model: nn.Module) -> tuple[int, int]:
    """Return the bytes of the optimizer's state after a step, and of what the next step makes in passing.

    One weight of a shape stands for all of them, but where an optimizer steps on many weights together.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    inside = {id(parameter) for block in repeated_blocks(model) for parameter in block.parameters()}
    alike: dict[tuple[torch.Size, bool], list[nn.Parameter]] = {}
    for parameter in trained:
        parameter.requires_grad = False
        alike.setdefault((parameter.shape, id(parameter) in inside), []).append(parameter)
    number = {id(first): 1 + len(others) for first, *others in alike.values()}
    is_together = asked.weights is WeightDtype.BF16
    stepping = trained if is_together else [first for first, *_ in alike.values()]
    for one in stepping:
        one.requires_grad = True
        one.grad = torch.zeros_like(one)
    optimizer = make_optimizer(asked, model, compiled=False)
    optimizer.step()
    stepped = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    total = 0
    for place, entry in optimizer.state_dict()["state"].items():
        count = 1 if is_together else number[id(stepped[place])]
        total += count * sum(value.nbytes for value in entry.values() if isinstance(value, torch.Tensor))
    with LiveBytes() as live:
        optimizer.step()
    for parameter in trained:
        parameter.requires_grad, parameter.grad = True, None
    return total, live.most


def as_tables(configs: Mapping[str, Mapping[str, Json]], rank: int) -> str:
    """Return both tables in Markdown: a row for each choice, a column for each model, in GB of 10^9 bytes."""
    models = {name: CountedModel(config) for name, config in configs.items()}
    plain = [model.made(run_of({}))[1] for model in models.values()]
    sizes = [sum(parameter.numel() for parameter in model.parameters()) / 1e9 for model in plain]
    images = [f"{8 * latent_size(model.made(run_of({}))[0])} px" for model in models.values()]
    fixed = [(label(row), [in_gb(model.memory(row).total) for model in models.values()]) for row in choices(rank)]
    moving = [(label(row), [in_gb(model.activations(row)) for model in models.values()]) for row in savings(rank)]
    return "\n\n".join(
        (
            table_of(
                "GB without activations",
                models,
                [("10^9 weights", [f"{size:.2{'f' if size >= 0.1 else 'g'}}" for size in sizes]), *fixed],
            ),
            table_of("GB of activations an image", models, [("image", images), *moving]),
        )
    )


def in_gb(num_bytes: int) -> str:
    """Return bytes in GB of 10^9: with a decimal, small numbers with two digits.

    >>> in_gb(2_345_000_000), in_gb(48_200_000), in_gb(0)
    ('2.3', '0.048', '0')
    """
    return f"{num_bytes / 1e9:.1f}" if num_bytes >= 10**8 else f"{num_bytes / 1e9:.2g}"


def table_of(title: str, columns: Iterable[str], rows: Iterable[tuple[str, Sequence[str]]]) -> str:
    """Return a table in Markdown; a row is its name and a cell for each column."""
    names = list(columns)
    lines = [f"| {title} | " + " | ".join(names) + " |", "|---|" + "---:|" * len(names)]
    return "\n".join((*lines, *(f"| {name} | " + " | ".join(cells) + " |" for name, cells in rows)))
