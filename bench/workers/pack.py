"""Run `ingest pack` as a separate process: its summary, its time and its peak memory."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bucketline.errors import BucketlineError

if TYPE_CHECKING:
    from collections.abc import Sequence

LOOK_EVERY_S = 0.005  # sampling interval of its memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """Summary, time and peak memory of one process."""

    summary: dict[str, Any]
    seconds: float  # from its start to its end
    cpu_seconds: float  # of all its threads, in user and system mode
    resident_bytes: int  # peak (VmHWM), with pages of mapped files, which belong to the page cache
    private_bytes: int  # sampled peak (RssAnon), without them


def pack_apart(command: Sequence[str], *, expected: dict[str, int]) -> Packing:
    """Run `python -m bucketline.ingest pack` with these arguments. `expected`: values that the summary must contain.

    Raises:
        BucketlineError: if it fails, or its summary has other values.
    """
    whole = [sys.executable, "-P", "-m", "bucketline.ingest", "pack", *command, "--json"]
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        begin, cpu_begin = time.perf_counter(), cpu_seconds_of_children()
        with subprocess.Popen(whole, stdin=subprocess.DEVNULL, stdout=out, stderr=err) as process:
            resident, private = _watch(process)
        seconds, cpu_seconds = time.perf_counter() - begin, cpu_seconds_of_children() - cpu_begin
        out.seek(0)
        err.seek(0)
        if process.returncode:
            reason = (err.read().strip().splitlines() or ["it said nothing"])[-1]
            raise BucketlineError(f"`ingest pack {' '.join(command)}` ended with {process.returncode}: {reason}")
        summary = json.loads(out.read())
    found = {name: summary[name] for name in expected}
    if found != expected:
        raise BucketlineError(f"`ingest pack {' '.join(command)}` says {found}, expected {expected}")
    return Packing(summary=summary, seconds=seconds, cpu_seconds=cpu_seconds, resident_bytes=resident, private_bytes=private)


def cpu_seconds_of_children() -> float:
    """Return the CPU time, user and system, of the processes that this one has started and that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _watch(process: subprocess.Popen[bytes]) -> tuple[int, int]:
    """Sample a process's memory until it ends; return its peak resident and private bytes."""
    status, resident, private = Path(f"/proc/{process.pid}/status"), 0, 0
    while process.poll() is None:
        lines = status.read_text(encoding="ascii", errors="replace").splitlines()
        found = dict(line.split(":", 1) for line in lines if line.startswith(("VmHWM", "RssAnon")))
        if found:  # none once it has ended
            resident = max(resident, int(found["VmHWM"].split()[0]) << 10)
            private = max(private, int(found["RssAnon"].split()[0]) << 10)
        time.sleep(LOOK_EVERY_S)
    return resident, private
