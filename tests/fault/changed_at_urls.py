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
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bucketline.errors import UsageError
from bucketline.store import PartWriter, Store
from bucketline.store.change.add_column import add_column
from bucketline.store.change.commit import drop
from bucketline.store.change.compact import collect, compact
from bucketline.store.format.block import sample_digest
from bucketline.store.format.manifest import generations, read_manifest
from bucketline.store.verify.verify import verify
from tests.fault.apart import Apart, Ended, How, apart
from tests.fault.ground import expect_ids, expect_sound, ids_of
from tests.fault.record import Asked, Kind, Outcome, Record, expect, tried
from tests.kit import Sample, add_samples, everything, make_sample, make_store, samples_of, store_writer

BUCKET = "train/64x64"
DAY_S = 86400.0
WORK_S = 60.0
CHILDREN = 3
PUSHES = 4  # to one place


class _Place:
    """A store on a disk, a copy of it, and the folder of the URL to which it is pushed."""

    def __init__(self, folder: Path, draw: random.Random) -> None:
        self.own, self.copy, self.path = folder / "own.store", folder / "copy.store", folder / "bucket" / "a.store"
        self.draw, self.number = draw, 0
        make_store(self.own, samples_of({BUCKET: 6}))

    def _url(self) -> Any:
        return importlib.import_module("bucketline.store.remote.objects").ObjectFolder.open(f"file://{self.path}")

    def push(self) -> None:
        """Push, in the process that calls this: the client of object storage must not be used before a fork."""
        importlib.import_module("bucketline.store.sync.push_pull").push(self.own, self._url())

    def pull(self) -> None:
        importlib.import_module("bucketline.store.sync.push_pull").pull(self._url(), self.copy)

    def collect(self, older_than_s: float = 0.0) -> None:
        collect(self._url(), older_than_s)

    def add(self, count: int, prefix: str) -> None:
        with store_writer(self.own) as writer:
            add_samples(writer, samples_of({BUCKET: count}, prefix))

    def change(self) -> None:
        """Add rows to the store on the disk, and a column to these, drop some, or rewrite it."""
        self.number += 1
        self.add(self.draw.randint(1, 4), f"{self.number}/")
        if self.draw.random() < 0.5:
            add_column(self.own, "features/id", lambda sample_id: np.frombuffer(sample_digest(sample_id), dtype=np.uint8))
        if self.draw.random() < 0.5:
            drop(self.own, [self.draw.choice(ids_of(self.own))])
        if self.draw.random() < 0.7:
            compact(self.own, shard_bytes=1 << 24)

    def judged(self, ended: Ended, *, is_pushed: bool = False) -> Outcome:
        """Judge what a process did: whether it may have been refused or not, everything that is listed must be whole."""
        for number in generations(self.path) if (self.path / "manifest.json").exists() else ():
            found = verify(Store.open(self.path, number), lambda _: None, 1, shards_only=True).corrupt
            expect(not found, f"faults: generation {number} at the URL: {found[:1]}")
        expect_sound(self.copy)
        outcome = ended.fair()
        if outcome is Outcome.COMPLETED and is_pushed:  # readers follow the generations from that of manifest.json on
            number, there = read_manifest(self.path).generation, generations(self.path)
            while number + 1 in there:
                number += 1
            is_same = everything(Store.open(self.path, number)) == everything(Store.open(self.own))
            expect(is_same, "other rows than those that were pushed")
        return outcome

    def tried(self, record: Record, what: str, work: Callable[[], object], *, is_pushed: bool = False) -> None:
        record.trial(what, self.judged, apart(work, WORK_S), is_pushed=is_pushed)


def names_used_again(asked: Asked) -> Iterator[Record]:
    """Use names of shards again after a collection, with content of the same lengths or others, then push and pull."""
    record, draw = Record("at a URL, names of shards used again", Kind.OTHER), asked.draw
    for trial in range(asked.of(3, 60)):
        place = _Place(asked.folder / f"names-{trial}", draw)
        place.tried(record, "first push", place.push)
        if draw.random() < 0.7:
            place.tried(record, "first pull", place.pull)
        place.add(2, "more/")
        compact(place.own, shard_bytes=1 << 24)
        if draw.random() < 0.8:
            place.tried(record, "push of what was compacted", place.push)
        collect(place.own, 0)
        again = [make_sample(one.id, BUCKET, one.captions, version=1) for one in samples_of({BUCKET: 6})]
        with store_writer(place.own, shard_names="g{}") as writer:
            add_samples(writer, again if draw.random() < 0.5 else again[:4])
        place.tried(record, "push of a name used again", place.push)
        place.tried(record, "pull of a name used again", place.pull)
        shutil.rmtree(asked.folder / f"names-{trial}")
    yield record


def killed_pushes(asked: Asked) -> Iterator[Record]:
    """Kill pushes before and after their commits, change the store, push it again, and collect what is outdated then."""
    record = Record("at a URL, a push killed before its commit, or after it", Kind.KILL)
    place = _Place(asked.folder / "notes", asked.draw)

    def trial(at: int) -> Outcome:
        killed = apart(partial(_push_and_die, place, at), WORK_S)
        if killed.how is not How.DIED or killed.signal != signal.SIGKILL:
            return place.judged(killed, is_pushed=True)
        place.change()
        outcome = place.judged(apart(place.push, WORK_S), is_pushed=True)
        expect(outcome is Outcome.COMPLETED, "it was refused, and nobody else has pushed")
        return Outcome.RECOVERED

    place.tried(record, "first", place.push, is_pushed=True)
    for _ in range(asked.of(4, 80)):
        place.change()
        at = asked.draw.randint(0, 3)
        record.trial(f"killed at {at}", trial, at)
        if asked.draw.random() < 0.5:
            collect(place.own, 0)
            place.tried(record, "collection", place.collect)
    yield record


def _push_and_die(place: _Place, at: int) -> None:
    """Push, and be killed at the n-th of the moments after it has sent the lists, and after each commit."""
    module = importlib.import_module("bucketline.store.sync.push_pull")
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
    record = Record("at a URL, clocks two days ahead and behind", Kind.OTHER)

    def pushed(place: _Place, skew_s: float, prefix: str) -> Outcome:
        """Push what an interrupted push has sent in part, while others collect."""
        place.add(2, prefix)
        before = generations(place.path)
        left = apart(partial(_push_and_die, place, 0), WORK_S)  # what it sent is listed by no generation
        expect(left.how is How.DIED, f"{left.how}: {left.said}")
        pushing = Apart(partial(_push_slowly, place, -skew_s))
        place.tried(record, "collecting", partial(_with_clock, skew_s, partial(place.collect, DAY_S)))
        outcome = place.judged(pushing.ended(WORK_S), is_pushed=True)
        missing = set(before) - set(generations(place.path))
        expect(not missing, f"generations {sorted(missing)} are missing, which were superseded seconds ago")
        return Outcome.RECOVERED if outcome is Outcome.COMPLETED else outcome

    for number in range(asked.of(1, 20)):  # a few generations of each place: all are verified each time
        place = _Place(asked.folder / f"clocks-{number}", asked.draw)
        place.tried(record, "first", place.push, is_pushed=True)
        for trial in range(PUSHES):
            skew_s = asked.draw.choice((-2, 2)) * DAY_S
            record.trial(f"skew of {skew_s:g} s", pushed, place, skew_s, f"{trial}/")
        place.tried(record, "collection", place.collect)
        shutil.rmtree(asked.folder / f"clocks-{number}")
    yield record


def _with_clock(ahead_s: float, work: Callable[[], None]) -> None:
    """Work with a clock that is wrong; call it in a process of its own."""
    now = time.time
    time.time = lambda: now() + ahead_s
    work()


def _push_slowly(place: _Place, ahead_s: float) -> None:
    """Push with a clock that is wrong, and collect at the moment at which everything is sent and nothing is listed."""
    module: Any = importlib.import_module("bucketline.store.sync.push_pull")
    lists = module.send_lists

    def collecting(*arguments: Any) -> None:
        place.collect(DAY_S)
        lists(*arguments)

    module.send_lists = collecting
    _with_clock(ahead_s, place.push)


def threads(asked: Asked) -> Iterator[Record]:
    """Let several threads add to one writer, or its part, while others publish and children are forked from it."""

    def trial(path: Path, rows: int) -> Outcome:
        samples = samples_of({BUCKET: rows, "val/8x8": 20})
        apart(partial(_write, path, samples, asked.draw.randrange(1 << 30)), WORK_S).done()
        expect_ids(path, [sample.id for sample in samples])
        shutil.rmtree(path)
        return Outcome.COMPLETED

    drawn = [asked.draw.randint(40, 200) for _ in range(asked.of(4, 100))]
    cases = [(f"{rows} rows", asked.folder / f"threads-{number}", rows) for number, rows in enumerate(drawn)]
    yield from tried("a writer that threads share, and forked children", Kind.OTHER, trial, cases)


def _write(path: Path, samples: list[Sample], seed: int) -> None:
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
                expect(child.how in (How.DONE, How.REFUSED), f"a forked child: {child.how}: {child.said}")
            for future in working:
                future.result()
        used.seal()


def _misuse(writer: PartWriter, number: int, sample: Sample) -> None:
    """Be a forked child that continues with its parent's writer: it must be refused, and must not end the parent's."""
    if number == 2:
        writer.__exit__(ValueError, ValueError("of the child's own"), None)
        return
    with suppress(UsageError):
        if number == 0:
            add_samples(writer, [sample])
        else:
            writer.__exit__(None, None, None)
        raise AssertionError("a forked child has added a row, or sealed its parent's shard")
