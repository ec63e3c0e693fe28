"""Batches through torch's own `DataLoader`, for frameworks that require one.

    python examples/torch_dataloader.py photos.store

`batch_size=None`: the batches are complete. No workers: the loader has its own prefetch thread.
"""

import sys

from torch.utils.data import DataLoader

from bucketline.loader import BatchDataset, Loader, LoaderConfig


def main(store: str) -> None:
    """Read half an epoch, stop, and resume from the saved state."""
    with Loader(store, LoaderConfig(batch_size=4, epochs=1)) as loader:
        dataset = BatchDataset(loader)
        batches = DataLoader(dataset, batch_size=None)
        num_batches = len(batches)
        for batch in batches:
            if batch.step + 1 == num_batches // 2:
                break
        state = dataset.state_dict()
    with Loader(store, LoaderConfig(batch_size=4, epochs=1)) as loader:
        dataset = BatchDataset(loader)
        dataset.load_state_dict(state)
        steps = [batch.step for batch in DataLoader(dataset, batch_size=None)]
    print(f"{num_batches} batches, stopped after {num_batches // 2}, resumed with {steps[0]} to {steps[-1]}")


if __name__ == "__main__":
    main(sys.argv[1])
