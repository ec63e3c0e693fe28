"""What one training run is asked to do: the command line is derived from this one dataclass."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal

import tyro

from bucketline.errors import UsageError
from bucketline.train.objectives import Objective, TimestepSampling


class Precision(StrEnum):
    """What the model computes in; weights that are trained are 32-bit either way."""

    FP32 = "fp32"
    BF16 = "bf16"


class Compile(StrEnum):
    """Whether the model goes through torch.compile."""

    AUTO = "auto"
    ON = "on"
    OFF = "off"


class Sharding(StrEnum):
    """How several processes hold the model."""

    DDP = "ddp"
    FSDP = "fsdp"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """Train a latent-diffusion model on the batches of a store.

    Example: torchrun train/main.py --store photos.store --model sd15 --output-dir runs/a --batch-size 8 --max-steps 1000
    """

    store: tuple[Path, ...]
    """A store to train on, as `ingest pack` made it. Given more than once, all are read in one order, if they were made
    alike, by the same encoders and rules; `photos.store:3` has its rows read three times a pass."""
    model: Path
    """Model folder in diffusers' layout: unet/ or transformer/ (without weights it starts at random), which decides the family,
    scheduler/, and vae/ for the pictures."""
    output_dir: Path
    """Where the run goes: metrics.jsonl, status.json, config.json, README.md, checkpoints/, loss.png, pictures.png."""
    max_steps: int
    """Optimizer steps in all, those before a resume included."""
    batch_size: int | None = None
    """Samples of one rank in one forward pass; the global batch is ranks x this x --accum. One of this, --batch-pixels and
    --batch-tokens is given."""
    batch_pixels: int | None = None
    """Instead: as many samples of a bucket as have at most so many pixels, height x width x samples; at least one."""
    batch_tokens: int | None = None
    """Instead: as many samples of a bucket as have at most so many latent positions, h x w x samples."""
    batch_multiple: int = 1
    """What the samples by --batch-pixels or --batch-tokens are rounded down to a multiple of."""
    accum: int = 1
    """Forward passes that one optimizer step accumulates, all of them from one bucket."""
    seed: int = 0
    """Decides the order of samples, every noise and timestep, and a start at random."""
    log_every: int = 10
    """Optimizer steps in one window, that is in one line of metrics.jsonl."""
    checkpoint_every: int | None = None
    """Optimizer steps between checkpoints; None: only the one that every run ends with."""
    keep_checkpoints: int = 2
    """How many of the newest checkpoints stay."""
    resume: bool = False
    """Go on from the newest whole checkpoint in --output-dir, on the generation of the store that it was planned on."""
    new_plan: bool = False
    """With --resume: take the stores as they are now, with a new order; weights, averages and optimizer are kept."""
    learning_rate: float = 1e-4
    """AdamW's learning rate after the warm-up; it stays constant, so that a longer second run continues the first."""
    warmup_steps: int = 100
    """Steps over which the learning rate rises from 0."""
    weight_decay: float = 0.01
    """AdamW's decoupled weight decay."""
    clip_norm: float | None = 1.0
    """Gradients are scaled down to this norm where theirs is larger; None: never."""
    ema_decay: float = 0.9999
    """Share of the old average kept at each step; after s steps at most (1 + s) / (10 + s), so that short runs make sense."""
    caption_dropout: float = 0.0
    """Probability that a sample's caption is replaced by the empty one."""
    precision: Precision = Precision.FP32
    """What the model computes in: fp32, or bf16 by autocast over 32-bit weights; weights that adapters freeze are bf16 then."""
    compile: Compile = Compile.AUTO
    """torch.compile of the model's blocks and of the noising, every bucket before the first step; auto: on a GPU only."""
    validate_every: int | None = None
    """Optimizer steps between validations on the held-out samples; None: before the first step and after the last."""
    val_timesteps: int = 8
    """How many evenly spaced timesteps every held-out sample is validated at."""
    num_pictures: int = 4
    """Pictures drawn at the end from stored captions of held-out samples (of training samples where there are none)."""
    picture_steps: int = 50
    """DDIM steps for a picture, of a flow Euler steps."""
    pictures_every: int | None = None
    """Optimizer steps between grids of pictures in pictures/; None: only the one at the end."""
    sharding: Sharding = Sharding.DDP
    """What several processes do: ddp, each holds everything; fsdp, each holds a part, where the whole does not fit."""
    shuffle: Literal["full", "blocks", "none"] = "full"
    """How samples are mixed: full; blocks, which keeps reads together for slow media; none, as they are stored."""
    service: str = "none"
    """Who reads the stores: none, threads of this process; auto, a process of each rank's own; or the socket of a
    `loader serve`, for all ranks of a machine. The batches are the same."""
    threads: int = 1
    """Threads that fill batches ahead."""
    prefetch_mib: int = 256
    """Batches filled ahead, in MiB for each rank; at least two batches are."""
    verify: bool = False
    """Hold every row and caption that is read against its checksum; the first bad one ends the run."""
    track_with: tuple[str, ...] = ()
    """A tracker of Accelerate that gets the lines of metrics.jsonl too, such as tensorboard or wandb; may be repeated."""

    # what is learnt, and how
    preset: str | None = None
    """Values for a kind of model, each of which any option given beside it overrides: sd, sd-lora, sdxl, sdxl-lora, dit,
    pixart, pixart-lora, sd3, sd3-lora, flux, flux-lora. The run's config.json has what came of it."""
    objective: Objective | None = None
    """What the model predicts: the noise, v, or a flow's velocity; None: what the model's scheduler says."""
    timestep_sampling: TimestepSampling = TimestepSampling.UNIFORM
    """How often which timestep is trained: each as often, or by the logistic function of a normal number."""
    logit_mean: float = 0.0
    """Mean of that normal number; above 0 there is more noise."""
    logit_std: float = 1.0
    """Its standard deviation."""
    shift: float | None = None
    """How far a flow's timesteps are shifted towards noise, 1 not at all; None: what the scheduler says, for each size."""
    min_snr_gamma: float | None = None
    """Hold down what timesteps of little noise count: an error in the picture counts min(SNR, this), 5 as published, of epsilon
    and v alone. None: the errors of all timesteps count alike."""
    flip: float = 0.0
    """Probability that a sample is its mirror image, of a store packed with --flip."""
    lora_rank: int | None = None
    """Train low-rank adapters of this rank, and nothing else; None: the whole model."""
    lora_alpha: float | None = None
    """The adapters' output is scaled by this ÷ the rank; None: by 1."""
    lora_targets: str | None = None
    """Ends of the names of the layers that get an adapter, with commas between; None: the family's attention, and more."""
    gradient_checkpointing: Annotated[bool, tyro.conf.FlagConversionOff] = False
    """Compute activations again in the backward pass instead of keeping them: less memory, about a third more time."""

    def __post_init__(self) -> None:
        """Refuse what makes no sense.

        Raises:
            UsageError: naming the option, what was given and what is expected.
        """
        if not self.store:
            raise UsageError("no --store is given, expected one or more")
        for name in (
            *("max_steps", "accum", "batch_multiple", "log_every", "keep_checkpoints"),
            *("val_timesteps", "picture_steps", "threads", "prefetch_mib"),
        ):
            _expect(name, getattr(self, name), at_least=1)
        self._expect_one_size()
        if self.new_plan and not self.resume:
            raise UsageError("--new-plan is given without --resume; a run that starts has a new plan anyway: leave it out")
        for name in ("seed", "warmup_steps", "num_pictures", "learning_rate", "weight_decay"):
            _expect(name, getattr(self, name), at_least=0)
        for name in ("checkpoint_every", "validate_every", "pictures_every"):
            if getattr(self, name) is not None:
                _expect(name, getattr(self, name), at_least=1)
        if self.clip_norm is not None and not (math.isfinite(self.clip_norm) and self.clip_norm > 0):
            raise UsageError(f"--clip-norm is {self.clip_norm}, expected a number above 0, or None to leave gradients alone")
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
                        f"{_option(name)} is {getattr(self, name)}, and no --lora-rank is given; give one, such as 16"
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
                f"the size of a batch is given by {' and '.join(map(_option, given)) or 'nothing'}, "
                f"expected one of {', '.join(map(_option, sizes))}"
            )
        if self.batch_size is not None and self.batch_multiple != 1:
            raise UsageError("--batch-multiple goes with --batch-pixels or --batch-tokens; give the --batch-size wanted")


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def _expect(name: str, value: float, *, at_least: int) -> None:
    if not (math.isfinite(value) and value >= at_least):
        raise UsageError(f"{_option(name)} is {value}, expected {at_least} or more")
