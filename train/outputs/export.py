"""Exports: weights and their card in one folder that diffusers or peft opens and that a hub takes, or weights as one file.

A whole pipeline has the files that `pipeline_folder.py` writes as well.

exports/step-00000120/
    README.md         the model card
    unet/             the weights as diffusers loads them; or transformer/; of adapters, their files without a folder
    scheduler/        of a whole model: the configuration of its schedule, as in a checkpoint
"""

from __future__ import annotations

import contextlib
import json
import secrets
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from bucketline.errors import ModelError, StateError, TrainError, UsageError
from bucketline.files.atomic_folder import refuse_existing, staged_folder
from bucketline.files.atomic_write import move_durably
from bucketline.files.disk_space import failed_write
from bucketline.files.run_marker import CHECKPOINTS
from bucketline.model_file import PICKLED, SUFFIX, converter, file_tensors, single_file
from bucketline.torch_dtypes import dtype_named
from bucketline.train import checkpoint
from bucketline.train.config import Objective
from bucketline.train.load import locate, read_model, read_model_config
from bucketline.train.lora_file import read_tensors
from bucketline.train.noise import SCHEDULER_CONFIG as SCHEDULER
from bucketline.train.noise import load_schedule
from bucketline.train.outputs.model_card import pipeline_card
from bucketline.train.outputs.pipeline_folder import fused, other_parts, write_parts
from bucketline.train.outputs.single_file import in_original_layout
from bucketline.train.weight_layout import ADAPTERS, AVERAGE_SUFFIX, MODEL_FILE, save_tensors, weights_folder

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor

    from bucketline.train.weight_layout import WeightLayout
    from bucketline.typed_json import Json

_PARTS = ("unet", "transformer", ADAPTERS)


def write_export(
    folder: Path, weights: WeightLayout, config: str, tensors: dict[str, Tensor], *, dtype: str, card: str
) -> None:
    """Write an export to a temporary folder and rename it; a folder that exists is replaced."""
    with checkpoint.written_aside(folder, card) as aside:
        weights.write(aside / weights_folder(weights.folder), config, _in_dtype(tensors, dtype))


def export_model(
    run: Path,
    output: Path,
    *,
    like: Path | None = None,
    last: bool = False,
    dtype: str,
    pipeline: bool = False,
    fuse: bool = False,
) -> int:
    """Write the averaged (or the `last`) weights of a run's newest checkpoint, or of a checkpoint's folder; return their bytes.

    `output`: a `.safetensors` file in the original key layout, or a folder: an export without a card, or a whole `pipeline`.
    `fuse`: add adapters to the weights of the pipeline's model. `like`: a model of the same architecture, which gives a file's
    names and the parts that were not trained; None: the one that the run began from.
    """
    is_file = output.suffix == SUFFIX
    if output.suffix in PICKLED:
        raise UsageError(f"{output}: weights are written as safetensors; name a file that ends in {SUFFIX}, or a folder")
    refuse_existing(output, "file" if is_file else "folder")
    if pipeline and is_file:
        raise UsageError(f"--pipeline writes a folder, and {output} ends in {SUFFIX}; name a folder, or leave out --pipeline")
    if fuse and not pipeline:
        raise UsageError("--fuse adds adapters to the weights of a whole pipeline; use it with --pipeline")
    if like is not None and not (is_file or pipeline):
        raise UsageError(
            f"--like is {like}, and it is for one file or a whole pipeline; name an output that ends in {SUFFIX}, or add "
            "--pipeline"
        )
    weights = _saved_weights(run, last=last)
    if is_file:
        _write_file(weights, output, like, dtype)
    elif pipeline:
        _write_pipeline(weights, output, like, dtype, fuse=fuse)
    else:
        _write_folder(weights, output, dtype)
    return sum(path.stat().st_size for path in (output, *output.rglob("*")) if path.is_file())


def _saved_weights(run: Path, *, last: bool) -> Path:
    """Return the folder of the averaged (or the `last`) weights in a run's newest complete checkpoint, or in a checkpoint."""
    folder = checkpoint.last_whole(run) if (run / CHECKPOINTS).is_dir() else run
    if (wrong := checkpoint.damage(folder)) is not None:
        raise StateError(f"{folder} is not a whole checkpoint ({wrong}); name a run's folder or one of its checkpoints")
    part = next(name for name in _PARTS if (folder / name).is_dir())
    weights = folder / (part if last else part + AVERAGE_SUFFIX)
    if not weights.is_dir():
        raise UsageError(f"{folder} has no moving average, since the run had --ema off; write the last weights with --last")
    return weights


def _write_folder(weights: Path, output: Path, dtype: str) -> None:
    with staged_folder(output) as aside, _explaining(output, aside):
        inner = aside / weights_folder(weights.name)
        inner.mkdir(exist_ok=True)
        for path in weights.iterdir():
            if path.suffix == SUFFIX:
                tensors, metadata = read_tensors(path)
                save_tensors(_in_dtype(tensors, dtype), inner / path.name, metadata)
            else:
                shutil.copyfile(path, inner / path.name)
        if (scheduler := weights.parent / SCHEDULER).exists():  # of a whole model
            (aside / SCHEDULER).parent.mkdir()
            shutil.copyfile(scheduler, aside / SCHEDULER)


def _write_pipeline(weights: Path, output: Path, like: Path | None, dtype: str, *, fuse: bool) -> None:
    has_adapters = weights.name.startswith(ADAPTERS)
    if has_adapters and not fuse:
        raise UsageError(
            f"{weights} has only adapters, which load_lora_weights adds to the pipeline that they were trained on; leave out "
            "--pipeline to export them as they are, or use --fuse with it to write a pipeline whose weights include them"
        )
    if fuse and not has_adapters:
        raise UsageError(f"--fuse is for adapters, and {weights} has all weights of the model; leave it out")
    saved = checkpoint.read_state(weights.parent).config
    given, asked = Path(str(saved["model"])), saved.get("model_config")
    own, file = locate(given, None if asked is None else str(asked))
    if file is not None and like is None:
        raise UsageError(
            f"the run began from {given}, one file; name a folder in diffusers' layout with the other parts by --like, or an "
            f"output that ends in {SUFFIX} to write one file"
        )
    model = like or own
    _, _, family = read_model_config(model)
    parts = other_parts(model, family.folder)
    if has_adapters:
        trained, config = fused(weights, read_model(own, file)).state_dict(), read_model_config(own)[1]
    else:
        trained, config = load_file(weights / MODEL_FILE), json.loads((weights / "config.json").read_text(encoding="utf-8"))
    if (kind := str(config["_class_name"])) != family.model_class:
        raise ModelError(f"{model} has a {family.model_class}, expected a {kind}, as the run has trained")
    kept = "moving average of the weights" if weights.name.endswith(AVERAGE_SUFFIX) else "last weights"
    kept += ", with the trained adapters added" if has_adapters else ""
    card = pipeline_card((weights.parent / checkpoint.CARD).read_text(encoding="utf-8"), given, family, dtype=dtype, kept=kept)
    with staged_folder(output) as aside, _explaining(output, aside):
        write_parts(aside, parts, family.folder, kind, _schedule(weights, own, saved))
        save_tensors(_in_dtype(trained, dtype), aside / family.folder / MODEL_FILE, {"format": "pt"})
        (aside / family.folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        (aside / checkpoint.CARD).write_text(card, encoding="utf-8")


def _schedule(weights: Path, model: Path, options: Mapping[str, Json]) -> dict[str, Any]:
    """Return the trained noise schedule: as saved with a whole model, or that of the model with a run's `options`."""
    if (saved := weights.parent / SCHEDULER).exists():
        found: dict[str, Any] = json.loads(saved.read_text(encoding="utf-8"))
        return found
    objective, shift = options.get("objective"), options.get("shift")
    return load_schedule(
        model,
        torch.device("cpu"),
        objective=None if objective is None else Objective(str(objective)),
        shift=None if shift is None else float(str(shift)),
    ).config


def _write_file(weights: Path, output: Path, like: Path | None, dtype: str) -> None:
    if weights.name.startswith(ADAPTERS):
        raise UsageError(
            f"{weights} has only adapters, which are one file already, in lora_ema/ (and lora/); name a folder to write "
            "them with another --dtype"
        )
    saved = checkpoint.read_state(weights.parent).config
    named = like or Path(str(saved["model"]))
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
        with _explaining(output, output.parent):
            save_tensors(tensors, aside, {"format": "pt"})
            move_durably(aside, output)
    finally:
        aside.unlink(missing_ok=True)


@contextlib.contextmanager
def _explaining(output: Path, folder: Path) -> Iterator[None]:
    """Turn an error of the body, which writes in a folder, into a TrainError."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        said = failed_write(folder, error)
        raise TrainError(f"{output} cannot be written: {said}; make room or choose another place") from error


def _in_dtype(tensors: dict[str, Tensor], dtype: str) -> dict[str, Tensor]:
    kind = dtype_named(dtype)
    return {name: tensor.to(kind) if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}
