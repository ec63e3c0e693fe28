"""The configuration of a training run; the command line is derived from this one dataclass."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal

import tyro

from bucketline.errors import UsageError
from bucketline.train.noise_schedule import Objective, TimestepSampling


class Precision(StrEnum):
    """The precision that the model computes in; trained weights are always 32-bit."""

    FP32 = "fp32"
    BF16 = "bf16"


class Compile(StrEnum):
    """The use of torch.compile."""

    AUTO = "auto"
    ON = "on"
    OFF = "off"


class Sharding(StrEnum):
    """How the model is distributed over several processes."""

    DDP = "ddp"
    FSDP = "fsdp"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """Train a latent-diffusion model on the batches of a store.

    Example: torchrun train/main.py --store photos.store --model sd15 --output-dir runs/a --batch-size 8 --max-steps 1000
    """

    store: tuple[Path, ...]
    """Store to train on, as written by `ingest pack`; `photos.store:3` repeats its rows three times per pass.
    Repeat the option to mix several stores in one order; they must share encoders and packing rules."""
    model: Path
    """Model folder in diffusers' layout: unet/ or transformer/, scheduler/, and vae/ for the images.
    The model's config decides the family; without weights, training starts from a random initialization."""
    output_dir: Path
    """Output folder: metrics.jsonl, status.json, config.json, README.md, checkpoints/, loss.png, images.png and images.json.
    Use a separate folder, never one with images or inside a store."""
    max_steps: int
    """Total optimizer steps, including those before a resume."""
    batch_size: int | None = None
    """Samples per rank and forward pass; the global batch is ranks x this x --accum.
    Set exactly one of --batch-size, --batch-pixels and --batch-tokens."""
    batch_pixels: int | None = None
    """Dynamic batch size: as many samples of a bucket as fit this many pixels (height x width x samples); at least one."""
    batch_tokens: int | None = None
    """Dynamic batch size: as many samples of a bucket as fit this many latent positions (h x w x samples); at least one."""
    batch_multiple: int = 1
    """Round dynamic batch sizes (--batch-pixels, --batch-tokens) down to a multiple of this."""
    accum: int = 1
    """Gradient accumulation: forward passes per optimizer step, all from one bucket."""
    seed: int = 0
    """Seed of the sample order, the noise, the timesteps and a random initialization."""
    log_every: int = 10
    """Optimizer steps per window, that is per line of metrics.jsonl."""
    checkpoint_every: int | None = None
    """Optimizer steps between checkpoints; None: only --checkpoint-minutes and the final checkpoint."""
    checkpoint_minutes: float | None = 30.0
    """Also write a checkpoint when the last one is this many minutes old; None: never."""
    keep_checkpoints: int = 2
    """Number of newest checkpoints to keep."""
    resume: bool = False
    """Resume from the newest complete checkpoint in --output-dir, on the store generation that it was planned on."""
    new_plan: bool = False
    """With --resume: use the current stores in a new order; weights, averages and optimizer are kept."""
    learning_rate: float = 1e-4
    """AdamW learning rate after the warm-up. It stays constant, so that a run can be extended with --resume."""
    warmup_steps: int = 100
    """Steps of linear learning-rate warm-up from 0."""
    weight_decay: float = 0.01
    """Decoupled weight decay of AdamW."""
    clip_norm: float | None = 1.0
    """Clip gradients to this norm; None: no clipping."""
    ema_decay: float = 0.9999
    """EMA decay of the weights, capped at (1 + s) / (10 + s) after s steps so that short runs work too."""
    caption_dropout: float = 0.0
    """Probability of replacing a caption with the empty one."""
    precision: Precision = Precision.FP32
    """Compute precision: fp32, or bf16 autocast over 32-bit weights. With bf16 and LoRA, the frozen weights are bf16 too."""
    compile: Compile = Compile.AUTO
    """Run torch.compile on the model's blocks and the noising, for every bucket before the first step; auto: on GPUs only."""
    validate_every: int | None = None
    """Optimizer steps between validations on the held-out samples; None: before the first step and after the last."""
    val_timesteps: int = 8
    """Evenly spaced timesteps at which every held-out sample is validated."""
    num_images: int = 4
    """Images to generate at the end from stored captions of held-out samples (of training samples if there are none)."""
    image_steps: int = 50
    """Sampler steps per image: DDIM, or Euler for flow models."""
    images_every: int | None = None
    """Optimizer steps between image grids in images/; None: only at the end."""
    sharding: Sharding = Sharding.DDP
    """Multi-process strategy: ddp keeps a full copy per process; fsdp shards the model, for models too large for one GPU."""
    shuffle: Literal["full", "blocks", "none"] = "full"
    """Shuffle mode: full; blocks, which keeps reads close together for slow media; none, the stored order."""
    service: str = "none"
    """Reader of the stores: none (threads of this process), auto (a process per rank), or the socket of a `loader serve`.
    All ranks of a machine share that socket; the batches are identical in each case."""
    threads: int = 1
    """Prefetch threads."""
    prefetch_mib: int = 256
    """Prefetch buffer in MiB per rank; at least two batches."""
    verify: bool = False
    """Verify the checksum of every row and caption that is read; the first mismatch ends the run."""
    track_with: tuple[str, ...] = ()
    """Accelerate tracker that also receives the lines of metrics.jsonl, such as tensorboard or wandb; may be repeated."""

    # the objective and the adapters
    preset: str | None = None
    """Defaults for a model family: sd, sd-lora, sdxl, sdxl-lora, dit, pixart, pixart-lora, sd3, sd3-lora, flux, flux-lora.
    Explicit options override them. The run's config.json has the resolved values."""
    objective: Objective | None = None
    """Prediction target: the noise, v, or the velocity of a flow; None: taken from the model's scheduler config."""
    timestep_sampling: TimestepSampling = TimestepSampling.UNIFORM
    """Distribution of training timesteps: uniform, or logit-normal (Esser et al. 2024)."""
    logit_mean: float = 0.0
    """Mean of the logit-normal distribution; above 0 favours noisier timesteps."""
    logit_std: float = 1.0
    """Standard deviation of the logit-normal distribution."""
    shift: float | None = None
    """Shift of flow timesteps towards noise; 1: no shift; None: the scheduler config's shift for each size."""
    min_snr_gamma: float | None = None
    """Min-SNR-gamma loss weighting (Hang et al. 2023; 5 in the paper), epsilon and v objectives only; None: no weighting."""
    flip: float = 0.0
    """Probability of a horizontal flip; requires a store packed with --flip."""
    lora_rank: int | None = None
    """Train only LoRA adapters of this rank; None: train the full model."""
    lora_alpha: float | None = None
    """LoRA alpha: the adapters' output is scaled by alpha ÷ rank; None: alpha = rank."""
    lora_targets: str | None = None
    """Comma-separated suffixes of the layers that get an adapter; None: the family's attention layers and a few more."""
    gradient_checkpointing: Annotated[bool, tyro.conf.FlagConversionOff] = False
    """Recompute activations in the backward pass instead of storing them: less memory, about a third more time."""

    def __post_init__(self) -> None:
        """Validate the options.

        Raises:
            UsageError: if an option is invalid; the message names the option, its value and what is expected.
        """
        if not self.store:
            raise UsageError("no --store is given, expected one or more")
        for name in (
            *("max_steps", "accum", "batch_multiple", "log_every", "keep_checkpoints"),
            *("val_timesteps", "image_steps", "threads", "prefetch_mib"),
        ):
            _expect(name, getattr(self, name), at_least=1)
        self._expect_one_size()
        if self.new_plan and not self.resume:
            raise UsageError("--new-plan requires --resume; a new run has a new plan anyway: leave it out")
        for name in ("seed", "warmup_steps", "num_images", "learning_rate", "weight_decay"):
            _expect(name, getattr(self, name), at_least=0)
        for name in ("checkpoint_every", "validate_every", "images_every"):
            if getattr(self, name) is not None:
                _expect(name, getattr(self, name), at_least=1)
        if self.clip_norm is not None and not (math.isfinite(self.clip_norm) and self.clip_norm > 0):
            raise UsageError(f"--clip-norm is {self.clip_norm}, expected a number above 0, or None for no clipping")
        if self.checkpoint_minutes is not None and not (math.isfinite(self.checkpoint_minutes) and self.checkpoint_minutes > 0):
            raise UsageError(f"--checkpoint-minutes is {self.checkpoint_minutes}, expected a number above 0, or None for never")
        for name in ("ema_decay", "caption_dropout", "flip"):
            value = getattr(self, name)
            if not 0 <= value <= 1:
                raise UsageError(f"{_option(name)} is {value}, expected 0 to 1")
        self._check_learning()

    def _check_learning(self) -> None:
        for name in ("logit_std", "shift", "min_snr_gamma", "lora_alpha"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise UsageError(f"{_option(name)} is {value}, expected a number above 0")
        if not math.isfinite(self.logit_mean):
            raise UsageError(f"--logit-mean is {self.logit_mean}, expected a number")
        if self.lora_rank is None:
            for name in ("lora_alpha", "lora_targets"):
                if getattr(self, name) is not None:
                    raise UsageError(
                        f"{_option(name)} is {getattr(self, name)}, but --lora-rank is not given; add one, such as 16"
                    )
        else:
            _expect("lora_rank", self.lora_rank, at_least=1)

    def _expect_one_size(self) -> None:
        sizes = {name: getattr(self, name) for name in ("batch_size", "batch_pixels", "batch_tokens")}
        given = {name: value for name, value in sizes.items() if value is not None}
        for name, value in given.items():
            _expect(name, value, at_least=1)
        if len(given) != 1:
            raise UsageError(
                f"expected exactly one of {', '.join(map(_option, sizes))}, "
                f"got {' and '.join(map(_option, given)) or 'none'}: set the batch size by one"
            )
        if self.batch_size is not None and self.batch_multiple != 1:
            raise UsageError("--batch-multiple is only for --batch-pixels or --batch-tokens; set --batch-size itself")


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def _expect(name: str, value: float, *, at_least: int) -> None:
    if not (math.isfinite(value) and value >= at_least):
        raise UsageError(f"{_option(name)} is {value}, expected {at_least} or more")
