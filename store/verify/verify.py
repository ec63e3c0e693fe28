"""Read a complete store once in several threads and report every fault: its shards, and the rest of its folder."""

from __future__ import annotations

import os
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

import xxhash

from bucketline.errors import CorruptError, StoppedError, StoreError
from bucketline.store.folder import MissingObjectError
from bucketline.store.format.manifest import (
    COLUMN_SHARD_NAME,
    DROPPED_SUFFIX,
    MANIFEST,
    MAX_MANIFEST_BYTES,
    Manifest,
    dump_manifest,
    parse_manifest,
)
from bucketline.store.read.files import all_files, files_of, list_of
from bucketline.store.read.store import Store
from bucketline.store.remote.generations import generation_name, listed_generations, newest_generation
from bucketline.store.remote.objects import ObjectFolder, asked_again
from bucketline.store.transfer import Downloader
from bucketline.store.verify.shard import ColumnCheck, Fault, Faults, ShardCheck, mismatch
from bucketline.store.write.column import MAKING
from bucketline.store.write.publish import KEPT_CAPTIONS, RUNS_FOLDER
from bucketline.store.write.seal import RECORDS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from bucketline.store.folder import Folder
    from bucketline.store.format.manifest import FileEntry, ShardEntry

_KNOWN = ("rejects.jsonl", "without_caption.jsonl", "packed_model.json")  # see FORMAT.md
_PART_BYTES = 8 << 20  # of a file that is read in parts
_NEXT = "on a disk the next pack adopts it if it is complete, in a bucket `store compact --gc` removes it after a day"
_OF_RUNS = tuple(f"pending/{name}" for name in (RUNS_FOLDER, KEPT_CAPTIONS))
_DECODING = "decoding"  # folder of the packer's notes about images that crash their decoder


@dataclass(frozen=True, slots=True, kw_only=True)
class Stray:
    """A file that belongs to no generation, or one that an older generation lacks. Not a fault."""

    path: str  # relative to the store's folder
    what: str


class FolderCheck:
    """Checks everything in a store's folder, on a disk or in object storage, except the newest generation's shards."""

    def __init__(self, folder: Folder, newest: Manifest, on_bytes: Callable[[int], None]) -> None:
        """Read nothing yet; `on_bytes` is called with 0 between files, so that it can end the check by raising."""
        self._folder, self._newest, self._on_bytes = folder, newest, on_bytes
        self._faults = Faults(None)
        self._strays: list[Stray] = []

    @property
    def faults(self) -> tuple[Fault, ...]:
        return self._faults.found

    @property
    def strays(self) -> tuple[Stray, ...]:
        return tuple(sorted(self._strays, key=lambda stray: stray.path))

    def run(self) -> None:
        """Check the manifests' bytes, then files listed only by older generations, then look for strays.

        On a web server, whose folders cannot be listed, only the newest generation's files are known.
        """
        self._own_documents()
        known = set(_files_of(self._newest))
        for manifest in [] if self._folder.is_read_only else self._older():
            own = {name: expected for name, expected in _files_of(manifest).items() if name not in known}
            known |= own.keys()
            for (name, expected), num_bytes in zip(own.items(), self._folder.sizes(list(own)), strict=True):
                self._compare(name, num_bytes, expected, manifest.generation)
        if not self._folder.is_read_only:
            self._look_for_strays(known)

    def _own_documents(self) -> None:
        """Check that both manifest files of the newest generation have exactly the bytes that a writer writes."""
        own = generation_name(self._newest.generation)
        for name in (MANIFEST, own):
            with self._reporting(f"; copy {MANIFEST} to {self._folder.place(own)}"):
                self._document(name, self._newest.generation)

    def _older(self) -> Iterator[Manifest]:
        for number in listed_generations(self._folder):
            if number != self._newest.generation:
                self._on_bytes(0)
                with self._reporting("; a run that was planned on that generation cannot resume"):
                    yield self._document(generation_name(number), number)

    def _document(self, name: str, generation: int) -> Manifest:
        """Return a manifest that is one of this store's, and has exactly the bytes that a writer writes."""

        def read() -> Manifest:
            data, place = self._folder.read(name, MAX_MANIFEST_BYTES), self._folder.place(name)
            found = parse_manifest(data, place)
            if found.store_id != self._newest.store_id or (name != MANIFEST and found.generation != generation):
                raise CorruptError(f"{place} is generation {found.generation} of store {found.store_id}; move it away")
            if data != dump_manifest(found):
                raise CorruptError(f"{place} differs in its bytes from what was written, though its content is the same")
            return found  # of `manifest.json`, another one may have been published meanwhile

        return asked_again(read, self._folder.deadline_s, most_wrong=2)

    def _compare(self, name: str, num_bytes: int | None, expected: FileEntry, generation: int) -> None:
        """Compare a file, of this many bytes, with what an older generation says of it."""
        self._on_bytes(0)
        if num_bytes is None:
            self._strays.append(Stray(path=name, what=f"missing; only generation {generation} and older ones list it"))
            return

        def compare() -> None:
            digest = self._digest(name, num_bytes) if num_bytes == expected.num_bytes else None
            if fault := mismatch(name, num_bytes, digest, expected, f"generation {generation}"):
                raise CorruptError(fault)

        with self._reporting(""):
            asked_again(compare, self._folder.deadline_s, most_wrong=2)

    def _digest(self, name: str, num_bytes: int) -> str:
        state = xxhash.xxh3_128()
        for begin in range(0, num_bytes, _PART_BYTES):
            self._on_bytes(0)
            state.update(self._folder.read_range(name, begin, min(begin + _PART_BYTES, num_bytes)))
        return state.hexdigest()

    def _look_for_strays(self, known: set[str]) -> None:
        for file in self._folder.names():
            is_known = file.name in known or file.name.split("/")[-2:-1] == [_DECODING]
            if not is_known and (what := _what_is(file.name)) is not None:
                self._strays.append(Stray(path=file.name, what=what))

    @contextmanager
    def _reporting(self, advice: str) -> Iterator[None]:
        try:
            yield
        except StoreError as error:
            self._faults.of_file(f"{error}{advice}")


def _files_of(manifest: Manifest) -> dict[str, FileEntry]:
    return {path.as_posix(): expected for path, expected in all_files(Path(), manifest)}


def _what_is(name: str) -> str | None:
    """Return a description of a file that no generation lists; None if it belongs there."""
    folder = name.rpartition("/")[0]
    path = PurePosixPath(name)
    is_manifest = folder == "generations" and path.suffix == ".json" and path.stem.isdecimal()
    if name in (MANIFEST, *_KNOWN) or is_manifest or (folder == "pending" and path.suffix in (".lock", RECORDS)):
        return None
    if folder == "pending" and path.suffix in (".lmdb", MAKING, ""):
        return "is being written or sent, or an interrupted run left it; the next writer takes it over, or removes it"
    if folder.startswith(_OF_RUNS):
        return "belongs to a run that is under way, or that was interrupted; the next pack uses or removes it"
    if folder == "generations" and path.suffix == DROPPED_SUFFIX:
        return "is a list of dropped rows that no generation has; `store compact --gc` removes it, in a bucket after a day"
    if folder == "shards" and (COLUMN_SHARD_NAME.fullmatch(path.stem) or path.suffix in (".lmdb", ".meta")):
        return f"belongs to a shard, or a column of one, that no generation lists; {_NEXT}"
    return "not one of the store's files"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """Counts of what was read, and the faults."""

    blocks: int
    rows: int
    corrupt: tuple[Fault, ...]
    strays: tuple[Stray, ...] = ()


def verify(store: Store, on_bytes: Callable[[int], None], threads: int | None = None, *, shards_only: bool = False) -> Verified:
    """Verify a generation of a store; see `verify_folder`."""
    return verify_folder(store.folder, on_bytes, threads, store.manifest, shards_only=shards_only)


def verify_folder(
    folder: Folder,
    on_bytes: Callable[[int], None],
    threads: int | None = None,
    manifest: Manifest | None = None,
    *,
    shards_only: bool = False,
) -> Verified:
    """Read every file in a store's folder and return the faults in shard order.

    `manifest` is a generation, by default the newest. With `shards_only`, read only the files of its shards.

    The reading threads call `on_bytes` with the bytes read from the generation's shard files. `threads` defaults to the number
    of CPU cores; each needs a few MiB. Of a store in object storage, there is one, and one shard at a time is on this disk. An
    exception in the caller's thread (Ctrl-C) ends all of them at their next segment.
    """
    manifest = manifest or newest_generation(folder)
    if isinstance(folder, ObjectFolder):
        threads, check_shard = 1, partial(_check_there, folder, manifest, shards_only=shards_only)
    else:
        check_shard = partial(_check_shard, Store.at(folder, manifest), shards_only=shards_only)
    stopped = threading.Event()

    def went_on(num_bytes: int) -> None:
        if stopped.is_set():
            raise StoppedError
        if num_bytes:
            on_bytes(num_bytes)

    rest_of_it = FolderCheck(folder, manifest, went_on)
    blocks = rows = 0
    faults: list[Fault] = []
    with ThreadPoolExecutor(threads or os.cpu_count() or 1, thread_name_prefix="bucketline-verify") as pool:
        try:
            rest = None if shards_only else pool.submit(rest_of_it.run)
            found = [pool.submit(check_shard, entry, went_on) for entry in manifest.shards]
            for shard in found:
                result = shard.result()
                blocks, rows = blocks + result.blocks, rows + result.rows
                faults.extend(result.corrupt)
            if rest is not None:
                rest.result()
        except BaseException:
            stopped.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return Verified(blocks=blocks, rows=rows, corrupt=(*rest_of_it.faults, *faults), strays=rest_of_it.strays)


def _check_shard(store: Store, entry: ShardEntry, on_bytes: Callable[[int], None], *, shards_only: bool) -> Verified:
    check = ShardCheck(store, entry, on_bytes)
    check.run()
    if not shards_only:
        check.withdrawn()
    faults, blocks = check.faults, check.blocks
    for column in sorted(entry.added):
        of_column = ColumnCheck(store, entry, column, on_bytes)
        of_column.run()
        faults, blocks = (*faults, *of_column.faults), blocks + of_column.blocks
    return Verified(blocks=blocks, rows=check.rows, corrupt=faults)


def _check_there(
    folder: ObjectFolder, manifest: Manifest, entry: ShardEntry, on_bytes: Callable[[int], None], *, shards_only: bool
) -> Verified:
    """Check a shard of a store in object storage, which is got for that."""
    with tempfile.TemporaryDirectory(prefix="bucketline-", ignore_cleanup_errors=True) as work:
        path = Path(work)
        for name in ("shards", "generations"):
            (path / name).mkdir()
        lists = list_of(path, manifest) if entry.samples != entry.live_samples else []
        try:
            Downloader(folder, takes_any_digest=True).get([*files_of(path, entry), *lists])
        except (CorruptError, MissingObjectError) as error:
            return Verified(blocks=0, rows=0, corrupt=(Fault(shard=entry.name, error=str(error)),))
        return _check_shard(Store(path, manifest), entry, on_bytes, shards_only=shards_only)
