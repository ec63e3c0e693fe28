"""The refusal of buckets that a model would silently turn into squares."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from bucketline.errors import ModelError
from bucketline.square_only import refuse_unsquare, square_only

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from bucketline.store import Bucket


def refuse_unsquare_buckets(model_folder: Path, buckets: Iterable[Bucket]) -> None:
    """Refuse a store with buckets that are not square for a model that takes no other (diffusers' DiT).

    Raises:
        UsageError: naming the first such bucket.
        ModelError: where the model folder's configuration cannot be read.
    """
    kind = square_only(_read(model_folder / "transformer" / "config.json"), _read(model_folder / "model_index.json"))
    if kind is not None:
        sizes = ((bucket.name, bucket.height_px, bucket.width_px) for bucket in buckets)
        refuse_unsquare("the store", kind, sizes, "pack the source into a store with --grid square:N")


def _read(path: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read as JSON: {error}") from error
    return found if isinstance(found, dict) else None
