"""Checkpoints: one folder each, renamed into place when complete; only the newest few are kept.

checkpoints/step-00000120/
    unet/             the weights as diffusers loads them (config.json, safetensors); or transformer/, or lora/
    unet_ema/         their moving average, in the same format, unless --ema is off
    scheduler/        of a whole model: the noise schedule's configuration with the trained objective, as diffusers reads it
    optimizer.pt      the optimizer's state, read with weights_only=True
    state.json        everything else: step, loader state, stores, the open metrics window
    README.md         the model card
    digests.json      length and digest of every other file; written last, so a checkpoint without it is incomplete
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import math
import os
import re
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError

from bucketline.errors import StateError, TrainError
from bucketline.files.atomic_write import sync_folder
from bucketline.files.disk_space import failed_write
from bucketline.files.run_marker import CHECKPOINTS
from bucketline.loader.history import StoreId  # noqa: TC001 - `decode` reads the annotations at run time
from bucketline.store.format.hashing import file_digest
from bucketline.train import parallel
from bucketline.train.option_names import translated
from bucketline.train.outputs.metrics import NotFiniteError, WindowState, has_steps
from bucketline.train.outputs.weights import average_folder
from bucketline.train.parallel import whole
from bucketline.typed_json import Json, decode, encode

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from torch import Tensor, nn
    from torch.optim import Optimizer

    from bucketline.train.outputs.weights import Weights

log = logging.getLogger(__name__)

VERSION = 3
CHECKPOINT_NAME = re.compile(r"step-([0-9]{8,})")
ASIDE_SUFFIX = ".partial"
DAMAGED_SUFFIX = ".damaged"
OPTIMIZER_FILE = "optimizer.pt"
STATE = "state.json"
CARD = "README.md"
DIGESTS = "digests.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """The contents of a checkpoint besides tensors."""

    version: int
    steps_done: int
    world_size: int
    stores: tuple[StoreId, ...]
    plan_digest: str
    loader: dict[str, Json]
    window: WindowState | None
    config: dict[str, Json]


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


@dataclass(frozen=True, slots=True)
class _Digest:
    num_bytes: int
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Digests:
    files: dict[str, _Digest]


def write(
    output_dir: Path,
    weights: Weights,
    copies: Copies,
    state: RunState,
    *,
    card: str,
    keep: int,
) -> Path:
    """Write a checkpoint, and remove all but the newest `keep`.

    Raises:
        TrainError: if it cannot be written; earlier checkpoints are unchanged.
    """
    folder = checkpoint_folder(output_dir, state.steps_done)
    with written_aside(folder, card) as aside:
        assert copies.last is not None
        weights.write(aside / weights.folder, copies.config, copies.last)
        if copies.averaged is not None:
            weights.write(aside / average_folder(weights), copies.config, copies.averaged)
        torch.save(copies.optimizer, aside / OPTIMIZER_FILE)
        (aside / STATE).write_text(json.dumps(encode(state), indent=1), encoding="utf-8")
        paths = sorted(path for path in aside.rglob("*") if path.is_file())
        digests = {path.relative_to(aside).as_posix(): _Digest(*file_digest(path)) for path in paths}
        (aside / DIGESTS).write_text(json.dumps(encode(_Digests(files=digests)), indent=1), encoding="utf-8")
    _remove_old(output_dir, state.steps_done, keep)
    return folder


def _remove_old(output_dir: Path, steps_done: int, keep: int) -> None:
    """Remove what is older than the newest `keep` complete checkpoints, as far as files' lengths show, which cost no reading.

    What a resume has found damaged is `set_aside`, so its name is none of a checkpoint.
    """
    num_kept = 0
    for step, folder in _folders(output_dir).items():
        if num_kept == keep:
            shutil.rmtree(folder)
        elif step <= steps_done and damage(folder, reads=False) is None:
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


def folder_of_step(steps_done: int) -> str:
    """Return the name of a step's folder."""
    return f"step-{steps_done:08d}"


def checkpoint_folder(output_dir: Path, steps_done: int) -> Path:
    """Return the folder of the checkpoint at a step."""
    return output_dir / CHECKPOINTS / folder_of_step(steps_done)


def last_whole(output_dir: Path) -> Path:
    """Return the newest complete checkpoint; skip damaged ones with a warning that names them.

    Raises:
        TrainError: if there is none.
    """
    for folder in _folders(output_dir).values():
        if (wrong := damage(folder)) is None:
            return folder
        log.warning("%s is incomplete or damaged (%s); trying the one before it", folder, wrong)
    elsewhere = ", in another --output-dir" if _folders(output_dir) or has_steps(output_dir) else ""
    raise TrainError(
        f"{output_dir / CHECKPOINTS} has no complete checkpoint to resume; leave out --resume to start over{elsewhere}"
    )


def set_aside(resumed: Path) -> None:
    """Rename the checkpoints newer than the one that a run resumes from, all of them damaged, and say so.

    None of them may count as kept, now or after another resume, nor be replaced by the same step's: they may be of use.
    """
    for folder in itertools.takewhile(lambda one: one != resumed, _folders(resumed.parent.parent).values()):
        names = (f"{folder.name}{DAMAGED_SUFFIX}{n or ''}" for n in itertools.count())
        aside = next(place for name in names if not (place := folder.with_name(name)).exists())
        folder.rename(aside)
        log.warning("%s is now %s and does not count as kept; remove it if you do not need it", folder, aside.name)


def way_on(output_dir: Path, *, first: str = "") -> str:
    """Return how to continue a run that has ended, with an instruction to do `first`."""
    if any((folder / DIGESTS).exists() for folder in _folders(output_dir).values()):
        return f"earlier checkpoints are intact: {first}continue with --resume"
    if has_steps(output_dir):
        return f"there is no checkpoint yet: {first}remove {output_dir} or choose another --output-dir, and start over"
    return f"there is no checkpoint yet: {first}start over with the same command"


def damage(folder: Path, *, reads: bool = True) -> str | None:
    """Return what is wrong with a checkpoint's files; None if it is complete and intact.

    Without `reads`, only their lengths are compared.
    """
    try:
        expected = decode(_Digests, json.loads((folder / DIGESTS).read_bytes())).files
        for name, entry in expected.items():
            if Path(name).is_absolute() or ".." in Path(name).parts:
                return f"{DIGESTS} names {name}"
            size, value = file_digest(folder / name) if reads else ((folder / name).stat().st_size, entry.digest)
            if (size, value) != (entry.num_bytes, entry.digest):
                return f"{name} has {size} bytes with digest {value}, expected {entry.num_bytes} with {entry.digest}"
    except OSError as error:
        return f"{Path(error.filename).name if error.filename else folder}: {error.strerror}"
    except (ValueError, RecursionError) as error:
        return f"{DIGESTS}: {error}"
    return None if STATE in expected else f"{DIGESTS} does not list {STATE}"


def read_state(folder: Path) -> RunState:
    """Return the state of a complete checkpoint.

    Raises:
        StateError: if it was written by another version, or cannot be parsed.
    """
    try:
        document = json.loads((folder / STATE).read_bytes())
        if document.get("version") != VERSION:
            raise StateError(
                f"{folder / STATE} has version {document.get('version')}, this trainer reads {VERSION}; "
                "resume with the version of bucketline that wrote it"
            )
        state = decode(RunState, document)
        return replace(state, config=translated(state.config))
    except (AttributeError, ValueError, RecursionError) as error:
        raise StateError(f"{folder / STATE} is not a checkpoint state of this trainer: {error}") from error


def load_weights(folder: Path, weights: Weights, model: nn.Module, *, averaged: bool = False) -> None:
    """Load a checkpoint's weights, or its `averaged` weights, into a model, before it is sharded.

    Raises:
        StateError: if the checkpoint belongs to another model.
    """
    with of_this_model(folder):
        weights.fill(folder / (average_folder(weights) if averaged else weights.folder), model)


def load_saved_optimizer(folder: Path, optimizer: Optimizer, of_groups: Collection[str] = ()) -> None:
    """Load a checkpoint's optimizer state, under any sharding; `of_groups`: the entries of its groups that are state.

    Raises:
        StateError: if the checkpoint belongs to another model.
    """
    with of_this_model(folder):
        saved = torch.load(folder / OPTIMIZER_FILE, map_location="cpu", weights_only=True, mmap=True)
        parallel.load_optimizer(optimizer, saved, of_groups)


@contextlib.contextmanager
def of_this_model(folder: Path) -> Iterator[None]:
    """Turn the errors of the body, which reads a checkpoint's tensors, into a StateError."""
    try:
        yield
    except (OSError, EOFError, RuntimeError, ValueError, LookupError, UnpicklingError, SafetensorError) as error:
        raise StateError(f"{folder} does not fit this model: {error!s:.300}; resume with the --model of the run") from error


def _folders(output_dir: Path) -> dict[int, Path]:
    """Return the checkpoints' folders by steps done, newest first, complete or not."""
    found = {
        int(match[1]): path
        for path in (output_dir / CHECKPOINTS).glob("step-*")
        if (match := CHECKPOINT_NAME.fullmatch(path.name))
    }
    return dict(sorted(found.items(), reverse=True))


def _sync_tree(folder: Path) -> None:
    for path in [*folder.rglob("*"), folder]:
        if path.is_dir():
            sync_folder(path)
        else:
            with path.open("rb") as file:
                os.fsync(file.fileno())


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """The start of a run: step 0, or a checkpoint."""

    checkpoint: Path | None
    state: RunState | None
    takes_new_plan: bool = False  # keep weights and optimizer, use the current stores

    @property
    def steps_done(self) -> int:
        """Optimizer steps done before this start."""
        return 0 if self.state is None else self.state.steps_done
