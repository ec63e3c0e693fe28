"""Stops packs, by Ctrl-C and by SIGTERM, at random moments, one process and several ranks, and lets them continue.

One store is packed again and again; each run is told to stop, must end within seconds and without a traceback of ours, and
nothing that was committed may be lost. At last it is let finish, and must be what a run that nobody stopped makes. Of several
ranks, a Ctrl-C comes to the process group of their launcher, as from a terminal, and SIGTERM only to the launcher.
"""

from __future__ import annotations

import importlib
import os
import random
import signal
import subprocess
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from tests.fault import killed_ranks, packs_in_a_row
from tests.fault.apart import HANG_S
from tests.fault.known import outcome_of
from tests.fault.noted_pack import be_rank
from tests.fault.record import Kind, Outcome, Record
from tests.fault.same_store import committed_ids, compare, noted_ids
from tests.models import write_images, write_model

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.fault.record import Asked

SIGNALS = (signal.SIGINT, signal.SIGTERM)
NUM_IMAGES = 300
STORE = "stopped"
PRINTED_LONGEST = 2000


class _Told:
    """The outcome of the runs that were told to stop: a record of each signal, and what a run said."""

    def __init__(self, who: str) -> None:
        names = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}
        self.records = {
            number: Record(fault=f"{who} told to stop by {names[number]}, then run again", kind=Kind.KILL) for number in SIGNALS
        }

    def add(self, number: signal.Signals, faults: list[str], *, is_done: bool) -> None:
        """Count a trial, by the first thing that was wrong with it; `is_done`: it had come to its end before it heard."""
        outcome = outcome_of(faults[0]) if faults else Outcome.COMPLETED if is_done else Outcome.RECOVERED
        self.records[number].add(outcome, "; ".join(faults)[:PRINTED_LONGEST])

    def end(self, faults: list[str]) -> Iterator[Record]:
        """Add what was wrong in the end, and give the records."""
        for fault in faults:
            self.records[signal.SIGINT].add(outcome_of(fault), fault[:PRINTED_LONGEST])
        yield from self.records.values()


def lost(store: Path) -> list[str]:
    """Return which of a store's noted commits are missing."""
    missing = set(noted_ids(store)) - committed_ids(store)
    return [f"{len(missing)} committed samples are lost, {min(missing)} among them"] if missing else []


def ended_within(child: int, limit_s: float) -> int | None:
    """Return how a child ended, as an exit code; None where it had to be killed."""
    give_up = time.monotonic() + limit_s
    while time.monotonic() < give_up:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid == child:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def stop_one(number: signal.Signals, goal: int, draw: random.Random, folder: Path, told: _Told) -> None:
    """Start a pack, tell it to stop; see what was wrong."""
    store = folder / STORE
    said = folder / "said"
    child = packs_in_a_row.start(store, folder, said)
    if draw.random() < 0.8:
        packs_in_a_row.wait_for(child, store, goal)
        time.sleep(draw.random() * 0.02)
    else:  # opening, adopting
        time.sleep(draw.random() * 0.2)
    os.kill(child, number)
    code = ended_within(child, HANG_S)
    packs_in_a_row.wait_for_orphans()
    faults = lost(store)
    words = said.read_text(encoding="utf-8", errors="replace")
    if code is None:
        faults.append(f"a pack had not ended {HANG_S:g} s after {number.name}")
    elif code not in (0, -number, 128 + number):  # before it listens, it ends as any process does
        faults.append(f"a pack ended with {code} after {number.name}: {words[-PRINTED_LONGEST:]}")
    if "Traceback" in words:
        faults.append(f"a pack printed a traceback after {number.name}: {words[-PRINTED_LONGEST:]}")
    told.add(number, faults, is_done=code == 0)


def stopped_packs(asked: Asked) -> Iterator[Record]:
    """Stop one pack of one store, again and again."""
    import torch

    torch.set_num_threads(1)
    packs_in_a_row.adopt_orphans()
    for module in packs_in_a_row.MODULES:
        importlib.import_module(module)
    folder, draw, told = asked.folder / "one", random.Random(asked.seed), _Told("a pack")
    write_images(folder / "photos", NUM_IMAGES)
    write_model(folder / "model")
    for n, goal in enumerate(sorted(draw.sample(range(1, NUM_IMAGES - 20), asked.of(2, 30)))):
        stop_one(SIGNALS[n % 2], goal, draw, folder, told)
    stores = (folder / STORE, folder / "whole")
    codes = [ended_within(packs_in_a_row.start(path, folder), packs_in_a_row.LONGEST_S) for path in stores]
    faults = compare(*stores).faults if codes == [0, 0] else [f"packs that were left alone ended with {codes}"]
    yield from told.end(faults)


def stop_ranks(number: signal.Signals, kill: killed_ranks.Kill, folder: Path, told: _Told) -> None:
    """Start a run of several ranks, tell it to stop; see what was wrong."""
    store = folder / STORE
    launcher = killed_ranks.start(kill.num_ranks, folder, store)
    killed_ranks.wait_until(kill, launcher, store)
    if number is signal.SIGINT:
        with suppress(ProcessLookupError):
            os.killpg(launcher.pid, number)
    else:
        launcher.send_signal(number)
    try:
        said = launcher.communicate(timeout=killed_ranks.ENDS_WITHIN_S)[1]
    except subprocess.TimeoutExpired:
        for process in [killed_ranks.process_of(launcher, rank) for rank in range(kill.num_ranks)]:
            if process is not None:
                os.kill(process, signal.SIGKILL)
        launcher.kill()
        launcher.communicate()
        told.add(number, [f"torchrun had not ended {killed_ranks.ENDS_WITHIN_S:g} s after {number.name}"], is_done=False)
        return
    packs_in_a_row.wait_for_orphans()
    faults = lost(store)
    if f"in {be_rank.__name__}" in said:  # torchrun's own is not ours, nor one of a rank that imports
        faults.append(f"a rank printed a traceback after {number.name}: {said[-PRINTED_LONGEST:]}")
    told.add(number, faults, is_done=launcher.returncode == 0)


def stopped_ranks(asked: Asked) -> Iterator[Record]:
    """Stop runs of several ranks."""
    packs_in_a_row.adopt_orphans()
    folder, draw, told = asked.folder / "ranks", random.Random(asked.seed), _Told("a pack of several ranks")
    killed_ranks.write_source(folder)
    for n, goal in enumerate(sorted(draw.sample(range(1, killed_ranks.NUM_IMAGES - 60), asked.of(1, 12)))):
        num_ranks = 2 + n % 2
        is_early = draw.random() < 0.25
        images, seconds = (0, 2.0 + draw.random() * 6.0) if is_early else (goal, draw.random() * 0.02)
        kill = killed_ranks.Kill(num_ranks=num_ranks, rank=draw.randrange(num_ranks), images=images, seconds=seconds)
        stop_ranks(SIGNALS[n % 2], kill, folder, told)
    result = killed_ranks.Result()
    killed_ranks.finish(2, folder, folder / STORE, folder / "whole", result)
    yield from told.end(result.faults)


def stopped(asked: Asked) -> Iterator[Record]:
    """Stop packs of one process, then of several."""
    yield from stopped_packs(asked)
    yield from stopped_ranks(asked)
