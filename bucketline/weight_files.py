"""Find a model component's weight files: plain ones, or a variant such as `diffusion_pytorch_model.fp16.safetensors`.

diffusers and transformers load a variant only by its name; otherwise they report a missing `.bin`.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from bucketline.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Iterable

DIFFUSERS = ("diffusion_pytorch_model",)
TRANSFORMERS = ("model", "pytorch_model")
# adapters, as diffusers and peft load them
LORA_FILE, PEFT_FILE = "pytorch_lora_weights.safetensors", "adapter_model.safetensors"
_PREFERRED = ("fp32", "fp16", "bf16")  # most precise first, for several variants without plain weights
_PARTS = r"(-\d{5}-of-\d{5})"
_SUFFIX = r"\.(?:safetensors|bin)"


def variant_of(item: str, names: Iterable[str], bases: tuple[str, ...]) -> str | None:
    """Return the variant by which to load a component's weights, from its file names; None for plain weights.

    >>> variant_of("vae/", ["config.json", "diffusion_pytorch_model.fp16.safetensors"], DIFFUSERS)
    'fp16'
    >>> variant_of("vae/", ["diffusion_pytorch_model.bin", "diffusion_pytorch_model.fp16.bin"], DIFFUSERS) is None
    True
    """
    there = sorted(names)
    base = "|".join(map(re.escape, bases))
    if any(re.fullmatch(rf"(?:{base}){_PARTS}?{_SUFFIX}", name) for name in there):
        return None
    # the part number follows the variant in one library and precedes it in the other
    pattern = re.compile(rf"(?:{base})(?:\.(\w+){_PARTS}?|{_PARTS}\.(\w+)){_SUFFIX}")
    found = {match[1] or match[4] for name in there if (match := pattern.fullmatch(name)) is not None}
    if not found:
        wanted = ", ".join(f"{name}.safetensors, {name}.bin" for name in bases)
        raise ModelError(
            f"{item} has no weights: looked for {wanted}, these in parts (-00001-of-00002) and in variants "
            f"({bases[0]}.fp16.safetensors); it has {', '.join(there) or 'no file'}; download the model again"
        )
    chosen = next((name for name in _PREFERRED if name in found), None) or (found.pop() if len(found) == 1 else None)
    if chosen is None:
        raise ModelError(
            f"{item} has its weights in the variants {', '.join(sorted(found))} and none without a variant's name; "
            "keep one of them"
        )
    return chosen


def safetensors_of(names: Iterable[str], bases: tuple[str, ...], variant: str | None) -> list[str]:
    """Return the names of a component's .safetensors files of a variant, None for the plain ones; empty if it has only others.

    >>> safetensors_of(["model-00001-of-00002.safetensors", "model.fp16.safetensors", "model.bin"], TRANSFORMERS, None)
    ['model-00001-of-00002.safetensors']
    """
    base, own = "|".join(map(re.escape, bases)), "" if variant is None else re.escape(f".{variant}")
    pattern = re.compile(rf"(?:{base})(?:{own}{_PARTS}?|{_PARTS}{own})\.safetensors")
    return sorted(name for name in names if pattern.fullmatch(name))
