"""The scenarios of a loop: a run of all epochs, a `break`, ends and resumes. Runs in its peer's environment.

Each task is a process of its own, forked from the one that has imported the loop.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import socket
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bucketline.bench.peers.loops.run import END, NUM_ROWS, SHAPES, VALIDATION_ROWS, KilledError, Run, rows_by_shape

if TYPE_CHECKING:
    from collections.abc import Callable

    Record = dict[str, Any]  # the loops, validations, checkpoint and error of one rank
    Launch = Callable[[str, list[dict[str, Any]]], list[Record]]  # runs a loop's task per rank at the same time

BREAK_AT = 3  # batches of the first epoch
SAVED_AT, KILLED_AT = 3, 5  # batches of the second epoch
PATIENCE_S = 120


def forked(loader: str, tasks: list[dict[str, Any]]) -> list[Record]:
    """Carry out a task per rank, each in a new process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = [as_torchrun(rank, len(tasks), port) if len(tasks) > 1 else {} for rank in range(len(tasks))]
    with ProcessPoolExecutor(len(tasks), mp_context=get_context("fork")) as pool:
        try:
            return list(pool.map(_as_rank, [loader] * len(tasks), tasks, ranks))
        except BrokenProcessPool:
            error = f"no end within {PATIENCE_S} s, or a crash"
            return [{"loops": [], "validations": [], "checkpoint": None, "error": error} for _ in tasks]


def _as_rank(loader: str, task: dict[str, Any], rank: dict[str, str]) -> Record:
    signal.alarm(PATIENCE_S)
    os.environ.update(rank)
    return carry_out(loader, task)


def tried(loader: str, folder: str, launch: Launch = forked) -> dict[str, list[Record]]:
    """Try everything with a loop, in an empty folder; return the records of each scenario, by rank."""
    loop_of(loader)  # imported before the processes fork
    mixed, single, in_one = (str(Path(folder) / name) for name in ("mixed", "single", "in_one"))
    for own, rows in ((mixed, SHAPES), (single, {"16x16": NUM_ROWS}), (in_one, SHAPES)):
        Path(own).mkdir(parents=True)
        launch(loader, [{"folder": own, "write": [rows, VALIDATION_ROWS], "in_one": own == in_one}])

    def run(own: str, ranks: int = 1, **more: Any) -> list[Record]:  # noqa: ANN401 - fields of a task
        return launch(loader, [{"folder": own, "rank": rank, "ranks": ranks, **more} for rank in range(ranks)])

    def resumed(own: str, saved: list[Record], ranks: int = 1) -> list[Record]:
        return run(own, ranks, checkpoint=saved[0]["checkpoint"])

    whole = run(mixed)
    in_epoch: dict[str, Any] = {"save_at": (1, SAVED_AT), "kill_at": (1, KILLED_AT)}
    killed, saved = run(mixed, **in_epoch), run(single, **in_epoch)
    last = run(mixed, save_at=(0, len(whole[0]["loops"][0]["batches"])), kill_at=(0, END))
    return {
        "whole": whole,
        "after a break": run(mixed, break_at=(0, BREAK_AT)),
        "killed": killed,  # in the second epoch; its checkpoint is of a moment before
        "resumed": resumed(mixed, killed),
        "resumed on two": resumed(mixed, killed, 2),
        "resumed from the last batch": resumed(mixed, last),
        "resumed from the epoch's end": resumed(mixed, run(mixed, save_at=(0, END), kill_at=(0, END))),
        "on two": run(mixed, 2),  # from the beginning
        "one shape": run(single),  # of rows of one shape, all epochs
        "one shape, saved": saved,
        "one shape, resumed": resumed(single, saved),
        "one shape, resumed on two": resumed(single, saved, 2),
        "in one": run(in_one),  # of rows of all shapes, written as one data set
    }


def loop_of(loader: str) -> Any:  # noqa: ANN401 - a module with `write` and `train`
    """Return the module of a loop."""
    if loader == "streaming":
        from bucketline.bench.peers.formats.importable import make_torchvision_importable

        make_torchvision_importable()
    return importlib.import_module(f"bucketline.bench.peers.loops.{loader}")


def carry_out(loader: str, task: dict[str, Any]) -> Record:
    """Write rows, or run the loop; return its record."""
    loop, folder = loop_of(loader), Path(task["folder"])
    if "write" in task:
        groups = [rows_by_shape(rows) for rows in task["write"]]
        if task["in_one"]:
            groups = [{"all": [row for rows in group.values() for row in rows]} for group in groups]
        loop.write(folder, *groups)
        return {}
    moments: dict[str, Any] = {name: task[name] for name in ("save_at", "break_at", "kill_at") if name in task}
    run = Run(folder=folder, rank=task["rank"], ranks=task["ranks"], checkpoint=task.get("checkpoint"), **moments)
    if run.ranks > 1 and loader != "bucketline":
        import torch.distributed

        torch.distributed.init_process_group("gloo")
    error = None
    try:
        loop.train(run)
    except KilledError:
        pass
    except Exception as caught:  # noqa: BLE001 -- what a loader raises is what is measured
        error = f"{type(caught).__name__}: {' '.join(str(caught).split())}"
    own = {"loops": [asdict(one) for one in run.loops], "validations": run.validations, "checkpoint": run.checkpoint}
    found: Record = json.loads(json.dumps({**own, "error": error}, default=float))  # as a checkpoint comes from a file
    return found


def as_torchrun(rank: int, ranks: int, port: int) -> dict[str, str]:
    """Return the environment variables that torchrun sets."""
    own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
    return {"MASTER_ADDR": "127.0.0.1"} | {name: str(value) for name, value in own.items()}
