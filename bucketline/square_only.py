"""Detect models that take only square images; for any other they silently return a square with the same number of tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bucketline.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

DIT = "DiTTransformer2DModel"


def square_only(transformer: Mapping[str, Any] | None, index: Mapping[str, Any] | None) -> str | None:
    """Return the class name of a model that takes only square images; None if it takes other shapes too.

    `transformer` is the content of `transformer/config.json`, `index` that of `model_index.json`; None if the file is missing.
    diffusers' DiT assumes height = width = √tokens when it reassembles its tokens. Its published checkpoints have its older
    name, `Transformer2DModel` with `ada_norm_zero`, which diffusers maps to it.
    """
    transformer, index = transformer or {}, index or {}
    kind = transformer.get("_class_name")
    if kind == DIT or (kind == "Transformer2DModel" and transformer.get("norm_type") == "ada_norm_zero"):
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
