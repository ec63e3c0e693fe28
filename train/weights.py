"""What of a model is written and read back: all of it, or its adapters; each in the form that diffusers or peft opens."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from safetensors.torch import load_file, save_file

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor, nn

MODEL_FILE = "diffusion_pytorch_model.safetensors"
LORA_FOLDER = "lora"
LORA_FILE = "pytorch_lora_weights.safetensors"
PEFT_FILE = "adapter_model.safetensors"
PEFT_CONFIG = "adapter_config.json"
PEFT_PREFIX = "base_model.model."


class Weights(Protocol):
    """How a model's trained tensors lie in a folder."""

    def tensors(self, model: nn.Module) -> dict[str, Tensor]:
        """Give what is written, by the names it is written under; the tensors are the model's own."""

    def write(self, folder: Path, model: nn.Module, tensors: dict[str, Tensor]) -> None:
        """Write what `tensors` gave (or copies of it) into a folder that is there, so that others can load it."""

    def fill(self, folder: Path, model: nn.Module) -> None:
        """Fill a model from such a folder.

        Raises:
            RuntimeError, ValueError: where the tensors are another model's.
        """


class WholeModel:
    """Every tensor: `from_pretrained` opens the folder."""

    def tensors(self, model: nn.Module) -> dict[str, Tensor]:
        return {name: tensor.detach() for name, tensor in model.state_dict().items()}

    def write(self, folder: Path, model: nn.Module, tensors: dict[str, Tensor]) -> None:
        model.save_config(str(folder))  # type: ignore[operator]
        _save(tensors, folder / MODEL_FILE, {"format": "pt"})

    def fill(self, folder: Path, model: nn.Module) -> None:
        model.load_state_dict(load_file(folder / MODEL_FILE))


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapters:
    """The adapters alone: the pipeline's `load_lora_weights` opens the folder, or peft's `PeftModel.from_pretrained`."""

    part: str  # the pipeline's, `unet` or `transformer`
    by_pipeline: bool  # whether diffusers' pipeline takes adapters at all; DiT's and PixArt's do not

    def tensors(self, model: nn.Module) -> dict[str, Tensor]:
        from peft import get_peft_model_state_dict

        prefix = f"{self.part}." if self.by_pipeline else PEFT_PREFIX
        return {prefix + name: tensor.detach() for name, tensor in get_peft_model_state_dict(model).items()}

    def write(self, folder: Path, model: nn.Module, tensors: dict[str, Tensor]) -> None:
        config = _peft_config(model)
        if self.by_pipeline:
            # As diffusers' `save_lora_weights` writes it, so that rank, alpha and layers come back as they were.
            described = json.dumps({f"{self.part}.{name}": value for name, value in config.items()}, indent=2, sort_keys=True)
            _save(tensors, folder / LORA_FILE, {"format": "pt", "lora_adapter_metadata": described})
        else:
            (folder / PEFT_CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True), encoding="utf-8")
            _save(tensors, folder / PEFT_FILE, {"format": "pt"})

    def fill(self, folder: Path, model: nn.Module) -> None:
        stored = load_file(folder / (LORA_FILE if self.by_pipeline else PEFT_FILE))
        own = self.tensors(model)
        if {name: tensor.shape for name, tensor in own.items()} != {name: tensor.shape for name, tensor in stored.items()}:
            raise ValueError(f"its adapters are {len(stored)} tensors of other names or shapes than the model's {len(own)}")
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(stored[name])


def _save(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata=metadata)


def _peft_config(model: nn.Module) -> dict[str, Any]:
    (config,) = model.peft_config.values()  # type: ignore[operator]
    found = {name: value for name, value in asdict(config).items() if name != "runtime_config"}
    return {name: sorted(value) if isinstance(value, set) else value for name, value in found.items()}
