"""The lock on a run's folder: one run at a time writes there, and the kernel releases it when that run's process ends."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from bucketline.errors import LockedError, NoLocksError
from bucketline.files.locks import FileLock
from bucketline.train.outputs import run_dir

if TYPE_CHECKING:
    from bucketline.train.config import TrainConfig
    from bucketline.train.outputs.checkpoint import Start

log = logging.getLogger(__name__)

_LOCK = ".lock"  # in the run's folder, where it stays


class RunLock:
    """Exclusive use of a run's folder, on rank 0: from before it is read, if there is one, until `release`."""

    def __init__(self, config: TrainConfig) -> None:
        self._config = config
        self._lock: FileLock | None = None

    def find_start(self) -> Start:
        """Return the start of the run, which `run_dir` finds; hold a folder that a run has used before.

        Raises:
            LockedError: if another run uses it; the message names its process and machine.
            BucketlineError: as `run_dir.find_start`.
        """
        if (self._config.output_dir / _LOCK).exists():
            self._acquire()
        return run_dir.find_start(self._config)

    def take(self, start: Start) -> bytes:
        """Claim the folder for the run, as `run_dir.take` does, and hold it.

        Raises:
            LockedError: if another run uses it by now.
            TrainError: if the folder cannot be written.
        """
        if self._lock is None:
            run_dir.make(self._config.output_dir)
            self._acquire()
            if not self._config.resume:
                run_dir.find_start(self._config)  # another run may have begun and ended there since
        return run_dir.take(self._config, start)

    def _acquire(self) -> None:
        output = self._config.output_dir
        try:
            self._lock = FileLock(output / _LOCK, item=output)
        except LockedError as error:
            raise LockedError(f"{error}, or choose another --output-dir") from error
        except NoLocksError as error:
            log.warning("%s; nothing keeps another run from writing to %s as well", error, output)

    def release(self) -> None:
        """Let other runs use the folder."""
        if self._lock is not None:
            self._lock.release()
