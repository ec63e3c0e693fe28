"""The GPU memory of a run's choices, counted on tensors without memory by the functions that the trainer itself uses."""

from __future__ import annotations

import contextlib
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses import DynamicOutputShapeException, FakeTensor, FakeTensorMode
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bucketline.errors import UsageError
from bucketline.families.family import Family, Padding, StoreFacts
from bucketline.families.registry import family_of_model
from bucketline.train.config import Base, Ema, Precision, Sharding, TrainConfig, WeightDtype
from bucketline.train.lowbit.offload import frozen_bytes, offloaded
from bucketline.train.memory.activations import kept_activations, latent_size
from bucketline.train.models.lora import add_adapters
from bucketline.train.optim import OPTIMIZERS, kind_of, make_optimizer
from bucketline.train.parallel import repeated_blocks
from bucketline.train.recompute import recompute

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
        {"ema": Ema.CPU},
        *({"optimizer": name} for name in OPTIMIZERS if name != "adamw"),
        {"weights": WeightDtype.BF16, "optimizer": "adamw-8bit", "ema": Ema.OFF},
        {"sharding": Sharding.FSDP},
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


class _Values(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Compute integers and masks that depend on no tensor without memory, so that the lengths in them can be read.

    Each number of a tensor without memory is read as 1.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401 - torch's
        given = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
        if any(isinstance(one, FakeTensor) or one.is_meta for one in given):
            return 1.0 if func is torch.ops.aten._local_scalar_dense.default else func(*args, **(kwargs or {}))
        if not given:
            found = func(*args, **(kwargs or {}))
            if not isinstance(found, torch.Tensor) or found.is_floating_point() or found.is_complex():
                return found
        with unset_fake_temporarily():
            return func(*args, **(kwargs or {}))


class CountedModel:
    """A model whose tensors have shapes and dtypes, but no memory; the trainer's functions run on them."""

    def __init__(self, config: Mapping[str, Json]) -> None:
        """`config`: as diffusers' class has it, with the class's name."""
        self._config = config
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._made: dict[tuple[Any, ...], tuple[Family, nn.Module]] = {}

    def made(self, asked: TrainConfig) -> tuple[Family, nn.Module]:
        """Return the model as a run trains it, and its family; the same for runs that change nothing in it."""
        key = asked.lora_rank, asked.base, asked.weights
        if key not in self._made:
            family, model = built(self._config, asked, torch.device("meta"))
            with self._fake:
                self._made[key] = family, model.to_empty(device="cpu")
        return self._made[key]

    def memory(self, options: _Options) -> Memory:
        """Return what a run with these options has on each device, whatever its batch."""
        asked = run_of(options)
        _, model = self.made(asked)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        own = {id(parameter) for parameter in trained}
        held = sum(one.nbytes for one in (*model.parameters(), *model.buffers()) if id(one) not in own)
        # two of the blocks that wait are there: the one that runs and the next
        held -= sum(sorted(map(frozen_bytes, offloaded(model, asked.offload_blocks)))[:-2])
        share = RANKS if asked.sharding is Sharding.FSDP else 1
        weights = sum(parameter.nbytes for parameter in trained) // share
        with self._without_memory():
            moments = _moments(asked, model, trained) // share
        is_averaged = asked.ema is Ema.DEVICE and kind_of(asked).average is None
        return Memory(weights=held + weights, gradients=weights, moments=moments, average=weights if is_averaged else 0)

    def activations(self, options: _Options) -> int:
        """Return the bytes that each image of a batch adds: all that the backward pass needs, but for the weights."""
        return self.kept(options, 2) - self.kept(options, 1)

    def kept(self, options: _Options, images: int, size: int | None = None) -> int:
        """Return the bytes that a forward pass over so many images keeps: activations, and weights in the dtype of products.

        `size`: of the square latents; None: the model's own.

        Raises:
            UsageError: if the sizes depend on values, which only a run has.
        """
        asked = run_of(options)
        family, model = self.made(asked)
        model.disable_gradient_checkpointing()  # type: ignore[operator] # of another row
        recompute(model, asked, is_compiled=False)
        try:
            with self._without_memory():
                return kept_activations(model, family, images, size)
        except DynamicOutputShapeException as error:
            raise UsageError(
                f"the activations of a {family.model_class} cannot be counted without a run, since their sizes depend on "
                "values; train a few steps with the batch that you want, and read the peak in the run's metrics"
            ) from error

    @contextlib.contextmanager
    def _without_memory(self) -> Iterator[None]:
        with self._fake, _Values():  # type: ignore[no-untyped-call]
            yield


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
        torch.nn.Module.to(model, dtype=torch.bfloat16)
    if asked.lora_rank is not None:
        add_adapters(model, family, asked)
    if asked.base is not None:
        from bucketline.train.lowbit.frozen_base import quantise_base

        quantise_base(model, asked.base, device)
    return family, model.train()


def _moments(asked: TrainConfig, model: nn.Module, trained: Sequence[nn.Parameter]) -> int:
    """Return the bytes of the optimizer's state after a step, in which one weight of a shape stands for all of them."""
    inside = {id(parameter) for block in repeated_blocks(model) for parameter in block.parameters()}
    alike: dict[tuple[torch.Size, bool], list[nn.Parameter]] = {}
    for parameter in trained:
        parameter.requires_grad = False
        alike.setdefault((parameter.shape, id(parameter) in inside), []).append(parameter)
    number = {id(first): 1 + len(others) for first, *others in alike.values()}
    for first, *_ in alike.values():
        first.requires_grad = True
        first.grad = torch.zeros_like(first)
    optimizer = make_optimizer(asked, model, compiled=False)
    optimizer.step()
    stepped = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    total = 0
    for place, entry in optimizer.state_dict()["state"].items():
        total += number[id(stepped[place])] * sum(value.nbytes for value in entry.values() if isinstance(value, torch.Tensor))
    for parameter in trained:
        parameter.requires_grad, parameter.grad = True, None
    return total


def as_tables(configs: Mapping[str, Mapping[str, Json]], rank: int) -> str:
    """Return both tables in Markdown: a row for each choice, a column for each model, in GB of 10^9 bytes."""
    models = {name: CountedModel(config) for name, config in configs.items()}
    plain = [model.made(run_of({}))[1] for model in models.values()]
    sizes = [sum(parameter.numel() for parameter in model.parameters()) / 1e9 for model in plain]
    images = [f"{8 * latent_size(model.made(run_of({}))[0])} px" for model in models.values()]
    fixed = [(label(row), [_gb(model.memory(row).total) for model in models.values()]) for row in choices(rank)]
    moving = [(label(row), [_gb(model.activations(row)) for model in models.values()]) for row in savings(rank)]
    return "\n\n".join(
        (
            _table(
                "GB without activations",
                models,
                [("10^9 weights", [f"{size:.2{'f' if size >= 0.1 else 'g'}}" for size in sizes]), *fixed],
            ),
            _table("GB of activations an image", models, [("image", images), *moving]),
        )
    )


def _gb(num_bytes: int) -> str:
    """Return bytes in GB of 10^9: with a decimal, small numbers with two digits.

    >>> _gb(2_345_000_000), _gb(48_200_000), _gb(0)
    ('2.3', '0.048', '0')
    """
    return f"{num_bytes / 1e9:.1f}" if num_bytes >= 10**8 else f"{num_bytes / 1e9:.2g}"


def _table(title: str, columns: Iterable[str], rows: Iterable[tuple[str, Sequence[str]]]) -> str:
    names = list(columns)
    lines = [f"| {title} | " + " | ".join(names) + " |", "|---|" + "---:|" * len(names)]
    return "\n".join((*lines, *(f"| {name} | " + " | ".join(cells) + " |" for name, cells in rows)))
