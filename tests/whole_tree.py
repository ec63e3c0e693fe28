"""Run a command to its end, and then end every process that it left behind, however it ended.

`python -m tests.whole_tree COMMAND …` exits as the command did. If the process that started it ends first, even by `kill -9`,
or it gets SIGTERM, the command and all its descendants are killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def children_of(pid: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            found += map(int, (task / "children").read_text(encoding="ascii").split())
    return found


def descendants_of(pid: int) -> list[int]:
    """Return the process ids of all descendants of a process, parents first."""
    found = children_of(pid)
    for child in found:
        found += children_of(child)
    return found


def title_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def end_descendants() -> None:
    """Kill all descendants of this process, which has become the parent of their orphans, and wait for them."""
    while left := descendants_of(os.getpid()):
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(-1, 0)


def _end(*_: object) -> None:
    sys.exit(143)


def main() -> int:
    process = ctypes.CDLL(None)
    process.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    process.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    signal.signal(signal.SIGTERM, _end)
    assert threading.active_count() == 1
    try:
        code = subprocess.Popen(sys.argv[1:]).wait()
    finally:
        end_descendants()
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
