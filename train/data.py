"""Open the stores of a run, at the generation that it was planned on, and their loaders."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from bucketline.errors import StateError, UsageError
from bucketline.loader import Loader, Remainder, TextForm, WeightedStore
from bucketline.loader.mixture import once_each, open_shares, parse_stores
from bucketline.loader.service.client import AUTO
from bucketline.store import Store
from bucketline.store.format.manifest import generations
from bucketline.train.follow import read_schedule
from bucketline.train.outputs.checkpoint import describe
from bucketline.train.parallel import TrainRanks, expect_equal, fail_together, from_rank_zero

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bucketline.loader.mixture import StoreArgument
    from bucketline.train.config import TrainConfig
    from bucketline.train.outputs.checkpoint import Start


def open_stores(config: TrainConfig, ranks: TrainRanks, start: Start) -> tuple[WeightedStore, ...]:
    """Open rank 0's newest generation of each store on every rank; if the checkpoint's plan continues, its generation.

    Raises:
        UsageError: if one store is given twice.
        StateError: if a store differs from the checkpoint's (the first is named), or its generation was removed.
        StoreError: if a store cannot be opened.
    """
    remote = config.remote()
    asked = from_rank_zero(ranks, lambda: parse_stores(config.store))
    before = None if start.state is None or start.takes_new_plan else start.state.stores
    if before is not None and len(before) != len(asked):
        raise StateError(
            f"{start.checkpoint} was trained on {len(before)} stores ({', '.join(one.path for one in before)}), "
            f"{len(asked)} are given; name each --store of the run, or continue with --new-plan"
        )
    wanted: list[int | None] = [None] * len(asked) if before is None else [one.generation for one in before]
    if start.state is None and (schedule := read_schedule(config, ranks)) and len(schedule[0][1]) == len(asked):
        wanted = list(schedule[0][1])

    def found_here() -> list[int]:
        _refuse_collected(asked, wanted, start)
        return [Store.open(a.path, w, remote=remote).manifest.generation for a, w in zip(asked, wanted, strict=True)]

    found = from_rank_zero(ranks, found_here)
    shares = open_shares(
        [
            WeightedStore(store=Store.open(a.path, g, remote=remote), repeats=a.repeats)
            for a, g in zip(asked, found, strict=True)
        ]
    )
    if config.store_weight and len(config.store_weight) != len(shares):
        raise UsageError(
            f"--store-weight is given {len(config.store_weight)} times, expected once for each of {len(shares)} stores"
        )
    expect_equal("the stores' digests", ",".join(share.store.manifest.digest for share in shares))
    for one, share in zip(before or (), shares, strict=False):
        now = describe(share)
        if replace(now, path=one.path) != one:
            raise StateError(
                f"{start.checkpoint} was trained on the store {one.store_id} ({one.path}), generation {one.generation} with "
                f"digest {one.digest}, {one.repeats} times a pass; {now.path} is {now.store_id} with digest {now.digest}, "
                f"{now.repeats} times a pass; name the --store of the run, or continue with --new-plan"
            )
    return shares


def _refuse_collected(asked: Sequence[StoreArgument], wanted: Sequence[int | None], start: Start) -> None:
    """Raise StateError if a planned generation has been garbage-collected, which only --new-plan can replace."""
    for argument, generation in zip(asked, wanted, strict=True):
        kept = generations(argument.path) if isinstance(argument.path, Path) else []
        if generation is not None and kept and generation not in kept:
            raise StateError(
                f"{start.checkpoint} was planned on generation {generation} of {argument.path}, which no longer exists "
                f"({', '.join(map(str, kept))} {'is' if len(kept) == 1 else 'are'}): it was garbage-collected; continue with "
                "--resume --new-plan, which keeps weights, averages and optimizer"
            )


IN_PROCESS = "none"  # value of --service: read in threads of this process


def open_loader(config: TrainConfig, ranks: TrainRanks, shares: Sequence[WeightedStore], device: torch.device) -> Loader:
    """Open the training loader, which never ends; the noising step dequantises quantised tokens."""
    service = None if config.service == IN_PROCESS else config.service
    asked = config.for_loader(text=TextForm.STORED, row_weights=config.store_weight)
    return Loader(shares, asked, rank=ranks.rank, world_size=ranks.world_size, device=device, service=service)


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
        next(iter(loader))
