"""Bucket grids: the sizes that images are sorted into, by default those of the model."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bucketline.errors import ModelError, UsageError
from bucketline.families.family import Family, refuse_unsquare
from bucketline.families.registry import family_of_model, square_only
from bucketline.families.vaes import PACKED_VAES, VAES, latent_channels, vae_class

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from bucketline.ingest.encoders.model_folder import ModelFolder


MAX_SIDE_PX = 1 << 14
MAX_BUCKETS = 1024
MAX_TOKENS = 1 << 20
MAX_ASPECT = 4  # the longer side over the shorter, in `area` and `tokens` grids
_FORM = re.compile(r"sd15|sdxl|square:\d+|area:\d+(:\d+)?|tokens:\d+(:\d+)?|\d+x\d+(,\d+x\d+)*")
FORMS = "sd15, sdxl, square:N, area:N[:STEP], tokens:N[:PX] or a list such as 256x192,192x256"


@dataclass(frozen=True, slots=True, order=True)
class Size:
    """Height and width in pixels, height first."""

    height_px: int
    width_px: int

    def __str__(self) -> str:
        return f"{self.height_px}x{self.width_px}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Bucket sizes and their name, such as `area:512:64`."""

    name: str
    sizes: tuple[Size, ...]


def _sizes(text: str) -> tuple[Size, ...]:
    return tuple(Size(*map(int, size.split("x"))) for size in text.split(","))


# From the SDXL paper, appendix I, height first. It lists 704x1344 but not 1344x704; all other sizes come in both orientations.
SDXL_SIZES = _sizes(
    "512x1856,512x1920,512x1984,512x2048,576x1664,576x1728,576x1792,640x1536,640x1600,704x1344,704x1408,704x1472,768x1280,"
    "768x1344,832x1152,832x1216,896x1088,896x1152,960x1024,960x1088,1024x960,1024x1024,1088x896,1088x960,1152x832,1152x896,"
    "1216x832,1280x768,1344x768,1408x704,1472x704,1536x640,1600x640,1664x576,1728x576,1792x576,1856x512,1920x512,1984x512,"
    "2048x512"
)


def refuse_other_form(text: str) -> None:
    """Check the form of a grid's text, which needs no model."""
    if not _FORM.fullmatch(text):
        raise UsageError(f"--grid {text!r} is not a grid; expected {FORMS}")


def parse_grid(text: str, *, step_px: int, align_px: int, token_px: int | None = None) -> Grid:
    """Return the grid that one of `FORMS` describes.

    - `sd15`: the usual list of Stable Diffusion 1.5 trainers, 512² pixels in steps of 64, from 1:4 to 4:1
      (kohya-ss/sd-scripts, `make_bucket_resolutions` with its defaults: sides of 256 to 1024 px).
    - `sdxl`: the 40 sizes that SDXL was trained on (Podell et al., "SDXL: Improving Latent Diffusion Models for
      High-Resolution Image Synthesis", 2023, appendix I).
    - `square:N`: only N x N.
    - `area:N[:STEP]`: at most N² pixels, sides multiples of STEP, from 1:4 to 4:1; STEP defaults to `step_px`.
    - `tokens:N[:PX]`: every rectangle of exactly N tokens from 1:4 to 4:1, where a token covers PX x PX pixels; PX defaults
      to `token_px`. N should have many divisors: 4096 yields 3 sizes, 4032 yields 12.
    - `HxW,HxW,…`: these sizes, height first.

    `align_px` is the number of pixels that a latent pixel covers each way; every side must be a multiple of it.
    """
    refuse_other_form(text)
    if text == "sd15":
        sizes: Iterable[Size] = _area_sizes(512, 64)
        name = text
    elif text == "sdxl":
        sizes = SDXL_SIZES
        name = text
    elif match := re.fullmatch(r"square:(\d+)", text):
        sizes = [Size(int(match[1]), int(match[1]))]
        name = text
    elif match := re.fullmatch(r"area:(\d+)(?::(\d+))?", text):
        step = int(match[2]) if match[2] else step_px
        sizes = _area_sizes(int(match[1]), step)
        name = f"area:{match[1]}:{step}"
    elif match := re.fullmatch(r"tokens:(\d+)(?::(\d+))?", text):
        side = int(match[2]) if match[2] else token_px
        if side is None:
            raise UsageError(f"--grid {text}: this model has no transformer that defines a token's size; add it: {text}:16")
        if not side or side % align_px:
            raise UsageError(f"--grid {text}: a token of {side} px must cover a multiple of {align_px} px with this VAE")
        sizes = _token_sizes(text, int(match[1]), side)
        name = f"tokens:{match[1]}:{side}"
    else:
        sizes = _sizes(text)
        name = text
    ordered = tuple(sorted(set(sizes)))
    _check(text, ordered, align_px)
    return Grid(name=name, sizes=ordered)


def _check(text: str, sizes: tuple[Size, ...], align_px: int) -> None:
    for size in sizes:
        if min(size.height_px, size.width_px) < align_px or size.height_px % align_px or size.width_px % align_px:
            raise UsageError(f"--grid {text!r} has the size {size}; both sides must be multiples of {align_px} px for this VAE")
        if max(size.height_px, size.width_px) > MAX_SIDE_PX:
            raise UsageError(f"--grid {text!r} has the size {size}; a side may have at most {MAX_SIDE_PX} px")
    if not 1 <= len(sizes) <= MAX_BUCKETS:
        raise UsageError(f"--grid {text!r} gives {len(sizes)} sizes, expected 1 to {MAX_BUCKETS}")


def _area_sizes(side_px: int, step_px: int) -> list[Size]:
    """Return the sizes of at most `side_px`² pixels, with sides from half to twice `side_px` that are multiples of the step.

    For each height this is the widest width that fits, and the same with height and width exchanged.
    """
    if step_px < 1 or side_px < step_px or 2 * side_px > MAX_SIDE_PX:
        raise UsageError(
            f"--grid area:{side_px}:{step_px}: the step must be 1 to {side_px} px, and twice {side_px} at most {MAX_SIDE_PX}"
        )
    sizes = []
    for height in range(step_px, 2 * side_px + 1, step_px):
        width = min(side_px * side_px // height, 2 * side_px) // step_px * step_px
        if 2 * height >= side_px and 2 * width >= side_px:
            sizes += [Size(height, width), Size(width, height)]
    return sizes


def _token_sizes(text: str, num_tokens: int, token_px: int) -> list[Size]:
    """Return the sizes whose sides in tokens multiply to exactly `num_tokens`, from 1:4 to 4:1."""
    if not 1 <= num_tokens <= MAX_TOKENS:
        raise UsageError(f"--grid {text}: expected 1 to {MAX_TOKENS} tokens")
    layouts = _layouts(num_tokens)
    if not layouts:
        near = range(max(1, num_tokens - num_tokens // 16), num_tokens + num_tokens // 16 + 2)
        better = max(near, key=lambda count: (len(_layouts(count)), -abs(count - num_tokens)))
        raise UsageError(
            f"--grid {text}: {num_tokens} tokens form no rectangle from 1:4 to 4:1; "
            f"tokens:{better} forms {len(_layouts(better))}"
        )
    return [Size(height * token_px, width * token_px) for height, width in layouts]


def _layouts(num_tokens: int) -> list[tuple[int, int]]:
    """Return height and width of each rectangle of exactly `num_tokens` tokens.

    >>> _layouts(36)
    [(3, 12), (4, 9), (6, 6), (9, 4), (12, 3)]
    """
    heights = range(math.isqrt(num_tokens // MAX_ASPECT), math.isqrt(num_tokens * MAX_ASPECT) + 1)
    pairs = [(height, num_tokens // height) for height in heights if height and num_tokens % height == 0]
    return [(height, width) for height, width in pairs if height <= MAX_ASPECT * width and width <= MAX_ASPECT * height]


# ----------------------------------------------------------------------------------------------------------------- model sizes
# Image sizes of a model: its default grid, its latent sizes, and the sizes that it cannot take.


def latent_sizes(model: ModelFolder) -> tuple[str, int, int]:
    """Return a VAE's class, px per latent pixel (each way) and latent channels, from `vae/config.json` only."""
    model.part("vae")
    config = model.config("vae") or {}
    kind = vae_class(config)
    if kind not in PACKED_VAES:
        raise ModelError(f"{model.name}: vae/ is a {kind[:80]}, expected {' or '.join(PACKED_VAES)}; name a model that has one")
    downscale, channels = VAES[kind].px_per_latent(config), latent_channels(config)
    if downscale is None or channels is None:
        raise ModelError(
            f"{model.name}: vae/config.json is not that of an {kind}: it lacks its levels or its channels "
            f"({VAES[kind].levels_field or VAES[kind].halvings_field}, latent_channels or z_dim); download it again"
        )
    return kind, downscale, channels


def model_grid(wanted: str | None, model: ModelFolder, downscale: int) -> Grid:
    """Return the requested grid, or the model's own; `downscale` is px per latent pixel, each way."""
    unet, transformer = model.config("unet"), model.config("transformer")
    kind = square_only(transformer, model.index())
    token_px = None if transformer is None else _token_px(transformer, downscale)
    side = _side_px(unet, transformer, downscale)
    if token_px is not None:
        step = max(token_px, side // 16 // token_px * token_px)
    else:
        levels = len((unet or {}).get("block_out_channels", ())) or 4
        step = downscale * 2 ** (levels - 1)  # the UNet can halve this without a remainder
    text = wanted or (f"square:{side}" if kind else f"area:{side}")
    grid = parse_grid(text, step_px=step, align_px=downscale, token_px=token_px)
    if kind:
        sizes = ((str(size), size.height_px, size.width_px) for size in grid.sizes)
        refuse_unsquare(f"--grid {text!r}", kind, sizes, f"use --grid square:{side}, or a list of square sizes")
    return grid


def _token_px(transformer: Mapping[str, Any], downscale: int) -> int:
    family = family_of_model(transformer) or Family
    return downscale * family.positions_per_token(transformer) * family.alignment


def _side_px(unet: Mapping[str, Any] | None, transformer: Mapping[str, Any] | None, downscale: int) -> int:
    """Return the side in px of the square image that the model was made for."""
    usual = 64 if transformer is None else 128  # latent pixels without a sample_size: 512 px for a UNet, else 1024
    size = (unet or transformer or {}).get("sample_size") or usual
    return downscale * int(size if isinstance(size, int) else max(size))
