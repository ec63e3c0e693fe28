"""The page docs/faults.md: what was tried, what came of it, and what it found in our own code."""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
import sys
from typing import TYPE_CHECKING

from tests.commands import ROOT
from tests.fault.found import FOUND
from tests.fault.record import GOOD, Kind, Outcome, table

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tests.fault.record import Record

PACKAGES = ("lmdb", "msgpack", "numpy", "safetensors", "torch", "diffusers", "pillow", "xxhash")
INTRODUCTION = """\
# Faults tried

Written by `make torture`; do not edit. Each trial ends in one way: *clean error* (an error of ours, and nothing that was
committed is missing), *recovered* (the next run or iteration continued where it ended), *completed* (it went through, and what
it gave is right), or in one of those that must not be. A flipped bit that nothing reads counts as completed, one that is
found as a clean error. An answer that is due is a hang after 10 s; a whole command, which loads a model and packs, after 60 s.
"""
LIMITS = """\
## What no code can help

A file that is truncated under a memory map ends the process that reads it there, by SIGBUS, and so does a disk's
input/output error under it. The loader's map is in its own process with `--service` (a `loader serve`, or `auto`): the trainer
then gets an error at `next()`. With `plain_reads=True` nothing is mapped, sidecars included, and the same is an error
in-process. The trials above are of plain reads, of clients of a service, and, for sidecars, of a process that ends so.
"""


def write_report(path: Path, records: Sequence[Record], *, seed: int, minutes: float, took_s: float) -> None:
    """Write the page."""
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in PACKAGES)
    system = f"{platform.system()} {platform.release()}, Python {platform.python_version()}, {versions}"
    again = f"make torture SEED={seed}" + (f" MINUTES={minutes:g}" if minutes else "")
    totals = ", ".join(
        f"{sum(record.trials for record in records if record.kind is kind)} of the kind *{kind}*" for kind in Kind
    )
    bad = ", ".join(f"{sum(record.counts[o] for record in records)} of *{o}*" for o in Outcome if o not in GOOD)
    lines = [
        INTRODUCTION,
        f"Seed {seed}, {took_s / 60:.0f} minutes, commit {_commit()}, on {system}.",
        "",
        f"Again: `{again}`; one family of faults: `python -m tests.fault.torture --only NAME --seed {seed}`.",
        "",
        f"Tried: {totals}. Came of it: {bad}.",
        "",
        *_as_markdown(table(records)),
        "",
    ]
    if wrong := [f"- {record.fault}: {_in_a_line(said)}" for record in records for said in record.said]:
        lines += ["## What went wrong", "", *wrong, ""]
    lines += [LIMITS, "## What it found in our code", "", "| what was wrong | held by |", "|---|---|"]
    lines += [f"| {what} | `{test}` |" for what, test in FOUND]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


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
