"""Resource usage of a process and its descendants: CPU time, and bytes read from the disk. Linux only."""

from __future__ import annotations

import os
import resource
from contextlib import suppress
from pathlib import Path

_TICKS_S = os.sysconf("SC_CLK_TCK")


def cpu_s() -> float:
    """Return the CPU seconds of this process, of the children it has waited for, and of its live descendants."""
    used = 0.0
    for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN):
        own = resource.getrusage(who)
        used += own.ru_utime + own.ru_stime
    return used + sum(_cpu_s_of(pid) for pid in descendants())


def read_bytes() -> int:
    """Return the bytes read from the disk; the kernel adds a child's to its parent's once the child is waited for."""
    return sum(_read_bytes_of(pid) for pid in [os.getpid(), *descendants()])


def descendants() -> list[int]:
    """Return the live descendants of this process."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").iterdir():
        if path.name.isdecimal():
            with suppress(OSError):  # it has ended in the meantime
                children.setdefault(int(_stat(int(path.name))[1]), []).append(int(path.name))
    found, new = [], children.get(os.getpid(), [])
    while new:
        found += new
        new = [child for pid in new for child in children.get(pid, [])]
    return found


def _stat(pid: int) -> list[str]:
    """Return the fields after a process's name (state, parent and so on); the name may contain anything."""
    return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()


def _cpu_s_of(pid: int) -> float:
    try:
        user, system, children_user, children_system = map(int, _stat(pid)[11:15])
    except OSError:
        return 0.0
    return (user + system + children_user + children_system) / _TICKS_S


def _read_bytes_of(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/io").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))
