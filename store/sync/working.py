"""A store in object storage as those who write it see it: shards are made in a folder on a disk, by one process or several."""

from __future__ import annotations

import secrets
import shutil
from base64 import b64decode, b64encode
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bucketline.errors import LockedError, StoreError
from bucketline.files.atomic_write import FileLock, explaining, make_sparse, write_durably
from bucketline.files.paths import read_regular
from bucketline.store.change.commit import WorkFolder, commit_change
from bucketline.store.change.merge import fingerprint_of
from bucketline.store.format.manifest import (
    COLUMN_SHARD_NAME,
    MANIFEST,
    check_fingerprint,
    generation_path,
    generations,
    shard_paths,
    write_manifest,
)
from bucketline.store.read.files import files_of, lost_shards
from bucketline.store.read.store import Store
from bucketline.store.remote.cache.folder import forget_cache
from bucketline.store.remote.generations import find_newest, refuse_without_put_if_absent
from bucketline.store.remote.objects import ObjectFolder
from bucketline.store.remote.urls import is_url, refuse_misspelt, working_cache, working_folder
from bucketline.store.shard.meta import decode_meta
from bucketline.store.sync.push_pull import get_lists
from bucketline.store.transfer import (
    ShardSender,
    Uploader,
    forget_sent,
    remove_pending,
    send_lists,
    send_shard,
    sent_mark,
    sent_shards,
    shard_of,
)
from bucketline.store.write.publish import (
    LocalTarget,
    adopt,
    attempt_path,
    begin_attempt,
    lock_store,
    new_manifest,
    newest_manifest,
    prepare_store,
    take_shards,
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


# ----------------------------------------------------------------------------------------------------------------------- parts
# Make shards in several processes, of which one publishes: each in a folder of its own, from which that one takes them.
#
# On a disk that all of them share, each attempt has a folder in the store's (`AttemptStore`). Otherwise the store is in object
# storage, and a process has a folder of its own (`PartStore`), which may be removed at any time. Its shards are sent as they
# are sealed. The process that publishes takes their sidecars and descriptions into its own folder; from then on they are as if
# they had been made and sent there.

_MAX_SIDECAR_BYTES = 1 << 32
_LOCK = ".lock"


@dataclass(frozen=True, slots=True, kw_only=True)
class SentShard:
    """A shard that is in the bucket, and that no generation lists yet. Contents are in base 64, so that it can be JSON."""

    name: str
    meta: str


class AttemptStore:
    """The attempts of one run, on a disk that all its workers share; see `store/write/publish.py`."""

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
        self.objects, self._manifest = objects, manifest
        with explaining(parent):
            parent.mkdir(parents=True, exist_ok=True)
            _remove_left(parent)
            self.path = parent / secrets.token_hex(8)
            self._lock = FileLock(self.path.with_suffix(_LOCK), parent)
            self.path.mkdir()

    def open(self) -> Store:
        """Return the generation; what is read of it comes through a cache in the folder."""
        return Store.at(self.objects, self._manifest, self.path / "cache")

    def close(self) -> None:
        forget_cache(self.path / "cache")
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.path.unlink(missing_ok=True)
        self._lock.release()

    def begin(self, run: str) -> tuple[Path, ShardSender]:
        folder = self.path / run
        prepare_store(folder)
        return folder, ShardSender(self.objects, folder, self._manifest, run)

    def sent(self, folder: Path, names: Iterable[str]) -> list[SentShard]:
        """Return shards of an attempt, which have been sent."""
        with explaining(folder):
            found = []
            for name in names:
                paths = shard_paths(folder, name)
                found.append(SentShard(name=name, meta=_encoded(paths.meta)))
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
            data = b64decode(shard.meta)
            write_durably(paths.meta, data)
            write_durably(sent_mark(store, shard.name), b"")
            make_sparse(paths.lmdb, decode_meta(data, paths.meta, shard.name).entry.lmdb.num_bytes)


def _encoded(path: Path) -> str:
    return b64encode(read_regular(path, _MAX_SIDECAR_BYTES)).decode("ascii")


def _remove_left(parent: Path) -> None:
    for path in parent.glob(f"*{_LOCK}"):
        with suppress(LockedError, StoreError, OSError):
            lock = FileLock(path, parent)
            shutil.rmtree(path.with_suffix(""), ignore_errors=True)
            path.unlink()
            lock.release()
