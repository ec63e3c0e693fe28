"""Checkpoints: a folder per checkpoint, whole or not there; the newest few stay.

checkpoints/step-00000120/
    unet/             the weights as diffusers loads them (config.json, safetensors); or transformer/, or lora/
    unet_ema/         their moving average, the same way
    optimizer.pt      the optimizer's state, read with weights_only=True
    state.json        everything else: step, loader state, store, the window that was open
    README.md         the model card
    digests.json      length and digest of every other file; written last, so a checkpoint without it is torn
"""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import math
import os
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError

from bucketline.errors import StateError, TrainError
from bucketline.store.digests import file_digest
from bucketline.store.durable import sync_folder
from bucketline.store.typed_json import Json, TypedJsonError, decode, encode
from bucketline.train import sharding
from bucketline.train.metrics import WindowState  # noqa: TC001 - `decode` reads this annotation at run time
from bucketline.train.open_stores import TrainedStore  # noqa: TC001 - likewise
from bucketline.train.sharding import whole

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from concurrent.futures import Future

    from torch import Tensor, nn
    from torch.optim import Optimizer

    from bucketline.train.weights import Weights

log = logging.getLogger(__name__)

VERSION = 3
CHECKPOINTS = "checkpoints"
NAME = re.compile(r"step-([0-9]{8,})")
ASIDE_SUFFIX = ".partial"
OPTIMIZER = "optimizer.pt"
STATE = "state.json"
CARD = "README.md"
DIGESTS = "digests.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """What a checkpoint keeps besides tensors."""

    version: int
    steps_done: int
    world_size: int
    stores: tuple[TrainedStore, ...]
    plan_digest: str
    loader: dict[str, Json]
    window: WindowState | None
    config: dict[str, Json]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Digest:
    num_bytes: int
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Digests:
    files: dict[str, _Digest]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedParts:
    """The tensors of a run: what a checkpoint writes and what a resume fills."""

    model: nn.Module
    average: nn.Module
    optimizer: Optimizer
    weights: Weights  # what of model and average is written, and how


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A run's tensors at one step, in the host's memory: the run goes on while they are written."""

    config: str  # of the model, or of its adapters
    model: dict[str, Tensor]
    average: dict[str, Tensor]
    optimizer: dict[str, Any]


def snapshot(parts: TrainedParts, *, keeps: bool) -> Snapshot:
    """Copy the tensors to the host; every process calls it where each holds a part, and one of them `keeps` the copies."""

    def copied(tensor: Tensor) -> Tensor:
        full = whole(tensor.detach())
        return full.to("cpu", copy=True).contiguous() if keeps else full.new_empty(0)

    saved = parts.optimizer.state_dict()
    state = {number: {name: copied(value) for name, value in entry.items()} for number, entry in saved["state"].items()}
    return Snapshot(
        config=parts.weights.config(parts.model),
        model={name: copied(tensor) for name, tensor in parts.weights.tensors(parts.model).items()},
        average={name: copied(tensor) for name, tensor in parts.weights.tensors(parts.average).items()},
        optimizer={**saved, "param_groups": copy.deepcopy(saved["param_groups"]), "state": state},
    )


def write(output_dir: Path, weights: Weights, taken: Snapshot, state: RunState, *, card: str, keep: int) -> Path:
    """Write a checkpoint aside, make it durable, move it into place, and remove all but the newest `keep`.

    Raises:
        TrainError: where it cannot be written; the checkpoints before it are as they were.
    """
    folder = place(output_dir, state.steps_done)
    aside = folder.with_name(folder.name + ASIDE_SUFFIX)
    try:
        for left in folder.parent.glob(f"*{ASIDE_SUFFIX}"):  # by a process that was killed: this one writes one at a time
            shutil.rmtree(left, ignore_errors=True)
        aside.mkdir(parents=True)
        for name, tensors in ((weights.folder, taken.model), (f"{weights.folder}_ema", taken.average)):
            (aside / name).mkdir()
            weights.write(aside / name, taken.config, tensors)
        torch.save(taken.optimizer, aside / OPTIMIZER)
        (aside / STATE).write_text(json.dumps(encode(state), indent=1), encoding="utf-8")
        (aside / CARD).write_text(card, encoding="utf-8")
        names = sorted(path.relative_to(aside).as_posix() for path in aside.rglob("*") if path.is_file())
        digests = {name: _Digest(num_bytes=size, digest=value) for name in names for size, value in [file_digest(aside / name)]}
        (aside / DIGESTS).write_text(json.dumps(encode(_Digests(files=digests)), indent=1), encoding="utf-8")
        _sync_tree(aside)
        if folder.exists():  # a torn one, or one that this run has gone back behind
            shutil.rmtree(folder)
        aside.replace(folder)
        sync_folder(folder.parent)
    except (
        OSError,
        RuntimeError,
        SafetensorError,
    ) as error:  # torch and safetensors report a full disk each in its own way
        shutil.rmtree(aside, ignore_errors=True)
        raise TrainError(
            f"{folder} cannot be written: {error}; the checkpoints before it are untouched; make room, then go on with --resume"
        ) from error
    # A torn one that this run has gone back behind must not count as one of the newest.
    for old in [one for one in _folders(output_dir) if step_of(one) <= state.steps_done][keep:]:
        shutil.rmtree(old)
    return folder


class Background:
    """One checkpoint at a time, written by a thread; what it fails with is raised by the next call."""

    def __init__(self) -> None:
        """Start nothing yet."""
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._under_way: Future[Path] | None = None

    def start(self, make: Callable[[], Path]) -> None:
        """Wait for the checkpoint before, and write this one."""
        self.finish()
        self._under_way = self._pool.submit(make)

    def poll(self) -> None:
        """Raise what the checkpoint under way has failed with, if it has; waits for nothing."""
        if self._under_way is not None and self._under_way.done():
            self.finish()

    def finish(self) -> None:
        """Wait for the checkpoint under way."""
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            under_way.result()

    def close(self) -> None:
        """Wait for the thread: what it writes is whole, or not there."""
        self._pool.shutdown()


def expect_finite_weights(model: nn.Module, steps_done: int) -> None:
    """Check that the last step left numbers behind: its own loss was taken before it changed the weights.

    Raises:
        TrainError: naming the step.
    """
    norm = float(whole(torch.nn.utils.get_total_norm([parameter.detach() for parameter in model.parameters()])))
    if not math.isfinite(norm):
        raise TrainError(
            f"step {steps_done - 1} left weights whose norm is {norm}, expected a finite one; no checkpoint was made of "
            "them: go on from the last one (--resume) or start anew, with a lower --learning-rate"
        )


def place(output_dir: Path, steps_done: int) -> Path:
    """Give the folder of the checkpoint at a step."""
    return output_dir / CHECKPOINTS / f"step-{steps_done:08d}"


def last_whole(output_dir: Path) -> Path:
    """Give the newest checkpoint that is whole; one that is not is passed over with a warning that names it.

    Raises:
        TrainError: where there is none.
    """
    for folder in _folders(output_dir):
        if (wrong := damage(folder)) is None:
            return folder
        log.warning("%s is torn (%s); looking for one before it", folder, wrong)
    raise TrainError(
        f"{output_dir / CHECKPOINTS} holds no whole checkpoint to resume; start anew, without --resume, into a new folder"
    )


def step_of(folder: Path) -> int:
    """Give the steps done at a checkpoint, from its name."""
    return int(folder.name.removeprefix("step-"))


def damage(folder: Path) -> str | None:
    """Say what is wrong with a checkpoint's files; None where it is whole."""
    try:
        expected = decode(_Digests, json.loads((folder / DIGESTS).read_bytes())).files
        for name, entry in expected.items():
            if Path(name).is_absolute() or ".." in Path(name).parts:
                return f"{DIGESTS} names {name}"
            size, value = file_digest(folder / name)
            if (size, value) != (entry.num_bytes, entry.digest):
                return f"{name} has {size} bytes with digest {value}, expected {entry.num_bytes} with {entry.digest}"
    except OSError as error:
        return f"{Path(error.filename).name if error.filename else folder}: {error.strerror}"
    except (ValueError, RecursionError) as error:
        return f"{DIGESTS}: {error}"
    return None if STATE in expected else f"{DIGESTS} does not list {STATE}"


def read_state(folder: Path) -> RunState:
    """Read a whole checkpoint's state.

    Raises:
        StateError: where it was written by a newer version.
    """
    try:
        document = json.loads((folder / STATE).read_bytes())
        if document.get("version") != VERSION:
            raise StateError(
                f"{folder / STATE} has version {document.get('version')}, this trainer reads {VERSION}; "
                "resume with the version of bucketline that wrote it"
            )
        return decode(RunState, document)
    except (TypedJsonError, AttributeError, ValueError, RecursionError) as error:
        raise StateError(f"{folder / STATE} is no checkpoint state of this trainer: {error}") from error


def load_weights(folder: Path, weights: Weights, model: nn.Module, average: nn.Module) -> None:
    """Fill model and average from a checkpoint, before they are sharded.

    Raises:
        StateError: where the checkpoint is of another model.
    """
    with _of_this_model(folder):
        weights.fill(folder / weights.folder, model)
        weights.fill(folder / f"{weights.folder}_ema", average)


def load_optimizer(folder: Path, parts: TrainedParts) -> None:
    """Fill the optimizer from a checkpoint, whoever shares it now.

    Raises:
        StateError: where the checkpoint is of another model.
    """
    with _of_this_model(folder):
        sharding.load_optimizer(parts.optimizer, torch.load(folder / OPTIMIZER, map_location="cpu", weights_only=True))


@contextlib.contextmanager
def _of_this_model(folder: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, EOFError, RuntimeError, ValueError, LookupError, UnpicklingError, SafetensorError) as error:
        raise StateError(
            f"{folder} does not fit the model at hand: {error!s:.300}; resume with the --model that the run began with"
        ) from error


def _folders(output_dir: Path) -> list[Path]:
    """Give the checkpoints' folders, newest first, whole or torn."""
    found = [
        (int(match[1]), path) for path in (output_dir / CHECKPOINTS).glob("step-*") if (match := NAME.fullmatch(path.name))
    ]
    return [path for _, path in sorted(found, reverse=True)]


def _sync_tree(folder: Path) -> None:
    for path in [*folder.rglob("*"), folder]:
        if path.is_dir():
            sync_folder(path)
        else:
            with path.open("rb") as file:
                os.fsync(file.fileno())
