"""A model in diffusers layout: a folder with `vae/`, `text_encoder/`, `tokenizer/`, or the name of one on a hub."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bucketline.errors import ModelError
from bucketline.ingest.encoders.hub import cached_unless_reached, fetch, file_names
from bucketline.ingest.sources.redact import redacted
from bucketline.weight_files import variant_of

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFolder:
    """The location of a model's parts."""

    name: str  # as the user gave it, or the folder in the hub's cache if the hub cannot be reached
    is_local: bool

    def part(self, name: str) -> dict[str, Any]:
        """Return the arguments to load a part with `from_pretrained`.

        Raises:
            ModelError: if the folder has no such part.
        """
        if not self.is_local:
            return {"pretrained_model_name_or_path": self.name, "subfolder": name}
        folder = Path(self.name) / name
        if not folder.is_dir():
            there = ", ".join(sorted(path.name for path in Path(self.name).iterdir() if path.is_dir())) or "no folder at all"
            raise ModelError(
                f"{self.name} lacks the part {name}/; it has {there}; expected a model folder in diffusers' layout"
            )
        return {"pretrained_model_name_or_path": str(folder), "local_files_only": True}

    def weights(self, name: str, bases: tuple[str, ...]) -> dict[str, Any]:
        """Return the arguments to load a part's weights with `from_pretrained`; weight file names begin with one of `bases`.

        Raises:
            ModelError: if the folder has no such part, or the part has no weights.
        """
        part = self.part(name)
        if self.is_local:
            names = [path.name for path in (Path(self.name) / name).iterdir()]
        else:
            names = [file.removeprefix(f"{name}/") for file in file_names(self.name) if file.startswith(f"{name}/")]
        return {**part, "variant": variant_of(f"{redacted(self.name)}: {name}/", names, bases)}

    def config(self, name: str) -> Mapping[str, Any] | None:
        """Return the config.json of a part; None if there is none."""
        return self._read_json("config.json", name)

    def index(self) -> Mapping[str, Any]:
        """Return model_index.json, which names the pipeline and its parts; empty if there is none."""
        return self._read_json("model_index.json", None) or {}

    def has(self, name: str) -> bool:
        """Return True if the model has a part, according to its index or, without an index, the part itself."""
        index = self.index()
        if index:
            entry = index.get(name)
            return isinstance(entry, list) and entry[:1] != [None]
        return (Path(self.name) / name).is_dir() if self.is_local else self.config(name) is not None

    def _read_json(self, name: str, part: str | None) -> Mapping[str, Any] | None:
        if self.is_local:
            path = Path(self.name) / (part or "") / name
        else:
            fetched = fetch(self.name, f"{part}/{name}" if part else name)
            if fetched is None:
                return None
            path = fetched
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise ModelError(f"{path} is not JSON: {error}") from error
        if not isinstance(found, dict):
            raise ModelError(f"{path} holds {found!r:.80}, expected a JSON object")
        return found


def open_model(name: str) -> ModelFolder:
    """Return the model in the folder `name`, or the one of that name on a hub if there is no such folder.

    Raises:
        ModelError: if `name` is a path without a folder, or the hub lacks the model or cannot be reached.
    """
    path = Path(name)
    if path.is_dir():
        return ModelFolder(name=name, is_local=True)
    if path.exists() or name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise ModelError(
            f"{redacted(name)} is not a folder; expected a model folder in diffusers' layout (vae/, text_encoder/, tokenizer/) "
            "or a hub name such as owner/model"
        )
    cached = cached_unless_reached(name)
    return ModelFolder(name=name, is_local=False) if cached is None else ModelFolder(name=str(cached), is_local=True)
