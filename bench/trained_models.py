"""What `training` trains: a model's configuration without weights, and a store of random rows that suits it."""

from __future__ import annotations

import json
import math
import shutil
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from bucketline.bench.synthetic_store import MAX_CAPTIONS, MAX_SHARD_BYTES, random_f16
from bucketline.store.block import BlockSpec, Column, fixed_columns
from bucketline.store.digests import caption_digest
from bucketline.store.manifest import TextEntry, column_entries, write_manifest
from bucketline.store.publish import Contents, new_manifest, prepare_store, publish
from bucketline.store.record import SampleRecord
from bucketline.store.seal import seal
from bucketline.store.shard_writer import ShardWriter
from bucketline.store.text_block import Caption, TextSpec, make_caption

if TYPE_CHECKING:
    from pathlib import Path

    from bucketline.store.typed_json import Json

SHARD = "s0"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedModel:
    """One model, and what its store holds."""

    folder: str  # in diffusers' layout
    config: dict[str, Any]
    prediction_type: str
    buckets_px: tuple[tuple[int, int], ...]  # height, width
    tokens: Column  # of a caption
    num_tokens: int
    text_encoder: dict[str, Any]  # what the manifest says of it
    pooled: int | None = None  # the width of a caption's pooled embedding
    batch_size: int = 8
    more: dict[str, Any] = field(default_factory=dict)  # of the scheduler

    @property
    def text(self) -> TextSpec:
        fixed = () if self.pooled is None else (Column(name="pooled", dtype="F16", shape=(self.pooled,)),)
        return TextSpec(tokens=(self.tokens,), fixed=fixed)

    @property
    def is_of_classes(self) -> bool:
        return self.tokens.name == "class_labels"


def _clip(width: int) -> dict[str, Any]:
    return {"width": width, "padding": "max_length", "max_tokens": 77, "empty_caption": "encoded"}


def _tokens(width: int) -> Column:
    return Column(name="tokens", dtype="F16", shape=(width,))


MODELS: dict[str, TrainedModel] = {
    # A UNet that takes a CPU some milliseconds: to try the benchmark itself.
    "tiny": TrainedModel(
        folder="unet",
        config={
            "_class_name": "UNet2DConditionModel",
            "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D"],
            "up_block_types": ["CrossAttnUpBlock2D", "UpBlock2D"],
            "block_out_channels": [8, 16],
            "layers_per_block": 1,
            "norm_num_groups": 4,
            "attention_head_dim": 4,
            "cross_attention_dim": 16,
        },
        prediction_type="epsilon",
        buckets_px=((64, 64), (96, 64), (64, 96)),
        tokens=_tokens(16),
        num_tokens=77,
        text_encoder=_clip(16),
        batch_size=2,
    ),
    # Source: the configuration published with stable-diffusion-xl-base-1.0, and buckets of about 1 Mpx beside its square.
    "sdxl": TrainedModel(
        folder="unet",
        config={
            "_class_name": "UNet2DConditionModel",
            "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
            "up_block_types": ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
            "block_out_channels": [320, 640, 1280],
            "layers_per_block": 2,
            "attention_head_dim": [5, 10, 20],
            "transformer_layers_per_block": [1, 2, 10],
            "cross_attention_dim": 2048,
            "use_linear_projection": True,
            "sample_size": 128,
            "addition_embed_type": "text_time",
            "addition_time_embed_dim": 256,
            "projection_class_embeddings_input_dim": 2816,
        },
        prediction_type="epsilon",
        buckets_px=((1024, 1024), (1152, 896), (896, 1152), (1216, 832), (832, 1216)),
        tokens=_tokens(2048),
        num_tokens=77,
        text_encoder=_clip(2048),
        pooled=1280,
        batch_size=2,
    ),
    # Source: the transformer's configuration published with DiT-XL-2-256.
    "dit-xl-2": TrainedModel(
        folder="transformer",
        config={
            "_class_name": "DiTTransformer2DModel",
            "num_attention_heads": 16,
            "attention_head_dim": 72,
            "in_channels": 4,
            "out_channels": 8,
            "num_layers": 28,
            "norm_num_groups": 32,
            "attention_bias": True,
            "sample_size": 32,
            "patch_size": 2,
            "activation_fn": "gelu-approximate",
            "num_embeds_ada_norm": 1000,
            "norm_type": "ada_norm_zero",
            "norm_elementwise_affine": False,
        },
        prediction_type="epsilon",
        buckets_px=((256, 256),),
        tokens=Column(name="class_labels", dtype="I64", shape=(1,)),
        num_tokens=1,
        text_encoder={
            "family": "class_labels",
            "num_classes": 1000,
            "null_class": 1000,
            "width": 1,
            "padding": "max_length",
            "max_tokens": 1,
            "empty_caption": "null_class",
        },
        batch_size=64,
        more={"beta_start": 0.0001, "beta_end": 0.02, "beta_schedule": "linear"},
    ),
}


def kept_model(folder: Path, name: str) -> Path:
    """Give the model's folder, made unless it is there: a configuration and a scheduler, so that it starts at random."""
    path, model = folder / f"{name}.model", MODELS[name]
    scheduler = {"_class_name": "DDPMScheduler", "beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012}
    files = {
        path / model.folder / "config.json": {"in_channels": 4, "out_channels": 4, **model.config},
        path / "scheduler" / "scheduler_config.json": {
            **scheduler, "num_train_timesteps": 1000, "prediction_type": model.prediction_type, **model.more
        },
    }  # fmt: skip
    for file, content in files.items():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(content, indent=1), encoding="utf-8")
    return path


def kept_store(folder: Path, name: str, rows: int) -> Path:
    """Give the store for a model, `rows` in each bucket, made unless it is there."""
    path, making = folder / f"{name}-{rows}.store", folder / f"{name}-{rows}.store.making"
    if not path.exists():
        shutil.rmtree(making, ignore_errors=True)
        print(f"making {path.name}", file=sys.stderr)
        _make(making, MODELS[name], rows)
        making.rename(path)
    return path


def _make(path: Path, model: TrainedModel, rows: int) -> None:
    random = np.random.default_rng(0)
    text = model.text
    entry = TextEntry(header_bytes=text.header_bytes, tokens=column_entries(text.tokens), fixed=column_entries(text.fixed))
    vae: Json = {"scaling_factor": 0.18215, "latent_channels": 4, "latents": "mode"}
    encoders: dict[str, Json] = {"vae": vae, "text_encoder": model.text_encoder}
    prepare_store(path)
    contents = Contents(encoders=encoders, rules={}, max_captions=MAX_CAPTIONS, text=entry)
    manifest = write_manifest(path, new_manifest(contents))
    writer = ShardWriter(path, SHARD, text, _caption(model, "", random), MAX_SHARD_BYTES)
    for height, width in model.buckets_px:
        latent = Column(name="latent", dtype="F16", shape=(4, height // 8, width // 8))
        spec = BlockSpec(bucket=f"train/{height}x{width}", columns=(*fixed_columns(MAX_CAPTIONS), latent))
        for row in range(rows):
            words = f"{spec.bucket}/{row}"
            writer.add_caption(_caption(model, words, random))
            writer.add(
                spec=spec,
                latents={"latent": random_f16(random, latent.shape)},
                record=_record(spec.bucket, words, height, width),
                captions=[caption_digest(words)],
            )
        writer.commit()
    writer.close()
    seal(path, SHARD)
    publish(path, manifest, [SHARD], ())


def _caption(model: TrainedModel, words: str, random: np.random.Generator) -> Caption:
    if model.is_of_classes:
        number = random.integers(model.text_encoder["num_classes"]) if words else model.text_encoder["null_class"]
        tokens: Any = np.full((1, 1), number, dtype="<i8")
    else:
        tokens = random_f16(random, (model.num_tokens, math.prod(model.tokens.shape)))
    fixed = {} if model.pooled is None else {"pooled": random_f16(random, (model.pooled,))}
    return make_caption(model.text, caption_digest(words), {model.tokens.name: tokens}, fixed)


def _record(bucket: str, sample_id: str, height: int, width: int) -> SampleRecord:
    size = (height, width)
    return SampleRecord(
        id=sample_id,
        bucket=bucket,
        row=0,
        split="train",
        source=sample_id,
        source_bytes=1,
        source_mtime_ns=0,
        content=bytes(16),
        original_size=size,
        resized=size,
        crop=(0, 0, *size),
        crop_in_source=(0, 0, *size),
        captions=(sample_id,),
        caption_rows=(),
    )
