"""A disk that fails under a trainer's run folder and under a source, and a clock that is set back. Run under the disk shim.

A trainer whose checkpoint, metrics or status cannot be written ends with an error of ours; on a fixed disk it resumes, and its
losses are those of a run on a sound disk. A source that cannot be read is rejects or an error, and never a sample that is not
what its file is. A store that was begun when the clock was years ahead continues after it was set back.
"""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

from tests.commands import call
from tests.fault import killed_trainers
from tests.fault.apart import Apart, How, apart
from tests.fault.disk_faults import writing
from tests.fault.full_disk import SAMPLES, attempt
from tests.fault.ground import COMMAND_S, Ground, ids_of, is_sound, judged
from tests.fault.record import GOOD, Asked, Kind, Outcome, Record
from tests.fault.shim import FAILURES, NEVER, Operation, Shim, records_under_shim
from tests.models import SMALL, write_images

YEARS_S = 10 * 365 * 24 * 3600


def failing_runs(asked: Asked) -> Iterator[Record]:
    """Start the process that runs under the shim."""
    yield from records_under_shim("failing_runs:under_shim", asked, "a disk that fails under a run")


def clock_set_back(shim: Shim, folder: Path, draw: random.Random, trials: int) -> Record:
    """A store is begun years ahead, is interrupted, and continued years before."""
    record = Record(fault="the clock set back twenty years between two runs", kind=Kind.OTHER)
    shim.watch(folder)
    for _ in range(trials):
        store = folder / "s"
        shutil.rmtree(store, ignore_errors=True)

        def ahead(store: Path = store, after: int = draw.randrange(20, 60)) -> object:
            shim.shift_clock(YEARS_S)
            return writing(shim, store, (Operation.WRITE, errno.ENOSPC, after))()

        def behind(store: Path = store) -> None:
            shim.shift_clock(-YEARS_S)
            attempt(store, [], ["lock"])

        first, then = apart(ahead), apart(behind)
        bad = next((ended for ended in (first, then) if ended.outcome not in GOOD), None)
        if bad is not None or then.how is not How.DONE:
            record.add(Outcome.DEFECT if bad is None else bad.outcome, (bad or then).said)
        elif (wrong := is_sound(store)) or ids_of(store) != sorted(sample.id for sample in SAMPLES):
            record.add(Outcome.LOST, wrong or "not every sample is there")
        else:
            record.add(Outcome.RECOVERED)
    return record


def trainers(shim: Shim, folder: Path, draw: random.Random, trials: int) -> Iterator[Record]:
    """A trainer whose run folder is on a disk that begins to fail."""
    killed_trainers.prepare(folder)
    output = folder / "run"

    def failing(operation: Operation, error: int, after: int) -> Callable[[], object]:
        def work() -> object:
            with shim.failing(operation, error, after):
                return killed_trainers.train_in(folder, output, resume=False), shim.count(operation)

        return work

    for name, operation, error in FAILURES:
        record = Record(fault=f"{name}, under a trainer's run folder", kind=Kind.DISK)
        shutil.rmtree(output, ignore_errors=True)
        shim.watch(output)
        whole = Apart(failing(operation, error, NEVER)).ended(COMMAND_S)
        if whole.how is not How.DONE:
            record.add(Outcome.DEFECT, f"nothing failed: {whole.said}")
            yield record
            continue
        losses, count = whole.gave
        for _ in range(trials):
            shutil.rmtree(output, ignore_errors=True)
            after = draw.randrange(count)
            ended = Apart(failing(operation, error, after)).ended(COMMAND_S)
            if ended.outcome not in GOOD:
                record.add(ended.outcome, f"after {after} of {count}: {ended.said}")
                continue
            last = killed_trainers.begun(folder, output).ended(COMMAND_S) if ended.how is How.REFUSED else None
            found = ended.gave[0] if last is None else last.gave
            said = f"after {after} of {count}: {ended.said}; then {last.said if last else ''}"
            if last is not None and last.how is not How.DONE:
                record.add(Outcome.DEFECT, said)
            else:
                good = Outcome.COMPLETED if last is None else Outcome.RECOVERED
                record.add(good if found == losses else Outcome.WRONG, said)
        yield record


def sources(shim: Shim, ground: Ground, trials: int) -> Record:
    """A source on a disk that gives errors from some read on."""
    record = Record(fault="EIO on read, of a source that is packed", kind=Kind.DISK)
    source = ground.fresh()
    write_images(source, 20)
    shim.watch(source)
    for _ in range(trials):
        store = ground.fresh() / "s"

        def work(store: Path = store, after: int = ground.draw.randrange(60)) -> object:
            with shim.failing(Operation.READ, errno.EIO, after):
                return asdict(call("ingest", "pack", source, store, "--model", ground.folder / "model", *SMALL, "--json"))

        ended = Apart(work).ended(COMMAND_S)
        outcome, said = judged(ended)
        if outcome in (Outcome.COMPLETED, Outcome.CLEAN_ERROR) and (wrong := is_sound(store)):
            outcome, said = Outcome.WRONG, wrong
        elif outcome is Outcome.COMPLETED:
            report = json.loads(ended.gave["out"])
            if report["found"] != report["packed"] + report["rejected"]:
                outcome, said = Outcome.LOST, str(report)
        record.add(outcome, said)
    return record


def under_shim(asked: Asked) -> Iterator[Record]:
    """Try everything under the shim."""
    os.environ.pop("LD_PRELOAD")  # of what this process starts
    shim, draw = Shim(), random.Random(asked.seed)
    folder = asked.folder / "runs"
    folder.mkdir()
    yield clock_set_back(shim, folder, draw, asked.of(2, 20))
    yield sources(shim, Ground.prepare(asked), asked.of(2, 15))
    yield from trainers(shim, folder, draw, asked.of(2, 8))
