"""The scenarios of each loop: a run of all epochs, a `break`, ends and resumes."""

from __future__ import annotations

import json
import socket
import subprocess
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bucketline.bench.peers.loops.run import END, NUM_ROWS, SHAPES, VALIDATION_ROWS
from bucketline.errors import BucketlineError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from bucketline.bench.peers.environments import Environment

    Record = dict[str, Any]  # what `process` prints
    Launch = Callable[[list[dict[str, Any]]], list[Record]]  # runs a task per rank at the same time

BREAK_AT = 3  # batches of the first epoch
SAVED_AT, KILLED_AT = 3, 5  # batches of the second epoch
_PROCESS = "bucketline.bench.peers.loops.process"


@dataclass(frozen=True, slots=True, kw_only=True)
class Records:
    """The records of a loop's scenarios, by rank."""

    whole: list[Record]
    after_break: list[Record]
    killed: list[Record]  # in the second epoch; its checkpoint is of a moment before
    resumed: list[Record]
    resumed_on_two: list[Record]
    last_batch: list[Record]  # ended after the first epoch; its checkpoint is of the epoch's last batch
    resumed_from_last_batch: list[Record]
    epoch_end: list[Record]  # the same; its checkpoint is of the end of the `for`
    resumed_from_epoch_end: list[Record]
    on_two: list[Record]  # from the beginning
    one_shape: list[Record]  # of rows of one shape, all epochs
    one_shape_saved: list[Record]  # as `killed`
    one_shape_resumed: list[Record]
    one_shape_on_two: list[Record]  # resumed
    in_one: list[Record]  # of rows of all shapes, written as one data set


def tried(folder: Path, launch: Launch) -> Records:
    """Try everything with a loop, in an empty folder."""
    mixed, single, in_one = folder / "mixed", folder / "single", folder / "in_one"
    one_shape = {"16x16": NUM_ROWS}
    for own, rows in ((mixed, SHAPES), (single, one_shape), (in_one, SHAPES)):
        own.mkdir(parents=True)
        launch([{"folder": str(own), "write": [rows, VALIDATION_ROWS], "in_one": own == in_one}])

    def run(own: Path, ranks: int = 1, **more: Any) -> list[Record]:  # noqa: ANN401 - fields of a task
        return launch([{"folder": str(own), "rank": rank, "ranks": ranks, **more} for rank in range(ranks)])

    whole = run(mixed)
    killed = run(mixed, save_at=(1, SAVED_AT), kill_at=(1, KILLED_AT))
    last = run(mixed, save_at=(0, len(whole[0]["loops"][0]["batches"])), kill_at=(0, END))
    end = run(mixed, save_at=(0, END), kill_at=(0, END))
    saved = run(single, save_at=(1, SAVED_AT), kill_at=(1, KILLED_AT))
    return Records(
        whole=whole,
        after_break=run(mixed, break_at=(0, BREAK_AT)),
        killed=killed,
        resumed=run(mixed, checkpoint=killed[0]["checkpoint"]),
        resumed_on_two=run(mixed, 2, checkpoint=killed[0]["checkpoint"]),
        last_batch=last,
        resumed_from_last_batch=run(mixed, checkpoint=last[0]["checkpoint"]),
        epoch_end=end,
        resumed_from_epoch_end=run(mixed, checkpoint=end[0]["checkpoint"]),
        on_two=run(mixed, 2),
        one_shape=run(single),
        one_shape_saved=saved,
        one_shape_resumed=run(single, checkpoint=saved[0]["checkpoint"]),
        one_shape_on_two=run(single, 2, checkpoint=saved[0]["checkpoint"]),
        in_one=run(in_one),
    )


@contextmanager
def launcher(loader: str, made: Environment) -> Iterator[Launch]:
    """Have a process of the loop's environment that runs its tasks, each in a process of its own."""
    command = [str(made.python), "-P", "-m", _PROCESS, loader]
    pipe, null = subprocess.PIPE, subprocess.DEVNULL
    with subprocess.Popen(command, env=made.variables(), text=True, stdin=pipe, stdout=pipe, stderr=null) as process:

        def launch(tasks: list[dict[str, Any]]) -> list[Record]:
            assert process.stdin is not None
            assert process.stdout is not None
            port = _free_port()
            ranks = [as_torchrun(rank, len(tasks), port) if len(tasks) > 1 else {} for rank in range(len(tasks))]
            process.stdin.write(json.dumps([*zip(tasks, ranks, strict=True)]) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
            if not line:
                raise BucketlineError(f"the process of the loop {loader} ended: run {' '.join(command)} to see why")
            found: list[Record] = json.loads(line)
            return found

        yield launch


def as_torchrun(rank: int, ranks: int, port: int) -> dict[str, str]:
    """Return the environment variables that torchrun sets."""
    own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
    return {"MASTER_ADDR": "127.0.0.1"} | {name: str(value) for name, value in own.items()}


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port
