"""Running the console commands: in this process where that is the same, in one of its own where it is not."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent


@dataclass(frozen=True, kw_only=True)
class Ran:
    """The result of a command."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        """Parse stdout, which must be one JSON object and nothing else."""
        found: dict[str, Any] = json.loads(self.out)
        return found


def call(command: str, *args: object) -> Ran:
    """Call a console command's `main` in this process."""
    import importlib

    main = importlib.import_module(f"bucketline.{command}.cli").main
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main([str(arg) for arg in args])
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
    return Ran(code=code, out=out.getvalue(), err=err.getvalue())


def spawn(arguments: Sequence[object], **environment: str) -> Ran:
    """Run a program to its end."""
    kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    done = subprocess.run(
        [str(argument) for argument in arguments],
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
        env={**kept, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **environment},
    )
    return Ran(code=done.returncode, out=done.stdout, err=done.stderr)


def torchrun(processes: int, *arguments: object) -> Ran:
    """Run a module or script in several processes on this machine, on a free port."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", processes]
    return spawn([*launcher, *arguments])
