"""Commands whose log cannot be written, a closed pipe or a full disk from some line on: they do what they would do."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Iterator

from bucketline.loader import Loader, LoaderConfig
from tests.fault import trainers
from tests.fault.apart import Apart
from tests.fault.ground import COMMAND_S, Ground, expect_ids
from tests.fault.record import Asked, Kind, Outcome, Record, expect
from tests.kit import make_store, samples_of
from tests.models import write_images
from tests.serving import serving

_PACK = """
import sys
from bucketline.ingest import cli, progress
progress.LINE_EVERY_S = 0.0
sys.exit(cli.main(sys.argv[1:]))
"""
FULL, CLOSED = "a full disk", "a closed pipe"


def _log(log: str) -> int:
    if log == FULL:
        return os.open("/dev/full", os.O_WRONLY)
    reader, fd = os.pipe()
    os.close(reader)
    return fd


def broken_logs(asked: Asked) -> Iterator[Record]:
    """Packs, training and services, by turns."""
    ground, draw = Ground.prepare(asked), random.Random(asked.seed)
    (ground.folder / "training").mkdir()
    trainers.prepare(ground.folder / "training")  # a model of its own
    for what, trial in {"pack": _pack, "train": _train, "serve": _serve}.items():
        record = Record(f"a log that cannot be written: {what}", Kind.OTHER)
        for _ in range(asked.of(2, 10)):
            log = CLOSED if trial is _serve else draw.choice([CLOSED, FULL])  # a service's first line is read
            record.trial(log, trial, ground, log)
        yield record


def _pack(ground: Ground, log: str) -> Outcome:
    folder = ground.fresh()
    ids = write_images(folder / "photos", 6)
    command = [sys.executable, "-c", _PACK, *map(str, ground.pack_command(folder / "photos", folder / "s"))]
    null, fd = subprocess.DEVNULL, _log(log)
    ran = subprocess.run(command, stdin=null, stdout=null, stderr=fd, timeout=COMMAND_S, check=False)
    os.close(fd)
    expect(ran.returncode == 0, f"it ended with {ran.returncode}")
    expect_ids(folder / "s", ids)
    return Outcome.COMPLETED


def _train(ground: Ground, log: str) -> Outcome:
    run = ground.fresh() / "run"

    def work() -> object:
        os.dup2(_log(log), 2)
        sys.stderr = os.fdopen(2, "w", buffering=1, encoding="utf-8")
        return trainers.train_in(ground.folder / "training", run, resume=False)

    Apart(work).ended(COMMAND_S).done()
    expect(any((run / "checkpoints").iterdir()), "no checkpoint was saved")
    return Outcome.COMPLETED


def _serve(ground: Ground, _log: str) -> Outcome:
    folder = ground.fresh()
    store = make_store(folder / "s", samples_of({"train/64x64": 20}))
    with serving(folder / "sock", store.path, options=("--every", "0.001")) as process:
        for stream in (process.stdout, process.stderr):
            assert stream is not None
            stream.close()
        for _ in range(3):
            with Loader(store.path, LoaderConfig(batch_size=2, epochs=1), service=folder / "sock") as loader:
                expect(len([*loader]) == 10, "batches are lost")
        expect(process.poll() is None, f"the service ended with {process.poll()}")
    return Outcome.COMPLETED
