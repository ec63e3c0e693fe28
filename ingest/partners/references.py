"""References: images that a target is made from, in sRGB, each of the target's place in the source or of a size of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from bucketline.ingest.images.crop import Reason, RejectedError
from bucketline.ingest.images.decode import decode_placed, size_by_header

if TYPE_CHECKING:
    from typing import BinaryIO

    from numpy.typing import NDArray
    from PIL.Image import Image

    from bucketline.families.references import References
    from bucketline.ingest.images.crop import Framing, Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """A reference as encoders get it."""

    pixels: NDArray[np.uint8]  # [height, width, 3], for the VAE
    is_pair: bool  # it has its target's place
    seen: Image | None = None  # RGB, for a text encoder that sees it

    @property
    def num_bytes(self) -> int:
        return self.pixels.nbytes + (0 if self.seen is None else 3 * self.seen.height * self.seen.width)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceReader:
    """How a family takes references. One of its target's size in px, an aligned pair, gets the target's resize and crop."""

    family: References
    area_px: int | None = None  # of a reference, in place of the family's own

    def size(self, height_px: int, width_px: int, target: Placement) -> tuple[int, int]:
        """Return the height and width in px of what the VAE gets of an upright image."""
        if (height_px, width_px) == target.source:
            return target.bucket.height_px, target.bucket.width_px
        try:
            return self.family.size(height_px, width_px, self.area_px)
        except ValueError as error:
            raise RejectedError(Reason.TOO_SMALL, str(error)) from error

    def size_in(self, file: BinaryIO, framing: Framing, target: Placement) -> tuple[tuple[int, int], bool]:
        """Return `size` of an image file, from its header only, and whether it is an aligned pair."""
        own = size_by_header(file, framing)
        return self.size(*own, target), own == target.source

    def read(self, data: bytes, framing: Framing, target: Placement) -> Reference:
        """Decode a reference of a target: upright, its colours converted to sRGB as its target's."""
        image, placed, _ = decode_placed(data, framing, lambda *size: target if size == target.source else None)
        if placed is None:
            self.size(image.height, image.width, target)
        fitted = image if placed is not None else self.family.fitted(image, self.area_px)
        seen = self.family.for_text(image, fitted) if self.family.text_sees else None
        return Reference(pixels=np.asarray(fitted, dtype=np.uint8), is_pair=placed is not None, seen=seen)
