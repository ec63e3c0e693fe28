"""What families' pipelines do with reference images: how many, of which size, and whether the text encoder sees them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL.Image import Image

AREA_PX = 1024**2  # that every published pipeline resizes references to


@dataclass(frozen=True, slots=True, kw_only=True)
class References:
    """References of a family, each resized to an area with its own aspect, and sides of a multiple of 32 px.

    Source: `calculate_dimensions` of diffusers' Qwen-Image pipelines.
    """

    most: int  # that a sample may have
    least: int = 0
    text_sees: bool = False  # the text encoder sees them, too
    text_area_px: int | None = None  # of what it sees; None: it sees what the VAE gets
    come_first: bool = False  # their tokens are before the target's, not behind them

    def size(self, height_px: int, width_px: int, area_px: int | None = None) -> tuple[int, int]:
        """Return the size of what the VAE gets of an image, height first; `area_px` instead of the pipeline's 1024².

        Raises:
            ValueError: if the image is too long and narrow: a side would be 0.

        >>> References(most=1).size(1080, 1920)
        (768, 1376)
        """
        return self._checked(height_px, width_px, _rounded(height_px, width_px, area_px or AREA_PX))

    def fitted(self, image: Image, area_px: int | None = None) -> Image:
        """Return an upright image as the VAE gets it, RGB, resized exactly as the pipeline does."""
        return _resized(image, self.size(image.height, image.width, area_px))

    def for_text(self, original: Image, fitted: Image) -> Image:
        """Return what the text encoder sees of an upright RGB image, and of what the VAE gets of it."""
        if self.text_area_px is None:
            return fitted
        size = _rounded(original.height, original.width, self.text_area_px)
        return _resized(original, self._checked(original.height, original.width, size))

    @staticmethod
    def _checked(height_px: int, width_px: int, found: tuple[int, int]) -> tuple[int, int]:
        if 0 in found:
            raise ValueError(
                f"a reference of {height_px} by {width_px} px, height first, would be resized to {found[0]} by {found[1]}, "
                "expected sides above 0: it is too small, or too long and narrow"
            )
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptReferences(References):
    """References of Flux.2: as they are, larger ones made smaller; then cut around the middle to sides of a multiple of 16 px.

    Source: `Flux2Pipeline.__call__` and `Flux2ImageProcessor`.
    """

    def size(self, height_px: int, width_px: int, area_px: int | None = None) -> tuple[int, int]:
        """Return the size of what the VAE gets of an image, height first.

        >>> KeptReferences(most=8).size(1000, 700), KeptReferences(most=8).size(1080, 1920)
        ((992, 688), (768, 1360))
        """
        height, width = _at_most(height_px, width_px, area_px or AREA_PX)
        return self._checked(height_px, width_px, (height // 16 * 16, width // 16 * 16))

    def fitted(self, image: Image, area_px: int | None = None) -> Image:
        """Return an upright image as the VAE gets it, RGB."""
        height, width = self.size(image.height, image.width, area_px)
        resized = _resized(image, _at_most(image.height, image.width, area_px or AREA_PX))
        left, top = (resized.width - width) // 2, (resized.height - height) // 2
        return resized.crop((left, top, left + width, top + height))


KONTEXT_SIZES = (
    *((672, 1568), (688, 1504), (720, 1456), (752, 1392), (800, 1328), (832, 1248), (880, 1184), (944, 1104), (1024, 1024)),
    *((1104, 944), (1184, 880), (1248, 832), (1328, 800), (1392, 752), (1456, 720), (1504, 688), (1568, 672)),
)
"""Widths and heights. Source: `PREFERRED_KONTEXT_RESOLUTIONS`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KontextReferences(References):
    """References of Flux.1 Kontext: resized to the one of 17 sizes that is nearest by aspect. Source: `FluxKontextPipeline`."""

    def size(self, height_px: int, width_px: int, area_px: int | None = None) -> tuple[int, int]:
        """Return the size of what the VAE gets of an image, height first; another area scales the 17 sizes.

        >>> KontextReferences(most=1).size(1080, 1920), KontextReferences(most=1).size(1080, 1920, 512**2)
        ((752, 1392), (368, 688))
        """
        own = self._checked(height_px, width_px, (height_px // 16 * 16, width_px // 16 * 16))
        aspect = own[1] / own[0]  # the pipeline's, of sides floored so
        _, width, height = min((abs(aspect - width / height), width, height) for width, height in KONTEXT_SIZES)
        scale = math.sqrt((area_px or AREA_PX) / AREA_PX)
        return self._checked(height_px, width_px, (int(height * scale) // 16 * 16, int(width * scale) // 16 * 16))


def _rounded(height_px: int, width_px: int, area_px: int) -> tuple[int, int]:
    """Return sides of about an area, to a multiple of 32, in the pipeline's order of operations."""
    ratio = width_px / height_px
    width = math.sqrt(area_px * ratio)
    return round(width / ratio / 32) * 32, round(width / 32) * 32


def _at_most(height_px: int, width_px: int, area_px: int) -> tuple[int, int]:
    """Return sides of at most an area, in the pipeline's order of operations."""
    if height_px * width_px <= area_px:
        return height_px, width_px
    scale = math.sqrt(area_px / (width_px * height_px))
    return int(height_px * scale), int(width_px * scale)


def _resized(image: Image, size: tuple[int, int]) -> Image:
    """Return an image as RGB of a size, height first, by the filter of all these pipelines."""
    from PIL.Image import Resampling

    return image.convert("RGB").resize((size[1], size[0]), Resampling.LANCZOS)
