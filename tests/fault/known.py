"""The faults that have modules of their own, each with its own table: here they give records."""

from __future__ import annotations

import random
import sys
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING

from tests.commands import spawn
from tests.fault.record import Kind, Outcome, Record
from tests.store_forms import COLUMNS, IMAGES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from tests.fault.hostile_files import Lies
    from tests.fault.record import Asked

COLUMNS_TOO = ", of a store of columns"
WORDS = {  # of a failure's message, and what it then is
    "missing": Outcome.LOST,
    "lost": Outcome.LOST,
    "had not ended": Outcome.HANG,
    "no answer in": Outcome.HANG,
    "took ": Outcome.HANG,
    "other rows": Outcome.WRONG,
    "found nothing": Outcome.WRONG,
    "differs": Outcome.WRONG,
    "not what it was": Outcome.WRONG,
    "samples that nobody damaged": Outcome.LOST,
    "faults:": Outcome.WRONG,
}


def outcome_of(failure: str) -> Outcome:
    """Classify a failure by its message."""
    return next((outcome for word, outcome in WORDS.items() if word in failure), Outcome.DEFECT)


def recorded(fault: str, kind: Kind, good: dict[Outcome, int], failures: Iterable[str]) -> Record:
    """Make a record of trials that went well, and of messages of those that did not."""
    record = Record(fault=fault, kind=kind, counts=Counter({outcome: count for outcome, count in good.items() if count > 0}))
    for failure in failures:
        record.add(outcome_of(failure), failure)
    return record


def killed_packs(asked: Asked) -> Iterator[Record]:
    """`kill -9` of what writes shards, and of `ingest pack`, once each and many times in a row."""
    from tests.fault.killed_packs import Result as Killed
    from tests.fault.killed_packs import kill_packs, kill_writers
    from tests.fault.packs_in_a_row import adopt_orphans, kill_in_a_row

    adopt_orphans()
    draw = random.Random(asked.seed)
    for fault, kill, kills in (
        ("writer of shards killed", partial(kill_writers, form=IMAGES), asked.of(6, 400)),
        (f"writer of shards killed{COLUMNS_TOO}", partial(kill_writers, form=COLUMNS), asked.of(4, 200)),
        ("ingest pack killed", kill_packs, asked.of(2, 40)),
    ):
        result = Killed()
        kill(kills, draw, asked.folder, result)
        ended = [f"{count} runs {phase}" for phase, count in result.phases.items() if phase.startswith("ended")]
        yield recorded(fault, Kind.KILL, {Outcome.RECOVERED: result.adopted - len(ended)}, [*result.failures, *ended])
    kills = asked.of(2, 30)
    row = kill_in_a_row(kills, draw, asked.folder / "row")
    fault = "one ingest pack killed again and again, and finished"
    yield recorded(fault, Kind.KILL, {Outcome.RECOVERED: kills - len(row.faults)}, row.faults)


def killed_on_ray(asked: Asked) -> Iterator[Record]:
    """`kill -9` of the workers and drivers of packs on a Ray cluster."""
    from tests.fault.killed_ray import run

    kills = asked.of(3, 30)
    result = run(kills, asked.seed, asked.folder)
    fault = "a worker or the driver of a pack on Ray killed"
    yield recorded(fault, Kind.KILL, {Outcome.RECOVERED: kills - len(result.faults)}, result.faults)


def killed_ranks(asked: Asked) -> Iterator[Record]:
    """`kill -9` of one rank of several under torchrun."""
    from tests.fault.killed_ranks import run
    from tests.fault.packs_in_a_row import adopt_orphans

    adopt_orphans()
    kills = asked.of(1, 18)
    result = run(kills, [2, 3, 1], asked.seed, asked.folder)
    yield recorded("one rank of several killed", Kind.KILL, {Outcome.RECOVERED: kills - len(result.faults)}, result.faults)


def loader_failures(asked: Asked) -> Iterator[Record]:
    """Faults that happen to files, threads, services and clients while batches are read."""
    from tests.fault.loader_failures import FAILURES, tried

    kinds = sum(len(services) for _, services in FAILURES.values())
    ends, wrong = tried(asked.of(kinds, 240), asked.seed)
    for name in FAILURES:
        own = [ended for (failure, _), all_ended in ends.items() if failure == name for ended in all_ended]
        kind = Kind.KILL if "killed" in name else Kind.DISK if name.startswith("file ") else Kind.OTHER
        counts = Counter(Outcome.COMPLETED if ended.how == "clean end" else Outcome.CLEAN_ERROR for ended in own)
        yield recorded(f"loader: {name}", kind, counts, [line for line in wrong if line.startswith(f"{name} (")])


def flipped_bits(asked: Asked) -> Iterator[Record]:
    """One bit of a store's files flipped, of a store of images and of one of columns of any kind."""
    from tests.fault.bit_flips import make, make_columns, run

    for form, made, flips in (("", make, asked.of(30, 1200)), (COLUMNS_TOO, make_columns, asked.of(20, 600))):
        (asked.folder / f"flips{form}").mkdir()
        yield from _flips(run(flips, asked.seed, asked.folder / f"flips{form}", made), form)


def _flips(counts: Counter[tuple[str, str]], form: str) -> Iterator[Record]:
    outcomes = {
        "refused": Outcome.CLEAN_ERROR,
        "found": Outcome.CLEAN_ERROR,
        "unused": Outcome.COMPLETED,
        "unnoticed": Outcome.WRONG,
        "crash": Outcome.CRASH,
        "hang": Outcome.HANG,
    }
    for kind in sorted({kind for kind, _ in counts}):
        record = Record(fault=f"a bit flipped in {kind}{form}", kind=Kind.FLIP)
        for name, outcome in outcomes.items():
            if counts[kind, name]:
                record.add(outcome, f"{counts[kind, name]} flips", counts[kind, name])
        yield record


def damaged_files(asked: Asked) -> Iterator[Record]:
    """Files of a store removed, cut, overwritten or exchanged, then a repair and the same samples packed again."""
    from tests.fault.random_damage import run

    for form, made, trials in (("", IMAGES, asked.of(8, 200)), (COLUMNS_TOO, COLUMNS, asked.of(4, 100))):
        counts, failures = run(trials, asked.seed, asked.folder / f"damage{form}", made)
        fault = f"a store's files damaged, repaired and packed again{form}"
        yield recorded(fault, Kind.DISK, {Outcome.RECOVERED: counts.total()}, failures)


def lying_files(asked: Asked) -> Iterator[Record]:
    """Files of a store that lie with right checksums, and files edited at random."""
    from tests.fault.hostile_files import tell_within_limits

    for form, made in (("", IMAGES), (COLUMNS_TOO, COLUMNS)):
        lies = tell_within_limits(asked.seed, asked.of(20, 500), 0.03 if asked.is_quick else 1.0, made)
        yield from _lies(lies, form)


def _lies(lies: Lies, form: str) -> Iterator[Record]:
    for kind in sorted({kind for kind, _ in lies.counts}):
        fault = "a store's file edited at random" if kind == "random" else f"{kind} that lie, with right checksums"
        fault += form
        failures = [line for line in lies.failures if line.startswith(f"{kind}, ")]
        good = {
            Outcome.CLEAN_ERROR: lies.counts[kind, "verify refused"],
            Outcome.COMPLETED: lies.counts[kind, "verify answered"],
        }
        yield recorded(fault, Kind.HOSTILE, good, failures)


def full_disks(asked: Asked) -> Iterator[Record]:
    """A disk too small, by less and less; then room is made."""
    ran = spawn([sys.executable, "-m", "tests.fault.full_disk", asked.folder])
    tries = [line.split("\t") for line in ran.out.splitlines() if line.count("\t") == 3]
    done = sum(stage == "done" for _, stage, _, _ in tries)
    failures = [] if ran.code == 0 else [ran.out[-300:] + ran.err[-300:]]
    good = {Outcome.RECOVERED: len(tries) - done - len(failures), Outcome.COMPLETED: done}
    yield recorded("a full disk while a store is written, then room", Kind.DISK, good, failures)
