"""Open the stores of a run, at the generations that it was planned on, and their loaders; follow stores that still grow."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from bucketline.command_line import printable
from bucketline.errors import DeliveryError, StateError, UsageError
from bucketline.loader import Loader, Remainder, TextForm, WeightedStore
from bucketline.loader.mixture import once_each, open_shares, parse_stores
from bucketline.loader.ranks import fail_together
from bucketline.loader.service.sockets import AUTO, connected
from bucketline.store import Store
from bucketline.store.folder import MissingObjectError
from bucketline.store.format.manifest import MANIFEST, generations
from bucketline.train.config import IN_PROCESS
from bucketline.train.parallel import from_rank_zero

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bucketline.loader.mixture import StoreArgument
    from bucketline.store.remote.urls import RemoteOptions
    from bucketline.train.checkpoint import Start
    from bucketline.train.config import TrainConfig
    from bucketline.train.parallel import TrainRanks

FOLLOW_EVERY_S = 2.0
SERVICE_STARTS_S = 10  # a `loader serve` in the background, until it listens
_SAY_EVERY_S = 60.0


def wait_for_rows(config: TrainConfig, ranks: TrainRanks) -> None:
    """With `--follow`, wait until the stores have enough rows to train on. Each rank looks for itself."""
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
    """Open each store once, on every rank at rank 0's newest generation; if the checkpoint's plan continues, at its own."""
    opened: list[WeightedStore] = []  # of rank 0, the only one that calls `found`

    def found() -> list[int]:
        opened.extend(_opened(config, _generations(config, start)))
        return [share.store.manifest.generation for share in opened]

    numbers = from_rank_zero(ranks, found)
    with fail_together():
        return tuple(opened) or _opened(config, numbers)


def _opened(config: TrainConfig, numbers: Sequence[int | None]) -> tuple[WeightedStore, ...]:
    asked, remote = parse_stores(config.store, "--store"), config.remote()
    pairs = zip(asked, numbers or [None] * len(asked), strict=True)
    return open_shares([WeightedStore(store=Store.open(a.path, g, remote=remote), repeats=a.repeats) for a, g in pairs])


def _generations(config: TrainConfig, start: Start) -> Sequence[int]:
    """Return the generation of each store that a plan is of; none: the newest of each."""
    if start.state is None or config.new_plan:
        return ()
    asked, before = parse_stores(config.store, "--store"), start.state.stores
    if len(before) != len(asked):
        raise StateError(
            f"{start.checkpoint} was trained on {len(before)} stores ({', '.join(one.path for one in before)}), "
            f"{len(asked)} are given; name each --store of the run, or continue with --new-plan"
        )
    for one, planned in zip(asked, before, strict=True):
        kept = generations(one.path) if isinstance(one.path, Path) else []
        if kept and planned.generation not in kept:
            raise StateError(
                f"{start.checkpoint} was planned on generation {planned.generation} of {one.path}, which no longer exists "
                f"({', '.join(map(str, kept))} {'is' if len(kept) == 1 else 'are'}): it was garbage-collected; continue with "
                "--resume --new-plan, which keeps weights, averages and optimizer"
            )
    return [one.generation for one in before]


def store_weights(config: TrainConfig) -> tuple[float, ...]:
    """Return the weights of the stores in the loss, 1 where only others have one; () if none has."""
    weights = [one.weight for one in parse_stores(config.store, "--store")]
    return () if set(weights) == {None} else tuple(1.0 if weight is None else weight for weight in weights)


def mean_weight(config: TrainConfig, shares: Sequence[WeightedStore]) -> float | None:
    """Return the mean of the stores' weights over the rows of a pass; None if they have none."""
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
    return Loader(
        shares,
        asked,
        rank=ranks.rank,
        world_size=ranks.world_size,
        device=device,
        service=service,
        follow=config.follow is not None,
        like=like,
    )


def open_val_loader(config: TrainConfig, ranks: TrainRanks, shares: Sequence[WeightedStore], device: torch.device) -> Loader:
    """Open a loader that yields every held-out sample once, regardless of its store's repeats.

    It accumulates like training: captions are chosen by position in the global batch, so the same global batch
    has the same captions on any number of ranks.
    """
    asked = config.for_loader(
        split="val", remainder=Remainder.PARTIAL, epochs=1, caption_dropout=0.0, flip=0.0, text=TextForm.STORED
    )
    return Loader(once_each(shares), asked, rank=ranks.rank, world_size=ranks.world_size, device=device)


def expect_service(config: TrainConfig, ranks: TrainRanks, shares: Sequence[WeightedStore]) -> None:
    """Check on every rank that the loader service delivers a batch."""
    if config.service in (IN_PROCESS, AUTO):
        return
    from_rank_zero(ranks, lambda: _await_service(config))
    one_ahead = replace(config, prefetch_bytes=1 << 20)
    with fail_together(), open_loader(one_ahead, ranks, shares, torch.device("cpu")) as loader:
        next(loader.forever())


def _await_service(config: TrainConfig) -> None:
    """Wait for a service of this machine: one that was started just before has a moment to begin."""
    address, ends = config.service_address(), 0.0
    while address is not None and isinstance(address.place, Path):
        try:
            connected(address.place).close()
            break
        except DeliveryError:
            if not ends:
                ends = time.monotonic() + SERVICE_STARTS_S
                where = printable(str(address.place))
                print(f"waiting {SERVICE_STARTS_S} s for a service at {where}", file=sys.stderr, flush=True)
            if time.monotonic() > ends:
                raise
            time.sleep(0.1)
