"""Makes a store's server fail, in every way and many times, while loaders read from it, and compares every batch.

A trial is a fault, which ends in a clean error or in nothing that a loader would notice.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from bucketline.bench.fixtures.range_server import Fault, RangeServer, Schedule
from bucketline.loader import LoaderConfig
from bucketline.loader.config import Remainder
from bucketline.store.remote.urls import RemoteOptions
from tests.fault.record import Asked, Kind, Outcome, Record, recorded
from tests.fault.served import IMAGES, QUANTISED, WrongPassError, one_pass, served

DEADLINE_S = 4.0
SHARE = 0.3  # of the requests that fail, at most, while there are faults left
REQUESTS = 70  # of a pass, roughly
MIXED = "of all kinds"
PASSES = 40  # at most, of one kind


class Trials:
    """A server with both kinds of stores, and what is drawn for each pass."""

    def __init__(self, folder: Path) -> None:
        """Make the stores."""
        self.folder, self.stores = folder, [served(folder, shape) for shape in (IMAGES, QUANTISED)]

    def run(self, name: str, faults: Sequence[Fault], draw: random.Random, *, service: str | None = None) -> Record:
        """Read stores with an empty cache until every fault was given to a response."""
        wrong, errors, passes = list[str](), 0, 0
        schedule = Schedule(faults, share=min(SHARE, len(faults) / REQUESTS), seed=draw.randrange(1 << 30))
        with RangeServer(self.folder / "served", schedule=schedule, drip_s=0.3) as server:
            while schedule.given < len(faults) and passes < PASSES:
                store, config = draw.choice(self.stores), drawn_config(draw)
                with tempfile.TemporaryDirectory(dir=self.folder) as cache:
                    options = RemoteOptions(cache=Path(cache) / "lines", deadline_s=DEADLINE_S)
                    try:
                        own = one_pass(f"{server.url}/{store.name}", store.digests(config), config, options, service=service)
                    except WrongPassError as error:
                        wrong.append(f"{store.name}, {config.batch_size} rows a batch, seed {config.seed}: {error}")
                        break
                errors, passes = errors + len(own.errors), passes + 1
        given = schedule.given
        if given < len(faults) and not wrong:
            wrong.append(f"only {given} of {len(faults)} faults met a request in {passes} passes")
        good = {Outcome.COMPLETED: given - errors, Outcome.CLEAN_ERROR: min(given, errors)}
        return recorded(f"a store's server: {name}", Kind.OTHER, good, wrong)


def drawn_config(draw: random.Random) -> LoaderConfig:
    """Draw a configuration of one of few, since the local store is read once for each."""
    return LoaderConfig(
        batch_size=draw.choice([3, 8]),
        seed=draw.randrange(3),
        epochs=1,
        remainder=Remainder.PARTIAL,
        window=draw.choice([None, 4096]),
        threads=draw.choice([1, 2]),
        prefetch_bytes=draw.choice([1, 1 << 22]),
    )


def failing_servers(asked: Asked) -> Iterator[Record]:
    """Spread the faults: an eleventh of them of all kinds mixed, half of these read by a service, the rest kind by kind."""
    draw, trials, faults = random.Random(asked.seed), Trials(asked.folder), asked.of(2 * len(Fault), 500)
    mixed = max(len(Fault), faults // 11)
    each = -(-(faults - mixed) // len(Fault))
    for fault in Fault:
        yield trials.run(fault, [fault] * each, draw)
    shuffled = [list(Fault)[n % len(Fault)] for n in range(mixed)]
    draw.shuffle(shuffled)
    yield trials.run(MIXED, shuffled[: mixed // 2], draw)
    yield trials.run(f"{MIXED}, to a service", shuffled[mixed // 2 :], draw, service="auto")
