"""Trainers that are ended at random moments, whose checkpoints lie, or whose log cannot be written.

A run is ended by `kill -9`, SIGTERM or Ctrl-C, during checkpoints too, a few times, and then finished with --resume; its losses
must be, to the last digit, those of a run that nobody ended. One that was ended before its first checkpoint is started over.

Commands whose log cannot be written, a closed pipe or a full disk from some line on: they do what they would do.
"""

from __future__ import annotations

import importlib
import io
import json
import logging
import os
import pickle
import random
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from bucketline.errors import TrainError
from bucketline.loader import Loader, LoaderConfig
from tests.fault.apart import HANG_S, Apart, Ended, How
from tests.fault.ground import COMMAND_S, Ground, expect_ids
from tests.fault.record import Asked, Kind, Outcome, Record, expect, tried
from tests.kit import flip_bit, make_store, samples_of
from tests.models import write_images
from tests.serving import serving

STEPS = 12
LONGEST_S = 120.0  # of a run that nobody ends
SIGNALS = (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
LONG = 1 << 40
MODULES = (
    "bucketline.train.run",
    "diffusers",
    "diffusers.models.unets.unet_2d_condition",
    "accelerate",
    "tests.unit.train.tiny_run",
)


def prepare(folder: Path) -> None:
    """Write the store and the model, and import what a trainer needs, once for all forks."""
    import torch

    torch.set_num_threads(1)
    for module in MODULES:
        importlib.import_module(module)
    from tests.unit.train.tiny_run import make_training_store, write_unet

    logging.getLogger("bucketline.train").setLevel(logging.CRITICAL)
    make_training_store(folder / "tiny.store")
    write_unet(folder / "model")


def train_in(folder: Path, output: Path, *, resume: bool) -> list[list[str]]:
    """Be the trainer; give the losses, every digit of them."""
    from bucketline.train.run import train
    from tests.unit.train.tiny_run import ALONE, config, losses

    train(config(folder, output_dir=output, max_steps=STEPS, save_every=2, resume=resume), ALONE)
    return [[str(value) for value in line] for line in losses(output)]


def begun(folder: Path, output: Path) -> Apart:
    """Start the run, or continue with it; one without a checkpoint starts over."""
    from bucketline.train.checkpoint import last_whole

    try:
        last_whole(output)
        resume = True
    except TrainError:
        resume = False
        shutil.rmtree(output, ignore_errors=True)
    return Apart(partial(train_in, folder, output, resume=resume))


def _is_saving(output: Path) -> bool:
    from bucketline.files.paths import CHECKPOINTS
    from bucketline.train.checkpoint import CHECKPOINT_NAME

    return any(not CHECKPOINT_NAME.fullmatch(path.name) for path in (output / CHECKPOINTS).glob("*"))


def _end(folder: Path, output: Path, draw: random.Random, whole_s: float, number: signal.Signals) -> Ended:
    """End a run at a moment of it, or of a checkpoint, that is drawn."""
    in_checkpoint = draw.random() < 0.5
    process = begun(folder, output)
    until = time.monotonic() + (LONGEST_S if in_checkpoint else 0.0)
    while time.monotonic() < until and not process.is_over() and not _is_saving(output):
        time.sleep(0.0005)
    time.sleep(draw.random() * (0.02 if in_checkpoint else whole_s))
    process.kill(number)
    return process.ended(HANG_S)


def _judged(ended: Ended, number: signal.Signals, last: Ended, expected: object) -> Outcome:
    if ended.how is How.DIED:
        expect(ended.signal == number, ended.said, Outcome.CRASH)
    elif number is signal.SIGKILL or "KeyboardInterrupt" not in ended.said:  # before it listens, it ends as any process does
        ended.fair()
    expect(last.done() == expected, f"the losses are {last.gave}, expected {expected}", Outcome.WRONG)
    return Outcome.RECOVERED


def trainers(asked: Asked) -> Iterator[Record]:
    prepare(asked.folder)
    draw, output, begun_at = asked.draw, asked.folder / "run", time.monotonic()
    records = {number: Record(f"trainer ended by {number.name}, then --resume", Kind.KILL) for number in set(SIGNALS)}
    expected = begun(asked.folder, asked.folder / "whole").ended(LONGEST_S).done()
    whole_s = time.monotonic() - begun_at
    for _ in range(asked.of(1, 20)):
        numbers = draw.choices(SIGNALS, k=3)
        ends = [_end(asked.folder, output, draw, whole_s, number) for number in numbers]
        last = begun(asked.folder, output).ended(LONGEST_S)
        for ended, number in zip(ends, numbers, strict=True):
            records[number].trial(f"{ended}; then {last.how}", _judged, ended, number, last, expected)
        shutil.rmtree(output, ignore_errors=True)
    yield from (records[number] for number in dict.fromkeys(SIGNALS))


class Canary:
    """The function that a pickle of this calls when it is loaded: it makes a folder."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._path),)


def hostile_checkpoints(asked: Asked) -> Iterator[Record]:
    """Checkpoints with right digests whose files lie, and checkpoints of which one bit is another."""
    ground = Ground(asked)
    prepare(ground.folder)
    whole = ground.folder / "trained"
    Apart(partial(train_in, ground.folder, whole, resume=False)).ended(COMMAND_S).done()
    newest = max((whole / "checkpoints").iterdir())
    lies = _lies(newest, ground.folder / "canary").items()
    cases = [(what, ground, whole, f"checkpoints/{newest.name}", name, data) for what, (name, data) in lies]
    yield from tried("checkpoints that lie, with right digests", Kind.HOSTILE, _resumed, cases)
    files = sorted(path for path in newest.rglob("*") if path.is_file() and path.stat().st_size)
    chosen = [files[number % len(files)] for number in range(asked.of(40, 300))]
    bits = [(path, ground.draw.randrange(8 * path.stat().st_size)) for path in chosen]
    flips = [(f"bit {bit} of {path.name}", newest, path, bit) for path, bit in bits]
    yield from tried("a bit flipped in a checkpoint", Kind.FLIP, _flipped, flips)


def _lies(newest: Path, canary: Path) -> dict[str, tuple[str, bytes]]:
    """Return, by what it is, a file and what is in its place: pickles that run, states that are none, weights of terabytes."""
    import torch

    patterns = ("unet/*.safetensors", "optimizer/*")
    weights, moments = (str(next(newest.glob(pattern)).relative_to(newest)) for pattern in patterns)
    buffer = io.BytesIO()
    torch.save({"state": Canary(canary)}, buffer)
    state = json.loads((newest / "state.json").read_bytes())
    return {
        "a pickle": (moments, pickle.dumps(Canary(canary))),
        "a torch pickle": (moments, buffer.getvalue()),
        "nothing": (moments, b""),
        "a header of terabytes": (weights, struct.pack("<Q", LONG) + b"{}"),
        "no weights": (weights, b""),
        "no state": ("state.json", b"[]"),
        "a deep state": ("state.json", b"[" * 100_000),
        "another step": ("state.json", json.dumps({**state, "steps_done": 1 << 62}).encode()),
        "a loader's state of another kind": ("state.json", json.dumps({**state, "loader": {"step": "x"}}).encode()),
        "no stores": ("state.json", json.dumps({**state, "loader": {}}).encode()),
    }


def _resumed(ground: Ground, whole: Path, checkpoint: str, name: str, data: bytes) -> Outcome:
    """Put other bytes in a checkpoint, let its list of digests agree, and resume."""
    from bucketline.store.format.block import file_digest

    run = ground.fresh() / "run"
    shutil.copytree(whole, run)
    path = run / checkpoint / name
    path.write_bytes(data)
    document = json.loads((run / checkpoint / "digests.json").read_bytes())
    document[name] = file_digest(path)
    (run / checkpoint / "digests.json").write_text(json.dumps(document), encoding="ascii")
    ended = Apart(partial(train_in, ground.folder, run, resume=True)).ended(COMMAND_S)
    expect(not (ground.folder / "canary").exists(), "the pickle was loaded", Outcome.OUTSIDE)
    return ended.fair()


def _flipped(newest: Path, path: Path, bit: int) -> Outcome:
    """Flip a bit: the checkpoint is torn, by name; of what lists the digests, that or as sound as before."""
    from bucketline.train.checkpoint import DIGESTS, damage

    flip_bit(path, bit)
    try:
        wrong = damage(newest)
    finally:
        flip_bit(path, bit)
    expect(wrong is not None or path.name == DIGESTS, "found nothing")
    return Outcome.COMPLETED if wrong is None else Outcome.CLEAN_ERROR


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
    ground, draw = Ground(asked), asked.draw
    (ground.folder / "training").mkdir()
    prepare(ground.folder / "training")  # a model of its own
    for what, trial in {"pack": _pack, "train": _train, "serve": _serve}.items():
        logs = [CLOSED if trial is _serve else draw.choice([CLOSED, FULL]) for _ in range(asked.of(1, 10))]  # its line is read
        yield from tried(f"a log that cannot be written: {what}", Kind.OTHER, trial, [(log, ground, log) for log in logs])


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
        return train_in(ground.folder / "training", run, resume=False)

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
