"""A store in object storage that is packed into: shards are made in a folder on a disk, sent, and committed."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from bucketline.errors import StoreError
from bucketline.files.locks import FileLock
from bucketline.store.change.commit import ATTEMPTS, overtaken
from bucketline.store.change.merge import fingerprint_of
from bucketline.store.remote.generations import refuse_without_put_if_absent
from bucketline.store.shard.reader import SealedShard
from bucketline.store.sync.mirror import Mirror
from bucketline.store.sync.mirror_source import MirroredStore, MirrorSource
from bucketline.store.sync.pull import get_lists
from bucketline.store.transfer.sender import ShardSender, remove_pending, send_shard, sent_shards
from bucketline.store.transfer.upload import Uploader, send_lists
from bucketline.store.write.publish import prepare_store, publish
from bucketline.typed_json import first_difference

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager
    from pathlib import Path

    from bucketline.store.format.manifest import Manifest
    from bucketline.store.read.store import Store
    from bucketline.store.remote.objects import ObjectFolder

_TURN = "mirror.lock"  # in pending/, held by the process that packs


class WorkingStore:
    """The folder `path`, which stands for the store in `objects` while it is packed into.

    A shard that was made there is sent as soon as it is sealed; only its sidecars stay. An interrupted run is continued by the
    next one with the same folder.
    """

    def __init__(self, objects: ObjectFolder, path: Path) -> None:
        """Request nothing yet."""
        self.objects, self.path = objects, path
        self._mirror = Mirror(objects, path)
        self._source = MirrorSource(objects, path)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Let the folder stand for the newest generation, for this process only.

        Raises:
            LockedError: if another process packs in the folder.
            StoreError: if the bucket cannot be read or written, or the storage does not honour put-if-absent.
        """
        self.objects.refuse_read_only()
        refuse_without_put_if_absent(self.objects)
        prepare_store(self.path)
        lock = FileLock(self.path / "pending" / _TURN)
        try:
            self._mirror.refresh()
            self._mirror.forget_lost()
            if self._mirror.base is not None:
                self._mirror.let_go()  # of what an interrupted run had committed
                remove_pending(self.objects, self._mirror.base.known_shards)
            get_lists(self.objects, self.path)
            yield
        finally:
            lock.release()

    def open(self, manifest: Manifest) -> Store:
        """Return a generation of the folder; what is only in the bucket is got when it is read."""
        return MirroredStore(self.path, manifest, self._source)

    def send_left(self, local: Manifest, progress: Callable[[int], AbstractContextManager[Callable[[int], None]]]) -> None:
        """Send the shards of a generation of the folder that an interrupted run made and did not send.

        Call it before the generation is read. `progress` shows the bytes, given their number.
        """
        known = {entry.name for entry in self._mirror.base.shards} if self._mirror.base else set[str]()
        sent = sent_shards(self.path)
        left = [entry for entry in local.shards if entry.name not in known and entry.name not in sent]
        if left:
            with progress(sum(entry.lmdb.num_bytes for entry in left)) as on_bytes:
                uploader = Uploader(self.objects, on_bytes=on_bytes)
                uploader.look(self._mirror.base, set(sent))
                for entry in left:
                    send_shard(uploader, self.path, local, entry.name)

    def sender(self, manifest: Manifest, run: str, *, is_first: bool) -> ShardSender:
        """Return what sends the shards that a process makes. `run` is a name of its own; one process `is_first`."""
        return ShardSender(self.objects, self.path, manifest, run, sent_shards(self.path) if is_first else ())

    def commit(self, local: Manifest) -> Manifest:
        """Commit what the folder's generation `local` has and the bucket lacks. Return the bucket's newest generation.

        Its shards have been sent. If another writer commits first, the new ones are added to the winner's generation by the
        rules of `publish`: a sample of theirs replaces an older one, and what was dropped from older shards is dropped.

        Raises:
            FingerprintError: if the winner has changed how samples are made.
            StoreError: if the bucket cannot be written. What was made is kept for the next run.
        """
        base = self._mirror.base
        if local.digest == (base.digest if base else "") or (base is None and not local.shards):
            if base is not None:
                send_lists(self.objects, self.path)
            return local
        added = sorted({entry.name for entry in local.shards} - ({entry.name for entry in base.shards} if base else set()))
        dropped = self._dropped(base, local, added)
        changed = local
        for _ in range(ATTEMPTS):
            if (committed := self._mirror.commit(changed)) is not None:
                send_lists(self.objects, self.path)
                self._mirror.let_go()
                remove_pending(self.objects, committed.known_shards)
                return committed
            newest = self._mirror.refresh(keeps_copies=True)
            if newest is None:
                raise StoreError(f"{self.objects.url} was removed while it was packed into; rerun the command")
            _refuse_other(base or local, newest, self.objects.url)
            new = [name for name in added if name not in newest.known_shards]
            changed = publish(self.path, newest, new, dropped, local.rules)
            if changed.digest == newest.digest:
                return newest
        raise overtaken(self.objects)

    def change(self, operation: Callable[[], Manifest]) -> Manifest:
        """Commit the generation that `operation` publishes in the folder. Return the bucket's newest generation.

        If another writer commits first, it is repeated on the winner's generation.

        Raises:
            StoreError: if the bucket cannot be written; what `operation` raises.
        """
        for _ in range(ATTEMPTS):
            base, changed = self._mirror.base, operation()
            if base is not None and changed.digest == base.digest:
                return base
            if (committed := self._mirror.commit(changed)) is not None:
                for entry in committed.shards:
                    self._mirror.let_columns_go(entry)
                return committed
            self._mirror.refresh(keeps_copies=True)
        raise overtaken(self.objects)

    def _dropped(self, base: Manifest | None, local: Manifest, added: list[str]) -> list[bytes]:
        """Return the digests of samples that were live in `base` and are in no shard of `local`."""
        after = {entry.name: entry for entry in local.shards}
        gone = [np.empty(0, dtype="S16")]
        for entry in base.shards if base else ():
            if (now := after.get(entry.name)) is None or now.dropped == entry.dropped:
                continue
            before, shard = SealedShard(self.path, entry), SealedShard(self.path, now)
            gone.append(before.keys()[before.live_entries() & ~shard.live_entries()])
        if not any(map(len, gone)):
            return []
        shards = [SealedShard(self.path, after[name]) for name in added]
        kept = np.concatenate([np.empty(0, dtype="S16"), *(shard.keys()[shard.live_entries()] for shard in shards)])
        missing = np.setdiff1d(np.concatenate(gone), kept)
        return [bytes(key) for key in missing.view("V16").tolist()]


def _refuse_other(own: Manifest, newest: Manifest, url: str) -> None:
    if difference := first_difference(fingerprint_of(own), fingerprint_of(newest), ""):
        field, mine, theirs = difference
        raise StoreError(
            f"{url}: another writer has committed a store with {field} = {theirs!s:.200}, this run has {mine!s:.200}; "
            "what was packed is kept, nothing was committed; rerun the command with their settings, or choose another URL"
        )
