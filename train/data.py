"""Open the stores of a run, at the generations that it was planned on, and their loaders."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from bucketline.errors import StateError, StoreError
from bucketline.loader import Loader, Remainder, TextForm, WeightedStore
from bucketline.loader.iteration import parse_state
from bucketline.loader.mixture import open_weighted, parse_stores
from bucketline.loader.ranks import fail_together
from bucketline.loader.service.sockets import AUTO
from bucketline.store import Store
from bucketline.train.config import IN_PROCESS
from bucketline.train.step import store_weights

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bucketline.train.checkpoint import Start
    from bucketline.train.config import TrainConfig
    from bucketline.train.parallel import TrainRanks


def open_stores(config: TrainConfig, ranks: TrainRanks, start: Start) -> tuple[WeightedStore, ...]:
    """Open each store once: at its newest generation, or if the checkpoint's plan continues, at that one's.

    Rank 0 opens them first, and alone says what is wrong; the loader of several ranks reads the generations that rank 0 has.
    """
    asked = parse_stores(config.store, "--store")
    planned = () if start.state is None or config.new_plan else parse_state(start.state.loader).stores
    numbers: list[int | None] = [None] * len(asked)
    if len(planned) == len(asked):  # else the loader's state refuses the number of stores
        numbers = [one.generation for one in planned]

    def opened() -> tuple[WeightedStore, ...]:
        pairs, remote = zip(asked, numbers, strict=True), config.remote()
        try:
            return open_weighted([WeightedStore(Store.open(a.path, n, remote=remote), repeats=a.repeats) for a, n in pairs])
        except StoreError as error:
            if not planned:
                raise
            raise StateError(
                f"{start.checkpoint}: {error}; if the generation of its plan was garbage-collected, continue with --resume "
                "--new-plan, which keeps weights, averages and optimizer"
            ) from error

    with fail_together():
        stores = opened() if ranks.is_main else ()
    with fail_together():
        return stores or opened()


def open_loader(
    config: TrainConfig, ranks: TrainRanks, stores: Sequence[WeightedStore], device: torch.device, like: Loader | None = None
) -> Loader:
    """Open the training loader, which never ends; the noising step dequantises quantised tokens.

    `like`: another one of the same stores and order, whose plan is not made again.
    """
    asked = config.for_loader(epochs=None, text=TextForm.STORED, row_weights=store_weights(config))
    return Loader(
        stores,
        asked,
        rank=ranks.rank,
        world_size=ranks.world_size,
        device=device,
        service=config.service_address(),
        follow=config.follow,
        like=like,
    )


def open_val_loader(config: TrainConfig, ranks: TrainRanks, stores: Sequence[WeightedStore], device: torch.device) -> Loader:
    """Open a loader that yields every held-out sample once, regardless of its store's repeats.

    It accumulates like training: captions are chosen by position in the global batch, so the same global batch
    has the same captions on any number of ranks.
    """
    asked = config.for_loader(
        split="val", remainder=Remainder.PARTIAL, epochs=1, caption_dropout=0.0, flip=0.0, text=TextForm.STORED
    )
    each = [weighted.store for weighted in stores]
    return Loader(each, asked, rank=ranks.rank, world_size=ranks.world_size, device=device)


def expect_service(config: TrainConfig, ranks: TrainRanks, stores: Sequence[WeightedStore]) -> None:
    """Check on every rank that the loader service delivers a batch, before the model is loaded."""
    if config.service not in (IN_PROCESS, AUTO):
        one_ahead = replace(config, prefetch_bytes=1 << 20)
        with fail_together(), open_loader(one_ahead, ranks, stores, torch.device("cpu")) as loader:
            next(loader.forever())
