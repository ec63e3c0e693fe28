"""Ends packs at random moments, `kill -9`, Ctrl-C and SIGTERM, one process or several ranks, and lets the next run continue.

One store is packed again and again, with another number of ranks each time; each run is ended, must be over within seconds
and without a traceback of ours, and nothing that was committed may be lost. At last a run is left to finish, and the store
must be that of one process that nobody ended: the same ids, each once, the same buckets, latents and rejects. Of several
ranks, under torchrun, one is killed; a Ctrl-C comes to the process group of their launcher, as from a terminal, and SIGTERM
only to the launcher.
"""

from __future__ import annotations

import ctypes
import os
import random
import signal
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tests.commands import ROOT
from tests.fault.apart import HANG_S
from tests.fault.ground import import_for_packs
from tests.fault.noted_pack import be_rank, ended_within, fork_pack
from tests.fault.record import Asked, Kind, Outcome, Record, outcome_of
from tests.fault.same_store import committed_ids, compare, noted_ids
from tests.models import SMALL, write_images, write_model

NUM_BROKEN = 5
LONGEST_S = 180.0  # of a run until its moment comes
RANKS_END_WITHIN_S = 25.0  # torchrun kills what is left after 30 s; that would not be by itself
PRINTED_LONGEST = 2000
NAMES = {signal.SIGKILL: "killed", signal.SIGINT: "told to stop by Ctrl-C", signal.SIGTERM: "told to stop by SIGTERM"}
_PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """Make what a killed process leaves behind (the one that seals) a child of this process."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def wait_for_orphans() -> None:
    """Wait until what killed processes left behind has come to its end."""
    while True:
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


class Run(ABC):
    """A pack under way."""

    def __init__(self, folder: Path, store: Path) -> None:
        """Begin it."""
        self.folder, self.store = folder, store
        self.asked = ["pack", str(folder / "photos"), str(store), "--model", str(folder / "model"), *SMALL, "--batch-size", "3"]

    @abstractmethod
    def is_over(self) -> bool: ...

    @abstractmethod
    def end(self, number: signal.Signals) -> tuple[int | None, list[str]]:
        """Send a signal and wait; return its exit code, None if it did not end in time, and what was wrong."""

    @abstractmethod
    def finished(self) -> tuple[int | None, str]:
        """Let it come to its end; return its exit code and what it said."""

    def wait_for(self, num_committed: int, longest_s: float = LONGEST_S) -> None:
        """Wait until so many samples are committed, so long has passed, or it has ended."""
        give_up = time.monotonic() + longest_s
        while len(noted_ids(self.store)) < num_committed and not self.is_over() and time.monotonic() < give_up:
            os.sched_yield()


class OneProcess(Run):
    """A forked pack."""

    def __init__(self, folder: Path, store: Path) -> None:
        """Begin it."""
        super().__init__(folder, store)
        self._child = fork_pack(self.asked, f"{store}.committed", folder / "said")

    def is_over(self) -> bool:
        return os.waitid(os.P_PID, self._child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def finished(self) -> tuple[int | None, str]:
        return ended_within(self._child, LONGEST_S), self._said()

    def end(self, number: signal.Signals) -> tuple[int | None, list[str]]:
        os.kill(self._child, number)
        code, words = ended_within(self._child, HANG_S), self._said()
        faults = []
        if code is None:
            faults.append(f"a pack had not ended {HANG_S:g} s after {number.name}")
        elif code not in (0, -number, 128 + number):  # before it listens, it ends as any process does
            faults.append(f"a pack ended with {code} after {number.name}: {words[-PRINTED_LONGEST:]}")
        if "Traceback" in words:
            faults.append(f"a pack printed a traceback after {number.name}: {words[-PRINTED_LONGEST:]}")
        return code, faults

    def _said(self) -> str:
        return "".join(
            Path(f"{self.folder}/said.{end}").read_text(encoding="utf-8", errors="replace") for end in ("out", "err")
        )


class Ranks(Run):
    """Several ranks under torchrun, one of which is to be killed."""

    def __init__(self, folder: Path, store: Path, num_ranks: int, rank: int) -> None:
        """Begin them."""
        super().__init__(folder, store)
        self._num_ranks, self._rank = num_ranks, rank
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(num_ranks)]
        kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
        self._launcher = subprocess.Popen(
            [*launcher, "-m", "tests.fault.noted_pack", f"{store}.committed", "-", *self.asked],
            cwd=ROOT,
            env={**kept, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def is_over(self) -> bool:
        return self._launcher.poll() is not None

    def wait_for(self, num_committed: int, longest_s: float = LONGEST_S) -> None:
        give_up = time.monotonic() + LONGEST_S
        while self._process(self._rank) is None and not self.is_over() and time.monotonic() < give_up:
            os.sched_yield()
        super().wait_for(num_committed, longest_s)

    def finished(self) -> tuple[int | None, str]:
        said = self._launcher.communicate()[1]
        return self._launcher.returncode, said

    def end(self, number: signal.Signals) -> tuple[int | None, list[str]]:
        process = self._process(self._rank)
        what = f"{NAMES[number]}, rank {self._rank} of {self._num_ranks}"
        if number is signal.SIGKILL and process is None:
            self._launcher.kill()
            return None, [f"{what}: the run had ended by itself: {self._launcher.communicate()[1][-PRINTED_LONGEST:]}"]
        with suppress(ProcessLookupError):
            if number is signal.SIGINT:
                os.killpg(self._launcher.pid, number)
            else:
                os.kill(process if number is signal.SIGKILL and process else self._launcher.pid, number)
        try:
            said = self._launcher.communicate(timeout=RANKS_END_WITHIN_S)[1]
        except subprocess.TimeoutExpired:
            for left in [*filter(None, map(self._process, range(self._num_ranks))), self._launcher.pid]:
                os.kill(left, signal.SIGKILL)
            self._launcher.communicate()
            return None, [f"{what}: torchrun had not ended {RANKS_END_WITHIN_S:g} s later"]
        return self._launcher.returncode, [*self._faults(number, process, said)]

    def _faults(self, number: signal.Signals, process: int | None, said: str) -> Iterator[str]:
        """Describe what is wrong with how they ended: of one that was killed, the others or torchrun must have named it."""
        code, words = self._launcher.returncode, said[-PRINTED_LONGEST:]
        if number is not signal.SIGKILL:
            if f"in {be_rank.__name__}" in said:  # torchrun's own is not ours, nor one of a rank that imports
                yield f"a rank printed a traceback after {number.name}: {words}"
            return
        is_named = f"error: rank {self._rank} (pid {process} on" in said
        # torchrun looks every 0.1 s and ends the others: that may be before they have met it
        if not is_named and f"local_rank: {self._rank} (pid: {process})" not in said:
            yield f"nobody named rank {self._rank} of {self._num_ranks}, which was killed: {words}"
        if code != 1 or (is_named and "Traceback" in said.partition("error: ")[0]):
            yield f"torchrun ended with {code} after rank {self._rank} was killed, and said {words}"

    def _process(self, rank: int) -> int | None:
        """Find a rank among the launcher's children, by its environment."""
        with suppress(FileNotFoundError, ProcessLookupError):
            tasks = Path(f"/proc/{self._launcher.pid}/task/{self._launcher.pid}/children")
            for child in tasks.read_text(encoding="ascii").split():
                if f"RANK={rank}".encode() in Path(f"/proc/{child}/environ").read_bytes().split(b"\0"):
                    return int(child)
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The runs of one store that are ended: how, of how many images, with how many ranks in turn, and at what moments."""

    who: str
    signals: Sequence[signal.Signals]
    num_images: int
    ranks: Sequence[int] = ()  # none: one process, without a launcher
    early: tuple[float, float, float]  # of a share of the runs: ended so many seconds, between two, after it began

    def run(self, n: int, folder: Path, store: Path, draw: random.Random) -> Run:
        if not self.ranks:
            return OneProcess(folder, store)
        num_ranks = self.ranks[n % len(self.ranks)]
        return Ranks(folder, store, num_ranks, draw.randrange(num_ranks))


def ended_again_and_again(plan: Plan, trials: int, folder: Path, draw: random.Random) -> Iterator[Record]:
    """End packs of one store, then let one finish, and compare."""
    adopt_orphans()
    if not plan.ranks:
        import_for_packs()
    write_model(folder / "model")
    write_images(folder / "photos", plan.num_images)
    for number in range(NUM_BROKEN):
        (folder / "photos" / f"{number}.png").write_bytes(b'{"no": "image"}' * number)
    records = {number: Record(fault=plan.who.format(NAMES[number]), kind=Kind.KILL) for number in plan.signals}
    store, (share, first_s, last_s) = folder / "ended", plan.early
    for n, goal in enumerate(sorted(draw.sample(range(1, plan.num_images - max(20, plan.num_images // 6)), trials))):
        number = plan.signals[n % len(plan.signals)]
        run = plan.run(n, folder, store, draw)
        if draw.random() < share:  # while it loads, meets the others, adopts
            run.wait_for(0)
            run.wait_for(goal, draw.uniform(first_s, last_s))  # no further: it is not to finish
        else:
            run.wait_for(goal)
            time.sleep(draw.random() * 0.02)
        code, faults = run.end(number)
        wait_for_orphans()
        if missing := set(noted_ids(store)) - committed_ids(store):
            faults.append(f"{len(missing)} committed samples are lost, {min(missing)} among them")
        outcome = outcome_of(faults[0]) if faults else Outcome.COMPLETED if code == 0 else Outcome.RECOVERED
        records[number].add(outcome, "; ".join(faults))
    for fault in _faults_of_the_finished(plan.run(trials, folder, store, draw), folder):
        records[plan.signals[0]].add(outcome_of(fault), fault)
    yield from records.values()


def _faults_of_the_finished(run: Run, folder: Path) -> Iterator[str]:
    """Let a run finish, and pack another store in one process that nobody ends; describe in what they differ."""
    whole = folder / "whole"
    code, said = run.finished()
    if code == 0:
        code, said = OneProcess(folder, whole).finished()
    if code != 0:
        yield f"a pack that was left alone ended with {code}: {said[-PRINTED_LONGEST:]}"
        return
    yield from compare(run.store, whole).faults
    rejects = [(path / "rejects.jsonl").read_text(encoding="ascii") for path in (run.store, whole)]
    if rejects[0] != rejects[1] or len(rejects[0].splitlines()) != NUM_BROKEN:
        yield f"the rejects are {rejects[0]}, expected {rejects[1]}"


KILLED = Plan(
    who="one ingest pack {} again and again, and finished", signals=(signal.SIGKILL,), num_images=200, early=(0.2, 0, 0.5)
)
STOPS = (signal.SIGINT, signal.SIGTERM)
STOPPED = Plan(who="a pack {}, then run again", signals=STOPS, num_images=300, early=(0.2, 0, 0.2))
RANKS_STOPPED = Plan(
    who="a pack of several ranks {}, then run again", signals=STOPS, num_images=360, ranks=(2, 3), early=(0.25, 2, 8)
)
RANK_KILLED = Plan(who="one rank of several {}", signals=(signal.SIGKILL,), num_images=360, ranks=(2, 3, 1), early=(0.25, 0, 8))


def killed_ranks(asked: Asked) -> Iterator[Record]:
    """`kill -9` of one rank of several under torchrun."""
    yield from ended_again_and_again(RANK_KILLED, asked.of(1, 18), asked.folder, random.Random(asked.seed))


def stopped(asked: Asked) -> Iterator[Record]:
    """Stop packs of one process, then of several."""
    for name, plan, trials in (("one", STOPPED, asked.of(2, 30)), ("ranks", RANKS_STOPPED, asked.of(2, 12))):
        yield from ended_again_and_again(plan, trials, asked.folder / name, random.Random(asked.seed))
