"""The processes of a loop, in its peer's environment: each writes the rows, or runs the loop as one rank, and says what it saw.

The first process imports the loop, forks one for each task, and reads lists of tasks, one per rank, from standard input.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import signal
import sys
import warnings
from contextlib import redirect_stdout
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bucketline.bench.peers.loops.run import KilledError, Run, rows_by_shape

PATIENCE_S = 120


def loop_of(loader: str) -> Any:  # noqa: ANN401 - a module with `write` and `train`
    """Return the module of a loop."""
    if loader == "streaming":
        from bucketline.bench.peers.formats.importable import make_torchvision_importable

        make_torchvision_importable()
    return importlib.import_module(f"bucketline.bench.peers.loops.{loader}")


def carry_out(loader: str, task: dict[str, Any]) -> dict[str, Any]:
    """Write rows, or run the loop; return its record."""
    loop = loop_of(loader)
    folder = Path(task["folder"])
    if "write" in task:
        groups = [rows_by_shape(rows) for rows in task["write"]]
        if task["in_one"]:
            groups = [{"all": [row for rows in group.values() for row in rows]} for group in groups]
        loop.write(folder, *groups)
        return {}
    moments: dict[str, Any] = {name: tuple(task[name]) for name in ("save_at", "break_at", "kill_at") if task.get(name)}
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
    return {
        "loops": [asdict(one) for one in run.loops],
        "validations": run.validations,
        "checkpoint": run.checkpoint,
        "error": error,
    }


def forked(loader: str, task: dict[str, Any], rank: dict[str, str]) -> int | None:
    """Carry out a task in a new process. Return where its record is read, or None in that process."""
    reading, writing = os.pipe()
    if os.fork():
        os.close(writing)
        return reading
    os.close(reading)
    signal.alarm(PATIENCE_S)
    os.environ.update(rank)
    with redirect_stdout(sys.stderr):
        found = carry_out(loader, task)
    with os.fdopen(writing, "w", encoding="utf-8") as out:
        json.dump(found, out, default=float)
    return None


def main() -> int:
    """Execute the tasks and print their records."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    loader = sys.argv[1]
    with redirect_stdout(sys.stderr):
        loop_of(loader)
    for line in sys.stdin:
        reading = []
        for task, rank in json.loads(line):
            own = forked(loader, task, rank)
            if own is None:
                return 0
            reading.append(own)
        records = []
        for own in reading:
            with os.fdopen(own, encoding="utf-8") as record:
                text = record.read()
            os.wait()
            error = f"no end within {PATIENCE_S} s, or a crash"
            ended: dict[str, Any] = {"loops": [], "validations": [], "checkpoint": None, "error": error}
            records.append(json.loads(text) if text else ended)
        print(json.dumps(records), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
