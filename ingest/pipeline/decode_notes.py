"""`STORE/decoding/`: which images a process is decoding, so that one that crashes its decoder is found by the next run.

A decoder in C can end the whole process. Each process keeps the digests of the images in flight in a small file that is
mapped into memory: the kernel keeps it when the process dies, and noting an image is a copy of 32 bytes. The next run finds it
without a lock on it, and tries each of its images in a process of its own before it decodes it. One that ends that process by a
signal is rejected, then and later, as long as its bytes are the same.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import queue
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from bucketline.ingest.images.crop import Reason, RejectedError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

FOLDER = "decoding"
SLOT_BYTES = 32
TRIAL_S = 600  # a decoder that takes longer is ended
_NOTES, _SUSPECT, _CRASHES = "notes-", "suspect-", "crashes-"
_TRIAL = "bucketline.ingest.pipeline.trial_decode"


class DecodeNotes:
    """The notes of one process, and what earlier ones left. Where nothing can be written or locked, nothing is noted."""

    def __init__(self, folder: Path, num_slots: int) -> None:
        """Take over what processes noted in the store's `folder` that have ended since; `num_slots`: threads that decode."""
        self._folder = folder / FOLDER
        self._map: mmap.mmap | None = None
        self._suspects: set[bytes] = set()
        self._crashing: set[bytes] = set()
        self._free: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._trial = threading.Lock()
        with suppress(OSError):
            self._folder.mkdir(exist_ok=True)
            self._take_over()
            self._path = self._folder / f"{_NOTES}{os.getpid()}-{os.urandom(4).hex()}"
            self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
            fcntl.flock(self._fd, fcntl.LOCK_EX)  # another process may be looking at it for a moment
            os.ftruncate(self._fd, num_slots * SLOT_BYTES)
            self._map = mmap.mmap(self._fd, num_slots * SLOT_BYTES)
        for slot in range(num_slots):
            self._free.put(slot)
        with suppress(OSError):
            self._suspects = self._marked(_SUSPECT)
            self._crashing = self._marked(_CRASHES)

    def _marked(self, kind: str) -> set[bytes]:
        names = [path.name.removeprefix(kind) for path in self._folder.glob(f"{kind}*")]
        return {bytes.fromhex(name) for name in names if set(name) <= set("0123456789abcdef") and len(name) % 2 == 0}

    def _take_over(self) -> None:
        """Mark the images that processes noted which are gone. What another process takes over meanwhile is left to it."""
        for path in self._folder.glob(f"{_NOTES}*"):
            with suppress(OSError):
                self._take_over_from(path)

    def _take_over_from(self, path: Path) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # an error if its process is running
            data = os.read(fd, 1 << 16)
            for at in range(0, len(data), SLOT_BYTES):
                content = data[at : at + SLOT_BYTES].rstrip(b"\0")
                if content:
                    (self._folder / f"{_SUSPECT}{content.hex()}").touch()
            if data:  # else its process is about to lock it
                path.unlink(missing_ok=True)
        finally:
            os.close(fd)

    @contextmanager
    def of(self, content: bytes, data: bytes) -> Iterator[None]:
        """Note an image, by the digest of its bytes, while it is decoded in this block."""
        self._refuse_crashing(content, data)
        if self._map is None:
            yield
            return
        slot = self._free.get()
        begin = slot * SLOT_BYTES
        self._map[begin : begin + SLOT_BYTES] = content[:SLOT_BYTES].ljust(SLOT_BYTES, b"\0")
        try:
            yield
        finally:
            self._map[begin : begin + SLOT_BYTES] = bytes(SLOT_BYTES)
            self._free.put(slot)

    def _refuse_crashing(self, content: bytes, data: bytes) -> None:
        key = content[:SLOT_BYTES].rstrip(b"\0")
        if key in self._crashing:
            raise RejectedError(Reason.DAMAGED, _CRASHED)
        if key not in self._suspects:
            return
        with self._trial:  # another thread may have an image of the same bytes
            if key in self._suspects:
                self._try(key, data)
                self._suspects.discard(key)
        if key in self._crashing:
            raise RejectedError(Reason.DAMAGED, _CRASHED)

    def _try(self, key: bytes, data: bytes) -> None:
        """Decode an image in a process of its own, and note how that ended."""
        mark = self._folder / f"{_SUSPECT}{key.hex()}"
        try:
            done = subprocess.run(
                [sys.executable, "-P", "-m", _TRIAL], input=data, capture_output=True, timeout=TRIAL_S, check=False
            )
            code = done.returncode
        except subprocess.TimeoutExpired:
            code = -signal.SIGKILL
        if code == -signal.SIGKILL:  # by the time, by hand, or because memory was short
            raise RejectedError(Reason.DAMAGED, _KILLED, is_passing=True)
        with suppress(OSError):
            if code >= 0:
                mark.unlink(missing_ok=True)
            else:
                mark.rename(self._folder / f"{_CRASHES}{key.hex()}")
        if code < 0:
            self._crashing.add(key)

    def close(self) -> None:
        """Remove the notes of this process; those about images that crash remain."""
        if self._map is None:
            return
        self._map.close()
        self._map = None
        with suppress(OSError):
            self._path.unlink(missing_ok=True)
            os.close(self._fd)
            self._folder.rmdir()


_KILLED = f"its decoder was killed, perhaps for its memory, or took more than {TRIAL_S} s; run again"
_CRASHED = "its decoder crashes (tried in a process of its own, after an earlier run had ended with it); save it again"
