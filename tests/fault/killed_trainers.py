"""Ends a trainer at random moments, `kill -9`, SIGTERM and Ctrl-C, during checkpoints too, and continues with --resume.

A run is ended a few times and then finished; its losses must be, to the last digit, those of a run that nobody ended.
A run that was ended before its first checkpoint has nothing to resume, says so, and is started over.
"""

from __future__ import annotations

import importlib
import logging
import random
import shutil
import signal
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bucketline.errors import TrainError
from tests.fault.apart import HANG_S, Apart, Ended, How
from tests.fault.record import Kind, Outcome, Record

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.fault.record import Asked

STEPS = 12
LONGEST_S = 120.0  # of a run that nobody ends
SIGNALS = (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
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

    train(config(folder, output_dir=output, max_steps=STEPS, save_every="2", resume=resume), ALONE)
    return [[str(value) for value in line] for line in losses(output)]


def has_checkpoint(output: Path) -> bool:
    """Return whether there is something to resume."""
    from bucketline.train.checkpoint import last_whole

    try:
        last_whole(output)
    except TrainError:
        return False
    return True


def begun(folder: Path, output: Path) -> Apart:
    """Start the run, or continue with it; one without a checkpoint starts over."""
    resume = has_checkpoint(output)
    if not resume:
        shutil.rmtree(output, ignore_errors=True)
    return Apart(lambda: train_in(folder, output, resume=resume))


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """When a run is ended: so many seconds after it began, or after a checkpoint was begun."""

    number: signal.Signals
    seconds: float
    in_checkpoint: bool

    def wait(self, process: Apart, output: Path) -> None:
        """Wait for it, or for the end of the process."""
        until = time.monotonic() + (LONGEST_S if self.in_checkpoint else 0.0)
        while time.monotonic() < until and not _is_over(process) and not _is_saving(output):
            time.sleep(0.0005)
        time.sleep(self.seconds)


def _is_over(process: Apart) -> bool:
    import os

    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _is_saving(output: Path) -> bool:
    from bucketline.files.run_marker import CHECKPOINTS
    from bucketline.train.checkpoint import CHECKPOINT_NAME

    return any(not CHECKPOINT_NAME.fullmatch(path.name) for path in (output / CHECKPOINTS).glob("*"))


def drawn_moment(draw: random.Random, whole_s: float) -> Moment:
    """Draw a moment of a run that takes `whole_s` seconds undisturbed."""
    in_checkpoint = draw.random() < 0.5
    seconds = draw.random() * 0.02 if in_checkpoint else draw.random() * whole_s
    return Moment(number=draw.choice(SIGNALS), seconds=seconds, in_checkpoint=in_checkpoint)


def outcome_of(ended: Ended, moment: Moment) -> Outcome:
    """Return whether a run ended as the signal asks."""
    if ended.how is How.HUNG:
        return Outcome.HANG
    is_told = moment.number is not signal.SIGKILL  # it stops by itself, or, before it listens, as any process does
    if ended.how is How.DIED:
        return Outcome.RECOVERED if ended.signal == moment.number else Outcome.CRASH
    if ended.how is How.DEFECT and not (is_told and "KeyboardInterrupt" in ended.said):
        return Outcome.DEFECT
    return Outcome.RECOVERED


def end_and_resume(
    folder: Path, output: Path, moments: list[Moment], expected: object, records: dict[signal.Signals, Record]
) -> None:
    """End one run at every moment, then let it finish."""
    outcomes: list[tuple[Moment, Outcome, str]] = []
    for moment in moments:
        process = begun(folder, output)
        moment.wait(process, output)
        process.kill(moment.number)
        ended = process.ended(HANG_S)
        outcomes.append((moment, outcome_of(ended, moment), f"{moment}: {ended.how}, {ended.said}"))
    last = begun(folder, output).ended(LONGEST_S)
    for moment, outcome, said in outcomes:
        record = records[moment.number]
        if outcome is not Outcome.RECOVERED:
            record.add(outcome, said)
        elif last.how is not How.DONE:
            record.add(Outcome.HANG if last.how is How.HUNG else Outcome.DEFECT, f"{said}; then {last.how}: {last.said}")
        elif last.gave != expected:
            record.add(Outcome.WRONG, f"{said}; the losses are {last.gave}, expected {expected}")
        else:
            record.add(Outcome.RECOVERED)


def trainers(asked: Asked) -> Iterator[Record]:
    """End runs again and again."""
    prepare(asked.folder)
    draw = random.Random(asked.seed)
    records = {
        number: Record(fault=f"trainer ended by {number.name}, then --resume", kind=Kind.KILL)
        for number in dict.fromkeys(SIGNALS)
    }
    whole = begun(asked.folder, asked.folder / "whole").ended(LONGEST_S)
    if whole.how is not How.DONE:
        records[signal.SIGKILL].add(Outcome.DEFECT, f"nobody ended it: {whole.said}")
        yield from records.values()
        return
    for number in range(asked.of(1, 20)):
        moments = [drawn_moment(draw, whole.seconds) for _ in range(3)]
        end_and_resume(asked.folder, asked.folder / f"run{number}", moments, whole.gave, records)
        shutil.rmtree(asked.folder / f"run{number}", ignore_errors=True)
    yield from records.values()
