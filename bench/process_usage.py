"""CPU time of a process and its descendants, bytes that they read from the disk, and pages dropped so that they do."""

from __future__ import annotations

import os
import resource
from contextlib import suppress
from pathlib import Path

FROM_DISK = 0.95  # minimum fraction of the payload that a cold run reads from the disk
TRIES = 3  # of a cold run
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


def drop_pages(path: Path) -> None:
    """Write the pages of a file, or of all files in a folder, to the disk and drop them from the page cache.

    Pages that a process has mapped stay, so call this before mapping them.
    """
    for file in [path] if path.is_file() else path.rglob("*"):
        if not file.is_file():
            continue
        fd = os.open(file, os.O_RDONLY)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
