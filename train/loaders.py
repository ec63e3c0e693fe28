"""The loaders of a run: training batches without end, and every held-out sample once."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from bucketline.loader import Loader, LoaderConfig, Remainder
from bucketline.loader.row_order import Shuffle
from bucketline.train.open_stores import once_each

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from bucketline.loader import StoreShare
    from bucketline.train.config import TrainConfig
    from bucketline.train.ranks import Ranks


def loader_config(config: TrainConfig) -> LoaderConfig:
    """Say what the run's options ask of the loader of training batches."""
    return LoaderConfig(
        batch_size=config.batch_size,
        batch_pixels=config.batch_pixels,
        batch_tokens=config.batch_tokens,
        batch_multiple=config.batch_multiple,
        accumulation=config.accum,
        seed=config.seed,
        split="train",
        remainder=Remainder.CARRY,
        epochs=None,
        caption_dropout=config.caption_dropout,
        flip=config.flip,
        shuffle=Shuffle(config.shuffle),
        verify=config.verify,
        threads=config.threads,
        prefetch_bytes=config.prefetch_mib << 20,
    )


def open_loader(config: TrainConfig, ranks: Ranks, shares: Sequence[StoreShare], device: torch.device) -> Loader:
    """Open the endless loader of training batches."""
    service = None if config.service == "none" else config.service
    asked = loader_config(config)
    return Loader(shares, asked, rank=ranks.rank, world_size=ranks.world_size, device=device, service=service)


def open_val_loader(config: TrainConfig, ranks: Ranks, shares: Sequence[StoreShare], device: torch.device) -> Loader:
    """Open a loader that gives every held-out sample once, whatever its store's repeats.

    It accumulates as training does: captions are chosen by position in the global batch, so the same global batch
    gives the same captions on any number of ranks.
    """
    asked = replace(loader_config(config), split="val", remainder=Remainder.PARTIAL, epochs=1, caption_dropout=0.0, flip=0.0)
    return Loader(once_each(shares), asked, rank=ranks.rank, world_size=ranks.world_size, device=device)
