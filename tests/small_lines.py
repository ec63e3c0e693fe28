"""Machines that read a store on a server, with lines of 64 KiB, so that a store of 100 MB has as many as one of 13 GB.

`python -m tests.small_lines FOLDER JSON`: each run of the list forks its machines, which read at the same time, each with a
cache of its own. Prints what they fetched in each epoch, as JSON.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from bucketline.bench.fixtures.server_process import ServerProcess
from bucketline.bench.fixtures.stores import StoreShape, kept_store, pushed
from bucketline.errors import BucketlineError
from bucketline.loader import Loader, LoaderConfig, Remainder
from bucketline.loader.config import USUAL_WINDOW
from bucketline.loader.plan.plan import make_plan
from bucketline.store import Store
from bucketline.store.remote.cache import remote_source  # noqa: F401 - to be changed before any process opens it
from tests.commands import spawn

LINE_BYTES, USUAL_BYTES = 1 << 16, 8 << 20
SCALE = USUAL_BYTES // LINE_BYTES
SCALED = {  # sizes that go with a line's
    "LINE_BYTES": USUAL_BYTES,
    "TARGET_BLOCK_BYTES": 1 << 20,
    "COMMIT_BYTES": 16 << 20,
    "LEAST_BYTES": 16 * USUAL_BYTES,
    "SPARE_BYTES": 2 * USUAL_BYTES,
    "USUAL_RING_BYTES": 96 * USUAL_BYTES,
    "MOST_WINDOW_BYTES": 1 << 30,
    "LOOKAHEAD_BYTES": 512 << 20,
    "MAX_BYTES_IN_FLIGHT": 128 << 20,
}


@dataclass(frozen=True, kw_only=True)
class Run:
    """Machines, and their options."""

    cache: float  # of each machine, in stores
    machines: int = 1
    epochs: int = 2
    batch_size: int = 32  # of all machines together
    window: int | None = None
    remainder: str = "carry"
    ragged: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Found:
    """Figures of a run of machines in each epoch, all of them together."""

    bytes_fetched: list[int]
    gets: list[int]
    store_bytes: int  # of the store's shards
    window: int  # rows
    error: str = ""


def shorten() -> None:
    """Set the length of a line in all modules of this process to `LINE_BYTES`."""
    for module in [module for name, module in sys.modules.items() if name.startswith("bucketline.")]:
        for name, usual in SCALED.items():
            if getattr(module, name, None) == usual:
                setattr(module, name, usual // SCALE)


def run_machines(folder: Path, shape: StoreShape, runs: Sequence[Run]) -> list[Found]:
    """Execute runs over a store of this shape in a process of its own."""
    asked = json.dumps({"shape": asdict(shape), "runs": [asdict(run) for run in runs]})
    ran = spawn([sys.executable, "-m", "tests.small_lines", str(folder), asked]).done()
    return [Found(**one) for one in json.loads(ran.out)]


def machine(url: str, generation: int, run: Run, cache: Path, cache_bytes: int, rank: int) -> dict[str, Any]:
    parts: list[tuple[int, int]] = []
    for epoch in range(run.epochs):
        config = config_of(run, cache_bytes, epochs=epoch + 1, cache=str(cache))
        try:
            loader = Loader(url, config, rank=rank, world_size=run.machines, generation=generation)
        except BucketlineError as error:
            return {"error": str(error)}
        with loader:
            source = loader.stores[0].store.source
            assert source is not None
            before = source.stats()
            loader.set_epoch(epoch)
            for _ in loader:
                pass
            after = source.stats()
            parts.append((after.bytes_fetched - before.bytes_fetched, after.requests - before.requests))
    return {"parts": parts}


def config_of(run: Run, cache_bytes: int, **more: Any) -> LoaderConfig:
    return LoaderConfig(
        batch_size=run.batch_size // run.machines,
        window=run.window,
        remainder=Remainder(run.remainder),
        ragged=tuple(run.ragged),
        cache_bytes=str(cache_bytes),
        **more,
    )


def execute(folder: Path, store: Store, url: str, run: Run) -> Found:
    store_bytes = sum(shard.entry.lmdb.num_bytes for shard in store.shards)
    cache_bytes = int(run.cache * store_bytes)
    plan = make_plan(store, config_of(run, cache_bytes), world_size=run.machines, cache_bytes=cache_bytes)
    run = replace(run, window=plan.window or USUAL_WINDOW)  # also if the cache holds the store
    with tempfile.TemporaryDirectory(dir=folder) as caches:
        children = [
            start(partial(machine, url, store.manifest.generation, run, Path(caches) / f"{rank}", cache_bytes, rank))
            for rank in range(run.machines)
        ]
        found = [gathered(*child) for child in children]
    if errors := [one["error"] for one in found if "error" in one]:
        return Found(bytes_fetched=[], gets=[], store_bytes=store_bytes, window=0, error=errors[0])
    sums = [
        [sum(values) for values in zip(*epoch, strict=True)] for epoch in zip(*[one["parts"] for one in found], strict=True)
    ]
    bytes_fetched, gets = [own[0] for own in sums], [own[1] for own in sums]
    return Found(bytes_fetched=bytes_fetched, gets=gets, store_bytes=store_bytes, window=run.window or 0)


def start(work: Callable[[], dict[str, Any]]) -> tuple[int, int]:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writing, json.dumps(work()).encode())
        except BaseException as error:  # noqa: BLE001 - the parent raises it
            os.write(writing, json.dumps({"error": repr(error)}).encode())
        os._exit(0)
    os.close(writing)
    return child, reading


def gathered(child: int, reading: int) -> dict[str, Any]:
    with os.fdopen(reading) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    found: dict[str, Any] = json.loads(text)
    return found


def main() -> int:
    folder, asked = Path(sys.argv[1]), json.loads(sys.argv[2])
    shorten()
    given: dict[str, Any] = {name: tuple(one) if isinstance(one, list) else one for name, one in asked["shape"].items()}
    shape = StoreShape(**given)
    path = kept_store(folder, shape)
    pushed(path, folder / "served")
    store = Store.open(path)
    with ServerProcess(folder / "served") as server:
        found = [execute(folder, store, f"{server.url}/{path.name}", Run(**run)) for run in asked["runs"]]
    print(json.dumps([asdict(one) for one in found]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
