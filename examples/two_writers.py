"""Two processes write one store, each with shards of its own.

    python examples/two_writers.py mine.store

Run it again, even after `kill -9`: what was committed is there, and each process leaves it out. `write_store` of
`examples/parallel_write.py` does all of this by itself; parts are for processes that you start yourself, such as the ranks of a
job. `encode` stands for your model.
"""

import multiprocessing
import sys

import numpy as np

from bucketline.store import PartWriter, RowColumn, StoreWriter

COLUMNS = [RowColumn(role="target", dtype="F16", shape=(8, "length"))]
NUM_WRITERS = 2


def encode(number: int) -> "np.ndarray[tuple[int, ...], np.dtype[np.float16]]":
    """Return a spectrogram, `[8, length]`."""
    return np.random.default_rng(number).normal(size=(8, 20 + number % 3)).astype(np.float16)


def write_share(part: PartWriter, numbers: range) -> None:
    """Write what the store lacks of some samples: what runs in each process."""
    with part:  # leaving the block seals the part's last shard
        for number in numbers:
            sample_id = f"sounds/{number:03d}.wav"
            if sample_id not in part:
                part.add(sample_id, "train", {"target": encode(number)})


def main(path: str) -> None:
    """Write 60 samples by two processes, and publish them together."""
    context = multiprocessing.get_context("spawn")
    with StoreWriter(path, columns=COLUMNS) as writer:
        before = writer.manifest.samples
        shares = [(writer.part(f"r{n}"), range(n, 60, NUM_WRITERS)) for n in range(NUM_WRITERS)]
        writers = [context.Process(target=write_share, args=share) for share in shares]
        for process in writers:
            process.start()
        for process in writers:
            process.join()
        if any(process.exitcode for process in writers):
            raise SystemExit("a writer failed; run this again to continue")
    print(
        f"{writer.manifest.samples - before} samples added, {writer.manifest.samples} in {len(writer.manifest.shards)} shards"
    )


if __name__ == "__main__":
    main(sys.argv[1])
