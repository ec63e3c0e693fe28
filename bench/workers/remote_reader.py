"""The processes that `stream` measures.

`python -m bucketline.bench.workers.remote_reader JSON`, with a `RemoteRun` as JSON, prints a list of parts, such as epochs,
with the seconds, CPU seconds and bytes of each. Everything is imported before the clock starts.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy.ma  # noqa: F401 - numpy imports it at the first `unique`
import obstore.store  # noqa: F401 - imported when the first object is requested

from bucketline.bench.fixtures.server_process import control
from bucketline.loader.config import USUAL_WINDOW, LoaderConfig
from bucketline.loader.loader import Loader
from bucketline.store import Store
from bucketline.store.format.hashing import LINE_BYTES
from bucketline.store.format.layout import shard_paths
from bucketline.store.format.manifest import read_manifest
from bucketline.store.remote.cache import remote_source  # noqa: F401 - imported when the first URL is opened
from bucketline.store.remote.cache.fetch_threads import MAX_REQUESTS
from bucketline.store.remote.urls import RemoteOptions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MOST_BACKED = 1 << 30  # bytes of memory, for stores that are read in part


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteRun:
    """The task of a process."""

    reader: str  # a key of READERS
    server: str  # the server's URL
    name: str  # of the store, on the server
    store: str  # its local folder
    cache: str = ""  # an empty folder
    batch_size: int = 32

    @property
    def url(self) -> str:
        return f"{self.server}/{self.name}"

    def config(self, cache: Path) -> LoaderConfig:
        """Return the configuration of a loader with this cache."""
        return LoaderConfig(batch_size=self.batch_size, window=USUAL_WINDOW, epochs=1, cache=str(cache))

    def lines(self) -> Iterator[tuple[str, int, int]]:
        """Iterate over the lines of the store's shards: path below the server's URL, first byte, the one after the last."""
        manifest = read_manifest(Path(self.store))
        for entry in manifest.shards:
            path = shard_paths(Path(self.store), entry.name).lmdb.relative_to(self.store)
            for begin in range(0, entry.lmdb.num_bytes, LINE_BYTES):
                yield str(path), begin, min(begin + LINE_BYTES, entry.lmdb.num_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """The measurements of one part of a run."""

    seconds: float
    cpu_s: float  # of this process
    num_bytes: int  # read from the server, or, of batches, of their tensors
    sent_bytes: int = 0  # by the server


class _Clock:
    """Measures the parts of a run."""

    def __init__(self) -> None:
        self._begun, self._used = time.perf_counter(), _cpu_s()

    def part(self, num_bytes: int, **more: float) -> Part:
        """Return what was used since the last part."""
        begun, used = self._begun, self._used
        self._begun, self._used = time.perf_counter(), _cpu_s()
        return Part(seconds=self._begun - begun, cpu_s=self._used - used, num_bytes=num_bytes, **more)  # type: ignore[arg-type]

    def since(self) -> float:
        return time.perf_counter() - self._begun


def back_memory(folder: Path, num_bytes: int) -> None:
    """Fill the page cache with as much as will be read, and free it.

    In a virtual machine, the very first touch of memory makes the host allocate it, which takes about 10 times as long.
    """
    path, piece = folder / "memory", bytes(LINE_BYTES)
    with path.open("wb") as file:
        for _ in range(2 * num_bytes // LINE_BYTES + 8):
            file.write(piece)
    path.unlink()


def _cpu_s() -> float:
    own = resource.getrusage(resource.RUSAGE_SELF)
    return own.ru_utime + own.ru_stime


def gets(run: RemoteRun) -> list[Part]:
    """Read every line by the client that the loader uses, with as many requests at a time, and drop it."""
    from datetime import timedelta

    import obstore
    from obstore.store import HTTPStore

    lines = list(run.lines())
    store = HTTPStore.from_url(run.url, client_options={"allow_http": True, "timeout": timedelta(seconds=60)})
    clock = _Clock()
    with ThreadPoolExecutor(MAX_REQUESTS) as pool:
        num_bytes = sum(pool.map(lambda line: len(obstore.get_range(store, line[0], start=line[1], end=line[2])), lines))
    return [clock.part(num_bytes)]


def loader(run: RemoteRun) -> list[Part]:
    """Take every batch of an epoch from the server through an empty cache; opening is included."""
    control(run.server)
    clock = _Clock()
    with Loader(run.url, run.config(Path(run.cache) / "lines")) as opened:
        num_bytes = sum(sum(tensor.nbytes for tensor in batch.tensors()) for batch in opened)
        return [clock.part(num_bytes, sent_bytes=control(run.server).num_bytes)]


def first_batch(run: RemoteRun) -> list[Part]:
    """Take one batch from the server through an empty cache."""
    clock = _Clock()
    with Loader(run.url, run.config(Path(run.cache))) as opened:
        return [clock.part(sum(tensor.nbytes for tensor in next(opened.forever()).tensors()))]


def pinned(run: RemoteRun) -> list[Part]:
    """Take batches of a store whose lines are all in the cache, once every row was delivered twice."""
    return _steady(run, Store.open(run.url, remote=RemoteOptions(cache=Path(run.cache))))


def local(run: RemoteRun) -> list[Part]:
    """Take batches of the local store, once every row was delivered twice."""
    return _steady(run, Store.open(run.store))


def _steady(run: RemoteRun, store: Store) -> list[Part]:
    with Loader(store, LoaderConfig(batch_size=run.batch_size, window=USUAL_WINDOW)) as opened:
        one_pass = opened.plan.steps_before(1)
        batches = opened.forever()
        for _ in range(2 * one_pass):
            next(batches)
        while opened.stats().ready:
            next(batches)
        clock = _Clock()
        return [clock.part(sum(sum(t.nbytes for t in next(batches).tensors()) for _ in range(one_pass)))]


READERS: dict[str, Callable[[RemoteRun], list[Part]]] = {
    own.__name__: own for own in (gets, loader, first_batch, pinned, local)
}


def main() -> int:
    """Execute the run of the command line and print its parts."""
    run = RemoteRun(**json.loads(sys.argv[1]))
    Path(run.cache).mkdir(exist_ok=True)
    back_memory(Path(run.cache).parent, min(MOST_BACKED, sum(end - begin for _, begin, end in run.lines())))
    print(json.dumps([asdict(part) for part in READERS[run.reader](run)]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
