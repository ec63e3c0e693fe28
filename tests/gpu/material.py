"""Material of the checks of `make gpu`: tiny models, batches made by hand, stores and models of the benchmark."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch

from bucketline.families.family import StoreFacts
from bucketline.families.registry import family_named
from bucketline.loader import Batch
from bucketline.loader.batch import as_fields
from bucketline.train.config import Compile, Objective, Precision
from bucketline.train.lora import add_adapters
from bucketline.train.lowbit import use_float8
from bucketline.train.step import Training
from tests.family_models import T5_WIDTH, tiny_model
from tests.unit.train.tiny_run import config, make_training, make_training_store, write_unet, write_vae

DEVICE = torch.device(os.environ.get("ACCEPT_DEVICE", "cuda"))
ON_GPU = DEVICE.type == "cuda"
BACKEND = os.environ.get("ACCEPT_BACKEND", "inductor" if ON_GPU else "eager")
ROOM = Path(os.environ.get("ACCEPT_ROOM") or Path(tempfile.gettempdir()) / "accept")
TOKENS = {"sd": 8, "sdxl": 20, "dit": 1, "pixart_alpha": T5_WIDTH, "sd3": T5_WIDTH, "flux": T5_WIDTH}
POOLED = {"sdxl": 12, "sd3": 20, "flux": 8}

NAMES = ("sd", "sdxl", "dit", "pixart_alpha", "sd3", "flux")

failed: list[str] = []


def tell(check: str, *, ok: bool | None = None, **figures: object) -> None:
    """Print a line of JSON; `ok=None` reports figures that nothing is asked of."""
    print(json.dumps({"check": check, "ok": "report" if ok is None else ok, **figures}, default=str), flush=True)
    if ok is False:
        failed.append(check)


def sync() -> None:
    if ON_GPU:
        torch.cuda.synchronize()


def lag(milliseconds: float) -> None:
    """Keep the current stream busy, so that what is read or overwritten too early is seen."""
    if ON_GPU:
        torch.cuda._sleep(int(milliseconds * 1.7e6))  # type: ignore[no-untyped-call]


def kept(name: str, rows: int, buckets: int | None = None) -> tuple[Path, Path]:
    """Return a store and a model folder of the training benchmark, made once; `buckets`: only the first ones."""
    from bucketline.bench.fixtures import trained_model as t

    if buckets:
        t.MODELS[name] = dataclasses.replace(t.MODELS[name], buckets_px=t.MODELS[name].buckets_px[:buckets])
    ROOM.mkdir(parents=True, exist_ok=True)
    return t.kept_store(ROOM, name, rows), t.kept_model(ROOM, name)


def tiny_batch(name: str, height: int, width: int, *, rows: int = 2, step: int = 0) -> Batch:
    g = torch.Generator().manual_seed(height * 100 + width)
    tokens = torch.randn(rows, 5, TOKENS[name], generator=g).half()
    tensors: dict[str, torch.Tensor] = {
        "latents": torch.randn(rows, 4, height, width, generator=g).half(),
        "tokens": torch.zeros(rows, 1, 1, dtype=torch.int64) if name == "dit" else tokens,
        "token_mask": torch.ones(rows, 1 if name == "dit" else 5, dtype=torch.bool),
        **{key: torch.full((rows, 2), 64, dtype=torch.int32) for key in ("original_size", "crop", "target_size")},
        "flipped": torch.zeros(rows, dtype=torch.bool),
        "weight": torch.ones(rows),
        "keys": torch.arange(rows) * 7919 + 1 + step,
        "ids": torch.randint(0, 256, (rows, 16), dtype=torch.uint8, generator=g),
    }
    if name == "dit":
        tensors["class_labels"] = torch.zeros(rows, dtype=torch.int64)
    if name in POOLED:
        tensors["text_fixed.pooled"] = torch.randn(rows, POOLED[name], generator=g).half()
    moved = {key: value.to(DEVICE) for key, value in tensors.items()}
    return Batch(step=step, micro_step=0, epoch=0, bucket=f"train/{8 * height}x{8 * width}", **as_fields(moved))


def tiny_training(
    name: str,
    *,
    compiled: Compile = Compile.OFF,
    bf16: bool,
    checkpointing: bool = False,
    lora: bool = False,
    float8: bool = False,
    layout: Any = None,
    accumulation: int = 1,
    **sizes: Any,
) -> Training:
    """Make a family's tiny model, or one of other `sizes`, ready to train on the device."""
    from bucketline.train.compile import compile_blocks

    torch.manual_seed(0)
    model = tiny_model(name, **({"pos_embed_max_size": 32} if name == "sd3" else {}), **sizes).train()
    kind = family_named("class_labels" if name == "dit" else name)
    assert kind is not None
    facts = StoreFacts(latent_channels=4, text={"tokens": 8, "pooled": 8}, shows_padding=name not in ("sd", "pixart_alpha"))
    family = kind(dict(model.config), facts)
    family.prepare(model)
    asked: dict[str, Any] = {
        "learning_rate": 1e-4,
        "lora_rank": 2 if lora else None,
        "accumulation": accumulation,
        "compile": compiled,
        "precision": Precision.BF16 if bf16 else Precision.FP32,
    }
    if lora:
        add_adapters(model, family, config(ROOM, **asked))
    if float8:
        use_float8(model, emulates=not ON_GPU)
    if checkpointing:
        model.enable_gradient_checkpointing()
    if layout is None:
        layout = torch.channels_last if ON_GPU else torch.contiguous_format
    model = model.to(device=DEVICE, memory_format=layout)
    training = make_training(
        ROOM,
        loaded=(family, model),
        optimizer_of=lambda one: torch.optim.AdamW([own for own in one.parameters() if own.requires_grad], lr=1e-3, fused=True),
        decay=0.99,
        objective=Objective.FLOW if name in ("sd3", "flux") else Objective.EPSILON,
        **{"clip_norm": 1.0, **asked},
    )
    if compiled is not Compile.OFF:
        compile_blocks(model, family, BACKEND)
    return dataclasses.replace(
        training,
        prep=dataclasses.replace(training.prep, compiled=compiled is not Compile.OFF and BACKEND == "inductor"),
        autocast=torch.autocast(DEVICE.type, torch.bfloat16, enabled=bf16),
    )


def run_folder(name: str) -> Path:
    folder = ROOM / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    make_training_store(folder / "tiny.store")
    write_vae(write_unet(folder / "model"))
    return folder
