"""The families of faults, each run in a process of its own, so that a crash and a hang are records like others.

`python -m tests.fault.families MODULE:FUNCTION SEED quick|long FOLDER` is such a process: the function takes `Asked` and yields
records, each of which is printed as soon as it is there. `test_faults.py` runs them all.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib import import_module
from pathlib import Path

from tests.commands import ROOT
from tests.devices import without_gpus
from tests.fault.record import Asked, Kind, Outcome, Record

MARK = "record: "
OUTSIDE = "anything written into the home or the working folder, by a family"
FAMILIES = {  # MODULE:FUNCTION, the limit in seconds of the long form (half for a quick one), and what it tries
    "packs": ("packs:killed_writers_and_packs", 1500, "packs and writers of shards killed"),
    "ranks": ("packs:killed_ranks", 1200, "one rank of a pack killed"),
    "ray": ("ray_packs:killed_on_ray", 2400, "a worker or the driver of a pack on Ray killed"),
    "stops": ("packs:stopped", 900, "packs told to stop by Ctrl-C or SIGTERM"),
    "loader": ("loaders:loader_failures", 1200, "files that change under a loader, its threads and services ended"),
    "flips": ("damage:flipped_bits", 1500, "a bit flipped in each kind of a store's files"),
    "damage": ("damage:damaged_files", 900, "damaged stores repaired and packed again"),
    "lies": ("damage:lying_files", 1500, "files that lie, with right checksums"),
    "disks": ("disks:failing_disks", 900, "stores written and read on a failing disk"),
    "pack-disks": ("disks:packs_on_failing_disks", 1800, "packs on a failing disk"),
    "dates": ("people:odd_dates", 900, "images and tars of odd dates"),
    "away": ("disks:vanishing_disks", 1500, "a source whose disk goes away"),
    "trainer": ("trainers:trainers", 1200, "a trainer killed, then resumed"),
    "fuzz": ("fuzz:fuzzed", 1500, "parsers given changed files"),
    "people": ("people:people", 2400, "what people do: two packs at once, moved stores, wrong paths"),
    "hostile": ("hostile:hostile_input", 2400, "hostile sources: tars, pickles, bombs, links"),
    "links": ("hostile:linked_stores", 2400, "links, pipes and devices under a store's names"),
    "checkpoints": ("trainers:hostile_checkpoints", 600, "checkpoints that are damaged or lie"),
    "floods": ("loaders:floods", 600, "strangers at a service's socket and port"),
    "logs": ("trainers:broken_logs", 1200, "a log that cannot be written"),
    "runs": ("disks:failing_runs", 1200, "runs on a failing disk, or with the clock set back"),
    "power": ("shim:losses", 600, "power loss while a store is written"),
    "names": ("changed_at_urls:names_used_again", 900, "names of shards used again at a URL"),
    "notes": ("changed_at_urls:killed_pushes", 900, "a push to a URL killed"),
    "clocks": ("changed_at_urls:wrong_clocks", 900, "a server's clock two days off"),
    "threads": ("changed_at_urls:threads", 900, "a writer shared by threads and forked children"),
    "server": ("remote:failing_servers", 1800, "a server that fails, stalls or answers wrongly"),
    "server-kills": ("remote:killed_readers", 1200, "readers from a server killed"),
    "copies": ("remote:copied_stores", 1200, "diverged copies of a store in one cache"),
    "server-lies": ("remote:hostile_servers", 1800, "a web server or bucket that lies"),
    "server-disk": ("remote:full_caches", 600, "a cache on a full disk"),
    "server-rm": ("remote:removed_caches", 900, "a cache removed under its readers"),
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
        function, limit_s, _ = FAMILIES[name]
        asked = Asked(seed=seed, is_quick=is_quick, folder=folder, draw=random.Random(seed))
        records = [
            *records_of(
                function, asked, f"{name}: all of it", environment, cwd=here, limit_s=limit_s / 2 if is_quick else limit_s
            )
        ]
        strays = [str(stray.relative_to(around)) for path in (home, here) for stray in path.rglob("*")]
    record = Record(OUTSIDE, Kind.OTHER)
    record.add(Outcome.OUTSIDE if strays else Outcome.COMPLETED, f"{name} left {', '.join(strays[:10])}")
    return [*records, record]


def records_of(
    function: str, asked: Asked, fault: str, environment: Mapping[str, str], *, cwd: Path = ROOT, limit_s: float | None = None
) -> Iterator[Record]:
    """Run a function in a process of its own and yield its records; one that dies or hangs is a record of `fault`.

    A limit of time makes the process the first of a group, which is killed with it.
    """
    form = "quick" if asked.is_quick else "long"
    command = [sys.executable, "-X", "faulthandler", "-m", "tests.fault.families", function, str(asked.seed), form]
    with tempfile.TemporaryFile("w+", errors="replace") as out, tempfile.TemporaryFile("w+", errors="replace") as err:
        process = subprocess.Popen(
            [*command, str(asked.folder)],
            cwd=cwd,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=limit_s is not None,
        )
        try:
            with suppress(subprocess.TimeoutExpired):
                process.wait(limit_s)
        finally:
            if has_hung := process.poll() is None:  # or Ctrl-C
                process.kill() if limit_s is None else os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        out.seek(0)
        yield from (Record.from_json(line.removeprefix(MARK)) for line in out if line.startswith(MARK))
        if process.returncode:
            err.seek(0)
            how = f"had not ended after {limit_s:g} s" if has_hung else f"ended with {process.returncode}"
            record = Record(fault, Kind.OTHER)
            record.add(Outcome.HANG if has_hung else Outcome.CRASH, f"{how}: {err.read()[-500:]}")
            yield record


def main(function: str, seed: str, form: str, folder: str) -> None:
    """Be the process: print each record as soon as it is there."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's job in the background ignores it, and all below it
    module, _, name = function.partition(":")
    asked = Asked(seed=int(seed), is_quick=form == "quick", folder=Path(folder), draw=random.Random(int(seed)))
    for record in getattr(import_module(f"tests.fault.{module}"), name)(asked):
        print(MARK + record.as_json(), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
