"""The page docs/faults.md: the text of `page.md`, with what was tried and what came of it."""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.commands import ROOT
from tests.fault.record import GOOD, Kind, Outcome, Record, table

TEXT = Path(__file__).with_suffix(".md")
TRIED = "{{tried}}"
ONE = "python -m pytest tests/fault/test_faults.py"
PACKAGES = ("lmdb", "msgpack", "numpy", "safetensors", "torch", "diffusers", "pillow", "xxhash")
LEAST = {Kind.KILL: 500, Kind.FLIP: 1000, Kind.HOSTILE: 200, Kind.DISK: 20}


def trials(records: Sequence[Record], kind: Kind) -> int:
    return sum(record.trials for record in records if record.kind is kind)


def shortfalls(records: Sequence[Record]) -> list[str]:
    """Return which kinds of faults were tried less often than they are to be."""
    return [
        f"{found} trials of the kind '{kind}', expected {least} or more"
        for kind, least in LEAST.items()
        if (found := trials(records, kind)) < least
    ]


def write_page(path: Path, records: Sequence[Record], *, seed: int, minutes: float, took_s: float) -> None:
    """Write the page."""
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in PACKAGES)
    system = f"{platform.system()} {platform.release()}, Python {platform.python_version()}, {versions}"
    again = f"make torture SEED={seed}" + (f" MINUTES={minutes:g}" if minutes else "")
    totals = ", ".join(f"{trials(records, kind)} of the kind *{kind}*" for kind in Kind)
    bad = ", ".join(f"{sum(record.counts[o] for record in records)} of *{o}*" for o in Outcome if o not in GOOD)
    lines = [
        f"Seed {seed}, {took_s / 60:.0f} minutes, commit {_commit()}, on {system}.",
        "",
        f"Again: `{again}`; one family of faults: `{ONE} --long --seed {seed} -k NAME-`.",
        "",
        f"Tried: {totals}. Came of it: {bad}.",
        "",
        *_as_markdown(table(records)),
    ]
    if wrong := [f"- {record.fault}: {_in_a_line(said)}" for record in records for said in record.said]:
        lines += ["", "## What went wrong", "", *wrong]
    path.write_text(TEXT.read_text(encoding="utf-8").replace(TRIED, "\n".join(lines)), encoding="utf-8")


def _in_a_line(said: str) -> str:
    """Return what a trial said without line breaks, and without the folders of the machine that it was on."""
    for folder in (sys.prefix, str(ROOT)):
        said = said.replace(folder, "…")
    return " | ".join(line.strip() for line in said.splitlines())


def _as_markdown(lines: list[list[str]]) -> list[str]:
    head, *rest = ["| " + " | ".join(line) + " |" for line in lines]
    return [head, "|---|---" + "|--:" * (len(lines[0]) - 2) + "|", *rest]


def _commit() -> str:
    done = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"
