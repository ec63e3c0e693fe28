"""A store of edit pairs with a loss mask, from your own encoders' arrays; then its batches.

    python examples/write_pairs.py pairs.store

Each sample has one or two references, of sizes of their own. `encode_image` stands for your VAE; give its posterior's mode.
"""

import sys

import numpy as np

from bucketline.loader import Loader, LoaderConfig
from bucketline.store import Column, LatentColumn, MaskColumn, ReferenceColumn, StoreWriter

CHANNELS, WIDTH, DOWNSCALE = 4, 16, 8


def encode_image(name: str, height: int, width: int) -> "np.ndarray[tuple[int, ...], np.dtype[np.float16]]":
    """Return a latent, `[C, height / 8, width / 8]`."""
    random = np.random.default_rng([*name.encode()])
    return random.normal(size=(CHANNELS, height // DOWNSCALE, width // DOWNSCALE)).astype(np.float16)


def write(path: str) -> None:
    """Write 32 samples: their targets, what these were made from, and which part of them counts in the loss."""
    columns = [LatentColumn(channels=CHANNELS), *(ReferenceColumn(n, channels=CHANNELS) for n in range(2)), MaskColumn()]
    with StoreWriter(
        path,
        encoders={"vae": {"scaling_factor": 0.18215}},
        columns=columns,
        text=[Column(name="tokens", dtype="F16", shape=(WIDTH,))],
        empty_caption={"tokens": np.zeros((1, WIDTH), dtype=np.float16)},
    ) as writer:
        for number in range(32):
            mask = np.zeros((64 // DOWNSCALE, 96 // DOWNSCALE), dtype=np.uint8)
            mask[:, 4:] = 255  # counts in full; 0 is left out of the loss
            arrays = {"target": encode_image(f"after {number}", 64, 96), "mask": mask}
            arrays["reference/0"] = encode_image(f"before {number}", 64, 96)
            if number % 2:  # the others have one reference, and are in another bucket
                arrays["reference/1"] = encode_image(f"style {number}", 128, 64)
            tokens = np.ones((3, WIDTH), dtype=np.float16)
            writer.add(f"{number:03d}.png", "train", arrays, {"in this style": {"tokens": tokens}})


def read(path: str) -> None:
    """Print what a batch of each bucket has."""
    with Loader(path, LoaderConfig(batch_size=4, epochs=1)) as loader:
        for batch in {batch.bucket: batch for batch in loader}.values():
            assert batch.mask is not None
            references = [list(one.shape) for one in batch.scaled_references()]
            print(f"{batch.bucket}: target {list(batch.scaled().shape)}, references {references}, mask {batch.mask.mean():.2f}")


if __name__ == "__main__":
    write(sys.argv[1])
    read(sys.argv[1])
