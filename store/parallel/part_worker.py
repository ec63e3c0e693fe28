"""A worker of `write_store`: encode one item after another, and add its samples to a part of the store."""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from bucketline.errors import BucketlineError, SourceError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from multiprocessing.connection import Connection

    from bucketline.store.write.part_writer import PartWriter

READY = "ready"  # the first message of a worker
_POLL_S = 1.0  # between two looks whether the process that publishes is still there
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
        """The item's name in messages."""
        return f"item {self.ids[0]!r:.200}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of a task, or of sealing the worker's last shard."""

    num_samples: int
    sealed: list[str]  # names of the shards that were sealed meanwhile
    is_last: bool = False  # of no task


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """An error that ends the run; `kind` is the name of one of our errors."""

    kind: str
    message: str
    trace: str  # of the worker


@dataclass(slots=True)
class ItemEncoder:
    """Encodes items into a part."""

    part: PartWriter
    encode: Callable[[Any], Any]
    num_told: int = 0  # sealed shards that an outcome has named

    def run(self, task: Task) -> Outcome | Failure:
        """Encode an item and add its samples; nothing of it is added after the first one that is refused."""
        try:
            num_samples = 0
            for sample in self._samples(task):
                self.part.add(**_arguments(task, sample))
                num_samples += 1
        except BucketlineError as error:
            return _failure_of(error, "" if task.name.removeprefix("item ") in str(error) else f"{task.name}: ")
        return self.outcome(num_samples)

    def outcome(self, num_samples: int = 0, *, is_last: bool = False) -> Outcome:
        """Return an outcome with the shards that were sealed since the last one."""
        sealed = self.part.sealed[self.num_told :]
        self.num_told += len(sealed)
        return Outcome(num_samples=num_samples, sealed=sealed, is_last=is_last)

    def _samples(self, task: Task) -> Iterator[object]:
        """Yield what `encode` makes of an item."""
        try:
            made = self.encode(task.item)
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
                f"{task.name}: encode raised {type(error).__name__}: {error}; what was written before is kept: correct it, or "
                "have "
                "encode return None to leave the item out, and call write_store again to continue"
            ) from error


def run_worker(
    connection: Connection[Any, Any], part: PartWriter, encode: Callable[[Any], Any], is_stopped: Flag, parent: int
) -> None:
    """Encode the tasks that arrive until None does, or `is_stopped` is set; the process `parent` publishes.

    If that is gone, what is committed stays for the store's next writer.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends Ctrl-C to every process; the parent says when to stop
    encoder = ItemEncoder(part, encode)
    with suppress(BrokenPipeError, ConnectionResetError):
        try:
            connection.send(READY)
            with part:
                while is_parent_there := _has_message(connection, parent):
                    task = connection.recv()
                    if task is None or is_stopped.value:
                        break
                    connection.send(encoder.run(task))
                if not is_parent_there:
                    part.commit()
                    part.close()
                    return
        except BucketlineError as error:
            connection.send(_failure_of(error))
        else:
            connection.send(encoder.outcome(is_last=True))
        connection.close()


def _failure_of(error: BucketlineError, beginning: str = "") -> Failure:
    """Return an error as a message to the parent."""
    return Failure(kind=type(error).__name__, message=f"{beginning}{error}", trace=traceback.format_exc())


def _has_message(connection: Connection[Any, Any], parent: int) -> bool:
    """Wait for a message; return False if the parent is gone."""
    while os.getppid() == parent:
        if connection.poll(_POLL_S):
            return True
    return False


def _arguments(task: Task, sample: object) -> dict[str, Any]:
    """Return a sample as keyword arguments of `PartWriter.add`."""
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
