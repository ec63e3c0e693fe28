"""The names of dtypes: one spelling that commands print, and the others that they take; the formats of quantised weights."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

_OTHERS = {
    "fp32": ("f32", "float32"),
    "fp16": ("f16", "float16"),
    "bf16": ("bfloat16",),
    "int8": ("i8",),
    "fp8": ("f8_e4m3", "f8-e4m3", "float8"),
}
"""Other spellings of a dtype; among them that of safetensors, which a store's manifest has."""
WeightFormat = StrEnum("WeightFormat", ["INT8", "FP8", "NF4"])
"""Formats of quantised weights, as options name them."""
_SPELLING = {other: name for name, others in _OTHERS.items() for other in others}


def dtype_name(word: str) -> str:
    """Return a dtype as commands print it; another word as it is.

    >>> dtype_name("BF16"), dtype_name("F8_E4M3"), dtype_name("float32"), dtype_name("CPU")
    ('bf16', 'fp8', 'fp32', 'CPU')
    """
    folded = _folded(word)
    return folded if folded in _OTHERS else word


def choice_of(word: str, choices: Collection[str]) -> str | None:
    """Return the choice that a word means, in any case and by any name of a dtype; None if it means none.

    >>> choice_of("bf16", ("F16", "BF16")), choice_of("CPU", ("off", "cpu")), choice_of("cake", ("F16",))
    ('BF16', 'cpu', None)
    """
    if word in choices:
        return word
    return next((one for one in choices if _folded(one) == _folded(word)), None)


def _folded(word: str) -> str:
    return _SPELLING.get(word.lower(), word.lower())
