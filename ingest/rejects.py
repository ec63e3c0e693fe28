"""Why an image is refused: a reason that is counted, and a detail that says what was found."""

from __future__ import annotations

from enum import StrEnum


class Reason(StrEnum):
    """Why an image is refused."""

    EMPTY = "empty file"
    NOT_AN_IMAGE = "not an image"
    DAMAGED = "damaged image"
    ANIMATED = "animated or several pictures"
    TOO_LARGE = "too large"
    TOO_SMALL = "too small"
    TOO_SMALL_FOR_BUCKET = "too small for its bucket"
    MODE = "unsupported pixel format"
    UNREADABLE = "unreadable file"
    CAPTION = "unreadable caption"
    LATENT = "latent not finite in the stored dtype"
    TOKENS = "caption embedding not finite in the stored dtype"
    CLASS = "unknown class"


class RejectedError(Exception):
    """An image is refused: with a reason, and what was found."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail
