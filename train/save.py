"""Save checkpoints and exports: the loop stops while they are copied to host memory, and a thread writes the copies."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from bucketline.command_line import counted
from bucketline.files import run_marker
from bucketline.files.run_marker import METRICS
from bucketline.loader.ranks import DISK_TIME, fail_together
from bucketline.train.checkpoint import aside_of, begin_aside, copied, explained, folder_of_step, write, write_optimizer

if TYPE_CHECKING:
    from collections.abc import Mapping
    from concurrent.futures import Future
    from pathlib import Path

    from bucketline.train.checkpoint import RunState
    from bucketline.train.hub import HubUploads
    from bucketline.train.models.weights import Weights
    from bucketline.train.parallel import TrainRanks
    from bucketline.train.step import Training


class Output(StrEnum):
    """A kind of output of a step, and its folder in the run's."""

    CHECKPOINT = run_marker.CHECKPOINTS
    EXPORT = "exports"


class Saver:
    """Saves one step at a time; every rank has one, and calls it at the same steps.

    The loop stops until an earlier save is written and host memory has copies of the tensors, which a thread writes then. Rank
    0's has all weights, gathered from their shards if there are any; of the optimizer's state each rank has its own shards.
    """

    def __init__(
        self, training: Training, ranks: TrainRanks, weights: Weights, saved: Path | None, uploads: HubUploads | None = None
    ) -> None:
        """Start the thread; `saved`: the checkpoint that the run starts from."""
        self._training, self._ranks, self._weights, self._uploads = training, ranks, weights, uploads
        self.saved = {} if saved is None else {Output.CHECKPOINT: saved}  # the newest of each kind
        config = training.config
        self.every_steps = config.save_every and config.save_every.steps
        self._every_s = config.save_every and config.save_every.seconds
        self._pushes_all = config.push_to_hub is not None and config.push_to_hub.also is not None
        self._saved_s = time.monotonic()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._under_way: Future[None] | None = None
        self._is_sharded = isinstance(training.bare_model, FSDPModule)
        self._group = dist.new_group(backend="gloo", timeout=DISK_TIME) if self._is_sharded else None  # the thread's own

    def restart_clock(self) -> None:
        """Count the age of the last checkpoint from now on."""
        self._saved_s = time.monotonic()

    def is_overdue(self) -> bool:
        """Return whether the last checkpoint is too old by rank 0's clock; other ranks return False."""
        return self._ranks.is_main and self._every_s is not None and time.monotonic() - self._saved_s >= self._every_s

    def save(self, cards: Mapping[Output, str], state: RunState) -> None:
        """Copy the outputs of this step that `cards` are of, unless they are written, and begin to write them."""
        output_dir, name = self._training.config.output_dir, folder_of_step(state.steps_done)
        due = {output: output_dir / output / name for output in cards if self.saved.get(output) != output_dir / output / name}
        if not due:
            return
        self.finish()
        with fail_together():
            for folder in due.values() if self._ranks.is_main else ():
                begin_aside(folder)
        if self._ranks.is_main or self._is_sharded:
            training = self._training
            optimizer = training.optimizer if Output.CHECKPOINT in due else None
            keeps = self._ranks.is_main
            copies = copied(self._weights, training.bare_model, training.average, optimizer, keeps=keeps)
            self._under_way = self._pool.submit(self._write, copies, due, cards, state)
        self.saved |= due
        if Output.CHECKPOINT in due:
            self.restart_clock()

    def _write(self, copies: dict[str, Any], due: Mapping[Output, Path], cards: Mapping[Output, str], state: RunState) -> None:
        config, weights = self._training.config, self._weights
        own_config = weights.config(self._training.bare_model)
        if (folder := due.get(Output.CHECKPOINT)) is not None:
            if not self._ranks.is_main:
                with explained(folder):
                    write_optimizer(aside_of(folder), copies["optimizer"], self._group)
                return
            with (config.output_dir / METRICS).open("rb") as lines:
                os.fsync(lines.fileno())  # a checkpoint relies on those before it
            write(
                folder, weights, own_config, copies, state, card=cards[Output.CHECKPOINT], keep=config.keep, group=self._group
            )
        if (folder := due.get(Output.EXPORT)) is not None and self._ranks.is_main:
            from bucketline.train.export import write_export

            best, card = copies.get("average") or copies["last"], cards[Output.EXPORT]
            write_export(folder, weights, own_config, best, dtype=config.export_dtype, card=card)
            if self._uploads is not None and (self._pushes_all or state.steps_done == config.num_steps):
                self._uploads.push(folder, counted(state.steps_done, "step"))

    def poll(self) -> None:
        """Raise the error of the save in progress, if it has failed; never wait. Called after each step."""
        if self._under_way is not None and self._under_way.done():
            self._finish_own()

    def finish(self) -> None:
        """Wait for the save in progress, on every rank."""
        with fail_together():
            self._finish_own()

    def _finish_own(self) -> None:
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            under_way.result()

    def close(self) -> None:
        """Wait for the thread, so that a checkpoint is complete or absent."""
        self._pool.shutdown()
