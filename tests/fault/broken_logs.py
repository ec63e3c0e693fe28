"""Commands whose log cannot be written, a closed pipe or a full disk from some line on: they do what they would do."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

from bucketline.errors import BucketlineError
from bucketline.loader import Loader, LoaderConfig
from bucketline.loader.service.sockets import connected
from tests.commands import call
from tests.fault import killed_trainers
from tests.fault.apart import Apart, How
from tests.fault.ground import COMMAND_S, Ground, is_sound
from tests.fault.record import Asked, Kind, Outcome, Record
from tests.kit import make_store, samples_of
from tests.models import SMALL, png
from tests.serving import serving

_PACK = """
import sys
from bucketline.ingest import cli, progress
progress.LINE_EVERY_S = 0.0
sys.exit(cli.main(sys.argv[1:]))
"""


def _log(log: str) -> int:
    """Return the descriptor of a closed pipe, or of a full disk."""
    if log == "a full disk":
        return os.open("/dev/full", os.O_WRONLY)
    reader, fd = os.pipe()
    os.close(reader)
    return fd


def _with_log(log: str, work: Callable[[], object]) -> object:
    """Return what some work gives in a forked process whose stderr is a closed pipe or a full disk."""
    fd = _log(log)
    os.dup2(fd, 2)
    sys.stderr = os.fdopen(fd, "w", buffering=1, encoding="utf-8")
    return work()


def broken_logs(asked: Asked) -> Iterator[Record]:
    """Packs, training and services, by turns."""
    ground, draw = Ground.prepare(asked), random.Random(asked.seed)
    (ground.folder / "training").mkdir()
    killed_trainers.prepare(ground.folder / "training")  # a model of its own
    kinds: dict[str, Callable[[Ground, str], Any]] = {"pack": _pack, "train": _train, "serve": _serve}
    for what, trial in kinds.items():
        record = Record(fault=f"a log that cannot be written: {what}", kind=Kind.OTHER)
        for _ in range(asked.of(2, 10)):
            log = draw.choice(["a closed pipe", "a full disk"])
            said = trial(ground, log)
            record.add(Outcome.DEFECT if said else Outcome.COMPLETED, f"{log}: {said}")
        yield record


def _pack(ground: Ground, log: str) -> str | None:
    folder = ground.fresh()
    (folder / "photos").mkdir()
    for n in range(6):
        (folder / "photos" / f"{n}.png").write_bytes(png(24, 24, n))
    fd = _log(log)
    more = ["--model", ground.folder / "model", *SMALL]
    command = [sys.executable, "-c", _PACK, "pack", folder / "photos", folder / "s", *more]
    null = subprocess.DEVNULL
    done = subprocess.run([str(part) for part in command], stdin=null, stdout=null, stderr=fd, timeout=COMMAND_S, check=False)
    os.close(fd)
    if done.returncode:
        return f"it ended with {done.returncode}"
    return is_sound(folder / "s") or (None if call("store", "ls", folder / "s").out.count("\n") == 6 else "lost: rows")


def _train(ground: Ground, log: str) -> str | None:
    run = ground.fresh() / "run"
    ended = Apart(
        lambda: _with_log(log, lambda: killed_trainers.train_in(ground.folder / "training", run, resume=False))
    ).ended(COMMAND_S)
    return None if ended.how is How.DONE and any((run / "checkpoints").iterdir()) else str(ended)


def _serve(ground: Ground, log: str) -> str | None:
    folder = ground.fresh()
    store = make_store(folder / "s", samples_of({"train/64x64": 20}))
    with serving(folder / "sock", store.path, options=("--every", "0.001")) as process:
        for stream in (process.stdout, process.stderr):
            assert stream is not None
            stream.close()
        try:
            for _ in range(3):
                connected(folder / "sock").close()
            with Loader(store.path, LoaderConfig(batch_size=2, epochs=1), service=folder / "sock") as loader:
                found = len([*loader])
        except (BucketlineError, AssertionError) as error:
            return repr(error)
        return None if found == 10 and process.poll() is None else f"lost: {found} batches, {process.poll()}"
