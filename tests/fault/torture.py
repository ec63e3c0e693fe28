"""Puts every part through its worst day, fault after fault, and writes down what came of each.

`python -m tests.fault.torture --seed 1` runs every family of faults once, each in a process of its own with a limit of time;
`--minutes N` begins new rounds, with other seeds, until N minutes have passed; `--quick` tries a little of each; `--only NAME`
only one family; `--jobs 2` runs two families at a time. A table goes to stdout and, unless it was quick or a part, to
docs/faults.md. Exit 1 where a trial ended as it should not. `--family NAME` is what the processes are told.

Example: python -m tests.fault.torture --seed 1
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from tests.commands import ROOT
from tests.devices import without_gpus
from tests.fault.record import Asked, Kind, Outcome, Record, table
from tests.fault.report import write_report

if TYPE_CHECKING:
    from collections.abc import Iterator

MARK = "record: "
LEAST = {Kind.KILL: 500, Kind.FLIP: 1000, Kind.HOSTILE: 200, Kind.DISK: 20}
ALL = "all of it"
OUTSIDE = "anything written into the home or the working folder, by a family"
_RUNNING: set[int] = set()  # processes of families


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Faults of one kind: `function` in `module` takes `Asked` and gives records, one after the other."""

    module: str
    function: str
    limit_s: float  # of the long run; a quick one has a quarter


FAMILIES = {
    "packs": Family(module="known", function="killed_packs", limit_s=1500),
    "ranks": Family(module="known", function="killed_ranks", limit_s=1200),
    "ray": Family(module="known", function="killed_on_ray", limit_s=2400),
    "stops": Family(module="told_to_stop", function="stopped", limit_s=900),
    "loader": Family(module="known", function="loader_failures", limit_s=1200),
    "flips": Family(module="known", function="flipped_bits", limit_s=1500),
    "damage": Family(module="known", function="damaged_files", limit_s=900),
    "lies": Family(module="known", function="lying_files", limit_s=1500),
    "full-disk": Family(module="known", function="full_disks", limit_s=300),
    "disks": Family(module="disk_faults", function="failing_disks", limit_s=900),
    "pack-disks": Family(module="packs_on_disks", function="packs_on_failing_disks", limit_s=1800),
    "dates": Family(module="dates", function="odd_dates", limit_s=900),
    "away": Family(module="vanishing_disks", function="vanishing_disks", limit_s=1500),
    "trainer": Family(module="killed_trainers", function="trainers", limit_s=1200),
    "fuzz": Family(module="fuzz", function="fuzzed", limit_s=1500),
    "people": Family(module="people", function="people", limit_s=2400),
    "hostile": Family(module="hostile_input", function="hostile_input", limit_s=2400),
    "links": Family(module="linked_stores", function="linked_stores", limit_s=2400),
    "checkpoints": Family(module="strangers", function="hostile_checkpoints", limit_s=600),
    "runs": Family(module="failing_runs", function="failing_runs", limit_s=1200),
    "power": Family(module="power_loss", function="losses", limit_s=600),
    "names": Family(module="changed_at_urls", function="names_used_again", limit_s=900),
    "notes": Family(module="changed_at_urls", function="killed_pushes", limit_s=900),
    "clocks": Family(module="changed_at_urls", function="wrong_clocks", limit_s=900),
    "threads": Family(module="changed_at_urls", function="threads", limit_s=900),
    "server": Family(module="remote_faults", function="failing_servers", limit_s=1800),
    "server-kills": Family(module="remote_kills", function="killed_readers", limit_s=1200),
    "copies": Family(module="copies_in_one_cache", function="copied_stores", limit_s=1200),
    "server-lies": Family(module="hostile_servers", function="hostile_servers", limit_s=1800),
    "server-disk": Family(module="full_cache", function="full_caches", limit_s=600),
}


def run_family(name: str, seed: int, *, is_quick: bool) -> list[Record]:
    """Run one family, in a home and a working folder that are empty, which it must leave so."""
    with tempfile.TemporaryDirectory(prefix="bucketline-around-", ignore_cleanup_errors=True) as around:
        home, here, caches = (Path(around) / part for part in ("home", "here", "caches"))
        for folder in (home, here, caches):
            folder.mkdir()
        of_libraries = dict.fromkeys(("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "MPLCONFIGDIR"), str(caches))
        path = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(ROOT))))
        environment = {**os.environ, **without_gpus(os.environ), **of_libraries, "HOME": str(home), "PYTHONPATH": path}
        records = _run_in(here, environment, name, seed, is_quick)
        strays = [str(stray.relative_to(around)) for folder in (home, here) for stray in folder.rglob("*")]
    record = Record(fault=OUTSIDE, kind=Kind.OTHER)
    record.add(Outcome.OUTSIDE if strays else Outcome.COMPLETED, f"{name} left {', '.join(strays[:10])}")
    return [*records, record]


def _run_in(here: Path, environment: dict[str, str], name: str, seed: int, is_quick: bool) -> list[Record]:  # noqa: FBT001
    """Run one family to its end, or to its limit of time; a process that dies, or hangs, is a record too."""
    family = FAMILIES[name]
    command = [sys.executable, "-X", "faulthandler", "-m", "tests.fault.torture", "--family", name, "--seed", str(seed)]
    limit_s = family.limit_s / 4 if is_quick else family.limit_s
    with subprocess.Popen(
        [*command, *(["--quick"] if is_quick else [])],
        cwd=here,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        _RUNNING.add(process.pid)
        try:
            out, err = process.communicate(timeout=limit_s)
            outcome, said = Outcome.CRASH, f"ended with {process.returncode}: {err[-500:]}"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            out, err = process.communicate()
            outcome, said = Outcome.HANG, f"had not ended after {limit_s:g} s: {err[-500:]}"
        finally:
            _RUNNING.discard(process.pid)
    records = [Record.from_json(json.loads(line[len(MARK) :])) for line in out.splitlines() if line.startswith(MARK)]
    if process.returncode != 0:
        record = Record(fault=f"{name}: {ALL}", kind=Kind.OTHER)
        record.add(outcome, said)
        records.append(record)
    return records


def be_family(name: str, asked: Asked) -> None:
    """Be the process of one family: print each record as soon as it is there."""
    family = FAMILIES[name]
    for record in getattr(import_module(f"tests.fault.{family.module}"), family.function)(asked):
        print(MARK + json.dumps(record.as_json()), flush=True)


def rounds(names: list[str], seed: int, minutes: float, jobs: int, *, is_quick: bool) -> Iterator[Record]:
    """Run families, `jobs` of them at a time, again and again until the minutes have passed, at least once each."""

    def told(name: str) -> list[Record]:
        begun_at = time.monotonic()
        records = run_family(name, seed, is_quick=is_quick)
        lines = [f"{name} took {time.monotonic() - begun_at:.0f} s"]
        for record in records:
            lines += [f"{record.fault}: {record.trials} trials, {record.bad} bad", *(f"  {said}" for said in record.said)]
        print("\n".join(lines), file=sys.stderr, flush=True)
        return records

    begun = time.monotonic()
    while True:
        with ThreadPoolExecutor(jobs) as pool:
            try:
                for records in pool.map(told, names):
                    yield from records
            except BaseException:  # Ctrl-C: what runs is ended, and what waits is not begun
                pool.shutdown(wait=False, cancel_futures=True)
                for pid in list(_RUNNING):
                    with suppress(ProcessLookupError):
                        os.killpg(pid, signal.SIGKILL)
                raise
        seed += 1
        if time.monotonic() - begun >= 60 * minutes:
            return


def shortfalls(records: list[Record]) -> list[str]:
    """Return which kinds of faults were tried less often than they are to be."""
    found = {kind: sum(record.trials for record in records if record.kind is kind) for kind in LEAST}
    return [
        f"{found[kind]} trials of the kind '{kind}', expected {least} or more"
        for kind, least in LEAST.items()
        if found[kind] < least
    ]


def main() -> int:
    """Try the faults, print the table; 1 where a trial ended as it should not, or too few were made."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=0.0, help="continue with new rounds for so long")
    parser.add_argument("--quick", action="store_true", help="a little of everything")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="families at a time, each in a process of its own")
    parser.add_argument("--only", choices=FAMILIES, action="append", help="only these families")
    parser.add_argument("--family", choices=FAMILIES, help=argparse.SUPPRESS)
    told = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's job in the background ignores it, and all below it
    if told.family:
        with tempfile.TemporaryDirectory(prefix="bucketline-torture-") as folder:
            be_family(told.family, Asked(seed=told.seed, is_quick=told.quick, folder=Path(folder)))
        return 0
    by_name: dict[str, Record] = {}
    begun = time.monotonic()
    for record in rounds(told.only or list(FAMILIES), told.seed, told.minutes, told.jobs, is_quick=told.quick):
        if record.fault in by_name:
            by_name[record.fault].merge(record)
        else:
            by_name[record.fault] = record
    records = list(by_name.values())
    lines = table(records)
    widths = [max(len(line[at]) for line in lines if not line[2].startswith("not")) for at in range(len(lines[0]))]
    for line in lines:
        print(
            "  ".join(
                text.ljust(width) if at < 2 else text.rjust(width)
                for at, (text, width) in enumerate(zip(line, widths, strict=True))
            )
        )
    is_whole = not told.quick and not told.only
    missing = shortfalls(records) if is_whole else []
    for record in records:
        print(*(f"{record.fault}: {said}" for said in record.said), sep="\n", end="\n" if record.said else "")
    print(*missing, sep="\n", end="\n" if missing else "")
    if is_whole:
        write_report(
            ROOT / "docs" / "faults.md", records, seed=told.seed, minutes=told.minutes, took_s=time.monotonic() - begun
        )
    return int(bool(missing) or any(record.bad for record in records))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
