"""Kills what reads a store on a server, `kill -9` at random moments, and lets it continue: ranks, machines, a service.

Several processes share one cache folder, which is too small for the store, so that they fetch, wait for one another's
lines, and free them. Every batch is compared with the local store's, and at the end every line that the cache holds.
"""

from __future__ import annotations

import os
import random
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bucketline.bench.fixtures.server_process import ServerProcess
from bucketline.errors import BucketlineError
from bucketline.loader import Loader, LoaderConfig
from bucketline.store import Store
from bucketline.store.remote.urls import RemoteOptions
from tests.fault.apart import Apart, How
from tests.fault.record import Asked, Kind, Outcome, Record, recorded
from tests.fault.served import LARGE, Served, WrongPassError, check_batch, check_cache, digest_of, in_lines, reaching, served
from tests.leftovers import children

DEADLINE_S = 8.0
CACHE_BYTES = 256 << 20  # less than the store: half of it is pinned, the rest passes through the other half
LATENCY_S = 0.004  # of the server, so that a process is often killed while it waits
BATCH = 8
PACE_S = 0.002  # a reader's own time for a batch
LIFE_S = 0.6  # of a process that is killed, at most
EPOCHS = 2
LONGEST_S = 180.0  # of a process that nobody kills: two with one small cache take from each other what they read


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """One process that reads its share of every batch, and notes the digest of each in a file."""

    url: str
    cache: Path
    notes: Path
    config: LoaderConfig
    rank: int = 0
    world_size: int = 1
    cache_bytes: int = CACHE_BYTES
    generation: int | None = None  # that all ranks read

    def noted(self) -> list[str]:
        """Return the digests so far; a line that a kill cut in two does not count."""
        if not self.notes.exists():
            return []
        return [line for line in self.notes.read_text(encoding="ascii").split("\n")[:-1] if len(line) == 24]

    def read(self) -> int:
        """Be the process: continue where the notes end."""
        options = RemoteOptions(cache=self.cache, cache_bytes=self.cache_bytes, deadline_s=DEADLINE_S)
        own = self.noted()
        self.notes.write_text("".join(f"{line}\n" for line in own), encoding="ascii")
        config = reaching(self.config, options)
        ranks: dict[str, Any] = {"rank": self.rank, "world_size": self.world_size, "generation": self.generation}
        with Loader(self.url, config, **ranks) as loader, self.notes.open("a") as notes:
            loader.load_state_dict({**loader.state_dict(), "step": len(own)})
            for batch in loader.forever():
                notes.write(f"{digest_of(batch)}\n")
                notes.flush()
                time.sleep(PACE_S)
        return len(own)


def local_digests(store: Served, config: LoaderConfig, rank: int, world_size: int) -> list[str]:
    """Return what a reader must note."""
    with Loader(Store.open(store.local), config, rank=rank, world_size=world_size) as loader:
        return [digest_of(batch) for batch in loader.forever()]


def kill_readers(readers: list[Reader], expected: list[list[str]], kills: int, draw: random.Random) -> tuple[int, list[str]]:
    """Kill one of several readers again and again, start it again each time, then let all finish.

    Returns the number of kills, and what went wrong.
    """
    running, killed, wrong = {number: Apart(reader.read) for number, reader in enumerate(readers)}, 0, list[str]()
    while running:
        number = draw.choice(list(running))
        if killed < kills:
            time.sleep(draw.random() * LIFE_S)
            running[number].kill()
        ended = running.pop(number).ended(LONGEST_S)
        if ended.how is How.DIED and ended.signal == signal.SIGKILL:
            killed += 1
            running[number] = Apart(readers[number].read)
        elif ended.how is not How.DONE:
            wrong.append(f"reader {number}: {ended.how}: {ended.said}")
    for number, (reader, wanted) in enumerate(zip(readers, expected, strict=True)):
        if (found := reader.noted()) != wanted:
            at = next((n for n, (a, b) in enumerate(zip(found, wanted, strict=False)) if a != b), min(len(found), len(wanted)))
            wrong.append(f"differs: reader {number} noted {len(found)} of {len(wanted)} batches; the first other one is {at}")
    return killed, wrong


def kill_service(url: str, cache: Path, store: Served, kills: int, seed: int) -> int:
    """Be a trainer whose private service is killed while it fetches, and that iterates again each time; return the kills."""
    draw = random.Random(seed)
    config = in_lines(batch_size=BATCH, seed=1, epochs=EPOCHS)
    expected = store.digests(config)
    options = RemoteOptions(cache=cache, cache_bytes=CACHE_BYTES, deadline_s=DEADLINE_S)
    before, step, killed, over = children(), 0, 0, threading.Event()

    def kill() -> None:
        nonlocal killed
        while killed < kills and not over.wait(0.2 + draw.random()):
            for child in children() - before:
                with suppress(ProcessLookupError):
                    os.kill(int(child), signal.SIGKILL)
                    killed += 1

    killer = threading.Thread(target=kill)
    with Loader(url, reaching(config, options), service="auto") as loader:
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
    """Kill ranks, machines and services, a third of the kills each."""
    draw, folder, kills = random.Random(asked.seed), asked.folder, asked.of(2, 30)
    store = served(folder, LARGE)
    config, other = (in_lines(batch_size=BATCH, seed=asked.seed + n, epochs=EPOCHS) for n in range(2))
    with ServerProcess(folder / "served") as server:
        server.set_latency(LATENCY_S)
        url = f"{server.url}/{store.name}"
        for name, shares in (
            ("one of two ranks killed", [(config, 0, 2), (config, 1, 2)]),
            ("one of two machines with one cache folder killed", [(config, 0, 1), (other, 0, 1)]),
        ):
            with tempfile.TemporaryDirectory(dir=folder) as own:
                cache = Path(own) / "cache"
                newest = Store.open(store.local).manifest.generation
                readers = [
                    Reader(
                        url=url,
                        cache=cache,
                        notes=Path(own) / f"{n}",
                        config=share[0],
                        rank=share[1],
                        world_size=share[2],
                        generation=newest,
                    )
                    for n, share in enumerate(shares)
                ]
                expected = [local_digests(store, *share) for share in shares]
                killed, wrong = kill_readers(readers, expected, kills, draw)
                wrong += wrong_lines(cache, store)
            yield recorded(f"from a server, {name}", Kind.KILL, {Outcome.RECOVERED: killed}, wrong)
        with tempfile.TemporaryDirectory(dir=folder) as own:
            cache = Path(own) / "cache"
            ended = Apart(lambda: kill_service(url, cache, store, kills, asked.seed)).ended(LONGEST_S + 9 * kills)
            wrong = [] if ended.how is How.DONE else [f"{ended.how}: {ended.said}"]
            wrong += wrong_lines(cache, store)
        name = "from a server, the private service that fetches killed"
        yield recorded(name, Kind.KILL, {Outcome.RECOVERED: ended.gave or 0}, wrong)


def wrong_lines(cache: Path, store: Served, url: str | None = None) -> list[str]:
    """Describe what a cache holds that is not as in the local store; `url`: only of this one."""
    try:
        check_cache(cache, store.local, url)
    except WrongPassError as error:
        return [str(error)]
    return []
