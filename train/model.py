"""The model of a run: loaded, checked against the stores, on its devices, with its optimizer and average."""

from __future__ import annotations

import functools
import logging
import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from bucketline.loader.latent_scale import LatentScale
from bucketline.loader.ranks import fail_together
from bucketline.train.checkpoint import load_optimizer, load_weights
from bucketline.train.config import Base, Compile, Precision, TrainConfig, WeightDtype
from bucketline.train.ema import Average
from bucketline.train.load import facts_of, load, open_model_config, schedule_of
from bucketline.train.lora import add_adapters
from bucketline.train.noise import Prep
from bucketline.train.optim import make_optimizer
from bucketline.train.parallel import (
    TrainRanks,
    fill_from_rank_zero,
    from_rank_zero,
    keep_layout,
    layout_on,
    shard,
    shard_mesh,
    shard_ranks_of,
    tables_of,
    tensors_of,
)
from bucketline.train.step import Training, mean_weight
from bucketline.train.values import EmaPlace
from bucketline.train.weight_layout import average_folder, layout_of

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn

    from bucketline.families.family import Family
    from bucketline.loader import Loader
    from bucketline.train.checkpoint import Start
    from bucketline.train.noise import Schedule
    from bucketline.train.weight_layout import WeightLayout

log = logging.getLogger(__name__)

GPU_BUCKET_MB = 100  # of gradients exchanged at a time: NVLink moves torch's default of 25 MB faster than NCCL starts a call


def build_training(config: TrainConfig, ranks: TrainRanks, start: Start, loader: Loader) -> tuple[Training, WeightLayout]:
    """Build what a step needs: the model, checked against the stores, on its devices, with the checkpoint's tensors if any."""
    device, vae = loader.device, loader.shares[0].store.manifest.encoders["vae"]
    assert isinstance(vae, dict)
    family, model, schedule = _load_model(config, ranks, start, loader)
    layout = layout_of(family, adapters=config.lora_rank is not None, scheduler=schedule.config)
    compiled = compiles(config, device)
    recompute(model, config, is_compiled=compiled)
    if compiled:
        from bucketline.train.compile import compile_blocks

        compile_blocks(model, family)
    if config.offload_blocks:
        from bucketline.train.lowbit import offload_blocks

        offload_blocks(model, config.offload_blocks, device, layout_on(device))
    average = place_model(model, config, ranks, device, layout, start.checkpoint)
    optimizer = make_optimizer(config, model, compiled=compiled)
    if start.checkpoint is not None and start.state is not None:
        load_optimizer(start.checkpoint, model, optimizer)
    is_replicated = ranks.world_size > 1 and not config.is_sharded(ranks.world_size)
    training = Training(
        config=config,
        family=family,
        model=replicated(model, family, config, device) if is_replicated else model,
        optimizer=optimizer,
        average=average,
        prep=Prep(
            scale=LatentScale.of(family.scaling(vae), device),
            schedule=schedule,
            options=config,
            compiled=compiled,
        ),
        autocast=torch.autocast(device.type, torch.bfloat16, enabled=config.autocasts),
        mean_weight=mean_weight(config, loader.shares),
    )
    return training, layout


def _load_model(config: TrainConfig, ranks: TrainRanks, start: Start, loader: Loader) -> tuple[Family, nn.Module, Schedule]:
    """Load the model and its noise schedule, and add adapters."""
    store, device = loader.shares[0].store, loader.device  # all stores have the encoders of the first
    source = open_model_config(config.model, config.model_config)
    # Frozen weights are never updated, so they need no more precision than they are computed in.
    is_bf16 = config.weights is WeightDtype.BF16 or (config.lora_rank is not None and config.precision is Precision.BF16)
    dtype = torch.bfloat16 if is_bf16 else torch.float32
    facts = facts_of(store, loader.rows.buckets())
    with fail_together():  # rank 0 reads the weights, and the others wait for it
        on_meta = not (ranks.is_main or loads_alone(config))
        family, model = load(source, facts, config.seed, dtype=dtype, on_meta=on_meta)
    family.guidance = config.guidance
    schedule = schedule_of(config, source, family, device)
    if config.lora_rank is not None:
        add_adapters(model, family, config)
        if config.lora_from is not None and start.checkpoint is None:
            from bucketline.train.lora_file import start_from

            start_from(config.lora_from, model, family.lora_pipeline)
    if config.precision is Precision.FP8:
        from bucketline.train.lowbit import use_float8

        log.info("%d linear layers compute in 8-bit floats", use_float8(model))
    if isinstance(config.base, Base):
        from bucketline.train.lowbit import quantise_base

        quantise_base(model, config.base, device)
    return family, model, schedule


def compiles(config: TrainConfig, device: torch.device) -> bool:
    """Return whether a run's blocks are compiled on a device."""
    return config.compile is Compile.ON or (config.compile is Compile.AUTO and device.type == "cuda")


def loads_alone(config: TrainConfig) -> bool:
    """Return True if every rank reads the whole model: quantised and offloaded weights are not sent."""
    return isinstance(config.base, Base) or bool(config.offload_blocks)


def place_model(
    model: nn.Module, config: TrainConfig, ranks: TrainRanks, device: torch.device, layout: WeightLayout, folder: Path | None
) -> Average:
    """Place a model on the device, in place, and return its average; both are those of the checkpoint in `folder`, if any.

    Of several ranks, only rank 0's model has values, in host memory, unless each `loads_alone`.
    """
    memory_format = layout_on(device)
    alone = ranks.world_size == 1 or loads_alone(config)
    if alone:
        model.to(device=device, memory_format=memory_format)  # type: ignore[call-overload]
    else:
        whole = tensors_of(model)
        torch.nn.Module.to(model, "meta")
        if config.is_sharded(ranks.world_size):  # FSDP2 takes only contiguous parameters
            gathered = torch.bfloat16 if config.autocasts else torch.float32
            shard(model, shard_mesh(device, shard_ranks_of(config, ranks)), gathered, keeps_gathered=config.keep_gathered)
            if memory_format is torch.channels_last:
                keep_layout(model, memory_format)
        else:
            torch.nn.Module.to(model, memory_format=memory_format)  # type: ignore[call-overload]
        model.to_empty(device=device)
        fill_from_rank_zero(tensors_of(model), whole)
        for path, tables in from_rank_zero(ranks, lambda: tables_of(model)).items():
            vars(model.get_submodule(path)).update(tables)
    if folder is not None:
        load_weights(folder, layout, model, alone=alone)
    average = Average(model, config.ema.decay, place=config.ema.place or EmaPlace.DEVICE, every=config.ema.every)
    # without one in the checkpoint, it starts from the weights
    if folder is not None and average.is_kept and from_rank_zero(ranks, (folder / average_folder(layout)).is_dir):
        with average.applied():
            load_weights(folder, layout, model, averaged=True, alone=alone)
    return average


def replicated(model: nn.Module, family: Family, config: TrainConfig, device: torch.device) -> DistributedDataParallel:
    """Return a placed model whose ranks average their gradients; each has the same weights by now, which are not sent again."""
    on_gpu = device.type == "cuda"
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="`broadcast_buffers` is deprecated")  # torch before 2.13 has no other name
        return DistributedDataParallel(
            model,
            device_ids=[device] if on_gpu else None,
            gradient_as_bucket_view=True,
            broadcast_buffers=False,  # no family changes a buffer, and SD3's position embeddings are 226 MB
            bucket_cap_mb=GPU_BUCKET_MB if on_gpu else 25,
            init_sync=loads_alone(config),
            # else the gradients of others would not be averaged; looked for where there are some, since it takes time
            find_unused_parameters=any(
                one in name for name, own in model.named_parameters() if own.requires_grad for one in family.unused_layers
            ),
        )


def recompute(model: nn.Module, config: TrainConfig, *, is_compiled: bool) -> None:
    """Have a model recompute the share of its activations that `--recompute` says in the backward pass, not store them."""
    share = config.recompute or 0.0
    run = functools.partial(recomputed, draws=True) if config.lora_dropout else recomputed
    if share == 1:
        model.enable_gradient_checkpointing(run)  # type: ignore[operator]
    elif is_compiled:
        import torch._functorch.config as functorch

        # For each block's graph: torch chooses the operations whose recomputation costs least.
        functorch.activation_memory_budget = 1 - share
    elif share:
        places: dict[nn.Module, int] = {}

        def some(block: nn.Module, *args: Any) -> Any:  # noqa: ANN401 - any block's
            """Recompute a share of the blocks, evenly spaced in the order in which they run first."""
            place = places.setdefault(block, len(places))
            return run(block, *args) if round((place + 1) * share) > round(place * share) else block(*args)

        model.enable_gradient_checkpointing(some)  # type: ignore[operator]


def recomputed(block: nn.Module, *args: Any, draws: bool = False) -> Any:  # noqa: ANN401 - any block's
    """Run a block, and again in the backward pass; if it `draws` random numbers, as adapters with dropout do, the same ones."""
    return checkpoint(block.__call__, *args, use_reentrant=False, preserve_rng_state=draws, determinism_check="none")
