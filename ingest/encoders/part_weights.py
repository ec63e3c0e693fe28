"""How many weights a part of a model has and in which dtype, from the headers of its files."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from bucketline.model_file import file_tensors

if TYPE_CHECKING:
    from bucketline.ingest.encoders.model_folder import ModelFolder

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
    """Return a part's weights, None if its files are not safetensors; those of a hub are downloaded."""
    if model.file is not None and model.file.has(name):
        number = sum(prod(shape) for shape in model.file.shapes_of(name).values())
        return PartWeights(number=number, dtypes=frozenset())
    number, dtypes = 0, set()
    files = model.weight_files(name, bases)
    for path in files:
        for dtype, shape in file_tensors(path, f"{model.name}: {name}/{path.name}").values():
            number += prod(shape)
            dtypes.add(dtype)
    return PartWeights(number=number, dtypes=frozenset(dtypes)) if files else None
