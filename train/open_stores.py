"""The stores of a run: rank 0's newest generation of each on every rank, or those that a checkpoint was planned on."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from bucketline.errors import StateError
from bucketline.loader import StoreShare
from bucketline.loader.stores import open_shares, parse_store
from bucketline.store import Store
from bucketline.train.ranks import Ranks, expect_equal, from_rank_zero

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from bucketline.train.run_folder import Start


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedStore:
    """A store as a checkpoint and the run's configuration name it."""

    path: str  # as it was given; it may lie elsewhere by now
    store_id: str
    generation: int
    digest: str  # of the generation's manifest
    repeats: int


def describe(share: StoreShare) -> TrainedStore:
    """Give what a run keeps of a store."""
    manifest = share.store.manifest
    return TrainedStore(
        path=str(share.store.path),
        store_id=manifest.store_id,
        generation=manifest.generation,
        digest=manifest.digest,
        repeats=share.repeats,
    )


def open_stores(paths: Sequence[Path], ranks: Ranks, start: Start) -> tuple[StoreShare, ...]:
    """Open rank 0's newest generation of each store on every rank; or the checkpoint's, where its plan goes on.

    Raises:
        UsageError: where one store is given twice.
        StateError: where the stores are not those of the checkpoint, naming the first that differs.
        StoreError: where a store cannot be opened.
    """
    asked = [parse_store(str(path)) for path in paths]
    before = None if start.state is None or start.takes_new_plan else start.state.stores
    if before is not None and len(before) != len(asked):
        raise StateError(
            f"{start.checkpoint} was trained on {len(before)} stores ({', '.join(one.path for one in before)}), "
            f"{len(asked)} are given; give each --store that the run began with"
        )
    wanted = [None] * len(asked) if before is None else [one.generation for one in before]
    found = from_rank_zero(
        ranks, lambda: [Store.open(a.path, w).manifest.generation for a, w in zip(asked, wanted, strict=True)]
    )
    shares = open_shares(
        [StoreShare(store=Store.open(a.path, g), repeats=a.repeats) for a, g in zip(asked, found, strict=True)]
    )
    expect_equal(ranks, "the stores' digests", ",".join(share.store.manifest.digest for share in shares))
    for one, share in zip(before or (), shares, strict=False):
        now = describe(share)
        if replace(now, path=one.path) != one:
            raise StateError(
                f"{start.checkpoint} was trained on the store {one.store_id} ({one.path}), generation {one.generation} with "
                f"digest {one.digest}, {one.repeats} times a pass; {now.path} is {now.store_id} with digest {now.digest}, "
                f"{now.repeats} times a pass; give the --store that the run began with"
            )
    return shares


def once_each(shares: Sequence[StoreShare]) -> list[StoreShare]:
    """Give the stores without their repeats: what is measured or shown needs each sample once."""
    return [StoreShare(store=share.store) for share in shares]
