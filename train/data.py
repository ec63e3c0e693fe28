"""Open the stores of a run, at the generations that it was planned on, and their loaders; follow stores that still grow."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from bucketline.errors import StateError, UsageError
from bucketline.loader import Loader, Remainder, TextForm, WeightedStore
from bucketline.loader.mixture import StoreId, once_each, open_shares, parse_stores
from bucketline.loader.ranks import fail_together
from bucketline.loader.service.address import AUTO
from bucketline.store import Store
from bucketline.store.folder import MissingObjectError
from bucketline.store.format.manifest import MANIFEST, generations
from bucketline.train.config import IN_PROCESS
from bucketline.train.parallel import TrainRanks, from_rank_zero
from bucketline.train.refusals import refuse_other_batch, refuse_stores

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bucketline.loader.mixture import StoreArgument
    from bucketline.store.remote.urls import RemoteOptions
    from bucketline.train.checkpoint import Start
    from bucketline.train.config import TrainConfig
    from bucketline.train.metrics_file import WindowState

FOLLOW_EVERY_S = 2.0
_SAY_EVERY_S = 60.0


def wait_for_rows(config: TrainConfig, ranks: TrainRanks) -> None:
    """With `--follow`, wait until the stores have enough rows to train on. Each rank looks for itself.

    Raises:
        StoreError: if a store is there and cannot be read.
    """
    if (wanted := config.follow) is None or config.resume:
        return
    said = -_SAY_EVERY_S
    while (found := sum(_rows_of(one, config.remote()) for one in parse_stores(config.store, "--store"))) < wanted:
        if ranks.is_main and time.monotonic() - said >= _SAY_EVERY_S:
            print(f"waiting for {wanted:,} rows to train on; there are {found:,}", file=sys.stderr, flush=True)
            said = time.monotonic()
        time.sleep(FOLLOW_EVERY_S)


def _rows_of(argument: StoreArgument, remote: RemoteOptions) -> int:
    """Return the training rows of a store, 0 if there is none yet."""
    if isinstance(argument.path, Path) and not (argument.path / MANIFEST).exists():
        return 0
    try:
        store = Store.open(argument.path, remote=remote)
    except MissingObjectError:
        return 0
    return sum(bucket.num_rows for bucket in store.buckets("train"))


def open_stores(config: TrainConfig, ranks: TrainRanks, start: Start) -> tuple[WeightedStore, ...]:
    """Open rank 0's newest generation of each store on every rank; if the checkpoint's plan continues, its generation.

    Raises:
        UsageError: if one store is given twice.
        StateError: if a store differs from the checkpoint's (the first is named), or its generation was removed.
        StoreError: if a store cannot be opened.
        ModelError: if this trainer cannot train on a store, or would ignore or misread one of its columns.
    """
    asked = from_rank_zero(ranks, lambda: parse_stores(config.store, "--store"))
    before = None if start.state is None or config.new_plan else start.state.stores
    if before is not None and len(before) != len(asked):
        raise StateError(
            f"{start.checkpoint} was trained on {len(before)} stores ({', '.join(one.path for one in before)}), "
            f"{len(asked)} are given; name each --store of the run, or continue with --new-plan"
        )
    wanted: Sequence[int | None] = [None] * len(asked) if before is None else [one.generation for one in before]

    def opened(numbers: Sequence[int | None]) -> tuple[WeightedStore, ...]:
        pairs = zip(asked, numbers, strict=True)
        stores = [WeightedStore(store=Store.open(a.path, g, remote=config.remote()), repeats=a.repeats) for a, g in pairs]
        return open_shares(stores)

    def found() -> list[int]:
        for one, generation in zip(asked, wanted, strict=True):
            kept = generations(one.path) if isinstance(one.path, Path) else []
            if generation is not None and kept and generation not in kept:
                raise StateError(
                    f"{start.checkpoint} was planned on generation {generation} of {one.path}, which no longer exists "
                    f"({', '.join(map(str, kept))} {'is' if len(kept) == 1 else 'are'}): it was garbage-collected; "
                    "continue with --resume --new-plan, which keeps weights, averages and optimizer"
                )
        return [share.store.manifest.generation for share in opened(wanted)]

    shares = opened(from_rank_zero(ranks, found))
    refuse_stores(shares)
    for one, share in zip(before or (), shares, strict=False):
        now = StoreId.of(share)
        if replace(now, path=one.path) != one:
            raise StateError(
                f"{start.checkpoint} was trained on the store {one.store_id} ({one.path}), generation {one.generation} with "
                f"digest {one.digest}, {one.repeats} times a pass; {now.path} is {now.store_id} with digest {now.digest}, "
                f"{now.repeats} times a pass; name the --store of the run, or continue with --new-plan"
            )
    return shares


def store_weights(config: TrainConfig) -> tuple[float, ...]:
    """Return the weights of the stores in the loss, 1 where only others have one; () if none has."""
    weights = [one.weight for one in parse_stores(config.store, "--store")]
    return () if set(weights) == {None} else tuple(1.0 if weight is None else weight for weight in weights)


def mean_weight(config: TrainConfig, shares: Sequence[WeightedStore]) -> float | None:
    """Return the mean of the stores' weights over the rows of a pass; None if they have none.

    Raises:
        UsageError: if it is 0, so that nothing would be learned.
    """
    if not (weights := store_weights(config)):
        return None
    rows = [share.repeats * sum(bucket.num_rows for bucket in share.store.buckets("train")) for share in shares]
    mean = sum(weight * count for weight, count in zip(weights, rows, strict=True)) / sum(rows)
    if mean == 0:
        raise UsageError("the weight of every --store that has rows is 0, expected one above 0")
    return mean


def open_loader(
    config: TrainConfig,
    ranks: TrainRanks,
    shares: Sequence[WeightedStore],
    device: torch.device,
    like: Loader | None = None,
) -> Loader:
    """Open the training loader, which never ends; the noising step dequantises quantised tokens.

    `like`: another one of the same stores and order, whose plan is not made again.
    """
    service = config.service_address()
    asked = config.for_loader(epochs=None, text=TextForm.STORED, row_weights=store_weights(config))
    return Loader(shares, asked, rank=ranks.rank, world_size=ranks.world_size, device=device, service=service, like=like)


def continue_at(start: Start, loader: Loader, config: TrainConfig, ranks: TrainRanks) -> WindowState | None:
    """Continue a loader where a resumed run has stopped, and return the window of steps that is open there.

    Raises:
        UsageError, StateError: if the loader has another order than the run; the message names what differs.
    """
    if start.state is None:
        return None
    if config.new_plan:  # keep weights and optimizer, use the current stores
        loader.start_anew(start.state.loader)  # at the same step, so that no random draw is repeated
        return None
    refuse_other_batch(config, start.state, ranks.world_size, loader.rows.buckets())
    loader.load_state_dict(start.state.loader)
    return start.state.window  # its buckets are those of this plan


def open_val_loader(config: TrainConfig, ranks: TrainRanks, shares: Sequence[WeightedStore], device: torch.device) -> Loader:
    """Open a loader that yields every held-out sample once, regardless of its store's repeats.

    It accumulates like training: captions are chosen by position in the global batch, so the same global batch
    has the same captions on any number of ranks.
    """
    asked = config.for_loader(
        split="val", remainder=Remainder.PARTIAL, epochs=1, caption_dropout=0.0, flip=0.0, text=TextForm.STORED
    )
    return Loader(once_each(shares), asked, rank=ranks.rank, world_size=ranks.world_size, device=device)


def expect_service(config: TrainConfig, ranks: TrainRanks, start: Start) -> None:
    """Check on every rank that the loader service delivers a batch.

    Raises:
        BucketlineError: if the service refuses this rank; the message is the service's.
        OtherRankFailedError: if it refuses another rank.
    """
    if config.service in (IN_PROCESS, AUTO):
        return
    shares = open_stores(config, ranks, start)
    with (
        fail_together(),
        open_loader(replace(config, prefetch_bytes=1 << 20), ranks, shares, torch.device("cpu")) as loader,
    ):
        next(loader.forever())


class Follower:
    """Decides at which steps a run takes up newer generations: as rank 0 finds them."""

    def __init__(self, config: TrainConfig, ranks: TrainRanks, loader: Loader) -> None:
        self._ranks, self._loader = ranks, loader
        self._looks = config.follow is not None and ranks.is_main

    def has_newer(self) -> bool:
        """Return True on rank 0 if there are newer generations; never waits."""
        return self._looks and self._loader.newer() is not None

    def due(self, *, is_agreed: bool) -> tuple[int, ...] | None:
        """Return the generations to take up; None if the present ones stay. The same on every rank.

        `is_agreed`: all ranks have seen that rank 0 has newer ones.
        """
        return from_rank_zero(self._ranks, self._loader.newer) if is_agreed else None
