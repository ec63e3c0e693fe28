"""A model in diffusers layout: a folder with `vae/`, `text_encoder/`, `tokenizer/`, or on a hub; digests of its weights."""

from __future__ import annotations

import json
import re
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bucketline.errors import BucketlineError, ModelError
from bucketline.families.registry import crossed, family_of_model, takes_images
from bucketline.families.seen import PIXEL_FIELDS
from bucketline.families.vaes import latent_channels
from bucketline.files.paths import can_be_reached, redacted
from bucketline.model_file import (
    DIFFUSERS,
    INDEX,
    MODULAR_INDEX,
    TRANSFORMERS,
    ModelFile,
    error_line,
    file_tensors,
    index_path,
    json_hash,
    open_model_file,
    refuse_config_without_file,
    safetensors_of,
    single_file,
    variant_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


# ---------------------------------------------------------------------------------------------------------------- part weights

WEIGHT_BYTES = {"F32": 4.0, "F16": 2.0, "BF16": 2.0, "int8": 1.1, "nf4": 0.6}  # quantised: with scales and what stays in BF16


def part_weights(model: ModelFolder, name: str, bases: tuple[str, ...]) -> tuple[int, set[str]]:
    """Return how many weights a part has, 0 if its files are not safetensors, and their dtypes by safetensors name.

    The files of a hub are downloaded. Of a model in a single file no dtype is returned.
    """
    if model.file is not None and model.file.has(name):
        return sum(prod(shape) for shape in model.file.shapes_of(name).values()), set()
    number, dtypes = 0, set[str]()
    for path in model.weight_files(name, bases):
        for dtype, shape in file_tensors(path, f"{model.name}: {name}/{path.name}").values():
            number += prod(shape)
            dtypes.add(dtype)
    return number, dtypes


# --------------------------------------------------------------------------------------------------------------------- weights


@contextmanager
def loading(model: ModelFolder, part: str) -> Iterator[None]:
    """Turn any exception of the libraries in the block, of which broken files cause almost any, into a ModelError."""
    try:
        yield
    except BucketlineError:
        raise
    except Exception as error:
        if "trust_remote_code" in str(error):
            raise ModelError(
                f"{model.name}: {part}/ requires custom code (auto_map), which is never run; "
                "use a model whose parts transformers itself has"
            ) from error
        if (lacks := model.lacks(part)) is not None:
            raise ModelError(f"{model.name}: {part}/ has {lacks}; download or save the model again") from error
        raise ModelError(f"{model.name}: {part}/ cannot be loaded: {error_line(error)}") from error


def refuse_incomplete(item: str, told: Mapping[str, Any], unread: str | None = None) -> frozenset[str]:
    """Refuse a part whose files lack weights, which the libraries would initialise at random.

    Weights whose names begin with `unread` may be missing. Return the names of those that are.
    """
    spared: set[str] = set()
    for what in ("missing_keys", "mismatched_keys"):
        names = {str(key[0] if isinstance(key, tuple) else key) for key in told.get(what) or ()}
        spared |= {name for name in names if unread is not None and name.startswith(unread)}
        if wrong := names - spared:
            raise ModelError(
                f"{item} is incomplete: {len(wrong)} of its weights are {what.removesuffix('_keys')}, such as {min(wrong)}; "
                "download or save the model again"
            )
    return frozenset(spared)


def tokenizer_hash(tokenizer: Any) -> str:  # noqa: ANN401 - any transformers tokenizer
    """Return the digest of what determines a tokenizer's output: its complete pipeline if it has one, else its vocabulary."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules = json.loads(backend.to_str()) if backend is not None else tokenizer.get_vocab()
    if backend is not None:  # set again at every call
        rules = {key: value for key, value in rules.items() if key not in ("truncation", "padding")}
    return json_hash([type(tokenizer).__name__, tokenizer.special_tokens_map, rules])


# ------------------------------------------------------------------------------------------------------------------------- hub

_TIMEOUT_S = 10.0
_CONFIG = "/config.json"


def snapshot(name: str) -> tuple[Path, tuple[str, ...] | None]:
    """Return the folder of a hub model's commit in the cache, named after it, with its configurations downloaded.

    Also return the paths of all files on the hub; None if it could not be reached, and the folder is as it was.
    """
    from huggingface_hub import HfApi, hf_hub_download, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, RepositoryNotFoundError

    expected = "expected a model folder in diffusers' layout, or the name of a model on a hub"
    try:
        info = HfApi().model_info(name, timeout=_TIMEOUT_S)
    except HFValidationError as error:
        raise ModelError(f"{name} is neither a folder nor a valid hub name ({error_line(error)}); {expected}") from error
    except RepositoryNotFoundError as error:
        raise ModelError(
            f"{name} is not a local folder, and the hub has no such model, or it is private; check the name, or log in with "
            "`hf auth login` if it is private"
        ) from error
    except HfHubHTTPError as error:
        raise ModelError(
            f"{name} is not a local folder, and the hub refused the request ({error_line(error)}); try again later"
        ) from error
    except Exception as error:  # noqa: BLE001 - whatever the hub's HTTP client raises without a network
        try:
            # no pattern: no file has to be there, since parts that were never used were never downloaded either
            path = snapshot_download(name, local_files_only=True, allow_patterns=[])
            return Path(path), None
        except LocalEntryNotFoundError:
            raise ModelError(
                f"{name} is not a local folder, and the hub could not be reached ({error_line(error)}); "
                "name a model's folder, or run it once with network access"
            ) from error
    files = tuple(file.rfilename for file in info.siblings or ())
    configs = [file for file in files if file in (INDEX, MODULAR_INDEX) or file.endswith(_CONFIG)]
    if not configs:
        raise ModelError(f"{name}: the model on the hub has no {INDEX} and no config.json in a folder; {expected}")
    try:
        # one by one, since a snapshot of these few would draw its progress bar at every start
        paths = [Path(hf_hub_download(name, file)).parents[file.count("/")] for file in configs]
    except Exception as error:  # as above
        raise ModelError(
            f"{name}: its configuration cannot be downloaded from the hub: {error_line(error)}; "
            "log in with `hf auth login`, or try again"
        ) from error
    return paths[-1], files


def downloaded(name: str, files: list[str], revision: str) -> list[Path]:
    """Return the paths of a hub model's files in the cache, after downloading those that it lacks."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    with suppress(LocalEntryNotFoundError):  # all of them are there: nothing is requested
        return [Path(hf_hub_download(name, file, revision=revision, local_files_only=True)) for file in files]
    try:
        return [Path(hf_hub_download(name, file, revision=revision)) for file in files]
    except Exception as error:  # whatever the hub's HTTP client raises
        raise ModelError(f"{name}: its weights cannot be downloaded from the hub: {error_line(error)}; try again") from error


# ---------------------------------------------------------------------------------------------------------------- model folder

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
            there = ", ".join(sorted(parts)) or "no subfolders"
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

    def pixels(self, name: str) -> Mapping[str, Any]:
        """Return the configuration of the processor of images in a part, downloaded if it is a hub's.

        transformers saves it alone, or since its version 5 in that of the whole processor.
        """
        self.part(name)
        files = self._files(name)
        own = next((file for file in ("preprocessor_config.json", "processor_config.json") if file in files), None)
        if own is None:
            there = ", ".join(sorted(files)) or "no file"
            raise ModelError(
                f"{self.name}: {name}/ has no preprocessor_config.json, which says how the text encoder sees images; "
                f"it has {there}; download or save the model again"
            )
        if self.hub_files is not None:
            downloaded(self.name, [f"{name}/{own}"], self.path.name)
        config = self._read_json(own, name) or {}
        found = config.get("image_processor", config)
        kind = str(found.get("image_processor_type"))
        if not kind.startswith("Qwen2VLImageProcessor"):
            raise ModelError(
                f"{self.name}: {name}/{own} is of a {kind:.80}, expected a Qwen2VLImageProcessor; use another model"
            )
        return {field: found[field] for field in PIXEL_FIELDS if field in found}

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
