"""Forces failures on loaders, one after the other, and times how each reaches the caller.

A trial is bad if the error, or the clean end, takes longer than 2 s or is another one than it should be, if a batch is skipped,
or if something is left behind.
"""

from __future__ import annotations

import ctypes
import gc
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from bucketline.errors import CorruptError, DeliveryError, StoreError
from bucketline.loader import Loader
from bucketline.store import Store
from tests.fault.changed_files import swap_file, truncate_under_service
from tests.fault.forcing import WITHIN_S, Bench, Ended, WrongEndError, goes_on, started, until_error
from tests.fault.forked_loaders import (
    copy_at_any_moment,
    fork_while_read,
    truncate_sidecars_mapped,
    truncate_sidecars_read_plainly,
)
from tests.fault.record import Asked, Kind, Outcome, Record, outcome_of
from tests.kit import flip_bit
from tests.leftovers import children, descriptors, held, left_since, wait_until
from tests.serving import serving


def corrupt_row(bench: Bench, service: str | None) -> Ended:
    """Flip a bit of a row; `verify` must name its sample, in the same place each time."""
    path = bench.store()
    store = Store.open(path)
    bucket = store.bucket("train/64x64")
    row = bench.random.randrange(bucket.num_rows)
    located = bucket.locate(np.array([row]))
    name = bucket.sample_ids(np.array([row]))[0]
    at = int(located.offsets(bucket.spec, "latent")[0])
    flip_bit(store.shards[int(located.shard[0])].paths.lmdb, 8 * at + bench.random.randrange(256))
    with started(Loader(path, bench.config(verify=True), service=service)) as loader:
        ended = until_error(loader.forever(), 0, CorruptError, f"sample '{re.escape(name)}'")
        again = until_error(
            loader.forever(), int(str(loader.state_dict()["step"])), CorruptError, f"sample '{re.escape(name)}'"
        )
    return max(ended, again, key=lambda one: one.seconds)


def corrupt_caption(bench: Bench, service: str | None) -> Ended:
    """Write impossible `starts` for a caption: a sample that has it is named."""
    path = bench.store()
    store = Store.open(path)
    shard = bench.random.randrange(len(store.shards))
    located = store.locate_captions(np.array([shard]), np.array([1]))
    with store.shards[shard].paths.lmdb.open("r+b") as file:
        file.seek(int(located.starts_offsets()[0]))
        file.write(b"\xff" * 8)
    with started(Loader(path, bench.config(), service=service)) as loader:
        return until_error(loader.forever(), 0, CorruptError, r"sample '.*', row \d+ in shard g\d: shard g\d: caption \d+ has")


def remove_file(bench: Bench, service: str | None) -> Ended:
    """Remove a shard's file before it is mapped; put it back, and the next iteration continues at the same batch."""
    path = bench.store()
    shard, suffix = bench.random.choice(["g0", "g1"]), bench.random.choice(["lmdb", "extents"])
    file = path / "shards" / f"{shard}.{suffix}"
    with started(Loader(path, bench.config(), service=service)) as loader:
        file.rename(bench.folder / "away")
        ended = until_error(
            loader.forever(), 0, StoreError, rf"(sample '.*', )?row \d+ in shard {shard}: .*{shard}.{suffix} is miss"
        )
        (bench.folder / "away").rename(file)
        goes_on(loader)
    return ended


def truncate_file(bench: Bench, service: str | None) -> Ended:
    """Truncate a shard's file while it is read by plain reads: what ends the process under a map is an error here."""
    path = bench.store()
    with started(Loader(path, bench.config(plain_reads=True, prefetch_bytes=1), service=service)) as loader:
        batches = loader.forever()
        first = next(batches).step + 1
        for shard in ("g0", "g1"):
            file = path / "shards" / f"{shard}.lmdb"
            os.truncate(file, file.stat().st_size // 2)
        return until_error(
            batches, first, CorruptError, r"row \d+ .*in shard g\d: .*g\d.lmdb (has \d+ bytes, the manifest says|ends at byte)"
        )


def remove_while_read(bench: Bench, service: str | None) -> Ended:
    """Remove a shard's file while it is read by plain reads."""
    path = bench.store()
    with started(Loader(path, bench.config(plain_reads=True, prefetch_bytes=1), service=service)) as loader:
        batches = loader.forever()
        first = next(batches).step + 1
        for shard in ("g0", "g1"):
            (path / "shards" / f"{shard}.lmdb").unlink()
        return until_error(batches, first, StoreError, r"row \d+ .*in shard g\d: .*g\d.lmdb is missing")


def end_thread(bench: Bench, _service: str | None) -> Ended:
    """Raise SystemExit in a filling thread that waits for room: elsewhere a file it has just opened might have no owner."""
    with Loader(bench.store(), bench.config(threads=1, prefetch_bytes=1)) as loader:
        batches = loader.forever()
        first = next(batches).step + 1
        (thread,) = [thread for thread in threading.enumerate() if thread.name == "bucketline-builder"]
        assert thread.ident is not None
        stream: Any = loader._stream
        assert wait_until(lambda: stream._delivery._ready._fillers_waiting)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit))
        ended = until_error(batches, first, DeliveryError, r"a prefetch thread was ended by SystemExit\(\)")
        goes_on(loader)
    return ended


def break_off(bench: Bench, service: str | None) -> Ended:
    """Leave the loop at some batch, or drop the loader in it: nothing may be left."""
    path = bench.store()
    before = held()
    loader = Loader(path, bench.config(), service=service)
    last = bench.random.randint(0, 20)
    for batch in loader.forever():
        if batch.step == last:
            break
    del batch
    begun = time.perf_counter()
    if bench.random.random() < 0.5:
        loader.close()
    del loader
    gc.collect()
    ended = Ended(seconds=time.perf_counter() - begun, how="clean end")
    if left := left_since(before):
        raise WrongEndError(f"left behind: {left}")
    return ended


def kill_private_service(bench: Bench, _service: str | None) -> Ended:
    """Kill the private service while its batches are read; a Ctrl-C is meant for the trainer, and lets it be."""
    before = children()
    with Loader(bench.store(), bench.config(prefetch_bytes=1), service="auto") as loader:
        batches = loader.forever()
        first = next(batches).step + 1
        (child,) = children() - before
        os.kill(int(child), signal.SIGINT)
        for _ in range(4):
            next(batches)
            first += 1
        os.kill(int(child), bench.random.choice([signal.SIGKILL, signal.SIGTERM]))
        ended = until_error(batches, first, DeliveryError, "has ended without a message")
        goes_on(loader)
    return ended


def kill_service(bench: Bench, _service: str | None) -> Ended:
    """Kill a service that others share, or stop it; one that is started in its place serves the next iteration."""
    path, socket = bench.store(), bench.folder / "s"
    number = bench.random.choice([signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
    words = "has ended without a message" if number is signal.SIGKILL else "the service was stopped"
    with Loader(path, bench.config(prefetch_bytes=1), service=socket) as loader:
        with serving(socket, path) as process:
            batches = loader.forever()
            first = next(batches).step + 1
            process.send_signal(number)
            ended = until_error(batches, first, DeliveryError, words)
        with serving(socket, path):
            goes_on(loader)
    return ended


_CLIENT = """
import sys
from bucketline.loader import Loader, LoaderConfig
from bucketline.loader.service.client import ServiceBackend
loader = Loader(sys.argv[1], LoaderConfig(batch_size=1, prefetch_bytes=1), service=sys.argv[2])
batches = loader.forever()
next(batches)
print("ready", flush=True)
for batch in batches:
    pass
"""


def kill_client(bench: Bench, _service: str | None) -> Ended:
    """Kill a client in the middle of its loop, or tell it to stop: the service lets go of what it had, and serves another."""
    path, socket = bench.store(), bench.folder / "c"
    with serving(socket, path) as server, Loader(path, bench.config(), service=socket) as other:
        batches = iter(other)
        next(batches)
        before = Counter(descriptors(server.pid))
        command = [sys.executable, "-c", _CLIENT, str(path), str(socket)]
        null = subprocess.DEVNULL
        with subprocess.Popen(command, stdout=subprocess.PIPE, stdin=null, stderr=null) as client:
            assert client.stdout is not None
            client.stdout.readline()
            client.send_signal(bench.random.choice([signal.SIGKILL, signal.SIGTERM, signal.SIGINT]))
        begun = time.perf_counter()
        while left := [name for name in Counter(descriptors(server.pid)) - before if not name.startswith(str(path))]:
            if time.perf_counter() - begun > WITHIN_S:  # a file of the store may be held: it is opened once for all
                raise WrongEndError(f"the service holds on to what was the client's: {left}")
        ended = Ended(seconds=time.perf_counter() - begun, how="clean end")
        next(batches)
    return ended


FAILURES: dict[str, tuple[Callable[[Bench, str | None], Ended], tuple[str | None, ...]]] = {
    "row corrupted": (corrupt_row, (None, "auto")),
    "caption corrupted": (corrupt_caption, (None, "auto")),
    "file removed before it is mapped": (remove_file, (None, "auto")),
    "file truncated under plain reads": (truncate_file, (None, "auto")),
    "file removed under plain reads": (remove_while_read, (None, "auto")),
    "file truncated under the map of a service": (partial(truncate_under_service, suffix="lmdb", num_bytes=4096), ("auto",)),
    "file exchanged for another shard's": (swap_file, (None, "auto")),
    "file of extents truncated under plain reads": (truncate_sidecars_read_plainly, (None, "auto")),
    "file of extents truncated under the map": (truncate_sidecars_mapped, (None,)),
    "file of extents truncated under the map of a service": (
        partial(truncate_under_service, suffix="extents", num_bytes=0),
        ("auto",),
    ),
    "process forked while batches are filled": (fork_while_read, (None, "auto")),
    "pickled, copied or forked at any moment": (copy_at_any_moment, (None, "auto")),
    "filling thread ended": (end_thread, (None,)),
    "loop broken off": (break_off, (None, "auto")),
    "private service killed": (kill_private_service, ("auto",)),
    "service killed or stopped": (kill_service, ("a path",)),
    "client killed or stopped": (kill_client, ("a path",)),
}
# those without a process to start come more often
_WEIGHTS = {("auto"): 1, ("a path"): 2, None: 3}


def loader_failures(asked: Asked) -> Iterator[Record]:
    """Faults that happen to files, threads, services and clients while batches are read; every kind at least once."""
    kinds, draw = (
        [(name, service) for name, (_, services) in FAILURES.items() for service in services],
        random.Random(asked.seed),
    )
    drawn = draw.choices(kinds, [_WEIGHTS[service] for _, service in kinds], k=asked.of(len(kinds), 240) - len(kinds))
    order, records = [*kinds, *drawn], dict[str, Record]()
    draw.shuffle(order)
    for name in FAILURES:
        kind = Kind.KILL if "killed" in name else Kind.DISK if name.startswith("file ") else Kind.OTHER
        records[name] = Record(fault=f"loader: {name}", kind=kind)
    bench = Bench(asked.folder, draw)
    for name, service in order:
        before = held()
        try:
            ended = FAILURES[name][0](bench, service)
            if ended.seconds > WITHIN_S:
                raise WrongEndError(f"took {ended.seconds:.1f} s")
            if left := left_since(before):
                raise WrongEndError(f"left behind: {left}")
            records[name].add(Outcome.COMPLETED if ended.how == "clean end" else Outcome.CLEAN_ERROR)
        except WrongEndError as error:
            records[name].add(outcome_of(str(error)), f"{service or 'in-process'}: {error}")
    yield from records.values()
