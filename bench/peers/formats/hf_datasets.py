"""Hugging Face datasets: one Arrow data set per bucket, in torch format, read through torch's `DataLoader`."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import datasets
import torch
from datasets import Array2D, Array3D, Features, List, Value, load_from_disk
from torch.utils.data import Dataset

from bucketline.bench.peers.formats.torch_dataloader import through_torch
from bucketline.bench.peers.samples import sample

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from bucketline.bench.peers.peer import Opened, Way
    from bucketline.bench.peers.samples import SetShape


class HfDatasets:
    """`save_to_disk` and `load_from_disk`; half-precision columns through `with_format`, the others as stored."""

    def write(self, shape: SetShape, folder: Path) -> None:
        for bucket, (height, width, _) in enumerate(shape.buckets):
            features = Features(
                {
                    "number": Value("int64"),
                    "latent": Array3D((shape.channels, height, width), "float16"),
                    "tokens": Array2D((None, shape.token_width), "float16"),
                    "original_size": List(Value("int32"), length=2),
                    "crop": List(Value("int32"), length=2),
                }
            )
            made = datasets.Dataset.from_generator(
                _samples,
                features=features,
                gen_kwargs={"shape": shape, "bucket": bucket},
                cache_dir=str(folder / f"{bucket}-cache"),
                writer_batch_size=shape.batch_size,
            )
            made.save_to_disk(str(folder / str(bucket)))
            del made
            shutil.rmtree(folder / f"{bucket}-cache")

    def open(self, shape: SetShape, folder: Path, way: Way) -> Opened:
        return through_torch(_Buckets(shape, folder), shape, way)


class _Buckets(Dataset[Any]):
    """The buckets' data sets by sample number. A batch is fetched at once, as torch's `DataLoader` does with `datasets`."""

    def __init__(self, shape: SetShape, folder: Path) -> None:
        self._shape = shape
        self._buckets = [
            load_from_disk(str(folder / str(bucket))).with_format(
                "torch", columns=["latent", "tokens"], output_all_columns=True, dtype=torch.float16
            )
            for bucket in range(len(shape.buckets))
        ]

    def __getitems__(self, numbers: list[int]) -> list[dict[str, Any]]:
        bucket, _, _ = self._shape.bucket_of(numbers[0])
        first = self._shape.numbers(bucket)[0]
        samples: list[dict[str, Any]] = self._buckets[bucket].__getitems__([number - first for number in numbers])
        for own in samples:
            own.update({name: torch.tensor(own[name], dtype=torch.int32) for name in ("original_size", "crop")})
        return samples

    def __getitem__(self, number: int) -> dict[str, Any]:
        return self.__getitems__([number])[0]


def _samples(shape: SetShape, bucket: int) -> Iterator[dict[str, Any]]:
    for number in shape.numbers(bucket):
        yield sample(shape, number)._asdict()
