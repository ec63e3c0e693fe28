"""One cold run: drop a store's pages, read in a fresh process, and count the run only if the disk was read."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from bucketline.errors import BucketlineError

if TYPE_CHECKING:
    from pathlib import Path

FROM_DISK = 0.95  # of the payload, at least
TRIES = 3


class NotColdError(BucketlineError):
    """A cold run read too little from the disk to count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ColdRun:
    """What a fresh process is to read, and how."""

    reader: str  # a name of `cold_reader.READERS`
    store: str
    plan: str  # the file of what is read, made before the pages are dropped
    batch_size: int
    batches: int
    ahead: int = 0  # batches asked for ahead; 0: none
    threads: int = 1
    columns: str = "latent"  # or `all`
    readahead: bool = False  # of py-lmdb


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """What a fresh process did."""

    seconds: float
    payload_bytes: int
    read_bytes: int  # from the disk, by /proc/self/io

    @property
    def counts(self) -> bool:
        return self.read_bytes >= FROM_DISK * self.payload_bytes

    @property
    def gb_s(self) -> float:
        return self.payload_bytes / self.seconds / 1e9


def drop_pages(path: Path) -> None:
    """Write a file's (or all files' of a folder) pages to the disk and drop them from the page cache.

    Pages that a process has mapped stay: drop them before they are mapped.
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


def read_apart(run: ColdRun) -> Read:
    """Carry out a run in a process of its own.

    Raises:
        BucketlineError: where it fails, with its last line.
    """
    command = [sys.executable, "-m", "bucketline.bench.cold_reader", json.dumps(asdict(run))]
    done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"])[-1]
        raise BucketlineError(f"the cold run `{run.reader}` failed: {reason}")
    return Read(**json.loads(done.stdout))


def cold_rate(run: ColdRun, path: Path) -> float:
    """Drop the pages of `path`, read, and give GB/s of the payload.

    Raises:
        NotColdError: where no try read enough from the disk.
    """
    read = None
    for _ in range(TRIES):
        drop_pages(path)
        read = read_apart(run)
        if read.counts:
            return read.gb_s
    assert read is not None
    raise NotColdError(
        f"`{run.reader}` read {read.read_bytes} bytes from the disk for a payload of {read.payload_bytes}, expected "
        f"{FROM_DISK} of it at least, {TRIES} times; give --stores a folder on a disk (not tmpfs) that nobody else reads"
    )
