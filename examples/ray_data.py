"""Encode with Ray Data, and write a store: for pipelines that are in Ray already.

    python examples/ray_data.py features.store

`Encoder` stands for your model; Ray starts as many of them as it is told, on as many machines as its cluster has. Tasks that
are run again, because a worker was lost, change nothing. Run it again: rows of the same id are replaced.
"""

import os
import sys

import numpy as np

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # without a cluster: on 127.0.0.1, not on every address

import ray

from bucketline.ray import StoreSink, batch_of, sample
from bucketline.store import Column, LatentColumn, Store

CHANNELS, HEIGHT_PX, WIDTH_PX, WIDTH = 4, 64, 96, 8


class Encoder:
    """Loaded once by each worker."""

    def __init__(self) -> None:
        self.weights = np.random.default_rng(0).standard_normal((CHANNELS, 3)).astype(np.float32)

    def __call__(self, batch: "dict[str, np.ndarray[tuple[int, ...], np.dtype[np.int64]]]") -> dict[str, list[str | bytes]]:
        """Return a latent and a caption for each number of the batch."""
        rows = []
        for number in batch["id"].tolist():
            image = np.random.default_rng(number).random((3, HEIGHT_PX // 8, WIDTH_PX // 8), dtype=np.float32)
            latent = np.tensordot(self.weights, image, 1).astype(np.float16)  # [CHANNELS, 8, 12]
            tokens = np.full((3 + number % 7, WIDTH), number % 7, dtype=np.float16)  # [T, WIDTH]
            split = "val" if number % 10 == 0 else "train"
            rows.append(sample(f"{number:04d}.png", split, {"target": latent}, {f"caption {number % 7}": {"tokens": tokens}}))
        return batch_of(rows)


def main(path: str) -> None:
    """Write 200 rows, and say what there is."""
    ray.init(include_dashboard=False, num_cpus=2, object_store_memory=100 << 20, log_to_driver=False)
    ray.data.DataContext.get_current().enable_progress_bars = False
    sink = StoreSink(
        path,
        columns=[LatentColumn(channels=CHANNELS)],
        encoders={"vae": {"name": "mine", "version": 1, "scaling_factor": 1.0}},
        text=[Column(name="tokens", dtype="F16", shape=(WIDTH,))],
        empty_caption={"tokens": np.zeros((1, WIDTH), dtype=np.float16)},
        rows_per_task=50,
    )
    workers = ray.data.ActorPoolStrategy(size=1)
    ray.data.range(200, override_num_blocks=8).map_batches(Encoder, batch_size=25, compute=workers).write_datasink(sink)
    ray.shutdown()
    store = Store.open(path)
    print(f"{store.manifest.samples} rows in generation {store.manifest.generation}")


if __name__ == "__main__":
    main(sys.argv[1])
