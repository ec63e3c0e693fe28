"""How many weights a part of a model has and in which dtype, from the headers of its files."""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from bucketline.errors import ModelError
from bucketline.ingest.encoders.hub import error_line

if TYPE_CHECKING:
    from pathlib import Path

    from bucketline.ingest.encoders.model_folder import ModelFolder

_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
WEIGHT_BYTES = {"F32": 4.0, "F16": 2.0, "BF16": 2.0, "int8": 1.1, "nf4": 0.6}  # quantised: with scales and what stays in BF16


@dataclass(frozen=True, slots=True, kw_only=True)
class PartWeights:
    """The weights of a part."""

    number: int
    dtypes: frozenset[str]  # by safetensors name

    def num_bytes(self, dtype: str) -> int:
        """Return the memory that they take in an encode dtype, roughly if that is quantised."""
        return int(self.number * WEIGHT_BYTES[dtype])


def part_weights(model: ModelFolder, name: str, bases: tuple[str, ...]) -> PartWeights | None:
    """Return a part's weights, None if its files are not safetensors; those of a hub are downloaded.

    Raises:
        ModelError: if the model has no such part, or its files cannot be read.
    """
    if model.file is not None and model.file.has(name):
        number = sum(prod(shape) for shape in model.file.shapes_of(name).values())
        return PartWeights(number=number, dtypes=frozenset())
    number, dtypes = 0, set()
    files = model.weight_files(name, bases)
    for path in files:
        for tensor in _header(f"{model.name}: {name}/{path.name}", path).values():
            number += prod(tensor["shape"])
            dtypes.add(tensor["dtype"])
    return PartWeights(number=number, dtypes=frozenset(dtypes)) if files else None


def _header(item: str, path: Path) -> dict[str, Any]:
    """Return a safetensors file's tensors by name, with dtype and shape; without the library, which imports torch."""
    try:
        with path.open("rb") as file:
            num_bytes = int.from_bytes(file.read(8), "little")
            if not 2 <= num_bytes <= _MAX_HEADER_BYTES:
                raise ValueError(f"its header has {num_bytes} bytes")
            found = json.loads(file.read(num_bytes))
        found.pop("__metadata__", None)
        return {name: {"dtype": str(one["dtype"]), "shape": [int(n) for n in one["shape"]]} for name, one in found.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(f"{item} cannot be read as safetensors: {error_line(error)}; download the model again") from error
