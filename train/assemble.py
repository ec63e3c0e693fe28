"""Put a run together: store, model, optimizer, loader, each checked against the others, and filled from a checkpoint."""

from __future__ import annotations

import logging
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs

from bucketline.errors import ModelError, UsageError
from bucketline.loader import Loader, LoaderConfig, Remainder
from bucketline.loader.conditioning import FLIPPED
from bucketline.loader.stores import join
from bucketline.train import checkpoint
from bucketline.train.config import Compile, Precision, TrainConfig
from bucketline.train.ema import AveragedModel
from bucketline.train.encoders import refuse_other_encoders
from bucketline.train.families.loading import LATENT, facts_of
from bucketline.train.families.loading import load as load_model
from bucketline.train.lora import add_adapters
from bucketline.train.objectives import Objective
from bucketline.train.open_stores import once_each, open_stores
from bucketline.train.prep import LatentScale, Prep, TimestepDensity
from bucketline.train.presets import refuse_other_family
from bucketline.train.ranks import Ranks, expect_equal, from_rank_zero
from bucketline.train.run_folder import Start, config_as_json
from bucketline.train.schedule import ModelSchedule, Wanted, load_schedule
from bucketline.train.step import Training
from bucketline.train.weights import LORA_FOLDER, Adapters, WholeModel

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn
    from torch.optim import Optimizer

    from bucketline.loader import StoreShare
    from bucketline.store import Store
    from bucketline.store.reader import OpenShards
    from bucketline.store.typed_json import Json
    from bucketline.train.families import Family

log = logging.getLogger(__name__)

ADAM_BETAS = (0.9, 0.999)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """A run's parts, ready to go."""

    shares: tuple[StoreShare, ...]  # the stores, and how often each comes in a pass
    rows: OpenShards  # of all of them
    loader: Loader
    training: Training
    schedule: ModelSchedule
    trained: checkpoint.TrainedParts
    latent_scale: LatentScale


def start_processes() -> Accelerator:
    """Join the processes that torchrun started, on GPUs where there are any."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="OMP_NUM_THREADS")  # says that it takes all cores, as we want it to
        return Accelerator(
            cpu=not torch.cuda.is_available(),
            mixed_precision="no",  # the step has its own autocast
            kwargs_handlers=[DistributedDataParallelKwargs(gradient_as_bucket_view=True)],
        )


def assemble(config: TrainConfig, ranks: Ranks, accelerator: Accelerator, start: Start) -> Parts:
    """Build a run's parts.

    Raises:
        BucketlineError: where a part is missing, or does not suit another; both are named.
    """
    shares = open_stores(config.store, ranks, start)
    for share in shares:
        refuse_unread_columns(share.store)
    rows, store = join(shares), shares[0].store  # which speaks for the encoders of all
    device = accelerator.device
    loaded = load_model(config.model, facts_of(store.manifest, rows.buckets()), config.seed)
    family = loaded.family
    refuse_other_family(config.preset, family)
    from_rank_zero(ranks, lambda: refuse_other_encoders(config.model, store.manifest.encoders))
    wanted = Wanted(objective=config.objective, shift=config.shift, patch_size=family.patch_size, published=family.scheduler)
    schedule = load_schedule(config.model, device, wanted)
    if config.min_snr_gamma is not None and schedule.objective is Objective.FLOW:
        raise UsageError(f"--min-snr-gamma is {config.min_snr_gamma}, and the objective is a flow; leave it out")
    if config.lora_rank is not None:
        add_adapters(loaded.model, family, config)
    if config.gradient_checkpointing:
        loaded.model.enable_gradient_checkpointing()  # type: ignore[operator]
    if ranks.is_main:
        _say_what_was_assumed(config, start, schedule, at_random=loaded.at_random)
    layout = torch.channels_last if device.type == "cuda" else torch.contiguous_format
    model = loaded.model.to(device=device, memory_format=layout)  # type: ignore[call-overload]
    average = AveragedModel(model, config.ema_decay)
    optimizer = _optimizer(model, config)
    trained = _trained(family, config, model, average, optimizer)
    loader = open_loader(config, ranks, shares, device)
    expect_equal(ranks, "the plan's digest", loader.plan.digest)
    if start.state is not None and start.checkpoint is not None:
        loader.load_state_dict(start.state.loader)
        checkpoint.load(start.checkpoint, trained)
    compiled = config.compile is Compile.ON or (config.compile is Compile.AUTO and device.type == "cuda")
    if compiled:
        _compile(model, num_buckets=len(rows.buckets()))
    scale = latent_scale(store, device)
    training = Training(
        config=config,
        family=family,
        model=accelerator.prepare_model(model) if ranks.world_size > 1 else model,
        optimizer=optimizer,
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
    return Parts(
        shares=shares, rows=rows, loader=loader, training=training, schedule=schedule, trained=trained, latent_scale=scale
    )


def open_loader(config: TrainConfig, ranks: Ranks, shares: Sequence[StoreShare], device: torch.device) -> Loader:
    """Open the endless loader of training batches."""
    loader_config = LoaderConfig(
        batch_size=config.batch_size,
        accumulation=config.accum,
        seed=config.seed,
        split="train",
        remainder=Remainder.CARRY,
        caption_dropout=config.caption_dropout,
        flip=config.flip,
        epochs=None,
    )
    return Loader(shares, loader_config, rank=ranks.rank, world_size=ranks.world_size, device=device)


def open_val_loader(config: TrainConfig, ranks: Ranks, shares: Sequence[StoreShare], device: torch.device) -> Loader:
    """Open a loader that gives every held-out sample once, whatever its store's repeats.

    It accumulates as training does: captions are chosen by position in the global batch, so the same global batch
    gives the same captions on any number of ranks.
    """
    loader_config = LoaderConfig(
        batch_size=config.batch_size,
        accumulation=config.accum,
        seed=config.seed,
        split="val",
        remainder=Remainder.PARTIAL,
        epochs=1,
    )
    return Loader(once_each(shares), loader_config, rank=ranks.rank, world_size=ranks.world_size, device=device)


def refuse_unread_columns(store: Store) -> None:
    """Refuse a store with something that this trainer would leave out, or take for something else.

    Raises:
        ModelError: naming the field, what it is, and what is expected.
    """
    manifest = store.manifest
    vae = manifest.encoders.get("vae")
    assert isinstance(vae, dict)
    names = {column for bucket in manifest.buckets for column in bucket.columns if column.startswith("latent")}
    beside = sorted(names - {LATENT, FLIPPED})
    both = vae.get("shift_factor") and vae.get("latents_mean")
    for field, found, is_known, expected in (
        ("buckets.columns", ", ".join(beside), not beside, f"{LATENT} and {FLIPPED} alone"),
        ("text.tokens", ", ".join(manifest.text.tokens), len(manifest.text.tokens) == 1, "one column"),
        ("encoders.vae.shift_factor", vae.get("shift_factor"), not both, "none beside a latents_mean"),
    ):
        if not is_known:
            raise ModelError(
                f"{store.path}: its manifest has {field} {found!s:.100}, expected {expected}; this trainer does not read that, "
                "and would train on something else: pack the source anew without it"
            )


def latent_scale(store: Store, device: torch.device) -> LatentScale:
    """Take the scale of latents from what the store says of its VAE: by channel, where that has a mean and a spread."""
    vae = store.manifest.encoders["vae"]
    assert isinstance(vae, dict)
    scale, shift = vae["scaling_factor"], vae.get("latents_mean") or vae.get("shift_factor") or 0.0

    def each(values: Json) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float32, device=device).reshape(-1, 1, 1)

    return LatentScale(scale=each(scale) / each(vae.get("latents_std") or 1.0), shift=each(shift))


def _optimizer(model: nn.Module, config: TrainConfig) -> Optimizer:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(trained, lr=config.learning_rate, betas=ADAM_BETAS, weight_decay=config.weight_decay, fused=True)


def _trained(
    family: Family, config: TrainConfig, model: nn.Module, average: AveragedModel, optimizer: Optimizer
) -> checkpoint.TrainedParts:
    """Say what of the run a checkpoint holds, and where."""
    adapters = Adapters(part=family.folder, by_pipeline=family.pipeline is not None)
    whole = config.lora_rank is None
    return checkpoint.TrainedParts(
        folder=family.folder if whole else LORA_FOLDER,
        model=model,
        average=average.model,
        optimizer=optimizer,
        weights=WholeModel() if whole else adapters,
    )


def _compile(model: nn.Module, *, num_buckets: int) -> None:
    """Compile the model in place, one graph per bucket."""
    import torch._dynamo.config as dynamo

    dynamo.automatic_dynamic_shapes = False  # else the second bucket compiles a graph of dynamic shapes, slower for all
    dynamo.recompile_limit = max(dynamo.recompile_limit, 2 * num_buckets + 8)  # past it dynamo silently runs eagerly
    model.compile(dynamic=False)


def _say_what_was_assumed(config: TrainConfig, start: Start, schedule: ModelSchedule, *, at_random: bool) -> None:
    if at_random and start.state is None:
        log.warning(
            "%s has a configuration and no weights: the model starts at random, from --seed %d",
            config.model,
            config.seed,
        )
    if schedule.assumed:
        log.warning(
            "%s has no scheduler/: taking the schedule published with the model's kind, and its objective, %s",
            config.model,
            schedule.objective,
        )
    if start.state is None:
        return
    present = config_as_json(config)
    free = {"store", "model", "output_dir", "max_steps", "resume"}
    for name, before in start.state.config.items():
        if name not in free and present.get(name) != before:
            log.warning("--%s was %s before and is %s from here on", name.replace("_", "-"), before, present.get(name))
