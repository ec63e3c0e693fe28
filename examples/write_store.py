"""A store of your own encoders' arrays, without `ingest`.

    python examples/write_store.py mine.store

Run it again, even after `kill -9`: it continues behind the last commit. `encode_image` and `encode_text` stand for your models.
"""

import sys

import numpy as np

from bucketline.store import Column, LatentColumn, StoreWriter

CHANNELS, WIDTH = 4, 16


def encode_image(number: int, height: int, width: int) -> "np.ndarray[tuple[int, ...], np.dtype[np.float16]]":
    """Return a latent, `[C, height / 8, width / 8]`."""
    return np.random.default_rng(number).normal(size=(CHANNELS, height // 8, width // 8)).astype(np.float16)


def encode_text(caption: str) -> "dict[str, np.ndarray[tuple[int, ...], np.dtype[np.float16]]]":
    """Return a caption's tokens, `[T, D]`: one per word, and one more."""
    words = ["", *caption.split()]
    return {"tokens": np.stack([np.full(WIDTH, len(word), dtype=np.float16) for word in words])}


def main(path: str) -> None:
    """Write 64 samples of two buckets, and leave out those that the store already has."""
    with StoreWriter(
        path,
        encoders={"vae": {"scaling_factor": 0.18215, "latent_channels": CHANNELS}, "text_encoder": {"width": WIDTH}},
        columns=[LatentColumn(channels=CHANNELS, downscale=8, dtype="F16")],
        text=[Column(name="tokens", dtype="F16", shape=(WIDTH,))],
        empty_caption=encode_text(""),
    ) as writer:
        num_added = 0
        for number in range(64):
            sample_id, caption = f"images/{number:03d}.png", f"image number {number}"
            if sample_id in writer:
                continue
            height, width = (64, 96) if number % 3 else (64, 64)
            latent = encode_image(number, height, width)
            writer.add(sample_id, f"train/{height}x{width}", {"latent": latent}, {caption: encode_text(caption)})
            num_added += 1
            if num_added % 16 == 0:
                writer.commit()  # these rows survive a crash from here on
    print(f"{num_added} samples added, {writer.manifest.samples} in generation {writer.manifest.generation}")


if __name__ == "__main__":
    main(sys.argv[1])
