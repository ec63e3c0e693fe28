"""The memory that steps of training really take: a run's model on a device, and the peak of that device's allocator."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

from bucketline.loader.batch import as_fields
from bucketline.loader.latent_scale import LatentScale
from bucketline.train.compile import compile_blocks, recompute
from bucketline.train.config import Objective
from bucketline.train.ema import Average
from bucketline.train.memory.activations import BatchSizes, example_batch, norms_in_32_bits
from bucketline.train.memory.published import PUBLISHED_MODELS
from bucketline.train.memory.table import built, run_of
from bucketline.train.noise import FlowSchedule, NoiseSchedule, Prep
from bucketline.train.optim import make_optimizer
from bucketline.train.parallel import TrainRanks
from bucketline.train.setup import replicated
from bucketline.train.sharding import layout_on, shard, shard_mesh, shard_ranks_of
from bucketline.train.step import Training, train_step
from bucketline.train.values import EmaPlace

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from bucketline.loader import Batch

NARROW: dict[str, dict[str, Any]] = {
    "sd": {
        **PUBLISHED_MODELS["SD 1.5"],
        "block_out_channels": [32, 64, 64, 64],
        "layers_per_block": 1,
        "cross_attention_dim": 64,
    },
    "sdxl": {
        **PUBLISHED_MODELS["SDXL"],
        "layers_per_block": 1,
        "transformer_layers_per_block": [1, 2, 3],
        "block_out_channels": [32, 64, 128],
        "attention_head_dim": [1, 2, 4],
        "cross_attention_dim": 64,
    },
    "dit": {**PUBLISHED_MODELS["DiT-XL/2"], "num_layers": 4, "num_attention_heads": 2},
    "pixart": {
        **PUBLISHED_MODELS["PixArt-Σ"],
        "num_layers": 4,
        "num_attention_heads": 2,
        "cross_attention_dim": 144,
        "caption_channels": 256,
        "sample_size": 16,
    },
    "sd3": {
        **PUBLISHED_MODELS["SD 3.5 large"],
        "num_layers": 3,
        "num_attention_heads": 2,
        "caption_projection_dim": 128,
        "joint_attention_dim": 256,
        "pooled_projection_dim": 128,
        "sample_size": 16,
        "pos_embed_max_size": 16,
    },
    "flux": {
        **PUBLISHED_MODELS["FLUX.1-dev"],
        "num_layers": 2,
        "num_single_layers": 4,
        "num_attention_heads": 1,
        "joint_attention_dim": 64,
    },
}
"""Published models with few layers, as narrow as a CPU trains in seconds."""
ALONE = TrainRanks(rank=0, world_size=1)
CPU = torch.device("cpu")
STEPS = 3  # the first makes the optimizer's state, and a compiled one compiles


def measured_steps(
    config: Mapping[str, Any],
    options: Mapping[str, Any],
    sizes: BatchSizes,
    device: torch.device,
    *,
    compiled: bool = False,
) -> dict[str, int]:
    """Return the bytes of some steps after another: `held` between them, and the `peak` within one.

    `config`: of a model; `options`: of the run.
    """
    torch._dynamo.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    training, batch = training_of(config, options, sizes, device, compiled=compiled)
    found: dict[str, int] = {}
    for step in range(STEPS):
        with _peak_of(device) as peak, contextlib.nullcontext() if device.type == "cuda" else norms_in_32_bits():
            train_step(training, _micro_batches(training, batch, step), step)
        if device.type == "cuda":
            held = torch.cuda.memory_allocated(device) - before
            peak[0] -= before
        else:
            held = _held(training, batch)
            peak[0] += held
        found = {"held": held, "peak": peak[0]}
    return found


def _micro_batches(training: Training, batch: Batch, step: int) -> Iterator[Batch]:
    """Return the batch as each of a step's micro-batches."""
    return (dataclasses.replace(batch, step=step, micro_step=number) for number in range(training.config.accumulation))


def _held(training: Training, batch: Batch) -> int:
    """Return the bytes of tensors that stay between steps."""
    state = training.optimizer.state_dict()["state"].values()
    found = [*training.model.parameters(), *training.model.buffers(), *training.average._averages, *batch.by_name().values()]
    found += [value for entry in state for value in entry.values() if isinstance(value, torch.Tensor)]
    return sum({id(one): one.nbytes for one in found}.values())


def measured_on_ranks(config: Mapping[str, Any], options: Mapping[str, Any], sizes: BatchSizes, ranks: TrainRanks) -> int:
    """Return the peak of a rank's allocator within a step, of all that the run has made by then: the least of ranks and steps.

    The processes of the group run this together, on a CPU; the model is sharded as `options` say. gloo's threads let go of what
    they have exchanged when the machine lets them run, so single steps have more.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen, norms_in_32_bits():
        training, batch = training_of(config, options, sizes, CPU, ranks=ranks)
        for step in range(3 * STEPS):
            with record_function(f"step {step}"):
                train_step(training, _micro_batches(training, batch, step), step)
    steps = [f"step {step}" for step in range(STEPS, 3 * STEPS)]
    found = torch.tensor(min(_most_bytes(seen, *steps)))
    dist.all_reduce(found, dist.ReduceOp.MIN)
    return int(found)


def _most_bytes(seen: profile, *parts: str) -> list[int]:
    """Return the most bytes that tensors have within each recorded part, beyond what was there when the profile began."""
    profiler: Any = seen.profiler
    changes: list[tuple[int, int]] = []
    spans: dict[str, tuple[int, int]] = {}
    for one in profiler.kineto_results.events():
        if (name := one.name()) == "[memory]":
            changes.append((one.start_ns(), one.nbytes()))
        elif name in parts:
            spans[name] = one.start_ns(), one.start_ns() + one.duration_ns()
    now, most = 0, dict.fromkeys(parts, 0)
    for when, num_bytes in sorted(changes):
        now += num_bytes
        for name, (begin, end) in spans.items():
            if begin <= when <= end:
                most[name] = max(most[name], now)
    return [most[name] for name in parts]


@contextlib.contextmanager
def _peak_of(device: torch.device) -> Iterator[list[int]]:
    """Fill in the most bytes that the body has: on a GPU all of the device's, else those beyond what was there before."""
    found = [0]
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        yield found
        torch.cuda.synchronize(device)
        found[0] = torch.cuda.max_memory_allocated(device)
        return
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen, record_function("all"):
        yield found
    (found[0],) = _most_bytes(seen, "all")


def training_of(
    config: Mapping[str, Any],
    options: Mapping[str, Any],
    sizes: BatchSizes,
    device: torch.device,
    *,
    compiled: bool = False,
    ranks: TrainRanks = ALONE,
) -> tuple[Training, Batch]:
    """Return a run's model at random, ready for a step in bf16, and a batch; of several ranks, this one's part."""
    asked = dataclasses.replace(run_of(dict(options)), learning_rate=1e-4)
    torch.manual_seed(0)
    family, model = built(config, asked, device)
    recompute(model, asked, is_compiled=compiled)
    if compiled:
        compile_blocks(model, family)
    if asked.offload_blocks:
        from bucketline.train.lowbit.offload import offload_blocks

        offload_blocks(model, asked.offload_blocks, device, layout_on(device))
    model.to(device=device, memory_format=layout_on(device))  # type: ignore[call-overload]
    if asked.is_sharded(ranks.world_size):
        shard(model, shard_mesh(device, shard_ranks_of(asked, ranks)), torch.bfloat16)
    kept = asked.ema
    average = Average(model, kept.decay, place=kept.place or EmaPlace.DEVICE)
    optimizer = make_optimizer(asked, model, compiled=compiled)
    is_flow = family.scheduler.get("_class_name") == "FlowMatchEulerDiscreteScheduler"
    schedule: Any = (
        FlowSchedule(num_timesteps=1000, shift=3.0, patch_size=family.patch_size)
        if is_flow
        else NoiseSchedule.from_alphas_cumprod(torch.linspace(0.999, 0.01, 1000), device)
    )
    is_placed = ranks.world_size == 1 or asked.is_sharded(ranks.world_size)
    training = Training(
        config=asked,
        family=family,
        model=model if is_placed else replicated(model, family, asked, device),
        optimizer=optimizer,
        average=average,
        prep=Prep(
            scale=LatentScale(scale=0.5, shift=0.0),
            schedule=schedule,
            objective=Objective.FLOW if is_flow else Objective.EPSILON,
            compiled=compiled,
        ),
        autocast=torch.autocast(device.type, torch.bfloat16),
    )
    batch = example_batch(family, sizes)
    stored = {**batch.by_name(), "latents": batch.latents.half(), "tokens": batch.tokens.half()}
    return training, dataclasses.replace(batch, **as_fields({name: one.to(device) for name, one in stored.items()}))
