"""Reasons for rejecting an image: a reason to count by, and a detail that names what was found."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bucketline.ingest.images.geometry import Placement


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
