"""A store of your own encoder's arrays, written by several processes in one call.

    python examples/parallel_write.py mine.store      (or s3://bucket/mine.store)

Run it again, even after Ctrl-C or `kill -9`: only what is missing is encoded. `Encoder` stands for your model.
"""

import sys
from typing import Any

import numpy as np

from bucketline.store import RowColumn, write_store

COLUMNS = [RowColumn(role="target", dtype="F16", shape=(8, "length"))]


class Encoder:
    """Is sent to each process once, before the model is loaded; the first item loads it there."""

    def __init__(self) -> None:
        self.weights: np.ndarray[tuple[int, ...], np.dtype[np.float32]] | None = None

    def __call__(self, name: str) -> dict[str, Any] | None:
        """Return the arguments of `StoreWriter.add`, or None for a sample to leave out."""
        if self.weights is None:
            self.weights = np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)
        number = int(name.removesuffix(".wav").rpartition("/")[2])
        if number == 13:
            return None
        sound = np.random.default_rng(number).normal(size=(8, 20 + number % 3))
        return {"sample_id": name, "split": "train", "columns": {"target": (self.weights @ sound).astype(np.float16)}}


def main(path: str) -> None:
    """Write 60 samples by two processes."""
    names = [f"sounds/{number:03d}.wav" for number in range(60)]
    done = write_store(path, names, Encoder(), workers=2, columns=COLUMNS)
    print(f"{done.num_written} written, {done.num_unchanged} there before, {done.num_left_out} left out")


if __name__ == "__main__":  # the workers import this file
    main(sys.argv[1])
