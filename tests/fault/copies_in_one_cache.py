"""Reads copies of one store that have diverged through one cache, from two URLs and several processes, with kills.

The copies have the same ids, and each a shard of its own of the same name. Every batch is compared with its own copy's, with
checksums on, and at the end every line that the cache holds.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from bucketline.bench.fixtures.pushed_store import pushed
from bucketline.bench.fixtures.random_values import random_f16
from bucketline.bench.fixtures.server_process import ServerProcess
from bucketline.bench.fixtures.synthetic_store import MAX_CAPTIONS, MAX_SHARD_BYTES, StoreShape, make_store
from bucketline.store import StoreWriter
from bucketline.store.format.manifest import read_manifest
from tests.fault.record import Asked, Kind, Outcome, Record, recorded
from tests.fault.remote_kills import BATCH, LATENCY_S, Reader, kill_readers, local_digests, wrong_lines
from tests.fault.served import Served, in_lines

SHAPE = StoreShape(num_shards=2, rows_per_shard=165, latent_shape=(4, 128, 128), tokens=(3, 20))  # each shard has 3 lines
CACHE_BYTES = 192 << 20  # as much as both copies need, and what passes through
NAMES = ("one.store", "two.store")


def diverged(folder: Path) -> list[Served]:
    """Make two copies of a store, each with a last shard of its own that has the other one's name."""
    first = folder / NAMES[0]
    make_store(first, SHAPE)
    shutil.copytree(first, folder / NAMES[1])
    for seed, name in enumerate(NAMES, 1):
        _extend(folder / name, seed)
    manifests = [read_manifest(folder / name) for name in NAMES]
    assert len({manifest.store_id for manifest in manifests}) == 1
    assert len({tuple(shard.name for shard in manifest.shards) for manifest in manifests}) == 1
    return [Served(local=folder / name, name=pushed(folder / name, folder / "served").name) for name in NAMES]


def _extend(path: Path, seed: int) -> None:
    draw, bucket = np.random.default_rng(seed), SHAPE.spec.bucket
    caption = {"tokens": random_f16(draw, (3, SHAPE.token_width))}
    with StoreWriter(
        path,
        encoders={"vae": {"made": "at random"}},
        columns=SHAPE.columns,
        text=SHAPE.text,
        empty_caption=caption,
        max_captions=MAX_CAPTIONS,
        shard_bytes=MAX_SHARD_BYTES,
        shard_names="s{:04d}",
    ) as writer:
        for row in range(SHAPE.rows_per_shard + 40 * seed):  # of different lengths
            columns = {"latent": random_f16(draw, SHAPE.latent_shape)}
            writer.add(f"own/{row:06d}.png", bucket, columns, {f"{seed}/{row}": {"tokens": random_f16(draw, (5, 768))}})


def read_copies(stores: list[Served], url: str, folder: Path, kills: int, draw: random.Random) -> tuple[int, list[str]]:
    """Read both copies by two processes each, with one cache; kill one of them again and again."""
    cache = folder / "cache"
    readers, expected = [], []
    for number, store in enumerate(2 * stores):
        config = replace(in_lines(batch_size=BATCH, seed=number, epochs=1), verify=True)
        notes = folder / f"{number}"
        readers.append(Reader(url=f"{url}/{store.name}", cache=cache, notes=notes, config=config, cache_bytes=CACHE_BYTES))
        expected.append(local_digests(store, config, 0, 1))
    killed, wrong = kill_readers(readers, expected, kills, draw)
    return killed, [*wrong, *(line for store in stores for line in wrong_lines(cache, store, f"{url}/{store.name}"))]


def copied_stores(asked: Asked) -> Iterator[Record]:
    """Read them at once, then with kills."""
    draw = random.Random(asked.seed)
    stores = diverged(asked.folder)
    with ServerProcess(asked.folder / "served") as server:
        server.set_latency(LATENCY_S)
        for name, rounds, kills in (("at once", asked.of(1, 4), 0), ("one of four readers killed", 1, asked.of(4, 60))):
            wrong, good = list[str](), 0
            for number in range(rounds):
                own = asked.folder / f"{name} {number}"
                own.mkdir()
                killed, found = read_copies(stores, server.url, own, kills, draw)
                wrong += found
                good += killed if kills else 2 * len(stores)
                shutil.rmtree(own)
            outcome = Outcome.RECOVERED if kills else Outcome.COMPLETED
            yield recorded(f"diverged copies in one cache, {name}", Kind.KILL if kills else Kind.OTHER, {outcome: good}, wrong)
