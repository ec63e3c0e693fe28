"""Files of shards between a disk and object storage: each is compared with its manifest's digest on the way, and appears whole.

A shard's index is sent first, by put-if-absent: it holds the shard's id, and takes the name.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections import deque
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import xxhash

from bucketline.errors import CorruptError, StoppedError, StoreError
from bucketline.files.atomic_write import create_aside
from bucketline.files.disk_space import remedy_for_failed_write
from bucketline.files.regular_file import read_regular
from bucketline.store.folder import ExistsError, MissingObjectError, folder_time
from bucketline.store.format.hashing import bytes_digest
from bucketline.store.format.manifest import COLUMN_SHARD_NAME
from bucketline.store.read.lost_files import files_of
from bucketline.store.remote.objects import PART_BYTES, PARTS_IN_FLIGHT
from bucketline.store.remote.retries import MAX_WRONG, asked_again
from bucketline.store.shard.sidecar import open_listed, read_exactly

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
    from pathlib import Path

    from bucketline.store.format.manifest import DroppedEntry, FileEntry, Manifest, ShardEntry
    from bucketline.store.remote.objects import ObjectFolder

LISTS = ("rejects.jsonl", "without_caption.jsonl", "long_captions.jsonl")  # of the packer, not of the format
MAX_LIST_BYTES = 1 << 30
Item = TypeVar("Item")
FRESH_S = 12 * 3600.0  # half of the time that garbage collection leaves to what nothing lists


@dataclass(frozen=True, slots=True, kw_only=True)
class _File:
    """A file to send."""

    path: Path
    name: str
    entry: ShardEntry
    expected: FileEntry | DroppedEntry
    is_list: bool  # of dropped rows: another writer may use the same name
    is_index: bool

    def is_same_in(self, listed: ShardEntry | None) -> bool:
        """Return whether the bucket's newest generation, if it lists the shard, lists these bytes: sidecars may be rebuilt."""
        if listed is None or COLUMN_SHARD_NAME.fullmatch(self.path.stem):
            return not self.is_list  # the names of added columns' files are drawn
        return self.expected in (listed.lmdb, listed.extents, listed.index, listed.dropped)


def _in_threads(jobs: int, handle: Callable[[Item], None], items: Sequence[Item], stopped: threading.Event) -> None:
    """Handle items, several at a time; the first error sets `stopped`, and is raised when the others have ended."""
    with ThreadPoolExecutor(max(1, min(jobs, len(items))), thread_name_prefix="bucketline-transfer") as pool:
        try:
            futures = [pool.submit(handle, item) for item in items]
            for future in wait(futures, return_when=FIRST_EXCEPTION).done:
                future.result()
        except BaseException:
            stopped.set()
            pool.shutdown(wait=True, cancel_futures=True)
            raise


class Uploader:
    """Sends the files of shards that are not in the bucket yet, several at a time."""

    def __init__(self, folder: ObjectFolder, *, jobs: int = 4, on_bytes: Callable[[int], None] = lambda _: None) -> None:
        """Request nothing yet; `on_bytes` takes the bytes read of the files that are sent, from several threads."""
        self._folder, self._jobs, self._on_bytes = folder, jobs, on_bytes
        self._stopped = threading.Event()
        self._seen = dict[str, int]()  # all objects of the last look, with their lengths
        self._there = dict[str, int]()  # those that need not be sent
        self._kept = set[str]()  # shards that garbage collection leaves alone
        self._listed: dict[str, ShardEntry] = {}  # by the bucket's newest generation
        self._sent, self._compared = set[str](), set[str]()  # objects; shards

    def stop(self) -> None:
        """Break off what is being sent: `send` raises a StoppedError soon. Any thread may call it."""
        self._stopped.set()

    def look(self, remote: Manifest | None, known: Collection[str] = ()) -> None:
        """List the shards' objects. An object is visible only when it is complete.

        What `remote`, the bucket's newest generation, does not list, an interrupted upload left: garbage collection may remove
        it once it is old, so then it is sent again. `known` are further shards that it leaves alone: a generation lists them,
        or a running process has noted that it sends them.
        """
        self._listed = {entry.name: entry for entry in remote.shards} if remote else {}
        self._kept = self._listed.keys() | set(known)
        found = list(self._folder.names("shards"))
        is_any_left = any(shard_of(entry.name) not in self._kept for entry in found)
        fresh = folder_time(self._folder) - FRESH_S if is_any_left else 0.0
        self._seen = {entry.name: entry.num_bytes for entry in found}
        self._there = {
            entry.name: entry.num_bytes for entry in found if shard_of(entry.name) in self._kept or entry.modified_s > fresh
        }

    def lacking(self, store: Path, shards: Iterable[ShardEntry]) -> list[str]:
        """Return the objects of some shards that are not there. One that the last look did not show is looked up by its name.

        A list may be older than an object.
        """
        lacking = []
        for file in _files(store, shards):
            if file.name not in self._seen and (num_bytes := self._folder.size(file.name)) is not None:
                self._seen[file.name] = self._there[file.name] = num_bytes
            if not self._is_there(file):
                lacking.append(file.name)
        return lacking

    def missing_bytes(self, store: Path, shards: Iterable[ShardEntry]) -> int:
        """Return the bytes of the files that have to be sent."""
        return sum(file.expected.num_bytes for file in _files(store, shards) if not self._is_there(file))

    def send(self, store: Path, shards: Iterable[ShardEntry]) -> tuple[int, int]:
        """Send what is missing of some shards; return how many files, and how many bytes."""
        shards = list(shards)
        for entry in shards:
            self._refuse_others(entry)
        missing = [file for file in _files(store, shards) if not self._is_there(file)]
        by_shard = [list(own) for _, own in itertools.groupby(missing, lambda file: file.entry.name)]
        _in_threads(self._jobs, self._send_shard, by_shard, self._stopped)
        return len(missing), sum(file.expected.num_bytes for file in missing)

    def _is_there(self, file: _File) -> bool:
        is_same = file.name in self._sent or file.is_same_in(self._listed.get(file.entry.name))
        return is_same and self._there.get(file.name) == file.expected.num_bytes

    def _refuse_others(self, entry: ShardEntry) -> None:
        """Compare a shard with the one of its name that is there: names need not be drawn, where a program chooses them."""
        listed, name = self._listed.get(entry.name), f"shards/{entry.name}.index"
        if listed is not None:
            if listed.lmdb != entry.lmdb:
                raise StoreError(
                    f"{self._folder.place(f'shards/{entry.name}.lmdb')} is another shard than that of the store "
                    f"(digest {listed.lmdb.digest}, not {entry.lmdb.digest}): a shard's name is never used twice, and this one "
                    "was, after garbage collection; nothing was committed. `store merge` the store to a new one, and push that "
                    "to another URL; without shard_names, StoreWriter draws names that are not used again"
                )
        elif entry.name not in self._kept | self._compared and name in self._seen:
            with suppress(MissingObjectError):  # it has just been collected
                if bytes_digest(self._folder.read(name)) != entry.index.digest:
                    raise StoreError(self._of_another(name))
            self._compared.add(entry.name)

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
        if file.is_list or (file.is_index and file.name not in self._seen):
            self._create(file)
        else:
            self._folder.write(file.name, self._parts(file), file.expected.num_bytes)
        self._seen[file.name] = self._there[file.name] = file.expected.num_bytes
        self._sent.add(file.name)

    def _parts(self, file: _File) -> Iterator[bytes]:
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
                left, offset = left - len(part), offset + len(part)
                if not left and state.hexdigest() != file.expected.digest:
                    raise CorruptError(
                        f"{file.path} is damaged: its digest is not the manifest's; run `store verify` and `store repair`, "
                        "then push again"
                    )
                self._on_bytes(len(part))
                yield bytes(part)

    def _create(self, file: _File) -> None:
        """Send a file whose name another writer may be using: an index, or a list of dropped rows by a generation's number."""
        data = b"".join(self._parts(file))
        try:
            self._folder.create(file.name, data)
        except ExistsError:
            raise StoreError(self._of_another(file.name)) from None


def send_lists(folder: ObjectFolder, store: Path) -> None:
    """Send what the packer notes next to a store: rejects, and captions that are missing or were cut."""
    for name in LISTS:
        try:
            data = read_regular(store / name, MAX_LIST_BYTES)
        except OSError:
            continue  # not there, or not a file
        if len(data) <= MAX_LIST_BYTES:
            folder.write(name, data)


def _files(store: Path, shards: Iterable[ShardEntry]) -> Iterator[_File]:
    """Yield shards' files: the index first, which takes the name, and the shard's own file last, after all that it may have."""
    for entry in shards:
        own, extents, index, *others = files_of(store, entry)
        for path, expected in (index, extents, *others, own):
            yield _File(
                path=path,
                name=f"shards/{path.name}",
                entry=entry,
                expected=expected,
                is_list=".dropped-" in path.name,
                is_index=path == index[0],
            )


def shard_of(name: str) -> str:
    """Return the shard that an object belongs to.

    >>> shard_of("shards/g000001-00.dropped-7")
    'g000001-00'
    """
    return name.removeprefix("shards/").partition(".")[0]


class Downloader:
    """Gets files several at a time, and large ones in several parts at a time."""

    def __init__(
        self,
        folder: ObjectFolder,
        *,
        jobs: int = 4,
        on_bytes: Callable[[int], None] = lambda _: None,
        takes_any_digest: bool = False,
    ) -> None:
        """Request nothing yet; `on_bytes` takes the bytes that arrived, from several threads.

        With `takes_any_digest`, the caller looks for damage itself, and what is missing or short is believed after a few tries
        rather than after the deadline.
        """
        self._folder, self._jobs, self._on_bytes, self._takes_any_digest = folder, jobs, on_bytes, takes_any_digest
        self._stopped = threading.Event()

    def get(self, files: Iterable[tuple[Path, FileEntry | DroppedEntry]]) -> None:
        """Get files of `shards/` by their names; those that are there with the right length are left as they are."""
        wanted = [(path, expected) for path, expected in files if not is_there(path, expected)]
        _in_threads(self._jobs, lambda own: self.get_one(*own), wanted, self._stopped)

    def get_one(self, path: Path, expected: FileEntry | DroppedEntry) -> None:
        """Get a file, replacing what is at its path; raises what `get` does."""
        for left in reversed(range(1 if self._takes_any_digest or not self._folder.is_far else MAX_WRONG)):
            if self._is_got(path, expected, is_last=not left):
                return

    def _is_got(self, path: Path, expected: FileEntry | DroppedEntry, *, is_last: bool) -> bool:
        """Get a file; return False if its bytes are wrong and this is not the last try."""
        name, state = f"shards/{path.name}", xxhash.xxh3_128()
        aside: Path | None = None
        try:
            aside, fd = create_aside(path)
            with open(fd, "wb", buffering=0) as file:  # noqa: PTH123 - opens a descriptor
                for part in self._parts(name, expected.num_bytes):
                    state.update(part)
                    view = memoryview(part).cast("B")
                    while view:
                        view = view[file.write(view) :]
                    self._on_bytes(memoryview(part).nbytes)
                if state.hexdigest() != expected.digest and not self._takes_any_digest:
                    if not is_last:
                        self._on_bytes(-expected.num_bytes)
                        return False
                    raise CorruptError(
                        f"{self._folder.place(name)} is damaged: its digest is not the manifest's; push the store again from "
                        "a copy that is whole, or `store repair` the store there"
                    )
                aside.replace(path)
        except OSError as error:
            raise StoreError(f"{path} cannot be written: {error.strerror}; {remedy_for_failed_write(path.parent)}") from error
        finally:
            if aside is not None:
                aside.unlink(missing_ok=True)
        return True

    def _parts(self, name: str, num_bytes: int) -> Iterator[bytes]:
        """Yield an object's bytes in order; several requests are under way."""
        if num_bytes <= PART_BYTES:
            yield self._part(name, 0, num_bytes)
            return
        begins = iter(range(0, num_bytes, PART_BYTES))
        with ThreadPoolExecutor(PARTS_IN_FLIGHT, thread_name_prefix="bucketline-part") as pool:
            coming = deque(
                pool.submit(self._part, name, begin, min(begin + PART_BYTES, num_bytes))
                for begin in itertools.islice(begins, PARTS_IN_FLIGHT)
            )
            try:
                while coming:
                    part = coming.popleft().result()
                    if (begin := next(begins, None)) is not None:
                        coming.append(pool.submit(self._part, name, begin, min(begin + PART_BYTES, num_bytes)))
                    yield part
            finally:
                pool.shutdown(wait=True, cancel_futures=True)

    def _part(self, name: str, begin: int, end: int) -> bytes:
        def read() -> bytes:
            if self._stopped.is_set():
                raise StoppedError
            part = self._folder.read_range(name, begin, end)
            if len(part) != end - begin:
                raise CorruptError(
                    f"{self._folder.place(name)} ends at byte {begin + len(part)}, the manifest says that it is longer; push "
                    "the store again from a copy that is whole"
                )
            return part

        if not self._folder.is_far:
            return read()
        most_wrong = MAX_WRONG if self._takes_any_digest else None
        return asked_again(read, self._folder.options.deadline_s, most_wrong=most_wrong)


def is_there(path: Path, expected: FileEntry | DroppedEntry) -> bool:
    """Return whether a file has been got: it takes its name only when it is complete."""
    try:
        return path.stat().st_size == expected.num_bytes
    except FileNotFoundError:
        return False
