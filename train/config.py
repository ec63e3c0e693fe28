"""The configuration of a training run and the values of its options; the command line is derived from this one dataclass."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from bucketline.command_line import parse_command
from bucketline.dtype_names import WeightFormat
from bucketline.errors import UsageError
from bucketline.files.paths import redacted
from bucketline.loader.commands.batch_options import BatchOptions, BatchSize
from bucketline.loader.config import ReadOptions
from bucketline.option_value import (
    A_SHARE,
    ABOVE_0,
    IN_BYTES,
    ONE_OR_MORE,
    RESUME_FIXED,
    RESUME_FREE,
    OptionValue,
)
from bucketline.options import COMMAND_LINE_ONLY, ONLY_IN_FILE, Arg, Positional, Repeated, asked_for_help, parse_fields
from bucketline.store.remote.urls import is_url
from bucketline.train.run_file import files_of, preset_names

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from bucketline.loader.service.sockets import ServiceAddress


# ---------------------------------------------------------------------------------------------------------------------- values
# The values of training's options that have several parts: each is a word on the command line and in a file.

MAX_MODE_SCALE = 1.75  # 2 / (π - 2), rounded down: beyond, two numbers would be the same timestep
_BELOW_1 = "0 to below 1", lambda value: 0 <= value < 1

EmaPlace = StrEnum("EmaPlace", ["DEVICE", "CPU"])
"""The place of the moving average of the weights."""


@dataclass(frozen=True, kw_only=True)
class Timesteps(OptionValue):
    """A distribution of training timesteps. Source: Esser et al. 2024 (arXiv 2403.03206), equations 19 and 20."""

    FORMS = ("uniform", "logit-normal[:MEAN,STD]", "mode[:SCALE]")
    EXAMPLE = "logit-normal:0,1"
    LIMITS: ClassVar = {"std": ABOVE_0, "scale": (f"-1 to {MAX_MODE_SCALE}", lambda value: -1 <= value <= MAX_MODE_SCALE)}

    name: Literal["uniform", "logit-normal", "mode"] = "uniform"
    mean: float = 0.0  # above 0 favours noisier timesteps
    std: float = 1.0
    scale: float = 1.29  # above 0 favours timesteps in the middle, below 0 those at both ends


@dataclass(frozen=True, kw_only=True)
class TimestepRange(OptionValue):
    """The lowest and highest timestep to train, as shares of all; 0 is the least noise."""

    FORMS = ("LOW:HIGH",)
    EXAMPLE = "0.2:0.9"
    LIMITS: ClassVar = {"low": A_SHARE, "high": A_SHARE}

    low: float = 0.0
    high: float = 1.0

    def fault(self) -> str | None:
        """Return that the range is empty, if it is."""
        return None if self.low < self.high else f"low is {self.low}, expected less than high, {self.high}"


@dataclass(frozen=True, kw_only=True)
class LossWeight(OptionValue):
    """The weight of each sample in the loss, by its noise."""

    FORMS = ("none", "min-snr:GAMMA", "cosmap", "sigma-sqrt", "sigma-squared")
    EXAMPLE = "min-snr:5"
    LIMITS: ClassVar = {"gamma": ABOVE_0}

    name: Literal["none", "min-snr", "cosmap", "sigma-sqrt", "sigma-squared"] = "none"
    gamma: float | None = None


@dataclass(frozen=True, kw_only=True)
class MaskLoss(OptionValue):
    """What errors under a mask are divided by, and the least that a position counts; see `train/noise.py`."""

    FORMS = ("plain[:FLOOR]", "sample[:FLOOR]", "batch[:FLOOR]")
    EXAMPLE = "batch:0.1"
    METAVAR = "plain|sample|batch[:FLOOR]"
    LIMITS: ClassVar = {"floor": A_SHARE}

    name: Literal["plain", "sample", "batch"] = "plain"
    floor: float = 0.0


@dataclass(frozen=True, kw_only=True)
class LrSchedule(OptionValue):
    """The course of the learning rate after the warm-up, down to its floor; wsd: warm-up, stable, decay (arXiv 2404.06395)."""

    FORMS = ("constant", "cosine[:FLOOR][@END]", "linear[:FLOOR][@END]", "wsd[:STEPS[:FLOOR]][@END]")
    EXAMPLE = "cosine:0.1@20000"
    METAVAR = "constant|cosine|linear|wsd[:STEPS]"
    LIMITS: ClassVar = {"floor": A_SHARE, "steps": ONE_OR_MORE, "end": ONE_OR_MORE}

    name: Literal["constant", "cosine", "linear", "wsd"] = "constant"
    floor: float = 0.0  # of the learning rate, as a share
    steps: int | None = None  # in which wsd falls; None: a fifth of those up to the end
    end: int | None = None  # step from which the rate stays at its floor; None: that of the resumed run, else the run's last


@dataclass(frozen=True, kw_only=True)
class Betas(OptionValue):
    """AdamW's shares of the moments that each step keeps, and what is added to the root of the second."""

    FORMS = ("BETA1,BETA2[,EPS]",)
    EXAMPLE = "0.9,0.999"
    LIMITS: ClassVar = {"beta1": _BELOW_1, "beta2": _BELOW_1, "eps": ABOVE_0}

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8


@dataclass(frozen=True, kw_only=True)
class Ema(OptionValue):
    """The moving average of the weights: its decay, its place, and the optimizer steps between two updates."""

    FORMS = ("off", "DECAY[:PLACE][:EVERY]")
    EXAMPLE = "0.9999:cpu:10"
    LIMITS: ClassVar = {"decay": A_SHARE, "every": ONE_OR_MORE}

    decay: float | None = None  # None: there is no average
    place: EmaPlace | None = None  # None: not chosen, which is the device
    every: int = 1


@dataclass(frozen=True, kw_only=True)
class MemoryLimit(OptionValue):
    """The memory of each device that a run may take."""

    FORMS = ("off", "NUM_BYTES")
    EXPECTED = "off, or 1MiB or more, such as 24GiB (of 2^30 bytes, also 24G) or 24GB (of 10^9)"
    LIMITS: ClassVar = {"num_bytes": ("1MiB or more", lambda value: value >= 1 << 20)}  # 24 would be bytes, and a slip

    num_bytes: Annotated[int | None, IN_BYTES] = None  # None: nothing is chosen


UNIFORM, WHOLE_RANGE, UNWEIGHTED, PLAIN_MASKS = Timesteps(), TimestepRange(), LossWeight(), MaskLoss()
CONSTANT_RATE, ADAMS_BETAS, USUAL_EMA = LrSchedule(), Betas(), Ema(decay=0.9999)


# ---------------------------------------------------------------------------------------------------------------------- config

IN_PROCESS = "none"  # value of --service: read in threads of this process
BASE_OFF = "off"  # value of --base
_REPOSITORY = re.compile(r"(?:[\w.-]+/)?[\w.-]+")


Precision = StrEnum("Precision", ["AUTO", "FP32", "BF16", "FP8"])
"""The precision that the model computes in."""
Compile = StrEnum("Compile", ["AUTO", "ON", "OFF"])
"""The use of torch.compile."""
WeightDtype = StrEnum("WeightDtype", ["FP32", "BF16"])
"""The dtype of the trained weights."""
Sharding = StrEnum("Sharding", ["DDP", "FSDP"])
"""The way in which several processes hold the model."""
Base = WeightFormat
"""The format of the frozen weights of a LoRA run."""

Objective = StrEnum("Objective", ["EPSILON", "V_PREDICTION", "FLOW"])
"""The prediction target; the first two are spelt like `prediction_type` of diffusers' schedulers."""


@dataclass(frozen=True, kw_only=True)
class MethodOptions:
    """The trained weights: all of the model, or adapters."""

    SECTION = "method: the whole model or LoRA, and which layers"

    lora_rank: int | None = field(default=None, metadata=RESUME_FIXED)
    """Train only LoRA adapters of this rank. Default: the full model."""
    lora_alpha: float | None = None
    """LoRA alpha: the adapters' output is scaled by alpha ÷ rank. Default: the rank."""
    lora_targets: Annotated[str | None, Arg(metavar="TEXT", words=("attention", "attention+mlp", "all"))] = field(
        default=None, metadata=RESUME_FIXED
    )
    """Layers that get an adapter: attention, attention+mlp, all (linear layers and convolutions of the blocks), or
    comma-separated ends of names. Default: those of diffusers' script for the family."""
    lora_from: Annotated[Path | None, Arg(metavar="FILE")] = field(default=None, metadata=RESUME_FREE)
    """Start from the adapters of this .safetensors file (names of diffusers, peft or kohya), of rank --lora-rank, at their
    strength, whatever their alpha."""


@dataclass(frozen=True, kw_only=True)
class ObjectiveOptions:
    """The training target, the timesteps, and the weight of errors."""

    SECTION = "objective: target, timesteps, and the weight of errors"

    objective: Objective | None = None
    """Prediction target: the noise, v, or the velocity of a flow. Default: that of the model's scheduler."""
    timesteps: Timesteps = UNIFORM
    """Distribution of training timesteps (Esser et al. 2024): uniform; logit-normal, by default 0,1, whose mean above 0 favours
    noisier ones; or mode, by default 1.29, -1 to 1.75, which above 0 favours the middle."""
    timestep_range: TimestepRange = WHOLE_RANGE
    """Lowest and highest timestep to train, as shares of all; 0 is the least noise. For a flow, before the shift."""
    shift: float | None = None
    """Shift of flow timesteps towards noise; 1: no shift. Default: that of the model's scheduler, for each size."""
    noise_offset: float = 0.0
    """Add this much of one random number for each channel of a sample to its noise, for very dark and bright images; 0.05 is
    usual (crosslabs.org, "Diffusion with offset noise"). Epsilon and v objectives only."""
    guidance: float = field(default=1.0, metadata=ONLY_IN_FILE)
    """Guidance input of a guidance-distilled model (FLUX.1-dev) in training: stored images have none, which is 1."""
    loss_weight: LossWeight = UNWEIGHTED
    """Loss weighting by noise: min-snr (Hang et al. 2023; 5 in the paper) for epsilon and v; for a flow cosmap, highest in the
    middle, sigma-sqrt, noise⁻² (Esser et al. 2024), or sigma-squared, noise², the error of the image."""
    mask_loss: MaskLoss = PLAIN_MASKS
    """Loss of a store with masks: the mean error times the mask (plain), divided by the mean of the sample's own mask (sample),
    or of all masks of the step (batch). A number after that is the least that a position counts (batch:0.1; by default 0)."""


@dataclass(frozen=True, kw_only=True)
class OptimizerOptions:
    """The optimizer, its learning rate, and the average of the weights."""

    SECTION = "optimizer: optimizer, learning rate, EMA"

    optimizer: Annotated[str | None, Arg(metavar="NAME", words=("adamw", "adamw-8bit", "muon", "prodigy"))] = field(
        default=None, metadata=RESUME_FIXED
    )
    """Optimizer: adamw; adamw-8bit; muon (adamw outside the blocks' matrices); prodigy, which finds its rate; or any other, as
    module:Class (torch.optim:NAdam). adamw-8bit and prodigy need the extra `optimizers`. Default: adamw, or --memory's
    choice."""
    optimizer_arg: Repeated[tuple[Annotated[str, Arg(metavar="NAME=VALUE")], ...]] = field(default=(), metadata=RESUME_FIXED)
    """Argument of an optimizer given as module:Class, such as lr_decay=0.1 or betas=(0.9,0.98); may be repeated."""
    learning_rate: float | None = None
    """Learning rate after the warm-up. Default: 1e-4; for prodigy 1, a factor of the rate that it finds."""
    lr_schedule: LrSchedule = CONSTANT_RATE
    """Learning rate after the warm-up: constant; or falling by a cosine, linearly, or only in the last steps (wsd:500; wsd: in
    the last fifth). A number after that is its floor, as a share of --learning-rate (cosine:0.1; by default 0). @END is the
    step from which it stays there (cosine@20000), by default that of the resumed run, else --max-steps. For a run in several
    parts, give the step that the last one will reach."""
    warmup_steps: int = 100
    """Steps of linear learning-rate warm-up; step n of N has a share of n ÷ N."""
    weight_decay: float = 0.01
    """Decoupled weight decay, of all trained weights."""
    betas: Betas = ADAMS_BETAS
    """AdamW's decay of the first and second moment, and epsilon (1e-8 unless given): 0.9,0.99,1e-6."""
    clip_norm: float | None = 1.0
    """Clip gradients to this norm; None: no clipping."""
    ema: Ema = USUAL_EMA
    """Moving average of the weights: off, or its decay, its place, and the steps between two updates: 0.9999:cpu:10. The decay
    is capped at (1 + s) / (10 + s) after s steps. On the device it takes 4 bytes a trained weight; on the cpu, a copy of the
    weights at each update. off: the last weights are validated and drawn."""


@dataclass(frozen=True, kw_only=True)
class MemoryOptions:
    """How the model computes, and what it keeps in the device's memory."""

    SECTION = "memory: precision, compilation, what saves memory"

    memory: MemoryLimit | None = field(default=None, metadata=RESUME_FREE)
    """Memory of each device that the run may take, such as 24GiB (of 2^30 bytes) or 24GB (of 10^9). The largest step is tried
    first. If it runs out of memory, memory-saving options that you have not set are turned on, cheapest first: --recompute;
    then the EMA on the cpu and --optimizer adamw-8bit, or for LoRA --base and --offload-blocks. off: try nothing. Default: all
    memory of a GPU; off on a CPU."""
    precision: Precision = Precision.AUTO
    """Compute precision: fp32 (on a GPU with products in TF32), or bf16 autocast over 32-bit weights; with LoRA, bf16 frozen
    weights. fp8: bf16, but the blocks' linear layers multiply in 8 bits; for full models on an H100 or later, compiled, with
    the extra `quantised`. auto: that of the resumed run; else bf16 on GPUs that have it, and fp32 elsewhere."""
    weights: WeightDtype = WeightDtype.FP32
    """Dtype of the trained weights; bf16, rounded stochastically, halves weights, gradients and EMA; for adamw-8bit."""
    compile: Compile = Compile.AUTO
    """Run torch.compile on the model's blocks and the noising, for every bucket before the first step; auto: on GPUs only."""
    base: Base | Literal["off"] | None = None
    """Quantization of a LoRA run's frozen linear layers: 8 bits, or 4 (nf4, as in QLoRA); off: none. Needs the extra
    `quantised`. Default: off, or --memory's choice."""
    recompute: float | None = field(default=None, metadata=RESUME_FREE)
    """Gradient checkpointing: share of the blocks' activations to recompute in the backward pass, 0 to 1; 1 takes about a third
    more time. Compiled blocks recompute the cheapest operations; without --compile, this share of the blocks is recomputed.
    Default: 0, or --memory's choice."""
    offload_blocks: int | None = field(default=None, metadata=RESUME_FREE)
    """Offload this many blocks of a LoRA run's frozen base to host memory; each is copied to the device ahead of its use, and
    recomputed. Default: 0, or --memory's choice."""


@dataclass(frozen=True, kw_only=True)
class SavingOptions:
    """Checkpoints and exports."""

    SECTION = "saving: checkpoints, exports, the hub"

    save_every: int | None = 1000
    """Optimizer steps between checkpoints. None: only the last one."""
    keep: int = 2
    """Number of newest checkpoints to keep."""
    export_every: int | None = field(default=None, metadata=RESUME_FREE)
    """Optimizer steps between exports of only the weights, averaged if there is an average, to exports/. Default: none."""
    export_dtype: Literal["fp32", "fp16", "bf16"] = field(default="bf16", metadata=ONLY_IN_FILE | RESUME_FREE)
    """Data type of the exported weights."""
    push_to_hub: Annotated[str | None, Arg(metavar="USER/NAME")] = field(default=None, metadata=RESUME_FREE)
    """Hugging Face repository to upload the last step's export and card to, with your own token; made private if it does not
    exist. A failed upload never ends the run."""


@dataclass(frozen=True, kw_only=True)
class WatchingOptions:
    """Logs, validation and images."""

    SECTION = "watching: logs, validation, images"

    log_every: int = 10
    """Optimizer steps per window, that is per line of metrics.jsonl."""
    validate_every: int | None = None
    """Optimizer steps between validations; on the held-out samples. Default: before the first step and after the last."""
    val_timesteps: int = field(default=8, metadata=ONLY_IN_FILE)
    """Evenly spaced timesteps at which every held-out sample is validated."""
    num_images: int = 4
    """Images to generate at the end from stored captions, of held-out samples if there are any; 0: none. With --image-prompts
    all of these instead."""
    image_prompts: Repeated[tuple[Annotated[str, Arg(metavar="TEXT|FILE")], ...]] = field(default=(), metadata=RESUME_FREE)
    """Prompt to draw: a text; a file with one per line; or NAME.safetensors of `ingest prompts`. May be repeated. Texts are
    encoded once, before training, with the model's text encoders. Default: stored captions."""
    image_steps: int = field(default=50, metadata=ONLY_IN_FILE)
    """Sampler steps per image: DDIM, or Euler for flow models."""
    image_guidance: float | None = field(default=None, metadata=ONLY_IN_FILE | RESUME_FREE)
    """Classifier-free guidance of the images, or a guidance-distilled model's guidance input; 1: none. Default: the
    pipeline's."""
    images_every: int | None = None
    """Optimizer steps between images in images/. Default: only at the end."""
    track_with: Annotated[Repeated[tuple[str, ...]], Arg(words=("tensorboard", "wandb", "mlflow", "swanlab"))] = field(
        default=(), metadata=RESUME_FREE
    )
    """Accelerate tracker that also receives the lines of metrics.jsonl, such as tensorboard or wandb; may be repeated."""


@dataclass(frozen=True, kw_only=True)
class MachineOptions:
    """How several processes share the work."""

    SECTION = "machines: several GPUs and machines"

    sharding: Sharding = field(default=Sharding.DDP, metadata=RESUME_FREE)
    """Multi-process strategy: ddp keeps a full copy per process; fsdp shards the model over all processes, for models too large
    for one GPU."""
    service: Annotated[str, Arg(words=("none", "auto"))] = field(default=IN_PROCESS, metadata=RESUME_FREE)
    """Reader of the stores: none (threads of this process), auto (a process per rank), or a `loader serve`: unix:PATH (or PATH)
    on this machine, shared by its ranks, or tcp://HOST:PORT. The batches are identical."""
    service_token: Path | None = field(default=None, metadata=ONLY_IN_FILE | RESUME_FREE)
    """File with the token of a --service tcp://…, readable by its owner only."""
    service_certificate: Path | None = field(default=None, metadata=ONLY_IN_FILE | RESUME_FREE)
    """With TLS: file (PEM) with the certificates to trust of a --service tcp://…."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig(
    ReadOptions,
    MethodOptions,
    ObjectiveOptions,
    OptimizerOptions,
    MemoryOptions,
    SavingOptions,
    WatchingOptions,
    MachineOptions,
    BatchOptions,
):
    """Train a latent-diffusion model on the batches of a store.

    A preset or a run file gives options, too: `bucketline train sdxl-lora --store …`, `bucketline train run.toml`.

    Other commands: `bucketline train presets`, `bucketline train report`; each has its own --help.
    Several processes: `torchrun --nproc_per_node N -m bucketline.train` with the same options.

    Example: bucketline train --store photos.store --model sd15 --output-dir runs/a --batch-size 8 --max-steps 1000
    """

    SECTION = "run: resuming, following, repeating"
    FIRST = (
        *("max_steps", "epochs", "batch_size", "learning_rate", "lora_rank", "memory", "seed", "save_every", "validate_every"),
        *("images_every", "resume"),
    )
    ONE_OF = (("batch_size",), ("max_steps", "epochs"))

    store: Repeated[tuple[Annotated[str | Path, Arg(metavar="STORE")], ...]] = field(metadata=RESUME_FREE)
    """Store to train on, as written by `ingest pack`; a folder that it made from a data set file; or a URL after `store push`
    (s3://bucket/photos.store). `photos.store:3` repeats its samples three times per epoch, `photos.store:0.5` reads half of
    them, others in each. `photos.store@0.5` has half the weight in the loss, as for prior preservation; only the ratio of the
    stores' weights counts. Repeat the option to mix several stores; they must share encoders and packing rules."""
    model: Path = field(metadata=RESUME_FREE)
    """Model folder in diffusers' layout: unet/ or transformer/, scheduler/, and vae/ for the images; or one .safetensors
    checkpoint. Its config decides the family; without weights, training starts at random. Default: the model that the store was
    packed with."""
    output_dir: Path = field(metadata=RESUME_FREE)
    """Output folder: metrics.jsonl, plans.jsonl, status.json, config.json, run.toml, README.md, checkpoints/, loss.png,
    images.png and images.json. Use a separate folder, never one with images or inside a store."""
    model_config: str | None = field(default=None, metadata=RESUME_FREE)
    """Folder or hub model with the configuration of a .safetensors --model. Default: that of the published model whose layout
    it has, from the hub or its cache."""
    max_steps: int | None = field(default=None, metadata=RESUME_FREE)
    """Total optimizer steps, including those before a resume."""
    epochs: float | None = field(default=None, metadata=RESUME_FREE)
    """Epochs to train, instead of --max-steps: passes over all samples of the stores, with repeats; also a part of one, such as
    steps are computed from the plan and recorded."""
    files: Annotated[Positional[tuple[str, ...]], Arg(metavar="PRESET|FILE …", words=(*preset_names(),))] = field(
        default=(), metadata=COMMAND_LINE_ONLY | RESUME_FREE
    )
    """Presets and run files (TOML): names of `bucketline train presets`, and paths. The last one that has an option counts, and
    the command line overrides all."""
    resume: Annotated[bool, Arg(metavar="[RUN]")] = field(default=False, metadata=COMMAND_LINE_ONLY | RESUME_FREE)
    """Resume the run in the folder RUN: from its newest checkpoint, with its options, on its stores' generations. Options given
    next to it override its own. Without RUN: the run in --output-dir, with the options given."""
    new_plan: bool = field(default=False, metadata=COMMAND_LINE_ONLY | RESUME_FREE)
    """With --resume: use the current stores in a new order; weights, averages and optimizer are kept."""
    follow: bool = field(default=False, metadata=RESUME_FREE)
    """Keep training on new data as packing publishes it (`ingest pack --publish-every`): each epoch reads the newest
    generation of the stores."""

    @staticmethod
    def _named(field: str) -> str:
        return field if field in _ONLY_IN_FILE else ReadOptions._named(field)

    @property
    def num_steps(self) -> int:
        """Total optimizer steps; of a run by --epochs, once its plan is known."""
        assert self.max_steps is not None
        return self.max_steps

    def with_absolute_paths(self) -> TrainConfig:
        """Return the options with absolute paths, by which a run is found and resumed from any folder."""

        def absolute(word: str) -> str:  # of what may also be a hub's name or the text of a prompt
            is_file = os.path.exists(word) and not is_url(word)  # noqa: PTH110 - pathlib refuses a long text
            return str(Path(word).absolute()) if is_file else word

        places: dict[str, Any] = {
            one.name: value.absolute() for one in fields(self) if isinstance(value := getattr(self, one.name), Path)
        }
        return replace(
            self,
            **places,
            store=tuple(one if is_url(one) else Path(one).absolute() for one in self.store),
            model_config=self.model_config and absolute(self.model_config),
            image_prompts=tuple(map(absolute, self.image_prompts)),
        )

    def service_address(self) -> ServiceAddress | None:
        """Return the address of the service that reads; None: threads of this process do."""
        from bucketline.loader.service.sockets import ServiceAddress

        if self.service == IN_PROCESS:
            return None
        return ServiceAddress(self.service, self.service_token, self.service_certificate)

    def __post_init__(self) -> None:
        """Validate the options."""
        ReadOptions.__post_init__(self)
        if self.batch_size is None:
            raise UsageError(f"no batch size given: pass --batch-size: {BatchSize.EXPECTED}")
        self.service_address()
        if not self.store:
            raise UsageError("no --store is given, expected one or more")
        if self.new_plan and not self.resume:
            raise UsageError("--new-plan requires --resume; a new run has a new plan anyway: leave it out")
        self._expect_length()
        self._expect_at_least(
            1,
            *("max_steps", "log_every", "keep", "val_timesteps", "image_steps", "lora_rank"),
            *("save_every", "export_every", "validate_every", "images_every"),
        )
        self._expect_at_least(
            0, "noise_offset", "warmup_steps", "num_images", "learning_rate", "weight_decay", "offload_blocks"
        )
        self._expect_share("recompute")
        self._expect("a number above 0, or None for no clipping", _is_above_0, "clip_norm")
        self._expect("a number above 0", _is_above_0, "shift", "lora_alpha")
        self._expect("a number", math.isfinite, "guidance", "image_guidance")
        if self.push_to_hub is not None and not _REPOSITORY.fullmatch(self.push_to_hub):
            shown = redacted(self.push_to_hub)
            raise UsageError(f"--push-to-hub is {shown!r:.80}, expected the name of a repository, such as user/name")
        end, steps = self.lr_schedule.end, self.max_steps
        if end is not None and steps is not None and self.lr_schedule.floor == 0 and steps > end:
            longer = replace(self.lr_schedule, end=steps)
            raise UsageError(
                f"--max-steps is {steps}, and with --lr-schedule {self.lr_schedule} the learning rate is 0 from step {end} on: "
                f"these steps would change nothing; give --lr-schedule {longer}, or a floor above 0"
            )
        for names, is_so, reason in _EXCLUDED:
            for name in names.split():
                if is_so(self) and (value := getattr(self, name)) not in (None, BASE_OFF, 0, False, ()):
                    shown = value[0] if isinstance(value, tuple) else value
                    raise UsageError(f"{self._named(name)} is {shown}, {reason.format(self)}")

    def _expect_length(self) -> None:
        if self.max_steps is None and self.epochs is None:
            raise UsageError("no length is given: pass --max-steps, such as --max-steps 20000, or --epochs, such as --epochs 3")
        if self.max_steps is not None and self.epochs is not None:
            raise UsageError(f"--max-steps is {self.max_steps} and --epochs is {self.epochs:g}, expected one of them")
        self._expect("a number above 0", _is_above_0, "epochs")
        if self.epochs is not None and self.follow:
            raise UsageError(
                f"--epochs is {self.epochs:g} with --follow, by which epochs grow while the run trains; give --max-steps"
            )

    def is_sharded(self, world_size: int) -> bool:
        return self.sharding == Sharding.FSDP and world_size > 1

    @property
    def autocasts(self) -> bool:
        """True if what is not computed in 8 bits is computed in bf16."""
        return self.precision in (Precision.BF16, Precision.FP8)


_ONLY_IN_FILE = frozenset(one.name for one in fields(TrainConfig) if one.metadata.get("only_in_file"))


_EXCLUDED: tuple[tuple[str, Callable[[TrainConfig], bool], str], ...] = (
    (
        "lora_alpha lora_targets lora_from base offload_blocks",
        lambda config: config.lora_rank is None,
        "but --lora-rank is not given; add one, such as 16",
    ),
    ("base offload_blocks", lambda config: config.sharding != Sharding.DDP, "and --sharding is {0.sharding}, expected ddp"),
    (
        "offload_blocks",
        lambda config: config.recompute not in (None, 1),
        "expected --recompute 1 with it: a backward pass that does not recompute keeps them all",
    ),
    ("image_prompts", lambda config: not config.num_images, "and --num-images is 0: leave one of them out"),
)
"""Options that may not be given if something is so, and what is said then."""


def _is_above_0(value: float) -> bool:
    return value > 0


def parse(arguments: Sequence[str], prog: str, commands: Collection[str] = ()) -> TrainConfig:
    """Return the configuration of a command line, its files and the run that it resumes; `commands`: other known words."""
    if asked_for_help(arguments) is not None:
        parse_command(TrainConfig, arguments, prog)
    words, run = _resumed(arguments)
    return TrainConfig(**parse_fields(TrainConfig, words, prog, files_of(TrainConfig, run, commands)))


def _resumed(arguments: Sequence[str]) -> tuple[list[str], str | None]:
    """Return the command line with a bare `--resume`, and the folder that followed it; None without one."""
    words, run = [*arguments], None
    end = words.index("--") if "--" in words else len(words)
    for at in reversed([n for n, word in enumerate(words[:end]) if word.partition("=")[0] == "--resume"]):
        if "=" in words[at]:
            run = words[at].partition("=")[2] or None
        elif at + 1 < end and not words[at + 1].startswith("-"):
            run = words.pop(at + 1)
        words[at] = "--resume"
    return words, run
