"""Bucket grids, and bucket, resize and crop of an image, computed from its size in integer arithmetic; reasons for rejects."""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from bucketline.command_line import counted
from bucketline.errors import ModelError, UsageError
from bucketline.families.family import Family, refuse_unsquare
from bucketline.families.registry import family_of_model, square_only
from bucketline.families.vaes import PACKED_VAES, VAES, latent_channels, vae_class
from bucketline.store.format.block import draw
from bucketline.store.format.schema import MAX_RESIZED_PX, box_in_source, kept_share

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from bucketline.ingest.encoders.model_folder import ModelFolder


# -------------------------------------------------------------------------------------------------------------------- geometry
# Compute bucket, resize and crop from an image's size and a grid, with a pure function in integer arithmetic.
#
# All sizes are computed here, so that no two stages can round differently.

DRAW_BITS = 64


class NoBucketError(ValueError):
    """Every bucket would need more upscaling than is allowed."""

    def __init__(self, least: Fraction) -> None:
        super().__init__(f"every bucket needs more enlarging than is allowed, the least {float(least):.3f} times")
        self.least = least


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """How an image is fitted into its bucket: resized to cover it, then cropped. In pixels, height first."""

    bucket: Size
    source: tuple[int, int]  # upright
    resized: tuple[int, int]
    top: int
    left: int

    @property
    def crop(self) -> tuple[int, int, int, int]:
        """Top, left, height and width of the crop in the resized image."""
        return self.top, self.left, self.bucket.height_px, self.bucket.width_px

    @property
    def crop_in_source(self) -> tuple[int, int, int, int]:
        """The same box in the source image: top, left, height and width, rounded outwards to whole pixels."""
        return box_in_source(self.crop, self.resized, self.source)

    @property
    def enlarged(self) -> bool:
        return self.resized[0] > self.source[0] or self.resized[1] > self.source[1]

    @property
    def cropped_away(self) -> float:
        """The share of the source's pixels outside the crop, 0 to 1."""
        return float(self.cropped_share)

    @property
    def cropped_share(self) -> Fraction:
        """`cropped_away`, exactly."""
        return 1 - Fraction(*kept_share(self.bucket.height_px, self.bucket.width_px, *self.source))


def bucket_placement(
    height_px: int, width_px: int, grid: Grid, *, max_upscale: Fraction | None = None, draw: int | None = None
) -> Placement:
    """Place an image in the bucket that keeps the largest share of it; of two equal buckets, the larger.

    Buckets that need upscaling by more than `max_upscale` are excluded. The crop is centred, or placed by the 64-bit number
    `draw`: 0 is the top or left, the largest value the bottom or right.

    >>> from bucketline.ingest.images.crop import parse_grid
    >>> bucket_placement(300, 400, parse_grid("192x256,256x192", step_px=64, align_px=8)).bucket
    Size(height_px=192, width_px=256)
    """
    if height_px < 1 or width_px < 1:
        raise ValueError(f"an image of {height_px}x{width_px} px has no place")
    if draw is not None and not 0 <= draw < 1 << DRAW_BITS:
        raise ValueError(f"a draw of {draw}, expected 0 or more and less than 2**{DRAW_BITS}")
    bucket = _choose(height_px, width_px, grid, max_upscale)
    height, width = bucket.height_px, bucket.width_px
    if height * width_px >= width * height_px:  # scale by height, crop the width
        resized = height, _round(width_px * height, height_px)
    else:
        resized = _round(height_px * width, width_px), width
    return Placement(
        bucket=bucket,
        source=(height_px, width_px),
        resized=resized,
        top=_offset(resized[0] - height, draw),
        left=_offset(resized[1] - width, draw),
    )


def _choose(height_px: int, width_px: int, grid: Grid, max_upscale: Fraction | None) -> Size:
    sizes = grid.sizes
    if max_upscale is not None:
        sizes = tuple(size for size in sizes if _enlarging(size, height_px, width_px) <= max_upscale)
        if not sizes:
            raise NoBucketError(min(_enlarging(size, height_px, width_px) for size in grid.sizes))
    bucket = sizes[0]
    for size in sizes[1:]:
        kept, best = (kept_share(one.height_px, one.width_px, height_px, width_px) for one in (size, bucket))
        share, best_share = kept[0] * best[1], best[0] * kept[1]
        if (share, size.height_px * size.width_px) > (best_share, bucket.height_px * bucket.width_px):
            bucket = size
    return bucket


def _enlarging(size: Size, height_px: int, width_px: int) -> Fraction:
    """Return the scale factor at which the image covers the bucket; above 1 it is enlarged."""
    return max(Fraction(size.height_px, height_px), Fraction(size.width_px, width_px))


def _offset(slack_px: int, draw: int | None) -> int:
    """Return the start of the crop, 0 to `slack_px`: the middle, or uniformly distributed over all draws."""
    return slack_px // 2 if draw is None else (draw * (slack_px + 1)) >> DRAW_BITS


def _round(numerator: int, denominator: int) -> int:
    """Divide and round half up. The result is never below the quotient's floor, so the image still covers its bucket."""
    return (2 * numerator + denominator) // (2 * denominator)


# --------------------------------------------------------------------------------------------------------------------- rejects


class Reason(StrEnum):
    """The reason for rejecting an image."""

    EMPTY = "empty file"
    NOT_AN_IMAGE = "not an image"
    DAMAGED = "damaged image"
    ANIMATED = "animated or several images"
    TOO_LARGE = "too large"
    TOO_SMALL = "too small"
    TOO_SMALL_FOR_BUCKET = "too small for its bucket"
    CROP = "too much cropped away"
    MODE = "unsupported pixel format"
    UNREADABLE = "unreadable file"
    CAPTION = "unreadable caption"
    LATENT = "latent not finite in the stored dtype"
    TOKENS = "caption embedding not finite in the stored dtype"
    REFUSED = "caption that the model does not take"
    CACHE = "unusable cache entry"
    OTHER_VAE = "latent of another VAE"
    SCALE = "wrongly scaled latent"
    TEXT = "unusable text embedding"
    PLACEMENT = "crop unknown or impossible"
    PARTNER = "missing or unusable reference or mask"


class RejectedError(Exception):
    """An image is rejected; `detail` names what was found."""

    def __init__(self, reason: Reason, detail: str, *, is_passing: bool = False, placement: Placement | None = None) -> None:
        """`is_passing`: the image only cannot be read at present, so its existing row is kept.

        `placement`: where its crop would be, if that is why it is rejected.
        """
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail
        self.placement = placement
        self.is_passing = is_passing or reason is Reason.UNREADABLE


# ------------------------------------------------------------------------------------------------------------------------ crop

RESAMPLING = "lanczos"
DEFAULT_MAX_CROP = 0.75
"""Share of its area that an image may lose in a new store.

A square bucket then takes 1:4 to 4:1, the span of the other grids, and those take up to 16:1. What photographs lose is less:
up to 3:1 at most 10 % in `sd15`, `sdxl` and `area:512`, and in a square 33 % (3:2), 44 % (16:9) or 67 % (3:1).
"""
BACKGROUNDS = {"white": "#ffffff", "black": "#000000", "grey": "#808080"}


class Crop(StrEnum):
    """Position of the crop in the resized image: the centre, or a random place derived from the sample id."""

    CENTER = "center"
    RANDOM = "random"


@dataclass(frozen=True, slots=True, kw_only=True)
class Framing:
    """Rules for fitting an image into its bucket."""

    grid: Grid
    crop: Crop = Crop.CENTER
    max_upscale: Fraction | None = None  # None: no limit
    max_crop: Fraction | None = None  # of the image's area; None: no limit
    min_size_px: int = 1  # of the shorter side
    background: str = BACKGROUNDS["white"]  # `#rrggbb`, behind transparent images
    jpeg_draft: bool = False  # decode large JPEGs at 1/2, 1/4 or 1/8 scale

    def place(self, sample_id: str, height_px: int, width_px: int) -> Placement:
        """Place an upright image. The result depends only on its id, its size and these rules."""
        drawn = crop_draw(sample_id) if self.crop is Crop.RANDOM else None
        placement = bucket_placement(height_px, width_px, self.grid, max_upscale=self.max_upscale, draw=drawn)
        if self.max_crop is not None and placement.cropped_share > self.max_crop:
            raise RejectedError(
                Reason.CROP,
                f"{height_px}x{width_px} px, in its bucket of {placement.bucket} the crop would lose "
                f"{_percent(placement.cropped_share)} of the area, more than --max-crop {_percent(self.max_crop)}",
                placement=placement,
            )
        if (side := max(placement.resized)) > MAX_RESIZED_PX:
            raise RejectedError(
                Reason.TOO_LARGE,
                f"{height_px}x{width_px} px, to cover its bucket a side would have {side} px, at most {MAX_RESIZED_PX} fit",
            )
        return placement


def upscale_limit(number: float | None) -> Fraction | None:
    """Return `max_upscale` as an exact decimal fraction; None if there is no limit.

    >>> upscale_limit(1.1)
    Fraction(11, 10)
    """
    if number is not None and not 0.0 < number < float("inf"):
        raise UsageError(f"max_upscale is {number:g}, expected a number above 0, such as 1.5")
    return None if number is None else Fraction(str(number))


def crop_limit(share: float | None) -> Fraction | None:
    """Return `--max-crop` as an exact decimal fraction; None if there is no limit, which is also what 1 means.

    >>> crop_limit(0.75), crop_limit(1.0)
    (Fraction(3, 4), None)
    """
    if share is not None and not 0.0 < share <= 1.0:
        raise UsageError(f"--max-crop is {share:g}, expected a share of the area above 0 and at most 1, such as 0.5")
    return None if share is None or share == 1.0 else Fraction(str(share))


def _percent(share: Fraction) -> str:
    return f"{100 * float(share):.4g} %"


def parse_background(text: str) -> str:
    """Return `white`, `black`, `grey` or `#RRGGBB` as `#rrggbb`.

    >>> parse_background("grey"), parse_background("#C0FFEE")
    ('#808080', '#c0ffee')
    """
    if text in BACKGROUNDS:
        return BACKGROUNDS[text]
    if re.fullmatch(r"#[0-9a-fA-F]{6}", text):
        return text.lower()
    raise UsageError(f"background {text!r} is not a colour; expected {', '.join(BACKGROUNDS)} or #RRGGBB")


def crop_draw(sample_id: str) -> int:
    """Return the 64-bit hash of a sample id that determines its random crop."""
    return draw(sample_id, "crop")


@dataclass(frozen=True, slots=True, kw_only=True)
class CropLoss:
    """Number of images in one bucket, and the sum and maximum of the shares of source pixels cropped away."""

    images: int = 0
    total: float = 0.0
    most: float = 0.0

    def __add__(self, other: CropLoss) -> CropLoss:
        return CropLoss(images=self.images + other.images, total=self.total + other.total, most=max(self.most, other.most))


def crop_losses_as_json(losses: Mapping[str, CropLoss]) -> dict[str, dict[str, float]]:
    """Return by bucket the number of `images`, and the `mean` and `max` share cropped away.

    >>> crop_losses_as_json({"train/64x64": CropLoss(images=4, total=1.0, most=0.5)})
    {'train/64x64': {'images': 4, 'mean': 0.25, 'max': 0.5}}
    """
    return {
        bucket: {"images": loss.images, "mean": round(loss.total / loss.images, 6), "max": round(loss.most, 6)}
        for bucket, loss in sorted(losses.items())
    }


def crop_loss_line(losses: Mapping[str, Mapping[str, float]]) -> str:
    """Return the result of `crop_losses_as_json` in one line, with the bucket of the largest loss.

    >>> crop_loss_line({"train/64x64": {"images": 4, "mean": 0.25, "max": 0.5}})
    'crop loss: 25.0 % of the area on average, at most 50.0 % (train/64x64)'
    """
    images = sum(loss["images"] for loss in losses.values())
    mean = sum(loss["images"] * loss["mean"] for loss in losses.values()) / images
    worst = max(losses, key=lambda bucket: losses[bucket]["max"])
    if (most := f"{100 * losses[worst]['max']:.1f}") == "0.0":
        return "crop loss: none"
    return f"crop loss: {100 * mean:.1f} % of the area on average, at most {most} % ({worst})"


_SMALL = 4  # images in a bucket: with fewer, they repeat within a batch of this many
_SMALL_SHARE = 0.1  # of all images; what a large source has in rare buckets is not worth a word
_MOST_IMAGES = 500
_MOST_LOST = Fraction(1, 4)  # of an image's area, for the sake of fewer buckets


def fewer_buckets_note(placed: Sequence[Placement]) -> list[str]:
    """Return a note with a grid of fewer buckets, if many of a small source's training images have a bucket with few others.

    The bucket with the fewest images is left out first, unless an image would then lose more than a quarter.
    """
    counts = kept = Counter(one.bucket for one in placed)
    num_small = sum(number for number in counts.values() if number < _SMALL)
    if len(counts) < 2 or len(placed) > _MOST_IMAGES or num_small <= _SMALL_SHARE * len(placed):
        return []
    found, small = placed, sorted(counts, key=lambda size: (counts[size], size))
    while small and kept[small[0]] < _SMALL and len(kept) > 1:
        grid = Grid(name="", sizes=tuple(sorted(kept.keys() - {small.pop(0)})))
        tried = [bucket_placement(*one.source, grid) for one in placed]
        if max(one.cropped_share for one in tried) <= max(_MOST_LOST, *(one.cropped_share for one in found)):
            kept, found = Counter(one.bucket for one in tried), tried
            small = sorted(kept, key=lambda size: (kept[size], size))
    if len(kept) == len(counts):
        return []
    now, then = (f"crop loss {100 * sum(one.cropped_away for one in each) / len(placed):.1f} %" for each in (placed, found))
    few = f"{num_small} of {len(placed)} images are in buckets of fewer than {_SMALL}, and repeat within batches of {_SMALL}"
    grid_text = f"--grid {','.join(map(str, sorted(kept)))}"
    return [f"{few}. Now: {len(counts)} buckets, {now}; with {grid_text}: {counted(len(kept), 'bucket')}, {then}"]


# ------------------------------------------------------------------------------------------------------------------------ grid

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
