"""Fit a run into its device's memory, by trying its largest step with ever more options that save some; and onto its disk."""

from __future__ import annotations

import importlib.util
import logging
import math
import shutil
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from bucketline.command_line import counted, human_bytes
from bucketline.errors import UsageError
from bucketline.files.atomic_write import refuse_too_little_disk
from bucketline.loader.ranks import gathered
from bucketline.option_value import as_option
from bucketline.store.format.block import LATENT, SEEN_IMAGES
from bucketline.torch_setup import NoRoom, attempt, free_memory
from bucketline.train.checkpoint import Adapters, checkpoint_folders
from bucketline.train.compile import example_batches, forward_backward
from bucketline.train.config import BASE_OFF, Base, Ema, EmaPlace, Sharding, TrainConfig
from bucketline.train.model import build_training
from bucketline.train.optim import make_optimizer, traits_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch.optim import Optimizer

    from bucketline.loader import Batch, Loader
    from bucketline.store import Bucket
    from bucketline.train.checkpoint import Start, WeightLayout
    from bucketline.train.parallel import TrainRanks
    from bucketline.train.step import Training
    from bucketline.typed_json import Json

log = logging.getLogger(__name__)

SPARE = 0.02  # of a device's memory, not used in the trial: for batches that wait there, and gaps between tensors
EMA_EVERY = 10  # steps between updates of an average that was moved to the host
EVERY_BLOCK = 99  # as many as there are


def built_to_fit(
    config: TrainConfig, ranks: TrainRanks, start: Start, loader: Loader, say: Callable[[str], None]
) -> tuple[Training, WeightLayout]:
    """Build what a step needs, with the options that the memory of each rank's device needs.

    Tell `say` which, and why. With `--memory`, torch's allocator on a GPU takes no more. Nothing is tried with `--memory off`,
    and on a CPU without `--memory`.
    """
    device, limit = loader.device, None if config.memory is None else config.memory.num_bytes
    if limit is not None and device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total), device)
    savings, config = savings_of(config, ranks.world_size), decided(config)
    if limit is None and (config.memory is not None or device.type != "cuda"):
        return build_training(config, ranks, start, loader)
    batch = largest_batch(ranks, loader)

    def tried() -> tuple[Training, WeightLayout]:
        built = build_training(config, ranks, start, loader)
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
        rows = f"out of memory in a step of {counted(len(batch.latents), 'sample')} of {batch.bucket}"
        options, price = next(savings, ({}, ""))
        if not options:
            raise UsageError(
                f"{rows}, with every memory-saving option that you have not set: {short[0].rstrip(' .'):.200}. Use a smaller "
                "--batch-size with a larger --accumulation, --recompute 1, "
                "--lora-rank 16, a larger --memory, or --memory off to try nothing"
            )
        say(f"{rows}; next try: {' '.join(f'{as_option(name)} {value}' for name, value in options.items())} ({price})")
        config = replace(config, **options)


def savings_of(config: TrainConfig, world_size: int) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield options that save memory, in addition to those before them, and what they cost, in order of that.

    An option that is given is not changed.
    """
    has_torchao, is_whole = importlib.util.find_spec("torchao") is not None, not config.is_sharded(world_size)
    if config.recompute is None and not config.offload_blocks:
        for share in (0.25, 0.5, 0.75, 1.0):
            yield {"recompute": share}, f"up to {100 * share / 3:.0f} % more time, same losses"
    if config.lora_rank is None:
        if config.ema.decay is not None and config.ema.place is None:
            every = EMA_EVERY if config.ema.every == 1 else config.ema.every
            price = f"the average is updated every {every} steps, in host memory"
            yield {"ema": replace(config.ema, place=EmaPlace.CPU, every=every)}, price
        if config.optimizer is None and has_torchao and is_whole:
            yield {"optimizer": "adamw-8bit"}, "optimizer state in 8 bits"
        return
    if config.sharding != Sharding.DDP:
        return
    if config.base is None and has_torchao:
        yield {"base": Base.INT8}, "frozen weights in 8 bits"
        yield {"base": Base.NF4}, "frozen weights in 4 bits"
    if config.offload_blocks is None and config.recompute in (None, 1):
        yield {"offload_blocks": EVERY_BLOCK}, "frozen weights in host memory, copied for each use"


def largest_batch(ranks: TrainRanks, loader: Loader) -> Batch:
    """Return a micro-batch of the bucket that needs most, with captions as long as the text encoder makes them."""

    def size_of(one: Bucket) -> int:
        shapes = one.spec.column(LATENT).shape, *one.references.values()
        return loader.config.rows_of(one) * sum(map(math.prod, shapes))

    largest = max(loader.rows.buckets("train"), key=size_of)
    batch = example_batches(ranks, loader, [largest])[largest.name]
    encoder = loader.stores[0].store.manifest.encoders.get("text_encoder")
    tokens = encoder.get("max_tokens") if isinstance(encoder, dict) else None
    if isinstance(tokens, int) and batch.image_tokens is not None:  # the caption's own; those of images come before
        tokens += loader.rows.max_entry_tokens[SEEN_IMAGES]
    if isinstance(tokens, int) and (more := tokens - batch.tokens.shape[1]) > 0:
        mask = functional.pad(batch.token_mask, (0, more), value=True)
        seen = None if batch.image_tokens is None else functional.pad(batch.image_tokens, (0, more))
        padded = functional.pad(batch.tokens, (0, 0, 0, more))
        batch = replace(batch, tokens=padded, token_mask=mask, image_tokens=seen)
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
    with torch.random.fork_rng(devices=[device] if is_cuda else []):
        state = None if training.optimizer.state else stepped_optimizer(training)
        try:
            for _ in range(min(2, training.config.accumulation)):  # the second has the first one's gradients
                forward_backward(training, batch)
        finally:
            training.optimizer.zero_grad(set_to_none=True)
    del spare, state


def stepped_optimizer(training: Training) -> Optimizer:
    """Return an optimizer like a training's, with the state that a step makes; the weights stay unchanged.

    It steps for one weight after another, so that nothing but this weight has to be kept.
    """
    optimizer = make_optimizer(training.config, training.bare_model, compiled=training.prep.compiled)
    for weight in training.trained:
        kept, weight.grad = weight.detach().clone(), torch.zeros_like(weight)
        try:
            optimizer.step()
        finally:
            weight.grad = None
            weight.detach().copy_(kept)
    return optimizer


def expect_disk(training: Training, weights: WeightLayout) -> None:
    """Refuse a disk without room for a checkpoint, and warn of one without room for those that are kept.

    A new one is written before the oldest is removed. The sizes are those of all ranks together, which share the folder.
    """
    config, output = training.config, training.config.output_dir
    copies = (2 if training.average.is_kept else 1) * (2 if isinstance(weights, Adapters) else 1)  # adapters are in two files
    size = copies * sum(tensor.nbytes for tensor in weights.tensors(training.bare_model).values())
    size += traits_of(config).state_bytes * sum(weight.numel() for weight in training.trained)
    remedy = "leave out the average (--ema off), " if training.average.is_kept else ""
    refuse_too_little_disk(output, size, "a checkpoint", f"{remedy}or choose another --output-dir")
    added = 1 if config.save_every is None else config.keep + 1 - len(checkpoint_folders(output))
    if added * size > (free := shutil.disk_usage(output).free):
        log.warning(
            "a checkpoint needs about %s, and %s are free in %s: room for %d of %d (--keep %d, and the one that is being "
            "written); use a smaller --keep, or another --output-dir",
            *(human_bytes(size), human_bytes(free), output, free // size, added, config.keep),
        )


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
    """Return a resumed run's configuration with what its first part chose, unless an option is given."""
    taken: dict[str, Any] = {
        name: recorded.get(name) for name in ("optimizer", "recompute", "offload_blocks") if getattr(config, name) is None
    }
    if config.base is None and config.lora_rank is not None:
        taken["base"] = Base(str(found)) if (found := recorded.get("base")) else BASE_OFF
    before = Ema.parse(str(recorded.get("ema", config.ema)), "--ema")
    is_open = config.ema.decay is not None and config.ema.place is None
    if is_open and replace(config.ema, place=before.place, every=before.every) == before:
        taken["ema"] = before
    return replace(config, **taken)
