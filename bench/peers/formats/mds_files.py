"""Read and write MDS files with the mosaicml-streaming package, in its own environment.

`python -m bucketline.bench.peers.formats.mds_files read FOLDER ARRAYS` reads every sample of the folders with an `index.json`
below FOLDER into an npz file, `NUMBER/COLUMN` each; `write ARRAYS FOLDER` writes those samples. Texts are arrays of text.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from bucketline.bench.peers.formats.mosaic_streaming import MDSWriter, StreamingDataset, clean_stale_shared_memory


def read(folder: Path, arrays: Path) -> None:
    """Read all samples, one folder after the other, by random access and in order."""
    found: dict[str, Any] = {}
    for number, values in enumerate(_samples(folder)):
        for column, value in values.items():
            found[f"{number}/{column}"] = np.frombuffer(value, dtype="u1") if isinstance(value, bytes) else np.array(value)
    np.savez(arrays, **found)


def _samples(folder: Path) -> Any:  # noqa: ANN401 - an iterator of dictionaries
    for index in sorted(folder.rglob("index.json")):
        clean_stale_shared_memory()
        dataset = StreamingDataset(local=str(index.parent), batch_size=1)
        listed = sum(shard["samples"] for shard in json.loads(index.read_text(encoding="utf-8"))["shards"])
        assert len(dataset) == listed, f"{index} lists {listed} samples, the package finds {len(dataset)}"
        yield from (dataset[number] for number in range(listed))


def write(arrays: Path, folder: Path) -> None:
    """Write the samples of an npz file: U8 arrays as bytes, whole numbers as int, texts as str."""
    with np.load(arrays) as found:
        samples: dict[str, dict[str, Any]] = {}
        for name in found.files:
            number, _, column = name.partition("/")
            value = found[name]
            samples.setdefault(number, {})[column] = value.tobytes() if value.ndim else value.item()
    kinds = {bytes: "bytes", int: "int", str: "str"}
    first = next(iter(samples.values()))
    columns = {column: kinds[type(value)] for column, value in first.items()}
    with MDSWriter(out=str(folder), columns=columns, size_limit=1 << 17) as out:
        for sample in samples.values():
            out.write(sample)


if __name__ == "__main__":
    do, first, second = sys.argv[1:]
    {"read": read, "write": write}[do](Path(first), Path(second))
