"""A store in object storage as those who write it see it: shards are made in a folder on a disk, by one process or several."""

from __future__ import annotations

import secrets
import shutil
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from bucketline.errors import LockedError, StoreError
from bucketline.files.atomic_write import FileLock, explaining
from bucketline.store.change.commit import WorkFolder, commit_change
from bucketline.store.change.merge import fingerprint_of
from bucketline.store.format.manifest import (
    COLUMN_SHARD_NAME,
    MANIFEST,
    check_fingerprint,
    generation_path,
    generations,
    write_manifest,
)
from bucketline.store.read.files import files_of, lost_shards
from bucketline.store.read.store import Store
from bucketline.store.remote.cache.folder import forget_cache
from bucketline.store.remote.generations import find_newest, refuse_without_put_if_absent
from bucketline.store.remote.objects import ObjectFolder
from bucketline.store.remote.urls import is_url, refuse_misspelt, working_cache, working_folder
from bucketline.store.sync.push_pull import get_lists
from bucketline.store.transfer import (
    ShardSender,
    Uploader,
    forget_sent,
    remove_pending,
    send_lists,
    send_shard,
    sent_shards,
    shard_of,
)
from bucketline.store.write.publish import (
    LocalTarget,
    adopt,
    lock_store,
    new_manifest,
    newest_manifest,
    prepare_store,
    with_shards,
)
from bucketline.typed_json import first_difference

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator
    from typing import TypeAlias

    from bucketline.store.format.manifest import Manifest
    from bucketline.store.format.schema import Schema
    from bucketline.store.remote.urls import RemoteOptions
    from bucketline.store.write.publish import ChangeBase, StoreTarget
    from bucketline.typed_json import Json

    BarOfBytes: TypeAlias = Callable[[int], AbstractContextManager[Callable[[int], None]]]


def no_bar(_: int) -> AbstractContextManager[Callable[[int], None]]:
    """Return what shows nothing."""
    return nullcontext(lambda _: None)


class WorkingStore:
    """The store in `folder`, and the folder `path` on this disk in which its shards are made; see `StoreTarget`.

    A shard is sent as soon as it is sealed; only its sidecars and its description stay until it is committed. An interrupted
    run is continued by the next one with the same folder. A store that is not in the bucket yet has its first, empty generation
    in the folder, so that the next run continues that. What the bucket has is read there, through the cache.
    """

    def __init__(self, folder: ObjectFolder, path: Path, cache: Path | None = None, show: BarOfBytes = no_bar) -> None:
        """Request nothing yet. `show` shows the bytes of what an interrupted run has left, given their number."""
        self.folder, self.path = folder, path
        self.work, self._show = WorkFolder(made=path, cache=cache), show
        self._newest: Manifest | None = None  # in the bucket

    @contextmanager
    def held(self) -> Iterator[None]:
        """Let this process be the only one that uses the folder, and remove what is there of shards that are committed."""
        self.folder.refuse_read_only()
        prepare_store(self.path)
        with lock_store(self.path):
            self._newest = find_newest(self.folder, lists=True)
            refuse_without_put_if_absent(self.folder, self._newest)
            self._tidy()
            get_lists(self.folder, self.path)
            yield

    def _tidy(self) -> None:
        """Remove what is not of a shard that was made here and is neither committed nor lost."""
        shards = self.path / "shards"
        with explaining(self.path):
            if self._newest is not None:
                self._let_go(self._newest)
            sent = sent_shards(self.path).values()
            forget_sent(self.path, [lost.shard for lost in lost_shards(self.folder, sent)])  # garbage collection took them
            made = {path.stem for path in shards.glob("*.lmdb")}
            for path in shards.iterdir():
                if shard_of(path.name) not in made and not COLUMN_SHARD_NAME.fullmatch(path.stem) and not path.is_dir():
                    path.unlink()

    def _let_go(self, newest: Manifest) -> None:
        """Remove what is here of shards that are in the bucket's newest generation, and the notes of those who sent them."""
        known = newest.known_shards
        with explaining(self.path):
            forget_sent(self.path, {path.stem for path in (self.path / "shards").glob("*.lmdb")} & known)
            for number in generations(self.path):
                generation_path(self.path, number).unlink(missing_ok=True)  # another rank has committed, too
            (self.path / MANIFEST).unlink(missing_ok=True)
        remove_pending(self.folder, known)

    def newest(self) -> Manifest | None:
        if self._newest is None:
            self._newest = find_newest(self.folder, lists=True)
        return self._newest or newest_manifest(self.path)

    @contextmanager
    def writing(self, schema: Schema) -> Iterator[Manifest]:
        """Yield the newest generation, after what a killed run left here was sent and committed; `held` has the lock."""
        manifest = self.newest()
        if manifest is None:
            manifest = write_manifest(self.path, new_manifest(schema))
        check_fingerprint(manifest, schema)
        left = adopt(self.path, manifest)
        sent = sent_shards(self.path)
        if unsent := [name for name in left if name not in sent]:
            with self._show(sum((self.path / "shards" / f"{name}.lmdb").stat().st_size for name in unsent)) as on_bytes:
                uploader = Uploader(self.folder, on_bytes=on_bytes)
                uploader.look(self._newest, set(sent))
                for name in unsent:
                    send_shard(uploader, self.path, manifest, name)
        yield self.publish(manifest, left)

    def open(self, manifest: Manifest) -> Store:
        return Store.at(self.folder, manifest, self.work.cache)

    def sender(self, manifest: Manifest, run: str, *, is_first: bool) -> ShardSender:
        """Return what sends the shards that a process makes. `run` is a name of its own; one process `is_first`."""
        return ShardSender(self.folder, self.path, manifest, run, sent_shards(self.path) if is_first else ())

    def publish(
        self,
        manifest: Manifest,
        sealed: Iterable[str],
        dropped: Iterable[bytes] = (),
        rules: dict[str, Json] | None = None,
        taken_back: Collection[str] = (),
    ) -> Manifest:
        """Commit sealed shards that `manifest` does not list. Return the bucket's newest generation; see `StoreTarget`.

        If another writer commits first, they are added to its generation: a sample of theirs replaces an older one. Without a
        shard, a new store is not committed.
        """
        new, dropped = set(sealed) - manifest.known_shards, list(dropped)
        is_first = self._newest is None
        if not new and (is_first or (not dropped and not taken_back and rules in (None, manifest.rules))):
            return manifest

        def change(base: ChangeBase) -> Manifest:
            _refuse_other(manifest, base.manifest, self.folder.url)
            return with_shards(base, new - base.manifest.known_shards, dropped, rules, taken_back)

        first = manifest if is_first else None
        _, self._newest = commit_change(self.folder, change, work=self.work, first=first)
        self._let_go(self._newest)
        return self._newest

    def send_lists(self) -> None:
        send_lists(self.folder, self.path)

    def disk_bytes(self, manifest: Manifest) -> int:
        return sum(file.num_bytes for entry in manifest.shards for _, file in files_of(self.path, entry))


def _refuse_other(own: Manifest, newest: Manifest, url: str) -> None:
    if difference := first_difference(fingerprint_of(own), fingerprint_of(newest), ""):
        field, mine, theirs = difference
        raise StoreError(
            f"{url}: another writer has committed a store with {field} = {theirs!s:.200}, this run has {mine!s:.200}; "
            "what was packed is kept, nothing was committed; rerun the command with their settings, or choose another URL"
        )


def target_at(
    place: Path | str, remote: RemoteOptions | None = None, work: Path | str | None = None, show: BarOfBytes = no_bar
) -> LocalTarget | WorkingStore:
    """Return the store at a path or URL, to be written; nothing is requested yet.

    `remote` is how to reach a URL, and `work` the folder for it; by default next to the cache. `show`: see `WorkingStore`.
    """
    if isinstance(place, str):
        refuse_misspelt(place)
    if not is_url(place):
        return LocalTarget(Path(place).absolute())
    path = working_folder(place, work).absolute()
    return WorkingStore(ObjectFolder.open(str(place), remote), path, working_cache(work), show)


def sender_to(target: StoreTarget, manifest: Manifest, run: str, *, is_first: bool) -> ShardSender | None:
    """Return what sends the shards that a process makes; None if they stay on the disk; see `WorkingStore.sender`."""
    return target.sender(manifest, run, is_first=is_first) if isinstance(target, WorkingStore) else None


@contextmanager
def own_working_store(objects: ObjectFolder, parent: Path) -> Iterator[WorkingStore]:
    """Yield the store in `objects` with a new folder in `parent`, for this process only; it is removed after the block.

    So is what ended processes left in `parent`: shards there count once they are committed.
    """
    with explaining(parent):
        parent.mkdir(parents=True, exist_ok=True)
        _remove_left(parent)
    path = parent / secrets.token_hex(8)
    lock = FileLock(path.with_suffix(_LOCK), parent)
    try:
        prepare_store(path)
        yield WorkingStore(objects, path, path / "cache")
    finally:
        forget_cache(path / "cache")
        shutil.rmtree(path, ignore_errors=True)
        lock.path.unlink(missing_ok=True)
        lock.release()


_LOCK = ".lock"


def _remove_left(parent: Path) -> None:
    for path in parent.glob(f"*{_LOCK}"):
        with suppress(LockedError, StoreError, OSError):
            lock = FileLock(path, parent)
            shutil.rmtree(path.with_suffix(""), ignore_errors=True)
            path.unlink()
            lock.release()
