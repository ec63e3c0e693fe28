"""Batches as numpy arrays, for users of other frameworks than torch.

python examples/numpy_loop.py photos.store
"""

import sys

from bucketline.loader import Loader, LoaderConfig


def main(store: str) -> None:
    """Print each batch's bucket, shape, mean of the latents and number of tokens."""
    with Loader(store, LoaderConfig(batch_size=4, epochs=1)) as loader:
        for batch in loader:
            arrays = batch.numpy()  # what is stored, BF16 as its bits in uint16
            latents = batch.scaled().numpy()  # as a model is trained on them
            print(f"{batch.bucket} {latents.shape} {latents.mean():.4f}, {arrays['token_mask'].sum()} tokens")


if __name__ == "__main__":
    main(sys.argv[1])
