"""The record of a fault that was tried: how often, and the outcome of each trial."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

COLUMNS_TOO = ", of a store of columns"
MAX_SAID = 10  # of what went wrong, in one record


class Outcome(StrEnum):
    """The outcome of one trial."""

    CLEAN_ERROR = "clean error"  # an error of ours, and nothing that was committed is missing
    RECOVERED = "recovered"  # the next run, or the next iteration, continued where it ended
    COMPLETED = "completed"  # it went through, and what it gave is right
    LOST = "lost sample"  # one that was committed
    WRONG = "wrong bytes"
    HANG = "hang > 10 s"
    CRASH = "crash"  # of the interpreter
    OUTSIDE = "file outside"  # of the store, written
    DEFECT = "other defect"  # an exception that is none of ours, something left behind, a wrong count


GOOD = (Outcome.CLEAN_ERROR, Outcome.RECOVERED, Outcome.COMPLETED)
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


class Kind(StrEnum):
    """The outcome of a trial, as counted in the totals."""

    KILL = "kill"
    FLIP = "flip"
    HOSTILE = "hostile file"
    DISK = "disk fault"
    INPUT = "fuzzed input"
    OTHER = "other"


@dataclass(slots=True, kw_only=True)
class Record:
    """One fault."""

    fault: str
    kind: Kind
    counts: Counter[Outcome] = field(default_factory=Counter)
    said: list[str] = field(default_factory=list)  # of each trial that ended as it should not
    not_run: str | None = None  # why it could not be tried here

    @property
    def trials(self) -> int:
        return self.counts.total()

    @property
    def bad(self) -> int:
        return sum(count for outcome, count in self.counts.items() if outcome not in GOOD)

    def add(self, outcome: Outcome, said: str = "", count: int = 1) -> None:
        """Count trials; `said` is kept of those that ended as they should not."""
        self.counts[outcome] += count
        if outcome not in GOOD and len(self.said) < MAX_SAID:
            self.said.append(f"{outcome}: {said}"[:600])

    def merge(self, other: Record) -> None:
        """Add the trials of the same fault in another round."""
        self.counts += other.counts
        self.said = [*self.said, *other.said][:MAX_SAID]
        self.not_run = self.not_run if other.not_run is None else other.not_run

    def as_json(self) -> str:
        """Return it as `from_json` takes it."""
        return json.dumps({name: getattr(self, name) for name in self.__slots__})

    @classmethod
    def from_json(cls, text: str) -> Record:
        """Return what `as_json` was made of."""
        document = json.loads(text)
        counts = Counter({Outcome(name): int(count) for name, count in document["counts"].items()})
        return cls(**{**document, "kind": Kind(document["kind"]), "counts": counts})


def recorded(fault: str, kind: Kind, good: Mapping[Outcome, int], failures: Iterable[str]) -> Record:
    """Make a record of trials that went well, and of messages of those that did not."""
    record = Record(fault=fault, kind=kind, counts=Counter({outcome: count for outcome, count in good.items() if count > 0}))
    for failure in failures:
        record.add(outcome_of(failure), failure)
    return record


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The arguments of a family of faults."""

    seed: int
    is_quick: bool
    folder: Path  # an empty one, for its use

    def of(self, quick: int, full: int) -> int:
        """Choose a number of trials."""
        return quick if self.is_quick else full


def table(records: Iterable[Record]) -> list[list[str]]:
    """Return a header, a line a fault, and a line of totals; a fault that could not be tried says why."""
    outcomes = list(Outcome)
    lines = [["fault", "kind", "trials", *outcomes]]
    total: Counter[Outcome] = Counter()
    for record in records:
        if record.not_run is not None and not record.trials:
            lines.append([record.fault, record.kind, f"not tried: {record.not_run}", *[""] * len(outcomes)])
            continue
        total += record.counts
        lines.append([record.fault, record.kind, str(record.trials), *(str(record.counts[o]) for o in outcomes)])
    lines.append(["all", "", str(total.total()), *(str(total[o]) for o in outcomes)])
    return lines
