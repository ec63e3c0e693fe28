"""Ranks of the trainer without a launcher: forked off one process that has imported everything, so that a run costs no imports.

`python -m tests.forked_ranks` reads a JSON list a line, `[number of ranks, [what train/main.py is told]]`, and answers with
two lines: the ranks' process ids as they start, and their exit codes and what they wrote as they have ended.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from bucketline.loader.service.sockets import readable
from tests.commands import ROOT, Ran, kept_port

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

LONGEST_S = 300.0  # of a run in a test
IMPORTED_ONCE = (
    *("bucketline.train.main", "bucketline.train.run"),
    # what a run imports when it needs it: two seconds of each rank
    *("diffusers.models.autoencoders.autoencoder_kl", "diffusers.models.unets.unet_2d_condition", "diffusers.schedulers"),
    *("matplotlib.figure", "peft", "torch.distributed.checkpoint.state_dict", "torch.distributed.fsdp", "torchao.optim"),
)


class RunningRanks:
    """A run under way."""

    def __init__(self, answers: IO[bytes], pids: list[int]) -> None:
        self._answers = answers
        self.pids = pids  # by rank

    def wait(self) -> Ran:
        """Wait for every rank to end; the code is the first that is not 0, and the ranks' output stands as it was written."""
        ended = _answer(self._answers)
        failed = [code for code in ended["codes"] if code != 0]
        return Ran(code=failed[0] if failed else 0, out=ended["out"], err=ended["err"])


class ForkedRanks:
    """The process from which ranks are forked; one run at a time."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.forked_ranks"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        )

    def __enter__(self) -> ForkedRanks:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._process.kill()
        self._process.communicate()

    def start(self, processes: int, arguments: Sequence[object]) -> RunningRanks:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([processes, [str(argument) for argument in arguments]]).encode() + b"\n")
        self._process.stdin.flush()
        return RunningRanks(self._process.stdout, _answer(self._process.stdout)["pids"])

    def run(self, processes: int, arguments: Sequence[object]) -> Ran:
        return self.start(processes, arguments).wait()


def _answer(answers: IO[bytes]) -> dict[str, Any]:
    assert readable([answers.fileno()], LONGEST_S), f"no answer in {LONGEST_S:.0f} s"
    line = answers.readline()
    assert line, "the process that forks ranks has ended"
    found: dict[str, Any] = json.loads(line)
    return found


def _fork_rank(rank: int, arguments: list[str], output: Path) -> int:
    child = os.fork()
    if child:
        return child
    code: object = 1
    try:
        for fd, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(output / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND), fd)
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        sys.argv = ["train/main.py", *arguments]
        from bucketline.train.main import main

        main()
        code = 0
    except SystemExit as end:
        code = end.code or 0
    except BaseException:  # noqa: BLE001 - said where it can be seen; a forked process must not continue from here
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 1)


def _serve() -> None:
    import torch

    for module in IMPORTED_ONCE:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # else each rank's first collection copies every page of it
    torch.set_num_threads(1)
    for line in sys.stdin:
        processes, arguments = json.loads(line)
        with kept_port() as port, tempfile.TemporaryDirectory() as folder:
            os.environ |= {"WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            pids = [_fork_rank(rank, arguments, Path(folder)) for rank in range(processes)]
            print(json.dumps({"pids": pids}), flush=True)
            codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
            written = {name: (Path(folder) / name).read_text() for name in ("out", "err")}
        print(json.dumps({"codes": codes, **written}), flush=True)


if __name__ == "__main__":
    _serve()
