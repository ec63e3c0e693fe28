"""One pack of one store that is killed, `kill -9`, again and again, and then let finish. Part of `killed_packs`."""

from __future__ import annotations

import ctypes
import importlib
import os
import signal
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tests.fault.noted_pack import be_rank
from tests.fault.same_store import Comparison, committed_ids, compare, noted_ids
from tests.models import GRID, write_images, write_model

if TYPE_CHECKING:
    import random
    from pathlib import Path

NUM_IMAGES = 200
LONGEST_S = 120.0
MODULES = (
    "bucketline.ingest.pack",
    "diffusers.models.autoencoders.autoencoder_kl",
    "transformers.models.bert",
)
_PR_SET_CHILD_SUBREAPER = 36


@dataclass(slots=True)
class InARow:
    """The outcome."""

    left: list[int] = field(default_factory=list)  # after each kill, how many samples were committed
    faults: list[str] = field(default_factory=list)
    compared: Comparison | None = None


def start(store: Path, folder: Path, said: Path | str = os.devnull) -> int:
    """Fork a pack whose words go to a file; give its process id."""
    asked = ["pack", str(folder / "photos"), str(store), "--model", str(folder / "model"), "--grid", GRID]
    child = os.fork()
    if child == 0:
        code = 1
        try:
            words = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            for fd in (1, 2):
                os.dup2(words, fd)
            code = be_rank(0, f"{store}.committed", "-", [*asked, "--min-size-px", "8", "--batch-size", "3"])
        except KeyboardInterrupt:  # before it listens
            code = 128 + signal.SIGINT
        finally:  # a forked process must not continue from here
            os._exit(code)
    return child


def wait_for(child: int, store: Path, num_committed: int) -> None:
    """Wait until so many samples are committed, or the process has ended."""
    give_up = time.monotonic() + LONGEST_S
    while len(noted_ids(store)) < num_committed and time.monotonic() < give_up:
        if os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            return
        os.sched_yield()


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


def kill_in_a_row(kills: int, draw: random.Random, folder: Path) -> InARow:
    """Kill a pack `kills` times, most of them at random places of its way, some while it begins; then compare."""
    import torch

    torch.set_num_threads(1)
    for module in MODULES:
        importlib.import_module(module)
    write_images(folder / "photos", NUM_IMAGES)
    write_model(folder / "model")
    result, store = InARow(), folder / "killed"
    goals = sorted(draw.sample(range(1, NUM_IMAGES - 20), kills))
    for goal in goals:
        child = start(store, folder)
        if draw.random() < 0.8:
            wait_for(child, store, goal)
            time.sleep(draw.random() * 0.02)
        else:  # opening, adopting
            time.sleep(draw.random() * 0.5)
        os.kill(child, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if status not in (-signal.SIGKILL, 0):  # 0: a fast machine was done before the kill
            result.faults.append(f"a pack ended by itself with {status}")
        wait_for_orphans()
        left = committed_ids(store)
        result.left.append(len(left))
        if lost := set(noted_ids(store)) - left:
            result.faults.append(f"{len(lost)} committed samples are lost, {min(lost)} among them")
    for path in (store, folder / "whole"):
        _, status = os.waitpid(start(path, folder), 0)
        if status != 0:
            result.faults.append(f"the pack of {path} that was left alone ended with {os.waitstatus_to_exitcode(status)}")
    result.compared = compare(store, folder / "whole")
    result.faults += result.compared.faults
    return result
