"""Save checkpoints and exports while training continues: copies in host memory, written by a thread."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from enum import StrEnum
from typing import TYPE_CHECKING

from torch.optim.optimizer import register_optimizer_step_pre_hook

from bucketline.command_line import counted
from bucketline.files.run_marker import METRICS
from bucketline.train.outputs import checkpoint
from bucketline.train.outputs.export import write_export
from bucketline.train.outputs.snapshot import AVERAGE, MODEL, OPTIMIZER, Snapshots
from bucketline.train.parallel import from_rank_zero

if TYPE_CHECKING:
    from collections.abc import Mapping
    from concurrent.futures import Future
    from pathlib import Path

    from bucketline.train.outputs.checkpoint import RunState
    from bucketline.train.outputs.hub import HubUploads
    from bucketline.train.outputs.snapshot import Snapshot
    from bucketline.train.outputs.weights import Weights
    from bucketline.train.parallel import TrainRanks
    from bucketline.train.step import Training


class Output(StrEnum):
    """A kind of output of a step, and its folder in the run's."""

    CHECKPOINT = checkpoint.CHECKPOINTS
    EXPORT = "exports"


class Saver:
    """Saves one step at a time; every rank has one, and calls it at the same steps.

    The loop stops only while the tensors are named and an earlier save is finished. A thread copies them to host memory
    during the next step, whose update waits for it, and another thread writes the copies.
    """

    def __init__(
        self, training: Training, ranks: TrainRanks, weights: Weights, saved: Path | None, uploads: HubUploads | None = None
    ) -> None:
        """Start the threads; `saved`: the checkpoint that the run starts from."""
        self._training, self._ranks, self._weights, self._uploads = training, ranks, weights, uploads
        self.saved = {} if saved is None else {Output.CHECKPOINT: saved}  # the newest of each kind
        self._saved_s = time.monotonic()
        self._snapshots = Snapshots(ranks, weights, training.bare_model, training.average, training.optimizer)
        self._sections = [MODEL, *[AVERAGE] * training.average.is_kept, OPTIMIZER]
        self._has_reserved = False
        self._taken: Snapshot | None = None
        # before all that changes what is still being copied: any optimizer's step, and an exchange of weights and averages
        self._hook = register_optimizer_step_pre_hook(lambda *_: self._wait_for_copies())
        training.before_exchange.append(self._wait_for_copies)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._under_way: Future[None] | None = None

    def restart_clock(self) -> None:
        """Count the age of the last checkpoint from now on."""
        self._saved_s = time.monotonic()

    def is_overdue(self) -> bool:
        """Return whether the last checkpoint is too old by rank 0's clock; other ranks return False."""
        minutes = self._training.config.checkpoint_minutes
        return self._ranks.is_main and minutes is not None and time.monotonic() - self._saved_s >= 60 * minutes

    def save(self, cards: Mapping[Output, str], state: RunState) -> None:
        """Begin to write the outputs of this step that `cards` are of, unless they are written.

        Raises:
            TrainError: if the save before failed.
        """
        config, step = self._training.config, state.steps_done
        folders = {output: config.output_dir / output / checkpoint.folder_of_step(step) for output in cards}
        due = {output: folder for output, folder in folders.items() if self.saved.get(output) != folder}
        if not due:
            return
        self.finish()  # its copies are in the memory that this one's take
        best = AVERAGE if AVERAGE in self._sections else MODEL
        taken = self._taken = self._snapshots.take(self._sections if Output.CHECKPOINT in due else [best])

        def write() -> None:
            taken.copied.result()
            names = [*self._sections * (Output.CHECKPOINT in due), *[best] * (Output.EXPORT in due)]
            sections = (self._snapshots.gathered(taken, name) for name in names)
            try:
                if self._ranks.is_main and Output.CHECKPOINT in due:
                    with (config.output_dir / METRICS).open("rb") as lines:
                        os.fsync(lines.fileno())  # a checkpoint relies on those before it
                    card, keep = cards[Output.CHECKPOINT], config.keep_checkpoints
                    checkpoint.write(config.output_dir, self._weights, taken, sections, state, card=card, keep=keep)
                if self._ranks.is_main and Output.EXPORT in due:
                    card, dtype = cards[Output.EXPORT], config.export_dtype
                    write_export(due[Output.EXPORT], self._weights, taken.config, next(sections), dtype=dtype, card=card)
                    if self._uploads is not None and (config.push_exports or step == config.max_steps):
                        self._uploads.push(due[Output.EXPORT], counted(step, "step"))
            finally:
                for _ in sections:  # the other ranks send them, whether rank 0 can write or not
                    pass

        self.saved |= due
        if Output.CHECKPOINT in due:
            self.restart_clock()
        self._under_way = self._pool.submit(write)

    def _wait_for_copies(self) -> None:
        if self._taken is not None:
            self._taken.copied.result()

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
        self._snapshots.copies.close()
        self._pool.shutdown()
