"""Files of LoRA adapters under the names of other tools: kohya's are written, and theirs, diffusers' and peft's are read."""

from __future__ import annotations

import json
import logging
import re
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open

from bucketline.errors import ModelError, UsageError
from bucketline.train.lora import LORA_METADATA, PEFT_CONFIG, PEFT_PREFIX, Layers, layers_by_word, plain_layers

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor, nn

log = logging.getLogger(__name__)

_KOHYA_ENDS = {"A.weight": "lora_down.weight", "B.weight": "lora_up.weight"}
_NAME = re.compile(
    r"(?P<adapter>(?P<layer>.+?)[._]lora(?:_linear_layer|\d*))[._](?:(?P<down>A|down)|(?P<up>B|up))(?:\.default)?\.weight"
)
_ALPHA = ".alpha"
_QKV = "to_q", "to_k", "to_v"
_PREFIX = re.compile(r"^(?:base_model\.model\.|diffusion_model\.|unet\.|transformer\.|lora_unet_|lora_transformer_)+")
_OF_TEXT_ENCODERS = ("lora_te", "text_encoder")


def for_other_tools(
    tensors: Mapping[str, Tensor], part: str, alpha: float, names: Mapping[str, str] | None = None, *, is_kohyas: bool
) -> dict[str, Tensor]:
    """Return adapters by names that ComfyUI and Forge look up, with their alpha: they take alpha = rank without it.

    Of a UNet these are kohya's (`is_kohyas`), of a transformer diffusers', or by a family's `names` those of the original
    checkpoint, where one matrix holds the adapters of queries, keys and values. What they compute is the same.
    """
    layers: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        layer, _, end = name.removeprefix(PEFT_PREFIX).removeprefix(f"{part}.").rpartition(".lora_")
        for ours, theirs in (names or {}).items():
            layer = layer.replace(ours, theirs)
        layers.setdefault(layer, {})[end] = tensor
    for stem in [layer.removesuffix("to_q") for layer in layers if names and layer.endswith(".to_q")]:
        if all(stem + one in layers for one in _QKV):
            layers[f"{stem}qkv"] = _side_by_side([layers.pop(stem + one) for one in _QKV])
    found: dict[str, Tensor] = {}
    for layer, own in layers.items():
        key = f"lora_unet_{layer.replace('.', '_')}" if is_kohyas else f"{'diffusion_model' if names else part}.{layer}"
        found |= {f"{key}.{_KOHYA_ENDS[end]}": tensor for end, tensor in own.items()}
        found[key + _ALPHA] = torch.tensor(float(alpha) * (len(_QKV) if layer.endswith(".qkv") else 1))  # as is its rank
    return found


def _side_by_side(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return adapters of the same inputs as one, whose outputs are theirs, one after the other."""
    found = {end: torch.cat([own[end] for own in parts]) for end in parts[0]}
    return {**found, "B.weight": torch.block_diag(*(own["B.weight"] for own in parts))}  # type: ignore[no-untyped-call]


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    with safe_open(path, "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118 - not a dict


def start_from(path: Path, model: nn.Module, pipeline: str | None) -> None:
    """Fill a model's adapters from a file, so that each has the file's strength whatever its alpha; others stay at 0.

    `pipeline`: diffusers' class that loads such files, if there is one.
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
        with torch.no_grad():
            down.copy_(given[0])
            up.copy_(given[1].float() / own[layer].scaling["default"])
    log.info("%d of %d adapters begin as in %s, the others at 0", len(found), len(own), path)


def _read(path: Path, model: nn.Module, pipeline: str | None) -> dict[str, dict[str, Tensor]]:
    try:
        tensors, metadata = read_tensors(path)
        beside = path.with_name(PEFT_CONFIG)  # of peft's own file
        is_pefts = any(name.startswith("base_model.") for name in tensors) and beside.exists()
        text = beside.read_text(encoding="utf-8") if is_pefts else metadata.get(LORA_METADATA, "{}")
        said = {name.rpartition(".")[2]: value for name, value in json.loads(text).items()}
    except (OSError, SafetensorError, ValueError) as error:
        raise ModelError(f"--lora-from {path} cannot be read as a .safetensors file of adapters: {error}") from error
    if said.get("use_rslora") or said.get("use_dora") or said.get("alpha_pattern"):
        raise ModelError(f"{path}: its adapters are of rsLoRA or DoRA, or have an alpha each by metadata, expected plain LoRA")
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith(_OF_TEXT_ENCODERS)}
    if len(kept) < len(tensors):
        log.warning("%s: the adapters of its text encoders are left out; this trainer trains none", path)
    kept = _scaled(kept, said.get("lora_alpha"), path)
    layers = plain_layers(model)
    found, unknown = _by_layer(kept, layers)
    if unknown and pipeline:
        found, unknown = _by_layer(_converted(kept, pipeline, model, path), layers)
    if unknown or not found:
        named = repr(unknown[0]) if unknown else "no adapters"
        raise ModelError(f"{path} has {named}, expected LoRA adapters of the model's layers")
    return found


def _scaled(tensors: Mapping[str, Tensor], alpha: float | None, path: Path) -> dict[str, Tensor]:
    """Return adapters whose `up` has been multiplied by alpha ÷ rank; an alpha that the file has is the rank from then on.

    So none is lost that a converter of names leaves out. `alpha`: that of the adapters without one; None: their rank.
    """
    pairs: dict[str, dict[str, str]] = {}
    for name, tensor in tensors.items():
        match = _NAME.fullmatch(name)
        if not tensor.float().isfinite().all():
            raise ModelError(f"{path}: {name} has values that are not finite; use an earlier checkpoint of that run")
        if match is not None and tensor.ndim > 1:
            pairs.setdefault(match["adapter"], {"layer": match["layer"]})[str(match.lastgroup)] = name
        elif not name.endswith(_ALPHA):
            raise ModelError(
                f"{path} has {name!r}, expected only plain LoRA: a lora_A and a lora_B (or lora_down and lora_up) of each "
                "layer, and its alpha. Of DoRA, LoHa, LoKr or IA3 a part would be lost: start from a plain LoRA"
            )
    scaled = dict(tensors)
    for pair in pairs.values():
        if not pair.keys() >= {"down", "up"}:
            raise ModelError(f"{path}: the adapter of {pair['layer']} has only one of its two tensors")
        rank, own = len(tensors[pair["down"]]), pair["layer"] + _ALPHA
        given = float(tensors[own]) if own in tensors else alpha
        if given is not None and given != rank:
            scaled[pair["up"]] = tensors[pair["up"]].float() * (given / rank)
        if own in tensors:
            scaled[own] = torch.tensor(float(rank))
    return scaled


def _by_layer(tensors: Mapping[str, Tensor], layers: Iterable[str]) -> tuple[dict[str, dict[str, Tensor]], list[str]]:
    """Return adapters by layer, whose output is up · down · input, and the names of tensors that are not understood.

    `down`: [rank, inputs], or of a convolution [rank, inputs, height, width]; `up`: [outputs, rank], or [outputs, rank, 1, 1].
    """
    known = {name.replace(".", "_"): name for name in layers}
    found: dict[str, dict[str, Tensor]] = {}
    unknown = []
    for name, tensor in tensors.items():
        match = _NAME.fullmatch(name)
        if match is not None and (layer := known.get(_PREFIX.sub("", match["layer"]).replace(".", "_"))) is not None:
            found.setdefault(layer, {})[str(match.lastgroup)] = tensor
        elif not name.endswith(_ALPHA):  # which is the rank
            unknown.append(name)
    return found, unknown


def _converted(tensors: Mapping[str, Tensor], pipeline: str, model: Any, path: Path) -> dict[str, Tensor]:  # noqa: ANN401 - diffusers'
    """Return the tensors by diffusers' names of the layers, as its pipeline reads the names of original checkpoints."""
    import diffusers
    from diffusers.utils import convert_unet_state_dict_to_peft

    traced = {name: tensor if name.endswith(_ALPHA) else tensor.float().requires_grad_() for name, tensor in tensors.items()}
    try:
        read = getattr(diffusers, pipeline).lora_state_dict(dict(traced), unet_config=model.config)
        named = convert_unet_state_dict_to_peft(read[0] if isinstance(read, tuple) else read)
    except (ValueError, LookupError, AttributeError, TypeError, RuntimeError) as error:
        log.info("diffusers' %s does not read these adapters: %s", pipeline, error)
        return dict(tensors)
    given = {name: tensor for name, tensor in traced.items() if tensor.requires_grad}
    outputs = [tensor.sum() for tensor in named.values() if tensor.requires_grad]
    gradients = torch.autograd.grad(outputs, [*given.values()], allow_unused=True) if outputs else [None] * len(given)
    if lost := [name for name, gradient in zip(given, gradients, strict=True) if gradient is None]:
        raise ModelError(
            f"{path}: diffusers' {pipeline} leaves out {lost[0]!r} and {len(lost) - 1} other tensors, expected LoRA adapters "
            "of the model's layers"
        )
    return {name.replace(".processor", ""): tensor.detach() for name, tensor in named.items()}
