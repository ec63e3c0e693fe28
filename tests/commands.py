"""Running the console commands: in this process where that is the same, in one of its own where it is not."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

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
        found: dict[str, Any] = json.loads(self.out)
        return found

    def done(self) -> Ran:
        assert self.code == 0, self.err
        return self

    def fails(self, *words: str, code: int = 1) -> Ran:
        assert self.code == code, self.err
        for one in words:
            assert one in self.err
        return self


def call(command: str, *args: object) -> Ran:
    import importlib

    return called(importlib.import_module(f"bucketline.{command}.cli").main, *args)


def called(main: Callable[[list[str]], Any], *args: object) -> Ran:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main([str(arg) for arg in args]) or 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
    return Ran(code=code, out=out.getvalue(), err=err.getvalue())


def spawn(arguments: Sequence[object], **environment: str) -> Ran:
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
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", processes]
    return spawn([*launcher, *arguments])


@contextmanager
def kept_port() -> Iterator[int]:
    """Yield a port of this machine that no other process is given meanwhile, and that a server may listen at.

    The socket stays bound: the system gives its port to nobody else. `SO_REUSEADDR` lets those bind it who set that
    too, as `socket.create_server` and torch's stores do; until one of them listens, a connection is refused.
    """
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(("127.0.0.1", 0))
        yield sock.getsockname()[1]


def forked_ranks(processes: int, command: str, *args: object, seconds: int = 120) -> Ran:
    """Call a console command's `main` in several ranks forked off this process, which has imported everything already.

    The code is the first that is not 0; the output is that of all ranks, in their order.
    """
    with kept_port() as port, tempfile.TemporaryDirectory() as folder:
        said = [Path(folder, f"{rank}.json") for rank in range(processes)]
        children = []
        for rank in range(processes):
            if (child := os.fork()) == 0:
                signal.signal(signal.SIGALRM, signal.SIG_DFL)
                signal.alarm(seconds)  # a rank that hangs must not outlive the test
                ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}
                os.environ |= {name: str(value) for name, value in ranks.items()}
                os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
                try:
                    said[rank].write_text(json.dumps(asdict(call(command, *args))), encoding="utf-8")
                except BaseException:  # noqa: BLE001 - a forked process must not continue as a test
                    traceback.print_exc()
                os._exit(0)
            children.append(child)
        ended = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        assert ended == [0] * processes
        ran = [Ran(**json.loads(path.read_bytes())) for path in said]
    codes = [one.code for one in ran if one.code != 0]
    return Ran(code=codes[0] if codes else 0, out="".join(one.out for one in ran), err="".join(one.err for one in ran))
