"""Kills what reads stores on a server, `kill -9` at random moments, and lets it continue: ranks, machines, copies, a service.

Several processes share one cache folder, which is too small, so that they fetch, wait for one another's lines, and free them.
Every batch is compared with the local store's, and at the end every line that the cache holds. Copies of one store that have
diverged have the same ids, and each a shard of its own of the same name.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bucketline.bench.fixtures.pushed_store import pushed
from bucketline.bench.fixtures.random_values import random_f16
from bucketline.bench.fixtures.server_process import ServerProcess
from bucketline.bench.fixtures.synthetic_store import MAX_CAPTIONS, MAX_SHARD_BYTES, StoreShape, make_store
from bucketline.errors import BucketlineError
from bucketline.loader import Loader, LoaderConfig
from bucketline.store import Store, StoreWriter
from bucketline.store.format.manifest import read_manifest
from tests.fault.apart import Apart, How
from tests.fault.record import Asked, Kind, Outcome, Record, expect
from tests.fault.servers import LARGE, Served, check_batch, check_cache, digest_of, in_lines, served
from tests.leftovers import children

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
        """Compare what was noted with what a reader of the local store notes."""
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
    """Kill ranks, machines and services, a third of the kills each."""
    draw, kills, store = random.Random(asked.seed), asked.of(2, 30), served(asked.folder, LARGE)
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
    draw, stores = random.Random(asked.seed), diverged(asked.folder)
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
