"""The tables of docs/requirements.md: disk and memory by model, computed from the shapes of the published configurations.

python -m tests.requirements_page            print them
python -m tests.requirements_page --write    put them into the page
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import torch
from torch import nn

from bucketline.bench.fixtures.trained_model import MODELS
from bucketline.families.registry import FAMILIES
from bucketline.store.format.text import GROUP
from bucketline.train.lora import adapted_layers
from bucketline.train.parallel import repeated_blocks
from tests.commands import ROOT
from tests.families_page import made_of, sizes_of, written

PAGE = ROOT / "docs" / "requirements.md"
NUM_IMAGES, RANK = 10_000, 16
INT8_SHARE = (8 + 16 / GROUP) / 16  # of F16: a value's 8 bits, and its share of an F16 scale
NF4_BYTES = 0.52  # of a weight: 4 bits, and its share of a block's scale
TRAINED_BYTES = 4 + 4 + 8 + 4  # of a weight: itself, gradient, AdamW's moments, average, in 32 bits
OF = {family.name: family for family in FAMILIES}


class Model(NamedTuple):
    """A published model: its family, its text encoders, their weights in billions as published, and its configuration.

    The configuration is what it sets otherwise than the class.
    """

    family: str
    encoders: str
    billions: float
    config: dict[str, Any] | None = None


SD3 = {"pos_embed_max_size": 192}
KLEIN = {"num_layers": 5, "num_single_layers": 20, "num_attention_heads": 24, "joint_attention_dim": 7680}
PUBLISHED = {
    "Stable Diffusion 1.5": Model("sd", "CLIP", 0.12, {"cross_attention_dim": 768}),
    "SDXL": Model("sdxl", "two CLIPs", 0.82, {name: one for name, one in MODELS["sdxl"].config.items() if name[0] != "_"}),
    "SD 3 medium": Model(
        "sd3", "two CLIPs, T5-XXL", 5.6, {**SD3, "num_layers": 24, "num_attention_heads": 24, "caption_projection_dim": 1536}
    ),
    "SD 3.5 large": Model(
        "sd3", "two CLIPs, T5-XXL", 5.6, {**SD3, "num_layers": 38, "num_attention_heads": 38, "caption_projection_dim": 2432}
    ),
    "PixArt-Sigma": Model("pixart_sigma", "T5-XXL", 4.8, {"caption_channels": 4096}),
    "Sana 1.6B": Model("sana", "Gemma 2 2B", 2.6),
    "Lumina 2": Model("lumina2", "Gemma 2 2B", 2.6),
    "FLUX.2 klein 4B": Model("flux2_klein", "Qwen3 4B", 4.0, KLEIN),
    "Z-Image": Model("z_image", "Qwen3 4B", 4.0),
    "Chroma": Model("chroma", "T5-XXL", 4.8),
    "FLUX.1-dev": Model("flux", "CLIP, T5-XXL", 4.9, {"guidance_embeds": True}),
    "Qwen-Image": Model("qwenimage", "Qwen2.5-VL 7B", 8.3),
    "FLUX.2-dev": Model("flux2", "Mistral Small 3 24B", 24.0),
}


def gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:,.{0 if num_bytes >= 10 * 2**30 else 1}f}"


def weights_of(one: Model) -> tuple[int, int, int]:
    """Return how many weights a denoiser has, how many of them `--base` quantises, and those of adapters of its family."""
    import diffusers

    family = OF[one.family]
    with torch.device("meta"):
        model: nn.Module = getattr(diffusers, family.model_class)(**(one.config or {}))
    linear = {id(layer): layer for block in repeated_blocks(model) for layer in block.modules() if isinstance(layer, nn.Linear)}
    ends = tuple(f".{end}" for end in adapted_layers(model, made_of(family), None))
    adapted = [own for path, own in model.named_modules() if f".{path}".endswith(ends) and isinstance(own, nn.Linear)]
    adapters = RANK * sum(layer.in_features + layer.out_features for layer in adapted)
    return sum(own.numel() for own in model.parameters()), sum(own.weight.numel() for own in linear.values()), adapters


def disk() -> list[str]:
    head = "| model | latent, 512 px | 1024 px | caption, fp16 | caption, int8 | 10,000 at 1024 px, fp16 | int8 |"
    lines = [head, "|---|" + "---:|" * 6]
    for name, model in PUBLISHED.items():
        latent, tokens, pooled = sizes_of(OF[model.family])
        captions = tokens + pooled, tokens * INT8_SHARE + pooled
        sizes = " | ".join(f"{size / 1024:,.0f} KiB" for size in (latent / 4, latent, *captions))
        lines.append(f"| {name} | {sizes} | {' | '.join(f'{gib(NUM_IMAGES * (latent + one))} GiB' for one in captions)} |")
    return lines


def memory() -> list[str]:
    head = "| model | its text encoders | in bf16 | weights | all weights | 8-bit | LoRA | base int8 | base nf4 |"
    lines = [head, "|---|---|" + "---:|" * 7]
    for name, model in PUBLISHED.items():
        weights, quantised, adapters = weights_of(model)
        lora = [2 * (weights - quantised) + each * quantised + TRAINED_BYTES * adapters for each in (2, 1, NF4_BYTES)]
        found = " | ".join(gib(one) for one in (TRAINED_BYTES * weights, 6 * weights, *lora))
        count = f"{weights / 1e9:.{1 if weights < 1e10 else 0}f} B"
        lines.append(f"| {name} | {model.encoders}: {model.billions:g} B | {gib(2e9 * model.billions)} | {count} | {found} |")
    return lines


if __name__ == "__main__":
    text = PAGE.read_text(encoding="utf-8")
    for table in (disk, memory):
        lines = table()
        print("\n".join(lines))
        text = written(text, f"<!-- python -m tests.requirements_page --write: {table.__name__} -->", lines)
    if "--write" in sys.argv:
        PAGE.write_text(text, encoding="utf-8")
