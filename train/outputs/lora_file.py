"""Files of LoRA adapters under the names of other tools: kohya's are written, and theirs, diffusers' and peft's are read."""

from __future__ import annotations

import json
import logging
import re
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open

from bucketline.errors import ModelError, UsageError
from bucketline.train.models.lora import LORA_METADATA, PEFT_CONFIG, PEFT_PREFIX, Layers, layers_by_word, plain_layers

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from torch import Tensor, nn

log = logging.getLogger(__name__)

MAGNITUDE = "magnitude_vector"  # of DoRA, for each output of a layer
KOHYA_ENDS = {"A.weight": "lora_down.weight", "B.weight": "lora_up.weight"}
_NAME = re.compile(r"(?P<layer>.+?)\.(?:lora[_.](?:(?P<down>A|down)|(?P<up>B|up))(?:\.default)?\.weight|(?P<alpha>alpha))")
PREFIX = re.compile(r"^(?:base_model\.model\.|diffusion_model\.|unet\.|transformer\.|lora_unet_|lora_transformer_)+")
OF_TEXT_ENCODERS = ("lora_te", "text_encoder")

Adapter = dict[str, "Tensor"]
"""One layer's adapter: its output is up · down · input, times alpha ÷ rank.

`down`: [rank, inputs], or of a convolution [rank, inputs, height, width]; `up`: [outputs, rank], or [outputs, rank, 1, 1];
`alpha`: [], by default the rank.
"""


def for_other_tools(tensors: Mapping[str, Tensor], part: str, alpha: float, *, is_kohyas: bool) -> dict[str, Tensor]:
    """Return adapters by kohya's names, with their alpha: the tools that read no metadata take alpha = rank without it.

    ComfyUI and Forge know `lora_unet_` and `lora_transformer_` before diffusers' names of the layers, but for PixArt, which is
    not `is_kohyas`, only the names themselves. The tensors are the same.
    """
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        layer, _, end = name.removeprefix(PEFT_PREFIX).removeprefix(f"{part}.").rpartition(".lora_")
        own = f"lora_{part}_{layer.replace('.', '_')}" if is_kohyas else f"{part}.{layer}"
        if end == MAGNITUDE:
            up = tensors[name.removesuffix(end) + "B.weight"]
            found[f"{own}.dora_scale"] = tensor.reshape(-1, *(1 for _ in up.shape[1:]))
            continue
        found[f"{own}.{KOHYA_ENDS[end]}"] = tensor
        found[f"{own}.alpha"] = torch.tensor(float(alpha))
    return found


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return a safetensors file's tensors and its metadata."""
    with safe_open(path, "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118 - not a dict


def read_adapters(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return a file's adapters and peft's configuration of them: in its metadata, or next to peft's own file; {} if neither is.

    Raises:
        OSError, SafetensorError, ValueError: if one of them cannot be read.
    """
    tensors, metadata = read_tensors(path)
    beside = path.with_name(PEFT_CONFIG)
    is_pefts = any(name.startswith("base_model.") for name in tensors) and beside.exists()
    text = beside.read_text(encoding="utf-8") if is_pefts else metadata.get(LORA_METADATA, "{}")
    return tensors, {name.rpartition(".")[2]: value for name, value in json.loads(text).items()}


def start_from(path: Path, model: nn.Module, pipeline: str | None) -> None:
    """Fill a model's adapters from a file, so that each has the file's strength whatever its alpha; others stay at 0.

    `pipeline`: diffusers' class that loads such files, if there is one.

    Raises:
        ModelError: if the file cannot be read, or has other adapters than LoRA or of another model.
        UsageError: if it has another rank than the model's adapters, or more layers.
    """
    own = {name: module for name, module in model.named_modules() if hasattr(module, "lora_A")}
    found = _read(path, model, pipeline)
    if others := [layer for layer in found if layer not in own]:
        words = [word for word in Layers if set(found) <= set(layers_by_word(model, word))]
        raise UsageError(
            f"{path} has adapters of {others[0]} and {len(others) - 1} other layers that --lora-targets leaves out; "
            + (f"use --lora-targets {words[0]}" if words else "name the ends of their names as well")
        )
    for layer, adapter in found.items():
        if not adapter.keys() >= {"down", "up"}:
            raise ModelError(f"{path}: the adapter of {layer} has only one of its two tensors")
        given = adapter["down"], adapter["up"]
        down, up = own[layer].lora_A["default"].weight, own[layer].lora_B["default"].weight
        if (rank := len(given[0])) != len(down):
            raise UsageError(f"{path}: {layer} has rank {rank}, and --lora-rank is {len(down)}; use --lora-rank {rank}")
        shapes = [tuple(one.shape) for one in (*given, down, up)]
        if shapes[:2] != shapes[2:]:
            raise ModelError(
                f"{path}: {layer} has tensors of {shapes[0]} and {shapes[1]}, expected {shapes[2]} and {shapes[3]}; "
                "it belongs to another model"
            )
        strength = float(adapter.get("alpha", rank)) / rank
        with torch.no_grad():
            down.copy_(given[0])
            up.copy_(given[1].float() * (strength / own[layer].scaling["default"]))
    log.info("%d of %d adapters begin as in %s, the others at 0", len(found), len(own), path)


def _read(path: Path, model: nn.Module, pipeline: str | None) -> dict[str, Adapter]:
    """Return a file's adapters by the model's names of the layers."""
    try:
        tensors, said = read_adapters(path)
    except (OSError, SafetensorError, ValueError) as error:
        raise ModelError(f"--lora-from {path} cannot be read as a .safetensors file of adapters: {error}") from error
    if said.get("use_rslora") or said.get("use_dora") or said.get("alpha_pattern"):
        raise ModelError(f"{path}: its adapters are of rsLoRA or DoRA, or have an alpha each by metadata, expected plain LoRA")
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith(OF_TEXT_ENCODERS)}
    if len(kept) < len(tensors):
        log.warning("%s: the adapters of its text encoders are left out; this trainer trains none", path)
    layers = plain_layers(model)
    found, unknown = _by_layer(kept, layers)
    if unknown and pipeline:
        found, unknown = _by_layer(_converted(kept, pipeline, model), layers)
    if unknown or not found:
        named = repr(unknown[0]) if unknown else "no adapters"
        raise ModelError(f"{path} has {named}, expected LoRA adapters of the model's layers")
    alpha = {"alpha": torch.tensor(float(said["lora_alpha"]))} if said.get("lora_alpha") is not None else {}
    return {layer: alpha | adapter for layer, adapter in found.items()}


def _by_layer(tensors: Mapping[str, Tensor], layers: Iterable[str]) -> tuple[dict[str, Adapter], list[str]]:
    """Return adapters by layer, and the names of tensors that are not understood."""
    known = {name.replace(".", "_"): name for name in layers}
    found: dict[str, Adapter] = {}
    unknown = []
    for name, tensor in tensors.items():
        match = _NAME.fullmatch(name)
        layer = known.get(PREFIX.sub("", match["layer"]).replace(".", "_")) if match else None
        if match is None or layer is None:
            unknown.append(name)
        else:
            found.setdefault(layer, {})[str(match.lastgroup)] = tensor
    return found, unknown


def _converted(tensors: Mapping[str, Tensor], pipeline: str, model: Any) -> dict[str, Tensor]:  # noqa: ANN401 - diffusers'
    """Return the tensors by diffusers' names of the layers, as its pipeline reads the names of original checkpoints."""
    import diffusers
    from diffusers.utils import convert_unet_state_dict_to_peft

    try:
        # Flux's pipeline returns the alphas on request, the others in any case
        read = getattr(diffusers, pipeline).lora_state_dict(dict(tensors), unet_config=model.config, return_alphas=True)
        named, alphas = read if isinstance(read, tuple) else (read, None)
        of_layers = {name.replace(".processor", ""): value for name, value in convert_unet_state_dict_to_peft(named).items()}
    except (ValueError, KeyError, IndexError, AttributeError) as error:
        log.info("diffusers' %s does not read these adapters: %s", pipeline, error)
        return dict(tensors)
    for name, alpha in (alphas or {}).items():
        layer = name.removesuffix(".alpha").removesuffix(".down.weight").removesuffix("_lora").replace(".processor", "")
        of_layers[f"{layer}.0.alpha" if layer.endswith(".to_out") else f"{layer}.alpha"] = torch.tensor(float(alpha))
    return of_layers
