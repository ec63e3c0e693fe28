"""The model of a run: loaded, checked against the stores, on its devices, with its optimizer and average."""

from __future__ import annotations

import contextlib
import functools
import logging
import warnings
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch.nn.parallel import DistributedDataParallel

from bucketline.command_line import torchrun_ranks
from bucketline.loader.latent_scale import LatentScale
from bucketline.loader.ranks import fail_together
from bucketline.store.format.columns import LATENT
from bucketline.train.checkpoint import load_optimizer
from bucketline.train.compile import (
    compile_blocks,
    compiles,
    example_batches,
    flops_of_buckets,
    peak_flops,
    recompute,
    share_cores_of_compiler,
    warm_up,
)
from bucketline.train.config import IN_PROCESS, Base, Precision, TrainConfig, WeightDtype
from bucketline.train.data import mean_weight, open_loader
from bucketline.train.ema import Average
from bucketline.train.log import StepWork
from bucketline.train.lora import add_adapters
from bucketline.train.models.load import facts_of, load, locate, refuse_other_encoders, schedule_of
from bucketline.train.models.weights import weights_of
from bucketline.train.noise import Prep
from bucketline.train.optim import make_optimizer
from bucketline.train.parallel import TrainRanks, first_of_each_machine_first, from_rank_zero
from bucketline.train.sharding import layout_on, loads_alone, place_model
from bucketline.train.step import Training
from bucketline.train.values import EmaPlace

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from bucketline.families.family import Family
    from bucketline.loader import Loader
    from bucketline.train.checkpoint import Start
    from bucketline.train.models.weights import Weights
    from bucketline.train.noise import ModelSchedule

log = logging.getLogger(__name__)

GPU_BUCKET_MB = 100  # of gradients exchanged at a time: NVLink moves torch's default of 25 MB faster than NCCL starts a call


def build_training(config: TrainConfig, ranks: TrainRanks, start: Start, loader: Loader) -> tuple[Training, Weights]:
    """Build what a step needs: the model, checked against the stores, on its devices, with the checkpoint's tensors if any."""
    device, vae = loader.device, loader.shares[0].store.manifest.encoders["vae"]
    assert isinstance(vae, dict)
    family, model, schedule = _load_model(config, ranks, start, loader)
    weights = weights_of(family, adapters=config.lora_rank is not None, scheduler=schedule.config)  # how files hold them
    compiled = compiles(config, device)
    recompute(model, config, is_compiled=compiled)
    if compiled:
        compile_blocks(model, family)
    if config.offload_blocks:
        from bucketline.train.lowbit.offload import offload_blocks

        offload_blocks(model, config.offload_blocks, device, layout_on(device))
    kept = config.ema
    average_of_model = functools.partial(
        Average, decay=kept.decay, place=kept.place or EmaPlace.DEVICE, every=kept.every, seed=config.seed
    )
    average = place_model(model, config, ranks, device, weights, start.checkpoint, average_of_model)
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
            schedule=schedule.noise,
            objective=schedule.objective,
            options=config,
            compiled=compiled,
        ),
        autocast=torch.autocast(device.type, torch.bfloat16, enabled=config.autocasts),
        scheduler=schedule.config,
        mean_weight=mean_weight(config, loader.shares),
    )
    return training, weights


def _load_model(
    config: TrainConfig, ranks: TrainRanks, start: Start, loader: Loader
) -> tuple[Family, nn.Module, ModelSchedule]:
    """Load the model and its noise schedule, and add adapters."""
    store, device = loader.shares[0].store, loader.device  # all stores have the encoders of the first
    folder, file = locate(config.model, config.model_config)
    # Frozen weights are never updated, so they need no more precision than they are computed in.
    is_bf16 = config.weights is WeightDtype.BF16 or (config.lora_rank is not None and config.precision is Precision.BF16)
    dtype = torch.bfloat16 if is_bf16 else torch.float32
    facts = facts_of(store, loader.rows.buckets())
    with fail_together():  # rank 0 reads the weights, and the others wait for it
        on_meta = not (ranks.is_main or loads_alone(config))
        family, model = load(folder, facts, config.seed, file, dtype=dtype, on_meta=on_meta)
    family.guidance = config.guidance
    from_rank_zero(ranks, lambda: refuse_other_encoders(folder, store.manifest.encoders, file))
    schedule = schedule_of(config, folder, family, device)
    if config.lora_rank is not None:
        add_adapters(model, family, config)
        if config.lora_from is not None and start.checkpoint is None:
            from bucketline.train.lora_file import start_from

            start_from(config.lora_from, model, family.lora_pipeline)
    if config.precision is Precision.FP8:
        from bucketline.train.lowbit.float8 import use_float8

        log.info("%d linear layers compute in 8-bit floats", use_float8(model))
    if isinstance(config.base, Base):
        from bucketline.train.lowbit.frozen_base import quantise_base

        quantise_base(model, config.base, device)
    return family, model, schedule


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


def step_work_of(config: TrainConfig, ranks: TrainRanks, device: torch.device) -> StepWork:
    """Return the work of a run's steps, without buckets yet; log why it has no MFU."""
    peak = None
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        if config.precision is not Precision.BF16:
            log.warning("no MFU: it is relative to the bf16 peak, and --precision is %s", config.precision)
        elif (peak := peak_flops(name)) is None:
            log.warning("no MFU: the bf16 peak of %s is unknown", name)
    return StepWork(num_devices=ranks.world_size, peak_flops=peak)


def compile_and_count(
    training: Training, ranks: TrainRanks, loader: Loader, say: Callable[[str], None], work: StepWork
) -> None:
    """Compile for every bucket before timing starts, and tell `say`; on a GPU, also count the FLOPs of a step per bucket.

    Buckets that `work` has, from a generation before, are left out, and the others are added there. The first rank of each
    machine compiles a bucket first: the others find its kernels in inductor's cache. Sharded ranks need each other, so they
    compile at the same time, with their share of the cores.
    """
    config, compiled, on_gpu = training.config, training.prep.compiled, loader.device.type == "cuda"
    work.samples.update({bucket.name: bucket.global_batch for bucket in loader.plan.buckets})
    shapes = {one.name: (loader.config.rows_of(one), *one.spec.column(LATENT).shape) for one in loader.rows.buckets()}
    trained, validated = (
        [bucket for bucket in loader.rows.buckets(split) if work.shapes.get(bucket.name) != shapes[bucket.name]]
        for split in ("train", "val")
    )
    if not (compiled or on_gpu) or not (trained or validated):
        return
    work.shapes.update(shapes)
    one_ahead = replace(config, service=IN_PROCESS, prefetch_bytes=1 << 20)
    with open_loader(one_ahead, ranks, loader.shares, loader.device, like=loader) as one:
        examples = example_batches(one, [*trained, *validated])
    own, evaluated = ({bucket.name: examples[bucket.name] for bucket in buckets} for buckets in (trained, validated))
    if compiled:
        if is_sharded := config.is_sharded(ranks.world_size):
            share_cores_of_compiler(torchrun_ranks()["local_world_size"])
        turn = contextlib.nullcontext if is_sharded else functools.partial(first_of_each_machine_first, ranks)
        warm_up(training, [*own.values()], say, validated=[*evaluated.values()], turn=turn)
    if on_gpu and own:
        flops = flops_of_buckets(training.bare_model, training.family, own)
        work.flops.update({name: config.accumulation * ranks.world_size * each for name, each in flops.items()})
