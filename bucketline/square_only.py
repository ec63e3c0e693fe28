"""Detect models that take only square images; for any other they silently return a square with the same number of tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bucketline.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

DIT = "DiTTransformer2DModel"
OLD_NAMES = {"ada_norm_zero": DIT, "ada_norm_single": "PixArtTransformer2DModel"}  # by `norm_type`


def class_name(config: Mapping[str, Any]) -> str | None:
    """Return a model's class name, of a published `Transformer2DModel` the present one. Source: diffusers' own mapping."""
    kind = config.get("_class_name")
    return OLD_NAMES.get(str(config.get("norm_type")), kind) if kind == "Transformer2DModel" else kind


def square_only(transformer: Mapping[str, Any] | None, index: Mapping[str, Any] | None) -> str | None:
    """Return the class name of a model that takes only square images; None if it takes other shapes too.

    `transformer` is the content of `transformer/config.json`, `index` that of `model_index.json`; None if the file is missing.
    diffusers' DiT assumes height = width = √tokens when it reassembles its tokens.
    """
    transformer, index = transformer or {}, index or {}
    kind = class_name(transformer)
    if kind == DIT:
        return DIT
    part = index.get("transformer")
    if not kind and (index.get("_class_name") == "DiTPipeline" or (isinstance(part, list) and DIT in part)):
        return DIT
    return None


def refuse_unsquare(item: str, kind: str, sizes: Iterable[tuple[str, int, int]], remedy: str) -> None:
    """Check that all sizes (name, height, width) are square.

    Raises:
        UsageError: if one is not; the message names the first.
    """
    for name, height, width in sizes:
        if height != width:
            raise UsageError(
                f"{item} has the size {name}, and the model is a {kind}, which takes only square ones: "
                f"it would silently return a square with the same number of tokens; {remedy}"
            )
