"""Fit a run into a device's memory: try its largest step, and while memory ends, turn on what saves some, in order of cost."""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from bucketline.allocator import NoRoom, attempt, free_memory
from bucketline.errors import UsageError
from bucketline.loader.ranks import gathered
from bucketline.option_value import as_option
from bucketline.store.format.columns import LATENT
from bucketline.train.compile import example_batches, forward_backward
from bucketline.train.config import BASE_OFF, IN_PROCESS, Base, TrainConfig
from bucketline.train.data import open_loader
from bucketline.train.values import Ema, EmaPlace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from bucketline.loader import Batch, Loader
    from bucketline.train.checkpoint import Start
    from bucketline.train.models.weights import Weights
    from bucketline.train.parallel import TrainRanks
    from bucketline.train.step import Training
    from bucketline.typed_json import Json

SPARE = 0.02  # of a device's memory, not used in the trial: for batches that wait there, and gaps between tensors
EMA_EVERY = 10  # steps between updates of an average that was moved to the host
EVERY_BLOCK = 99  # as many as there are


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """Options that save memory, in addition to those before them, and what they cost."""

    options: dict[str, Any]
    price: str

    def __str__(self) -> str:
        return " ".join(f"{as_option(name)} {value}" for name, value in self.options.items())


def built_to_fit(
    config: TrainConfig,
    ranks: TrainRanks,
    start: Start,
    loader: Loader,
    build: Callable[[TrainConfig], tuple[Training, Weights]],
    say: Callable[[str], None],
) -> tuple[Training, Weights]:
    """Return what `build` makes of a configuration with the options that the memory of each rank's device needs.

    Tell `say` which, and why. With `--memory`, torch's allocator on a GPU takes no more. Nothing is tried with `--memory off`,
    on a CPU without `--memory`, and in a resumed run that keeps what its first part chose.
    """
    device, limit = loader.device, None if config.memory is None else config.memory.num_bytes
    if limit is not None and device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total), device)
    is_fitted = start.state is not None and _is_fitted(config, start.state.config)
    if is_fitted or (limit is None and (config.memory is not None or device.type != "cuda")):
        return build(decided(config))
    savings, config = [*savings_of(config, ranks.world_size)], decided(config)
    batch = largest_batch(config, ranks, loader)

    def tried() -> tuple[Training, Weights]:
        built = build(config)
        try_step(built[0], batch, limit)
        return built

    while True:
        made = attempt(tried)
        short = [said for said in gathered(isinstance(made, NoRoom) and f"{made} ") if said]  # all choose alike
        if not isinstance(made, NoRoom) and not short:
            return made
        del made
        torch._dynamo.reset()  # compiled blocks keep tensors
        free_memory(device)
        rows = f"memory is short for a step of {len(batch.latents)} rows of {batch.bucket}"
        if not savings:
            raise UsageError(
                f"{rows}, with all that saves memory and is not given otherwise: {short[0]:.200}. Use a smaller --batch with a "
                "larger --accumulation, --lora-rank 16, a larger --memory, or --memory off to train until it ends"
            )
        saving = savings.pop(0)
        say(f"{rows}: trying {saving}; {saving.price}")
        config = replace(config, **saving.options)


def savings_of(config: TrainConfig, world_size: int) -> Iterator[Saving]:
    """Yield what saves memory, in order of cost; an option that is given is not changed."""
    has_torchao, is_whole = importlib.util.find_spec("torchao") is not None, not config.is_sharded(world_size)
    if config.recompute is None and not config.offload_blocks:
        for share in (0.25, 0.5, 0.75, 1.0):
            yield Saving(options={"recompute": share}, price=f"up to {share / 3:.0%} more time, and the same losses")
    if config.lora_rank is None:
        if config.ema.decay is not None and config.ema.place is None:
            every = EMA_EVERY if config.ema.every == 1 else config.ema.every
            yield Saving(
                options={"ema": replace(config.ema, place=EmaPlace.CPU, every=every)},
                price=f"the average moves every {every} steps, by a copy to the device and back",
            )
        if config.optimizer is None and not config.resume and has_torchao and is_whole:
            yield Saving(options={"optimizer": "adamw-8bit"}, price="moments have 8 bits")
        return
    if not is_whole or config.dora:
        return
    if config.base is None and has_torchao:
        yield Saving(options={"base": Base.INT8}, price="frozen weights have 8 bits")
        yield Saving(options={"base": Base.NF4}, price="frozen weights have 4 bits")
    if config.offload_blocks is None and config.recompute in (None, 1):
        yield Saving(
            options={"offload_blocks": EVERY_BLOCK}, price="frozen weights wait in host memory and are copied for each use"
        )


def largest_batch(config: TrainConfig, ranks: TrainRanks, loader: Loader) -> Batch:
    """Return a micro-batch of the bucket that needs most, with captions as long as the text encoder makes them."""
    largest = max(
        loader.rows.buckets("train"), key=lambda one: loader.config.rows_of(one) * math.prod(one.spec.column(LATENT).shape)
    )
    one_ahead = replace(config, service=IN_PROCESS, prefetch_bytes=1 << 20)
    with open_loader(one_ahead, ranks, loader.shares, loader.device, like=loader) as one:
        batch = example_batches(one, [largest])[largest.name]
    encoder = loader.shares[0].store.manifest.encoders.get("text_encoder")
    tokens = encoder.get("max_tokens") if isinstance(encoder, dict) else None
    if isinstance(tokens, int) and (more := tokens - batch.tokens.shape[1]) > 0:
        mask = functional.pad(batch.token_mask, (0, more), value=True)
        batch = replace(batch, tokens=functional.pad(batch.tokens, (0, 0, 0, more)), token_mask=mask)
    return batch


def try_step(training: Training, batch: Batch, limit: int | None) -> None:
    """Run the passes of a step with all that a later one has in memory; model, optimizer and random numbers stay unchanged.

    `limit`: bytes of a GPU's memory that the run may take; None: all. Ranks exchange nothing, but the shards of FSDP: of these,
    one that is short by itself leaves the others waiting until their exchange times out.
    """
    device = training.trained[0].device
    is_cuda = device.type == "cuda"
    spare = None
    if is_cuda:
        total = torch.cuda.get_device_properties(device).total_memory
        spare = torch.empty(int(SPARE * min(total, limit or total)), dtype=torch.uint8, device=device)
    with torch.random.fork_rng(devices=[device] if is_cuda else []), _with_state(training):
        try:
            for _ in range(min(2, training.config.accumulation)):  # the second has the first one's gradients
                forward_backward(training, batch)
        finally:
            training.optimizer.zero_grad(set_to_none=True)
    del spare


@contextlib.contextmanager
def _with_state(training: Training) -> Iterator[None]:
    """Give the optimizer the state that it has after a step, if it has none, while the body runs.

    It is made of one weight after another, so that nothing but this weight has to be kept.
    """
    optimizer, groups = training.optimizer, training.optimizer.param_groups
    if optimizer.state:
        yield
        return
    every = [group["params"] for group in groups]
    before = [{name: copy.deepcopy(value) for name, value in group.items() if name != "params"} for group in groups]
    try:
        for group in groups:
            group["params"] = []
        for group, weights in zip(groups, every, strict=True):
            for weight in weights:
                kept = weight.detach().clone()
                group["params"], weight.grad = [weight], torch.zeros_like(weight)
                try:
                    optimizer.step()
                finally:
                    weight.grad = None
                    weight.detach().copy_(kept)
            group["params"] = weights
        yield
    finally:
        optimizer.state.clear()
        for group, weights, values in zip(groups, every, before, strict=True):
            group.clear()
            group.update(values, params=weights)


def decided(config: TrainConfig) -> TrainConfig:
    """Return a configuration whose open options have the values of a run that has memory enough."""
    recomputed = 1.0 if config.offload_blocks else 0.0
    return replace(
        config,
        recompute=recomputed if config.recompute is None else config.recompute,
        optimizer=config.optimizer or "adamw",
        base=None if config.base == BASE_OFF else config.base,
        offload_blocks=config.offload_blocks or 0,
        ema=config.ema if config.ema.decay is None else replace(config.ema, place=config.ema.place or EmaPlace.DEVICE),
    )


def with_recorded(config: TrainConfig, recorded: Mapping[str, Json]) -> TrainConfig:
    """Return a resumed run's configuration with what its first part chose, unless an option or another --memory is given."""
    taken: dict[str, Any] = {}
    if config.optimizer is None:  # whose state the checkpoint has
        taken["optimizer"] = recorded.get("optimizer", "adamw")
    if _is_fitted(config, recorded):
        taken |= {name: recorded.get(name) for name in ("recompute", "offload_blocks") if getattr(config, name) is None}
        if config.base is None and config.lora_rank is not None:
            taken["base"] = Base(str(found)) if (found := recorded.get("base")) else BASE_OFF
        before = Ema.parse(str(recorded.get("ema", config.ema)), "--ema")
        is_open = config.ema.decay is not None and config.ema.place is None
        if is_open and replace(config.ema, place=before.place, every=before.every) == before:
            taken["ema"] = before
    return replace(config, **taken)


def _is_fitted(config: TrainConfig, recorded: Mapping[str, Json]) -> bool:
    """Return whether a run's first part was fitted into the memory that it has now."""
    return config.memory is None or str(config.memory) == recorded.get("memory")
