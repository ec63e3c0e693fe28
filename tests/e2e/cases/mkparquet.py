"""Write Parquet files of images as hubs lay them out, each layout a folder: four training rows, some of test and validation."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

TRAIN, TEST, VALIDATION = (4, 1, "tr"), (3, 2, "te"), (2, 3, "va")  # rows, seed, prefix of the names
LAYOUTS = {
    # the hub's conversion: directories
    "A/default/train/0000.parquet": TRAIN,
    "A/default/test/0000.parquet": TEST,
    "A/default/validation/0000.parquet": VALIDATION,
    "B/data/train.parquet": TRAIN,
    "B/data/test.parquet": TEST,
    "B/data/validation.parquet": VALIDATION,
    # an older push_to_hub: a hash after -of-
    "C/data/train-00000-of-00001-9c49eeff30aacaa8.parquet": TRAIN,
    "C/data/test-00000-of-00001-5e672c5751f060d3.parquet": TEST,
    # the usual form
    "D/data/train-00000-of-00001.parquet": TRAIN,
    "D/data/test-00000-of-00001.parquet": TEST,
    "E/train_0.parquet": TRAIN,
    "E/test_0.parquet": TEST,
}


def table(rows: int, seed: int, prefix: str) -> pa.Table:
    found = []
    for n in range(rows):
        data = io.BytesIO()
        Image.new("RGB", (128, 128), ((seed * 40 + n * 7) % 256, (n * 30) % 256, 100)).save(data, "PNG")
        found.append({"image": {"bytes": data.getvalue(), "path": f"{prefix}{n}.png"}, "text": f"{prefix} {n}"})
    return pa.Table.from_pylist(found)


if __name__ == "__main__":
    for name, rows in LAYOUTS.items():
        path = Path(sys.argv[1], name)
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(table(*rows), path)
