"""Send shards as soon as they are sealed, while others are made, and keep nothing of them on the disk but their sidecars.

A shard that is in the bucket, and that no generation there lists yet, has its description noted next to it
(`shards/NAME.sent`). In the bucket, `pending/RUN` lists the shards of a run: garbage collection leaves alone what a fresh one
lists.
"""

from __future__ import annotations

import json
import queue
import re
import secrets
import threading
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from bucketline.errors import StoppedError, StoreError
from bucketline.files.sparse_file import make_sparse
from bucketline.joinable_thread import JoinableThread
from bucketline.store.folder import DeniedError, MissingObjectError
from bucketline.store.format.layout import shard_paths
from bucketline.store.format.manifest import SHARD_NAME
from bucketline.store.transfer.files import FRESH_S, Uploader
from bucketline.store.write.describe import SENT, describe_shard, note_description, noted_description

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator
    from pathlib import Path
    from types import TracebackType

    from bucketline.store.folder import ListedFile
    from bucketline.store.format.manifest import Manifest, ShardEntry
    from bucketline.store.remote.objects import ObjectFolder

PENDING = "pending"
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

    def keep(self, names: Iterable[str]) -> None:
        """List shards, too, that another machine has sent for this run."""
        self._listed |= set(names)

    @property
    def bytes_left(self) -> int:
        """Return the bytes of the shards that are not sent yet."""
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


class PendingNotes:
    """Repeats the notes of a run's processes, also of those that have ended, while its `with` block lasts."""

    def __init__(self, objects: ObjectFolder, prefix: str) -> None:
        """Request nothing yet; `prefix` begins the names of the processes."""
        self._objects, self._prefix = objects, f"{PENDING}/{prefix}"
        self._is_over = threading.Event()
        self._thread = JoinableThread(self._run_thread, name="bucketline-notes")

    def repeat(self) -> None:
        """Write the notes again."""
        for entry in _notes(self._objects):
            if entry.name.startswith(self._prefix):
                self._objects.write(entry.name, self._objects.read(entry.name, _MAX_NOTE_BYTES))

    def __enter__(self) -> PendingNotes:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._is_over.set()
        self._thread.join()

    def _run_thread(self) -> None:
        while not self._is_over.wait(REPEAT_S):
            with suppress(StoreError):  # the next time is early enough
                self.repeat()


def send_shard(uploader: Uploader, store: Path, manifest: Manifest, name: str) -> None:
    """Send a sealed shard, note that, then keep only the length of its file. A crash in between leaves the whole file."""
    described = describe_shard(store, name, manifest)
    entry = described.entry
    uploader.send(store, [entry])
    note_description(store, described)
    try:
        make_sparse(shard_paths(store, name).lmdb, entry.lmdb.num_bytes)
    except OSError as error:
        raise StoreError(f"{store / 'shards'} cannot be written: {error.strerror}; fix this and rerun the command") from error


def sent_shards(store: Path) -> dict[str, ShardEntry]:
    """Return the shards that were sent and are not known to be committed, by name."""
    names = (path.name.removesuffix(SENT) for path in (store / "shards").glob(f"*{SENT}"))
    return {name: found.entry for name in names if (found := noted_description(store, name)) is not None}


def forget_sent(store: Path, names: Iterable[str]) -> None:
    """Remove what is left here of sent shards whose objects are gone: their samples are packed again."""
    for name in names:
        for path in sorted((store / "shards").glob(f"{name}.*"), key=lambda path: path.suffix != ".lmdb"):
            path.unlink()  # the shard's own file first: without it, nothing is adopted


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
    run = f"{what}-{secrets.token_hex(8)}"
    note = f"{PENDING}/{run}"
    objects.write(note, json.dumps(sorted(names)).encode())
    with PendingNotes(objects, run):
        yield
    with suppress(DeniedError):  # it goes once it is old
        objects.remove([note])


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
