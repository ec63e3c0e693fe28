"""Cost of delivering from a store on a server and from a machine that serves batches: against raw reads of as many bytes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bucketline.bench.apart import apart
from bucketline.bench.harness import Clock, Mark, Result, StoreCase, Subject, bytes_taken, compare
from bucketline.command_line import counted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from bucketline.loader import Loader, LoaderConfig

CASE = "stream"
OF_GETS, CPU_OF_GETS, OF_LOCAL = Mark(bound=0.9), Mark(bound=1.3, is_at_most=True), Mark(bound=0.95)
OF_ROUND_TRIPS, CPU_OF_PLAIN = Mark(bound=1.5, is_at_most=True), Mark(bound=1.5, is_at_most=True)
# of the first batch of a store without captions, one after the other: manifest; sidecars with the checksums of lines, and the
# generation after it, which is not there; lines
ROUND_TRIPS = 3
OF_SHARDS = Mark(bound=1.05, is_at_most=True)
MARKED_LINES = 40  # of a bucket for each machine; of fewer, those at which machines' shares meet are more than 5 %
MOST_BACKED = 1 << 30  # bytes of memory, for stores that are read in part
UNITS = {"": "GB/s", "CPU": "s/GB"}
PLAIN, CLIENT = "recv_into", "Loader over TCP"
# Sends the bytes of a file again and again to each client, in a process of its own.
SENDING = """
import socket, sys
data = open(sys.argv[1], "rb").read()
server = socket.create_server(("127.0.0.1", 0))
print(server.getsockname()[1], flush=True)
while True:
    client, _ = server.accept()
    try:
        while True:
            client.sendall(data)
    except OSError:
        client.close()
"""

Spent = tuple[float, float, int]  # seconds, CPU seconds of the process, bytes


@dataclass(frozen=True, kw_only=True)
class Stream(StoreCase):
    """Measure a loader that reads from a server on this machine through a cache, each run in a fresh process.

    The first epoch, with an empty cache, is held against `obstore`'s ranged GETs of the same lines, with as many requests at a
    time, written to the same disk. GB are the lines' bytes; CPU is that of the reading process. An epoch whose lines are all in
    the cache is held against the same of the local store. The first batch is timed on stores of several sizes, whose files are
    mostly holes, with a latency before each of the server's answers, and held against the round trips that it needs.

    Example: python -m bucketline.bench stream --repeats 3
    """

    num_shards: int = 16
    """Shards of the store."""
    rows_per_shard: int = 256
    """Rows per shard."""
    first_batch_rows: tuple[int, ...] = (10_000, 100_000, 1_000_000)
    """Rows of the stores whose first batch is timed."""
    latency_ms: float = 30.0
    """Milliseconds before each of the server's answers, for the first batch."""

    def measure(self, folder: Path) -> list[Result]:
        from bucketline.bench.fixtures.server_process import ServerProcess
        from bucketline.bench.fixtures.stores import kept_sparse_store, pushed

        store, served = self.kept_store(folder), folder / "served"
        sparse = {rows: kept_sparse_store(folder, 32, rows) for rows in self.first_batch_rows}
        for path in (store, *sparse.values()):
            pushed(path, served)

        def read(reader: Callable[..., Spent], path: Path, cache: Path | None = None) -> Spent:
            """Read in a fresh process, with an empty cache unless one is given."""
            with tempfile.TemporaryDirectory(prefix="cache-", dir=folder) as empty:
                seconds, cpu_s, num_bytes = apart(reader, server.url, path, cache or Path(empty) / "lines", self.batch_size)
            return seconds, cpu_s, num_bytes

        def speed(reader: Callable[..., Spent], cache: Path | None = None) -> Callable[[int], dict[str, float]]:
            return lambda _: _speed(read(reader, store, cache))

        def first_ms(path: Path) -> Callable[[int], dict[str, float]]:
            return lambda _: {"": 1e3 * read(take_first_batch, path)[0]}

        with ServerProcess(served) as server, tempfile.TemporaryDirectory(prefix="cache-", dir=folder) as filled:
            first = [
                Subject(name="GETs", measure=speed(gets)),
                Subject(name="loader", measure=speed(epoch), limit="GETs", mark=OF_GETS, marks={"CPU": CPU_OF_GETS}),
            ]
            results = compare(f"{CASE}, first epoch", UNITS, first, self.repeats)
            cache = Path(filled) / "lines"
            read(epoch, store, cache)
            pinned = [
                Subject(name="local store", measure=speed(local)),
                Subject(name="loader", measure=speed(cached, cache), limit="local store", mark=OF_LOCAL),
            ]
            results += compare(f"{CASE}, in the cache", UNITS, pinned, self.repeats)
            needed = Subject(name=f"{ROUND_TRIPS} round trips", measure=lambda _: {"": ROUND_TRIPS * self.latency_ms})
            batches = [
                Subject(name=f"{rows} rows", measure=first_ms(path), limit=needed.name, mark=OF_ROUND_TRIPS)
                for rows, path in sparse.items()
            ]
            server.set_latency(self.latency_ms / 1e3)
            return [*results, *compare(f"{CASE}, first batch", {"": "ms"}, [needed, *batches], self.repeats)]


def _speed(spent: Spent) -> dict[str, float]:
    seconds, cpu_s, num_bytes = spent
    return {"": num_bytes / seconds / 1e9, "CPU": cpu_s / num_bytes * 1e9}


def _lines(store: str) -> list[tuple[str, int, int]]:
    """Return the lines of a store's shards: path in the store, first byte, the one after the last.

    As much of the page cache as they have is filled and freed: in a virtual machine, the very first touch of memory makes the
    host allocate it, which takes about 10 times as long.
    """
    from bucketline.store.format.block import LINE_BYTES
    from bucketline.store.format.manifest import read_manifest, shard_paths

    found = []
    for entry in read_manifest(Path(store)).shards:
        path = str(shard_paths(Path(store), entry.name).lmdb.relative_to(store))
        ends = [*range(LINE_BYTES, entry.lmdb.num_bytes, LINE_BYTES), entry.lmdb.num_bytes]
        found += [(path, begin, end) for begin, end in zip([0, *ends], ends, strict=False)]
    with tempfile.TemporaryFile(dir=Path(store).parent) as file:
        for _ in range(2 * min(MOST_BACKED, sum(end - begin for _, begin, end in found)) // LINE_BYTES + 8):
            file.write(bytes(LINE_BYTES))
    return found


def _imported() -> None:
    """Import what is otherwise imported at the first object and URL."""
    import obstore.store

    from bucketline.store.remote.cache import remote_source

    assert all((obstore.store, remote_source))


def _config(batch_size: int, cache: str | None = None, **more: int) -> LoaderConfig:
    from bucketline.loader.config import USUAL_WINDOW, LoaderConfig

    return LoaderConfig(batch_size=batch_size, window=USUAL_WINDOW, cache=cache, **more)  # type: ignore[arg-type]


def gets(server: str, store: str, cache: str, _batch_size: int) -> Spent:
    """Read every line by the client that the loader uses, with as many requests at a time, into files like the cache's."""
    from datetime import timedelta

    import obstore
    from obstore.store import HTTPStore

    from bucketline.store.remote.cache.fetch import MAX_REQUESTS

    lines = _lines(store)
    options = {"allow_http": True, "timeout": timedelta(seconds=60)}
    served = HTTPStore.from_url(f"{server}/{Path(store).name}", client_options=options)  # type: ignore[arg-type]
    clock = Clock()
    with ThreadPoolExecutor(MAX_REQUESTS) as pool, ExitStack() as files:
        Path(cache).mkdir()
        written = {name: files.enter_context((Path(cache) / Path(name).name).open("wb")) for name, _, _ in lines}

        def fetch(line: tuple[str, int, int]) -> int:
            name, begin, end = line
            return os.pwrite(written[name].fileno(), obstore.get_range(served, name, start=begin, end=end), begin)

        num_bytes = sum(pool.map(fetch, lines))
    return *clock.spent(), num_bytes


def epoch(server: str, store: str, cache: str, batch_size: int) -> Spent:
    """Take every batch of an epoch from the server through an empty cache; opening is included. Bytes are those sent."""
    from bucketline.bench.fixtures.server_process import control
    from bucketline.loader import Loader

    _imported()
    _lines(store)
    control(server)
    clock = Clock()
    with Loader(f"{server}/{Path(store).name}", _config(batch_size, cache, epochs=1)) as loader:
        for _ in loader:
            pass
        num_bytes = control(server).num_bytes
        return *clock.spent(), num_bytes


def take_first_batch(server: str, store: str, cache: str, batch_size: int) -> Spent:
    """Take one batch from the server through an empty cache."""
    from bucketline.loader import Loader

    _imported()
    _lines(store)
    clock = Clock()
    with Loader(f"{server}/{Path(store).name}", _config(batch_size, cache, epochs=1)) as loader:
        num_bytes = bytes_taken(_kept := loader.forever(), 1)  # whose end waits for what is being read ahead
        return *clock.spent(), num_bytes


def cached(server: str, store: str, cache: str, batch_size: int) -> Spent:
    """Take batches of a store whose lines are all in the cache, once every row was delivered twice."""
    from bucketline.loader import Loader

    with Loader(f"{server}/{Path(store).name}", _config(batch_size, cache)) as loader:
        return _steady(loader)


def local(_server: str, store: str, _cache: str, batch_size: int) -> Spent:
    """Take batches of the local store, once every row was delivered twice."""
    from bucketline.loader import Loader

    with Loader(store, _config(batch_size)) as loader:
        return _steady(loader)


def _steady(loader: Loader) -> Spent:
    one_pass, batches = loader.plan.steps_before(1), loader.forever()
    bytes_taken(batches, 2 * one_pass)
    while loader.stats().ready:
        next(batches)
    clock = Clock()
    num_bytes = bytes_taken(batches, one_pass)
    return *clock.spent(), num_bytes


@dataclass(frozen=True, kw_only=True)
class StreamMachines(StoreCase):
    """Measure the bytes that leave a server for 1, 2 and 8 machines, each with a cache for half of the store, in two epochs.

    A machine is a process, and reads as one rank of the run, all of them at the same time. The store has four buckets. Bytes
    are a share of the shards' bytes, of all machines together; of several, the target needs 40 lines of each bucket for each.

    Example: python -m bucketline.bench stream --machines 2 --rows-per-shard 256 --repeats 1
    """

    repeats: int = 1
    """Repeats. All are counted."""
    num_shards: int = 4
    """Shards of the store."""
    rows_per_shard: int = 1024
    """Rows per shard."""
    batch_size: int = 32
    """Rows per batch of all machines together."""
    ranks: tuple[int, ...] = (1, 2, 8)
    """Numbers of machines."""
    cache_share: float = 0.5
    """Bytes that each machine's cache may hold, as a share of the shards' bytes."""

    def measure(self, folder: Path) -> list[Result]:
        from bucketline.bench.fixtures.server_process import ServerProcess
        from bucketline.bench.fixtures.stores import pushed
        from bucketline.store.format.block import LINE_BYTES
        from bucketline.store.format.manifest import read_manifest

        store = self.kept_store(folder, bucket_shares=(0.25,) * 4)
        pushed(store, folder / "served")
        shards_bytes = sum(entry.lmdb.num_bytes for entry in read_manifest(store).shards)
        cache_bytes = int(self.cache_share * shards_bytes)
        found: dict[tuple[int, int], list[float]] = {}
        with ServerProcess(folder / "served") as server:
            for _, ranks in product(range(self.repeats), self.ranks):
                with tempfile.TemporaryDirectory(prefix="cache-", dir=folder) as caches, ThreadPoolExecutor(ranks) as pool:
                    for epoch in (1, 2):
                        server.reset()
                        asked = {"batch_size": self.batch_size // ranks, "cache_bytes": str(cache_bytes), "epochs": epoch}
                        own = [(rank, ranks, {**asked, "cache": f"{caches}/{rank}"}) for rank in range(ranks)]
                        list(pool.map(lambda one: apart(epoch_of_machine, server.url, store, *one), own))
                        found.setdefault((epoch, ranks), []).append(server.reset().num_bytes / shards_bytes)
        return [
            Result.of(f"{CASE}, machines, epoch {epoch}", counted(ranks, "machine"), "of the shards", values, mark=mark)
            for (epoch, ranks), values in sorted(found.items())
            for mark in [OF_SHARDS if ranks < 2 or shards_bytes >= 4 * ranks * MARKED_LINES * LINE_BYTES else None]
        ]


def epoch_of_machine(server: str, store: str, rank: int, ranks: int, asked: dict[str, Any]) -> None:
    """Take a rank's batches of the last of `asked["epochs"]` from a server, through a cache that may be empty."""
    from bucketline.loader import Loader, LoaderConfig

    url, config = f"{server}/{Path(store).name}", LoaderConfig(**asked)
    with Loader(url, config, rank=rank, world_size=ranks, generation=1) as loader:
        loader.set_epoch(asked["epochs"] - 1)
        for _ in loader:
            pass


@dataclass(frozen=True, kw_only=True)
class StreamService(StoreCase):
    """Measure a client's CPU time and rate over the loopback link, against `recv_into` of as many bytes into as many buffers.

    The server is a `loader serve --at tcp://…` process, the plain sender another process. Both share the machine with the
    client, so rates are of all of them; CPU time is the client's.

    Example: python -m bucketline.bench stream --service --repeats 3
    """

    num_shards: int = 16
    """Shards of the store."""
    batches: int = 256
    """Batches per repeat."""
    prefetch_mib: int = 64
    """MiB of batches received ahead."""

    def measure(self, folder: Path) -> list[Result]:
        import numpy as np

        from bucketline.loader import Loader, LoaderConfig

        config = LoaderConfig(batch_size=self.batch_size, prefetch_bytes=self.prefetch_mib << 20)
        with ExitStack() as using:
            temporary = Path(using.enter_context(tempfile.TemporaryDirectory(prefix="bl-")))
            said = using.enter_context(started(self.kept_store(folder), temporary / "s", "--at", "tcp://127.0.0.1:0"))
            address = f"tcp://127.0.0.1:{said.split()[-1]}"
            with Loader(None, config, service=address) as loader:
                num_bytes = bytes_taken(batches := loader.forever(), 1)
                bytes_taken(batches, self.one_pass)  # the server's pages
                del batches
            (temporary / "data").write_bytes(bytes(num_bytes))
            command = [sys.executable, "-P", "-S", "-c", SENDING, str(temporary / "data")]
            sender = using.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
            using.callback(sender.kill)
            assert sender.stdout is not None
            port = int(sender.stdout.readline())
            buffers = [
                np.zeros(num_bytes, dtype=np.uint8).data for _ in range(self.prefetch_mib * 1024 * 1024 // num_bytes + 2)
            ]
            client = Loader(None, config, service=address)
            subjects = [
                Subject(name=PLAIN, measure=lambda _: self._received(port, buffers)),
                Subject(name=CLIENT, measure=lambda _: self._delivered(client), limit=PLAIN, marks={"CPU": CPU_OF_PLAIN}),
            ]
            return compare(f"{CASE}, service", UNITS, subjects, self.repeats)

    def _received(self, port: int, buffers: Sequence[memoryview]) -> dict[str, float]:
        clock, num_bytes = Clock(), len(buffers[0])
        with socket.create_connection(("127.0.0.1", port)) as sock:
            for number in range(self.batches):
                if sock.recv_into(buffers[number % len(buffers)], 0, socket.MSG_WAITALL) != num_bytes:
                    raise OSError("the sender has ended")
        return _speed((*clock.spent(), self.batches * num_bytes))

    def _delivered(self, loader: Loader) -> dict[str, float]:
        clock = Clock()
        num_bytes = bytes_taken(loader.forever(), self.batches)
        loader.close()
        return _speed((*clock.spent(), num_bytes))


@contextmanager
def started(store: Path, socket: Path, *options: str) -> Iterator[str]:
    """Run `loader serve`; yield the last line that it prints at its start."""
    command = [sys.executable, "-P", "-m", "bucketline.loader.cli", "serve", str(store), "--at", f"unix:{socket}"]
    with subprocess.Popen(
        [*command, "--every", "1e6", *options], stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as service:
        try:
            assert service.stderr is not None
            said = service.stderr.readline()
            assert said.startswith("serving "), said
            yield service.stderr.readline() if options else said
        finally:
            service.terminate()
