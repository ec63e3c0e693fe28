"""Write trained weights as one `.safetensors` file in the original key layout: diffusers' conversion from it, inverted."""

from __future__ import annotations

import json
import secrets
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from bucketline.errors import ModelError, StateError, TrainError, UsageError
from bucketline.files.atomic_write import move_durably
from bucketline.model_file import converter, file_shapes, single_file
from bucketline.train.outputs import checkpoint
from bucketline.train.outputs.weights import AVERAGE_SUFFIX, MODEL_FILE

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from bucketline.typed_json import Json

PARTS, ADAPTERS = ("unet", "transformer"), "lora"
OLD_AVERAGE = "model_ema."  # a file's own moving average, which some tools would prefer to the trained weights


def export_model(run: Path, output: Path, *, like: Path | None = None, last: bool = False, dtype: torch.dtype) -> int:
    """Write the averaged (or the `last`) weights of a run's newest checkpoint, or of a checkpoint's folder; return its bytes.

    `like`: a single file of the same architecture, which gives the names, and the VAE and text encoders; None: the file that
    the run began from.

    Raises:
        UsageError: if the run trained adapters, or began from a folder and `like` is None.
        TrainError, StateError, ModelError: if the checkpoint, `like` or the output is not as it has to be.
    """
    weights = saved_weights(run, last=last)
    if weights.name.startswith(ADAPTERS):
        raise UsageError(
            f"{weights} has only adapters, which are one file already, in lora_ema/ (and lora/); name a folder to write "
            "them with another --dtype"
        )
    template = _template(weights.parent, like)
    config: dict[str, Json] = json.loads((weights / "config.json").read_text(encoding="utf-8"))
    trained = {name: tensor.to(dtype) for name, tensor in load_file(weights / MODEL_FILE).items()}
    convert = converter(str(config["_class_name"]))
    file_shapes(template)  # its errors say what is wrong with a file
    tensors = in_original_layout(trained, load_file(template), lambda given: convert(given, config), item=str(template))
    aside = output.with_name(f"{output.name}.{secrets.token_hex(4)}.tmp")
    try:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, aside, metadata={"format": "pt"})
        move_durably(aside, output)
    except (OSError, SafetensorError) as error:
        raise TrainError(f"{output} cannot be written: {error}; make room or choose another place") from error
    finally:
        aside.unlink(missing_ok=True)
    return output.stat().st_size


def saved_weights(run: Path, *, last: bool) -> Path:
    """Return the folder of the averaged (or the `last`) weights in a run's newest complete checkpoint, or in a checkpoint.

    Raises:
        StateError: if the checkpoint is damaged.
        UsageError: if it has no average.
    """
    folder = checkpoint.last_whole(run) if (run / checkpoint.CHECKPOINTS).is_dir() else run
    if (wrong := checkpoint.damage(folder)) is not None:
        raise StateError(f"{folder} is not a whole checkpoint ({wrong}); name a run's folder or one of its checkpoints")
    part = next(name for name in (*PARTS, ADAPTERS) if (folder / name).is_dir())
    weights = folder / (part if last else part + AVERAGE_SUFFIX)
    if not weights.is_dir():
        raise UsageError(f"{folder} has no moving average, since the run had --ema off; write the last weights with --last")
    return weights


def _template(folder: Path, like: Path | None) -> Path:
    began_from = Path(str(checkpoint.read_state(folder).config["model"]))
    found = single_file(like or began_from)
    if found is None:
        raise UsageError(
            f"{like or began_from} is not a .safetensors file; name one of the same architecture with --like, such as the "
            "checkpoint that the model was published as: its names are followed, and its VAE and text encoders are kept"
        )
    return found


def in_original_layout(
    trained: Mapping[str, Tensor],
    template: Mapping[str, Tensor],
    convert: Callable[[dict[str, Tensor]], Mapping[str, Tensor]],
    *,
    item: str,
) -> dict[str, Tensor]:
    """Return the tensors of a `template` in the original layout, with those of the trained part replaced.

    `convert` turns all tensors of such a file into the part's, by diffusers' names: it renames tensors, and splits and
    reorders their rows. It is called with numbered rows, whose places in its result say where each row comes from.

    Raises:
        ModelError: if the trained part's tensors are not those of the template, `item`.
    """
    numbers: dict[str, Tensor] = {}
    names, starts, num_rows = list(template), [], 0
    for name, tensor in template.items():
        rows = tensor.shape[0] if tensor.ndim else 1
        numbers[name] = torch.arange(num_rows, num_rows + rows).reshape(tensor.shape[:1] + (1,) * (tensor.ndim - 1))
        starts.append(num_rows)
        num_rows += rows
    try:
        converted = {name: tensor.flatten() for name, tensor in convert(numbers).items()}
    except (KeyError, IndexError) as error:
        raise ModelError(f"{item} holds no such model ({error!r}); name a file of the same architecture") from error
    if different := converted.keys() ^ trained.keys():
        raise ModelError(
            f"{item} holds another model: only one of the two has {min(different)}; name a file of the same architecture"
        )
    result = {name: tensor for name, tensor in template.items() if not name.startswith(OLD_AVERAGE)}
    for name, places in converted.items():
        values = trained[name].reshape(len(places), -1)
        owners = torch.searchsorted(torch.tensor(starts), places, right=True) - 1
        for owner in owners.unique().tolist():
            own, mine = names[owner], owners == owner
            if result[own] is template[own]:
                result[own] = template[own].to(values.dtype, copy=True)
            try:
                result[own].view(numbers[own].numel(), -1)[places[mine] - starts[owner]] = values[mine]
            except (RuntimeError, IndexError) as error:
                raise ModelError(
                    f"{item}: {own} has the shape {tuple(template[own].shape)}, and the trained tensors "
                    f"{tuple(trained[name].shape)} do not fit into it; name a file of the same architecture"
                ) from error
    if not all(torch.equal(tensor, trained[name]) for name, tensor in convert(result).items()):
        raise ModelError(f"{item}: diffusers does not read back what would be written; report this with its version")
    return result
