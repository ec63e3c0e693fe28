"""Class labels instead of captions, for class-conditional models (diffusers' DiT).

A caption is the name or number of a class and is stored as one token, the number. The empty caption is the null class,
numbered after the last one, so a caption dropped by the loader becomes what the model was trained to see without a class.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from bucketline.dtype_names import dtype_name
from bucketline.errors import ModelError, UsageError
from bucketline.families.family import Padding
from bucketline.fingerprint import json_hash
from bucketline.ingest.encoders.text_columns import Embedding
from bucketline.store.format.block import Column
from bucketline.store.format.columns import CLASS_LABELS
from bucketline.store.format.text_block import TextSpec

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from bucketline.ingest.encoders.model_folder import ModelFolder
    from bucketline.typed_json import Json

MAX_DIGITS = 18


class ClassLabels:
    """The classes of a model, by name and number."""

    max_tokens = 1
    padding = Padding.MAX_LENGTH

    def __init__(self, model: ModelFolder) -> None:
        """Read the number of classes from `transformer/config.json`, and their names from `id2label` in the index or there."""
        config = model.config("transformer") or {}
        num_classes = config.get("num_embeds_ada_norm")
        if not isinstance(num_classes, int) or num_classes < 1:
            raise ModelError(
                f"{model.name}: transformer/config.json has num_embeds_ada_norm {num_classes!r}, expected the number of classes"
            )
        self._num_classes = num_classes
        self._numbers = _by_name(model, model.index().get("id2label") or config.get("id2label") or {}, num_classes)
        self.columns = TextSpec(tokens=(Column(name=CLASS_LABELS, dtype="I64", shape=(1,)),))
        self.provenance: dict[str, Json] = {
            "family": CLASS_LABELS,
            "class": type(self).__name__,
            "num_classes": num_classes,
            "null_class": num_classes,
            "names_hash": json_hash({name: sorted(numbers) for name, numbers in self._numbers.items()}),
            "stored_dtype": "I64",
            "width": 1,
            "max_tokens": 1,
            "padding": self.padding.value,
            "empty_caption": "null_class",
        }

    def padded_lengths(self, captions: Sequence[str]) -> list[int]:
        return [1] * len(captions)

    def encode(self, captions: Sequence[str]) -> list[Embedding]:
        """Return the class of each caption as one token, or the reason why it has none."""
        return [self._encode(caption) for caption in captions]

    def _encode(self, caption: str) -> Embedding:
        found = self._number(caption.strip())
        if isinstance(found, str):
            return Embedding(tokens=torch.zeros((1, 1), dtype=torch.int64), refusal=found)
        return Embedding(tokens=torch.tensor([[found]], dtype=torch.int64))

    def _number(self, caption: str) -> int | str:
        """Return a caption's class, or the reason why there is none. A name takes precedence over a number."""
        if not caption:
            return self._num_classes
        named = self._numbers.get(caption, set())
        if len(named) == 1:
            return next(iter(named))
        if named:
            several = ", ".join(map(str, sorted(named)))
            return f"the name {caption[:80]!r} stands for several classes ({several}); give the number"
        if caption.isascii() and caption.isdecimal() and len(caption) < MAX_DIGITS and int(caption) < self._num_classes:
            return int(caption)
        return (
            f"{caption[:80]!r} is not a class of the model; expected one of its {len(self._numbers)} names "
            f"or a number from 0 to {self._num_classes - 1}"
        )


def refuse_length(model: ModelFolder, asked: int | None) -> None:
    """Refuse --max-tokens for a model whose captions are classes."""
    if asked is not None:
        raise UsageError(f"--max-tokens {asked}: {model.name} takes a class, not text; leave the option out")


def refuse_text_dtype(model: ModelFolder, dtype: str | None) -> None:
    """Refuse --text-dtype for a model whose captions are classes, which are stored as numbers."""
    if dtype is not None:
        raise UsageError(f"--text-dtype {dtype_name(dtype)}: {model.name} takes a class, not text; leave the option out")


def _by_name(model: ModelFolder, labels: Mapping[str, Any], num_classes: int) -> dict[str, set[int]]:
    """Return the class numbers of each name; a label such as `tench, Tinca tinca` yields three names of its class."""
    numbers: dict[str, set[int]] = {}
    for key, label in labels.items():
        if not str(key).isdecimal() or not isinstance(label, str) or int(key) >= num_classes:
            raise ModelError(
                f"{model.name}: id2label has {key!r}: {label!r:.80}; expected numbers below {num_classes} with their names"
            )
        for name in {label.strip(), *(part.strip() for part in label.split(","))} - {""}:
            numbers.setdefault(name, set()).add(int(key))
    return numbers
