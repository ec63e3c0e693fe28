"""The whole of `ingest pack` on a disk that fails, or is too small: it ends with an error in words, and nothing is lost.

Under the disk shim the disk begins to fail at a drawn moment, as often as not in the last part of the run, where the last
shard is committed and sealed; of several ranks, one rank's disk fails as its last shard is to be sealed. Then the disk is
fixed, the next run adopts what was committed, and must come to its end. Another process packs on file systems in memory
that are too small by less and less.
"""

from __future__ import annotations

import importlib
import os
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tests.commands import call
from tests.constrained import SmallDisk
from tests.fault import noted_pack, ranks_at_moments
from tests.fault.apart import Ended, How, apart
from tests.fault.families import records_of
from tests.fault.ground import COMMAND_S, Ground, ids_of, is_sound, judged
from tests.fault.killed_packs import fault_of
from tests.fault.noted_pack import commit_often, note_commits
from tests.fault.record import GOOD, Asked, Kind, Outcome, Record
from tests.fault.same_store import noted_ids
from tests.fault.shim import FAILURES, NEVER, Operation, Shim, records_under_shim
from tests.models import SMALL, write_images

NUM_IMAGES = 24
LAST_PART = 0.25  # of what a run asks of its disk: the last shard, and what is published
ROOM_BYTES, DISK_BYTES = 1 << 26, 1 << 20  # of the small file system, after and before room is made
COMMITS = {"after every image": True, "with the last shard": False}


def packs_on_failing_disks(asked: Asked) -> Iterator[Record]:
    """Start the processes: one under the shim, and one that has a small disk of its own."""
    yield from records_under_shim("packs_on_disks:under_shim", asked, "a disk that fails under ingest pack")
    small = replace(asked, folder=asked.folder / "small")
    small.folder.mkdir()
    yield from records_of("packs_on_disks:small_disks", small, "a small disk under ingest pack", {})


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A store to be packed on a disk, and what it is packed of."""

    ground: Ground
    photos: Path
    disk: Path

    @property
    def store(self) -> Path:
        return self.disk / "s"

    def begin_anew(self) -> None:
        """Remove what the last trial left."""
        shutil.rmtree(self.store, ignore_errors=True)
        for path in self.notes.parent.glob("s.committed.*"):
            path.unlink()

    @property
    def notes(self) -> Path:
        """Prefix of the names of the files in which ids are noted once their commit has returned; on another disk."""
        return self.ground.folder / "s.committed"

    def asked(self) -> list[str]:
        options = ["--model", str(self.ground.folder / "model"), *SMALL, "--batch-size", "2", "--json"]
        return ["pack", str(self.photos), str(self.store), *options]

    def pack(self, *, commits_often: bool) -> dict[str, Any]:
        """Pack in this process, a forked one; give what came of it."""
        if commits_often:
            commit_often()
        note_commits(f"{self.notes}.0")
        return asdict(call("ingest", *self.asked()))

    def aftermath(self) -> tuple[Outcome, str]:
        """See, once the disk is fixed, that nothing is lost and that the next run comes to its end."""
        self.store.mkdir(exist_ok=True)
        committed = noted_ids(self.notes.with_suffix(""))
        if lost := fault_of(self.store, self.ground.folder / "copy", dict.fromkeys(committed, -1)):
            return Outcome.LOST, lost
        outcome, said = judged(self.ground.packed(self.photos, self.store))
        if outcome is not Outcome.COMPLETED:
            return outcome if outcome not in GOOD else Outcome.DEFECT, f"the next run: {said}"
        if wrong := is_sound(self.store):
            return Outcome.WRONG, wrong
        found, expected = (
            ids_of(self.store),
            sorted(path.relative_to(self.photos).as_posix() for path in self.photos.glob("*/*.png")),
        )
        return (
            (Outcome.RECOVERED, "")
            if found == expected
            else (Outcome.LOST, f"{len(found)} of {len(expected)} images are there")
        )

    def judge(self, ended: Ended, record: Record, what: str) -> None:
        """Count a trial: how the run on the failing disk ended, and what came after it."""
        outcome, said = judged(ended)
        if outcome in GOOD:
            then, words = self.aftermath()
            is_done = then in GOOD and outcome is Outcome.COMPLETED
            outcome, said = (Outcome.COMPLETED, "") if is_done else (then, f"{said} {words}")
        record.add(outcome, f"{what}: {said}")


def prepared(asked: Asked, disk: Path) -> Trial:
    """Write what is packed, and import once what every forked run needs."""
    ground = Ground.prepare(asked)
    importlib.import_module("torch.distributed")
    write_images(asked.folder / "photos", NUM_IMAGES)
    return Trial(ground=ground, photos=asked.folder / "photos", disk=disk)


def counts_of(shim: Shim, trial: Trial, *, commits_often: bool) -> dict[Operation, int]:
    """Count what a run asks of its disk where nothing fails."""

    def work() -> object:
        with shim.failing(Operation.READ, 0, NEVER):
            ran = trial.pack(commits_often=commits_often)
            return ran | {"counts": [shim.count(operation) for operation in Operation]}

    trial.begin_anew()
    ended = apart(work, COMMAND_S)
    if ended.how is not How.DONE or ended.gave["code"] != 0:
        raise RuntimeError(f"nothing failed, and the run did: {ended}")
    return dict(zip(Operation, ended.gave["counts"], strict=True))


def one_process(shim: Shim, trial: Trial, asked: Asked, draw: random.Random) -> Iterator[Record]:
    """Pack on a disk that fails from a drawn moment on."""
    counts = {name: counts_of(shim, trial, commits_often=often) for name, often in COMMITS.items()}
    for name, operation, error in FAILURES:
        record = Record(fault=f"{name}, under ingest pack", kind=Kind.DISK)
        for _ in range(asked.of(1, 25)):
            commits, is_late = draw.choice(list(COMMITS)), draw.random() < 0.5
            most = counts[commits][operation]
            after = draw.randrange(int(most * (1 - LAST_PART)) if is_late else 0, most)

            def work(
                after: int = after, commits: str = commits, operation: Operation = operation, error: int = error
            ) -> object:
                with shim.failing(operation, error, after):
                    return trial.pack(commits_often=COMMITS[commits])

            trial.begin_anew()
            trial.judge(apart(work, COMMAND_S), record, f"after {after} of {most}, commits {commits}")
        yield record


def several_ranks(shim: Shim, trial: Trial, asked: Asked, draw: random.Random) -> Iterator[Record]:
    """Pack with two ranks, of which one's disk fails once only its last shard is to be written and sealed."""
    record = Record(fault="a rank's disk that fails at its last shard", kind=Kind.DISK)
    for _ in range(asked.of(1, 16)):
        rank, after, (name, operation, error) = draw.randrange(2), draw.randrange(12), draw.choice(FAILURES)
        noted_pack.FAILURES["shim"] = arming(shim, operation, error, after)
        trial.begin_anew()
        ran = ranks_at_moments.run(2, f"{rank}:end:shim", trial.asked(), str(trial.notes))
        for name_of in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):  # the next run is one process
            os.environ.pop(name_of, None)
        what, words = f"rank {rank}, {name} after {after}: {ran['codes']}", "".join(ran["err"])
        if None in ran["codes"]:
            record.add(Outcome.HANG, what)
        elif "Traceback" in words or not set(ran["codes"]) <= {0, 1}:
            record.add(Outcome.DEFECT, f"{what}: {words[-300:]}")
        else:
            then, said = trial.aftermath()
            record.add(then, f"{what}: {said}")
    yield record


def arming(shim: Shim, operation: Operation, error: int, after: int) -> Callable[[], object]:
    """Return what has a disk fail from then on."""
    return lambda: shim.arm(operation, error, after)


def small_disks(asked: Asked) -> Iterator[Record]:
    """Pack onto a file system of 1 MiB that has less and less room, then make room."""
    folder = asked.folder / "disk"
    folder.mkdir()
    disk = SmallDisk(folder, ROOM_BYTES)  # before anything begins threads
    trial, draw = prepared(asked, folder), random.Random(asked.seed)
    kind = "a file system of 1 MiB that is nearly full" if disk.is_disk else "files that must not grow beyond a length"
    record = Record(fault=f"{kind}, under ingest pack, then room", kind=Kind.DISK)
    filler = folder / "filler"
    trial.begin_anew()
    whole = apart(lambda: trial.pack(commits_often=False), COMMAND_S)
    if whole.how is not How.DONE or whole.gave["code"] != 0:
        raise RuntimeError(f"there was room, and the run failed: {whole}")
    needed = sum(path.stat().st_blocks * 512 for path in trial.store.rglob("*") if path.is_file())
    least = 1.0 if disk.is_disk else 0.2  # of a disk a shard takes its length twice while it is sealed, of a file's limit once
    for n in range(asked.of(2, 25)):
        trial.begin_anew()
        free = int(needed * least * (1.6 if n == 0 else 1 + 1.2 * draw.random()))
        if disk.is_disk:
            disk.resize(DISK_BYTES)
            filler.write_bytes(bytes(DISK_BYTES - free))
        else:
            disk.resize(free)
        ended = apart(lambda: trial.pack(commits_often=False), COMMAND_S)
        disk.resize(ROOM_BYTES)
        filler.unlink(missing_ok=True)
        trial.judge(ended, record, f"{free >> 10} KiB free")
    yield record


def under_shim(asked: Asked) -> Iterator[Record]:
    """Try everything under the shim."""
    shim, draw, disk = Shim(), random.Random(asked.seed), asked.folder / "disk"
    disk.mkdir()
    shim.watch(disk)
    trial = prepared(asked, disk)
    yield from one_process(shim, trial, asked, draw)
    yield from several_ranks(shim, trial, asked, draw)
