"""Write checkpoints and exports, and load the tensors of a checkpoint."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
from dataclasses import dataclass
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError

from bucketline.errors import StateError, TrainError
from bucketline.files.atomic_write import sync_folder
from bucketline.files.disk_space import failed_write
from bucketline.loader.ranks import fail_together
from bucketline.store.format.hashing import file_digest
from bucketline.train.checkpoint import (
    ASIDE_SUFFIX,
    CARD,
    DIGESTS,
    OPTIMIZER_FILE,
    STATE,
    Digest,
    Digests,
    checkpoint_folders,
    damage,
    way_on,
)
from bucketline.train.outputs.metrics import NotFiniteError
from bucketline.train.outputs.weights import average_folder
from bucketline.train.parallel import fill_from_rank_zero, load_optimizer, whole
from bucketline.typed_json import encode

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from torch import Tensor, nn
    from torch.optim import Optimizer

    from bucketline.train.checkpoint import RunState
    from bucketline.train.outputs.weights import Weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Copies:
    """The tensors of a step to be saved, in host memory."""

    config: str  # of the model, or of its adapters
    last: dict[str, Tensor] | None  # weights; None: only an export is written, of their average
    averaged: dict[str, Tensor] | None  # None: there is no average
    optimizer: dict[str, Any] | None  # its state; None: only an export is written

    @property
    def best(self) -> dict[str, Tensor]:
        """The averaged weights; without an average, the last ones."""
        found = self.last if self.averaged is None else self.averaged
        assert found is not None
        return found


def write(folder: Path, weights: Weights, copies: Copies, state: RunState, *, card: str, keep: int) -> None:
    """Write a checkpoint, and remove all but the newest `keep` of its run.

    Raises:
        TrainError: if it cannot be written; earlier checkpoints are unchanged.
    """
    with written_aside(folder, card) as aside:
        assert copies.last is not None
        weights.write(aside / weights.folder, copies.config, copies.last)
        if copies.averaged is not None:
            weights.write(aside / average_folder(weights), copies.config, copies.averaged)
        torch.save(copies.optimizer, aside / OPTIMIZER_FILE)
        (aside / STATE).write_text(json.dumps(encode(state), indent=1), encoding="utf-8")
        paths = sorted(path for path in aside.rglob("*") if path.is_file())
        digests = {path.relative_to(aside).as_posix(): Digest(*file_digest(path)) for path in paths}
        (aside / DIGESTS).write_text(json.dumps(encode(Digests(files=digests)), indent=1), encoding="utf-8")
    num_kept = 0  # of the complete ones, as far as files' lengths show, which cost no reading; what is damaged is `set_aside`
    for step, older in checkpoint_folders(folder.parent.parent).items():
        if num_kept == keep:
            shutil.rmtree(older)
        elif step <= state.steps_done and damage(older, reads=False) is None:
            num_kept += 1


@contextlib.contextmanager
def written_aside(folder: Path, card: str) -> Iterator[Path]:
    """Yield a temporary folder with a card, to fill; at the end, fsync and rename it to `folder`, or remove it after an error.

    Raises:
        TrainError: if it cannot be written; the message says how to continue the run.
    """
    aside = folder.with_name(folder.name + ASIDE_SUFFIX)
    try:
        for left in folder.parent.glob(f"*{ASIDE_SUFFIX}"):  # left by a killed process: this one writes one at a time
            shutil.rmtree(left, ignore_errors=True)
        aside.mkdir(parents=True)
        (aside / CARD).write_text(card, encoding="utf-8")
        yield aside
        _sync_tree(aside)
        if folder.exists():  # incomplete, or from a later step than this run resumed from
            shutil.rmtree(folder)
        aside.replace(folder)
        sync_folder(folder.parent)
    except (OSError, RuntimeError, SafetensorError) as error:  # torch and safetensors report a full disk differently
        said = failed_write(folder.parent.parent, error)  # before that makes room
        shutil.rmtree(aside, ignore_errors=True)
        advice = way_on(folder.parent.parent, first="make room, then ")
        raise TrainError(f"{folder} cannot be written: {said}; {advice}") from error


def expect_finite_weights(model: nn.Module, steps_done: int) -> None:
    """Check that the weights are finite after the last step, whose loss was computed before its update.

    Raises:
        NotFiniteError: if they are not; the message names the step.
    """
    norm = float(whole(torch.nn.utils.get_total_norm([parameter.detach() for parameter in model.parameters()])))
    if not math.isfinite(norm):
        raise NotFiniteError(
            f"after step {steps_done - 1} the weights' norm is {norm}, expected a finite number; no checkpoint is written"
        )


def load_weights(folder: Path, weights: Weights, model: nn.Module, *, averaged: bool = False, alone: bool = True) -> None:
    """Load a checkpoint's weights, or its `averaged` weights, into a placed model.

    `alone`: every rank reads them; else rank 0 does, for all.

    Raises:
        StateError: if the checkpoint belongs to another model.
    """
    own, stored = weights.tensors(model), {}
    with fail_together(), of_this_model(folder):
        if alone or dist.get_rank() == 0:
            stored = weights.read(folder / (average_folder(weights) if averaged else weights.folder))
            if {name: tensor.shape for name, tensor in own.items()} != {name: tensor.shape for name, tensor in stored.items()}:
                raise ValueError(f"its {len(stored)} tensors differ in names or shapes from the model's {len(own)}")
    if not alone:
        fill_from_rank_zero(own, stored)
        return
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(stored[name])


def load_saved_optimizer(folder: Path, optimizer: Optimizer) -> None:
    """Load a checkpoint's optimizer state, under any sharding.

    Raises:
        StateError: if the checkpoint belongs to another model.
    """
    with of_this_model(folder):
        saved = torch.load(folder / OPTIMIZER_FILE, map_location="cpu", weights_only=True, mmap=True)
        load_optimizer(optimizer, saved)


@contextlib.contextmanager
def of_this_model(folder: Path) -> Iterator[None]:
    """Turn the errors of the body, which reads a checkpoint's tensors, into a StateError."""
    try:
        yield
    except (OSError, EOFError, RuntimeError, ValueError, LookupError, UnpicklingError, SafetensorError) as error:
        raise StateError(f"{folder} does not fit this model: {error!s:.300}; resume with the --model of the run") from error


def _sync_tree(folder: Path) -> None:
    for path in [*folder.rglob("*"), folder]:
        if path.is_dir():
            sync_folder(path)
        else:
            with path.open("rb") as file:
                os.fsync(file.fileno())
