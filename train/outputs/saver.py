"""Save checkpoints while training continues: copies in host memory, written by a thread."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from torch.optim.optimizer import register_optimizer_step_pre_hook

from bucketline.train.outputs import checkpoint
from bucketline.train.outputs.snapshot import AVERAGE, MODEL, OPTIMIZER, Snapshot, Snapshots
from bucketline.train.parallel import from_rank_zero

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future
    from pathlib import Path

    from bucketline.train.outputs.checkpoint import RunState
    from bucketline.train.outputs.weights import Weights
    from bucketline.train.parallel import TrainRanks
    from bucketline.train.step import Training


class Saver:
    """Saves one step at a time; every rank has one, and calls it at the same steps.

    The loop stops only while the tensors are named and an earlier save is finished. A thread copies them to host memory
    during the next step, whose update waits for it, and another thread writes the copies.
    """

    def __init__(self, training: Training, ranks: TrainRanks, weights: Weights, saved: Path | None) -> None:
        """Start the threads; `saved`: the checkpoint that the run starts from."""
        self._training, self._ranks, self._weights = training, ranks, weights
        self.saved = saved
        self._saved_s = time.monotonic()
        self._snapshots = Snapshots(ranks, weights, training.bare_model, training.average, training.optimizer)
        self._sections = [MODEL, *[AVERAGE] * training.average.is_kept, OPTIMIZER]
        self._has_reserved = False
        # of every optimizer, so that none changes what is still being copied
        self._hook = register_optimizer_step_pre_hook(lambda *_: self.wait_for_copies())
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._under_way: Future[None] | None = None

    def restart_clock(self) -> None:
        """Count the age of the last checkpoint from now on."""
        self._saved_s = time.monotonic()

    def is_overdue(self) -> bool:
        """Return whether the last checkpoint is too old by rank 0's clock; other ranks return False."""
        minutes = self._training.config.checkpoint_minutes
        return self._ranks.is_main and minutes is not None and time.monotonic() - self._saved_s >= 60 * minutes

    def save(self, state: RunState, card: str, sync_metrics: Callable[[], None]) -> None:
        """Begin to save this step, unless it is saved; `sync_metrics` is called before the checkpoint appears.

        Raises:
            TrainError: if the save before failed.
        """
        output_dir = self._training.config.output_dir
        if self.saved is not None and checkpoint.step_of(self.saved) == state.steps_done:
            return
        self.saved = checkpoint.place(output_dir, state.steps_done)
        self.restart_clock()
        self.finish()  # its copies are in the memory that this one's take
        taken = self._snapshots.take(self._sections)
        self._under_way = self._pool.submit(self._write, taken, state, card, sync_metrics)

    def _write(self, taken: Snapshot, state: RunState, card: str, sync_metrics: Callable[[], None]) -> None:
        self._snapshots.wait()
        sections = map(self._snapshots.gathered, taken.sections.values())
        try:
            if self._ranks.is_main:
                sync_metrics()
                config = self._training.config
                checkpoint.write(
                    config.output_dir, self._weights, taken, sections, state, card=card, keep=config.keep_checkpoints
                )
        finally:
            for _ in sections:  # the other ranks send them, whether rank 0 can write or not
                pass

    def wait_for_copies(self) -> None:
        """Wait until the tensors being saved may change."""
        self._snapshots.wait()

    def poll(self) -> None:
        """Raise the error of the save in progress, if it has failed; never wait. Called after each step."""
        if not self._has_reserved:  # else the first save takes longer than the others
            self._snapshots.reserve(self._sections)
            self._has_reserved = True
        if self._under_way is not None and self._under_way.done():
            self._finish_own()

    def finish(self) -> None:
        """Wait for the save in progress, on every rank.

        Raises:
            TrainError: if it failed.
        """
        from_rank_zero(self._ranks, self._finish_own)
        self._finish_own()

    def _finish_own(self) -> None:
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            under_way.result()

    def close(self) -> None:
        """Wait for the threads, so that a checkpoint is complete or absent."""
        self._hook.remove()
        self._snapshots.close()
        self._pool.shutdown()
