"""Checkpoints: one folder each, renamed into place when complete; only the newest few are kept.

checkpoints/step-00000120/
    unet/             the weights as diffusers loads them (config.json, safetensors); or transformer/, or lora/
    unet_ema/         their moving average, in the same format, unless --ema is off
    scheduler/        of a whole model: the noise schedule's configuration with the trained objective, as diffusers reads it
    optimizer.pt      the optimizer's state, read with weights_only=True
    state.json        everything else: step, loader state, stores, the open metrics window
    README.md         the model card
    digests.json      length and digest of every other file; written last, so a checkpoint without it is incomplete

Here they are found, checked and read without torch; `saved_tensors` writes them, and loads their tensors.
"""

from __future__ import annotations

import itertools
import json
import logging
import re
from dataclasses import dataclass
from pathlib import Path

from bucketline.errors import StateError, TrainError
from bucketline.files.run_marker import CHECKPOINTS
from bucketline.loader.mixture import StoreId  # noqa: TC001 - `decode` reads the annotations at run time
from bucketline.store.format.hashing import file_digest
from bucketline.train.metrics_file import WindowState, has_steps
from bucketline.typed_json import Json, decode

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


def folder_of_step(steps_done: int) -> str:
    """Return the name of a step's folder."""
    return f"step-{steps_done:08d}"


def last_whole(output_dir: Path) -> Path:
    """Return the newest complete checkpoint; skip damaged ones with a warning that names them.

    Raises:
        TrainError: if there is none.
    """
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
        return decode(RunState, document)
    except (AttributeError, ValueError, RecursionError) as error:
        raise StateError(f"{folder / STATE} is not a checkpoint state of this trainer: {error}") from error


def checkpoint_folders(output_dir: Path) -> dict[int, Path]:
    """Return the checkpoints' folders by steps done, newest first, complete or not."""
    found = {
        int(match[1]): path
        for path in (output_dir / CHECKPOINTS).glob("step-*")
        if (match := CHECKPOINT_NAME.fullmatch(path.name))
    }
    return dict(sorted(found.items(), reverse=True))
