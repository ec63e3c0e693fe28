"""Options of other trainers, of torchrun and of older versions, each with the answer to a command line that has it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bucketline.dtype_names import dtype_name
from bucketline.loader.commands.batch_options import BatchSize
from bucketline.loader.config import NOT_OPTIONS, SIZES
from bucketline.option_value import value_fields
from bucketline.train.values import SaveTimes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from bucketline.typed_json import Json

_OURS = {
    # diffusers' training scripts, kohya's sd-scripts, OneTrainer, ai-toolkit, SimpleTuner
    "learning-rate": ("lr", "unet-lr", "base-lr"),
    "model": ("pretrained-model-name-or-path", "base-model-name", "pretrained-transformer", "name-or-path", "checkpoint"),
    "batch": ("train-batch-size", "micro-batch-size"),
    "max-steps": ("max-train-steps", "steps", "iterations"),
    "epochs": ("num-train-epochs", "max-train-epochs", "num-epochs"),
    "accumulation": ("gradient-accumulation-steps", "gradient-accumulation", "accum"),
    "precision": ("mixed-precision", "train-dtype", "amp"),
    "lora-rank": ("rank", "network-dim", "lora-dim", "lora-r"),
    "lora-alpha": ("network-alpha",),
    "lora-targets": ("lora-layers", "network-args", "target-modules", "layer-filter"),
    "lora-dropout": ("network-dropout",),
    "lora-from": ("network-weights", "init-lora"),
    "warmup-steps": ("lr-warmup-steps", "learning-rate-warmup-steps"),
    "lr-schedule": ("lr-scheduler", "lr-scheduler-type", "scheduler"),
    "weight-decay": ("adam-weight-decay", "decay"),
    "clip-norm": ("max-grad-norm", "clip-grad-norm", "gradient-clipping"),
    "optimizer": ("optimizer-type", "optim"),
    "ema": ("use-ema", "ema-decay"),
    "objective": ("prediction-type", "v-parameterization", "parameterization"),
    "shift": ("discrete-flow-shift", "flow-shift", "timestep-shift"),
    "timesteps": ("timestep-sampling", "timestep-type"),
    "loss-weight": ("flow-weighting",),
    "caption-dropout": ("proportion-empty-prompts", "caption-dropout-rate", "caption-dropout-probability", "uncond-p"),
    "offload-blocks": ("blocks-to-swap", "block-swap", "layer-offload-fraction"),
    "base": ("fp8-base", "quantize", "quantize-base", "base-model-precision", "bnb-4bit"),
    "weights": ("full-bf16", "full-fp16"),
    "compile": ("torch-compile", "use-compile", "dynamo-backend"),
    "save-every": ("checkpointing-steps", "save-every-n-steps", "checkpoint-step-interval", "checkpoint-every"),
    "keep": ("checkpoints-total-limit", "save-last-n-steps", "max-step-saves-to-keep", "keep-checkpoints"),
    "resume": ("resume-from-checkpoint", "continue-last-backup"),
    "output-dir": ("output-folder", "training-folder", "logging-dir", "save-dir"),
    "push-to-hub": ("hub-model-id", "huggingface-repo-id"),
    "validate-every": ("validation-steps", "validation-epochs", "eval-steps"),
    "images-every": ("sample-every-n-steps", "sample-every", "pictures-every"),
    "image-prompts": ("validation-prompt", "validation-prompts", "sample-prompts", "prompts"),
    "num-images": ("num-validation-images", "num-pictures"),
    "track-with": ("report-to", "log-with"),
    "log-every": ("logging-steps",),
    "sharding": ("fsdp", "strategy", "zero-stage"),
}
_IN_FILE = {
    "dora": ("use-dora", "dora-wd"),
    "guidance": ("guidance-scale",),
    "export_dtype": ("save-precision", "save-dtype", "output-dtype"),
    "image_steps": ("num-inference-steps", "sample-steps", "picture-steps"),
    "image_guidance": ("validation-guidance", "picture-guidance"),
    "threads": ("dataloader-num-workers", "max-data-loader-n-workers", "num-workers"),
    "keep_gathered": ("reshard-after-forward",),
    "prefetch_bytes": ("prefetch-mib",),
}
"""Other programs' names of what only a run file sets."""
_ELSEWHERE = {
    "name a preset or a run file without an option: `bucketline train sdxl-lora …`, `bucketline train run.toml`": (
        *("preset", "config", "config-file", "config-path"),
    ),
    "the sizes are the store's, packed by `ingest pack --grid`": (
        *("resolution", "size", "width", "height", "enable-bucket", "min-bucket-reso", "max-bucket-reso", "bucket-reso-steps"),
        *("bucket-no-upscale", "aspect-ratio-bucketing"),
    ),
    "images become a store by `ingest pack IMAGES STORE --model MODEL`, which `--store` names": (
        *("train-data-dir", "instance-data-dir", "dataset-name", "dataset-config", "dataset", "data-dir", "image-column"),
        *("in-json", "data-root"),
    ),
    "captions are read by `ingest pack`, which has options for them (`ingest pack --help source`)": (
        *("caption-column", "caption-extension", "instance-prompt", "shuffle-caption", "keep-tokens", "trigger-word"),
        *("default-caption", "max-sequence-length", "max-token-length", "clip-skip"),
    ),
    "the crop is the store's, packed by `ingest pack --crop`": ("center-crop", "random-crop", "image-interpolation-mode"),
    "pack the store with `ingest pack --flip`, and train with `--flip 0.5`": ("random-flip", "flip-aug", "flip-x"),
    "the store is this cache: latents and text are encoded once, by `ingest pack`": (
        *("cache-latents", "cache-latents-to-disk", "cache-text-encoder-outputs", "vae-batch-size", "vae"),
        *("cache-text-encoder-outputs-to-disk", "latent-caching", "cache-dir"),
    ),
    "text encoders are not trained, since the store has what they give": (
        *("train-text-encoder", "text-encoder-lr", "te-lr", "train-text-encoder-ti", "stop-text-encoder-training"),
    ),
    "prior preservation is a second --store of class images, with its weight: --store class.store@0.5": (
        *("with-prior-preservation", "class-data-dir", "class-prompt", "prior-loss-weight", "num-class-images", "reg-data-dir"),
    ),
    "say --recompute 1": ("gradient-checkpointing", "activation-checkpointing", "no-gradient-checkpointing"),
    "--recompute is the share to recompute: 1 less the share to store": ("activation-memory",),
    "say --timesteps logit-normal or mode, or --loss-weight sigma-sqrt or cosmap": ("weighting-scheme",),
    "it is in --timesteps logit-normal:MEAN,STD, whose mean has the other sign than in diffusers' scripts": (
        *("logit-mean", "logit-std"),
    ),
    "it is in --timesteps mode:SCALE": ("mode-scale",),
    "it is in --timestep-range LOW:HIGH, shares of 0 to 1": (
        *("timestep-min", "timestep-max", "min-timestep", "max-timestep", "min-noising-strength", "max-noising-strength"),
    ),
    "say --loss-weight min-snr:5": ("min-snr-gamma", "snr-gamma", "min-snr"),
    "it is in --lr-schedule, as in cosine@20000": ("schedule-steps", "lr-scheduler-num-steps"),
    "it is in --lr-schedule, as in cosine:0.1": ("lr-floor", "lr-scheduler-min-lr-ratio", "min-lr-ratio"),
    "it is in --lr-schedule, as in wsd:500": ("decay-steps", "lr-decay-steps"),
    "it is in --lr-schedule, as in polynomial:2": ("lr-power",),
    "it is in --lr-schedule, as in cosine-restarts:3": ("lr-num-cycles", "lr-scheduler-num-cycles"),
    "all trained weights decay, as in diffusers' scripts; --weight-decay 0 turns it off": ("decaying",),
    "they are --betas BETA1,BETA2[,EPS]": ("adam-beta1", "adam-beta2", "adam-epsilon", "optimizer-betas"),
    "say --loss-weight sigma-squared": ("precondition-outputs",),
    "use --precision bf16, or fp32 on a GPU that lacks bf16: products of float16 would need a scaled loss": (
        *("fp16", "use-fp16"),
    ),
    "it is in --ema DECAY[:device|cpu][:EVERY], such as 0.9999:cpu:10": ("ema-every",),
    "say --optimizer adamw-8bit": ("use-8bit-adam", "use-8bit-adamw"),
    "say --optimizer prodigy": ("use-prodigy",),
    "give the last steps' export by --export-every, or `bucketline export-model RUN OUTPUT` afterwards": (
        *("save-model-as", "output-name", "save-every-n-epochs"),
    ),
    "the weight follows the store: --store photos.store@0.5": ("store-weight",),
    "say --save-every 30m, or with steps 1000,30m": ("checkpoint-minutes", "save-every-minutes"),
    "say --sharding fsdp:RANKS, or fsdp:machine": ("shard-ranks",),
    "say --follow=ROWS": ("wait-rows",),
    "say --push-to-hub user/name:exports": ("push-exports",),
    "attention is torch's own, which is as fast": (
        *("enable-xformers-memory-efficient-attention", "xformers", "sdpa", "mem-eff-attn", "flash-attention"),
    ),
    "products in TF32 are on wherever --precision allows them": ("allow-tf32",),
    "the token is read from HF_TOKEN, or what `hf auth login` has stored": ("hub-token", "huggingface-token"),
    "choose a GPU by CUDA_VISIBLE_DEVICES; the run takes the one it sees, or the CPU": ("device", "gpu", "gpu-ids", "cuda"),
    "several processes are started by `torchrun --nproc_per_node N -m bucketline.train …`": (
        *("nproc-per-node", "num-processes", "nnodes", "node-rank", "num-gpus", "multi-gpu", "local-rank", "master-addr"),
        *("master-port", "rdzv-endpoint", "rdzv-backend", "num-machines", "machine-rank"),
    ),
}
ELSEWHERE = {
    **NOT_OPTIONS,
    **{f"--{other}": f"here it is --{ours}" for ours, others in _OURS.items() for other in others},
    **{f"--{other}": f"here it is {ours}, in a run file" for ours, others in _IN_FILE.items() for other in others},
    **{f"--{other}": answer for answer, others in _ELSEWHERE.items() for other in others},
}
"""The answer to an option that the trainer does not have, by its name with hyphens."""

_RENAMED = {
    "accum": "accumulation",
    "keep_checkpoints": "keep",
    "num_pictures": "num_images",
    "picture_steps": "image_steps",
    "pictures_every": "images_every",
}

_BEFORE: dict[str, Json] = {"guidance": 3.5, "weights": "fp32", "optimizer": "adamw"}
"""Values that were fixed before there was an option."""
_USUAL_MINUTES = 30.0  # between checkpoints, also if a run was recorded before that was an option

_PARTS_BEFORE = (
    *("ema_decay", "ema_every", "timestep_sampling", "logit_mean", "logit_std", "mode_scale", "timestep_min", "timestep_max"),
    *("min_snr_gamma", "flow_weighting", "lr_floor", "schedule_steps", "decay_steps", "checkpoint_every", "checkpoint_minutes"),
    *("shard_ranks", "wait_rows", "follow_schedule", "push_exports", "store_weight", *SIZES, "batch_multiple"),
)


def translated(recorded: Mapping[str, Json], config: type) -> dict[str, Json]:
    """Return the options that a run or its checkpoint has recorded, also of an earlier version, as this one spells them.

    `config`: the dataclass of the options.

    >>> from bucketline.train.config import TrainConfig
    >>> old = {"accum": 2, "batch_size": None, "batch_pixels": 1 << 22, "batch_multiple": 8, "activation_memory": 0.75}
    >>> translated(old, TrainConfig)
    {'guidance': 3.5, 'weights': 'fp32', 'optimizer': 'adamw', 'accumulation': 2, 'recompute': 0.25, 'batch': '4MP/8'}
    """
    options = _BEFORE | {_RENAMED.get(name, name): value for name, value in recorded.items()}
    stored, is_recomputed = options.pop("activation_memory", None), options.pop("gradient_checkpointing", False)
    if isinstance(stored, float | int):
        options["recompute"] = 1.0 if is_recomputed else 1.0 - stored
    merged = {**dict(_merged(options)), **dict(_merged_of_objective(options))}
    options = {name: value for name, value in options.items() if name not in _PARTS_BEFORE} | merged
    kinds = value_fields(config)
    spelt = {name: value for name, value in options.items() if name in kinds and isinstance(value, str | int | float)}
    return {**options, **{name: str(kinds[name].parse(str(value), name)) for name, value in spelt.items()}}


def _merged(options: Mapping[str, Json]) -> Iterator[tuple[str, Json]]:
    """Yield the options that were several, or had another form, each as it is now."""
    old: Callable[..., Any] = options.get
    if sizes := {name: options[name] for name in (*SIZES, "batch_multiple") if name in options}:
        yield "batch", str(BatchSize(**sizes))  # type: ignore[arg-type]
    if "checkpoint_every" in options:
        minutes = old("checkpoint_minutes", _USUAL_MINUTES)
        steps, seconds = old("checkpoint_every"), None if minutes is None else 60.0 * minutes
        yield "save_every", str(SaveTimes(steps=steps, seconds=seconds)) if steps or seconds else None
    if old("sharding") == "hsdp":
        yield "sharding", f"fsdp:{old('shard_ranks') or 'machine'}"
    if isinstance(follows := old("follow"), bool):
        yield "follow", (old("wait_rows") or 1) if follows else None
    if old("push_exports"):
        yield "push_to_hub", f"{old('push_to_hub')}:exports"
    if weights := old("store_weight"):
        yield "store", [f"{store}@{weight:g}" for store, weight in zip(old("store"), weights, strict=False)]
    if isinstance(dtype := old("export_dtype"), str):
        yield "export_dtype", dtype_name(dtype)


def _merged_of_objective(options: Mapping[str, Json]) -> Iterator[tuple[str, str]]:
    """Yield the options of objective and optimizer that were several, each as one word."""
    old = options.get
    if "ema_decay" in options:
        place = old("ema", "device")
        yield "ema", "off" if place == "off" else f"{old('ema_decay')}:{place}:{old('ema_every', 1)}"
    if "timestep_sampling" in options:
        numbers = {"logit_normal": f":{old('logit_mean')},{old('logit_std')}", "mode": f":{old('mode_scale')}"}
        name = str(old("timestep_sampling"))
        yield "timesteps", name.replace("_", "-") + numbers.get(name, "")
    if "timestep_min" in options:
        yield "timestep_range", f"{old('timestep_min')}:{old('timestep_max')}"
    if "min_snr_gamma" in options:
        gamma, weighting = old("min_snr_gamma"), str(old("flow_weighting") or "none")
        yield "loss_weight", weighting.replace("_", "-") if gamma is None else f"min-snr:{gamma}"
    if "lr_floor" in options and (name := str(old("lr_schedule", "constant"))) != "constant":
        floor, end, steps = old("lr_floor"), old("schedule_steps"), old("decay_steps")
        if name == "wsd" and floor and not steps:
            steps = -(-int(str(end)) // 5)
        yield "lr_schedule", name + f":{steps}" * bool(steps) + f":{floor}" * bool(floor) + f"@{end}" * bool(end)
