"""What one training run is asked to do: the command line is derived from this one dataclass."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from bucketline.errors import UsageError


class Precision(StrEnum):
    """What the model computes in; the weights are 32-bit either way."""

    FP32 = "fp32"
    BF16 = "bf16"


class Compile(StrEnum):
    """Whether the model goes through torch.compile."""

    AUTO = "auto"
    ON = "on"
    OFF = "off"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """Train a latent-diffusion model on the batches of a store.

    Example: torchrun train/main.py --store photos.store --model sd15 --output-dir runs/a --batch-size 8 --max-steps 1000
    """

    store: tuple[Path, ...]
    """A store to train on, as `ingest pack` made it. Given more than once, all are read in one order, if they were made
    alike, by the same encoders and rules; `photos.store:3` has its rows read three times a pass."""
    model: Path
    """Model folder in diffusers' layout: unet/ (without weights it starts at random), scheduler/, and vae/ for the pictures."""
    output_dir: Path
    """Where the run goes: metrics.jsonl, status.json, checkpoints/, loss.png, pictures.png."""
    batch_size: int
    """Samples of one rank in one forward pass; the global batch is ranks x this x --accum."""
    max_steps: int
    """Optimizer steps in all, those before a resume included."""
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
    """What the model computes in: fp32, or bf16 by autocast over 32-bit weights."""
    compile: Compile = Compile.AUTO
    """torch.compile of the model and of the noising; auto: on a GPU only."""
    validate_every: int | None = None
    """Optimizer steps between validations on the held-out samples; None: before the first step and after the last."""
    val_timesteps: int = 8
    """How many evenly spaced timesteps every held-out sample is validated at."""
    num_pictures: int = 4
    """Pictures drawn at the end from stored captions of held-out samples (of training samples where there are none)."""
    picture_steps: int = 50
    """DDIM steps for a picture."""

    def __post_init__(self) -> None:
        """Refuse what makes no sense.

        Raises:
            UsageError: naming the option, what was given and what is expected.
        """
        if not self.store:
            raise UsageError("no --store is given, expected one or more")
        for name in (
            "batch_size",
            "max_steps",
            "accum",
            "log_every",
            "keep_checkpoints",
            "val_timesteps",
            "picture_steps",
        ):
            _expect(name, getattr(self, name), at_least=1)
        for name in ("seed", "warmup_steps", "num_pictures", "learning_rate", "weight_decay"):
            _expect(name, getattr(self, name), at_least=0)
        for name in ("checkpoint_every", "validate_every"):
            if getattr(self, name) is not None:
                _expect(name, getattr(self, name), at_least=1)
        if self.clip_norm is not None and not (math.isfinite(self.clip_norm) and self.clip_norm > 0):
            raise UsageError(f"--clip-norm is {self.clip_norm}, expected a number above 0, or None to leave gradients alone")
        for name in ("ema_decay", "caption_dropout"):
            value = getattr(self, name)
            if not 0 <= value <= 1:
                raise UsageError(f"{_option(name)} is {value}, expected 0 to 1")


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def _expect(name: str, value: float, *, at_least: int) -> None:
    if not (math.isfinite(value) and value >= at_least):
        raise UsageError(f"{_option(name)} is {value}, expected {at_least} or more")
