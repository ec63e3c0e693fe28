"""`UNet2DConditionModel` with text conditioning alone (Stable Diffusion 1.x and 2.x)."""

from __future__ import annotations

import inspect
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from diffusers import UNet2DConditionModel

from bucketline.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor, nn

    from bucketline.loader import Batch
    from bucketline.store.typed_json import Json

FOLDER = "unet"
WEIGHT_SUFFIXES = (".safetensors", ".bin")

UNSUPPORTED = (
    "addition_embed_type",
    "class_embed_type",
    "encoder_hid_dim",
    "encoder_hid_dim_type",
    "num_class_embeds",
    "time_cond_proj_dim",
)
"""Configuration fields that ask for inputs which this family does not give; each must be absent or null."""
CHECKED = (*UNSUPPORTED, "in_channels", "out_channels", "cross_attention_dim", "dropout")


@dataclass(frozen=True, slots=True, kw_only=True)
class UNetFamily:
    """Calls a UNet with the noisy latents, the timesteps and the caption's tokens."""

    attends_padding: bool  # whether the model sees padding tokens too, as Stable Diffusion's pipelines do with CLIP
    folder: str = FOLDER

    def predict(self, model: nn.Module, noisy: Tensor, timesteps: Tensor, batch: Batch) -> Tensor:
        """Give the prediction, [B, C, h, w]."""
        mask = None if self.attends_padding else batch.token_mask
        output = model(noisy, timesteps, batch.tokens.float(), encoder_attention_mask=mask, return_dict=False)
        prediction: Tensor = output[0]
        return prediction


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model ready to train, and how to call it."""

    family: UNetFamily
    model: nn.Module
    at_random: bool  # there were no weights, so it starts at random


def load(model_folder: Path, encoders: Mapping[str, Json], seed: int) -> LoadedModel:
    """Load the UNet of a model folder, or build it at random where the folder has a configuration and no weights.

    `encoders`: what the store says of the encoders that made its columns.

    Raises:
        ModelError: where there is no UNet, its weights do not fit, or it does not suit the store; the field is named.
    """
    folder = model_folder / FOLDER
    config = _read_config(folder)
    check(config, encoders, str(folder / "config.json"))
    weights = sorted(path.name for path in folder.iterdir() if path.suffix in WEIGHT_SUFFIXES)
    model = _from_weights(folder, weights) if weights else _at_random(config, seed)
    text = encoders["text_encoder"]
    assert isinstance(text, dict)
    family = UNetFamily(attends_padding=text.get("padding") != "valid")
    return LoadedModel(family=family, model=model.requires_grad_(requires_grad=True).train(), at_random=not weights)


def check(config: Mapping[str, Json], encoders: Mapping[str, Json], item: str) -> None:
    """Check a UNet's configuration against the encoders that made a store.

    Raises:
        ModelError: naming the field, what it is and what the store needs.
    """
    channels = _number(encoders, "vae", "latent_channels")
    width = _number(encoders, "text_encoder", "width")
    for field, expected, reason in (
        ("in_channels", channels, "the store's latents have as many channels"),
        ("out_channels", channels, "the store's latents have as many channels"),
        ("cross_attention_dim", width, "the store's text embeddings are as wide"),
    ):
        found = config.get(field)
        if found != expected:
            raise ModelError(
                f"{item}: {field} is {found}, expected {expected}, since {reason}; "
                "train a model that fits, or pack the source with this model's own encoders"
            )
    for field in UNSUPPORTED:
        if config.get(field) is not None:
            raise ModelError(f"{item}: {field} is {config[field]}, expected none; this input of a UNet is not supported yet")
    if config.get("dropout"):
        # Its draws come from the process's generator: two ranks would no longer equal one, nor a resume the whole run.
        raise ModelError(f"{item}: dropout is {config['dropout']}, expected 0; set it to 0 to train reproducibly")


def _number(encoders: Mapping[str, Json], encoder: str, field: str) -> int:
    entry = encoders.get(encoder)
    value = entry.get(field) if isinstance(entry, dict) else None
    if not isinstance(value, int):
        raise ModelError(f"the store's manifest has no number {encoder}.{field}; this store suits no text-conditioned UNet")
    return value


def _read_config(folder: Path) -> dict[str, Json]:
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelError(
            f"{path} is not there; --model must be a folder in diffusers' layout with a {FOLDER}/ in it "
            "(a configuration alone is enough to start at random)"
        ) from error
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(config, dict) or config.get("_class_name") != UNet2DConditionModel.__name__:
        found = config.get("_class_name") if isinstance(config, dict) else config
        raise ModelError(f"{path}: _class_name is {found!r:.80}, expected {UNet2DConditionModel.__name__!r}")
    # A field that the file does not name has the class's default, and the check should see what the model will be.
    parameters = inspect.signature(UNet2DConditionModel.__init__).parameters
    return {name: parameters[name].default for name in CHECKED if name in parameters} | config


def _from_weights(folder: Path, names: list[str]) -> nn.Module:
    try:
        loaded, report = UNet2DConditionModel.from_pretrained(
            str(folder), torch_dtype=torch.float32, output_loading_info=True, local_files_only=True
        )
    except Exception as error:  # diffusers raises what each of its readers raises; any of them means the same here
        raise ModelError(f"{folder}: the weights ({', '.join(names)}) cannot be loaded: {error!s:.500}") from error
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if report.get(kind):
            raise ModelError(f"{folder}: the weights do not match config.json: {kind} {sorted(map(str, report[kind]))[:3]}")
    model: nn.Module = loaded
    return model


def _at_random(config: dict[str, Json], seed: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: nn.Module = UNet2DConditionModel.from_config(config)
    return model
