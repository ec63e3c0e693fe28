"""A model in diffusers layout: a folder with `vae/`, `text_encoder/`, `tokenizer/`, or the name of one on a hub."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bucketline.errors import ModelError
from bucketline.families.registry import crossed, family_of_model, takes_images
from bucketline.families.vaes import latent_channels
from bucketline.files.paths import can_be_reached
from bucketline.files.redact import redacted
from bucketline.ingest.encoders.hub import downloaded, snapshot
from bucketline.model_file import ModelFile, index_path, open_model_file, refuse_config_without_file, single_file
from bucketline.weight_files import DIFFUSERS, TRANSFORMERS, safetensors_of, variant_of

if TYPE_CHECKING:
    from collections.abc import Mapping

DENOISERS = ("transformer", "unet")
ENCODERS = ("vae", "text_encoder", "text_conditioner")  # what the names of parts that ingest loads begin with
TOKENIZERS = ("tokenizer", "processor", "t5_tokenizer")  # likewise
_VOCABULARY = re.compile(r"^(tokenizer|tekken)\.json$|vocab|\.(model|spm|tiktoken)$")
_HEAD = re.compile(r"(Encoder)?(Model|For[A-Z]\w*)$")  # a pipeline may load a Qwen3Model from the weights of a Qwen3ForCausalLM


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFolder:
    """The location of a model's parts."""

    name: str  # as the user gave it
    path: Path  # folder of all its files, or of its configurations if the hub can be reached
    hub_files: tuple[str, ...] | None = None  # paths of all files on the hub; None if `path` has all that there is
    is_unreached: bool = False  # of a hub that could not be reached: `path` has what its cache has, and others may be missing
    file: ModelFile | None = None  # if its weights are in one file; `path` has the configurations then

    def part(self, name: str) -> dict[str, Any]:
        """Return the arguments to load a part with `from_pretrained`, which downloads the files that it needs from a hub."""
        parts = (
            {path.name for path in self.path.iterdir() if path.is_dir()}
            if self.hub_files is None
            else {file.partition("/")[0] for file in self.hub_files if "/" in file}
        )
        if name not in parts:
            there = ", ".join(sorted(parts)) or "no folder at all"
            raise ModelError(f"{self.name} lacks the part {name}/; it has {there}; expected a model in diffusers' layout")
        if self.hub_files is None:
            return {"pretrained_model_name_or_path": str(self.path / name), "local_files_only": True}
        return {"pretrained_model_name_or_path": self.name, "subfolder": name, "revision": self.path.name}

    def weights(self, name: str, bases: tuple[str, ...]) -> dict[str, Any]:
        """Return the arguments to load a part's weights with `from_pretrained`; weight file names begin with one of `bases`."""
        part, names = self.part(name), self._files(name)
        return {**part, "variant": variant_of(f"{redacted(self.name)}: {name}/", names, bases)}

    def weight_files(self, name: str, bases: tuple[str, ...]) -> list[Path]:
        """Return the .safetensors files that `weights` stands for, downloaded if they are a hub's; empty if it has none."""
        variant = self.weights(name, bases)["variant"]
        own = safetensors_of(self._files(name), bases, variant)
        if self.hub_files is None:
            return [self.path / name / file for file in own]
        return downloaded(self.name, [f"{name}/{file}" for file in own], self.path.name)

    def _files(self, name: str) -> list[str]:
        """Return the names of the files of a part."""
        if self.hub_files is None:
            return [path.name for path in (self.path / name).iterdir()]
        return [file.removeprefix(f"{name}/") for file in self.hub_files if file.startswith(f"{name}/")]

    def lacks(self, name: str) -> str | None:
        """Return what a part without it cannot be loaded: its configuration, or a tokenizer's vocabulary; None if it has it."""
        files = self._files(name)
        there = ", ".join(sorted(files)) or "no file"
        if name.startswith(TOKENIZERS) and not {"tokenizer_config.json", "config.json"} & set(files):
            is_there, wanted = False, "tokenizer_config.json"
        elif name.startswith(TOKENIZERS):
            is_there = any(map(_VOCABULARY.search, files))
            wanted = "vocabulary (tokenizer.json, vocab.json, vocab.txt, or a .model file)"
        else:
            is_there, wanted = "config.json" in files, "config.json"
        return None if is_there else f"no {wanted}; it has {there}"

    def refuse_other_classes(self) -> None:
        """Check that the index names the class of each encoder that the encoder's own configuration names."""
        for name, entry in self.index().items():
            if not name.startswith(ENCODERS) or not isinstance(entry, list) or len(entry) < len(("library", "class")):
                continue
            config = self.config(name) or {}
            of_weights = config.get("architectures")
            own = config.get("_class_name") or (of_weights[0] if isinstance(of_weights, list) and of_weights else None)
            if isinstance(own, str) and isinstance(entry[1], str) and _HEAD.sub("", own) != _HEAD.sub("", entry[1]):
                raise ModelError(
                    f"{redacted(self.name)}: {index_path(self.path).name} names the class {entry[1]:.80} for {name}/, and "
                    f"{name}/config.json {own:.80}, expected the same; take both from one model"
                )

    def refuse_other_model(self) -> None:
        """Check that the index names a pipeline of captions, whose transformer or UNet is its own and takes the latents."""
        index = self.index()
        if (wrong := takes_images(index)) is not None:
            raise ModelError(f"{redacted(self.name)}: {index_path(self.path).name} {wrong}")
        folder = next((name for name in DENOISERS if self.config(name) is not None), None)
        if folder is None:
            return
        config = self.config(folder) or {}
        if (wrong := crossed(index, config, folder)) is not None:
            raise ModelError(f"{redacted(self.name)}: {index_path(self.path).name} {wrong}")
        pipeline, vae = index.get("_class_name"), self.config("vae") or {}
        family = family_of_model(config, folder, pipeline)
        if family is None or pipeline not in (None, family.pipelines[0]):  # of another task: its model is given more channels
            return
        found, channels = config.get("in_channels"), latent_channels(vae)
        if isinstance(found, int) and channels is not None and found != (wanted := channels * family.packing**2):
            raise ModelError(
                f"{redacted(self.name)}: {folder}/config.json has in_channels {found}, expected {wanted}, since the latents of "
                f"vae/ have {channels} channels, in {family.packing} by {family.packing} positions; take both from one model"
            )

    def from_file(self, name: str) -> Any | None:  # noqa: ANN401 - diffusers and transformers have no common type
        """Load a part from the model's single file; None if there is no such file, or the folder has the part instead."""
        if self.file is None:
            return None
        if self.file.has(name):
            return self.file.load(name)
        if not self.has_weights(name):
            raise ModelError(
                f"{self.name} has no {name}, and {self.path / name} no weights; name a folder that has them by --model-config"
            )
        return None

    def config(self, name: str) -> Mapping[str, Any] | None:
        """Return the config.json of a part; None if there is none."""
        return self._read_json("config.json", name)

    def index(self) -> Mapping[str, Any]:
        """Return the model's index, which names the pipeline and its parts; empty if there is none."""
        return self._read_json(index_path(self.path).name, None) or {}

    def has(self, name: str) -> bool:
        """Return True if the model has a part, according to its index or, without an index, the part itself."""
        index = self.index()
        if index:
            entry = index.get(name)
            is_named = isinstance(entry, list) and entry[:1] != [None]
            return is_named and (self.file is None or self.file.has(name) or self.has_weights(name))
        return (self.path / name).is_dir()

    def has_weights(self, name: str) -> bool:
        """Return True if the model has the weights of a part in a folder of its own, also if a hub has yet to send them."""
        files = self.hub_files
        if files is None:
            files = tuple(f"{name}/{path.name}" for path in (self.path / name).glob("*.*"))
        beginnings = tuple(f"{name}/{base}" for base in (*DIFFUSERS, *TRANSFORMERS))
        is_there = any(file.startswith(beginnings) for file in files)
        if self.is_unreached and not is_there:
            raise ModelError(
                f"{redacted(self.name)}: the weights of {name}/ are not in the hub's cache, and the hub could not be reached; "
                "run it once with network access, or name a model's folder"
            )
        return is_there

    def _read_json(self, name: str, part: str | None) -> Mapping[str, Any] | None:
        path = self.path / (part or "") / name
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise ModelError(f"{path} is not JSON: {error}") from error
        if not isinstance(found, dict):
            raise ModelError(f"{path} holds {found!r:.80}, expected a JSON object")
        return found


def open_model(name: str, config: str | None = None) -> ModelFolder:
    """Return the model in the folder or single file `name`, or the one of that name on a hub if there is neither.

    `config`: for a single file, the folder of its configurations, or the name of a model on a hub that has the same.
    """
    if (model := local_model(name, config)) is None:
        path, files = snapshot(name)
        model = ModelFolder(name=name, path=path, hub_files=files, is_unreached=files is None)
    model.refuse_other_classes()
    model.refuse_other_model()
    return model


def local_model(name: str, config: str | None = None) -> ModelFolder | None:
    """Return the model in the folder or single file `name`, unchecked; None if it may be one of a hub."""
    if (path := single_file(name)) is not None:
        file = open_model_file(path, config)
        return ModelFolder(name=name, path=file.config, file=file)
    refuse_config_without_file(redacted(name), config)
    path = Path(name)
    if name and can_be_reached(name) and path.is_dir():
        return ModelFolder(name=name, path=path)
    if can_be_reached(name) or name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise ModelError(
            f"{redacted(name) or '--model, an empty text,'} is not a folder; expected a model folder in diffusers' layout "
            "(vae/, text_encoder/, tokenizer/), a .safetensors file, or a hub name such as owner/model"
        )
    return None
