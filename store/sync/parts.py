"""Make shards in several processes, of which one publishes: each in a folder of its own, from which that one takes them.

On a disk that all of them share, each attempt has a folder in the store's (`AttemptStore`). Otherwise the store is in object
storage, and a process has a folder of its own (`PartStore`), which may be removed at any time. Its shards
are sent as they are sealed. The process that publishes takes their sidecars and descriptions into its own folder; from then on
they are as if they had been made and sent there.
"""

from __future__ import annotations

import secrets
import shutil
from base64 import b64decode, b64encode
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bucketline.errors import LockedError, StoreError
from bucketline.files.atomic_write import explaining, write_durably
from bucketline.files.locks import FileLock
from bucketline.files.regular_file import read_regular
from bucketline.files.sparse_file import make_sparse
from bucketline.store.format.layout import shard_paths
from bucketline.store.read.store import Store
from bucketline.store.remote.cache.folder import forget_cache
from bucketline.store.transfer.sender import ShardSender
from bucketline.store.write.attempts import attempt_path, begin_attempt, take_shards
from bucketline.store.write.describe import noted_description, sent_note
from bucketline.store.write.publish import prepare_store

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from bucketline.store.format.manifest import Manifest
    from bucketline.store.remote.objects import ObjectFolder

_MAX_SIDECAR_BYTES = 1 << 32
_LOCK = ".lock"


@dataclass(frozen=True, slots=True, kw_only=True)
class SentShard:
    """A shard that is in the bucket, and that no generation lists yet. Contents are in base 64, so that it can be JSON."""

    name: str
    note: str  # its description
    extents: str
    index: str


class AttemptStore:
    """The attempts of one run, on a disk that all its workers share; see `store/write/attempts.py`."""

    def __init__(self, path: Path, manifest: Manifest, run: str) -> None:
        """Make nothing yet. `manifest` is the generation that the run continues."""
        self._path, self._manifest, self._run = path, manifest, run

    def open(self) -> Store:
        return Store(self._path, self._manifest)

    def begin(self, name: str) -> tuple[Path, None]:
        """Return a folder for the shards of an attempt, laid out as a store. No other attempt has the name."""
        return begin_attempt(self._path, self._run, name), None

    def finish(self, folder: Path, names: Iterable[str]) -> list[SentShard]:  # noqa: ARG002 - as that of `PartStore`
        """Return nothing: the shards are taken from the folder."""
        return []

    def close(self) -> None:
        """Do nothing: the process that publishes removes the folders."""


class PartStore:
    """A folder in `parent` for shards of the store in `objects`, for this process only."""

    def __init__(self, objects: ObjectFolder, parent: Path, manifest: Manifest) -> None:
        """Make the folder, and remove those of ended processes. `manifest` is the generation that the run continues."""
        self._objects, self._manifest = objects, manifest
        with explaining(parent):
            parent.mkdir(parents=True, exist_ok=True)
            _remove_left(parent)
            self.path = parent / secrets.token_hex(8)
            self._lock = FileLock(self.path.with_suffix(_LOCK), parent)
            self.path.mkdir()

    def open(self) -> Store:
        """Return the generation; what is read of it comes through a cache in the folder."""
        return Store.at(self._objects, self._manifest, self.path / "cache")

    def close(self) -> None:
        forget_cache(self.path / "cache")
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.path.unlink(missing_ok=True)
        self._lock.release()

    def begin(self, run: str) -> tuple[Path, ShardSender]:
        folder = self.path / run
        prepare_store(folder)
        return folder, ShardSender(self._objects, folder, self._manifest, run)

    def sent(self, folder: Path, names: Iterable[str]) -> list[SentShard]:
        """Return shards of an attempt, which have been sent."""
        with explaining(folder):
            found = []
            for name in names:
                paths = shard_paths(folder, name)
                note, extents, index = (_encoded(path) for path in (sent_note(folder, name), paths.extents, paths.index))
                found.append(SentShard(name=name, note=note, extents=extents, index=index))
            return found

    def finish(self, folder: Path, names: Iterable[str]) -> list[SentShard]:
        """Return the shards of an attempt, which have been sent, and remove its folder."""
        found = self.sent(folder, names)
        with explaining(folder):
            shutil.rmtree(folder)
        return found


def take_attempt(store: Path, run: str, name: str, sealed: Iterable[str], sent: Iterable[SentShard]) -> None:
    """Take the shards of an attempt into the store's folder, from the disk or, if they were sent, by what `finish` returned.

    Call it under the store's lock. Otherwise as `take_shards` and `take_sent`.
    """
    if sent := list(sent):
        take_sent(store, sent)
    else:
        take_shards(store, attempt_path(store, run, name), sealed)


def take_sent(store: Path, sent: Iterable[SentShard]) -> None:
    """Take shards that another machine has made and sent into the folder that stands for their store. Call under its lock.

    The shard's own file comes last, without content, and makes it a shard that the next run adopts.
    """
    for shard in sent:
        paths = shard_paths(store, shard.name)
        with explaining(store):
            write_durably(paths.extents, b64decode(shard.extents))
            write_durably(paths.index, b64decode(shard.index))
            write_durably(sent_note(store, shard.name), b64decode(shard.note))
            described = noted_description(store, shard.name)
            if described is None:
                raise StoreError(f"{sent_note(store, shard.name)} has gone while it was written; rerun the command")
            make_sparse(paths.lmdb, described.entry.lmdb.num_bytes)


def _encoded(path: Path) -> str:
    return b64encode(read_regular(path, _MAX_SIDECAR_BYTES)).decode("ascii")


def _remove_left(parent: Path) -> None:
    for path in parent.glob(f"*{_LOCK}"):
        with suppress(LockedError, StoreError, OSError):
            lock = FileLock(path, parent)
            shutil.rmtree(path.with_suffix(""), ignore_errors=True)
            path.unlink()
            lock.release()
