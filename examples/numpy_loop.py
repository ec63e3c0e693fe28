"""Batches as numpy arrays, for users of other frameworks than torch.

python examples/numpy_loop.py photos.store
"""

import sys

from bucketline.loader import Loader, LoaderConfig, numpy_batches


def main(store: str) -> None:
    """Print each batch's bucket, shape, mean of the latents and number of tokens."""
    with Loader(store, LoaderConfig(batch_size=4, epochs=1)) as loader:
        for batch in numpy_batches(loader):
            latents = batch.scaled()  # as a model is trained on them; `arrays` has what is stored, BF16 as its bits in uint16
            mask = batch.arrays["token_mask"]
            print(f"{batch.bucket} {latents.shape} {latents.mean():.4f}, {mask.sum()} tokens")


if __name__ == "__main__":
    main(sys.argv[1])
