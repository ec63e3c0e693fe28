"""Stores on a range server that fails or lies, or whose cache is full or removed, read and compared bit for bit.

Each store is in a local folder too. A trial ends in a clean error, after which the iteration is begun again, or in nothing that
a loader would notice. A lie may not be believed, nor take long, nor much memory, nor lead to another server.

Kills what reads stores on a server, `kill -9` at random moments, and lets it continue: ranks, machines, copies, a service.

Several processes share one cache folder, which is too small, so that they fetch, wait for one another's lines, and free them.
Every batch is compared with the local store's, and at the end every line that the cache holds. Copies of one store that have
diverged have the same ids, and each a shard of its own of the same name.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import os
import random
import resource
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bucketline.bench.fixtures.range_server import Fault, RangeServer, Schedule
from bucketline.bench.fixtures.server_process import ServerProcess, control
from bucketline.bench.fixtures.stores import (
    MAX_CAPTIONS,
    MAX_SHARD_BYTES,
    StoreShape,
    kept_store,
    make_store,
    pushed,
)
from bucketline.bench.fixtures.values import random_f16
from bucketline.errors import BucketlineError
from bucketline.loader import Batch, Loader, LoaderConfig
from bucketline.loader.config import Remainder
from bucketline.store import Store, StoreWriter
from bucketline.store.format.block import LINE_BYTES
from bucketline.store.format.manifest import dump_manifest, read_manifest, sealed, shard_paths
from bucketline.store.remote.cache.cached_shard import HEADER_BYTES, PRESENT_SUFFIX
from bucketline.store.remote.cache.folder import cache_folder
from bucketline.store.remote.cache.remote_source import cached_paths
from tests.commands import call
from tests.constrained import SmallDisk
from tests.fault.apart import Apart, How, apart
from tests.fault.loaders import started
from tests.fault.record import Asked, Kind, Outcome, Record, Wrong, expect
from tests.leftovers import children
from tests.object_storage import CREDENTIALS

SLACK_S = 5.0  # beyond the deadline, on a busy machine
IMAGES = StoreShape(num_shards=16, rows_per_shard=20, latent_shape=(4, 64, 80), tokens=(3, 20))
QUANTISED = StoreShape(num_shards=12, rows_per_shard=24, latent_shape=(4, 64, 64), tokens=(3, 20), text_dtype="I8")
LARGE = StoreShape(num_shards=6, rows_per_shard=330, latent_shape=(4, 128, 128), tokens=(3, 20))  # 270 MB in 36 lines


@dataclass(frozen=True, slots=True)
class Served:
    """A store in a local folder, and in the folder that a server serves."""

    local: Path
    name: str  # in the server's folder
    expected: dict[str, list[str]] = field(default_factory=dict)  # digests of batches, by configuration

    def digests(self, config: LoaderConfig) -> list[str]:
        """Return the digest of each batch of the first epochs, by a loader of the local store."""
        key = f"{config.batch_size} {config.seed} {config.window} {config.text}"
        if key not in self.expected:
            with Loader(Store.open(self.local), config) as loader:
                self.expected[key] = [digest_of(batch) for batch in loader.forever()]
        return self.expected[key]


def served(folder: Path, shape: StoreShape) -> Served:
    local = kept_store(folder, shape)
    return Served(local, pushed(local, folder / "served").name)


def digest_of(batch: Batch) -> str:
    state = hashlib.blake2b(digest_size=12)
    for name, tensor in batch.by_name().items():
        array = np.ascontiguousarray(tensor.contiguous().view(-1).view(torch.uint8).numpy()) if tensor.numel() else np.empty(0)
        state.update(f"{name} {tuple(tensor.shape)}".encode())
        state.update(array.data)
    return state.hexdigest()


def in_lines(*, batch_size: int, seed: int, epochs: int = 1, **more: Any) -> LoaderConfig:
    """Return the configuration of a loader that reads from far away: every row, a few mixed at a time.

    Two windows fit the smallest cache.
    """
    more = {"window": 128, **more}
    return LoaderConfig(batch_size=batch_size, seed=seed, epochs=epochs, remainder=Remainder.PARTIAL, **more)


def one_pass(url: str, expected: list[str], config: LoaderConfig, *, service: str | None = None, tries: int = 50) -> list[str]:
    """Open a store on a server and read it; begin again after each clean error. Compare every batch; return the errors."""
    errors: list[str] = []
    step, deadline_s = 0, float(str(config.deadline))

    def took(since: float) -> None:
        seconds = time.perf_counter() - since
        expect(seconds <= deadline_s + SLACK_S, f"took {seconds:.1f} s of {deadline_s:g} s; {errors[-1:]}")

    def failed(error: BucketlineError, since: float) -> None:
        took(since)
        errors.append(f"{type(error).__name__}: {error}")
        expect(url in str(error) or str(config.cache) in str(error), f"the error names neither store nor cache: {error}")
        expect(len(errors) <= tries, f"{len(errors)} errors, the last: {error}")

    loader: Loader | None = None
    while loader is None:
        begun = time.perf_counter()
        try:
            loader = Loader(url, config, service=service)
        except BucketlineError as error:
            failed(error, begun)
    with loader:
        for _ in range(tries):
            try:
                started(loader)  # its time is not a wait for the store
                break
            except BucketlineError as error:
                errors.append(f"{type(error).__name__}: {error}")
        while step < len(expected):
            begun = time.perf_counter()
            try:
                for batch in loader.forever():
                    took(begun)
                    check_batch(batch, step, expected)
                    step, begun = step + 1, time.perf_counter()
                expect(step == len(expected), f"missing: the pass ended after {step} of {len(expected)} batches")
            except BucketlineError as error:
                failed(error, begun)
    return errors


def check_batch(batch: Batch, step: int, expected: list[str]) -> None:
    expect(batch.step == step, f"missing: step {batch.step} came, expected {step}")
    expect(digest_of(batch) == expected[step], f"differs: step {step} has other bytes than the local store's")


def check_cache(cache: Path, store: Path, url: str | None = None) -> Outcome:
    """Compare every line that the cache holds with the local store's file; `url`: only of this one."""
    folders = [path.parent for path in cache.glob("*/store.json") if url in (None, json.loads(path.read_bytes())["url"])]
    for folder, entry in itertools.product(folders, read_manifest(store).shards):
        path = cached_paths(folder, entry).lmdb
        if not path.with_suffix(PRESENT_SUFFIX).exists():
            continue
        num_lines = -(-entry.lmdb.num_bytes // LINE_BYTES)
        states = np.fromfile(path.with_suffix(PRESENT_SUFFIX), dtype=np.uint8)[HEADER_BYTES : HEADER_BYTES + num_lines]
        with path.open("rb") as own, shard_paths(store, entry.name).lmdb.open("rb") as original:
            for line in np.flatnonzero(states).tolist():
                for file in (own, original):
                    file.seek(line * LINE_BYTES)
                is_same = own.read(LINE_BYTES) == original.read(LINE_BYTES)
                expect(is_same, f"differs: line {line} of {entry.name} in the cache, whose byte is {states[line]}")
    return Outcome.COMPLETED


DEADLINE_S = 4.0
SHARE = 0.3  # of the requests that fail, at most, while there are faults left
REQUESTS = 70  # of a pass, roughly
PASSES = 40  # at most, of one kind


def drawn_config(draw: random.Random, cache: Path) -> LoaderConfig:
    """Draw one of few configurations: the local store is read once for each."""
    more: dict[str, Any] = {
        "threads": draw.choice([1, 2]),
        "prefetch_bytes": draw.choice([1, 1 << 22]),
        "window": draw.choice([None, 4096]),
    }
    return in_lines(batch_size=draw.choice([3, 8]), seed=draw.randrange(3), cache=str(cache), deadline=DEADLINE_S, **more)


def failing_servers(asked: Asked) -> Iterator[Record]:
    """Make a server fail, in every way and many times: kind by kind, and of all kinds mixed, read by a service too."""
    draw, count = asked.draw, asked.of(2 * len(Fault), 500)
    stores = [served(asked.folder, shape) for shape in (IMAGES, QUANTISED)]

    def record_of(name: str, faults: Sequence[Fault], service: str | None = None) -> Record:
        """Read stores with an empty cache until every fault was given to a response."""
        record, errors, passes = Record(f"a store's server: {name}", Kind.OTHER), 0, 0
        what = ""
        schedule = Schedule(faults, share=min(SHARE, len(faults) / REQUESTS), seed=draw.randrange(1 << 30))
        with RangeServer(asked.folder / "served", schedule=schedule, drip_s=0.3) as server:
            try:
                while schedule.given < len(faults):
                    expect(passes < PASSES, f"only {schedule.given} of {len(faults)} faults met a request in {passes} passes")
                    with tempfile.TemporaryDirectory(dir=asked.folder) as cache:
                        store, config = draw.choice(stores), drawn_config(draw, Path(cache) / "lines")
                        what = f"{store.name}, {config.batch_size} rows a batch, seed {config.seed}"
                        failed = one_pass(f"{server.url}/{store.name}", store.digests(config), config, service=service)
                    errors, passes = errors + len(failed), passes + 1
            except Wrong as wrong:
                record.add(wrong.outcome, f"{what}: {wrong}")
        record.add(Outcome.COMPLETED, count=max(0, schedule.given - errors))
        record.add(Outcome.CLEAN_ERROR, count=min(schedule.given, errors))
        return record

    mixed = max(len(Fault), count // 11)
    for fault in Fault:
        yield record_of(fault, [fault] * -(-(count - mixed) // len(Fault)))
    shuffled = [list(Fault)[n % len(Fault)] for n in range(mixed)]
    draw.shuffle(shuffled)
    yield record_of("of all kinds", shuffled[: mixed // 2])
    yield record_of("of all kinds, to a service", shuffled[mixed // 2 :], "auto")


LIMIT_S = 30.0  # of a process: a pull gets several files one after the other, each within the deadline
MOST_BYTES = 512 << 20  # that a process may take more than before; the store has 16 MB
OBJECTS = ("manifest.json", "generations/2.json", ".meta", ".lmdb")
LIES = (
    *(Fault.LONG_LENGTH, Fault.SHORT_LENGTH, Fault.HUGE_LENGTH, Fault.SHORT_HEAD, Fault.MORE, Fault.CUT, Fault.RESET),
    *(Fault.WRONG_BYTE, Fault.ZEROS, Fault.WHOLE, Fault.OTHER_RANGE, Fault.REDIRECT_LOOP, Fault.ELSEWHERE, Fault.DRIP),
    *(Fault.STALL_BODY, Fault.FORBIDDEN),
)
LIED_S = 3.0  # deadline
READ = LoaderConfig(batch_size=8, epochs=1)


def use(store: Served, what: str, place: Sequence[object], own: Path) -> str | None:
    """Be the process: use a store at a URL, or a bucket; return the error in words, None if all is right."""
    reached, copy = (*place[1:], "--deadline", LIED_S), own / "a.store"
    if what == "loader":
        with Loader(str(place[0]), dataclasses.replace(READ, cache=str(own / "cache"), deadline=LIED_S)) as loader:
            is_right = [digest_of(batch) for batch in loader.forever()] == store.digests(READ)
        expect(is_right, "differs from the local store")
        return None
    arguments = (place[0], "--cache", own / "cache") if what == "info" else (place[0], copy)
    ran = call("store", what, *arguments, *reached)
    expect(ran.code or len(place) == 1 or what == "pull", "found nothing wrong with lists without end")
    if ran.code == 0 and what == "pull":
        for path in (store.local / "shards").iterdir():
            expect((copy / "shards" / path.name).read_bytes() == path.read_bytes(), f"{path.name} differs")
    return ran.err if ran.code else None


def lied_to(folder: Path, store: Served, what: str, place: Sequence[object]) -> Outcome:
    def work() -> tuple[str | None, int, str | None]:
        os.environ.update(CREDENTIALS)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with tempfile.TemporaryDirectory(dir=folder, ignore_cleanup_errors=True) as own:  # stalled threads still write
            try:
                err, wrong = use(store, what, place, Path(own)), None
            except Wrong as error:
                err, wrong = None, str(error)
        return err, 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before), wrong

    ended = apart(work, LIMIT_S)
    if ended.fair() is Outcome.CLEAN_ERROR:
        return Outcome.CLEAN_ERROR
    err, num_bytes, wrong = ended.gave
    expect(not wrong, wrong)
    expect(num_bytes <= MOST_BYTES, f"took up {num_bytes >> 20} MiB of memory", Outcome.DEFECT)
    expect(err is None or ("Traceback" not in err and "error: " in err), (err or "")[-400:])
    return Outcome.COMPLETED if err is None else Outcome.CLEAN_ERROR


def hostile_servers(asked: Asked) -> Iterator[Record]:
    """Tell every lie about every kind of object to `store info`, `store pull` and a loader; and lists without end."""
    draw, store = asked.draw, served(asked.folder, IMAGES)
    store.digests(READ)
    manifest, prefix = read_manifest(store.local), f"/{store.name}/generations/"

    def endless(path: str) -> bytes | None:
        number = path.removeprefix(prefix).removesuffix(".json")
        return dump_manifest(sealed(dataclasses.replace(manifest, generation=int(number)))) if number.isdecimal() else None

    with RangeServer(asked.folder / "served") as elsewhere:

        def tried(record: Record, what: str, lie: str, *bucket: object, **server: Any) -> None:
            with RangeServer(asked.folder / "served", **server) as own:
                own.lists_have_an_end = not bucket
                place = [*bucket, own.url] if bucket else [f"{own.url}/{store.name}"]
                record.trial(f"{what}, {lie}", lied_to, asked.folder, store, what, place)

        cases = list(itertools.product(("info", "pull", "loader"), OBJECTS))
        for lie in LIES:
            record = Record(f"a web server that lies: {lie}", Kind.HOSTILE)
            for what, name in draw.sample(cases, asked.of(2, len(cases))):
                schedule = Schedule([lie] * 100_000, concerns=lambda path, name=name: path.endswith(name))  # type: ignore[misc]
                tried(record, what, name, schedule=schedule, drip_s=60.0, elsewhere=elsewhere.url)
            yield record
        record = Record("a web server that lies: generations without end", Kind.HOSTILE)
        for what in ("info", "pull", "loader"):
            tried(record, what, "generations", made=endless)
        yield record
        record = Record("a bucket that lies: lists without end", Kind.HOSTILE)
        for what in ("info", "pull"):
            tried(record, what, "lists", f"s3://{store.name}", "--endpoint")
        yield record


ROOM_BYTES = 1 << 30
ONE_SIZE_S = 120.0  # of one size
SIZES_MIB = (0.5, 100, 220, 12, 400)  # quickly, the first three
ENOUGH_MIB = 220  # for the lines of a window and of what is fetched ahead
PINNED_BYTES, SLOW_BYTES_PER_S = 64 << 20, 60e6  # until the disk is full, and so that not all lines are pinned by then


def full_caches(asked: Asked) -> Iterator[Record]:
    """Read through a cache on a disk that is too small, by less and less, then make room; and on one that others fill."""
    record, folder = Record("the disk of the cache of a store on a server full, then room", Kind.DISK), asked.folder / "disk"
    folder.mkdir()
    disk = SmallDisk(folder, ROOM_BYTES)  # before anything begins threads or a server
    if not disk.is_disk:
        record.not_run = "nobody may mount here"
        yield record
        return
    store = served(asked.folder, LARGE)
    # a cache of more than the disk has: it does not know that others fill it
    config = in_lines(batch_size=16, seed=2, window=256, cache_bytes=str(ROOM_BYTES), deadline=5.0)
    expected = store.digests(config)

    def read(cache: Path, step: int, each: Callable[[], None] = lambda: None) -> tuple[int, str]:
        """Read until the end or an error, from a step on; return the step that comes next, and the error."""
        try:
            with Loader(url, replace(config, cache=str(cache))) as loader:
                loader.load_state_dict({**loader.state_dict(), "step": step})
                for batch in loader.forever():
                    check_batch(batch, step, expected)
                    step += 1
                    each()
        except BucketlineError as error:
            return step, str(error).replace("\n", " ")
        return step, ""

    def too_small(size: float, cache: Path) -> str:
        """Read while the disk has so much room, make room, and continue in the same process; return what was said."""
        disk.resize(int(size * (1 << 20)))
        step, said = read(cache, 0)
        disk.resize(ROOM_BYTES)
        again, then = read(cache, step) if said else (step, "")
        check_cache(cache, store.local)
        expect(again == len(expected), f"after room was made: missing, {again} of {len(expected)}: {then}")
        names_it = ("room" in said or "No space left" in said) and str(folder) in said
        expect(not said or (names_it and size < ENOUGH_MIB), said)
        return said

    def filled(cache: Path) -> str:
        """Read from a disk that is full after a while: what is pinned stays, the rest passes through the ring's own space."""
        pinned = 0
        disk.resize(ROOM_BYTES)
        control(server.url, f"bytes_per_s={SLOW_BYTES_PER_S}")

        def fill() -> None:
            nonlocal pinned
            if pinned == 0 and (found := cache_folder(cache).room.pinned()) > PINNED_BYTES:
                pinned = found
                disk.leave(1 << 20)

        step, said = read(cache, 0, fill)
        expect(
            step == len(expected) and pinned < 2 * PINNED_BYTES, f"missing: {step} batches, {pinned >> 20} MiB pinned: {said}"
        )
        return said

    def trial(work: Callable[[], str]) -> Outcome:
        # in a process of its own: one that has the files open keeps their bytes
        return Outcome.RECOVERED if apart(work, ONE_SIZE_S).done() else Outcome.COMPLETED

    with ServerProcess(asked.folder / "served") as server:
        url = f"{server.url}/{store.name}"
        for size in SIZES_MIB[: asked.of(3, 5)]:
            record.trial(f"{size:g} MiB", trial, partial(too_small, size, folder / "cache"))
            shutil.rmtree(folder / "cache", ignore_errors=True)
        record.trial("others fill the disk", trial, partial(filled, folder / "filled"))
    yield record


REMOVALS, BETWEEN_S = 4, 0.3  # of one pass
PARTS = (".", "*", "*/*")  # the cache, a store's folder, a shard's


def removed_caches(asked: Asked) -> Iterator[Record]:
    """Read while somebody removes the cache, or a part of it, again and again; then a whole pass after it."""
    record = Record("the cache of a store on a server removed while it is read", Kind.DISK)
    draw, store, cache = asked.draw, served(asked.folder, IMAGES), asked.folder / "cache"

    def remove(own: random.Random, is_over: threading.Event) -> None:
        for _ in range(REMOVALS):
            if is_over.wait(own.random() * BETWEEN_S):
                return
            part = own.choice(PARTS)
            found = [cache] if part == "." else sorted(path for path in cache.glob(part) if path.is_dir())
            if found:
                shutil.rmtree(own.choice(found), ignore_errors=True)

    def trial(config: LoaderConfig, service: str | None) -> Outcome:
        expected, is_over = store.digests(config), threading.Event()
        thread = threading.Thread(target=remove, args=(random.Random(draw.random()), is_over))
        thread.start()
        try:
            errors = one_pass(url, expected, config, service=service)
        finally:
            is_over.set()
            thread.join()
        again = one_pass(url, expected, config)
        expect(len(again) <= 1, f"after the last removal: {again[-1:]}")  # one error of what is gone
        check_cache(cache, store.local)
        return Outcome.RECOVERED if errors else Outcome.COMPLETED

    with ServerProcess(asked.folder / "served") as server:
        url = f"{server.url}/{store.name}"
        for number in range(asked.of(4, 40)):
            service = draw.choice([None, None, "auto"])
            config = in_lines(batch_size=draw.choice([4, 16]), seed=number, epochs=2, cache=str(cache), deadline=5.0)
            record.trial(service or "in-process", trial, config, service)
            shutil.rmtree(cache, ignore_errors=True)
    yield record


CACHE_BYTES = 256 << 20  # less than the store: half of it is pinned, the rest passes through the other half
COPIES_BYTES = 192 << 20  # as much as both copies need, and what passes through
LATENCY_S = 0.004  # of the server, so that a process is often killed while it waits
BATCH, EPOCHS = 8, 2
PACE_S = 0.002  # a reader's own time for a batch
LIFE_S = 0.6  # of a process that is killed, at most
LONGEST_S = 180.0  # of a process that nobody kills: two with one small cache take from each other what they read
SHAPE = StoreShape(num_shards=2, rows_per_shard=165, latent_shape=(4, 128, 128), tokens=(3, 20))  # each shard has 3 lines
NAMES = ("one.store", "two.store")


@dataclass(frozen=True, slots=True)
class Reader:
    """One process that reads its share of every batch, and notes the digest of each in a file."""

    store: Served
    url: str
    notes: Path
    config: LoaderConfig
    rank: int = 0
    world_size: int = 1

    def noted(self) -> list[str]:
        """Return the digests so far; a line that a kill cut in two does not count."""
        if not self.notes.exists():
            return []
        return [line for line in self.notes.read_text(encoding="ascii").split("\n")[:-1] if len(line) == 24]

    def read(self) -> None:
        """Be the process: continue where the notes end."""
        own = self.noted()
        self.notes.write_text("".join(f"{line}\n" for line in own), encoding="ascii")
        newest = read_manifest(self.store.local).generation
        ranks = Loader(self.url, self.config, rank=self.rank, world_size=self.world_size, generation=newest)
        with ranks as loader, self.notes.open("a") as notes:
            loader.load_state_dict({**loader.state_dict(), "step": len(own)})
            for batch in loader.forever():
                notes.write(f"{digest_of(batch)}\n")
                notes.flush()
                time.sleep(PACE_S)

    def check(self) -> Outcome:
        with Loader(Store.open(self.store.local), self.config, rank=self.rank, world_size=self.world_size) as loader:
            wanted = [digest_of(batch) for batch in loader.forever()]
        found = self.noted()
        at = next((n for n, (a, b) in enumerate(zip(found, wanted, strict=False)) if a != b), min(len(found), len(wanted)))
        expect(found == wanted, f"differs: {len(found)} of {len(wanted)} batches; the first other one is {at}")
        return check_cache(Path(str(self.config.cache)), self.store.local, self.url)


def kill_readers(record: Record, readers: list[Reader], kills: int, draw: random.Random) -> None:
    """Kill one of several readers again and again, start it again each time, then let all finish, and compare."""
    running, killed = {number: Apart(reader.read) for number, reader in enumerate(readers)}, 0
    while running:
        number = draw.choice(list(running))
        if killed < kills:
            time.sleep(draw.random() * LIFE_S)
            running[number].kill()
        ended = running.pop(number).ended(LONGEST_S)
        if ended.how is How.DIED and ended.signal == signal.SIGKILL:
            killed += 1
            record.add(Outcome.RECOVERED)
            running[number] = Apart(readers[number].read)
        elif ended.how is not How.DONE:
            record.add(Outcome.DEFECT, f"reader {number}: {ended.how}: {ended.said}")
    for number, reader in enumerate(readers):
        record.trial(f"reader {number}", reader.check)


def kill_service(url: str, store: Served, config: LoaderConfig, kills: int, draw: random.Random) -> int:
    """Be a trainer whose private service is killed while it fetches, and that iterates again each time; return the kills."""
    expected = store.digests(config)
    before, step, killed, over = children(), 0, 0, threading.Event()

    def kill() -> None:
        nonlocal killed
        while killed < kills and not over.wait(0.2 + draw.random()):
            for child in children() - before:
                with suppress(ProcessLookupError):
                    os.kill(int(child), signal.SIGKILL)
                    killed += 1

    killer = threading.Thread(target=kill)
    with Loader(url, config, service="auto") as loader:
        killer.start()
        try:
            while step < len(expected):
                try:
                    for batch in loader.forever():
                        check_batch(batch, step, expected)
                        step += 1
                        time.sleep(PACE_S)
                except BucketlineError as error:
                    if "ended without a message" not in str(error) and "service" not in str(error):
                        raise
        finally:
            over.set()
            killer.join()
    return killed


def killed_readers(asked: Asked) -> Iterator[Record]:
    draw, kills, store = asked.draw, asked.of(2, 30), served(asked.folder, LARGE)
    with ServerProcess(asked.folder / "served") as server:
        server.set_latency(LATENCY_S)
        url = f"{server.url}/{store.name}"
        for name in ("one of two ranks", "one of two machines with one cache folder", "the private service that fetches"):
            record = Record(f"from a server, {name} killed", Kind.KILL)
            with tempfile.TemporaryDirectory(dir=asked.folder) as folder:
                cache: dict[str, Any] = {"cache": f"{folder}/cache", "cache_bytes": str(CACHE_BYTES), "deadline": 8.0}
                configs = [in_lines(batch_size=BATCH, seed=asked.seed + n, epochs=EPOCHS, **cache) for n in range(2)]
                if "service" in name:
                    ended = Apart(partial(kill_service, url, store, configs[0], kills, draw)).ended(LONGEST_S + 9 * kills)
                    record.add(Outcome.RECOVERED if ended.how is How.DONE else Outcome.DEFECT, ended.said, ended.gave or 1)
                    record.trial("the cache", check_cache, Path(folder, "cache"), store.local)
                else:
                    shares = [(configs[0], n, 2) for n in range(2)] if "ranks" in name else [(own, 0, 1) for own in configs]
                    readers = [Reader(store, url, Path(folder, f"{n}"), *share) for n, share in enumerate(shares)]
                    kill_readers(record, readers, kills, draw)
            yield record


def diverged(folder: Path) -> list[Served]:
    """Make two copies of a store, each with a last shard of its own that has the other one's name."""
    make_store(folder / NAMES[0], SHAPE)
    shutil.copytree(folder / NAMES[0], folder / NAMES[1])
    for seed, name in enumerate(NAMES, 1):
        draw = np.random.default_rng(seed)
        with StoreWriter(
            folder / name,
            encoders={"vae": {"made": "at random"}},
            columns=SHAPE.columns,
            text=SHAPE.text,
            empty_caption={"tokens": random_f16(draw, (3, SHAPE.token_width))},
            max_captions=MAX_CAPTIONS,
            shard_bytes=MAX_SHARD_BYTES,
            shard_names="s{:04d}",
        ) as writer:
            for row in range(SHAPE.rows_per_shard + 40 * seed):  # of different lengths
                columns = {"latent": random_f16(draw, SHAPE.latent_shape)}
                caption = {f"{seed}/{row}": {"tokens": random_f16(draw, (5, 768))}}
                writer.add(f"own/{row:06d}.png", SHAPE.spec.bucket, columns, caption)
    manifests = [read_manifest(folder / name) for name in NAMES]
    assert len({manifest.store_id for manifest in manifests}) == 1
    assert len({tuple(shard.name for shard in manifest.shards) for manifest in manifests}) == 1
    return [Served(folder / name, pushed(folder / name, folder / "served").name) for name in NAMES]


def copied_stores(asked: Asked) -> Iterator[Record]:
    """Read both copies by two processes each, with one cache and checksums on, at once; then with kills."""
    draw, stores = asked.draw, diverged(asked.folder)
    with ServerProcess(asked.folder / "served") as server:
        server.set_latency(LATENCY_S)
        for name, kills in (("at once", 0), ("one of four readers killed", asked.of(4, 60))):
            record = Record(f"diverged copies in one cache, {name}", Kind.KILL if kills else Kind.OTHER)
            for _ in range(1 if kills else asked.of(1, 4)):
                with tempfile.TemporaryDirectory(dir=asked.folder) as folder:
                    cache: dict[str, Any] = {"cache": f"{folder}/cache", "cache_bytes": str(COPIES_BYTES), "deadline": 8.0}
                    configs = [in_lines(batch_size=BATCH, seed=n, verify=True, **cache) for n in range(4)]
                    readers = [
                        Reader(store, f"{server.url}/{store.name}", Path(folder, f"{n}"), configs[n])
                        for n, store in enumerate(2 * stores)
                    ]
                    kill_readers(record, readers, kills, draw)
            yield record
