"""What came of the faults that were tried: an outcome for each trial, a record for each fault, and the page docs/faults.md."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import random
import subprocess
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from tests.commands import ROOT

COLUMNS_TOO = ", of a store of columns"
MAX_SAID = 10  # of what went wrong, in one record
TEXT = Path(__file__).with_name("page.md")
ONE = "python -m pytest tests/fault/test_faults.py"
PACKAGES = ("lmdb", "msgpack", "numpy", "safetensors", "torch", "diffusers", "pillow", "xxhash")


class Outcome(StrEnum):
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
    "faults:": Outcome.WRONG,
}


class Wrong(Exception):  # noqa: N818 - it is no error of the tests
    """A trial that ended as it must not. Without an outcome, its words tell which."""

    def __init__(self, said: str, outcome: Outcome | None = None) -> None:
        super().__init__(said)
        found = (outcome for word, outcome in WORDS.items() if word in said)
        self.outcome = outcome or next(found, Outcome.DEFECT)


def expect(is_right: object, said: object, outcome: Outcome | None = None) -> None:
    if not is_right:
        raise Wrong(str(said), outcome)


class Kind(StrEnum):
    """The kind of a fault, as counted in the totals."""

    KILL = "kill"
    FLIP = "flip"
    HOSTILE = "hostile file"
    DISK = "disk fault"
    INPUT = "fuzzed input"
    OTHER = "other"


LEAST = {Kind.KILL: 500, Kind.FLIP: 1000, Kind.HOSTILE: 200, Kind.DISK: 20}


@dataclass(slots=True)
class Record:
    fault: str
    kind: Kind
    counts: Counter[Outcome] = field(default_factory=Counter)
    said: list[str] = field(default_factory=list)  # of each trial that ended as it should not
    not_run: str | None = None  # why it could not be tried here
    family: str = ""

    @property
    def trials(self) -> int:
        return self.counts.total()

    def add(self, outcome: Outcome, said: str = "", count: int = 1) -> None:
        """Count trials; `said` is kept of those that ended as they should not."""
        self.counts[outcome] += count
        if outcome not in GOOD and len(self.said) < MAX_SAID:
            self.said.append(f"{outcome}: {said}"[:600])

    def trial(self, what: object, function: Callable[..., Outcome], *args: Any, **more: Any) -> None:
        """Try once: the function returns a good outcome, or raises `Wrong`; any other exception is a defect."""
        try:
            self.add(function(*args, **more))
        except Wrong as wrong:
            self.add(wrong.outcome, f"{what}: {wrong}")
        except Exception as error:  # noqa: BLE001 - it is what is counted here
            where = traceback.extract_tb(error.__traceback__)[-1]
            self.add(Outcome.DEFECT, f"{what}: {error!r:.400} in {where.name}, {where.filename}:{where.lineno}")

    def merge(self, other: Record) -> None:
        self.counts += other.counts
        self.said = [*self.said, *other.said][:MAX_SAID]
        self.not_run = self.not_run if other.not_run is None else other.not_run

    def as_json(self) -> str:
        return json.dumps({name: getattr(self, name) for name in self.__slots__})

    @classmethod
    def from_json(cls, text: str) -> Record:
        document = json.loads(text)
        counts = Counter({Outcome(name): int(count) for name, count in document["counts"].items()})
        return cls(**{**document, "kind": Kind(document["kind"]), "counts": counts})


def tried(fault: str, kind: Kind, function: Callable[..., Outcome], cases: Iterable[tuple[Any, ...]]) -> Iterator[Record]:
    """Yield the record of a function tried with each case: what it is called, then the function's arguments."""
    record = Record(fault, kind)
    for what, *arguments in cases:
        record.trial(what, function, *arguments)
    yield record


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    seed: int
    is_quick: bool
    folder: Path  # an empty one, for its use
    draw: random.Random  # by the seed

    def of(self, quick: int, full: int) -> int:
        return quick if self.is_quick else full


def table(records: Iterable[Record]) -> list[str]:
    """Return a header, a line a fault, and a line of totals, in Markdown; a fault that could not be tried says why."""
    lines, total = [["fault", "kind", "trials", *Outcome], ["---", "---", *["--:"] * (1 + len(Outcome))]], Counter[Outcome]()
    for record in records:
        if record.not_run is not None and not record.trials:
            lines.append([record.fault, record.kind, f"not tried: {record.not_run}", *[""] * len(Outcome)])
            continue
        total += record.counts
        lines.append([record.fault, record.kind, str(record.trials), *(str(record.counts[o]) for o in Outcome)])
    lines.append(["all", "", str(total.total()), *(str(total[o]) for o in Outcome)])
    return ["| " + " | ".join(line) + " |" for line in lines]


def by_kind(records: Iterable[Record]) -> Counter[Kind]:
    counts = Counter[Kind]()
    for record in records:
        counts[record.kind] += record.trials
    return counts


def shortfalls(records: Iterable[Record]) -> list[str]:
    """Return which kinds of faults were tried less often than they are to be."""
    counts = by_kind(records)
    few = [(counts[kind], kind, least) for kind, least in LEAST.items() if counts[kind] < least]
    return [f"{found} trials of the kind '{kind}', expected {least} or more" for found, kind, least in few]


def by_family(records: Iterable[Record], families: Mapping[str, str]) -> list[str]:
    """Return a table in Markdown with a line for each family that has records, by name and what it tries."""
    lines = [["what was tried", "`-k`", "faults", "trials", *GOOD, "bad"], [*["---"] * 2, *["--:"] * (3 + len(GOOD))]]
    by_name: dict[str, list[Record]] = {}
    for record in records:
        by_name.setdefault(record.family, []).append(record)
    for name, those in by_name.items():
        counts = sum((record.counts for record in those), Counter[Outcome]())
        good = [counts[outcome] for outcome in GOOD]
        numbers = (len(those), counts.total(), *good, counts.total() - sum(good))
        not_run = "".join(f"; not tried, {record.fault}: {record.not_run}" for record in those if record.not_run is not None)
        tries, chosen = (families[name], f"`{name}-`") if name else (those[0].fault, "")
        lines.append([tries + not_run, chosen, *(f"{number:,}" for number in numbers)])
    return ["| " + " | ".join(line) + " |" for line in lines]


def write_page(
    path: Path, records: Sequence[Record], families: Mapping[str, str], *, seed: int, minutes: float, took_s: float
) -> None:
    """Write the text of `page.md`, with what was tried and what came of it; `families` says what each of them tries."""
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in PACKAGES)
    git = ["git", "rev-parse", "--short=12", "HEAD"]
    commit = subprocess.run(git, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip() or "unknown"
    system = f"{platform.system()} {platform.release()}, Python {platform.python_version()}"
    again = f"make torture SEED={seed}" + (f" MINUTES={minutes:g}" if minutes else "")
    counts = by_kind(records)
    bad = [f"{sum(record.counts[o] for record in records)} {o}" for o in Outcome if o not in GOOD]
    paragraphs = [
        f"**{counts.total():,} trials of {len(records)} faults. Bad: {', '.join(bad)}.**",
        f"Trials by kind: {', '.join(f'{counts[kind]:,} {kind}' for kind in Kind)}.",
        f"Seed {seed}, {took_s / 60:.0f} minutes, commit {commit}, on {system}, {versions}.",
        f"Run it again by `{again}`, or one family by `{ONE} --long --seed {seed} -k NAME-`. Both print a line for each fault.",
        "\n".join(by_family(records, families)),
    ]
    if wrong := [f"- {record.fault}: {_in_a_line(said)}" for record in records for said in record.said]:
        paragraphs += ["## What went wrong", "\n".join(wrong)]
    path.write_text(TEXT.read_text(encoding="utf-8").replace("{{tried}}", "\n\n".join(paragraphs)), encoding="utf-8")


def _in_a_line(said: str) -> str:
    """Return what a trial said without line breaks, and without the folders of the machine that it was on."""
    said = said.replace(sys.prefix, "…").replace(str(ROOT), "…")
    return " | ".join(line.strip() for line in said.splitlines())
