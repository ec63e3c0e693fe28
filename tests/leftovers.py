"""The resources that a process holds: threads, children, descriptors, shared memory. Compared before and after a test."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import signal
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

SHARED = re.compile(r"/dev/shm/(?!bucketline-tests|\S*/shards/)")  # but for stores of tests, which may be in memory


def held() -> dict[str, Counter[object]]:
    gc.collect()
    maps = Path("/proc/self/maps").read_text(encoding="utf-8")
    return {
        "threads": Counter(threading.enumerate()),
        "children": Counter(children()),
        "descriptors": Counter(descriptors(os.getpid())),
        "maps": Counter({"buffers": maps.count("bucketline-buffers")}),
        "shm": Counter({"mapped": len(SHARED.findall(maps))}),  # not its files: other tests run at the same time
    }


def left_since(before: dict[str, Counter[object]]) -> dict[str, list[object]]:
    """Return what this process holds and did not hold before; what an earlier test left behind may end meanwhile."""
    return {name: list(more.elements()) for name, now in held().items() if (more := now - before[name])}


def children() -> set[str]:
    found: set[str] = set()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that has ended since it was listed
            found |= set((task / "children").read_text(encoding="ascii").split())
    return found


def descriptors(pid: int) -> Iterator[str]:
    """Yield what the open descriptors of a process are: a file's path, or a socket's, pipe's or memory file's name."""
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # one that has been closed since it was listed
            yield str(descriptor.readlink())


def wait_until(is_so: object, seconds: float = 60.0) -> bool:
    """Look again and again until a condition holds, for so many seconds at most; say whether it came to hold."""
    assert callable(is_so)
    until = time.monotonic() + seconds
    while not is_so():
        if time.monotonic() > until:
            return False
        time.sleep(0.001)
    return True


CHILD_S = 120  # before a child that hangs is ended by SIGALRM


def in_child(work: Callable[[], object]) -> int:
    """Run some work in a forked process; 0 if it returned something true, minus a signal's number if that ended it."""
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(CHILD_S)
        try:
            os._exit(0 if work() else 3)
        except BaseException:  # noqa: BLE001 - the child must not continue as a test
            traceback.print_exc()
            os._exit(4)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
