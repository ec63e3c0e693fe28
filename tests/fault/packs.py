"""What writes shards, ended at random moments: `kill -9`, Ctrl-C and SIGTERM, of one process or one of several ranks.

Killed once: a run that writes shards as `ingest pack` does (adopt what is left, write and commit, seal, publish) and tells
through a pipe each commit that has returned, or `ingest pack` itself at a step of its work. The store must open and verify; and
so, on a copy, must it once the next run has adopted what is left, with every committed sample as it was.

Ended again and again: packs of one store, with another number of ranks each time. Each must be over within seconds, without a
traceback of ours and with every commit kept. At last one is left to finish; its store must be that of one process that nobody
ended. Of several ranks, under torchrun, one is killed; Ctrl-C comes to their process group, as from a terminal, and SIGTERM
only to the launcher.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bucketline.store import Store
from bucketline.store.format.manifest import MANIFEST
from bucketline.store.write import shard_writer
from bucketline.store.write.publish import LocalTarget, newest_manifest
from tests.commands import ROOT
from tests.fault.apart import HANG_S, Apart
from tests.fault.ground import expect_sound, import_for_packs
from tests.fault.noted_pack import be_rank, ended_within, fork_pack, run_apart
from tests.fault.record import COLUMNS_TOO, Asked, Kind, Outcome, Record, Wrong, expect, tried
from tests.fault.same_store import committed_ids, compare, noted_ids
from tests.kit import COLUMNS, IMAGES, Form, Sample, by_id, make_sample
from tests.models import SMALL, write_images, write_model

BUCKETS = ("train/64x64", "train/8x8", "val/64x64")
KILLS_A_STORE = 8  # then a new one is begun
COMMITS_A_SHARD, SAMPLES_A_COMMIT = 4, 3
MANY = 1000  # shards: the run is killed long before
STEPS = (
    *("commit:{}+", "commit:{}", "row:{}", "compact:1", "compact:1+", "sidecar:1", "sidecar:1+"),
    *("move:1", "move:1+", "move:2+"),  # in shards/, not yet listed, and still pending
    *("publish:2", "manifest:1+", "manifest:2"),  # the generation's own file is there, manifest.json is not
    *("manifest:3+", "manifest:4+"),  # published, and killed before it could say so
)
NUM_IMAGES, NUM_BROKEN = 30, 5
LONGEST_S = 180.0  # of a run until its moment comes
KILLED_BY_TORCHRUN = (
    "forcefully exiting via"  # of a rank that had not ended 30 s after the signal; torchrun's own end takes long, too
)
PRINTED = 2000
NAMES = {signal.SIGKILL: "killed", signal.SIGINT: "told to stop by Ctrl-C", signal.SIGTERM: "told to stop by SIGTERM"}
_PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """Make what a killed process leaves behind (the one that seals) a child of this process."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def wait_for_orphans() -> None:
    with suppress(ChildProcessError):
        while True:
            os.waitpid(-1, 0)


def name_of(run: int, number: int) -> str:
    return f"{run}/{number}.png"


def sample_of(name: str, number: int) -> Sample:
    return make_sample(name, BUCKETS[number % len(BUCKETS)], (f"caption {number % 5}",))


def write_shards(store: Path, run: int, pipe: int, shards: int, form: Form) -> None:
    """Be the run: adopt, then write, seal and publish shard after shard, telling every phase."""

    def tell(phase: str) -> None:
        os.write(pipe, f"{phase} {count}\n".encode())

    shard_writer.COMMIT_BYTES = 1 << 30  # commits are those below
    count = 0
    tell("begin")
    with form.writer(store) as writer:
        for _ in range(shards):
            tell("write")
            for _ in range(COMMITS_A_SHARD):
                form.add(writer, [sample_of(name_of(run, n), n) for n in range(count, count + SAMPLES_A_COMMIT)])
                count += SAMPLES_A_COMMIT
                writer.commit()
                tell("commit")
            tell("seal")
            writer.seal()
            tell("publish")
            writer.publish()


def kill_one(store: Path, run: int, draw: random.Random, form: Form) -> int:
    told = store.with_name("told")
    told.write_bytes(b"")

    def work() -> None:
        os.setpgid(0, 0)
        write_shards(store, run, os.open(told, os.O_WRONLY | os.O_APPEND), MANY, form)

    process, wanted = Apart(work), draw.choice([draw.randrange(1, 5), draw.randrange(3, 60)])
    while told.read_bytes().count(b"\n") < wanted and not process.is_over():
        time.sleep(0.0001)
    time.sleep(draw.choice([0.0, draw.random() * 0.002, draw.random() * 0.03]))
    # half of the time with the process that seals what an earlier run left, if there is one; else that one comes to its end
    (os.kill if draw.random() < 0.5 else os.killpg)(process.pid, signal.SIGKILL)
    ended = process.ended()
    wait_for_orphans()
    expect(ended.signal == signal.SIGKILL, f"a run ended by itself: {ended}")
    return max(int(line.split()[1]) for line in told.read_text(encoding="ascii").splitlines())


def expect_kept(store: Path, copy: Path, committed: dict[str, int], form: Form = IMAGES) -> None:
    """Raise `Wrong` unless what a run left is sound, as it is and, on a copy, once the next run has adopted every commit.

    `committed`: by id the number of a sample, -1 if only the id is known.
    """
    is_there = not committed or (store / MANIFEST).exists()  # else the run ended before there was a store
    expect(is_there, "there is no manifest, and samples are lost")
    shutil.rmtree(copy, ignore_errors=True)
    if store.exists():
        shutil.copytree(store, copy)
    with LocalTarget(copy).writing(newest_manifest(copy) or form.writer(copy)._schema):
        pass  # what a killed writer left is adopted
    for path in (store, copy):
        expect_sound(path)
    found = by_id(Store.open(copy))
    lost = [
        name
        for name, number in committed.items()
        if name not in found or (number >= 0 and not form.is_sample(found[name], sample_of(name, number)))
    ]
    expect(not lost, f"{len(lost)} committed samples are missing, {lost[:1]} among them")


def kill_writers(store: Path, form: Form, draw: random.Random) -> Callable[[int], Outcome]:
    committed: dict[str, int] = {}

    def trial(run: int) -> Outcome:
        if run % KILLS_A_STORE == 0:
            shutil.rmtree(store, ignore_errors=True)
            committed.clear()
        committed.update({name_of(run, number): number for number in range(kill_one(store, run, draw, form))})
        expect_kept(store, store.with_name("copy"), committed, form)
        return Outcome.RECOVERED

    return trial


def asked_of(folder: Path, store: object) -> list[str]:
    return ["pack", *map(str, (folder / "photos", store, "--model", folder / "model", *SMALL, "--batch-size", 3))]


def kill_packs(kills: int, draw: random.Random, folder: Path) -> Iterator[Record]:
    """Kill `ingest pack` at every step, or so many of them; the next run must finish the store."""
    write_images(folder / "photos", NUM_IMAGES)
    write_model(folder / "model")
    steps = [*draw.sample(STEPS, min(kills, len(STEPS))), *draw.choices(STEPS[:3], k=max(0, kills - len(STEPS)))]
    moments = {f"p{n}": step.format(draw.randrange(2, 30)) for n, step in enumerate(steps)}
    asked = [*asked_of(folder, folder / "{}"), "--json"]
    killed = run_apart([f"{name},1,0:{moment}:kill" for name, moment in moments.items()], asked)
    committed = {name: committed_ids(folder / name) for name in moments}
    for name in moments:
        shutil.copytree(folder / name, folder / f"{name}.left")
    finished = run_apart([f"{name},1,-" for name in [*moments, "whole"]], asked)

    def trial(name: str, codes: object, then: dict[str, Any]) -> Outcome:
        expect(codes == [-signal.SIGKILL], f"it ended with {codes}, not killed")
        expect_kept(folder / f"{name}.left", folder / "copy", dict.fromkeys(committed[name], -1))
        expect(then["codes"] == [0], f"the next run: {then}")
        report, num_kept = json.loads(then["out"][0]), len(committed[name])
        counts = [report[what] for what in ("found", "unchanged", "packed", "rejected")]
        expected = [NUM_IMAGES, num_kept, NUM_IMAGES - num_kept, 0]
        expect(counts == expected, f"found, unchanged, packed, rejected: {counts}, expected {expected}: packed twice, or lost")
        faults = compare(folder / name, folder / "whole").faults
        expect(not faults, faults[:1])
        left = {path.name for path in (folder / name).rglob("*") if path.parent.name == "pending" or path.suffix == ".tmp"}
        expect(left <= {"writer.lock"}, f"left behind: {left}")
        return Outcome.RECOVERED

    cases = [
        (moment, name, run["codes"], then)
        for (name, moment), run, then in zip(moments.items(), killed, finished[:-1], strict=True)
    ]
    yield from tried("ingest pack killed", Kind.KILL, trial, cases)


def killed_writers_and_packs(asked: Asked) -> Iterator[Record]:
    adopt_orphans()
    for words, form, kills in (("", IMAGES, asked.of(8, 400)), (COLUMNS_TOO, COLUMNS, asked.of(8, 200))):
        trial = kill_writers(asked.folder / "s", form, asked.draw)
        yield from tried(f"writer of shards killed{words}", Kind.KILL, trial, [(run, run) for run in range(kills)])
    yield from kill_packs(asked.of(6, 40), asked.draw, asked.folder)
    yield from ended_again_and_again(asked, KILLED, asked.of(2, 30), "row")


class OneProcess:
    def __init__(self, folder: Path, store: Path) -> None:
        self.folder, self.store = folder, store
        self._process = fork_pack(asked_of(folder, store), f"{store}.committed")

    def is_over(self) -> bool:
        return self._process.is_over()

    def wait_for(self, num_committed: int, longest_s: float = LONGEST_S) -> None:
        """Wait until so many samples are committed, so long has passed, or it has ended."""
        give_up = time.monotonic() + longest_s
        while len(noted_ids(self.store)) < num_committed and not self.is_over() and time.monotonic() < give_up:
            time.sleep(0.001)

    def finished(self) -> tuple[int | None, str]:
        """Let it come to its end; return its exit code and what it said."""
        code, *said = ended_within(self._process, LONGEST_S)
        return code, "".join(said)

    def end(self, number: signal.Signals) -> int:
        """Send a signal and wait; return the exit code, or raise `Wrong` if it did not end as it should."""
        self._process.kill(number)
        code, *said = ended_within(self._process, HANG_S)
        words = "".join(said)[-PRINTED:]
        if code is None:
            raise Wrong(f"a pack had not ended {HANG_S:g} s after {number.name}")
        expect(code in (0, -number, 128 + number), f"it ended with {code}: {words}")  # before it listens, as any process does
        expect("Traceback" not in words, f"a traceback: {words}")
        return code


class Ranks(OneProcess):
    def __init__(self, folder: Path, store: Path, num_ranks: int, rank: int) -> None:
        self.folder, self.store, self._num_ranks, self._rank = folder, store, num_ranks, rank
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(num_ranks)]
        kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
        self._launcher = subprocess.Popen(
            [*launcher, "-m", "tests.fault.noted_pack", f"{store}.committed", "-", "--", *asked_of(folder, store)],
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
        while self._process_of(self._rank) is None and not self.is_over() and time.monotonic() < give_up:
            time.sleep(0.001)
        super().wait_for(num_committed, longest_s)

    def finished(self) -> tuple[int | None, str]:
        said = self._launcher.communicate()[1]
        return self._launcher.returncode, said

    def end(self, number: signal.Signals) -> int:
        process, is_kill = self._process_of(self._rank), number is signal.SIGKILL
        if is_kill and process is None:
            self._launcher.kill()
            raise Wrong(f"the run ended by itself: {self._launcher.communicate()[1][-PRINTED:]}")
        with suppress(ProcessLookupError):
            if number is signal.SIGINT:
                os.killpg(self._launcher.pid, number)
            else:
                os.kill(process if is_kill and process else self._launcher.pid, number)
        try:
            said = self._launcher.communicate(timeout=LONGEST_S)[1]
        except subprocess.TimeoutExpired:
            for left in [*filter(None, map(self._process_of, range(self._num_ranks))), self._launcher.pid]:
                os.kill(left, signal.SIGKILL)
            self._launcher.communicate()
            raise Wrong(f"torchrun had not ended {LONGEST_S:g} s later") from None
        code, words = self._launcher.returncode, said[-PRINTED:]
        expect(KILLED_BY_TORCHRUN not in said, f"a rank had not ended 30 s after {number.name}: {words}")
        if not is_kill:  # torchrun's own traceback is not ours, nor one of a rank that imports
            expect(f"in {be_rank.__name__}" not in said, f"a rank printed a traceback: {words}")
            return code
        is_named = f"error: rank {self._rank} (pid {process} on" in said
        # torchrun looks every 0.1 s and ends the others: that may be before they have met it
        expect(is_named or f"local_rank: {self._rank} (pid: {process})" in said, f"nobody named rank {self._rank}: {words}")
        is_quiet = not (is_named and "Traceback" in said.partition("error: ")[0])
        expect(code == 1 and is_quiet, f"torchrun ended with {code} after rank {self._rank} was killed, and said {words}")
        return code

    def _process_of(self, rank: int) -> int | None:
        with suppress(FileNotFoundError, ProcessLookupError):
            tasks = Path(f"/proc/{self._launcher.pid}/task/{self._launcher.pid}/children")
            for child in tasks.read_text(encoding="ascii").split():
                if f"RANK={rank}".encode() in Path(f"/proc/{child}/environ").read_bytes().split(b"\0"):
                    return int(child)
        return None


@dataclass(frozen=True, slots=True)
class Plan:
    """The runs of one store that are ended: how, of how many images, and with how many ranks in turn."""

    who: str
    signals: tuple[signal.Signals, ...]
    num_images: int
    early: tuple[float, float, float]  # of a share of the runs: ended so many seconds, between two, after it began
    ranks: tuple[int, ...] = ()  # none: one process, without a launcher

    def run(self, n: int, folder: Path, store: Path, draw: random.Random) -> OneProcess:
        if not self.ranks:
            return OneProcess(folder, store)
        num_ranks = self.ranks[n % len(self.ranks)]
        return Ranks(folder, store, num_ranks, draw.randrange(num_ranks))


STOPS = (signal.SIGINT, signal.SIGTERM)
KILLED = Plan("one ingest pack {} again and again, and finished", (signal.SIGKILL,), 200, (0.2, 0, 0.5))
STOPPED = Plan("a pack {}, then run again", STOPS, 300, (0.2, 0, 0.2))
RANKS_STOPPED = Plan("a pack of several ranks {}, then run again", STOPS, 360, (0.25, 2, 8), (2, 3))
RANK_KILLED = Plan("one rank of several {}", (signal.SIGKILL,), 360, (0.25, 0, 8), (2, 1, 3))


def ended_again_and_again(asked: Asked, whole: Plan, trials: int, name: str) -> Iterator[Record]:
    """End a plan's runs so often; quickly: of a third of its images."""
    plan = replace(whole, num_images=asked.of(whole.num_images // 3, whole.num_images))
    folder, draw = asked.folder / name, asked.draw
    adopt_orphans()
    if not plan.ranks:
        import_for_packs()
    write_model(folder / "model")
    write_images(folder / "photos", plan.num_images)
    for number in range(NUM_BROKEN):
        (folder / "photos" / f"{number}.png").write_bytes(b'{"no": "image"}' * number)
    records = {number: Record(plan.who.format(NAMES[number]), Kind.KILL) for number in plan.signals}
    store, (share, first_s, last_s) = folder / "ended", plan.early

    def trial(n: int, goal: int, number: signal.Signals) -> Outcome:
        run = plan.run(n, folder, store, draw)
        if draw.random() < share:  # while it loads, meets the others, adopts
            run.wait_for(0)
            run.wait_for(goal, draw.uniform(first_s, last_s))  # no further: it is not to finish
        else:
            run.wait_for(goal)
            time.sleep(draw.random() * 0.02)
        try:
            code = run.end(number)
        finally:
            wait_for_orphans()
        lost = set(noted_ids(store)) - committed_ids(store)
        expect(not lost, f"{len(lost)} committed samples are lost, {sorted(lost)[:1]} among them")
        return Outcome.RECOVERED if code else Outcome.COMPLETED

    def finish() -> Outcome:
        for path, run in ((store, plan.run(trials, folder, store, draw)), (folder / "whole", None)):
            code, said = (run or OneProcess(folder, path)).finished()
            expect(code == 0, f"a pack that was left alone ended with {code}: {said[-PRINTED:]}")
        faults = compare(store, folder / "whole").faults
        expect(not faults, faults[:1])
        rejects = [(path / "rejects.jsonl").read_text(encoding="ascii") for path in (store, folder / "whole")]
        is_same = rejects[0] == rejects[1] and len(rejects[0].splitlines()) == NUM_BROKEN
        expect(is_same, f"the rejects are {rejects[0]}, expected {rejects[1]}")
        return Outcome.COMPLETED

    for n, goal in enumerate(sorted(draw.sample(range(1, plan.num_images - max(40, plan.num_images // 6)), trials))):
        number = plan.signals[n % len(plan.signals)]
        records[number].trial(f"{NAMES[number]} after {goal} images", trial, n, goal, number)
    records[plan.signals[0]].trial("finished", finish)
    yield from records.values()


def killed_ranks(asked: Asked) -> Iterator[Record]:
    yield from ended_again_and_again(asked, RANK_KILLED, asked.of(1, 18), "ranks")


def stopped(asked: Asked) -> Iterator[Record]:
    for name, plan, trials in (("one", STOPPED, asked.of(2, 30)), ("ranks", RANKS_STOPPED, asked.of(1, 12))):
        yield from ended_again_and_again(asked, plan, trials, name)
