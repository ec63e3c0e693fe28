"""Send a store's files to object storage: each is compared with its manifest's digest on the way, and becomes visible whole."""

from __future__ import annotations

import itertools
import os
import threading
import time
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING

import xxhash

from bucketline.errors import CorruptError, StoreError
from bucketline.files.regular_file import read_regular
from bucketline.store.format.hashing import LineSums, bytes_digest
from bucketline.store.read.lost_files import files_of
from bucketline.store.remote.lines import encode_lines, lines_name, needs_lines
from bucketline.store.remote.objects import PART_BYTES
from bucketline.store.shard.sidecar import open_listed, read_exactly

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
    from pathlib import Path

    from bucketline.store.format.manifest import Manifest
    from bucketline.store.format.manifest_entries import DroppedEntry, FileEntry, ShardEntry
    from bucketline.store.remote.objects import ObjectFolder

MODEL_NOTE = "packed_model.json"
LISTS = ("rejects.jsonl", "without_caption.jsonl", "long_captions.jsonl", MODEL_NOTE)  # of the packer, not of the format
MAX_LIST_BYTES = 1 << 30
FRESH_S = 12 * 3600.0  # half of the time that garbage collection leaves to what nothing lists


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """The files that an upload sent, and those that were there already."""

    files: int
    num_bytes: int
    files_there: int
    bytes_there: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _File:
    """A file to send."""

    path: Path
    name: str
    entry: ShardEntry
    expected: FileEntry | DroppedEntry
    is_list: bool  # of dropped rows: another writer may use the same name
    needs_lines: bool


class StoppedError(Exception):
    """Another file has failed, or the caller has stopped."""


class Uploader:
    """Sends the files of shards that are not in the bucket yet, several at a time."""

    def __init__(self, folder: ObjectFolder, *, jobs: int = 4, on_bytes: Callable[[int], None] = lambda _: None) -> None:
        """Request nothing yet; `on_bytes` takes the bytes read of the files that are sent, from several threads."""
        self._folder, self._jobs, self._on_bytes = folder, jobs, on_bytes
        self._stopped = threading.Event()
        self._there = dict[str, int]()  # objects that need not be sent, with their lengths
        self._known, self._lists = set[str](), dict[str, str]()
        self._shards = set[str]()

    def stop(self) -> None:
        """Break off what is being sent: `send` raises a StoppedError soon. Any thread may call it."""
        self._stopped.set()

    def look(self, remote: Manifest | None, known: Collection[str] = ()) -> None:
        """List the shards' objects. An object is visible only when it is complete, and names of shards are drawn.

        What `remote`, the bucket's newest generation, does not list, an interrupted upload left: garbage collection may remove
        it once it is old, so then it is sent again. `known` are further shards that a generation lists.
        """
        entries = remote.shards if remote else ()
        self._known = {entry.name for entry in entries} | set(known)
        self._lists = {_list_name(entry): entry.dropped.digest for entry in entries if entry.dropped is not None}
        fresh = time.time() - FRESH_S
        self._there, self._shards = {}, set()
        for found in self._folder.entries("shards"):
            self._shards.add(shard_of(found.name))
            if found.modified_s > fresh or shard_of(found.name) in self._known:
                self._there[found.name] = found.num_bytes

    def has(self, name: str) -> bool:
        """Return whether an object was there at the last look, or has been sent since."""
        return name in self._there

    def has_any_of(self, shard: str) -> bool:
        """Return whether an object of a shard was there at the last look."""
        return shard in self._shards

    def has_all(self, store: Path, manifest: Manifest, entry: ShardEntry) -> bool:
        """Return whether all objects of a shard but its list of dropped rows were there at the last look."""
        return all(file.is_list or self._is_there(file) for file in _files(store, manifest, [entry]))

    def missing_bytes(self, store: Path, manifest: Manifest, shards: Iterable[ShardEntry]) -> int:
        """Return the bytes of the files that have to be sent."""
        return sum(file.expected.num_bytes for file in _files(store, manifest, shards) if not self._is_there(file))

    def send(self, store: Path, manifest: Manifest, shards: Iterable[ShardEntry]) -> Sent:
        """Send what is missing of some shards.

        Raises:
            CorruptError: if a file differs from its manifest; nothing of it becomes visible.
            StoreError: if a file or the bucket cannot be read or written, or another writer uses the same list's name.
        """
        shards = list(shards)
        for entry in shards:
            self._refuse_others(entry)
        missing, there = list[_File](), list[_File]()
        for file in _files(store, manifest, shards):
            (there if self._is_there(file) else missing).append(file)
        by_shard = [list(own) for _, own in itertools.groupby(missing, lambda file: file.entry.name)]
        with ThreadPoolExecutor(max(1, min(self._jobs, len(by_shard))), thread_name_prefix="bucketline-push") as pool:
            try:
                futures = [pool.submit(self._send_shard, own) for own in by_shard]
                for future in wait(futures, return_when=FIRST_EXCEPTION).done:
                    future.result()
            except BaseException:
                self._stopped.set()
                pool.shutdown(wait=True, cancel_futures=True)
                raise
        return Sent(
            files=len(missing),
            num_bytes=sum(file.expected.num_bytes for file in missing),
            files_there=len(there),
            bytes_there=sum(file.expected.num_bytes for file in there),
        )

    def _is_there(self, file: _File) -> bool:
        if file.needs_lines and lines_name(file.entry.name) not in self._there:
            return False
        if file.is_list:
            return self._lists.get(file.name) == file.expected.digest and file.name in self._there
        return self._there.get(file.name) == file.expected.num_bytes

    def _refuse_others(self, entry: ShardEntry) -> None:
        """Compare the id of a shard that an interrupted upload left: names need not be drawn, where a program chooses them."""
        name = f"shards/{entry.name}.index"
        if entry.name not in self._known and name in self._there:
            if bytes_digest(self._folder.read(name)) != entry.index.digest:
                raise StoreError(self._of_another(name))
            self._known.add(entry.name)

    def _of_another(self, name: str) -> str:
        return (
            f"{self._folder.place(name)} is another writer's: somebody else pushes, or was interrupted while pushing, another "
            "state of this store. Rerun the command later; if nobody else writes there, "
            f"`store compact {self._folder.url} --gc` removes what was left, once it is a day old"
        )

    def _send_shard(self, files: Sequence[_File]) -> None:
        for file in files:
            self._send(file)

    def _send(self, file: _File) -> None:
        if file.is_list:
            self._create_list(file)
        else:
            sums = LineSums() if file.needs_lines else None
            parts = self._parts(file, sums)
            if self._there.get(file.name) == file.expected.num_bytes:  # an interrupted push sent it without its lines
                for _ in parts:
                    pass
            else:
                self._folder.write(file.name, parts, file.expected.num_bytes)
            if sums is not None:
                data = encode_lines(file.entry, sums.finish())
                self._folder.write(lines_name(file.entry.name), data)
                self._there[lines_name(file.entry.name)] = len(data)
        self._there[file.name] = file.expected.num_bytes

    def _parts(self, file: _File, sums: LineSums | None) -> Iterator[bytes]:
        """Yield a file's bytes; the last ones only if the digest of all is the manifest's."""
        state, left, offset = xxhash.xxh3_128(), file.expected.num_bytes, 0
        with open_listed(file.path, file.expected.num_bytes) as fd:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
            while left:
                if self._stopped.is_set():
                    raise StoppedError
                part = bytearray(min(left, PART_BYTES))
                read_exactly(file.path, fd, offset, memoryview(part))
                state.update(part)
                if sums is not None:
                    sums.update(memoryview(part))
                left, offset = left - len(part), offset + len(part)
                if not left and state.hexdigest() != file.expected.digest:
                    raise CorruptError(
                        f"{file.path} is damaged: its digest is not the manifest's; run `store verify` and `store repair`, "
                        "then push again"
                    )
                self._on_bytes(len(part))
                yield bytes(part)

    def _create_list(self, file: _File) -> None:
        """Send a list of dropped rows, whose name holds a generation's number that another writer may be using."""
        data = b"".join(self._parts(file, None))
        if not self._folder.create(file.name, data):
            raise StoreError(self._of_another(file.name))


def send_lists(folder: ObjectFolder, store: Path) -> None:
    """Send what the packer notes next to a store: rejects, captions that are missing or were cut, and the model's digests."""
    for name in LISTS:
        try:
            data = read_regular(store / name, MAX_LIST_BYTES)
        except OSError:
            continue  # not there, or not a file
        if len(data) <= MAX_LIST_BYTES:
            folder.write(name, data)


def _files(store: Path, manifest: Manifest, shards: Iterable[ShardEntry]) -> Iterator[_File]:
    """Yield shards' files: sidecars first, so that a shard's own file is there last."""
    for entry in shards:
        own, *sidecars = files_of(store, entry)
        for (path, expected), is_shard in (*((file, False) for file in sidecars), (own, True)):
            yield _File(
                path=path,
                name=f"shards/{path.name}",
                entry=entry,
                expected=expected,
                is_list=".dropped-" in path.name,
                needs_lines=is_shard and needs_lines(manifest),
            )


def _list_name(entry: ShardEntry) -> str:
    return f"shards/{entry.name}.dropped-{entry.dropped.generation}" if entry.dropped else ""


def shard_of(name: str) -> str:
    """Return the shard that an object belongs to.

    >>> shard_of("shards/g000001-00.dropped-7")
    'g000001-00'
    """
    return name.removeprefix("shards/").partition(".")[0]
