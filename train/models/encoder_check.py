"""Check that the encoders in a model folder are those that packed the store."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import diffusers
import torch

from bucketline.errors import ModelError
from bucketline.families.vaes import PACKED_VAES, vae_class
from bucketline.fingerprint import config_hash, weights_hash
from bucketline.weight_files import DIFFUSERS, variant_of

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import nn

    from bucketline.model_file import ModelFile
    from bucketline.typed_json import Json

VAE_FOLDER = "vae"
UNREADABLE = (OSError, ValueError, RuntimeError, AttributeError, NotImplementedError)  # diffusers' errors


def refuse_other_configs(model_folder: Path, encoders: Mapping[str, Json]) -> None:
    """Reject a model folder whose VAE or text encoders have another configuration than the store's; nothing is loaded.

    `encoders` is the store's record of its encoders. A folder without encoders passes.

    Raises:
        ModelError: if a part differs; the message names it and its digest.
    """
    text = encoders.get("text_encoder")
    text = text if isinstance(text, dict) else {}
    parts = text.get("parts") or {"text_encoder": text}  # a family of several encoders lists each
    assert isinstance(parts, dict)
    for name, stored in {VAE_FOLDER: encoders["vae"], **parts}.items():
        try:
            config = json.loads((model_folder / name / "config.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        what, found = "text encoder", {"config_hash": config_hash(config)}
        if name == VAE_FOLDER:
            what, found = "VAE", {"class": vae_class(config), **found}
        if isinstance(stored, dict):
            _refuse(_difference(model_folder / name, what, found, stored))


def refuse_other_encoders(model_folder: Path, encoders: Mapping[str, Json], file: ModelFile | None = None) -> None:
    """Compare a VAE's weights too; a text encoder is never loaded, and a VAE that cannot be read passes.

    `file`: the single file that has the weights, if there is one. Otherwise as `refuse_other_configs`.
    """
    refuse_other_configs(model_folder, encoders)
    try:
        _, other = read_vae(model_folder / VAE_FOLDER, encoders, file)
    except UNREADABLE:
        return  # a warning follows when images are drawn
    _refuse(other)


def _refuse(other: str | None) -> None:
    if other is not None:
        raise ModelError(
            f"{other}; this model was trained with its own encoders: pack the source with those of this folder, or remove "
            "that part from the folder if the model is meant to learn from the store's"
        )


def read_vae(folder: Path, encoders: Mapping[str, Json], file: ModelFile | None = None) -> tuple[nn.Module, str | None]:
    """Load a VAE in 32 bits; return it and how it differs from the store's, or None if it does not.

    `file`: the single file that has the weights, if there is one; a VAE that it lacks comes from the folder.

    Raises:
        OSError, ValueError and others in `UNREADABLE`: if it cannot be loaded.
    """
    stored = encoders["vae"]
    assert isinstance(stored, dict)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    kind = vae_class(config)
    if kind not in PACKED_VAES:
        raise ValueError(f"its class is {kind!r:.80}, expected {' or '.join(PACKED_VAES)}")
    try:
        if file is not None and file.has(VAE_FOLDER):
            vae = file.load(VAE_FOLDER)
        else:
            variant = variant_of(f"{folder}/", (path.name for path in folder.iterdir()), DIFFUSERS)
            of_class: Any = getattr(diffusers, kind)
            vae = of_class.from_pretrained(str(folder), torch_dtype=torch.float32, local_files_only=True, variant=variant)
    except ModelError as error:
        raise ValueError(str(error)) from error
    found = {"config_hash": config_hash(config), "weights_hash": weights_hash(vae)}
    return vae.requires_grad_(requires_grad=False).eval(), _difference(folder, "VAE", found, stored)


def _difference(folder: Path, what: str, found: dict[str, str], stored: Mapping[str, Json]) -> str | None:
    for field, value in found.items():
        if field in stored and stored[field] != value:
            return (
                f"{folder} is not the {what} that the store was packed with: its {field} is {value}, "
                f"the store has {stored[field]}"
            )
    return None
