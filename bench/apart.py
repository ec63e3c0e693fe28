"""Run a function in a fresh process, in this environment or another one. Imports nothing that a peer's environment lacks.

`python -m bucketline.bench.apart MODULE:FUNCTION JSON` calls it with the arguments in JSON, and prints what it returns as JSON.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import resource
import subprocess
import sys
import warnings
from contextlib import redirect_stdout, suppress
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


def apart(
    function: Callable[..., object],
    *arguments: object,
    python: str = sys.executable,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    timeout_s: float | None = None,
) -> Any:  # noqa: ANN401 - what the function returns, as JSON has it
    """Return what a module's function returns in a fresh process."""
    from bucketline.errors import BucketlineError

    name = f"{function.__module__}:{function.__qualname__}"
    command = [python, "-P", "-m", "bucketline.bench.apart", name, json.dumps(arguments, default=_plain)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True, env=env, cwd=cwd) as process:
        try:
            out, err = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired as late:
            process.kill()
            raise BucketlineError(f"{function.__name__} took more than {timeout_s} s") from late
    if process.returncode:
        last = ([line for line in err.splitlines() if line.strip()] or [f"it ended with {process.returncode}"])[-1]
        raise BucketlineError(f"{function.__name__} failed: {last.strip()[:300]}")
    return json.loads(out.splitlines()[-1])  # before it, what a package's own processes print


def _plain(value: Any) -> Any:  # noqa: ANN401 - of any type that JSON lacks
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else str(value)


# --------------------------------------------------------------------------------------------------------------- process usage
# CPU time of a process and its descendants and bytes that they read from the disk; its own memory.

_TICKS_S = os.sysconf("SC_CLK_TCK")


def private_kib() -> int:
    """Return the memory of this process, in KiB, without the pages of mapped files: RssAnon."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.partition("RssAnon:")[2].split()[0])


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


def main() -> int:
    """Call the function and print its result; what it prints itself goes to stderr."""
    warnings.simplefilter("ignore")  # a peer's warnings do not matter here, only what it delivers
    logging.disable(logging.WARNING)
    module, _, name = sys.argv[1].partition(":")
    with redirect_stdout(sys.stderr):
        found = getattr(importlib.import_module(module), name)(*json.loads(sys.argv[2]))
    print(json.dumps(found, default=_plain))
    return 0


if __name__ == "__main__":
    sys.exit(main())
