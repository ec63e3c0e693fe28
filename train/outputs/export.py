"""Exports: weights and their card in one folder that diffusers or peft opens and that a hub takes, or weights as one file.

exports/step-00000120/
    README.md         the model card
    unet/             the weights as diffusers loads them; or transformer/; of adapters, their files without a folder
    scheduler/        of a whole model: the configuration of its schedule, as in a checkpoint
"""

from __future__ import annotations

import json
import secrets
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError
from safetensors.torch import load_file

from bucketline.dtype_names import choice_of
from bucketline.errors import StateError, TrainError, UsageError
from bucketline.files.atomic_folder import refuse_existing, staged_folder
from bucketline.files.atomic_write import move_durably
from bucketline.files.disk_space import failed_write
from bucketline.model_file import PICKLED, SUFFIX, converter, file_tensors, single_file
from bucketline.torch_dtypes import TORCH_DTYPES
from bucketline.train.noise import SCHEDULER_CONFIG as SCHEDULER
from bucketline.train.outputs import checkpoint
from bucketline.train.outputs.lora_file import read_tensors
from bucketline.train.outputs.single_file import in_original_layout
from bucketline.train.outputs.weights import ADAPTERS, AVERAGE_SUFFIX, MODEL_FILE, save_tensors

if TYPE_CHECKING:
    from torch import Tensor

    from bucketline.train.outputs.weights import Weights
    from bucketline.typed_json import Json

_PARTS = ("unet", "transformer", ADAPTERS)


def weights_folder(folder: str) -> str:
    """Return where in an export the weights are that are in a checkpoint's `folder`."""
    part = folder.removesuffix(AVERAGE_SUFFIX)
    return "." if part == ADAPTERS else part


def write_export(folder: Path, weights: Weights, config: str, tensors: dict[str, Tensor], *, dtype: str, card: str) -> None:
    """Write an export to a temporary folder and rename it; a folder that exists is replaced.

    Raises:
        TrainError: if it cannot be written.
    """
    with checkpoint.written_aside(folder, card) as aside:
        weights.write(aside / weights_folder(weights.folder), config, _in_dtype(tensors, dtype))


def export_model(run: Path, output: Path, *, like: Path | None = None, last: bool = False, dtype: str) -> int:
    """Write the averaged (or the `last`) weights of a run's newest checkpoint, or of a checkpoint's folder; return their bytes.

    `output`: a `.safetensors` file in the original key layout, or a folder, an export without a card. `like`: a single file of
    the same architecture, which gives a file's names, VAE and text encoders; None: the file that the run began from.

    Raises:
        UsageError: if `output` exists or is of another kind; for a file, if the run trained adapters or began from a folder.
        TrainError, StateError, ModelError, StoreError: if the checkpoint, `like` or the output is not as it has to be.
    """
    is_file = output.suffix == SUFFIX
    if output.suffix in PICKLED:
        raise UsageError(f"{output}: weights are written as safetensors; name a file that ends in {SUFFIX}, or a folder")
    refuse_existing(output, "file" if is_file else "folder")
    if like is not None and not is_file:
        raise UsageError(f"--like is {like}, and it is for one file; name an output that ends in {SUFFIX}")
    weights = _saved_weights(run, last=last)
    if is_file:
        _write_file(weights, output, like, dtype)
    else:
        _write_folder(weights, output, dtype)
    return sum(path.stat().st_size for path in (output, *output.rglob("*")) if path.is_file())


def _saved_weights(run: Path, *, last: bool) -> Path:
    """Return the folder of the averaged (or the `last`) weights in a run's newest complete checkpoint, or in a checkpoint."""
    folder = checkpoint.last_whole(run) if (run / checkpoint.CHECKPOINTS).is_dir() else run
    if (wrong := checkpoint.damage(folder)) is not None:
        raise StateError(f"{folder} is not a whole checkpoint ({wrong}); name a run's folder or one of its checkpoints")
    part = next(name for name in _PARTS if (folder / name).is_dir())
    weights = folder / (part if last else part + AVERAGE_SUFFIX)
    if not weights.is_dir():
        raise UsageError(f"{folder} has no moving average, since the run had --ema off; write the last weights with --last")
    return weights


def _write_folder(weights: Path, output: Path, dtype: str) -> None:
    with staged_folder(output) as aside:
        inner = aside / weights_folder(weights.name)
        inner.mkdir(exist_ok=True)
        try:
            for path in weights.iterdir():
                if path.suffix == SUFFIX:
                    tensors, metadata = read_tensors(path)
                    save_tensors(_in_dtype(tensors, dtype), inner / path.name, metadata)
                else:
                    shutil.copyfile(path, inner / path.name)
            if (scheduler := weights.parent / SCHEDULER).exists():  # of a whole model, and not of an earlier version
                (aside / SCHEDULER).parent.mkdir()
                shutil.copyfile(scheduler, aside / SCHEDULER)
        except (OSError, SafetensorError) as error:
            said = failed_write(aside, error)
            raise TrainError(f"{output} cannot be written: {said}; make room or choose another place") from error


def _write_file(weights: Path, output: Path, like: Path | None, dtype: str) -> None:
    if weights.name.startswith(ADAPTERS):
        raise UsageError(
            f"{weights} has only adapters, which are one file already, in lora_ema/ (and lora/); name a folder to write "
            "them with another --dtype"
        )
    named = like or Path(str(checkpoint.read_state(weights.parent).config["model"]))
    template = single_file(named)
    if template is None:
        raise UsageError(
            f"{named} is not a .safetensors file; name one of the same architecture with --like, such as the "
            "checkpoint that the model was published as: its names are followed, and its VAE and text encoders are kept"
        )
    config: dict[str, Json] = json.loads((weights / "config.json").read_text(encoding="utf-8"))
    trained = _in_dtype(load_file(weights / MODEL_FILE), dtype)
    convert = converter(str(config["_class_name"]))
    file_tensors(template)  # its errors say what is wrong with a file
    tensors = in_original_layout(trained, load_file(template), lambda given: convert(given, config), item=str(template))
    aside = output.with_name(f"{output.name}.{secrets.token_hex(4)}.tmp")
    try:
        save_tensors(tensors, aside, {"format": "pt"})
        move_durably(aside, output)
    except (OSError, SafetensorError) as error:
        said = failed_write(output.parent, error)
        raise TrainError(f"{output} cannot be written: {said}; make room or choose another place") from error
    finally:
        aside.unlink(missing_ok=True)


def _in_dtype(tensors: dict[str, Tensor], dtype: str) -> dict[str, Tensor]:
    kind = TORCH_DTYPES[choice_of(dtype, TORCH_DTYPES) or dtype]
    return {name: tensor.to(kind) if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}
