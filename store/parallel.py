"""`write_store`: make a store of items by several processes, and continue where an earlier call was stopped."""

from __future__ import annotations

import multiprocessing
import os
import secrets
import signal
import traceback
from collections import deque
from collections.abc import Iterable, Mapping, Sequence, Sized
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import wait
from multiprocessing.reduction import ForkingPickler
from multiprocessing.sharedctypes import RawValue
from pathlib import PurePath
from pickle import PicklingError
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args

from bucketline import errors
from bucketline.command_line import progress_bar
from bucketline.errors import BucketlineError, RankError, SourceError, UsageError
from bucketline.option_value import unlike
from bucketline.store.commands.look import bar_of_bytes
from bucketline.store.format.block import sample_digest
from bucketline.store.remote.generations import find_newest
from bucketline.store.remote.urls import is_url
from bucketline.store.sync.working import sender_to, target_at
from bucketline.store.write.store_writer import StoreWriter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from multiprocessing.connection import Connection
    from multiprocessing.context import ForkContext, SpawnContext
    from multiprocessing.process import BaseProcess
    from pathlib import Path
    from types import TracebackType

    from bucketline.store.format.manifest import Manifest
    from bucketline.store.remote.urls import RemoteOptions
    from bucketline.store.transfer import ShardSender
    from bucketline.store.write.publish import StoreTarget
    from bucketline.store.write.store_writer import PartWriter


# ----------------------------------------------------------------------------------------------------------------- part worker
# A worker of `write_store`: encode one item after another, add its samples to a part of the store, and commit the part.

READY, DONE = "ready", "done"  # the first message of a worker, and its last
_POLL_S = 1.0  # between two looks whether the process that hands out items is still there
ARGUMENTS = ("sample_id", "split", "columns", "captions", "ragged")  # of `PartWriter.add`


class Flag(Protocol):
    """A number in memory that the processes share."""

    value: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """An item to encode. `ids` are the only ids that its samples may have."""

    ids: tuple[str, ...]
    item: Any

    @property
    def name(self) -> str:
        return f"item {self.ids[0]!r:.200}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """An error that ends the run; `kind` is the name of one of our errors."""

    kind: str
    message: str
    trace: str  # of the worker


class PartCommitter:
    """Adds samples to a part, and commits its shards: in a store at a URL, they are sent as they are sealed."""

    def __init__(self, part: PartWriter, target: StoreTarget, manifest: Manifest) -> None:
        """Write nothing yet; until it is entered, it can be pickled. `manifest` is a generation of the store, `target`."""
        self.part, self._target, self._manifest = part, target, manifest
        self._sender: ShardSender | None = None
        self._num_put = 0

    def __enter__(self) -> PartCommitter:
        self._sender = sender_to(self._target, self._manifest, f"write-{secrets.token_hex(4)}", is_first=False)
        if self._sender is not None:
            self._sender.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.part.close()  # what was committed to a shard that is not sealed stays for the next writer
        if self._sender is not None:
            self._sender.__exit__(kind, error, trace)

    def add(self, *arguments: Any, **named: Any) -> None:  # noqa: ANN401 - those of `PartWriter.add`
        """Add a sample as `PartWriter.add` does."""
        self.part.add(*arguments, **named)
        self._send()

    def commit(self) -> None:
        """Seal what was added, and commit it; call it once, at the end."""
        self.part.seal()
        self._send()
        if self._sender is not None:
            self._sender.finish(lambda: None)
        if self.part.sealed:
            self._target.publish(self._manifest, self.part.sealed)

    def _send(self) -> None:
        if self._sender is not None and len(self.part.sealed) > self._num_put:
            for name in self.part.sealed[self._num_put :]:
                self._sender.put(name)
            self._num_put = len(self.part.sealed)
            self._sender.wait_for_room(lambda: None)


def run_task(writer: PartCommitter, encode: Callable[[Any], Any], task: Task) -> int | Failure:
    """Encode an item, add its samples, and return their number; nothing of it is added after the first that is refused."""
    try:
        num_samples = 0
        for sample in _samples(encode, task):
            arguments = _arguments(task, sample)
            if arguments["sample_id"] not in writer.part.withdrawn:
                writer.add(**arguments)
                num_samples += 1
    except BucketlineError as error:
        return _failure_of(error, "" if task.name.removeprefix("item ") in str(error) else f"{task.name}: ")
    return num_samples


def _samples(encode: Callable[[Any], Any], task: Task) -> Iterator[object]:
    try:
        made = encode(task.item)
        if made is None:
            return
        if isinstance(made, Mapping) or (isinstance(made, tuple) and made and isinstance(made[0], str)):
            yield made
            return
        if not isinstance(made, Iterable) or isinstance(made, str | bytes):
            raise UsageError(
                f"{task.name}: encode returned a value of type {type(made).__name__}, expected a sample as "
                f"StoreWriter.add takes it, dict({', '.join(f'{name}=…' for name in ARGUMENTS)}), several, or None"
            )
        yield from made
    except BucketlineError:
        raise
    except Exception as error:
        raise SourceError(
            f"{task.name}: encode raised {type(error).__name__}: {error}; what was written before is kept: correct it, or have "
            "encode return None to leave the item out, and call write_store again to continue"
        ) from error


def run_worker(
    connection: Connection[Any, Any], writer: PartCommitter, encode: Callable[[Any], Any], is_stopped: Flag, parent: int
) -> None:
    """Encode the tasks that arrive until None does, `is_stopped` is set, or the process `parent` is gone; then commit them."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends Ctrl-C to every process; the parent says when to stop
    _tell(connection, READY)
    try:
        with writer:
            for task in _tasks(connection, parent):
                if is_stopped.value:
                    break
                _tell(connection, run_task(writer, encode, task))
            writer.commit()
    except BucketlineError as error:
        _tell(connection, _failure_of(error))
    else:
        _tell(connection, DONE)
    connection.close()


def _tell(connection: Connection[Any, Any], message: object) -> None:
    with suppress(BrokenPipeError, ConnectionResetError):  # the parent is gone
        connection.send(message)


def _tasks(connection: Connection[Any, Any], parent: int) -> Iterator[Task]:
    with suppress(EOFError):
        while os.getppid() == parent:
            if connection.poll(_POLL_S):
                if (task := connection.recv()) is None:
                    return
                yield task


def _failure_of(error: BucketlineError, beginning: str = "") -> Failure:
    return Failure(kind=type(error).__name__, message=f"{beginning}{error}", trace=traceback.format_exc())


def _arguments(task: Task, sample: object) -> dict[str, Any]:
    expected = f"dict({', '.join(f'{name}=…' for name in ARGUMENTS)}), or a tuple of them in this order"
    if isinstance(sample, tuple) and len(sample) <= len(ARGUMENTS):
        sample = dict(zip(ARGUMENTS, sample, strict=False))
    if not isinstance(sample, Mapping):
        raise UsageError(f"{task.name}: encode made a sample of type {type(sample).__name__}, expected {expected}")
    missing = [name for name in ARGUMENTS[:3] if name not in sample]
    unknown = [name for name in sample if name not in ARGUMENTS]
    if missing or unknown:
        what = f"lacks {missing[0]!r}" if missing else f"has the unknown {unknown[0]!r}"
        raise UsageError(f"{task.name}: encode made a sample that {what}, expected {expected}")
    if sample["sample_id"] not in task.ids:
        raise UsageError(
            f"{task.name}: encode made a sample of the id {sample['sample_id']!r:.200}, expected one of "
            f"{list(task.ids)!s:.200}; a "
            "rerun finds by these ids what is missing: let ids=… return the ids that encode gives the item's samples"
        )
    return dict(sample)


# ----------------------------------------------------------------------------------------------------------------- worker pool
# The pool of `write_store`: start the workers, hand each one task after another, and end them.

StartMethod = Literal["spawn", "fork"]
QUEUED = 2  # tasks of a worker, so that it need not wait for the next one
_POOL_POLL_S = 0.2
_NOT_PICKLED = (PicklingError, AttributeError, TypeError)


@dataclass(slots=True)
class _Worker:
    process: BaseProcess
    connection: Connection[Any, Any]
    tasks: deque[Task] = field(default_factory=deque)  # handed over, without an outcome yet
    is_ready: bool = False
    is_done: bool = False  # it has committed, or ended


class WorkerPool:
    """Processes that write a part each. Use it in a `with` block; an error in it ends them between two items."""

    def __init__(self, writers: Sequence[PartCommitter], encode: Callable[[Any], Any], start: StartMethod) -> None:
        if start == "spawn":
            try:
                ForkingPickler.dumps(encode)
            except _NOT_PICKLED as error:
                raise UsageError(
                    f"encode={encode!r:.100} cannot be sent to other processes ({error}); define it at the top level of a "
                    'module, or pass workers=0 or, in a process that has not used a GPU, start="fork"'
                ) from error
        self._writers, self._encode = writers, encode
        self._context = _context(start)
        self._is_stopped = RawValue("b", 0)  # without a lock, which a killed worker would keep
        self._workers: list[_Worker] = []

    def __enter__(self) -> WorkerPool:
        for writer in self._writers:
            ours, theirs = self._context.Pipe()
            arguments = (theirs, writer, self._encode, self._is_stopped, os.getpid())
            process = self._context.Process(target=run_worker, args=arguments, name="bucketline-write")
            process.start()
            theirs.close()
            self._workers.append(_Worker(process=process, connection=ours))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for worker in self._workers:
            if worker.process.is_alive():
                worker.process.kill()
            worker.process.join()
            worker.connection.close()

    def encode(self, tasks: Iterator[Task]) -> Iterator[int]:
        """Yield the number of samples of each task."""
        is_over = False
        while not is_over or any(worker.tasks for worker in self._workers):
            for worker in self._workers:
                while not is_over and len(worker.tasks) < QUEUED:
                    if (task := next(tasks, None)) is None:
                        is_over = True
                    else:
                        self._send(worker, task)
            for worker, message in self._received(self._workers):
                if message != READY:
                    worker.tasks.popleft()
                    yield raised(message)

    def finish(self, *, at_once: bool = False) -> Iterator[int]:
        """Have the workers commit, and yield what became of the rest; `at_once`: without the tasks that wait.

        An error is not raised if it is not the first.
        """
        self._is_stopped.value = at_once
        for worker in self._workers:
            with suppress(OSError):
                worker.connection.send(None)
        while left := [worker for worker in self._workers if not worker.is_done]:
            try:
                for _, message in self._received(left):
                    if message not in (READY, DONE):
                        yield raised(message)
            except BucketlineError:
                if not at_once:
                    raise

    def _send(self, worker: _Worker, task: Task) -> None:
        try:
            worker.connection.send(task)
        except _NOT_PICKLED as error:
            raise UsageError(
                f"{task.name} cannot be sent to a worker ({error}); let items be names or plain values, and open files in "
                "encode"
            ) from error
        except OSError:
            raise self._ended(worker) from None
        worker.tasks.append(task)

    def _received(self, workers: Sequence[_Worker]) -> Iterator[tuple[_Worker, Any]]:
        """Yield messages that arrive within a moment."""
        by_connection = {worker.connection: worker for worker in workers}
        for connection in wait(list(by_connection), _POOL_POLL_S):
            worker = by_connection[connection]  # type: ignore[index] # only connections were given
            try:
                message = worker.connection.recv()
            except (EOFError, OSError):
                worker.is_done = True
                raise self._ended(worker) from None
            worker.is_ready = True
            worker.is_done = message == DONE or (isinstance(message, Failure) and not worker.tasks)
            yield worker, message

    def _ended(self, worker: _Worker) -> RankError:
        worker.process.join(5)
        code = worker.process.exitcode
        how = f"was ended by {signal.Signals(-code).name}" if code is not None and code < 0 else f"ended with exit code {code}"
        if not worker.is_ready:
            return RankError(
                f"a worker of write_store {how} before its first item; see its own output above. With start='spawn', a worker "
                "imports "
                'your script: keep what runs in it under `if __name__ == "__main__":`, and encode in a file'
            )
        at = f" while it encoded {worker.tasks[0].name}" if worker.tasks else ""
        return RankError(
            f"a worker of write_store {how}{at}, perhaps for lack of memory; what it had committed is kept: call write_store "
            "again "
            "to continue, with fewer workers if memory was short"
        )


def _context(start: StartMethod) -> SpawnContext | ForkContext:
    return multiprocessing.get_context("fork") if start == "fork" else multiprocessing.get_context("spawn")


def raised(message: int | Failure) -> int:
    """Return a number of samples, or raise the error that a failure is, with the worker's own traceback as a note."""
    if isinstance(message, int):
        return message
    kind = getattr(errors, message.kind, RankError)
    error = kind(message.message)
    error.add_note(message.trace)
    raise error


# ----------------------------------------------------------------------------------------------------------------- write store

MOST_WORKERS = 1 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteSummary:
    """The result of a call of `write_store`."""

    num_written: int  # samples that were added
    num_unchanged: int  # items whose samples the store had, or had withdrawn (`store drop`)
    num_left_out: int  # items that `encode` made nothing of
    manifest: Manifest = field(repr=False)  # the store's newest generation


def write_store(
    path: Path | str,
    items: Iterable[Any] | Mapping[str, Any],
    encode: Callable[[Any], Any],
    *,
    workers: int | None = None,
    ids: Callable[[Any], str | Sequence[str]] | None = None,
    start: StartMethod = "spawn",
    remote: RemoteOptions | None = None,
    work: Path | str | None = None,
    **contents: Any,  # noqa: ANN401 - the arguments of StoreWriter
) -> WriteSummary:
    """Encode items by several processes, write their samples to a store, and publish them.

        write_store("photos.store", names, encode, workers=8, columns=[…], text=[…], empty_caption=…)

    Each process commits what it has written, so a call makes several generations. Call it again to continue: only items are
    encoded whose samples the store lacks. Ctrl-C, a failing item or a killed worker end the call after the items at hand, and
    what the other processes have encoded is published; the next call adopts what a killed one had committed to its shard. A
    progress bar is on stderr if that is a terminal.

    `path` is a folder or a URL; `remote` says how to reach the URL, and `work` is the folder on this machine in which its
    shards are made and then sent. `items` are names (str or Path), which are their samples' ids, or a mapping from ids to
    items. For others, `ids(item)` returns the id of the item's sample, or all ids if it has several. `encode(item)` returns the
    arguments of `StoreWriter.add`, as `dict(sample_id=…, split=…, columns=…, captions=…, ragged=…)` or as a tuple in this
    order; or several of these, or None to leave the item out, which the next call tries again. It is sent to each process once:
    an object with `__call__` can load a model at its first call and keep it. `workers` is the number of processes, by default
    that of the cores; 0 encodes in this one. `start` is how they start: `"fork"` needs no importable `encode`, is not for a
    URL, and must not be used once this process has used a GPU or started threads. `contents` are the keyword arguments of
    `StoreWriter`.

    Raises:
        UsageError: if an item has no id or two have the same; as `StoreWriter.add`, naming the item; or if `encode` or an item
            cannot be sent to another process.
        SourceError: if `encode` raises; the message names the item, and a note has the worker's traceback.
        RankError: if a worker has ended by itself.
        LockedError, FingerprintError, StoreError: as `StoreWriter`; or if the URL cannot be read or written.
    """
    workers = _checked_workers(workers)
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise UsageError(
            'write_store is called again while a worker imports your script; call it under `if __name__ == "__main__":`'
        )
    if not callable(encode):
        raise unlike("encode", encode, "a function of an item, or an object with __call__")
    if start not in get_args(StartMethod):
        raise UsageError(f"start is {start!r:.80}, expected {' or '.join(map(repr, get_args(StartMethod)))}")
    if start == "fork" and workers and is_url(path):
        raise UsageError('start="fork" is for a store in a folder: a forked process cannot reach a URL; pass start="spawn"')
    target = target_at(path, remote, work, partial(bar_of_bytes, "send"))
    store = StoreWriter.to(target, **contents)
    with target.held():
        with store:  # creates it, adopts what a killed call left; from then on each process commits for itself
            parts = [store.part(f"w{n:03d}") for n in range(max(workers, 1))]
        writers = [PartCommitter(part, target, store.manifest) for part in parts]
        with progress_bar("write", len(items) if isinstance(items, Sized) else None) as update:
            run = _Run(store, lambda: update(advance=1))
            tasks = run.missing(_identified(items, ids))
            if workers:
                run.write_by_workers(writers, tasks, encode, start)
            else:
                run.write_here(writers[0], tasks, encode)
    return WriteSummary(
        num_written=run.num_written,
        num_unchanged=run.num_unchanged,
        num_left_out=run.num_left_out,
        manifest=find_newest(target.folder, lists=True) or store.manifest,
    )


class _Run:
    """One call, and its counts."""

    def __init__(self, store: StoreWriter, on_item: Callable[[], None]) -> None:
        self.num_written = self.num_unchanged = self.num_left_out = 0
        self._store, self._on_item = store, on_item

    def missing(self, tasks: Iterable[Task]) -> Iterator[Task]:
        seen = set[bytes]()
        for task in tasks:
            for digest, sample_id in ((sample_digest(sample_id), sample_id) for sample_id in task.ids):
                if digest in seen:
                    raise UsageError(
                        f"two items give the id {sample_id!r:.200}; ids must be unique: leave one out, or rename it"
                    )
                seen.add(digest)
            if all(sample_id in self._store for sample_id in task.ids):
                self.num_unchanged += 1
                self._on_item()
            else:
                yield task

    def write_here(self, writer: PartCommitter, tasks: Iterator[Task], encode: Callable[[Any], Any]) -> None:
        """Encode all tasks in this process, and commit; if an error comes between, commit what there is and raise it."""
        with writer:
            try:
                for task in tasks:
                    self._count(raised(run_task(writer, encode, task)))
            except BaseException:
                with suppress(BucketlineError):  # the first error is the one to raise
                    writer.commit()
                raise
            writer.commit()

    def write_by_workers(
        self, writers: Sequence[PartCommitter], tasks: Iterator[Task], encode: Callable[[Any], Any], start: StartMethod
    ) -> None:
        """Have all tasks encoded and committed; if an error comes between, have what there is committed, and raise it."""
        with WorkerPool(writers, encode, start) as pool:
            try:
                for num_samples in pool.encode(tasks):
                    self._count(num_samples)
            except BaseException:
                for num_samples in pool.finish(at_once=True):
                    self.num_written += num_samples
                raise
            for _ in pool.finish():
                pass

    def _count(self, num_samples: int) -> None:
        self.num_written += num_samples
        self.num_left_out += not num_samples
        self._on_item()


def _checked_workers(workers: int | None) -> int:
    if workers is None:
        return len(os.sched_getaffinity(0))
    if type(workers) is not int or not 0 <= workers <= MOST_WORKERS:
        raise UsageError(
            f"workers is {workers!r:.80}, expected a number of processes, 0 to {MOST_WORKERS}; 0 encodes in this one"
        )
    return workers


def _identified(items: Iterable[Any] | Mapping[str, Any], ids: Callable[[Any], str | Sequence[str]] | None) -> Iterator[Task]:
    given: object = items
    if isinstance(given, str | bytes | PurePath) or not isinstance(given, Iterable):
        raise UsageError(
            f"items is {items!r:.200} of type {type(items).__name__}, expected an iterable of items, or a mapping of them by id"
        )
    pairs = items.items() if isinstance(items, Mapping) and ids is None else ((None, item) for item in items)
    for number, (key, item) in enumerate(pairs):
        found = ids(item) if ids is not None else item if key is None else key
        own = (found,) if isinstance(found, str) else (str(found),) if isinstance(found, PurePath) else found
        if not isinstance(own, Sequence) or isinstance(own, bytes) or not own or not all(isinstance(one, str) for one in own):
            raise UsageError(
                f"item {number} has the ids {own!r:.200}, expected a str, or several: a rerun finds by them what is missing. "
                "Give ids=…, which returns the ids of an item's samples, or a mapping from ids to items"
            )
        if ids is None and key is None and not isinstance(item, str | PurePath):
            raise UsageError(
                f"item {number} is of type {type(item).__name__}, expected a name (str or Path); give ids=…, which returns "
                "the ids of an item's samples, or a mapping from ids to items"
            )
        yield Task(ids=tuple(own), item=item)
