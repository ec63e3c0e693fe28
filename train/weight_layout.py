"""Write and read model weights, full or adapters only, in the formats of diffusers and peft."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from safetensors.torch import load_file, save_file

from bucketline.model_file import LORA_FILE, PEFT_FILE
from bucketline.train.lora import LORA_METADATA, PEFT_CONFIG, PEFT_PREFIX
from bucketline.train.noise import SCHEDULER_CONFIG as SCHEDULER
from bucketline.train.parallel import plain_class

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor, nn

    from bucketline.families.family import Family

MODEL_FILE = "diffusion_pytorch_model.safetensors"
KOHYA_FILE = "kohya_lora.safetensors"
ADAPTERS, AVERAGE_SUFFIX = "lora", "_ema"


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
