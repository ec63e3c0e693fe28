"""The tables of docs/families.md: each family's pipelines, and what a sample takes; and the references of those with some.

python -m tests.families_page            print it
python -m tests.families_page --write    put it into the page
"""

from __future__ import annotations

import inspect
import math
import sys
from pathlib import Path

import torch

from bucketline.families.family import Family, Padding, StoreFacts
from bucketline.families.registry import FAMILIES
from bucketline.train.noise import FlowSchedule, load_schedule
from tests.commands import ROOT

PAGE = ROOT / "docs" / "families.md"
BEGIN, END = "<!-- python -m tests.families_page --write -->", "<!-- end -->"
BEGIN_REFERENCES = "<!-- references -->"
SIDE_PX = 1024
NUM_TOKENS = 100
ITEM_BYTES = 2  # F16
CPU, MIDDLE = torch.device("cpu"), torch.tensor([499])

# What the transformer's class does not say by its defaults. Sources: the configurations published with SD 1.5, SDXL, PixArt,
# DiT-XL/2, FLUX.2 klein 4B, Lumina-Image 2.0 and HiDream-I1 (a T5's width, and 32 layers of a Llama's); a VAE halves three
# times but where it is said.
TOKEN_WIDTHS = {
    "sd": 768,
    "sdxl": 2048,
    "pixart_alpha": 4096,
    "pixart_sigma": 4096,
    "flux2_klein": 3 * 2560,
    "lumina2": 2304,
    "hidream_image": 4096 + 32 * 4096,
}
POOLED_WIDTHS = {"sdxl": 1280}
CHANNELS = {"pixart_alpha": 4, "pixart_sigma": 4, "class_labels": 4, "hidream_image": 16}
PX_PER_LATENT = {"sana": 32, "qwenimage21": 16}


def made_of(family: type[Family]) -> Family:
    import diffusers

    parameters = inspect.signature(getattr(diffusers, family.model_class).__init__).parameters
    defaults = {name: one.default for name, one in parameters.items() if one.default is not inspect.Parameter.empty}
    px = PX_PER_LATENT.get(family.name, 8)
    return family(defaults, StoreFacts(latent_channels=0, text={}, px_per_latent=px))


def noise_of(family: type[Family]) -> str:
    """Return the noise of the middle timestep at two sizes; nothing if it is not a flow's."""
    made = made_of(family)
    schedule = load_schedule(
        Path("no model"), CPU, patch_size=made.patch_size, published=family.scheduler, levels=made.noise_levels({})
    )
    if not isinstance(schedule, FlowSchedule):
        return ""
    sides = (side // made.store.px_per_latent for side in (SIDE_PX // 2, SIDE_PX))
    return ", ".join(f"{float(schedule.at(MIDDLE, side, side).noise):.2f}" for side in sides)


def sizes_of(family: type[Family]) -> tuple[int, int, int]:
    """Return the bytes of a sample's latent, of its caption's tokens, and of what else a caption has, in F16."""
    made = made_of(family)
    channels = CHANNELS.get(family.name) or made.number("in_channels") // family.packing**2
    side = SIDE_PX // made.store.px_per_latent
    latent = channels * side * side * ITEM_BYTES
    if not family.parts:
        return latent, 0, 8  # a class, I64
    width = TOKEN_WIDTHS.get(family.name) or getattr(made, "token_width", 0) or made.number(str(made.token_field))
    tokens = NUM_TOKENS if family.padding is Padding.VALID else family.usual_tokens
    pooled = POOLED_WIDTHS.get(family.name, made.pooled_width)
    assert width > 0, family.name
    return latent, tokens * width * ITEM_BYTES, pooled * ITEM_BYTES


def table() -> list[str]:
    columns = ("family", "pipeline", "latent, KiB", "caption, KiB", "tokens stored", "noise, 512 and 1024 px")
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for family in sorted(FAMILIES, key=lambda one: one.name):
        latent, tokens, pooled = sizes_of(family)
        stored = "its own" if family.padding is Padding.VALID else f"all {family.usual_tokens}"
        lines.append(
            f"| {family.name} | {family.pipelines[0]} | {latent / 1024:,.0f} | {(tokens + pooled) / 1024:,.1f} | "
            f"{stored if family.parts else 'a class'} | {noise_of(family)} |"
        )
    return lines


def table_of_references() -> list[str]:
    columns = ("family", "pipeline", "references", "one of 1080x1920 px", "latent, KiB", "the text encoder sees")
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for family in sorted(FAMILIES, key=lambda one: one.name):
        if (own := family.references) is None:
            continue
        height, width = own.size(1080, 1920)
        latent = sizes_of(family)[0] * height * width / SIDE_PX**2
        area = own.text_area_px
        seen = "captions" if not own.text_sees else "both" if area is None else f"both, images of about {math.isqrt(area)}² px"
        allowed = str(own.most) if own.least == own.most else f"{own.least} to {own.most}"
        lines.append(
            f"| {family.name} | {family.pipelines[0]} | {allowed} | {height}x{width} | {latent / 1024:,.0f} | {seen} |"
        )
    return lines


def written(text: str, begin: str, lines: list[str]) -> str:
    before, _, rest = text.partition(begin)
    return "\n".join([before + begin, *lines, END]) + rest.partition(END)[2]


if __name__ == "__main__":
    print("\n".join(table()))
    if "--write" in sys.argv:
        page = written(PAGE.read_text(encoding="utf-8"), BEGIN, table())
        PAGE.write_text(written(page, BEGIN_REFERENCES, table_of_references()), encoding="utf-8")
