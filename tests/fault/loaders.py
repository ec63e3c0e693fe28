"""Forces failures on loaders, one after the other, and times how each reaches the caller.

A trial is bad if the error, or the clean end, takes longer than it may or is another one than it should be, if a batch is
skipped, or if something is left behind.

Strangers at a service: they come to its socket or its port without end, and say anything; clients come and go meanwhile.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import pickle
import random
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from copy import deepcopy
from functools import partial
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from bucketline.errors import BucketlineError, CorruptError, DeliveryError, StoreError, UsageError
from bucketline.loader import Batch, Loader, LoaderConfig, ServiceAddress
from bucketline.loader.service.child import ChildLink
from bucketline.loader.service.client import ServiceBackend
from bucketline.loader.service.sockets import Security, connected
from bucketline.loader.service.wire import MAX_MESSAGE_BYTES, receive
from bucketline.store import Store
from tests.fault.apart import HANG_S, How, apart
from tests.fault.record import Asked, Kind, Outcome, Record, Wrong, expect
from tests.kit import flip_bit, make_store, samples_of
from tests.leftovers import children, descriptors, held, left_since, wait_until
from tests.serving import serving, serving_here

WITHIN_S = 10.0  # the time that an answer has, also on a busy machine; it takes milliseconds
CHILD_S = 120  # before a child is taken to hang; it may start a service, which imports torch: seconds of CPU
ROWS = {"train/64x64": 40, "train/96x64": 12}
SHARDS = ("g0", "g1")
FORKS = COPIES = 8  # of one loader


class Bench:
    """A place to force failures: a new store for each, and what is drawn for it."""

    def __init__(self, folder: Path, draw: random.Random) -> None:
        self.folder, self.random, self.number = folder, draw, 0
        self.service: str | None = None
        make_store(folder / "whole", samples_of(ROWS, "first/"), samples_of(ROWS, "second/"))

    def store(self) -> Path:
        self.number += 1
        return Path(shutil.copytree(self.folder / "whole", self.folder / f"{self.number}.store"))

    def config(self, **more: object) -> LoaderConfig:
        drawn = {
            "batch_size": self.random.randint(1, 5),
            "seed": self.random.randint(0, 1 << 30),
            "prefetch_bytes": self.random.choice([1, 1 << 20]),
            "threads": self.random.choice([1, 2]),
        }
        return LoaderConfig(**{**drawn, **more})  # type: ignore[arg-type]

    def loader(self, path: Path, **more: object) -> Loader:
        """Make a loader; a private service is started, which takes seconds, so that the clock only runs from the failure."""
        return started(Loader(path, self.config(**more), service=self.service))


def started(loader: Loader) -> Loader:
    if isinstance(loader._backend, ServiceBackend) and isinstance(loader._backend.link, ChildLink):
        loader._backend.link.start()
    return loader


def files(path: Path, suffix: str = "lmdb") -> list[Path]:
    return [path / "shards" / f"{shard}.{suffix}" for shard in SHARDS]


def in_time(begun: float) -> None:
    took_s = time.perf_counter() - begun
    expect(took_s <= WITHIN_S, f"took {took_s:.1f} s")


def until_error(batches: Iterator[Batch], first: int, kind: type[BucketlineError], words: str) -> Outcome:
    """Take batches until the error that is expected, in time: the caller's waiting counts, not the batches that come."""
    expected = first
    started_at = begun = time.perf_counter()
    try:
        for batch in batches:
            expect(batch.step == expected, f"step {batch.step} came, expected {expected}")
            expected += 1
            begun = time.perf_counter()
            is_late = expected > first + 2000 and begun > started_at + WITHIN_S
            expect(not is_late, f"{expected - first} batches came in {begun - started_at:.1f} s and no error")
    except BucketlineError as error:
        is_right = isinstance(error, kind) and re.search(words, str(error))
        expect(is_right, f"{type(error).__name__}: {error}; expected {kind.__name__} with {words!r}")
        in_time(begun)
        return Outcome.CLEAN_ERROR
    raise Wrong("the iteration ended without an error")


def goes_on(loader: Loader) -> None:
    """A new iteration begins with the batch after the last that was taken."""
    wanted, found = loader.state_dict()["step"], next(loader.forever()).step
    expect(found == wanted, f"after the failure came step {found}, expected {wanted}")


def corrupt_row(bench: Bench) -> Outcome:
    """Flip a bit of a row; `verify` must name its sample, in the same place each time."""
    path = bench.store()
    store = Store.open(path)
    bucket = store.bucket("train/64x64")
    row = np.array([bench.random.randrange(bucket.num_rows)])
    located, (name,) = bucket.locate(row), bucket.sample_ids(row)
    at = int(located.offsets(bucket.spec, "latent")[0])
    flip_bit(store.shards[int(located.shard[0])].paths.lmdb, 8 * at + bench.random.randrange(256))
    words = f"sample '{re.escape(name)}'"
    with bench.loader(path, verify=True) as loader:
        until_error(loader.forever(), 0, CorruptError, words)
        return until_error(loader.forever(), int(str(loader.state_dict()["step"])), CorruptError, words)


def corrupt_caption(bench: Bench) -> Outcome:
    """Write impossible `starts` for a caption: a sample that has it is named."""
    path = bench.store()
    store, shard = Store.open(path), bench.random.randrange(2)
    located = store.locate_entries(store.text, np.array([shard]), np.array([1]))
    with store.shards[shard].paths.lmdb.open("r+b") as file:
        file.seek(int(located.starts_offsets()[0]))
        file.write(b"\xff" * 8)
    with bench.loader(path) as loader:
        return until_error(loader.forever(), 0, CorruptError, r"sample '.*', row \d+ in shard g\d: shard g\d: caption \d+ has")


def remove_file(bench: Bench) -> Outcome:
    """Remove a shard's file before it is mapped; put it back, and the next iteration continues at the same batch."""
    path = bench.store()
    shard, suffix = bench.random.choice(SHARDS), bench.random.choice(["lmdb", "meta"])
    file = path / "shards" / f"{shard}.{suffix}"
    with bench.loader(path) as loader:
        file.rename(bench.folder / "away")
        words = rf"(row \d+ in shard {shard}|step \d+, bucket \S+): .*{shard}.{suffix} is miss"
        until_error(loader.forever(), 0, StoreError, words)
        (bench.folder / "away").rename(file)
        goes_on(loader)
    return Outcome.CLEAN_ERROR


def while_read(bench: Bench, harm: Callable[[Path], object], kind: type[BucketlineError], words: str) -> Outcome:
    """Harm the shards' files while they are read by plain reads: what ends the process under a map is an error here."""
    path = bench.store()
    with bench.loader(path, plain_reads=True, prefetch_bytes=1) as loader:
        batches = loader.forever()
        first = next(batches).step + 1
        for file in files(path):
            harm(file)
        return until_error(batches, first, kind, rf"row \d+ .*in shard g\d: .*g\d.lmdb {words}")


def truncate_under_service(bench: Bench, *, suffix: str, num_bytes: int) -> Outcome:
    """Truncate the files that a private service maps: it ends, the caller gets an error, and continues once they are back."""
    path = bench.store()
    with bench.loader(path, prefetch_bytes=1) as loader:
        batches = loader.forever()
        first = next(batches).step + 1
        whole = {file: file.read_bytes() for file in files(path, suffix)}
        for file in whole:
            os.truncate(file, num_bytes)
        # one that was not mapped yet is held against its length, and the service lives
        words = rf"has ended without a message|has {num_bytes} bytes, the manifest says"
        until_error(batches, first, BucketlineError, words)
        for file, data in whole.items():
            file.write_bytes(data)
        goes_on(loader)
    return Outcome.CLEAN_ERROR


def swap_file(bench: Bench) -> Outcome:
    """Exchange two shards' files before they are read by plain reads: an error names the shard; put back, it continues."""
    path = bench.store()
    one, two = files(path)

    def exchange() -> None:
        one.rename(path / "aside")
        two.rename(one)
        (path / "aside").rename(two)

    exchange()
    with bench.loader(path, plain_reads=True) as loader:
        words = r"g\d.lmdb (has \d+ bytes, the manifest says|belongs to another shard)"
        until_error(loader.forever(), 0, CorruptError, words)
        exchange()
        goes_on(loader)
    return Outcome.CLEAN_ERROR


def end_thread(bench: Bench) -> Outcome:
    """Raise SystemExit in a filling thread that waits for room: elsewhere a file it has just opened might have no owner."""
    with bench.loader(bench.store(), threads=1, prefetch_bytes=1) as loader:
        batches = loader.forever()
        first = next(batches).step + 1
        (thread,) = [thread for thread in threading.enumerate() if thread.name == "bucketline-builder"]
        assert thread.ident is not None
        stream: Any = loader._stream
        assert wait_until(lambda: stream._ready._producers_waiting)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit))
        until_error(batches, first, DeliveryError, r"a prefetch thread was ended by SystemExit\(\)")
        goes_on(loader)
    return Outcome.CLEAN_ERROR


def break_off(bench: Bench) -> Outcome:
    """Leave the loop at some batch, or drop the loader in it: nothing may be left."""
    path, before, last = bench.store(), held(), bench.random.randint(0, 20)
    loader = Loader(path, bench.config(), service=bench.service)
    for batch in loader.forever():
        if batch.step == last:
            break
    del batch
    begun = time.perf_counter()
    if bench.random.random() < 0.5:
        loader.close()
    del loader
    gc.collect()
    in_time(begun)
    left = left_since(before)
    expect(not left, f"left behind: {left}")
    return Outcome.COMPLETED


def kill_private_service(bench: Bench) -> Outcome:
    """Kill the private service while its batches are read; a Ctrl-C is meant for the trainer, and lets it be."""
    before = children()
    with bench.loader(bench.store(), prefetch_bytes=1) as loader:
        batches = loader.forever()
        first = next(batches).step + 5
        (child,) = children() - before
        os.kill(int(child), signal.SIGINT)
        for _ in range(4):
            next(batches)
        os.kill(int(child), bench.random.choice([signal.SIGKILL, signal.SIGTERM]))
        until_error(batches, first, DeliveryError, "has ended without a message")
        goes_on(loader)
    return Outcome.CLEAN_ERROR


def kill_service(bench: Bench) -> Outcome:
    """Kill a service that others share, or stop it; one that is started in its place serves the next iteration."""
    path, socket = bench.store(), bench.folder / "s"
    number = bench.random.choice([signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
    words = "has ended without a message" if number is signal.SIGKILL else "the service was stopped"
    with Loader(path, bench.config(prefetch_bytes=1), service=socket) as loader:
        with serving(socket, path) as process:
            batches = loader.forever()
            first = next(batches).step + 1
            process.send_signal(number)
            until_error(batches, first, DeliveryError, words)
        with serving(socket, path):
            goes_on(loader)
    return Outcome.CLEAN_ERROR


_CLIENT = """
import sys
from bucketline.loader import Loader, LoaderConfig
service = dict(service=sys.argv[2]) if len(sys.argv) > 2 else {}
with Loader(sys.argv[1], LoaderConfig(batch_size=1, prefetch_bytes=1, epochs=1000), **service) as loader:
    for batch in loader.forever():
        if batch.step == 3:
            print("ready", flush=True)
            if not service:
                sys.stdin.read()
"""


def client(*arguments: object) -> subprocess.Popen[bytes]:
    """Start a process that reads, from a service or by itself; wait until it does."""
    command = [sys.executable, "-c", _CLIENT, *map(str, arguments)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdout is not None
    expect(process.stdout.readline() == b"ready\n", "the process that reads did not begin")
    return process


def kill_client(bench: Bench) -> Outcome:
    """Kill a client in the middle of its loop, or tell it to stop: the service lets go of what it had, and serves another."""
    path, socket = bench.store(), bench.folder / "c"
    with serving(socket, path) as server, Loader(path, bench.config(), service=socket) as other:
        batches = iter(other)
        next(batches)
        before = Counter(descriptors(server.pid))
        with client(path, socket) as process:
            process.send_signal(bench.random.choice([signal.SIGKILL, signal.SIGTERM, signal.SIGINT]))
        begun = time.perf_counter()
        while left := [name for name in Counter(descriptors(server.pid)) - before if not name.startswith(str(path))]:
            is_late = time.perf_counter() - begun > WITHIN_S  # a file of the store may be held: it is opened once for all
            expect(not is_late, f"the service holds on to what was the client's: {left}")
        next(batches)
    return Outcome.COMPLETED


def truncate_sidecars_mapped(bench: Bench) -> Outcome:
    """Truncate the sidecars under the map of a process: it ends by SIGBUS, as the documents say, and does not hang."""
    path = bench.store()
    with client(path) as process:
        for file in files(path, "meta"):
            os.truncate(file, 0)
        try:
            process.communicate(timeout=CHILD_S)
        except subprocess.TimeoutExpired:
            process.kill()
            raise Wrong(f"no answer in {CHILD_S} s from a process whose sidecars were truncated") from None
    expect(process.returncode == -signal.SIGBUS, f"it ended with {process.returncode}, expected SIGBUS")
    return Outcome.COMPLETED


def truncate_sidecars_read_plainly(bench: Bench) -> Outcome:
    """Truncate the sidecars while batches are read by plain reads: what was read stays, what was not is an error."""
    path = bench.store()
    config = bench.config(plain_reads=True, prefetch_bytes=1, epochs=8)  # more than is located ahead
    expected = ids_of(path, config)
    with started(Loader(path, config, service=bench.service)) as loader:
        batches = loader.forever()
        found = _ids(batches, 1 + bench.random.randrange(2))
        for file in files(path, "meta"):
            os.truncate(file, bench.random.choice([0, 0, 100, file.stat().st_size - 1]))
        begun, is_whole = time.perf_counter(), False
        try:
            for batch in batches:
                found.append(batch.ids.tolist())
                begun = time.perf_counter()
            is_whole = True
        except BucketlineError as error:
            expect(".meta" in str(error), f"{error}; expected the file's name")
        in_time(begun)
        expect(found == expected[: None if is_whole else len(found)], "differs: the batches")
    return Outcome.COMPLETED if is_whole else Outcome.CLEAN_ERROR


def _ids(batches: Iterator[Batch], count: int) -> list[object]:
    return [batch.ids.tolist() for batch in islice(batches, count)]


def ids_of(path: Path, config: LoaderConfig) -> list[object]:
    with Loader(path, config) as loader:
        return [batch.ids.tolist() for batch in loader.forever()]


def _forked(work: Callable[[], bool]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # forking while threads run is what is tried
        ended = apart(work, CHILD_S)
    expect(ended.how is not How.HUNG, f"no answer in {CHILD_S} s from a child")
    expect(ended.gave is True, f"a child: {ended}")


def fork_while_read(bench: Bench) -> Outcome:
    """Fork again and again; a child iterates, or a copy of its loader, or its parent's loop, or it leaves the loader alone."""
    config = bench.config(epochs=8, threads=bench.random.choice([1, 2, 3]), verify=bench.random.random() < 0.3)
    path = bench.store()
    expected = ids_of(path, config)
    with started(Loader(path, config, service=bench.service)) as loader:
        for _ in range(FORKS):
            taken = bench.random.randrange(len(expected) - 4)
            loader.load_state_dict({**loader.state_dict(), "step": taken, "micro_step": 0})
            batches = loader.forever()
            expect(_ids(batches, 1) == expected[taken : taken + 1], "differs: the parent's first batch")
            wanted = expected[taken + 1 : taken + 4]
            end = time.perf_counter() + bench.random.random() * 0.01
            while time.perf_counter() < end:  # somewhere within what the threads do
                pass
            use = bench.random.choice(["iterates", "copies", "continues", "leaves it alone"])

            def work(use: str = use, wanted: list[object] = wanted, batches: Iterator[Batch] = batches) -> bool:
                if use == "leaves it alone":
                    return True
                if use == "copies":
                    with pickle.loads(pickle.dumps(loader)) as sent:
                        return _ids(sent.forever(), 3) == wanted
                return _ids(loader.forever() if use == "iterates" else batches, 3) == wanted

            _forked(work)
            expect(_ids(batches, 3) == wanted, "differs: the parent's batches after a fork")
    return Outcome.COMPLETED


def _by_epochs(loader: Loader) -> Generator[Batch]:
    while True:
        yield from loader


def copy_at_any_moment(bench: Bench) -> Outcome:
    """Pickle or copy a loader, or fork the process, after any batch, also an epoch's last: the copy gives what it would.

    With `forever` that is the next batch; a `for` begins the next epoch, once one has been begun.
    """
    config, path = bench.config(epochs=4), bench.store()
    with Loader(path, config) as own:
        expected = [(batch.epoch, batch.step, batch.ids.tolist()) for batch in own.forever()]
    ends = [n for n, (one, other) in enumerate(pairwise(expected), 1) if one[0] != other[0]]
    with started(Loader(path, config, service=bench.service)) as loader:
        for _ in range(COPIES):
            taken = bench.random.choice([bench.random.randrange(1, ends[-1]), *ends])
            loader.load_state_dict({**loader.state_dict(), "step": 0, "micro_step": 0, "epoch": 0})
            by_epochs = bench.random.random() < 0.5
            batches = _by_epochs(loader) if by_epochs else loader.forever()
            found = [(one.epoch, one.step, one.ids.tolist()) for one in islice(batches, taken)]
            expect(found == expected[:taken], "differs: the batches before a copy")
            at = min(end for end in ends if end >= taken) if by_epochs else taken
            how = bench.random.choice(["pickled", "copied", "forked"])

            def rest(loader: Loader = loader, at: int = at, *, by_epochs: bool = by_epochs) -> bool:
                wanted = [ids for _, _, ids in expected[at : at + 3]]
                try:
                    return _ids(_by_epochs(loader) if by_epochs else loader.forever(), len(wanted)) == wanted
                except UsageError:  # no epoch is left
                    return False

            if how == "forked":
                _forked(rest)
                continue
            with pickle.loads(pickle.dumps(loader)) if how == "pickled" else deepcopy(loader) as copy:
                where = "an epoch's end" if taken in ends else f"batch {taken}"
                expect(rest(started(copy)), f"differs: what a loader that was {how} at {where} gives")
    return Outcome.COMPLETED


NOT_WHOLE = r"(has \d+ bytes, the manifest says|ends at byte)"
_cut = partial(while_read, harm=lambda f: os.truncate(f, f.stat().st_size // 2), kind=CorruptError, words=NOT_WHOLE)
BOTH: tuple[str | None, ...] = (None, "auto")
FAILURES: dict[str, tuple[Callable[[Bench], Outcome], tuple[str | None, ...]]] = {
    "row corrupted": (corrupt_row, BOTH),
    "caption corrupted": (corrupt_caption, BOTH),
    "file removed before it is mapped": (remove_file, BOTH),
    "file truncated under plain reads": (_cut, BOTH),
    "file removed under plain reads": (partial(while_read, harm=Path.unlink, kind=StoreError, words="is missing"), BOTH),
    "file truncated under the map of a service": (partial(truncate_under_service, suffix="lmdb", num_bytes=4096), ("auto",)),
    "file exchanged for another shard's": (swap_file, BOTH),
    "sidecar truncated under plain reads": (truncate_sidecars_read_plainly, BOTH),
    "sidecar truncated under the map": (truncate_sidecars_mapped, (None,)),
    "sidecar truncated under the map of a service": (
        partial(truncate_under_service, suffix="meta", num_bytes=0),
        ("auto",),
    ),
    "process forked while batches are filled": (fork_while_read, BOTH),
    "pickled, copied or forked at any moment": (copy_at_any_moment, BOTH),
    "filling thread ended": (end_thread, (None,)),
    "loop broken off": (break_off, BOTH),
    "private service killed": (kill_private_service, ("auto",)),
    "service killed or stopped": (kill_service, ("a path",)),
    "client killed or stopped": (kill_client, ("a path",)),
}
_WEIGHTS = {"auto": 1, "a path": 2, None: 3}  # those without a process to start come more often


def loader_failures(asked: Asked) -> Iterator[Record]:
    """Faults that happen to files, threads, services and clients while batches are read; every kind at least once."""

    def trial(force: Callable[[Bench], Outcome]) -> Outcome:
        before = held()
        outcome = force(bench)
        left = left_since(before)
        expect(not left, f"left behind: {left}")
        return outcome

    draw, records = asked.draw, dict[str, Record]()
    all_of = {name: services for name, (_, services) in FAILURES.items()}
    order = [(name, one) for name, own in all_of.items() for one in (draw.sample(own, 1) if asked.is_quick else own)]
    order += draw.choices(order, [_WEIGHTS[service] for _, service in order], k=asked.of(0, 240 - len(order)))
    draw.shuffle(order)
    for name in FAILURES:
        kind = Kind.KILL if "killed" in name else Kind.DISK if name.startswith("file ") else Kind.OTHER
        records[name] = Record(f"loader: {name}", kind)
    bench = Bench(asked.folder, draw)
    for name, service in order:
        bench.service = service
        records[name].trial(service or "in-process", trial, FAILURES[name][0])
    yield from records.values()


TOKEN, MOST_KEPT = b"a token of the tests", 300
CONFIG = LoaderConfig(batch_size=2, epochs=1)


def floods(asked: Asked) -> Iterator[Record]:
    """Flood a socket, then a port that asks for a token: no token, half a message, garbage, drips."""
    draw = asked.draw
    store = make_store(asked.folder / "s", samples_of({"train/64x64": 20}))
    token = asked.folder / "token"
    token.write_bytes(TOKEN)
    token.chmod(0o600)
    with Loader(store, CONFIG) as loader:
        expected = [batch.ids.tolist() for batch in loader]
    for at, trials in (("socket", asked.of(5, 50)), ("port", asked.of(5, 100))):
        folder = asked.folder / at
        folder.mkdir()
        record = Record(f"a flood of strangers at a service's {at}, and clients that come meanwhile", Kind.OTHER)
        with serving_here(folder, store.path, security=Security(token=TOKEN)) as found:
            if at == "socket":
                address, connect = ServiceAddress(found.socket, deadline_s=HANG_S), partial(connected, found.socket)
            else:
                address = ServiceAddress(found.tcp, token=token, deadline_s=HANG_S)
                connect = partial(socket.create_connection, ("127.0.0.1", found.port), timeout=HANG_S)
            record.trial("among them", _among_strangers, record, address, connect, draw, expected, trials)
        yield record


def _among_strangers(
    record: Record,
    address: ServiceAddress,
    connect: Callable[[], socket.socket],
    draw: random.Random,
    expected: list[list[int]],
    trials: int,
) -> Outcome:
    """Be a client that was there before, and let others come."""
    with Loader(None, CONFIG, service=address) as early:
        batches, is_over = iter(early), threading.Event()
        first = next(batches)
        flood = [threading.Thread(target=_flood, args=(connect, random.Random(draw.random()), is_over)) for _ in range(3)]
        for thread in flood:
            thread.start()
        try:
            for number in range(trials):
                record.trial(f"client {number}", _client, address, expected)
            expect([batch.ids.tolist() for batch in (first, *batches)] == expected, "differs: what the first client was given")
        finally:
            is_over.set()
            for thread in flood:
                thread.join()
    return Outcome.COMPLETED


def _client(address: ServiceAddress, expected: list[list[int]]) -> Outcome:
    begun = time.monotonic()
    try:
        with Loader(None, CONFIG, service=address) as late:
            expect([batch.ids.tolist() for batch in late] == expected, "differs: what a client was given")
    except BucketlineError as error:
        raise Wrong(f"refused: {error}") from error
    took = time.monotonic() - begun
    expect(took <= HANG_S, f"took {took:.1f} s")
    return Outcome.COMPLETED


def _flood(connect: Callable[[], socket.socket], draw: random.Random, is_over: threading.Event) -> None:
    """Connect again and again; keep most of the connections, which say nothing, half of something, or garbage in drips."""
    kept: list[socket.socket] = []
    while not is_over.wait(0.001):
        with suppress(OSError, BucketlineError):
            kept.append(connect())
            kept[-1].settimeout(HANG_S)
            if draw.random() < 0.7:
                kept[-1].sendall(_said_by_a_stranger(draw))
            if draw.random() < 0.2:
                kept[-1].shutdown(socket.SHUT_WR)
                receive(kept[-1], HANG_S)  # the service answers, or ends the connection
            draw.choice(kept).sendall(draw.randbytes(1))
        if len(kept) > MOST_KEPT:
            kept.pop(draw.randrange(len(kept))).close()
    for sock in kept:
        sock.close()


def _said_by_a_stranger(draw: random.Random) -> bytes:
    body = draw.choice(
        [
            draw.randbytes(draw.randrange(300)),
            b"[" * draw.randrange(100_000),
            b"{}",
            json.dumps({"protocol": draw.randrange(3), "stores": [draw.randrange(9)] * draw.randrange(9)}).encode(),
            pickle.dumps({"a": 1}),
            b"GET / HTTP/1.1\r\n\r\n",
            b'{"protocol": ' + b"9" * 5000 + b"}",
        ]
    )
    length = draw.choice([len(body), len(body), draw.randrange(1 << 32), MAX_MESSAGE_BYTES, 0, MAX_MESSAGE_BYTES + 1])
    return draw.choice([b"", struct.pack(">I", length)]) + body
