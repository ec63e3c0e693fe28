"""Save checkpoints and exports: the loop stops while they are copied to host memory, and a thread writes the copies."""

from __future__ import annotations

import copy
import os
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from enum import StrEnum
from itertools import cycle
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.fsdp import FSDPModule

from bucketline.command_line import counted
from bucketline.files import run_marker
from bucketline.files.run_marker import METRICS
from bucketline.train import checkpoint
from bucketline.train.outputs import saved_tensors
from bucketline.train.outputs.saved_tensors import Copies
from bucketline.train.parallel import from_rank_zero, whole

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
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


CHUNK_BYTES = 128 << 20


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
        self.every_steps = config.save_every and config.save_every.steps
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
        if (folder := due.get(Output.CHECKPOINT)) is not None:
            with (config.output_dir / METRICS).open("rb") as lines:
                os.fsync(lines.fileno())  # a checkpoint relies on those before it
            card, keep = cards[Output.CHECKPOINT], config.keep
            saved_tensors.write(folder, weights, copies, state, card=card, keep=keep)
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


class HostMemory:
    """Memory for copies of tensors; by the same name, the next copies take the same, since new memory is slow to fill.

    A GPU fills one of two pinned chunks while the host empties the other: pageable memory, which the copies are in, takes them
    at a fraction of the speed.
    """

    def __init__(self) -> None:
        self._chunks: list[Tensor] = []
        self._memory: dict[tuple[str, str], Tensor] = {}

    def reserve(self, like: Mapping[tuple[str, str], tuple[torch.Size, torch.dtype]]) -> None:
        """Make the memory for copies of tensors of such shapes and dtypes, by the name of the copies and the tensor's."""
        for (name, key), (shape, dtype) in like.items():
            self._of(name, key, shape, dtype).zero_()  # which has the system provide it

    def _of(self, name: str, key: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        own = self._memory.get((name, key))
        if own is None or (own.shape, own.dtype) != (shape, dtype):
            own = self._memory[name, key] = torch.empty(shape, dtype=dtype)
        return own

    def copies(self, name: str, tensors: Iterable[tuple[str, Tensor]], *, keeps: bool = True) -> dict[str, Tensor]:
        """Return whole tensors, contiguous, which overwrite the former copies of this name; nothing if this rank `keeps` none.

        Shards are gathered a tensor at a time, so every rank that has some must call this with the same tensors.
        """
        found: dict[str, Tensor] = {}

        def from_device() -> Iterator[tuple[Tensor, Tensor]]:
            for key, tensor in tensors:
                full = whole(tensor.detach())
                if not keeps:
                    continue
                own = found[key] = self._of(name, key, full.shape, full.dtype)
                if full.is_cuda:
                    yield full, own
                else:
                    own.copy_(full)

        if keeps and not self._chunks and torch.cuda.is_available():
            self._chunks = [torch.empty(CHUNK_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        copy_through(self._chunks, from_device())
        return found


def copy_through(chunks: Sequence[Tensor], pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Copy each source to its target in host memory, in parts of a chunk's size, each through one of the chunks.

    A part on a GPU reaches a chunk while the host empties the one before. Return when all are copied.
    """
    filled: deque[tuple[Tensor, Tensor, torch.cuda.Event | None]] = deque()

    def empty() -> None:
        place, chunk, copied = filled.popleft()
        if copied is not None:
            copied.synchronize()
        place.copy_(chunk)

    turns = cycle(chunks)
    for source, target in pairs:
        # channels_last weights are turned on the device, one at a time
        count = len(chunks[0]) // source.element_size()
        parts, places = (torch.split(one.contiguous().view(-1), count) for one in (source, target))
        for part, place in zip(parts, places, strict=True):
            if len(filled) == len(chunks):
                empty()
            chunk = next(turns)[: part.nbytes].view(part.dtype).copy_(part, non_blocking=True)
            copied = torch.cuda.current_stream(part.device).record_event() if part.is_cuda else None
            filled.append((place, chunk, copied))
    while filled:
        empty()
