"""The pool of `write_store`: start the workers, hand each one task after another, and end them."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections import deque
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from multiprocessing.reduction import ForkingPickler
from multiprocessing.sharedctypes import RawValue
from pickle import PicklingError
from typing import TYPE_CHECKING, Any, Literal

from bucketline import errors
from bucketline.errors import RankError, UsageError
from bucketline.store.parallel.part_worker import READY, Failure, ItemEncoder, Outcome, Task, run_worker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from multiprocessing.connection import Connection
    from multiprocessing.context import ForkContext, SpawnContext
    from multiprocessing.process import BaseProcess
    from types import TracebackType

    from bucketline.store.write.part_writer import PartWriter

StartMethod = Literal["spawn", "fork"]
QUEUED = 2  # tasks of a worker, so that it need not wait for the next one
_POLL_S = 0.2
_NOT_PICKLED = (PicklingError, AttributeError, TypeError)


@dataclass(slots=True)
class _Worker:
    process: BaseProcess
    connection: Connection[Any, Any]
    tasks: deque[Task] = field(default_factory=deque)  # handed over, without an outcome yet
    is_ready: bool = False


class WorkerPool:
    """Processes with a part each. Use it in a `with` block; an error in it ends them between two items."""

    def __init__(self, parts: Sequence[PartWriter], encode: Callable[[Any], Any], start: StartMethod) -> None:
        if start == "spawn":
            try:
                ForkingPickler.dumps(encode)
            except _NOT_PICKLED as error:
                raise UsageError(
                    f"encode={encode!r:.100} cannot be sent to other processes ({error}); define it at the top level of a "
                    "module, "
                    'or pass workers=0 or, in a process that has not used a GPU, start="fork"'
                ) from error
        self._parts, self._encode = parts, encode
        self._context = _context(start)
        self._is_stopped = RawValue("b", 0)  # without a lock, which a killed worker would keep
        self._workers: list[_Worker] = []

    def __enter__(self) -> WorkerPool:
        for part in self._parts:
            ours, theirs = self._context.Pipe()
            arguments = (theirs, part, self._encode, self._is_stopped, os.getpid())
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

    def encode(self, tasks: Iterator[Task], has_room: Callable[[], None]) -> Iterator[Outcome]:
        """Yield the outcome of each task. `has_room` is called before a task is handed out, and may wait."""
        is_over = False
        while not is_over or any(worker.tasks for worker in self._workers):
            for worker in self._workers:
                while not is_over and len(worker.tasks) < QUEUED:
                    has_room()
                    if (task := next(tasks, None)) is None:
                        is_over = True
                    else:
                        self._send(worker, task)
            for outcome in self._received():
                yield raised(outcome)

    def finish(self, *, at_once: bool = False) -> Iterator[Outcome]:
        """Have the workers seal their last shards, and yield what became of the rest; `at_once`: without the tasks that wait.

        An error is not raised if it is not the first.
        """
        self._is_stopped.value = at_once
        left = list(self._workers)
        for worker in left:
            try:
                worker.connection.send(None)
            except OSError:
                continue
        while left:
            for worker in [one for one in left if one.connection in wait([other.connection for other in left], _POLL_S)]:
                try:
                    message = worker.connection.recv()
                except (EOFError, OSError):
                    left.remove(worker)
                    if not at_once and worker.tasks:
                        raise self._ended(worker) from None
                    continue
                if isinstance(message, Outcome):
                    yield message
                elif isinstance(message, Failure) and not at_once:
                    yield raised(message)

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

    def _received(self) -> Iterator[Outcome | Failure]:
        by_connection = {worker.connection: worker for worker in self._workers}
        for connection in wait(list(by_connection), _POLL_S):
            worker = by_connection[connection]  # type: ignore[index] # only connections were given
            try:
                message = worker.connection.recv()
            except (EOFError, OSError):
                raise self._ended(worker) from None
            if message == READY:
                worker.is_ready = True
                continue
            worker.tasks.popleft()
            yield message

    def _ended(self, worker: _Worker) -> RankError:
        """Return the error for a worker that has ended by itself."""
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


def encode_here(
    part: PartWriter, encode: Callable[[Any], Any], tasks: Iterator[Task], has_room: Callable[[], None]
) -> Iterator[Outcome]:
    """Yield the outcome of each task, encoded in this process. Otherwise as `WorkerPool.encode`."""
    encoder = ItemEncoder(part, encode)
    for task in tasks:
        has_room()
        yield raised(encoder.run(task))
    part.seal()
    yield encoder.outcome(is_last=True)


def raised(message: Outcome | Failure) -> Outcome:
    """Return an outcome, or raise the error that a failure is, with the worker's own traceback as a note."""
    if isinstance(message, Outcome):
        return message
    kind = getattr(errors, message.kind, RankError)
    error = kind(message.message)
    error.add_note(message.trace)
    raise error
