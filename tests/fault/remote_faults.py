"""Makes a store's server fail, in every way and many times, while loaders read from it, and compares every batch.

`python -m tests.fault.remote_faults --faults 500 --seed 1` prints a table: what went wrong with how many responses, in how many
passes, how many clean errors that made, and the longest wait. Exit 1 where a batch was wrong or missing, or an error late.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from bucketline.bench.fixtures.range_server import Fault, RangeServer, Schedule
from bucketline.loader import LoaderConfig
from bucketline.loader.config import Remainder
from bucketline.store.remote.urls import RemoteOptions
from tests.fault.known import recorded
from tests.fault.record import Kind, Outcome
from tests.fault.served import IMAGES, QUANTISED, Pass, Served, WrongPassError, one_pass, served

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tests.fault.record import Asked, Record

DEADLINE_S = 4.0
SHARE = 0.3  # of the requests that fail, at most, while there are faults left
REQUESTS = 70  # of a pass, roughly
MIXED = "of all kinds"
PASSES = 40  # at most, of one kind


@dataclass(slots=True)
class Tried:
    """How the passes with one kind of fault went."""

    faults: int = 0
    passes: list[Pass] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Trials:
    """A server with both kinds of stores, and what is drawn for each pass."""

    folder: Path
    seed: int
    stores: list[Served] = field(init=False)

    def __post_init__(self) -> None:
        self.stores = [served(self.folder, shape) for shape in (IMAGES, QUANTISED)]

    def run(self, faults: Sequence[Fault], draw: random.Random, *, service: str | None = None) -> Tried:
        """Read stores with an empty cache until every fault was given to a response."""
        tried = Tried()
        schedule = Schedule(faults, share=min(SHARE, len(faults) / REQUESTS), seed=draw.randrange(1 << 30))
        with RangeServer(self.folder / "served", schedule=schedule, drip_s=0.3) as server:
            while schedule.given < len(faults) and len(tried.passes) < PASSES:
                store, config = draw.choice(self.stores), drawn_config(draw)
                with tempfile.TemporaryDirectory(dir=self.folder) as cache:
                    options = RemoteOptions(cache=Path(cache) / "lines", deadline_s=DEADLINE_S)
                    try:
                        own = one_pass(f"{server.url}/{store.name}", store.digests(config), config, options, service=service)
                    except WrongPassError as error:
                        tried.wrong.append(f"{store.name}, {config.batch_size} rows a batch, seed {config.seed}: {error}")
                        break
                tried.passes.append(own)
        tried.faults = schedule.given
        if tried.faults < len(faults) and not tried.wrong:
            tried.wrong.append(f"only {tried.faults} of {len(faults)} faults met a request in {len(tried.passes)} passes")
        return tried


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


def tried(faults: int, seed: int) -> Iterator[tuple[str, Tried]]:
    """Spread so many faults: an eleventh of them of all kinds mixed, read by a service, the rest kind by kind."""
    draw = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="bucketline-served-") as folder:
        trials = Trials(Path(folder), seed)
        mixed = max(len(Fault), faults // 11)
        each = -(-(faults - mixed) // len(Fault))
        for fault in Fault:
            yield fault, trials.run([fault] * each, draw)
        shuffled = [list(Fault)[n % len(Fault)] for n in range(mixed)]
        draw.shuffle(shuffled)
        yield MIXED, trials.run(shuffled[: mixed // 2], draw)
        yield f"{MIXED}, to a service", trials.run(shuffled[mixed // 2 :], draw, service="auto")


def force(faults: int, seed: int) -> int:
    """Force so many faults; print the table; return the exit code."""
    wrong: list[str] = []
    total = 0
    print(f"{'fault':<46} {'faults':>6} {'passes':>6} {'batches':>7} {'errors':>6}  {'longest':>7}")
    for name, own in tried(faults, seed):
        total += own.faults
        errors = sum(len(one.errors) for one in own.passes)
        longest = max((one.longest_s for one in own.passes), default=0.0)
        batches = sum(one.batches for one in own.passes)
        print(f"{name:<46} {own.faults:>6} {len(own.passes):>6} {batches:>7} {errors:>6}  {longest:>5.1f} s", flush=True)
        wrong += [f"{name}: {said}" for said in own.wrong]
    print(f"{total} faults, {len(wrong)} passes that went wrong")
    for said in wrong:
        print(f"wrong: {said}")
    return 1 if wrong else 0


def failing_servers(asked: Asked) -> Iterator[Record]:
    """Be the family of torture: a trial is a fault, which ends in a clean error or in nothing that a loader would notice."""
    for name, own in tried(asked.of(2 * len(Fault), 500), asked.seed):
        errors = min(own.faults, sum(len(one.errors) for one in own.passes))
        good = {Outcome.COMPLETED: own.faults - errors, Outcome.CLEAN_ERROR: errors}
        yield recorded(f"a store's server: {name}", Kind.OTHER, good, own.wrong)


def main() -> int:
    """Parse the command line and force faults."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=500, help="how many")
    parser.add_argument("--seed", type=int, default=1, help="decides which, and where")
    arguments = parser.parse_args()
    return force(arguments.faults, arguments.seed)


if __name__ == "__main__":
    sys.exit(main())
