"""The resources that a process holds: threads, children, descriptors, shared memory. Compared before and after a test."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import threading
import time
from pathlib import Path

SHARED = re.compile(r"/dev/shm/(?!bucketline-tests)")  # but for stores of tests, whose base folder may be in memory


def held() -> dict[str, object]:
    """Return what this process holds now."""
    gc.collect()
    maps = Path("/proc/self/maps").read_text(encoding="utf-8")
    return {
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "children": sorted(children()),
        "descriptors": _descriptors(),
        "maps": maps.count("bucketline-slabs"),
        "shm": len(SHARED.findall(maps)),  # not its files: other tests run at the same time
    }


def children() -> set[str]:
    """Return the process ids of this process's children."""
    found: set[str] = set()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that has ended since it was listed
            found |= set((task / "children").read_text(encoding="ascii").split())
    return found


def _descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def wait_until(is_so: object, seconds: float = 10.0) -> bool:
    """Look again and again until a condition holds, for so many seconds at most; say whether it came to hold."""
    assert callable(is_so)
    until = time.monotonic() + seconds
    while not is_so():
        if time.monotonic() > until:
            return False
        os.sched_yield()
    return True
