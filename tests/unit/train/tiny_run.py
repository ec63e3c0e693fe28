"""The material of the trainer's tests: a store of known rows, a UNet of a few thousand weights, batches made by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from bucketline.families.family import StoreFacts
from bucketline.loader import Batch
from bucketline.loader.batch import as_fields
from bucketline.store import Store
from bucketline.store.prompt_file import Prompt, encode_prompts
from bucketline.train.config import Objective, TrainConfig
from bucketline.train.parallel import TrainRanks
from tests.kit import CAPTIONS, TOKEN_WIDTH, Sample, add_samples, caption_of, make_sample, store_writer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from torch import nn
    from torch.optim import Optimizer

    from bucketline.families.family import Family
    from bucketline.train.run import Run
    from bucketline.train.step import Training
    from bucketline.typed_json import Json

CHANNELS = 2
ALONE = TrainRanks(rank=0, world_size=1)
ROWS = {"train/128x128": 13, "train/192x128": 7, "val/128x128": 5, "val/192x128": 3}
VAE: dict[str, Json] = {"scaling_factor": 0.5, "shift_factor": 0.25, "latent_channels": CHANNELS}
TEXT_ENCODER: dict[str, Json] = {"width": TOKEN_WIDTH, "padding": "valid", "max_tokens": 12}
UNET: dict[str, Json] = {
    "_class_name": "UNet2DConditionModel",
    "sample_size": 8,
    "in_channels": CHANNELS,
    "out_channels": CHANNELS,
    "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D"],
    "mid_block_type": None,  # one block that attends, and few others: a run is mostly what each of them costs
    "up_block_types": ["UpBlock2D", "UpBlock2D"],
    "block_out_channels": [8, 16],
    "layers_per_block": 1,
    "norm_num_groups": 4,
    "attention_head_dim": 4,
    "cross_attention_dim": TOKEN_WIDTH,
}
SCHEDULER: dict[str, Json] = {
    "_class_name": "DDPMScheduler",
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "prediction_type": "epsilon",
}

_PLAIN: dict[str, Any] = {"negative_prompt": "", "seed": 0, "height_px": 128, "width_px": 128, "guidance": None}
PROMPTS = (
    Prompt(**{**_PLAIN, "prompt": "a red barn"}),
    Prompt(**{**_PLAIN, "prompt": "snow", "negative_prompt": "rain", "seed": 3, "width_px": 64, "guidance": 4.0}),
    Prompt(**{**_PLAIN, "prompt": "a red barn", "seed": 1}),
)


def encoders() -> dict[str, Json]:
    return {"vae": dict(VAE), "text_encoder": dict(TEXT_ENCODER)}


def facts(**changes: Any) -> StoreFacts:
    return StoreFacts(**{"latent_channels": CHANNELS, "text": {"tokens": TOKEN_WIDTH}, "shows_padding": False, **changes})


def samples(rows: Mapping[str, int], prefix: str = "") -> list[Sample]:
    return [
        make_sample(f"{prefix}{bucket}/{n}.png", bucket, tuple(f"{text} {prefix} {bucket} {n}" for text in CAPTIONS[:2]))
        for bucket, count in rows.items()
        for n in range(count)
    ]


def make_training_store(path: Path, rows: Mapping[str, int] = ROWS) -> Store:
    return add_to_store(path, samples(rows))


def add_to_store(path: Path, added: Iterable[Sample]) -> Store:
    with store_writer(path, encoders=encoders()) as writer:
        add_samples(writer, added, commit_every=1000)
    return Store(path, writer.manifest)


def write_prompts(path: Path, *prompts: Prompt, name: str = "prompts.safetensors") -> str:
    texts = {text for one in prompts for text in (one.prompt, one.negative_prompt)}
    data = encode_prompts(Store.open(path).manifest, prompts, [caption_of(text) for text in sorted(texts)])
    path.with_name(name).write_bytes(data)
    return str(path.with_name(name))


def write_unet(folder: Path, *, scheduler: Mapping[str, Json] | None = SCHEDULER, **changes: Json) -> Path:
    """Write a model folder with a UNet's configuration and no weights."""
    (folder / "unet").mkdir(parents=True, exist_ok=True)
    (folder / "unet" / "config.json").write_text(json.dumps({**UNET, **changes}), encoding="utf-8")
    if scheduler is not None:
        (folder / "scheduler").mkdir(exist_ok=True)
        (folder / "scheduler" / "scheduler_config.json").write_text(json.dumps(scheduler), encoding="utf-8")
    return folder


def write_vae(folder: Path) -> None:
    from diffusers import AutoencoderKL

    kind: Any = AutoencoderKL
    with torch.random.fork_rng():
        torch.manual_seed(0)
        vae = kind(
            block_out_channels=(4, 4),
            down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2,
            norm_num_groups=2,
            latent_channels=CHANNELS,
            scaling_factor=VAE["scaling_factor"],
            layers_per_block=1,
        )
    vae.save_pretrained(folder / "vae")


def config(folder: Path, **changes: Any) -> TrainConfig:
    asked: dict[str, Any] = {
        "store": (folder / "tiny.store",),
        "model": folder / "model",
        "output_dir": folder / "run",
        "batch_size": "2",
        "accumulation": 2,
        "max_steps": 7,
        "log_every": 1,
        "warmup_steps": 3,
        "learning_rate": 1e-3,
        "val_timesteps": 2,
        "num_images": 0,
        "image_steps": 2,
    }
    return TrainConfig(**{**asked, **changes})


def as_arguments(asked: TrainConfig) -> list[str]:
    """Spell a configuration as the command line takes it; what only a file sets is written next to the run's folder."""
    arguments: list[str] = []
    in_file: dict[str, Json] = {}
    for name, field in TrainConfig.__dataclass_fields__.items():
        option, value = "--" + name.replace("_", "-"), getattr(asked, name)
        if name in ("files", "write"):
            continue
        if field.metadata.get("only_in_file"):
            in_file |= {} if value == field.default else {name: str(value) if isinstance(value, Path) else value}
            continue
        if isinstance(value, bool):
            arguments += [option] if value else []
        elif isinstance(value, tuple):
            arguments += [argument for one in value for argument in (option, str(one))]
        else:
            arguments += [f"{option}={value}"]
    if in_file:
        path = asked.output_dir.with_name(f"{asked.output_dir.name}-options.toml")
        path.write_text("".join(f"{name} = {json.dumps(value)}\n" for name, value in in_file.items()), encoding="utf-8")
        arguments.insert(0, str(path))
    return arguments


def make_batch(num: int = 3, *, device: str = "cpu", first: int = 0, height: int = 8) -> Batch:
    """Make a batch by hand; its values follow from the rows' numbers `first`, `first` + 1 and so on."""
    rows = torch.arange(first, first + num)
    generators = [torch.Generator().manual_seed(int(row)) for row in rows]
    tensors: dict[str, Any] = {
        "latents": torch.stack([torch.randn(CHANNELS, height, 8, generator=g) for g in generators]).half(),
        "tokens": torch.stack([torch.randn(4, TOKEN_WIDTH, generator=g) for g in generators]).half(),
        "token_mask": torch.ones(num, 4, dtype=torch.bool),
        "original_size": torch.full((num, 2), 64, dtype=torch.int32),
        "crop": torch.zeros(num, 2, dtype=torch.int32),
        "target_size": torch.tensor([[8 * height, 64]] * num, dtype=torch.int32),
        "flipped": torch.zeros(num, dtype=torch.bool),
        "weight": torch.ones(num),
        "keys": rows * 7919 + 1,
        "ids": torch.stack([torch.randint(0, 256, (16,), dtype=torch.uint8, generator=g) for g in generators]),
    }
    on_device = {name: tensor.to(device) for name, tensor in tensors.items()}
    return Batch(step=0, micro_step=0, epoch=0, bucket=f"train/{8 * height}x64", **as_fields(on_device))


def load(folder: Path, store: StoreFacts, seed: int, **more: Any) -> tuple[Family, nn.Module]:
    from bucketline.train import model as loading

    return loading.load(loading.open_model_config(folder), store, seed, **more)


def make_training(
    folder: Path,
    *,
    loaded: tuple[Family, nn.Module] | None = None,
    optimizer_of: Callable[[nn.Module], Optimizer] | None = None,
    decay: float | None = 0.9999,
    objective: Objective = Objective.V_PREDICTION,
    is_bf16: bool = False,
    **changes: Any,
) -> Training:
    from bucketline.loader.batch import LatentScale
    from bucketline.train.noise import FlowSchedule, NoiseSchedule, Prep
    from bucketline.train.optim import Average
    from bucketline.train.step import Training

    family, model = loaded or load(write_unet(folder), facts(), seed=0)
    device, own = next(model.parameters()).device, {"objective": objective, "config": SCHEDULER}
    schedule: Any = NoiseSchedule.from_alphas_cumprod(torch.linspace(0.999, 0.01, 1000), device, **own)
    if objective is Objective.FLOW:
        schedule = FlowSchedule(num_timesteps=1000, shift=3.0, patch_size=family.patch_size)
    return Training(
        config=config(folder, **{"model": folder, "accumulation": 1, "warmup_steps": 0, "clip_norm": 0.1, **changes}),
        family=family,
        model=model,
        optimizer=optimizer_of(model) if optimizer_of else torch.optim.AdamW(model.parameters(), weight_decay=0.01, fused=True),
        average=Average(model, decay),
        prep=Prep(scale=LatentScale(scale=0.5, shift=0.25), schedule=schedule),
        autocast=torch.autocast("cpu", torch.bfloat16, enabled=is_bf16),
    )


def built(asked: TrainConfig) -> Run:
    from bucketline.train.run import Run

    asked.output_dir.mkdir(parents=True, exist_ok=True)
    return Run(asked, ALONE)


def train_in_two_parts(whole: TrainConfig, stop: int) -> Path:
    """Train a run, and the same one stopped after `stop` steps and resumed; return the other's folder, of the same losses."""
    from bucketline.train.run import train

    train(whole, ALONE)
    parts = replace(whole, output_dir=whole.output_dir.parent / "parts", max_steps=stop)
    train(parts, ALONE)
    train(replace(parts, max_steps=whole.max_steps, resume=True), ALONE)
    assert losses(whole.output_dir) == losses(parts.output_dir)
    return parts.output_dir


def losses(run: Path) -> list[tuple[object, ...]]:
    from bucketline.train.log import read_metrics

    names = ("step", "loss", "grad_norm", "lr", "samples", "buckets", "val_loss", "val_loss_per_timestep")
    return [tuple(json.dumps(line.get(name)) for name in names) for line in read_metrics(run)]
