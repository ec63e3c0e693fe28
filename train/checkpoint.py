"""Checkpoints: one folder each, written next to its place and renamed when it is complete; the newest few are kept.

The loop stops while tensors are copied to host memory, and a thread writes the copies (`Saver`).

checkpoints/step-00000120/
    unet/             the weights as diffusers loads them (config.json, safetensors); or transformer/, or lora/
    unet_ema/         their moving average, in the same format, unless --ema is off
    scheduler/        of a whole model: the noise schedule's configuration with the trained objective, as diffusers reads it
    optimizer/        the tensors of the optimizer's state, by the names of their weights: safetensors, a file or more a rank
    state.json        everything else: step, loader state, stores, numbers of the optimizer
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
import secrets
import shutil
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as load_shards
from torch.distributed.checkpoint.state_dict_saver import save as save_shards
from torch.distributed.fsdp import FSDPModule

from bucketline.errors import StateError, TrainError
from bucketline.files.atomic_write import failed_write, sync_folder
from bucketline.files.paths import CHECKPOINTS, METRICS
from bucketline.loader.ranks import DISK_TIME, fail_together
from bucketline.model_file import LORA_FILE, PEFT_FILE
from bucketline.store.format.block import file_digest
from bucketline.train.log import NotFiniteError, has_steps
from bucketline.train.lora import LORA_METADATA, PEFT_CONFIG, PEFT_PREFIX
from bucketline.train.noise import SCHEDULER_CONFIG as SCHEDULER
from bucketline.train.parallel import fill_from_rank_zero, plain_class, whole
from bucketline.train.step import takes_found_inf
from bucketline.typed_json import Json, decode, encode

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from concurrent.futures import Future

    from torch import Tensor, nn
    from torch.optim import Optimizer

    from bucketline.families.family import Family
    from bucketline.train.optim import Average
    from bucketline.train.parallel import TrainRanks
    from bucketline.train.step import Training

log = logging.getLogger(__name__)

MODEL_FILE = "diffusion_pytorch_model.safetensors"
KOHYA_FILE = "kohya_lora.safetensors"
ADAPTERS, AVERAGE_SUFFIX = "lora", "_ema"
VERSION = 1
CHECKPOINT_NAME = re.compile(r"step-([0-9]{8,})")
ASIDE_SUFFIX = ".partial"
DAMAGED_SUFFIX = ".damaged"
OPTIMIZER = "optimizer"
OPTIMIZER_FILE = "shard-00001-model-00001-of-00001.safetensors"  # of one process, as torch names it
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
    loader: dict[str, Json]  # its stores and plan too
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


# ---------------------------------------------------------------------------------------------- the weights in a folder


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeModel:
    """All tensors; the folder is loadable with `from_pretrained`."""

    folder: str  # in diffusers' layout, such as `unet`
    scheduler: str | None = None  # its configuration as JSON, written next to that folder: a run from there has its objective

    def config(self, model: nn.Module) -> str:
        config = json.loads(model.to_json_string())  # type: ignore[operator]
        return json.dumps({**config, "_class_name": plain_class(model).__name__}, indent=2, sort_keys=True) + "\n"

    def tensors(self, model: nn.Module) -> dict[str, Tensor]:
        """Return the model's tensors to write, parameters and buffers, by their stored names."""
        return dict(model.state_dict(keep_vars=True))

    def write(self, folder: Path, config: str, tensors: dict[str, Tensor]) -> None:
        """Write copies of the results of `config` and `tensors` to a folder."""
        save_tensors(tensors, folder / MODEL_FILE, {"format": "pt"})
        (folder / "config.json").write_text(config, encoding="utf-8")
        if self.scheduler is not None:
            path = folder.parent / SCHEDULER
            path.parent.mkdir(exist_ok=True)
            path.write_text(self.scheduler, encoding="utf-8")

    def read(self, folder: Path) -> dict[str, Tensor]:
        return load_file(folder / MODEL_FILE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapters:
    """Only the adapters; loadable with the pipeline's `load_lora_weights`, or with peft's `PeftModel.from_pretrained`."""

    part: str  # the pipeline's, `unet` or `transformer`
    pipeline: str | None  # diffusers' class that loads them; None: DiT's, PixArt's and PRX's cannot
    other_names: Mapping[str, str] = field(default_factory=dict)  # of layers, as the family says
    folder: str = ADAPTERS

    def config(self, model: nn.Module) -> str:
        found: Any
        (found,) = model.peft_config.values()  # type: ignore[operator]
        prefix = f"{self.part}." if self.pipeline else ""
        fields = {prefix + name: value for name, value in found.to_dict().items()}
        return json.dumps(fields, default=sorted, indent=2, sort_keys=True)  # a set is sorted

    def tensors(self, model: nn.Module) -> dict[str, Tensor]:
        from peft import get_peft_model_state_dict

        prefix = f"{self.part}." if self.pipeline else PEFT_PREFIX
        state = get_peft_model_state_dict(model, model.state_dict(keep_vars=True))
        return {prefix + name: tensor for name, tensor in state.items()}

    def write(self, folder: Path, config: str, tensors: dict[str, Tensor]) -> None:
        from bucketline.train.lora_file import for_other_tools

        # As of diffusers' `save_lora_weights`, with rank, alpha and layers. One entry: safetensors writes several in any order.
        save_tensors(tensors, folder / self._file, {LORA_METADATA: config} if self.pipeline else {"format": "pt"})
        if not self.pipeline:
            (folder / PEFT_CONFIG).write_text(config, encoding="utf-8")
        alpha = json.loads(config)[f"{self.part}.lora_alpha" if self.pipeline else "lora_alpha"]
        others = for_other_tools(tensors, self.part, alpha, self.other_names, is_kohyas=self.part == "unet")
        save_tensors(others, folder / KOHYA_FILE, {})

    def read(self, folder: Path) -> dict[str, Tensor]:
        return load_file(folder / self._file)

    @property
    def _file(self) -> str:
        return LORA_FILE if self.pipeline else PEFT_FILE


WeightLayout = WholeModel | Adapters
"""How a model's trained tensors are laid out in a checkpoint."""


def average_folder(weights: WeightLayout) -> str:
    return weights.folder + AVERAGE_SUFFIX


def weights_folder(folder: str) -> str:
    """Return where in an export the weights are that are in a checkpoint's `folder`."""
    part = folder.removesuffix(AVERAGE_SUFFIX)
    return "." if part == ADAPTERS else part


def layout_of(family: Family, *, adapters: bool, scheduler: Mapping[str, Any] | None = None) -> WeightLayout:
    """Return which weights of a model a checkpoint holds; `scheduler`: the configuration to write with a whole model."""
    if adapters:
        return Adapters(part=family.folder, pipeline=family.lora_pipeline, other_names=family.other_names)
    named = None if scheduler is None else {"_class_name": "DDPMScheduler", **scheduler}
    return WholeModel(folder=family.folder, scheduler=None if named is None else json.dumps(named, indent=2) + "\n")


def save_tensors(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
    """Write a new safetensors file, with the permissions of any new file: safetensors' own are for the owner only."""
    path.parent.mkdir(exist_ok=True)
    path.touch()
    mode = path.stat().st_mode
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata=metadata)
    path.chmod(mode)


# ---------------------------------------------------------------------------------------------- find, check and read


def folder_of_step(steps_done: int) -> str:
    return f"step-{steps_done:08d}"


def checkpoint_folders(output_dir: Path) -> list[Path]:
    """Return the checkpoints' folders, newest first, complete or not."""
    found = [path for path in (output_dir / CHECKPOINTS).glob("step-*") if CHECKPOINT_NAME.fullmatch(path.name)]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")), reverse=True)


def last_whole(output_dir: Path) -> Path:
    """Return the newest complete checkpoint; skip damaged ones with a warning that names them."""
    for folder in checkpoint_folders(output_dir):
        if (wrong := damage(folder)) is None:
            return folder
        log.warning("%s is incomplete or damaged (%s); trying the one before it", folder, wrong)
    raise TrainError(f"{output_dir / CHECKPOINTS} has no complete checkpoint to resume; start over in another --output-dir")


def set_aside(resumed: Path) -> None:
    """Rename the checkpoints newer than the one that a run resumes from, all of them damaged, so that none counts as kept."""
    for folder in itertools.takewhile(lambda one: one != resumed, checkpoint_folders(resumed.parent.parent)):
        aside = folder.with_name(f"{folder.name}{DAMAGED_SUFFIX}-{secrets.token_hex(2)}")
        folder.rename(aside)
        log.warning("%s is now %s and does not count as kept; remove it if you do not need it", folder, aside.name)


def way_on(output_dir: Path, *, first: str = "") -> str:
    """Return how to continue a run that has ended, with an instruction to do `first`."""
    if any((folder / DIGESTS).exists() for folder in checkpoint_folders(output_dir)):
        return f"earlier checkpoints are intact: {first}continue with --resume"
    place = ""
    with contextlib.suppress(OSError):  # on a failing disk
        place = " in another --output-dir" if has_steps(output_dir) else ""  # the folder of a run without steps is taken again
    return f"there is no checkpoint yet: {first}start over{place}"


def damage(folder: Path) -> str | None:
    """Return what is wrong with a checkpoint's files; None if it is complete and intact."""
    try:
        expected: dict[str, list[object]] = json.loads((folder / DIGESTS).read_bytes())
        for name, entry in expected.items():
            if Path(name).is_absolute() or ".." in Path(name).parts:
                return f"{DIGESTS} names {name}"
            if (found := [*file_digest(folder / name)]) != entry:
                return f"{name} has the length and the digest {found}, expected {entry}"
    except OSError as error:
        return f"{Path(error.filename).name if error.filename else folder}: {error.strerror}"
    except (ValueError, AttributeError, RecursionError) as error:
        return f"{DIGESTS}: {error}"
    return None if STATE in expected else f"{DIGESTS} does not list {STATE}"


def read_state(folder: Path) -> RunState:
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
    """Load a checkpoint's (`averaged`) weights into a placed model. `alone`: every rank reads them; else rank 0, for all."""
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
    """Return what a checkpoint has of an optimizer's state, by weight; of its groups, numbers that are no options of a run."""
    entries = {f"state.{name}.{key}": value for name, own in found["state"].items() for key, value in own.items()}
    for number, group in enumerate(found["param_groups"]):
        for key, value in group.items():
            if isinstance(value, int | float | torch.Tensor) and not isinstance(value, bool) and key not in OPTIONS:
                entries[f"group.{number}.{key}"] = value
    return entries


def load_optimizer(folder: Path, model: nn.Module, optimizer: Optimizer) -> None:
    """Load a checkpoint's state of an optimizer into the memory of a new optimizer's, under any sharding."""
    numbers, parameters = read_state(folder).optimizer, dict(model.named_parameters())
    for parameter in [one for one, entries in optimizer.state.items() if not entries]:
        del optimizer.state[parameter]  # torch would take it for a state
    with fail_together(), of_this_model(folder):
        found = made_state(model, optimizer)
        own, reader = optimizer_entries(found), HuggingFaceStorageReader(str(folder / OPTIMIZER))
        saved: Any = reader.read_metadata().state_dict_metadata
        if unknown := {*saved, *(name for name in numbers if name.startswith("state."))} - own.keys():
            raise ValueError(f"the optimizer has no {min(unknown)}")
        for name, size in ((name, one.size) for name, one in saved.items()):
            if own[name].shape != size and not (len(size) and own[name].ndim):
                own[name] = own[name].new_empty(size)  # Prodigy has a single 0 for a weight that begins as zeros
        if saved:  # into the memory of `own`, whose shapes torch compares
            with warnings.catch_warnings():  # that one rank loads by itself is as asked
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")
                load_shards({name: own[name] for name in saved}, storage_reader=reader, no_dist=True)
    for name, entries in found["state"].items():
        state, names = optimizer.state[parameters[name]], {key: f"state.{name}.{key}" for key in entries}
        if not any(one in saved or one in numbers for one in names.values()):
            del optimizer.state[parameters[name]]  # it never had a gradient
            continue
        state |= {key: numbers.get(one, own[one]) for key, one in names.items() if one in numbers or key in state}
    for number, group in enumerate(optimizer.param_groups):
        prefix = f"group.{number}."  # of some a step makes the entry, which a new optimizer lacks
        group |= {name.removeprefix(prefix): value for name, value in numbers.items() if name.startswith(prefix)}


def made_state(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Return an optimizer's state by the names of the weights; torch makes it by a step without gradients, skipped if fused."""
    is_fused = takes_found_inf(optimizer)
    if is_fused:
        optimizer.found_inf = torch.ones((), device=next(model.parameters()).device)  # type: ignore[attr-defined]
    found: dict[str, Any] = get_optimizer_state_dict(model, optimizer)
    if is_fused:
        optimizer.found_inf = None  # type: ignore[attr-defined]
    return found


# ---------------------------------------------------------------------------------------------- save


def copied(
    weights: WeightLayout, model: nn.Module, average: Average, optimizer: Optimizer | None, *, keeps: bool = True
) -> dict[str, Any]:
    """Return copies of the last weights, their average and an optimizer's state; without one, of the best weights only."""
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
    """Return copies of whole tensors in host memory, one at a time; none if this rank `keeps` none: it sends shards."""
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
    """Write a checkpoint, and keep the newest `keep`. `group`: of the ranks that write their shards."""
    with written_aside(folder, card) as aside:
        numbers = write_optimizer(aside, copies["optimizer"], group)
        weights.write(aside / weights.folder, config, copies["last"])
        if "average" in copies:
            weights.write(aside / average_folder(weights), config, copies["average"])
        document = {**encode(state), "optimizer": numbers}  # type: ignore[dict-item] # an object
        (aside / STATE).write_text(json.dumps(document, indent=1), encoding="utf-8")
        paths = sorted(path for path in aside.rglob("*") if path.is_file())
        digests = {path.relative_to(aside).as_posix(): file_digest(path) for path in paths}
        (aside / DIGESTS).write_text(json.dumps(digests, indent=1), encoding="utf-8")
    for older in checkpoint_folders(folder.parent.parent)[keep:]:  # none is newer: what is damaged is `set_aside`
        shutil.rmtree(older)


def write_optimizer(aside: Path, entries: Mapping[str, Any], group: dist.ProcessGroup | None) -> dict[str, Json]:
    """Write the tensors of an optimizer's state, this rank's shards in a `group`; return the others, which are numbers."""
    tensors = {name: value for name, value in entries.items() if isinstance(value, torch.Tensor)}
    if group is None:  # torch would build each file in memory, which takes several times as long
        save_tensors(tensors, aside / OPTIMIZER / OPTIMIZER_FILE, {"format": "pt"})
    else:
        sums = itertools.accumulate((tensor.nbytes for tensor in tensors.values()), initial=0)
        files = {name: 1 + begin // FILE_BYTES for name, begin in zip(tensors, sums, strict=False)}
        writer = HuggingFaceStorageWriter(str(aside / OPTIMIZER), files or None, save_distributed=True)
        save_shards(tensors, storage_writer=writer, process_group=group)
    return {name: value for name, value in entries.items() if name not in tensors}


def aside_of(folder: Path) -> Path:
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
        advice = way_on(folder.parent.parent, first="fix that, then ")
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


# ---------------------------------------------------------------------------------------------- while training continues


class Output(StrEnum):
    """A kind of output of a step, and its folder in the run's."""

    CHECKPOINT = CHECKPOINTS
    EXPORT = "exports"


WriteExport = Callable[[Path, str, dict[str, Any], str], None]
"""Writes an export: its folder, the model's configuration, the tensors of the best weights, and the card."""


class Saver:
    """Saves checkpoints and exports, one step at a time; every rank has one, and calls it at the same steps.

    The loop stops until an earlier save is written and host memory has copies of the tensors, which a thread writes then. Rank
    0's has all weights, gathered from their shards if there are any; of the optimizer's state each rank has its own shards.
    """

    def __init__(
        self, training: Training, ranks: TrainRanks, weights: WeightLayout, saved: Path | None, write_export: WriteExport
    ) -> None:
        """Start the thread; `saved`: the checkpoint that the run starts from."""
        self._training, self._ranks, self._weights, self._write_export = training, ranks, weights, write_export
        self.saved = {} if saved is None else {Output.CHECKPOINT: saved}  # the newest of each kind
        # Its own priority is low: all of torch's threads would wait for the one that it takes a core from.
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint", initializer=os.nice, initargs=(10,))
        self._under_way: Future[None] | None = None
        self._is_sharded = isinstance(training.bare_model, FSDPModule)
        self._group = dist.new_group(backend="gloo", timeout=DISK_TIME) if self._is_sharded else None  # the thread's own

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
            self._write_export(folder, own_config, copies.get("average") or copies["last"], cards[Output.EXPORT])

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
