"""The families of faults, each run in a process of its own, so that a crash and a hang are records like others.

`python -m tests.fault.families MODULE:FUNCTION SEED quick|long FOLDER` is such a process: the function takes `Asked` and yields
records, each of which is printed as soon as it is there. `test_faults.py` runs them all.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

from tests.commands import ROOT
from tests.devices import without_gpus
from tests.fault.record import Asked, Kind, Outcome, Record

MARK = "record: "
ALL = "all of it"
OUTSIDE = "anything written into the home or the working folder, by a family"


class Family(NamedTuple):
    """Faults that are tried in one process."""

    function: str  # MODULE:FUNCTION
    limit_s: float  # of the long form; a quick one has half of it, since it may run next to others


FAMILIES = {
    "packs": Family("killed_packs:killed_packs", 1500),
    "ranks": Family("ended_packs:killed_ranks", 1200),
    "ray": Family("killed_ray:killed_on_ray", 2400),
    "stops": Family("ended_packs:stopped", 900),
    "loader": Family("loader_failures:loader_failures", 1200),
    "flips": Family("bit_flips:flipped_bits", 1500),
    "damage": Family("random_damage:damaged_files", 900),
    "lies": Family("hostile_files:lying_files", 1500),
    "full-disk": Family("full_disk:full_disks", 300),
    "disks": Family("disk_faults:failing_disks", 900),
    "pack-disks": Family("packs_on_disks:packs_on_failing_disks", 1800),
    "dates": Family("dates:odd_dates", 900),
    "away": Family("vanishing_disks:vanishing_disks", 1500),
    "trainer": Family("killed_trainers:trainers", 1200),
    "fuzz": Family("fuzz:fuzzed", 1500),
    "people": Family("people:people", 2400),
    "hostile": Family("hostile_input:hostile_input", 2400),
    "links": Family("linked_stores:linked_stores", 2400),
    "checkpoints": Family("strangers:hostile_checkpoints", 600),
    "floods": Family("strangers:floods", 600),
    "logs": Family("broken_logs:broken_logs", 1200),
    "runs": Family("failing_runs:failing_runs", 1200),
    "power": Family("power_loss:losses", 600),
    "names": Family("changed_at_urls:names_used_again", 900),
    "notes": Family("changed_at_urls:killed_pushes", 900),
    "clocks": Family("changed_at_urls:wrong_clocks", 900),
    "threads": Family("changed_at_urls:threads", 900),
    "server": Family("remote_faults:failing_servers", 1800),
    "server-kills": Family("remote_kills:killed_readers", 1200),
    "copies": Family("copies_in_one_cache:copied_stores", 1200),
    "server-lies": Family("hostile_servers:hostile_servers", 1800),
    "server-disk": Family("full_cache:full_caches", 600),
    "server-rm": Family("removed_caches:removed_caches", 900),
}


def run_family(name: str, seed: int, *, is_quick: bool) -> list[Record]:
    """Run one family, in a home and a working folder that are empty, which it must leave so."""
    with tempfile.TemporaryDirectory(prefix="bucketline-around-", ignore_cleanup_errors=True) as around:
        home, here, caches, folder = (Path(around) / part for part in ("home", "here", "caches", "work"))
        for path in (home, here, caches, folder):
            path.mkdir()
        of_libraries = dict.fromkeys(("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "MPLCONFIGDIR"), str(caches))
        path_of_tests = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(ROOT))))
        environment = {**without_gpus(os.environ), **of_libraries, "HOME": str(home), "PYTHONPATH": path_of_tests}
        function, limit_s = FAMILIES[name]
        asked = Asked(seed=seed, is_quick=is_quick, folder=folder)
        limit_s = limit_s / 2 if is_quick else limit_s
        records = [*records_of(function, asked, f"{name}: {ALL}", environment, cwd=here, limit_s=limit_s)]
        strays = [str(stray.relative_to(around)) for path in (home, here) for stray in path.rglob("*")]
    record = Record(fault=OUTSIDE, kind=Kind.OTHER)
    record.add(Outcome.OUTSIDE if strays else Outcome.COMPLETED, f"{name} left {', '.join(strays[:10])}")
    return [*records, record]


def records_of(
    function: str,
    asked: Asked,
    fault: str,
    environment: Mapping[str, str],
    *,
    cwd: Path = ROOT,
    limit_s: float | None = None,
) -> Iterator[Record]:
    """Run a function in a process of its own and yield its records; one that dies or hangs is a record of `fault`.

    A limit of time makes the process the first of a group, which is killed with it.
    """
    form = "quick" if asked.is_quick else "long"
    command = [sys.executable, "-X", "faulthandler", "-m", "tests.fault.families", function, str(asked.seed), form]
    has_hung = threading.Event()
    with (
        tempfile.TemporaryFile("w+", errors="replace") as said,
        subprocess.Popen(
            [*command, str(asked.folder)],
            cwd=cwd,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=said,
            text=True,
            errors="replace",
            start_new_session=limit_s is not None,
        ) as process,
    ):
        assert process.stdout is not None
        kill = process.kill if limit_s is None else partial(os.killpg, process.pid, signal.SIGKILL)

        def end() -> None:
            has_hung.set()
            kill()

        timer = threading.Timer(limit_s or 0, end)
        try:
            if limit_s is not None:
                timer.start()
            yield from (Record.from_json(line[len(MARK) :]) for line in process.stdout if line.startswith(MARK))
            process.wait()
        finally:
            timer.cancel()
            if process.poll() is None:  # Ctrl-C
                kill()
        said.seek(0)
        err = said.read()[-500:]
    if process.returncode != 0:
        record = Record(fault=fault, kind=Kind.OTHER)
        how = f"had not ended after {limit_s:g} s" if has_hung.is_set() else f"ended with {process.returncode}"
        record.add(Outcome.HANG if has_hung.is_set() else Outcome.CRASH, f"{how}: {err}")
        yield record


def main(function: str, seed: str, form: str, folder: str) -> None:
    """Be the process: print each record as soon as it is there."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's job in the background ignores it, and all below it
    module, _, name = function.partition(":")
    asked = Asked(seed=int(seed), is_quick=form == "quick", folder=Path(folder))
    for record in getattr(import_module(f"tests.fault.{module}"), name)(asked):
        print(MARK + record.as_json(), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
