"""How many weights a part of a model has and in which dtype, from the headers of its files."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

from bucketline.model_file import file_tensors

if TYPE_CHECKING:
    from bucketline.ingest.encoders.model_folder import ModelFolder

WEIGHT_BYTES = {"F32": 4.0, "F16": 2.0, "BF16": 2.0, "int8": 1.1, "nf4": 0.6}  # quantised: with scales and what stays in BF16


def part_weights(model: ModelFolder, name: str, bases: tuple[str, ...]) -> tuple[int, set[str]]:
    """Return how many weights a part has, 0 if its files are not safetensors, and their dtypes by safetensors name.

    The files of a hub are downloaded. Of a model in a single file no dtype is returned.
    """
    if model.file is not None and model.file.has(name):
        return sum(prod(shape) for shape in model.file.shapes_of(name).values()), set()
    number, dtypes = 0, set[str]()
    for path in model.weight_files(name, bases):
        for dtype, shape in file_tensors(path, f"{model.name}: {name}/{path.name}").values():
            number += prod(shape)
            dtypes.add(dtype)
    return number, dtypes
