"""A model folder and a folder of images that take a moment to make and to encode, for the tests of ingest."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from tests.commands import Ran, call

WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "red", "green", "blue", "cat", "dog", "house", "of", "the")
GRID = "16x24,24x16"
SMALL = ("--grid", GRID, "--min-size-px", "8")


def pack(source: object, store: object, model: Path, *more: object) -> Ran:
    return call("ingest", "pack", source, store, "--model", model, *SMALL, "--json", *more)


def in_file(path: Path, source: object, **options: object) -> Path:
    """Write a data set file of one source with these options, each in its table, and return its path."""
    from dataclasses import fields

    from bucketline.ingest.config import FILE_TABLES

    tables: dict[str, dict[str, object]] = {"source": {"path": str(source)}}
    for name, value in options.items():
        table = next((table for table, own in FILE_TABLES.items() if name in {one.name for one in fields(own)}), "source")
        tables.setdefault(table, {})[name] = value
    lines = [
        line for table, own in tables.items() for line in (f"[{table}]", *(f"{k} = {json.dumps(v)}" for k, v in own.items()))
    ]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def write_model(folder: Path, *, seed: int = 0, latent_channels: int = 4, vae_levels: int = 2) -> Path:
    """Write `vae/`, `tokenizer/` and `text_encoder/`: an AutoencoderKL of some levels, and a BERT of one layer."""
    import torch
    import transformers
    from diffusers import AutoencoderKL

    transformers.logging.disable_progress_bar()
    torch.manual_seed(seed)
    kind: Any = AutoencoderKL
    kind(
        block_out_channels=(4,) * vae_levels,
        down_block_types=("DownEncoderBlock2D",) * vae_levels,
        up_block_types=("UpDecoderBlock2D",) * vae_levels,
        norm_num_groups=2,
        latent_channels=latent_channels,
        sample_size=16,
        layers_per_block=1,
    ).save_pretrained(folder / "vae")
    words = folder / "vocabulary.txt"
    words.write_text("\n".join(WORDS), encoding="ascii")
    transformers.BertTokenizer(vocab=str(words), model_max_length=12).save_pretrained(folder / "tokenizer")
    config = transformers.BertConfig(
        vocab_size=len(WORDS),
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=8,
        max_position_embeddings=12,
    )
    transformers.BertModel(config).save_pretrained(folder / "text_encoder")
    return folder


def colour_image(height_px: int, width_px: int, seed: int = 0) -> NDArray[np.uint8]:
    down, across = np.mgrid[0:height_px, 0:width_px] / max(height_px, width_px)
    waves = [np.sin(6.3 * ((1 + seed % 3) * down + (1 + seed % 5) * across) + seed + 2 * channel) for channel in range(3)]
    values: NDArray[np.uint8] = (127.5 + 127.0 * np.stack(waves, axis=-1)).astype(np.uint8)
    return values


def png(height_px: int, width_px: int, seed: int = 0) -> bytes:
    return encoded(Image.fromarray(colour_image(height_px, width_px, seed)), "PNG")


def encoded(image: Image.Image, kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def write_files(folder: Path, files: Mapping[str, str | bytes]) -> Path:
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data.encode("utf-8") if isinstance(data, str) else data)
    return folder


def write_images(folder: Path, count: int, *, captions: bool = True) -> list[str]:
    """Write images of two aspects and mixed sizes, two folders, most with captions; give their ids."""
    ids = []
    for n in range(count):
        name = f"{'ab'[n % 2]}/{n:03d}.png"
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(png(*((20 + n % 9, 34) if n % 3 else (40, 26 + n % 5)), seed=n))
        if captions and n % 4:
            (folder / name).with_suffix(".txt").write_text(f"a {WORDS[6 + n % 7]}\nthe cat\n", encoding="utf-8")
        ids.append(name)
    return sorted(ids)
