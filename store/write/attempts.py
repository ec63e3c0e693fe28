"""Folders in which a task makes shards that count only once the store's writer has taken them.

A task that a cluster runs may be lost, or run twice. Each attempt therefore has a folder of its own, laid out as a store, in
`pending/attempts/`, where nobody looks for shards. The process that holds the store's lock moves the shards of the attempts
that it accepts; what is left in the others is removed with them.
"""

from __future__ import annotations

import shutil
import socket
from typing import TYPE_CHECKING

from bucketline.errors import StoreError
from bucketline.files.atomic_write import explaining, move_durably
from bucketline.store.format.layout import pending_path, shard_paths
from bucketline.store.write.seal import seal

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

ATTEMPTS_FOLDER = "attempts"  # in pending/
RANKS_FOLDER = "ranks"  # in pending/: messages between the ranks of a run
KEPT_CAPTIONS = "captions"  # in pending/: stores of captions that a pack has encoded, and not yet written with their rows


def attempt_path(store: Path, run: str, name: str) -> Path:
    return store / "pending" / ATTEMPTS_FOLDER / run / name


def begin_attempts(store: Path, run: str) -> None:
    """Create the folder of a run, whose name was drawn. Call under the store's lock."""
    folder = attempt_path(store, run, "")
    if folder.parent.is_symlink():
        raise StoreError(f"{folder.parent} is a link; attempts are made only in a folder of the store's own: remove the link")
    with explaining(store):
        folder.mkdir(parents=True)


def begin_attempt(store: Path, run: str, name: str) -> Path:
    """Create the folder of an attempt; no two of a run have the same name."""
    folder = attempt_path(store, run, name)
    if not folder.parent.is_dir():
        raise StoreError(
            f"{folder.parent} is not on {socket.gethostname()}; a store in a folder must be on a disk that all machines share "
            "under the same path: choose such a folder, or a URL"
        )
    with explaining(folder):
        for inner in (pending_path(folder, "").parent, shard_paths(folder, "").folder):
            inner.mkdir(parents=True)
    return folder


def seal_rest(attempt: Path) -> list[str]:
    """Seal what a stopped attempt had committed; return the names of these shards."""
    return [path.stem for path in sorted((attempt / "pending").glob("*.lmdb")) if seal(attempt, path.stem)]


def take_shards(store: Path, attempt: Path, names: Iterable[str]) -> None:
    """Move sealed shards of an attempt into the store, and remove the rest of it. Call under the store's lock.

    The order makes every crash harmless: the shard's own file is moved last, and makes it a shard that the next run adopts.
    """
    for name in names:
        own, target = shard_paths(attempt, name), shard_paths(store, name)
        with explaining(store):
            move_durably(own.extents, target.extents)
            move_durably(own.index, target.index)
            move_durably(own.lmdb, target.lmdb)
    shutil.rmtree(attempt, ignore_errors=True)


def remove_attempts(store: Path) -> None:
    """Remove the folders of all attempts. Call under the store's lock.

    What a lost worker still writes there is never read, so files that appear meanwhile are left to the next call.
    """
    shutil.rmtree(store / "pending" / ATTEMPTS_FOLDER, ignore_errors=True)
