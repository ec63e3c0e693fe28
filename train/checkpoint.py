"""Checkpoints: one folder each, written next to its place and renamed when it is complete; the newest few are kept.

checkpoints/step-00000120/
    unet/             the weights as diffusers loads them (config.json, safetensors); or transformer/, or lora/
    unet_ema/         their moving average, in the same format, unless --ema is off
    scheduler/        of a whole model: the noise schedule's configuration with the trained objective, as diffusers reads it
    optimizer/        the tensors of the optimizer's state, by the names of their weights: safetensors, a file or more a rank
    state.json        everything else: step, loader state, stores, the open metrics window, numbers of the optimizer
    README.md         the model card
    digests.json      length and digest of every other file; written last, so a checkpoint without it is incomplete

torch.distributed.checkpoint writes and reads the optimizer's state, in shards if the model has some, for any number of ranks;
in safetensors, since its own format is a pickle, which runs what is in it.
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
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as load_tensors
from torch.distributed.checkpoint.state_dict_saver import save as save_tensors

from bucketline.errors import StateError, TrainError
from bucketline.files.atomic_write import sync_folder
from bucketline.files.disk_space import failed_write
from bucketline.files.run_marker import CHECKPOINTS
from bucketline.loader.mixture import StoreId  # noqa: TC001 - `decode` reads the annotations at run time
from bucketline.loader.ranks import fail_together
from bucketline.store.format.hashing import file_digest
from bucketline.train.log import NotFiniteError, WindowState, has_steps
from bucketline.train.parallel import fill_from_rank_zero, whole
from bucketline.train.step import takes_found_inf
from bucketline.train.weight_layout import average_folder
from bucketline.typed_json import Json, decode, encode

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from torch import Tensor, nn
    from torch.optim import Optimizer

    from bucketline.train.ema import Average
    from bucketline.train.weight_layout import WeightLayout

log = logging.getLogger(__name__)

VERSION = 1
CHECKPOINT_NAME = re.compile(r"step-([0-9]{8,})")
ASIDE_SUFFIX = ".partial"
DAMAGED_SUFFIX = ".damaged"
OPTIMIZER = "optimizer"
STATE = "state.json"
CARD = "README.md"
DIGESTS = "digests.json"
OPTIONS = ("lr", "weight_decay", "eps")  # numbers of an optimizer's groups that a run is given; a resumed one has its own
FILE_BYTES = 1 << 30  # of a file of the optimizer's state, which is built in memory


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
    optimizer: dict[str, Json] = field(default_factory=dict)  # numbers of its state and of its groups


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """The start of a run: step 0, or a checkpoint."""

    checkpoint: Path | None
    state: RunState | None

    @property
    def steps_done(self) -> int:
        """Optimizer steps done before this start."""
        return 0 if self.state is None else self.state.steps_done


@dataclass(frozen=True, slots=True)
class Digest:
    """The length and the digest of a file."""

    num_bytes: int
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Digests:
    """The content of `digests.json`."""

    files: dict[str, Digest]


# ---------------------------------------------------------------------------------------------- find, check and read


def folder_of_step(steps_done: int) -> str:
    """Return the name of a step's folder."""
    return f"step-{steps_done:08d}"


def checkpoint_folders(output_dir: Path) -> dict[int, Path]:
    """Return the checkpoints' folders by steps done, newest first, complete or not."""
    found = {
        int(match[1]): path
        for path in (output_dir / CHECKPOINTS).glob("step-*")
        if (match := CHECKPOINT_NAME.fullmatch(path.name))
    }
    return dict(sorted(found.items(), reverse=True))


def last_whole(output_dir: Path) -> Path:
    """Return the newest complete checkpoint; skip damaged ones with a warning that names them."""
    for folder in checkpoint_folders(output_dir).values():
        if (wrong := damage(folder)) is None:
            return folder
        log.warning("%s is incomplete or damaged (%s); trying the one before it", folder, wrong)
    elsewhere = ", in another --output-dir" if checkpoint_folders(output_dir) or has_steps(output_dir) else ""
    raise TrainError(
        f"{output_dir / CHECKPOINTS} has no complete checkpoint to resume; leave out --resume to start over{elsewhere}"
    )


def set_aside(resumed: Path) -> None:
    """Rename the checkpoints newer than the one that a run resumes from, all of them damaged, and say so.

    None of them may count as kept, now or after another resume, nor be replaced by the same step's: they may be of use.
    """
    for folder in itertools.takewhile(lambda one: one != resumed, checkpoint_folders(resumed.parent.parent).values()):
        names = (f"{folder.name}{DAMAGED_SUFFIX}{n or ''}" for n in itertools.count())
        aside = next(place for name in names if not (place := folder.with_name(name)).exists())
        folder.rename(aside)
        log.warning("%s is now %s and does not count as kept; remove it if you do not need it", folder, aside.name)


def way_on(output_dir: Path, *, first: str = "") -> str:
    """Return how to continue a run that has ended, with an instruction to do `first`."""
    if any((folder / DIGESTS).exists() for folder in checkpoint_folders(output_dir).values()):
        return f"earlier checkpoints are intact: {first}continue with --resume"
    if has_steps(output_dir):
        return f"there is no checkpoint yet: {first}remove {output_dir} or choose another --output-dir, and start over"
    return f"there is no checkpoint yet: {first}start over with the same command"


def damage(folder: Path, *, reads: bool = True) -> str | None:
    """Return what is wrong with a checkpoint's files; None if it is complete and intact.

    Without `reads`, only their lengths are compared.
    """
    try:
        expected = decode(Digests, json.loads((folder / DIGESTS).read_bytes())).files
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
    """Return the state of a complete checkpoint."""
    try:
        document = json.loads((folder / STATE).read_bytes())
        if document.get("version") != VERSION:
            raise StateError(f"{folder / STATE} has version {document.get('version')}, this trainer reads {VERSION}")
        return decode(RunState, document)
    except (AttributeError, ValueError, RecursionError) as error:
        raise StateError(f"{folder / STATE} is not a checkpoint state of this trainer: {error}") from error


# ---------------------------------------------------------------------------------------------- load


@contextlib.contextmanager
def of_this_model(folder: Path) -> Iterator[None]:
    """Turn the errors of the body, which reads a checkpoint's tensors, into a StateError."""
    try:
        yield
    except (CheckpointException, OSError, EOFError, RuntimeError, ValueError, LookupError, SafetensorError) as error:
        said = next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error
        raise StateError(f"{folder} does not fit this model: {said!s:.300}; resume with the --model of the run") from error


def load_weights(folder: Path, weights: WeightLayout, model: nn.Module, *, averaged: bool = False, alone: bool = True) -> None:
    """Load a checkpoint's weights, or its `averaged` weights, into a placed model.

    `alone`: every rank reads them; else rank 0 does, for all.
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


def optimizer_entries(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a checkpoint has of an optimizer's state, by the names of the weights and the numbers of the groups.

    Of the groups these are numbers that are no options of a run, such as the rate that Prodigy has found.
    """
    entries = {f"state.{name}.{key}": value for name, own in found["state"].items() for key, value in own.items()}
    for number, group in enumerate(found["param_groups"]):
        for key, value in group.items():
            if isinstance(value, int | float | torch.Tensor) and not isinstance(value, bool) and key not in OPTIONS:
                entries[f"group.{number}.{key}"] = value
    return entries


def load_optimizer(folder: Path, model: nn.Module, optimizer: Optimizer) -> None:
    """Load a checkpoint's state of an optimizer into the memory of a new optimizer's, under any sharding."""
    numbers, parameters = read_state(folder).optimizer, dict(model.named_parameters())
    if takes_found_inf(optimizer):  # torch makes the state by a step without gradients, which is skipped
        optimizer.found_inf = torch.ones((), device=next(iter(parameters.values())).device)  # type: ignore[attr-defined]
    for parameter in [one for one, entries in optimizer.state.items() if not entries]:
        del optimizer.state[parameter]  # schedule-free makes empty ones, which torch would take for its state
    with fail_together(), of_this_model(folder):
        found: dict[str, Any] = get_optimizer_state_dict(model, optimizer)
        if takes_found_inf(optimizer):
            optimizer.found_inf = None  # type: ignore[attr-defined]
        own, reader = optimizer_entries(found), HuggingFaceStorageReader(str(folder / OPTIMIZER))
        saved: Any = reader.read_metadata().state_dict_metadata
        sizes = {name: one.size for name, one in saved.items()}
        if unknown := {*sizes, *(name for name in numbers if name.startswith("state."))} - own.keys():
            raise ValueError(f"the optimizer has no {min(unknown)}")
        for name, size in sizes.items():
            if own[name].shape != size and len(size) and own[name].ndim:
                raise ValueError(f"the optimizer's {name} has the shape {tuple(size)}, expected {tuple(own[name].shape)}")
            if own[name].shape != size:  # Prodigy has a single 0 for a weight that begins as zeros
                own[name] = own[name].new_empty(size)
        if sizes:
            with quiet():
                load_tensors({name: own[name] for name in sizes}, storage_reader=reader, no_dist=True)
    for name, entries in found["state"].items():
        state, keys = optimizer.state[parameters[name]], {key: f"state.{name}.{key}" for key in entries}
        if not any(saved in sizes or saved in numbers for saved in keys.values()):
            del optimizer.state[parameters[name]]  # it never had a gradient
        else:
            replaced = {key: numbers.get(saved, own[saved]) for key, saved in keys.items() if saved in numbers or key in state}
            state.update(replaced)
    for number, group in enumerate(optimizer.param_groups):
        prefix = f"group.{number}."  # of some a step makes the entry, which a new optimizer lacks
        group |= {name.removeprefix(prefix): value for name, value in numbers.items() if name.startswith(prefix)}


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep torch from telling that one rank saves or loads by itself, as it is asked to."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


# ---------------------------------------------------------------------------------------------- save


def copied(
    weights: WeightLayout,
    model: nn.Module,
    average: Average,
    optimizer: Optimizer | None,
    *,
    keeps: bool = True,
) -> dict[str, Any]:
    """Return copies of the last weights, of their average and of an optimizer's state; without one, of the best weights.

    A rank that `keeps` no whole weights sends its shards of them.
    """
    trained = weights.tensors(model)
    found: dict[str, Any] = {}
    if optimizer is not None or not average.is_kept:
        found["last"] = gathered_weights(trained.items(), keeps=keeps)
    if average.is_kept:
        found["average"] = gathered_weights(((name, average.of(one)) for name, one in trained.items()), keeps=keeps)
    if optimizer is not None:  # before its first step it has no state, and torch would make some
        state = get_optimizer_state_dict(model, optimizer) if optimizer.state else optimizer.state_dict()
        entries = optimizer_entries(state)
        found["optimizer"] = {name: on_host(one) if isinstance(one, torch.Tensor) else one for name, one in entries.items()}
    return found


def gathered_weights(tensors: Iterable[tuple[str, Tensor]], *, keeps: bool) -> dict[str, Tensor]:
    """Return copies of whole tensors in host memory; nothing if this rank `keeps` none, which then sends its shards.

    One is gathered at a time, and the iterable computes averages one at a time.
    """
    full = ((name, whole(tensor.detach())) for name, tensor in tensors)
    return {name: on_host(tensor) for name, tensor in full if keeps}


def on_host(tensor: Tensor) -> Tensor:
    """Return a copy in host memory with strides of its own: safetensors takes no others."""
    return tensor.detach().to("cpu", copy=True).contiguous()


def write(
    folder: Path,
    weights: WeightLayout,
    config: str,
    copies: Mapping[str, Any],
    state: RunState,
    *,
    card: str,
    keep: int,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Write a checkpoint, for which there is a temporary folder, and remove all but the newest `keep` of its run.

    `config`: that of the model, or of its adapters. `group`: of the ranks that write their shards of the optimizer's state.
    """
    with written_aside(folder, card) as aside:
        numbers = write_optimizer(aside, copies["optimizer"], group)
        weights.write(aside / weights.folder, config, copies["last"])
        if "average" in copies:
            weights.write(aside / average_folder(weights), config, copies["average"])
        document = {**encode(state), "optimizer": numbers}  # type: ignore[dict-item] # an object
        (aside / STATE).write_text(json.dumps(document, indent=1), encoding="utf-8")
        paths = sorted(path for path in aside.rglob("*") if path.is_file())
        digests = {path.relative_to(aside).as_posix(): Digest(*file_digest(path)) for path in paths}
        (aside / DIGESTS).write_text(json.dumps(encode(Digests(files=digests)), indent=1), encoding="utf-8")
    num_kept = 0  # of the complete ones, as far as files' lengths show, which cost no reading; what is damaged is `set_aside`
    for step, older in checkpoint_folders(folder.parent.parent).items():
        if num_kept == keep:
            shutil.rmtree(older)
        elif step <= state.steps_done and damage(older, reads=False) is None:
            num_kept += 1


def write_optimizer(aside: Path, entries: Mapping[str, Any], group: dist.ProcessGroup | None) -> dict[str, Json]:
    """Write the tensors of an optimizer's state, this rank's shards in a `group`; return the others, which are numbers."""
    tensors = {name: value for name, value in entries.items() if isinstance(value, torch.Tensor)}
    sums = itertools.accumulate((tensor.nbytes for tensor in tensors.values()), initial=0)
    files = {name: 1 + begin // FILE_BYTES for name, begin in zip(tensors, sums, strict=False)}
    writer = HuggingFaceStorageWriter(str(aside / OPTIMIZER), files or None, save_distributed=True)
    with quiet():
        save_tensors(tensors, storage_writer=writer, process_group=group, no_dist=group is None)
    return {name: value for name, value in entries.items() if name not in tensors}


def aside_of(folder: Path) -> Path:
    """Return the temporary folder in which a checkpoint or an export is written."""
    return folder.with_name(folder.name + ASIDE_SUFFIX)


def begin_aside(folder: Path) -> None:
    """Make the temporary folder of a checkpoint or an export, and remove those that a killed process has left."""
    with explained(folder):
        for left in folder.parent.glob(f"*{ASIDE_SUFFIX}"):  # this process writes one at a time
            shutil.rmtree(left, ignore_errors=True)
        aside_of(folder).mkdir(parents=True)


@contextlib.contextmanager
def written_aside(folder: Path, card: str) -> Iterator[Path]:
    """Yield the temporary folder with a card, to fill; at the end, fsync and rename it, or remove it after an error."""
    aside = aside_of(folder)
    with explained(folder):
        aside.mkdir(parents=True, exist_ok=True)
        (aside / CARD).write_text(card, encoding="utf-8")
        yield aside
        sync_tree(aside)
        if folder.exists():  # incomplete, or from a later step than this run resumed from
            shutil.rmtree(folder)
        aside.replace(folder)
        sync_folder(folder.parent)


@contextlib.contextmanager
def explained(folder: Path) -> Iterator[None]:
    """Turn an error of the body, which writes what is to become a folder, into a TrainError; remove what it has written."""
    try:
        yield
    except (CheckpointException, OSError, RuntimeError, SafetensorError) as error:  # each library has its own
        given = next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error
        assert isinstance(given, Exception)
        said = failed_write(folder.parent.parent, given)  # before that makes room
        shutil.rmtree(aside_of(folder), ignore_errors=True)
        advice = way_on(folder.parent.parent, first="make room, then ")
        raise TrainError(f"{folder} cannot be written: {said}; {advice}") from error


def expect_finite_weights(model: nn.Module, steps_done: int) -> None:
    """Check that the weights are finite after the last step, whose loss was computed before its update."""
    norm = float(whole(torch.nn.utils.get_total_norm([parameter.detach() for parameter in model.parameters()])))
    if not math.isfinite(norm):
        raise NotFiniteError(
            f"after step {steps_done - 1} the weights' norm is {norm}, expected a finite number; no checkpoint is written"
        )


def sync_tree(folder: Path) -> None:
    """Fsync every file and folder below a folder, and that itself."""
    for path in [*folder.rglob("*"), folder]:
        if path.is_dir():
            sync_folder(path)
        else:
            with path.open("rb") as file:
                os.fsync(file.fileno())
