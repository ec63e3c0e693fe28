"""Files of shards between a disk and object storage, compared with their digests on the way; shards sent as they are sealed.

A shard's sidecar is sent first, by put-if-absent: it holds the shard's id, and takes the name.
"""

from __future__ import annotations

import itertools
import json
import os
import queue
import re
import secrets
import threading
import time
from collections import deque
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import xxhash

from bucketline.errors import CorruptError, StoppedError, StoreError
from bucketline.files.atomic_write import create_aside, make_sparse, remedy_for_failed_write, write_or_explain
from bucketline.files.paths import read_regular
from bucketline.forks import JoinableThread
from bucketline.store.folder import DeniedError, ExistsError, MissingObjectError, folder_time
from bucketline.store.format.block import bytes_digest
from bucketline.store.format.manifest import COLUMN_SHARD_NAME, SHARD_NAME, object_name, shard_paths
from bucketline.store.read.files import files_of, list_of
from bucketline.store.remote.objects import MAX_WRONG, PART_BYTES, PARTS_IN_FLIGHT, asked_again
from bucketline.store.shard.meta import read_meta
from bucketline.store.shard.sidecar import open_listed, read_exactly

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
    from pathlib import Path
    from types import TracebackType

    from bucketline.store.folder import ListedFile
    from bucketline.store.format.manifest import FileEntry, Manifest, ShardEntry
    from bucketline.store.remote.objects import ObjectFolder


LISTS = ("rejects.jsonl", "without_caption.jsonl")  # of the packer, not of the format
MAX_LIST_BYTES = 1 << 30
Item = TypeVar("Item")
FRESH_S = 12 * 3600.0  # half of the time that garbage collection leaves to what nothing lists


@dataclass(frozen=True, slots=True, kw_only=True)
class _File:
    """A file to send."""

    path: Path
    name: str
    entry: ShardEntry
    expected: FileEntry
    is_meta: bool

    def is_same_in(self, listed: ShardEntry | None) -> bool:
        """Return whether the bucket's newest generation, if it lists the shard, lists these bytes: sidecars may be rebuilt."""
        if listed is None or COLUMN_SHARD_NAME.fullmatch(self.path.stem):
            return True  # the names of added columns' files are drawn
        return self.expected in (listed.lmdb, listed.meta)


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
        listed, name = self._listed.get(entry.name), f"shards/{entry.name}.meta"
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
                if bytes_digest(self._folder.read(name)) != entry.meta.digest:
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
        if file.is_meta and file.name not in self._seen:
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
        """Send a file whose name another writer may be using: a sidecar."""
        data = b"".join(self._parts(file))
        try:
            self._folder.create(file.name, data)
        except ExistsError:
            raise StoreError(self._of_another(file.name)) from None


def send_dropped(folder: ObjectFolder, store: Path, manifest: Manifest) -> int:
    """Send the list of a generation's dropped rows, which is named by its content; return its bytes, 0 if there is none."""
    for path, expected in list_of(store, manifest):
        data = read_regular(path, expected.num_bytes)
        if bytes_digest(data) != expected.digest:
            raise CorruptError(f"{path} is damaged: its digest is not the manifest's; run `store verify`, then push again")
        folder.write(object_name(path), data)
        return len(data)
    return 0


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
    """Yield shards' files: the sidecar first, which takes the name, and the shard's own file last, after all others."""
    for entry in shards:
        own, meta, *others = files_of(store, entry)
        for path, expected in (meta, *others, own):
            yield _File(
                path=path,
                name=f"shards/{path.name}",
                entry=entry,
                expected=expected,
                is_meta=path == meta[0],
            )


def shard_of(name: str) -> str:
    """Return the shard that an object belongs to.

    >>> shard_of("shards/g000001-00.meta")
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

    def get(self, files: Iterable[tuple[Path, FileEntry]]) -> None:
        """Get files by their names; those that are there with the right length are left as they are."""
        wanted = [(path, expected) for path, expected in files if not is_there(path, expected)]
        _in_threads(self._jobs, lambda own: self.get_one(*own), wanted, self._stopped)

    def get_one(self, path: Path, expected: FileEntry) -> None:
        """Get a file, replacing what is at its path; raises what `get` does."""
        for left in reversed(range(1 if self._takes_any_digest or not self._folder.is_far else MAX_WRONG)):
            if self._is_got(path, expected, is_last=not left):
                return

    def _is_got(self, path: Path, expected: FileEntry, *, is_last: bool) -> bool:
        """Get a file; return False if its bytes are wrong and this is not the last try."""
        name, state = object_name(path), xxhash.xxh3_128()
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


def is_there(path: Path, expected: FileEntry) -> bool:
    """Return whether a file has been got: it takes its name only when it is complete."""
    try:
        return path.stat().st_size == expected.num_bytes
    except FileNotFoundError:
        return False


# ---------------------------------------------------------------------------------------------------------------------- sender
# Send shards as soon as they are sealed, while others are made, and keep nothing of them on the disk but their sidecars.
#
# A shard that is in the bucket, and that no generation there lists yet, has an empty file next to it
# (`shards/NAME.sent`). In the bucket, `pending/RUN` lists the shards of a run: garbage collection leaves alone what a fresh
# one lists.

PENDING = "pending"
SENT = ".sent"
MOST_WAITING = 1  # sealed shards that wait to be sent, or are being sent, when another is begun
REPEAT_S = FRESH_S / 2  # the note in the bucket is written again after this time
_POLL_S = 0.2
_MAX_NOTE_BYTES = 64 << 20
_NOTE = re.compile(rf"{PENDING}/[\w-]+", re.ASCII)  # the name of a run, without a suffix


class ShardSender:
    """Sends the shards of one process in a thread, in the order in which they are sealed. Use it in a `with` block.

    After an error in the block, what is being sent is broken off; what was not sent stays for the next run.
    """

    def __init__(self, objects: ObjectFolder, path: Path, manifest: Manifest, run: str, before: Collection[str] = ()) -> None:
        """Request nothing yet. `run` is a name that no other process uses; `before` are shards that an earlier run had sent."""
        self._objects, self._path, self._manifest, self._run = objects, path, manifest, run
        self._uploader = Uploader(objects, jobs=1, on_bytes=self._count)
        self._waiting: queue.Queue[str | None] = queue.Queue()
        self._listed = set(before)
        self._bytes = dict[str, int]()  # of the shards to send
        self._bytes_done = 0
        self._failure: BaseException | None = None
        self._is_stopped = False
        self._thread = JoinableThread(self._run_thread, name="bucketline-send")
        self.sent: list[str] = []

    def put(self, name: str) -> None:
        """Have a sealed shard sent; returns at once. Any thread may call it."""
        self._bytes[name] = shard_paths(self._path, name).lmdb.stat().st_size
        self._waiting.put(name)

    @property
    def bytes_left(self) -> int:
        return sum(self._bytes.values()) - self._bytes_done

    def wait_for_room(self, check: Callable[[], None]) -> None:
        """Wait until few enough shards wait; `check` is called meanwhile, and may raise."""
        self._wait_for(lambda: len(self._bytes) - len(self.sent) <= MOST_WAITING, check)

    def finish(self, check: Callable[[], None], on_bytes: Callable[[int], None] = lambda _: None) -> None:
        """Wait until every shard has been sent; `on_bytes` takes the bytes sent meanwhile. Otherwise as `wait_for_room`."""
        shown = self._bytes_done

        def look() -> None:
            nonlocal shown
            done = self._bytes_done
            on_bytes(done - shown)
            shown = done
            check()

        self._wait_for(lambda: len(self.sent) == len(self._bytes), look)
        look()

    def _wait_for(self, is_over: Callable[[], bool], check: Callable[[], None]) -> None:
        while self._failure is None and not is_over():
            self._thread.join(_POLL_S)
            check()
        if self._failure is not None:
            raise self._failure

    def __enter__(self) -> ShardSender:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None:
            self._is_stopped = True
            self._uploader.stop()
        self._waiting.put(None)
        self._thread.join()

    def _run_thread(self) -> None:
        try:
            if self._listed:
                self._note()
            self._send_all()
        except StoppedError:
            pass
        except BaseException as error:  # noqa: BLE001 - raised by those who wait
            self._failure = error

    def _send_all(self) -> None:
        repeat_at = time.monotonic() + REPEAT_S
        while not self._is_stopped:
            try:
                name = self._waiting.get(timeout=max(repeat_at - time.monotonic(), _POLL_S))
            except queue.Empty:
                name = ""
            if name is None:
                return
            if name:
                self._listed.add(name)
            if name or self._listed:
                self._note()
                repeat_at = time.monotonic() + REPEAT_S
            if name:
                send_shard(self._uploader, self._path, self._manifest, name)
                self.sent.append(name)

    def _note(self) -> None:
        self._objects.write(f"{PENDING}/{self._run}", json.dumps(sorted(self._listed)).encode())

    def _count(self, num_bytes: int) -> None:
        self._bytes_done += num_bytes  # one thread adds, as one shard is sent at a time


def send_shard(uploader: Uploader, store: Path, manifest: Manifest, name: str) -> None:
    """Send a sealed shard, note that, then keep only the length of its file. A crash in between leaves the whole file."""
    entry = read_meta(store, name, with_columns=bool(manifest.added)).entry
    uploader.send(store, [entry])
    write_or_explain(sent_mark(store, name), b"")
    try:
        make_sparse(shard_paths(store, name).lmdb, entry.lmdb.num_bytes)
    except OSError as error:
        raise StoreError(f"{store / 'shards'} cannot be written: {error.strerror}; fix this and rerun the command") from error


def sent_shards(store: Path) -> dict[str, ShardEntry]:
    """Return the shards that were sent and are not known to be committed, by name."""
    names = (path.name.removesuffix(SENT) for path in (store / "shards").glob(f"*{SENT}"))
    return {name: read_meta(store, name).entry for name in names}


def sent_mark(store: Path, name: str) -> Path:
    """Return the path of the empty file that is next to a shard if it was sent."""
    return shard_paths(store, name).folder / f"{name}{SENT}"


def forget_sent(store: Path, names: Iterable[str]) -> None:
    """Remove what is left here of sent shards whose objects are gone: their samples are packed again."""
    for name in names:
        for path in sorted((store / "shards").glob(f"{name}.*"), key=lambda path: path.suffix != ".lmdb"):
            path.unlink(missing_ok=True)  # the shard's own file first: without it, nothing is adopted


def pending_shards(objects: ObjectFolder, fresh_s: float, now: float) -> tuple[set[str], list[str]]:
    """Return the shards that running processes send, and the names of notes that are older than `fresh_s`.

    `now` is the server's time.
    """
    names, stale = set[str](), list[str]()
    for entry in _notes(objects):
        if now - entry.modified_s >= fresh_s:
            stale.append(entry.name)
        else:
            names |= _listed(objects, entry.name) or set()
    return names, stale


def remove_pending(objects: ObjectFolder, committed: Collection[str]) -> None:
    """Remove the notes of which every shard has been committed, as far as the credentials allow it."""
    with suppress(DeniedError):
        for entry in _notes(objects):
            listed = _listed(objects, entry.name)
            if listed is not None and listed <= set(committed):
                objects.remove([entry.name])


@contextmanager
def noted(objects: ObjectFolder, what: str, names: Collection[str]) -> Iterator[None]:
    """Note in the bucket, while the block lasts, that a process sends shards and is going to commit them."""
    if not names:
        yield
        return
    note, data, is_over = f"{PENDING}/{what}-{secrets.token_hex(8)}", json.dumps(sorted(names)).encode(), threading.Event()
    objects.write(note, data)
    thread = JoinableThread(_repeat, args=(objects, note, data, is_over), name="bucketline-notes")
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
    with suppress(DeniedError):  # it goes once it is old
        objects.remove([note])


def _repeat(objects: ObjectFolder, note: str, data: bytes, is_over: threading.Event) -> None:
    """Write a note again now and then, so that it does not become old."""
    while not is_over.wait(REPEAT_S):
        with suppress(StoreError):  # the next time is early enough
            objects.write(note, data)


def _notes(objects: ObjectFolder) -> list[ListedFile]:
    """Return the notes; the folder of a store on a disk has pending shards and locks of local writers there as well."""
    return [entry for entry in objects.names(PENDING) if _NOTE.fullmatch(entry.name)]


def _listed(objects: ObjectFolder, note: str) -> set[str] | None:
    """Return the shards that a note lists; None if it is not a note, or gone."""
    try:
        found = json.loads(objects.read(note, _MAX_NOTE_BYTES))
    except (MissingObjectError, ValueError, RecursionError):
        return None
    if not isinstance(found, list):
        return None
    return {name for name in found if isinstance(name, str) and SHARD_NAME.fullmatch(name)}
