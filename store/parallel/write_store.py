"""`write_store`: make a store of items by several processes, and continue where an earlier call was stopped."""

from __future__ import annotations

import multiprocessing
import os
import secrets
from collections.abc import Iterable, Mapping, Sequence, Sized
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, get_args

from bucketline.errors import BucketlineError, UsageError
from bucketline.option_types import unlike
from bucketline.progress import progress_bar
from bucketline.store.commands.place import bar_of_bytes
from bucketline.store.format.hashing import sample_digest
from bucketline.store.parallel.part_worker import Task
from bucketline.store.parallel.worker_pool import StartMethod, WorkerPool, encode_here
from bucketline.store.sync.working import sender_to, target_at
from bucketline.store.write.publish import unlisted
from bucketline.store.write.store_writer import StoreWriter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from bucketline.store.format.manifest import Manifest
    from bucketline.store.parallel.part_worker import Outcome
    from bucketline.store.remote.urls import RemoteOptions
    from bucketline.store.transfer.sender import ShardSender
    from bucketline.store.write.part_writer import PartWriter

MOST_WORKERS = 1 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteSummary:
    """The result of a call of `write_store`."""

    num_written: int  # samples that were added
    num_unchanged: int  # items whose samples the store had
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

    Call it again to continue: only items are encoded whose samples the store lacks. Ctrl-C, a failing item or a killed worker
    end the call after the items at hand, and what was encoded is published; after `kill -9`, the next call adopts what was
    committed. A progress bar is on stderr if that is a terminal.

    `path` is a folder or a URL; `remote` says how to reach the URL, and `work` is the folder on this machine in which its
    shards are made and then sent. `items` are names (str or Path), which are their samples' ids, or a mapping from ids to
    items. For others, `ids(item)` returns the id of the item's sample, or all ids if it has several. `encode(item)` returns the
    arguments of `StoreWriter.add`, as `dict(sample_id=…, split=…, columns=…, captions=…, ragged=…)` or as a tuple in this
    order; or several of these, or None to leave the item out, which the next call tries again. It is sent to each process once:
    an object with `__call__` can load a model at its first call and keep it. `workers` is the number of processes, by default
    that of the cores; 0 encodes in this one. `start` is how they start: `"fork"` needs no importable `encode`, and must not be
    used once this process has used a GPU or started threads. `contents` are the keyword arguments of `StoreWriter`.

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
    target = target_at(path, remote, work, partial(bar_of_bytes, "send"))
    writer = StoreWriter.to(target, **contents)
    with target.held(), writer, ExitStack() as held:
        total = len(items) if isinstance(items, Sized) else None
        update = held.enter_context(progress_bar("write", total))
        sender = sender_to(target, writer.manifest, f"write-{secrets.token_hex(4)}", is_first=True)
        held.enter_context(sender or nullcontext())
        run = _Run(writer, sender, lambda: update(advance=1))
        tasks = run.missing(_identified(items, ids))
        run.write(tasks, encode, workers, start)
        return WriteSummary(
            num_written=run.num_written,
            num_unchanged=run.num_unchanged,
            num_left_out=run.num_left_out,
            manifest=writer.publish(),
        )


class _Run:
    """One call: counts, and sends shards of a store at a URL."""

    def __init__(self, writer: StoreWriter, sender: ShardSender | None, on_item: Callable[[], None]) -> None:
        self.num_written = self.num_unchanged = self.num_left_out = 0
        self._writer, self._sender, self._on_item = writer, sender, on_item
        self._put = set[str]()  # names of the shards that are to be sent

    def missing(self, tasks: Iterable[Task]) -> Iterator[Task]:
        """Yield the tasks of which the store lacks a sample."""
        seen = set[bytes]()
        for task in tasks:
            for digest, sample_id in ((sample_digest(sample_id), sample_id) for sample_id in task.ids):
                if digest in seen:
                    raise UsageError(
                        f"two items give the id {sample_id!r:.200}; ids must be unique: leave one out, or rename it"
                    )
                seen.add(digest)
            if all(sample_id in self._writer for sample_id in task.ids):
                self.num_unchanged += 1
                self._on_item()
            else:
                yield task

    def write(self, tasks: Iterator[Task], encode: Callable[[Any], Any], workers: int, start: StartMethod) -> None:
        """Encode all tasks and seal; if that is not possible, publish what there is and raise why."""
        parts = [self._writer.part(f"w{n:03d}") for n in range(max(workers, 1))]
        if workers:
            self._write_by_workers(parts, tasks, encode, start)
        else:
            with parts[0] as part:
                self._take_all(encode_here(part, encode, tasks, self._wait_for_room), part.seal)
        self._send_rest()

    def _write_by_workers(
        self, parts: Sequence[PartWriter], tasks: Iterator[Task], encode: Callable[[Any], Any], start: StartMethod
    ) -> None:
        with WorkerPool(parts, encode, start) as pool:

            def stop() -> None:
                for outcome in pool.finish(at_once=True):
                    self._take(outcome)

            self._take_all(pool.encode(tasks, self._wait_for_room), stop)
            for outcome in pool.finish():
                self._take(outcome)

    def _take_all(self, outcomes: Iterator[Outcome], stop: Callable[[], None]) -> None:
        try:
            for outcome in outcomes:
                self._take(outcome)
                if not outcome.is_last:
                    self.num_left_out += not outcome.num_samples
                    self._on_item()
        except BaseException:
            with suppress(BucketlineError):  # the first error is the one to raise; what is not published now stays pending
                stop()
                self._send_rest()
                self._writer.publish()
            raise

    def _take(self, outcome: Outcome) -> None:
        self.num_written += outcome.num_samples
        self._send(outcome.sealed)

    def _send(self, names: Iterable[str]) -> None:
        if self._sender is not None:
            for name in sorted(set(names) - self._put):
                self._put.add(name)
                self._sender.put(name)

    def _wait_for_room(self) -> None:
        if self._sender is not None:
            self._sender.wait_for_room(lambda: None)

    def _send_rest(self) -> None:
        """Send what is left, with what a killed worker had sealed, before it is published."""
        if self._sender is not None:
            self._send(unlisted(self._writer.path, self._writer.manifest))
            with bar_of_bytes("send", self._sender.bytes_left) as on_bytes:
                self._sender.finish(lambda: None, on_bytes)


def _checked_workers(workers: int | None) -> int:
    if workers is None:
        return len(os.sched_getaffinity(0))
    if type(workers) is not int or not 0 <= workers <= MOST_WORKERS:
        raise UsageError(
            f"workers is {workers!r:.80}, expected a number of processes, 0 to {MOST_WORKERS}; 0 encodes in this one"
        )
    return workers


def _identified(items: Iterable[Any] | Mapping[str, Any], ids: Callable[[Any], str | Sequence[str]] | None) -> Iterator[Task]:
    """Yield the items with their samples' ids."""
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
