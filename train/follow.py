"""Training on stores that still grow: wait for their first rows, and agree on the steps that newer generations begin at."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

from bucketline.errors import StateError
from bucketline.loader.mixture import parse_stores
from bucketline.loader.seen import read_run
from bucketline.loader.state import schedule_of
from bucketline.store import Store
from bucketline.store.format.manifest import MANIFEST
from bucketline.store.remote.objects import MissingObjectError
from bucketline.train.parallel import from_rank_zero

if TYPE_CHECKING:
    from bucketline.loader import Loader
    from bucketline.loader.mixture import StoreArgument
    from bucketline.store.remote.urls import RemoteOptions
    from bucketline.train.config import TrainConfig
    from bucketline.train.parallel import TrainRanks

LOOK_EVERY_S = 2.0
SAY_EVERY_S = 60.0

Schedule = tuple[tuple[int, tuple[int, ...]], ...]
"""Generations, one of each store, and the step from which they are read; ascending."""


def wait_for_rows(config: TrainConfig, ranks: TrainRanks) -> None:
    """With `--follow`, wait until the stores have enough rows to train on. Each rank looks for itself.

    Raises:
        StoreError: if a store is there and cannot be read.
    """
    if not config.follow or config.resume:
        return
    wanted, said = config.wait_rows or 1, -SAY_EVERY_S
    remote = config.remote()
    while (found := sum(_rows_of(one, remote) for one in parse_stores(config.store))) < wanted:
        if ranks.is_main and time.monotonic() - said >= SAY_EVERY_S:
            print(f"waiting for {wanted:,} rows to train on; there are {found:,}", file=sys.stderr, flush=True)
            said = time.monotonic()
        time.sleep(LOOK_EVERY_S)


def _rows_of(argument: StoreArgument, remote: RemoteOptions) -> int:
    """Return the training rows of a store, 0 if there is none yet."""
    if not isinstance(argument.path, str) and not (argument.path / MANIFEST).exists():
        return 0
    try:
        store = Store.open(argument.path, remote=remote)
    except MissingObjectError:
        return 0
    return sum(bucket.num_rows for bucket in store.buckets("train"))


def read_schedule(config: TrainConfig, ranks: TrainRanks) -> Schedule:
    """Return the schedule of the run that `--follow-schedule` names; empty without that option.

    Raises:
        StateError: if it has none.
    """
    path = config.follow_schedule
    return () if path is None else from_rank_zero(ranks, lambda: schedule_of(read_run(path).state))


class Follower:
    """Decides at which steps a run takes up newer generations: those of a schedule, or as rank 0 finds them."""

    def __init__(self, config: TrainConfig, ranks: TrainRanks, loader: Loader) -> None:
        """Read the schedule, if one is given.

        Raises:
            StateError: if it is of another number of stores.
        """
        self._ranks, self._loader = ranks, loader
        self._looks = config.follow and ranks.is_main
        self._schedule = read_schedule(config, ranks)
        for _, generations in self._schedule:
            if len(generations) != len(loader.shares):
                raise StateError(
                    f"{config.follow_schedule} is the schedule of {len(generations)} stores, {len(loader.shares)} are given; "
                    "name each --store of that run, in its order"
                )

    def has_newer(self) -> bool:
        """Return True on rank 0 if there are newer generations; never waits."""
        return self._looks and self._loader.newer() is not None

    def due(self, step: int, *, is_agreed: bool) -> tuple[int, ...] | None:
        """Return the generations to take up at a step; None if the present ones stay. The same on every rank.

        `is_agreed`: all ranks have seen that rank 0 has newer ones.
        """
        if is_agreed:
            return from_rank_zero(self._ranks, self._loader.newer)
        due = [generations for first, generations in self._schedule if first <= step]
        present = tuple(share.store.manifest.generation for share in self._loader.shares)
        return due[-1] if due and due[-1] != present else None
