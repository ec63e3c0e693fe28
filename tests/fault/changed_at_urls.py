"""Stores at a URL that several processes change: names used again, kills around a push's commit, clocks that are days apart.

The URL is a folder's, so that what is there can be read as a store on a disk. Whatever happens, each generation there is whole,
and a store that was pushed can be pushed again. Writers that several threads and forked children use are here as well.
"""

from __future__ import annotations

import importlib
import os
import random
import shutil
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from bucketline.errors import BucketlineError, UsageError
from bucketline.store import Store
from bucketline.store.change.add_column import add_column
from bucketline.store.change.compact import compact
from bucketline.store.change.drop import drop
from bucketline.store.change.garbage_collect import collect
from bucketline.store.format.hashing import sample_digest
from bucketline.store.format.manifest import generations, read_manifest
from bucketline.store.verify.verify import verify
from tests.fault.apart import Apart, How, apart
from tests.fault.ground import ids_of, is_sound
from tests.fault.record import Kind, Outcome, Record
from tests.kit import add_samples, everything, make_sample, make_store, samples_of, store_writer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from bucketline.store import PartWriter
    from tests.fault.apart import Ended
    from tests.fault.record import Asked
    from tests.kit import Sample

BUCKET = "train/64x64"
DAY_S = 86400.0
SKEWS_S = (-2 * DAY_S, 2 * DAY_S)
WORK_S = 60.0
CHILDREN = 3
PUSHES = 4  # to one place


class _Place:
    """A store on a disk, a copy of it, and the folder of the URL to which it is pushed."""

    def __init__(self, folder: Path, draw: random.Random) -> None:
        self.own, self.copy, self.path = folder / "own.store", folder / "copy.store", folder / "bucket" / "a.store"
        self.draw, self.number = draw, 0
        make_store(self.own, samples_of({BUCKET: 6}))

    @property
    def url(self) -> str:
        return f"file://{self.path}"

    def push(self) -> None:
        """Push, in the process that calls this: the client of object storage must not be used before a fork."""
        _folder, push = _client(self.url)
        push(self.own, _folder)

    def pull(self) -> None:
        from bucketline.store.sync.pull import pull

        pull(_client(self.url)[0], self.copy)

    def collect(self, older_than_s: float) -> None:
        from bucketline.store.change.garbage_collect import collect

        collect(_client(self.url)[0], older_than_s)

    def change(self) -> None:
        """Add rows to the store on the disk, and a column to these, drop some, or rewrite it."""
        self.number += 1
        with store_writer(self.own) as writer:
            add_samples(writer, samples_of({BUCKET: self.draw.randint(1, 4)}, f"{self.number}/"))
        if self.draw.random() < 0.5:
            add_column(self.own, "features/id", _value_of)
        if self.draw.random() < 0.5:
            drop(self.own, [self.draw.choice(ids_of(self.own))])
        if self.draw.random() < 0.7:
            compact(self.own, shard_bytes=1 << 24)

    def found(self) -> Store:
        """Open what a reader at the URL finds: the last of the generations that follow that of `manifest.json`."""
        number, there = read_manifest(self.path).generation, generations(self.path)
        while number + 1 in there:
            number += 1
        return Store.open(self.path, number)

    def faults(self) -> Iterator[str]:
        """Describe what is wrong with the generations at the URL, and with the copy."""
        if not (self.path / "manifest.json").exists():
            return
        for number in generations(self.path):
            try:
                found = verify(Store.open(self.path, number), lambda _: None, 1, shards_only=True).corrupt
            except BucketlineError as error:
                yield f"faults: generation {number} at the URL: {error}"
            else:
                yield from (f"faults: generation {number} at the URL: {fault}" for fault in found[:1])
        if (wrong := is_sound(self.copy)) is not None:
            yield f"faults: the copy: {wrong}"


def _value_of(sample_id: str) -> Any:
    return np.frombuffer(sample_digest(sample_id), dtype=np.uint8)


def _client(url: str) -> tuple[Any, Callable[..., Any]]:
    from bucketline.store.remote.objects import ObjectFolder
    from bucketline.store.sync.push import push

    return ObjectFolder.open(url), push


def _judged(ended: Ended, place: _Place, *, is_pushed: bool = False) -> tuple[Outcome, str]:
    """Judge what a process did: whether it may have been refused or not, everything that is listed must be whole."""
    for fault in place.faults():
        return Outcome.WRONG, fault
    if ended.how is How.DONE and is_pushed and everything(place.found()) != everything(Store.open(place.own)):
        return Outcome.LOST, "the store at the URL has other rows than the one that was pushed"
    return ended.outcome, ended.said


def names_used_again(asked: Asked) -> Iterator[Record]:
    """Use names of shards again after a collection, with content of the same lengths or others, then push and pull."""
    record = Record(fault="at a URL, names of shards used again", kind=Kind.OTHER)
    draw = random.Random(asked.seed)
    for trial in range(asked.of(3, 60)):
        place = _Place(asked.folder / f"names-{trial}", draw)
        first = samples_of({BUCKET: 6})
        outcomes = [apart(place.push, WORK_S)]
        if draw.random() < 0.7:
            outcomes.append(apart(place.pull, WORK_S))
        with store_writer(place.own) as writer:
            add_samples(writer, samples_of({BUCKET: 2}, "more/"))
        compact(place.own, shard_bytes=1 << 24)
        if draw.random() < 0.8:
            outcomes.append(apart(place.push, WORK_S))
        collect(place.own, 0)
        again = [make_sample(one.id, BUCKET, one.captions, version=1) for one in first]
        with store_writer(place.own, shard_names="g{}") as writer:
            add_samples(writer, again if draw.random() < 0.5 else again[:4])
        outcomes += [apart(place.push, WORK_S), apart(place.pull, WORK_S)]
        for ended in outcomes:
            record.add(*_judged(ended, place))
        shutil.rmtree(asked.folder / f"names-{trial}")
    yield record


def killed_pushes(asked: Asked) -> Iterator[Record]:
    """Kill pushes before and after their commits, change the store, push it again, and collect what is outdated then."""
    record = Record(fault="at a URL, a push killed before its commit, or after it", kind=Kind.KILL)
    draw = random.Random(asked.seed)
    place = _Place(asked.folder / "notes", draw)
    record.add(*_judged(apart(place.push, WORK_S), place, is_pushed=True))
    for _ in range(asked.of(4, 80)):
        place.change()
        at = draw.randint(0, 3)
        killed = apart(partial(_push_and_die, place, at), WORK_S)
        if killed.how is How.DIED and killed.signal == signal.SIGKILL:
            place.change()
            ended = apart(place.push, WORK_S)
            outcome, said = _judged(ended, place, is_pushed=True)
            if ended.how is How.DONE and outcome is Outcome.COMPLETED:
                outcome = Outcome.RECOVERED
            elif ended.how is How.REFUSED:
                outcome = Outcome.DEFECT  # nobody else has pushed
            record.add(outcome, f"killed at {at}: {said}")
        else:
            record.add(*_judged(killed, place, is_pushed=True))
        if draw.random() < 0.5:
            collect(place.own, 0)
            record.add(*_judged(apart(partial(place.collect, 0), WORK_S), place))
    yield record


def _push_and_die(place: _Place, at: int) -> None:
    """Push, and be killed at the n-th of the moments after it has sent the lists, and after each commit."""
    module = importlib.import_module("bucketline.store.sync.push")
    moments = [0]

    def dying(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **more: Any) -> Any:
            result = function(*arguments, **more)
            moments[0] += 1
            if moments[0] > at:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return run

    for name in ("send_lists", "commit"):
        setattr(module, name, dying(getattr(module, name)))
    place.push()


def wrong_clocks(asked: Asked) -> Iterator[Record]:
    """Collect, push and compact on machines whose clocks are two days ahead and behind, while others are at work."""
    record = Record(fault="at a URL, clocks two days ahead and behind", kind=Kind.OTHER)
    draw = random.Random(asked.seed)
    for number in range(asked.of(1, 20)):  # a few generations of each place: all are verified each time
        place = _Place(asked.folder / f"clocks-{number}", draw)
        record.add(*_judged(apart(place.push, WORK_S), place, is_pushed=True))
        for trial in range(PUSHES):
            _among_wrong_clocks(place, draw, record, f"{trial}/")
        record.add(*_judged(apart(partial(place.collect, 0), WORK_S), place))
        shutil.rmtree(asked.folder / f"clocks-{number}")
    yield record


def _among_wrong_clocks(place: _Place, draw: random.Random, record: Record, prefix: str) -> None:
    """Push what an interrupted push has sent in part, while others collect."""
    with store_writer(place.own) as writer:
        add_samples(writer, samples_of({BUCKET: 2}, prefix))
    skew_s = draw.choice(SKEWS_S)
    before = generations(place.path)
    left = apart(partial(_push_and_die, place, 0), WORK_S)  # what it sent is listed by no generation
    record.add(Outcome.RECOVERED if left.how is How.DIED else Outcome.DEFECT, f"{left.how}: {left.said}")
    pushing = Apart(partial(_pushing_slowly, place, -skew_s))
    collecting = apart(partial(_with_clock, skew_s, partial(place.collect, DAY_S)), WORK_S)
    ended = pushing.ended(WORK_S)
    record.add(*_judged(collecting, place))
    record.add(*_judged(ended, place, is_pushed=True))
    missing = set(before) - set(generations(place.path))
    record.add(
        Outcome.LOST if missing else Outcome.COMPLETED,
        f"generations {sorted(missing)} are missing, which were superseded seconds ago",
    )


def _with_clock(ahead_s: float, work: Callable[[], None]) -> None:
    """Work with a clock that is wrong; call it in a process of its own."""
    now = time.time
    time.time = lambda: now() + ahead_s
    work()


def _pushing_slowly(place: _Place, ahead_s: float) -> None:
    """Push with a clock that is wrong, and collect at the moment at which everything is sent and nothing is listed."""
    module = importlib.import_module("bucketline.store.sync.push")
    lists = module.send_lists

    def collecting(*arguments: Any) -> None:
        place.collect(DAY_S)
        lists(*arguments)

    module.send_lists = collecting  # type: ignore[attr-defined]
    _with_clock(ahead_s, place.push)


def threads(asked: Asked) -> Iterator[Record]:
    """Let several threads add to one writer, or its part, while others publish and children are forked from it."""
    record = Record(fault="a writer that threads share, and forked children", kind=Kind.OTHER)
    draw = random.Random(asked.seed)
    for trial in range(asked.of(4, 100)):
        path = asked.folder / f"threads-{trial}"
        samples = samples_of({BUCKET: draw.randint(40, 200), "val/8x8": 20})
        seed = draw.randrange(1 << 30)
        ended = apart(partial(_written, path, samples, seed), WORK_S)
        outcome, said = ended.outcome, ended.said
        if ended.how is How.DONE and (wrong := is_sound(path)) is not None:
            outcome, said = Outcome.WRONG, wrong
        elif ended.how is How.DONE and ids_of(path) != sorted(sample.id for sample in samples):
            outcome, said = Outcome.LOST, f"{read_manifest(path).samples} of {len(samples)} rows are stored"
        record.add(Outcome.DEFECT if outcome is Outcome.CLEAN_ERROR else outcome, said)
        shutil.rmtree(path, ignore_errors=True)
    yield record


def _written(path: Path, samples: list[Sample], seed: int) -> None:
    draw = random.Random(seed)
    jobs, stride, rest = draw.randint(2, 12), draw.randint(1, 9), samples[1:]
    with store_writer(path, shard_bytes=1 << draw.randint(13, 18)) as writer:
        used = writer.part("p") if draw.random() < 0.5 else writer
        add_samples(used, samples[:1])  # from here on, it is this process's

        def add(number: int) -> None:
            add_samples(used, rest[number::jobs], commit_every=stride)
            if used is writer and number == 0:
                writer.publish()

        with ThreadPoolExecutor(jobs) as pool:
            working = [pool.submit(add, number) for number in range(jobs)]
            for number in range(CHILDREN):
                child = apart(partial(_misuse, used, number, samples[-1]))
                if child.how not in (How.DONE, How.REFUSED):
                    raise AssertionError(f"a forked child: {child.how}: {child.said}")
            for future in working:
                future.result()
        used.seal()


def _misuse(writer: PartWriter, number: int, sample: Sample) -> None:
    """Be a forked child that continues with its parent's writer: it must be refused, and must not end the parent's."""
    if number == 0:
        with suppress(UsageError):
            add_samples(writer, [sample])
            raise AssertionError("a forked child has added a row")
    elif number == 1:
        with suppress(UsageError):
            writer.__exit__(None, None, None)
            raise AssertionError("a forked child has sealed its parent's shard")
    else:
        writer.__exit__(ValueError, ValueError("of the child's own"), None)
