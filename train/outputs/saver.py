"""Save checkpoints and exports: the loop stops while they are copied to host memory, and a thread writes the copies."""

from __future__ import annotations

import copy
import os
import time
from concurrent.futures import ThreadPoolExecutor
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.fsdp import FSDPModule

from bucketline.command_line import counted
from bucketline.files import run_marker
from bucketline.files.run_marker import METRICS
from bucketline.train import checkpoint
from bucketline.train.host_copy import HostMemory
from bucketline.train.outputs import saved_tensors
from bucketline.train.outputs.saved_tensors import Copies
from bucketline.train.parallel import from_rank_zero

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from concurrent.futures import Future
    from pathlib import Path

    from torch import Tensor, nn
    from torch.optim import Optimizer

    from bucketline.train.checkpoint import RunState
    from bucketline.train.ema import Average
    from bucketline.train.outputs.hub import HubUploads
    from bucketline.train.outputs.weights import Weights
    from bucketline.train.parallel import TrainRanks
    from bucketline.train.step import Training


class Output(StrEnum):
    """A kind of output of a step, and its folder in the run's."""

    CHECKPOINT = run_marker.CHECKPOINTS
    EXPORT = "exports"


class Saver:
    """Saves one step at a time; every rank has one, and calls it at the same steps.

    The loop stops until an earlier save is written and rank 0's host memory has the tensors, gathered from their shards if
    there are any. Every save takes the same memory: 16 bytes per trained weight with AdamW and a moving average.
    """

    def __init__(
        self, training: Training, ranks: TrainRanks, weights: Weights, saved: Path | None, uploads: HubUploads | None = None
    ) -> None:
        """Start the thread; `saved`: the checkpoint that the run starts from."""
        self._training, self._ranks, self._weights, self._uploads = training, ranks, weights, uploads
        self.saved = {} if saved is None else {Output.CHECKPOINT: saved}  # the newest of each kind
        config = training.config
        self._every_s = config.save_every and config.save_every.seconds
        self._pushes_all = config.push_to_hub is not None and config.push_to_hub.also is not None
        self._saved_s = time.monotonic()
        self._memory = HostMemory()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._under_way: Future[None] | None = None
        self._has_memory = not ranks.is_main

    def restart_clock(self) -> None:
        """Count the age of the last checkpoint from now on."""
        self._saved_s = time.monotonic()

    def is_overdue(self) -> bool:
        """Return whether the last checkpoint is too old by rank 0's clock; other ranks return False."""
        return self._ranks.is_main and self._every_s is not None and time.monotonic() - self._saved_s >= self._every_s

    def save(self, cards: Mapping[Output, str], state: RunState) -> None:
        """Copy the outputs of this step that `cards` are of, unless they are written, and begin to write them.

        Raises:
            TrainError: if the save before failed.
        """
        output_dir = self._training.config.output_dir
        folders = {output: output_dir / output / checkpoint.folder_of_step(state.steps_done) for output in cards}
        due = {output: folder for output, folder in folders.items() if self.saved.get(output) != folder}
        if not due:
            return
        self.finish()  # its copies are in the memory that this one's take
        self._has_memory = True
        training, keeps = self._training, self._ranks.is_main
        if keeps or isinstance(training.bare_model, FSDPModule):
            model, optimizer = training.bare_model, training.optimizer if Output.CHECKPOINT in due else None
            copies = copied(self._memory, self._weights, model, training.average, optimizer, keeps=keeps)
            if keeps:
                self._under_way = self._pool.submit(self._write, copies, due, cards, state)
        self.saved |= due
        if Output.CHECKPOINT in due:
            self.restart_clock()

    def _write(self, copies: Copies, due: Mapping[Output, Path], cards: Mapping[Output, str], state: RunState) -> None:
        config, weights = self._training.config, self._weights
        if Output.CHECKPOINT in due:
            with (config.output_dir / METRICS).open("rb") as lines:
                os.fsync(lines.fileno())  # a checkpoint relies on those before it
            card, keep = cards[Output.CHECKPOINT], config.keep
            saved_tensors.write(config.output_dir, weights, copies, state, card=card, keep=keep)
        if (folder := due.get(Output.EXPORT)) is not None:
            from bucketline.train.outputs.export import write_export

            card, dtype = cards[Output.EXPORT], config.export_dtype
            write_export(folder, weights, copies.config, copies.best, dtype=dtype, card=card)
            if self._uploads is not None and (self._pushes_all or state.steps_done == config.num_steps):
                self._uploads.push(folder, counted(state.steps_done, "step"))

    def poll(self) -> None:
        """Raise the error of the save in progress, if it has failed; never wait. Called after each step."""
        if not self._has_memory:  # the first step has made the optimizer's state; new memory would make the first save slow
            training, state = self._training, self._training.optimizer.state_dict()
            every = sections(self._weights, training.bare_model, training.average, state)
            like = {(name, key): (one.shape, one.dtype) for name, tensors in every.items() for key, one in tensors}
            self._has_memory, self._under_way = True, self._pool.submit(self._memory.reserve, like)
        if self._under_way is not None and self._under_way.done():
            self._finish_own()

    def finish(self) -> None:
        """Wait for the save in progress, on every rank.

        Raises:
            TrainError: if it failed.
        """
        from_rank_zero(self._ranks, self._finish_own)

    def _finish_own(self) -> None:
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            under_way.result()

    def close(self) -> None:
        """Wait for the thread, so that a checkpoint is complete or absent."""
        self._pool.shutdown()


def copied(
    memory: HostMemory, weights: Weights, model: nn.Module, average: Average, optimizer: Optimizer | None, *, keeps: bool = True
) -> Copies:
    """Return copies of everything; without an optimizer, of the best weights. A rank that `keeps` none sends its shards."""
    state = None if optimizer is None else optimizer.state_dict()
    every = sections(weights, model, average, state)
    if state is None and average.is_kept:
        del every["model"]
    copies = {name: memory.copies(name, tensors, keeps=keeps) for name, tensors in every.items()}
    if state is not None:
        by_id = {id(tensor): copies["optimizer"][key] for key, tensor in state_tensors(state).items()} if keeps else {}
        state = copy.deepcopy(state, by_id) if keeps else None
    return Copies(config=weights.config(model), last=copies.get("model"), averaged=copies.get("average"), optimizer=state)


def sections(
    weights: Weights, model: nn.Module, average: Average, state: Mapping[str, Any] | None
) -> dict[str, Iterable[tuple[str, Tensor]]]:
    """Return the tensors of a save, by section and name: an average is computed when it is taken, one at a time."""
    trained = weights.tensors(model)
    every: dict[str, Iterable[tuple[str, Tensor]]] = {"model": trained.items()}
    if average.is_kept:
        every["average"] = ((name, average.of(tensor)) for name, tensor in trained.items())
    if state is not None:
        every["optimizer"] = state_tensors(state).items()
    return every


def state_tensors(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the tensors of an optimizer's state, by the parameter's number and the name."""
    each = {f"{number}.{name}": value for number, own in state["state"].items() for name, value in own.items()}
    return {name: value for name, value in each.items() if isinstance(value, torch.Tensor)}
