"""Set up a run: the process group, the model and its optimizer on their devices, a checkpoint, and the warm-up."""

from __future__ import annotations

import contextlib
import functools
import logging
import warnings
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs, ProjectConfiguration
from torch.nn.parallel import DistributedDataParallel

from bucketline.attention import avoid_cudnn_attention
from bucketline.command_line import counted, torchrun_ranks
from bucketline.errors import UsageError
from bucketline.loader.latent_scale import LatentScale
from bucketline.loader.mixture import StoreId, open_shares, parse_stores
from bucketline.loader.ranks import DISK_TIME, fail_together
from bucketline.option_types import OnResume, options_on_resume
from bucketline.store.format.columns import LATENT
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
from bucketline.train.config import IN_PROCESS, Base, Compile, Objective, Precision, TrainConfig, WeightDtype
from bucketline.train.data import mean_weight, open_loader
from bucketline.train.ema import Average
from bucketline.train.models.load import (
    checked,
    facts_of,
    load,
    locate,
    read_index,
    refuse_other_encoders,
    weight_files,
)
from bucketline.train.models.lora import add_adapters
from bucketline.train.noise import Prep, load_schedule
from bucketline.train.optim import find_optimizer, make_optimizer, refuse_combinations, usual_learning_rate
from bucketline.train.outputs import saved_tensors
from bucketline.train.outputs.metrics import Scale
from bucketline.train.outputs.progress import TRACKED, expect_trackers
from bucketline.train.outputs.weights import Adapters, weights_of
from bucketline.train.parallel import (
    TrainRanks,
    first_of_each_machine_first,
    from_rank_zero,
)
from bucketline.train.refusals import steps_of_epochs
from bucketline.train.run_file import config_as_json, preset_names
from bucketline.train.sharding import layout_on, loads_alone, place_model, shard_ranks_of
from bucketline.train.step import Training
from bucketline.train.values import EmaPlace, LrSchedule, Weighting

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import nn

    from bucketline.families.family import Family
    from bucketline.loader import Loader
    from bucketline.train.checkpoint import Start
    from bucketline.train.noise import ModelSchedule
    from bucketline.train.outputs.weights import Weights

log = logging.getLogger(__name__)

GPU_BUCKET_MB = 100  # of gradients exchanged at a time: NVLink moves torch's default of 25 MB faster than NCCL starts a call
_OF_ADAPTERS = "-lora"  # how a preset's name ends
_FAMILY_OF_PRESET = {"dit": "class_labels"}  # of another name; pixart_alpha and pixart_sigma share pixart


def start_processes(config: TrainConfig) -> Accelerator:
    """Join the process group that torchrun started, on GPUs if available.

    Raises:
        UsageError: if a tracker is unknown or not installed.
    """
    expect_trackers(config.track_with)
    avoid_cudnn_attention()
    on_gpu = torch.cuda.is_available()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="OMP_NUM_THREADS")  # it warns that all cores are used, which is intended
        return Accelerator(
            cpu=not on_gpu,
            mixed_precision="no",  # the step has its own autocast
            kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(minutes=10) if on_gpu else DISK_TIME)],
            log_with=list(config.track_with) or None,
            project_config=ProjectConfiguration(logging_dir=str(config.output_dir / TRACKED)),
        )


def refuse_model(config: TrainConfig) -> None:
    """Check a model's configurations against the first store and a preset, before a run's folder is made and weights are read.

    Raises:
        ModelError, UsageError: if its parts are not of one model, or the store was packed for another; the message names both.
        StoreError: if the store cannot be opened.
    """
    find_optimizer(config)
    folder, file = locate(config.model, config.model_config)
    store = open_shares([parse_stores(config.store, "--store")[0].path], config.remote())[0].store
    _, _, family = checked(folder, facts_of(store, ()), file)  # its buckets are checked later, once their rows are known
    kinds = {} if config.resume else {name: name.removesuffix(_OF_ADAPTERS) for name in preset_names()}
    families = {one: _FAMILY_OF_PRESET.get(one, one) for one in kinds.values()}
    own = next((one for one, of in families.items() if family.name == of or family.name.startswith(f"{of}_")), None)
    for given in filter(kinds.get, config.files):
        if own not in (None, kinds[given]):
            of_adapters = f"{own}{_OF_ADAPTERS}"
            better = of_adapters if given.endswith(_OF_ADAPTERS) and of_adapters in kinds else own
            raise UsageError(
                f"the preset {given} is for a model of the family {kinds[given]}, and {config.model} is a {family.model_class} "
                f"of {own}; use the preset {better}, or make {given} your own by `bucketline train presets {given} > own.toml`"
            )
    refuse_other_encoders(folder, store.manifest.encoders, reads=False)
    _schedule_of(config, folder, family, torch.device("cpu"))


def resolved(config: TrainConfig, start: Start, device: torch.device) -> TrainConfig:
    """Return the configuration with what its options leave open: precision, learning rate, place of the average.

    On a GPU, let fp32 use TF32, and cuDNN search for its fastest convolutions.
    """
    if start.state is not None:
        from bucketline.train.memory import with_recorded

        config = with_recorded(config, start.state.config)
    if config.learning_rate is None:
        config = replace(config, learning_rate=usual_learning_rate(config))
    if config.precision is Precision.AUTO:
        before = None if start.state is None else start.state.config.get("precision")
        has_bf16 = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
        config = replace(config, precision=Precision(str(before or (Precision.BF16 if has_bf16 else Precision.FP32))))
    if config.precision is Precision.FP8:
        from bucketline.train.lowbit.float8 import expect_float8

        expect_float8(config, device)
    if device.type == "cuda":
        torch.backends.cudnn.benchmark = True  # convolutions of each size are timed once, in the warm-up
    if config.precision is Precision.FP32 and device.type == "cuda":
        torch.set_float32_matmul_precision("high")
        log.warning("--precision is fp32: products are computed in TF32, at half the speed of bf16 at best")
    return config


def with_length(config: TrainConfig, start: Start, loader: Loader) -> TrainConfig:
    """Return the configuration with the steps of its epochs, by the loader's plan, and the schedule's horizon.

    Raises:
        UsageError: if the steps that are done are more, or are of another plan.
        PlanError: if so many epochs have no step.
    """
    if config.epochs is not None:
        state, plan = start.state, loader.plan
        past = [] if state is None else state.loader.get("history")
        if config.new_plan or (isinstance(past, list) and any("plan" in one for one in past if isinstance(one, dict))):
            raise UsageError(f"--epochs is {config.epochs:g}, and the run has had several plans; give --max-steps")
        steps = steps_of_epochs(plan, config.epochs)
        if start.steps_done > steps:
            raise UsageError(
                f"--epochs is {config.epochs:g}, {counted(steps, 'step')}, and {start.checkpoint} is already at step "
                f"{start.steps_done}; give more"
            )
        config = replace(config, max_steps=steps, epochs=None)
    if (schedule := config.lr_schedule).end is None and schedule.ends:
        recorded = "constant" if start.state is None else str(start.state.config.get("lr_schedule", "constant"))
        end = LrSchedule.parse(recorded, "the resumed run's --lr-schedule").end or config.max_steps
        config = replace(config, lr_schedule=replace(schedule, end=end))
    return config


def build(config: TrainConfig, ranks: TrainRanks, start: Start, loader: Loader) -> tuple[Training, Weights]:
    """Build what a step needs: the model, checked against the stores, on its devices, with the checkpoint's tensors if any.

    Raises:
        ModelError, UsageError: if model, stores and options do not match; the message names them.
        StateError: if the checkpoint belongs to another model.
    """
    device, vae = loader.device, loader.shares[0].store.manifest.encoders["vae"]
    assert isinstance(vae, dict)
    family, model, schedule = _load_model(config, ranks, loader, start.checkpoint)
    weights = weights_of(family, adapters=config.lora_rank is not None, scheduler=schedule.config)
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
        saved_tensors.load_saved_optimizer(start.checkpoint, optimizer)
    is_placed = ranks.world_size == 1 or config.is_sharded(ranks.world_size)
    training = Training(
        config=config,
        family=family,
        model=model if is_placed else replicated(model, family, config, device),
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
    config: TrainConfig, ranks: TrainRanks, loader: Loader, resumed: Path | None
) -> tuple[Family, nn.Module, ModelSchedule]:
    """Load the model and its noise schedule, and add adapters; those of a `resumed` checkpoint, which will fill them."""
    store, device = loader.shares[0].store, loader.device  # all stores have the encoders of the first
    shard_ranks_of(config, ranks)  # refused before weights are read
    refuse_combinations(config, ranks.world_size)
    find_optimizer(config)  # a missing library is told before the model is loaded
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
    schedule = _schedule_of(config, folder, family, device)
    if config.lora_rank is not None:
        layers = None  # in an older version's checkpoint, those of another default
        if resumed is not None:
            with saved_tensors.of_this_model(resumed):
                layers = Adapters(part=family.folder, pipeline=family.lora_pipeline).layers(resumed)
        add_adapters(model, family, config, layers)
        if config.lora_from is not None and resumed is None:
            from bucketline.train.outputs.lora_file import start_from

            start_from(config.lora_from, model, family.lora_pipeline)
    if config.precision is Precision.FP8:
        from bucketline.train.lowbit.float8 import use_float8

        log.info("%d linear layers compute in 8-bit floats", use_float8(model))
    if isinstance(config.base, Base):
        from bucketline.train.lowbit.frozen_base import quantise_base

        quantise_base(model, config.base, device)
    return family, model, schedule


def _schedule_of(config: TrainConfig, folder: Path, family: Family, device: torch.device) -> ModelSchedule:
    """Return the model's noise schedule, which the run's options suit."""
    schedule = load_schedule(
        folder,
        device,
        objective=config.objective,
        shift=config.shift,
        patch_size=family.patch_size,
        published=family.scheduler,
        levels=family.noise_levels(read_index(folder)),
    )
    if config.image_guidance is not None and config.image_guidance > family.no_guidance and not family.is_guidable:
        raise UsageError(
            f"image_guidance is {config.image_guidance}, and {family.pipelines[0]} guides by a second model, which is not "
            "trained; leave it out: images are drawn without guidance"
        )
    of_a_flow = config.loss_weight.name is not Weighting.MIN_SNR
    if config.loss_weight.name is not Weighting.NONE and of_a_flow is not (schedule.objective is Objective.FLOW):
        others = "min-snr:GAMMA" if of_a_flow else "cosmap, sigma-sqrt or sigma-squared"
        raise UsageError(f"--loss-weight is {config.loss_weight}, and the objective is {schedule.objective}; use {others}")
    if config.noise_offset and schedule.objective is Objective.FLOW:
        raise UsageError(
            f"--noise-offset is {config.noise_offset}, and the objective is a flow, which ends in plain noise: leave it out"
        )
    return schedule


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


def left_open(given: TrainConfig, training: Training, loader: Loader) -> str:
    """Return the options that a run was `given` no value for and that are derived, as it has them, each with its reason."""
    config, compiled = training.config, training.prep.compiled
    on_gpu = loader.device.type == "cuda"
    name = "a GPU" if on_gpu else "a CPU"
    found: dict[str, tuple[object, str]] = {}
    if given.objective is None:
        found["--objective"] = training.prep.objective, "the model's scheduler"
    if given.precision is Precision.AUTO:
        without = " without bf16" if on_gpu and config.precision is Precision.FP32 else ""
        found["--precision"] = config.precision, f"{name}{without}"
    if given.compile is Compile.AUTO:
        found["--compile"] = "on" if compiled else "off", name
    if given.learning_rate is None:
        found["--learning-rate"] = f"{config.learning_rate:g}", f"{config.optimizer}'s"
    if config.lora_rank is not None and given.lora_alpha is None and given.lora_from is None:
        found["--lora-alpha"] = config.lora_rank, "the rank"
    if given.window is None and loader.config.window:
        found["--window"] = loader.config.window, "what the cache of a URL holds"
    return "left open: " + ", ".join(f"{option} {value} ({why})" for option, (value, why) in found.items()) if found else ""


def tell_assumptions(start: Start, given: TrainConfig, training: Training, loader: Loader, say: Callable[[str], None]) -> None:
    """Print what was not `given` to a run; warn of a start at random, a new plan, changes by a resume, small buckets."""
    config = training.config
    if config.caption_dropout and not training.family.is_guidable:
        log.warning(
            "--caption-dropout is %g, and %s guides by a second model, which is not trained and sees no text: what this one "
            "learns for the empty caption is never a negative prompt there; leave it out, unless captions are to count less",
            *(config.caption_dropout, training.family.pipelines[0]),
        )
    if start.state is None and (said := left_open(given, training, loader)):
        say(said)
    if (small := loader.plan.small_buckets(can_drop=False)) is not None:
        log.warning("%s", small)
    if start.state is None:
        if config.model.is_dir() and not weight_files(config.model / training.family.folder):
            fits = "; the adapters fit only this random base, of this seed, and no published model" if config.lora_rank else ""
            log.warning(
                "%s has a configuration but no weights: the model starts at random, from --seed %d%s",
                *(config.model, config.seed, fits),
            )
        return
    if config.new_plan:
        before, now = (
            ", ".join(f"{store.path} generation {store.generation}" for store in stores)
            for stores in (start.state.stores, map(StoreId.of, loader.shares))
        )
        log.warning(
            "--new-plan: %s was planned on %s; weights, averages and optimizer continue from step %d in a new order, on %s",
            start.checkpoint,
            before,
            start.steps_done,
            now,
        )
    if start.state.config.get("decaying") == "matrices":
        log.warning("--decaying was matrices before, which is no longer an option: biases and norms decay as well now")
    present = config_as_json(config)
    told = {*options_on_resume(TrainConfig, OnResume.WARN)} - (set() if training.family.is_told_guidance else {"guidance"})
    for name, value in start.state.config.items():
        if name in told and present[name] != value:
            log.warning("--%s was %s before and is now %s", name.replace("_", "-"), value, present[name])


def scale_of(config: TrainConfig, ranks: TrainRanks, device: torch.device) -> Scale:
    """Return the scale of a run's throughput, without buckets yet; log why it has no MFU."""
    peak = None
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        if config.precision is not Precision.BF16:
            log.warning("no MFU: it is relative to the bf16 peak, and --precision is %s", config.precision)
        elif (peak := peak_flops(name)) is None:
            log.warning("no MFU: the bf16 peak of %s is unknown", name)
    return Scale(num_devices=ranks.world_size, peak_flops=peak)


def count_work(training: Training, ranks: TrainRanks, loader: Loader, say: Callable[[str], None], scale: Scale) -> None:
    """Compile for every bucket before timing starts, and tell `say`; on a GPU, also count the FLOPs of a step per bucket.

    Buckets that the scale has, from a generation before, are left out, and the others are added there. The first rank of each
    machine compiles a bucket first: the others find its kernels in inductor's cache. Sharded ranks need each other, so they
    compile at the same time, with their share of the cores.
    """
    config, compiled, on_gpu = training.config, training.prep.compiled, loader.device.type == "cuda"
    scale.samples.update({bucket.name: bucket.global_batch for bucket in loader.plan.buckets})
    shapes = {one.name: (loader.config.rows_of(one), *one.spec.column(LATENT).shape) for one in loader.rows.buckets()}
    trained, validated = (
        [bucket for bucket in loader.rows.buckets(split) if scale.shapes.get(bucket.name) != shapes[bucket.name]]
        for split in ("train", "val")
    )
    if not (compiled or on_gpu) or not (trained or validated):
        return
    scale.shapes.update(shapes)
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
        scale.flops.update({name: config.accumulation * ranks.world_size * each for name, each in flops.items()})
