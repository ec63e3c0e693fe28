"""Models that take only square pictures, and give back a square one of as many tokens for any other, without a word."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bucketline.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

DIT = "DiTTransformer2DModel"


def square_only(transformer: Mapping[str, Any] | None, index: Mapping[str, Any] | None) -> str | None:
    """Name the class of a model that takes only square pictures; None where it takes others too.

    `transformer` is the content of `transformer/config.json`, `index` that of `model_index.json`, None where there is none.
    diffusers' DiT takes height = width = √tokens when it puts its tokens together again. Its published checkpoints carry its
    older name, `Transformer2DModel` with `ada_norm_zero`, which diffusers maps to it.
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
    """Refuse sizes (a name, height and width) that are not square.

    Raises:
        UsageError: naming the first of them.
    """
    for name, height, width in sizes:
        if height != width:
            raise UsageError(
                f"{item} has the size {name}, and the model is a {kind}, which takes only square ones: "
                f"it would silently give back a square of as many tokens; {remedy}"
            )
