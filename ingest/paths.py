"""Refusing a store that lies where the images lie: cached files must never be taken for images, nor the reverse."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bucketline.errors import UsageError
from bucketline.store.overlap import Overlap, overlap

if TYPE_CHECKING:
    from pathlib import Path


def refuse_overlap(source: Path, store: Path) -> None:
    """Refuse a source and a store that are the same folder, or of which one lies in the other.

    Raises:
        UsageError: where they are.
    """
    found = {
        Overlap.SAME: f"the source {source} and the store {store} are the same folder",
        Overlap.INSIDE: f"the store {store} lies inside the source {source}",
        Overlap.AROUND: f"the source {source} lies inside the store {store}",
    }
    if how := overlap(store, source):
        raise UsageError(f"{found[how]}; choose a store outside the folder of images")
