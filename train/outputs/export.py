"""Exports: the weights of a step and their card, in one folder that diffusers or peft opens, and that a hub takes.

exports/step-00000120/
    README.md         the model card
    unet/             the weights as diffusers loads them; or transformer/; of adapters, their files without a folder
"""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

from safetensors.torch import save_file

from bucketline.files.atomic_folder import staged_folder
from bucketline.model_file import SUFFIX
from bucketline.torch_dtypes import TORCH_DTYPES
from bucketline.train.outputs.checkpoint import folder_of_step, written_aside
from bucketline.train.outputs.lora_file import read_tensors
from bucketline.train.outputs.single_file import ADAPTERS
from bucketline.train.outputs.weights import AVERAGE_SUFFIX, WholeModel

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from bucketline.train.outputs.weights import Weights

EXPORTS = "exports"


def export_folder(output_dir: Path, steps_done: int) -> Path:
    """Return the folder of the export at a step."""
    return output_dir / EXPORTS / folder_of_step(steps_done)


def weights_folder(weights: Weights) -> str:
    """Return where in an export the weights are."""
    return weights.folder if isinstance(weights, WholeModel) else "."


def write_export(folder: Path, weights: Weights, config: str, tensors: dict[str, Tensor], *, dtype: str, card: str) -> None:
    """Write an export to a temporary folder and rename it; a folder that exists is replaced.

    Raises:
        TrainError: if it cannot be written.
    """
    with written_aside(folder, card) as aside:
        inner = aside / weights_folder(weights)
        inner.mkdir(exist_ok=True)
        weights.write(inner, config, _in_dtype(tensors, dtype))


def copy_export(weights: Path, output: Path, *, dtype: str) -> int:
    """Write the weights in a checkpoint's folder, such as `unet_ema`, as an export without a card; return its bytes.

    Raises:
        UsageError: if `output` exists.
        StoreError: if it cannot be written.
    """
    name = weights.name.removesuffix(AVERAGE_SUFFIX)
    with staged_folder(output) as aside:
        inner = aside / ("." if name == ADAPTERS else name)
        inner.mkdir(exist_ok=True)
        for path in weights.iterdir():
            if path.suffix == SUFFIX:
                tensors, metadata = read_tensors(path)
                save_file(_in_dtype(tensors, dtype), inner / path.name, metadata=metadata)
            else:
                shutil.copyfile(path, inner / path.name)
        return sum(path.stat().st_size for path in aside.rglob("*") if path.is_file())


def _in_dtype(tensors: dict[str, Tensor], dtype: str) -> dict[str, Tensor]:
    kind = TORCH_DTYPES[dtype]
    return {name: tensor.to(kind) if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}
