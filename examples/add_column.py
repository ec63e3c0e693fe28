"""A mask for each image of a store that exists: its latents are not written again.

    python examples/write_store.py mine.store
    python examples/add_column.py mine.store

Run it again, even after `kill -9`, or after more images were packed: only rows without a mask get one. `segment` stands for
your model.
"""

import sys

import numpy as np

from bucketline.loader import Loader, LoaderConfig
from bucketline.store import Store, add_column


def segment(height: int, width: int, number: int) -> "np.ndarray[tuple[int, ...], np.dtype[np.uint8]]":
    """Return a mask, `[1, height / 8, width / 8]`."""
    return np.random.default_rng(number).integers(0, 2, (1, height // 8, width // 8), dtype=np.uint8)


def main(path: str) -> None:
    """Add the masks, and read one batch with them."""
    store = Store.open(path)

    def mask_of(sample_id: str) -> "np.ndarray[tuple[int, ...], np.dtype[np.uint8]]":
        _, record = store.sample(sample_id)
        height, width = map(int, record.bucket.rpartition("/")[2].split("x"))
        return segment(height, width, int(sample_id[-7:-4]))

    added = add_column(path, "mask", mask_of)
    print(f"{added.rows} rows have got a mask, {added.rows_without} are without one in generation {added.generation}")
    with Loader(path, LoaderConfig(batch_size=4, columns=("target", "mask"))) as loader:
        batch = next(iter(loader))
        print(f"{batch.bucket}: latents {list(batch.latents.shape)}, masks {list(batch.columns['mask'].shape)}")


if __name__ == "__main__":
    main(sys.argv[1])
