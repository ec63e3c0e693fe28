"""One writer's work, one thread at a time, in one process."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

from bucketline.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path


class OneAtATime:
    """A lock for the threads of the process that uses it first; a thread may take it again. Unpickled, it is a new one.

    A child that is forked after that is refused: it has a copy of what the writer holds in memory, and the files and locks are
    its parent's.
    """

    def __init__(self, item: Path) -> None:
        """Take nothing yet; `item` is what is written."""
        self._item = item
        self._lock = threading.RLock()
        self._pid: int | None = None

    def __reduce__(self) -> tuple[type[OneAtATime], tuple[Path]]:
        return OneAtATime, (self._item,)

    @property
    def is_inherited(self) -> bool:
        """True if this process was forked from the one that uses it."""
        return self._pid not in (None, os.getpid())

    def __enter__(self) -> None:
        if self.is_inherited:
            raise UsageError(
                f"process {self._pid} writes {self._item}, and process {os.getpid()} was forked from it: what this one adds "
                "would be lost; make a writer for each process by `StoreWriter.part`, before it is used"
            )
        self._lock.acquire()
        self._pid = os.getpid()

    def __exit__(self, *_: object) -> None:
        self._lock.release()
