"""Set up a run: open the store, model, optimizer and loader, check them against each other, load a checkpoint."""

from __future__ import annotations

import logging
import warnings
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, InitProcessGroupKwargs, ProjectConfiguration

from bucketline.errors import ModelError, UsageError
from bucketline.loader.collate.columns import FLIPPED
from bucketline.loader.mixture import join
from bucketline.train.compile import compile_blocks, example_batches, flops_of_buckets, peak_flops, warm_up
from bucketline.train.config import Compile, Precision, Sharding, TrainConfig
from bucketline.train.data import open_loader, open_stores
from bucketline.train.ema import AveragedModel
from bucketline.train.models.encoder_check import refuse_other_encoders
from bucketline.train.models.load import LATENT, facts_of
from bucketline.train.models.load import load as load_model
from bucketline.train.models.lora import add_adapters
from bucketline.train.models.presets import refuse_other_family
from bucketline.train.noise_schedule import ModelSchedule, Objective, RequestedSchedule, load_schedule
from bucketline.train.noising import LatentScale, Prep, TimestepDensity
from bucketline.train.outputs import checkpoint
from bucketline.train.outputs.checkpoint import Start, describe
from bucketline.train.outputs.metrics import FOLDER as TRACKED
from bucketline.train.outputs.metrics import Scale, expect_trackers
from bucketline.train.outputs.run_dir import config_as_json
from bucketline.train.outputs.weights import Adapters, WholeModel
from bucketline.train.parallel import DISK_TIME, TrainRanks, expect_equal, from_rank_zero, shard
from bucketline.train.step import Training

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import nn
    from torch.optim import Optimizer

    from bucketline.loader import Loader, WeightedStore
    from bucketline.store import Store
    from bucketline.store.read.store import OpenShards
    from bucketline.train.models import ModelFamily
    from bucketline.train.models.load import LoadedModel
    from bucketline.train.outputs.checkpoint import TrainedStore
    from bucketline.train.outputs.weights import Weights
    from bucketline.typed_json import Json

log = logging.getLogger(__name__)

ADAM_BETAS = (0.9, 0.999)
FREE = {
    *("store", "model", "output_dir", "max_steps", "resume", "new_plan"),
    *("service", "threads", "prefetch_mib", "verify", "track_with", "sharding"),
}
"""Options that a resume may change without a warning: they do not affect training, or are checked elsewhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The parts of a run, ready to train."""

    shares: tuple[WeightedStore, ...]  # the stores and each one's repeats per pass
    rows: OpenShards  # of all of them
    loader: Loader
    training: Training
    schedule: ModelSchedule
    trained: checkpoint.TrainedParts
    latent_scale: LatentScale
    counted_as: Scale


def start_processes(config: TrainConfig) -> Accelerator:
    """Join the process group that torchrun started, on GPUs if available.

    Raises:
        UsageError: if a tracker is unknown or not installed.
    """
    expect_trackers(config.track_with)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="OMP_NUM_THREADS")  # it warns that all cores are used, which is intended
        return Accelerator(
            cpu=not torch.cuda.is_available(),
            mixed_precision="no",  # the step has its own autocast
            kwargs_handlers=[
                # No family changes a buffer, and SD3's position embeddings are 226 MB.
                DistributedDataParallelKwargs(gradient_as_bucket_view=True, broadcast_buffers=False),
                InitProcessGroupKwargs(timeout=DISK_TIME),
            ],
            log_with=list(config.track_with) or None,
            project_config=ProjectConfiguration(logging_dir=str(config.output_dir / TRACKED)),
        )


def assemble(config: TrainConfig, ranks: TrainRanks, accelerator: Accelerator, start: Start) -> Parts:
    """Build a run's parts.

    Raises:
        BucketlineError: if a part is missing or two parts do not match; the message names them.
    """
    shares = open_stores(config.store, ranks, start)
    for share in shares:
        refuse_unread_columns(share.store)
    rows, store = join(shares), shares[0].store  # all stores have the encoders of the first
    device = accelerator.device
    loaded = load_model(config.model, facts_of(store.manifest, rows.buckets()), config.seed)
    family = loaded.family
    refuse_other_family(config.preset, family)
    from_rank_zero(ranks, lambda: refuse_other_encoders(config.model, store.manifest.encoders))
    wanted = RequestedSchedule(
        objective=config.objective, shift=config.shift, patch_size=family.patch_size, published=family.scheduler
    )
    schedule = load_schedule(config.model, device, wanted)
    if config.min_snr_gamma is not None and schedule.objective is Objective.FLOW:
        raise UsageError(f"--min-snr-gamma is {config.min_snr_gamma}, and the objective is a flow; leave it out")
    if config.lora_rank is not None:
        add_adapters(loaded.model, family, config)
    if config.gradient_checkpointing:
        loaded.model.enable_gradient_checkpointing()  # type: ignore[operator]
    loader = open_loader(config, ranks, shares, device)
    expect_equal(ranks, "the plan's digest", loader.plan.digest)
    if start.state is not None:
        # A new plan continues at the same step, so that no random draw is repeated.
        own = {**loader.state_dict(), "step": start.steps_done}
        loader.load_state_dict(own if start.takes_new_plan else start.state.loader)
    if ranks.is_main:
        _say_what_was_assumed(config, start, shares, schedule, at_random=loaded.at_random)
    compiled = config.compile is Compile.ON or (config.compile is Compile.AUTO and device.type == "cuda")
    scale = latent_scale(store, device)
    trained, average, model = _prepare(config, ranks, accelerator, loaded, start, num_graphs=compiled * len(rows.buckets()))
    training = Training(
        config=config,
        family=family,
        model=model,
        optimizer=trained.optimizer,
        average=average,
        prep=Prep(
            scale=scale,
            schedule=schedule.noise,
            objective=schedule.objective,
            density=TimestepDensity(sampling=config.timestep_sampling, mean=config.logit_mean, std=config.logit_std),
            min_snr_gamma=config.min_snr_gamma,
            compiled=compiled,
        ),
        autocast=torch.autocast(device.type, torch.bfloat16, enabled=config.precision is Precision.BF16),
    )
    counted_as = _warm(config, ranks, training, trained.model, loader, rows, compiled=compiled)
    return Parts(
        shares=shares, rows=rows, loader=loader, training=training, schedule=schedule, trained=trained, latent_scale=scale,
        counted_as=counted_as,
    )  # fmt: skip


def _prepare(
    config: TrainConfig, ranks: TrainRanks, accelerator: Accelerator, loaded: LoadedModel, start: Start, *, num_graphs: int
) -> tuple[checkpoint.TrainedParts, AveragedModel, nn.Module]:
    """Place, load, compile and shard the model, its average and its optimizer; also return the wrapped model for training.

    Raises:
        UsageError: if FSDP is combined with adapters.
        StateError: if the checkpoint belongs to another model.
    """
    if config.sharding is Sharding.FSDP and config.lora_rank is not None:
        raise UsageError(f"--sharding is fsdp with --lora-rank {config.lora_rank}; adapters are small: use ddp")
    device = accelerator.device
    is_sharded = config.sharding is Sharding.FSDP and ranks.world_size > 1
    # FSDP2 takes only contiguous parameters.
    layout = torch.channels_last if device.type == "cuda" and not is_sharded else torch.contiguous_format
    # FSDP2 moves the model to the device block by block: it may not fit there unsharded.
    model = loaded.model.to(device="cpu" if is_sharded else device, memory_format=layout)  # type: ignore[call-overload]
    average = AveragedModel(model, config.ema_decay)
    weights = _weights(config, loaded.family)
    if start.checkpoint is not None:
        checkpoint.load_weights(start.checkpoint, weights, model, average.model)
    if num_graphs:
        compile_blocks(model, num_buckets=num_graphs)
    if is_sharded:
        for whole in (model, average.model):
            shard(whole, device)
        average.follow(model)
    optimizer = _optimizer(model, config)
    trained = checkpoint.TrainedParts(model=model, average=average.model, optimizer=optimizer, weights=weights)
    if start.checkpoint is not None:
        checkpoint.load_optimizer(start.checkpoint, trained)
    return trained, average, model if is_sharded or ranks.world_size == 1 else accelerator.prepare_model(model)


def _warm(
    config: TrainConfig,
    ranks: TrainRanks,
    training: Training,
    model: nn.Module,
    loader: Loader,
    rows: OpenShards,
    *,
    compiled: bool,
) -> Scale:
    """Compile for every bucket before timing starts; on a GPU, also count the FLOPs of a step per bucket."""
    samples = {bucket.name: bucket.global_batch for bucket in loader.plan.buckets}
    on_gpu = loader.device.type == "cuda"
    flops: dict[str, float] = {}
    if compiled or on_gpu:
        with open_loader(replace(config, service="none", prefetch_mib=1), ranks, loader.shares, loader.device) as one:
            examples = example_batches(one, rows)
        if compiled:
            warm_up(training, examples.values())
        if on_gpu:
            per_step = config.accum * ranks.world_size
            flops = {name: per_step * each for name, each in flops_of_buckets(model, training.family, examples).items()}
    return Scale(
        num_devices=ranks.world_size,
        samples=samples,
        flops=flops,
        peak_flops=_peak(config, loader.device) if on_gpu and ranks.is_main else None,
    )


def _peak(config: TrainConfig, device: torch.device) -> float | None:
    """Return the peak FLOP/s that MFU is relative to; log the reason and return None if it is unknown."""
    name = torch.cuda.get_device_name(device)
    if config.precision is not Precision.BF16:
        log.warning("no MFU: it is relative to the bf16 peak, and --precision is %s", config.precision)
        return None
    if (peak := peak_flops(name)) is None:
        log.warning("no MFU: the bf16 peak of %s is unknown", name)
    return peak


def refuse_unread_columns(store: Store) -> None:
    """Reject a store with columns or fields that this trainer would ignore or misread.

    Raises:
        ModelError: if there is one; the message names the field, its value and what is expected.
    """
    manifest = store.manifest
    vae = manifest.encoders.get("vae")
    assert isinstance(vae, dict)
    names = {column for bucket in manifest.buckets for column in bucket.columns if column.startswith("latent")}
    beside = sorted(names - {LATENT, FLIPPED})
    both = vae.get("shift_factor") and vae.get("latents_mean")
    for field, found, is_known, expected in (
        ("buckets.columns", ", ".join(beside), not beside, f"only {LATENT} and {FLIPPED}"),
        ("text.tokens", ", ".join(manifest.text.tokens), len(manifest.text.tokens) == 1, "one column"),
        ("encoders.vae.shift_factor", vae.get("shift_factor"), not both, "none in addition to latents_mean"),
    ):
        if not is_known:
            raise ModelError(
                f"{store.path}: its manifest has {field} {found!s:.100}, expected {expected}; this trainer would ignore it "
                "and train on something else: pack the source again without it"
            )


def latent_scale(store: Store, device: torch.device) -> LatentScale:
    """Return the latent scaling of the store's VAE, per channel if it has a mean and standard deviation."""
    vae = store.manifest.encoders["vae"]
    assert isinstance(vae, dict)
    scale, shift = vae["scaling_factor"], vae.get("latents_mean") or vae.get("shift_factor") or 0.0

    def each(values: Json) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float32, device=device).reshape(-1, 1, 1)

    return LatentScale(scale=each(scale) / each(vae.get("latents_std") or 1.0), shift=each(shift))


def _optimizer(model: nn.Module, config: TrainConfig) -> Optimizer:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(trained, lr=config.learning_rate, betas=ADAM_BETAS, weight_decay=config.weight_decay, fused=True)


def _weights(config: TrainConfig, family: ModelFamily) -> Weights:
    """Return which weights of the model a checkpoint holds."""
    if config.lora_rank is None:
        return WholeModel(folder=family.folder)
    return Adapters(part=family.folder, pipeline=family.pipeline)


def _say_what_was_assumed(
    config: TrainConfig, start: Start, shares: Sequence[WeightedStore], schedule: ModelSchedule, *, at_random: bool
) -> None:
    if at_random and start.state is None:
        log.warning(
            "%s has a configuration but no weights: the model starts at random, from --seed %d",
            config.model,
            config.seed,
        )
    if schedule.assumed:
        log.warning(
            "%s has no scheduler/: using the schedule published with the model's kind, and its objective, %s",
            config.model,
            schedule.objective,
        )
    if start.state is None:
        return
    if start.takes_new_plan:
        log.warning(
            "--new-plan: %s was planned on %s; weights, averages and optimizer continue from step %d in a new order, on %s",
            start.checkpoint,
            _named(start.state.stores),
            start.steps_done,
            _named(map(describe, shares)),
        )
    present = config_as_json(config)
    for name, before in start.state.config.items():
        if name not in FREE and present.get(name) != before:
            log.warning("--%s was %s before and is now %s", name.replace("_", "-"), before, present.get(name))


def _named(stores: Iterable[TrainedStore]) -> str:
    return ", ".join(f"{store.path} generation {store.generation}" for store in stores)
