"""A model's weight files: one `.safetensors` in the original key layout, or a component's in a folder; and digests of encoders.

Such a file has weights only. Configurations and tokenizers come from a folder in diffusers' layout.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from bucketline.errors import BucketlineError, ModelError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    import torch
    from torch import Tensor, nn


SUFFIX = ".safetensors"
PICKLED = (".ckpt", ".pt", ".pth", ".bin")
INDEX = "model_index.json"
MODULAR_INDEX = "modular_model_index.json"  # of diffusers' modular pipelines; a part's entry also says where it is from
CONFIG_PATTERNS = ["*.json", "*.txt", "*.model"]  # configurations and tokenizers
PREFIXES = {
    "vae": ("first_stage_model.", "vae."),
    "text_encoder": ("cond_stage_model.", "conditioner.embedders.0.", "text_encoders.clip_l."),
    "text_encoder_2": ("conditioner.embedders.1.", "text_encoders.clip_g."),
    "text_encoder_3": (),
    "text_conditioner": ("net.llm_adapter.",),
}
"""How the names of a part's weights begin in a file; an encoder that is a T5 has `T5_PREFIX` instead."""
T5_PREFIX = "text_encoders.t5xxl."
_INSIDE = "text_conditioner"  # a part that is inside the transformer there, under diffusers' names but for the prefix
_DEFAULT_KIND = "v1"  # what diffusers takes a file for that it does not know
_UNET_PREFIX = "model.diffusion_model.input_blocks."  # another model in the same wrapping has other blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFile:
    """A model in one file."""

    path: Path
    config: Path  # folder of its configurations and tokenizers, and of the parts that the file lacks
    shapes: Mapping[str, tuple[int, ...]]  # of all its tensors

    def has(self, part: str) -> bool:
        """Return whether the file has a part, by its name in diffusers' layout; True for the UNet or transformer."""
        return part not in PREFIXES or bool(self.shapes_of(part))

    def shapes_of(self, part: str) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the tensors of a VAE or a text encoder, by their names in the file."""
        is_t5 = "T5" in str(self._config_of(part).get("architectures"))
        prefixes = (T5_PREFIX,) if is_t5 else PREFIXES[part]
        return {name: shape for name, shape in self.shapes.items() if name.startswith(prefixes)}

    def load(self, part: str, dtype: torch.dtype | None = None) -> Any:  # noqa: ANN401 - diffusers has no types
        """Load a part in `dtype`; None: in 32 bits."""
        import diffusers
        import safetensors
        import torch

        if not diffusers.utils.is_accelerate_available():  # without it, diffusers leaves missing weights at random values
            raise ModuleNotFoundError("a single file needs accelerate", name="accelerate")
        diffusers.utils.logging.disable_progress_bar()
        common: dict[str, Any] = {"config": str(self.config), "local_files_only": True}
        if dtype is not None:
            common["torch_dtype"] = dtype
        config, index = self._config_of(part), read_model_json(index_path(self.config))
        try:
            if class_name := config.get("_class_name"):
                kind = getattr(diffusers, str(class_name))
                self._expect_fitting_weights(part, kind, config)
                if part == _INSIDE:
                    with safetensors.safe_open(self.path, "pt") as file:
                        tensors = {name: file.get_tensor(name) for name in self.shapes_of(part)}
                    loaded = kind.from_config(config)
                    loaded.load_state_dict(self._converted(part, kind, tensors, config))
                else:
                    loaded = kind.from_single_file(str(self.path), subfolder=part, **common)
            else:
                others = {name: None for name, value in index.items() if isinstance(value, list) and name != part}
                pipeline = getattr(diffusers, str(index["_class_name"]))
                loaded = getattr(pipeline.from_single_file(str(self.path), **common, **others), part)
                loaded.tie_weights()
        except BucketlineError:
            raise
        except Exception as error:  # diffusers passes on the errors of all its readers; they mean the same here
            raise ModelError(f"{self.path}: its {part} cannot be loaded: {error_line(error)}") from error
        missing = sorted(name for name, tensor in loaded.state_dict().items() if tensor.is_meta)
        if missing:
            raise ModelError(f"{self.path}: its {part} lacks {len(missing)} weights, such as {missing[0]}")
        return cast(loaded, dtype or torch.float32)

    def _expect_fitting_weights(self, part: str, kind: Any, config: Mapping[str, Any]) -> None:  # noqa: ANN401 - likewise
        """Compare names and shapes with those of the configuration: diffusers skips what does not fit."""
        import torch

        with torch.device("meta"):
            tensors = {name: torch.empty(shape) for name, shape in self.shapes.items()}
            model = kind.from_config(config)
        own = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        try:
            found = {name: tuple(one.shape) for name, one in self._converted(part, kind, tensors, config).items()}
        except (KeyError, IndexError) as error:
            raise ModelError(
                f"{self.path} holds no {kind.__name__} that diffusers knows ({error!r}); {self._advice}"
            ) from error
        for what, names in (
            ("lacks", own.keys() - found.keys()),
            ("has besides", found.keys() - own.keys()),
            ("has in another shape", {name for name in own.keys() & found.keys() if own[name] != found[name]}),
        ):
            if names:
                raise ModelError(
                    f"{self.path}: its {part} {what} {len(names)} of the weights in {self.config / part / 'config.json'}, "
                    f"such as {min(names)}; {self._advice}"
                )

    def _converted(
        self,
        part: str,
        kind: Any,  # noqa: ANN401 - likewise
        tensors: Mapping[str, Tensor],
        config: Mapping[str, Any],
    ) -> dict[str, Tensor]:
        inside = {name: tensor for name, tensor in tensors.items() if name.startswith(PREFIXES[_INSIDE])}
        if part == _INSIDE:
            return {name.partition(PREFIXES[_INSIDE][0])[2]: tensor for name, tensor in inside.items()}
        return converter(kind.__name__)({name: one for name, one in tensors.items() if name not in inside}, config)

    @property
    def _advice(self) -> str:
        return "name the folder of the configuration that this file was trained with by --model-config"

    def _config_of(self, part: str) -> dict[str, Any]:
        path = self.config / part / "config.json"
        return read_model_json(path) if path.exists() else {}


def converter(kind: str) -> Callable[[dict[str, Tensor], Mapping[str, Any]], dict[str, Tensor]]:
    """Return diffusers' conversion of a class's weights from the original layout, given all of a file's and the config."""
    from diffusers.loaders.single_file_model import SINGLE_FILE_LOADABLE_CLASSES

    if kind not in SINGLE_FILE_LOADABLE_CLASSES:
        raise ModelError(f"diffusers reads no {kind} from a single file; use a folder in diffusers' layout")
    convert: Any = SINGLE_FILE_LOADABLE_CLASSES[kind]["checkpoint_mapping_fn"]
    return lambda tensors, config: convert(checkpoint=dict(tensors), config=config)


def cast(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Cast a model in place, but for the parts that its class in diffusers keeps in 32 bits, and return it.

    `Module.to` casts these too; that of diffusers also warns at every cast, without naming any.
    """
    import diffusers
    import torch

    parts = set((model._keep_in_fp32_modules or ()) if isinstance(model, diffusers.ModelMixin) else ())
    named = (*model.named_parameters(), *model.named_buffers())
    kept = {id(tensor) for name, tensor in named if not parts.isdisjoint(name.split("."))}

    def converted(tensor: Tensor) -> Tensor:
        return tensor.to(torch.float32 if id(tensor) in kept else dtype) if tensor.is_floating_point() else tensor

    model._apply(converted)  # type: ignore[no-untyped-call]
    return model


def index_path(folder: Path) -> Path:
    """Return the path of a model's index, which is a modular one if the folder has no other."""
    modular = folder / MODULAR_INDEX
    return modular if modular.is_file() and not (folder / INDEX).is_file() else folder / INDEX


def single_file(name: str | Path) -> Path | None:
    """Return the path of a model that is named as one file; None for a folder or the name of a model on a hub."""
    path = Path(name)
    if path.suffix in PICKLED and not path.is_dir():
        raise ModelError(
            f"{name} is a pickled checkpoint, which can run code when it is read; convert it first: read it by "
            "torch.load(…, weights_only=True) and write its state_dict by safetensors.torch.save_file"
        )
    if path.suffix != SUFFIX or path.is_dir():
        return None
    if not path.is_file():
        raise ModelError(f"{name} is not there; expected a {SUFFIX} file, or a model folder in diffusers' layout")
    return path


def open_model_file(path: Path, config: str | None) -> ModelFile:
    """Open a model in one file. `config` is a folder or the name of a model on a hub; None: what diffusers infers.

    Of a model on a hub only configurations and tokenizers are downloaded, if they are not in its cache.
    """
    from huggingface_hub import snapshot_download

    shapes = {name: shape for name, (_, shape) in file_tensors(path).items()}
    named = config or _inferred_config(path, shapes)
    folder = Path(named)
    if not folder.is_dir():
        try:
            folder = Path(snapshot_download(named, allow_patterns=CONFIG_PATTERNS))
        except Exception as error:  # whatever the hub's client raises
            raise ModelError(
                f"{path}: its configuration, {named}, is not a folder, and no model that the hub gives: {error_line(error)}; "
                "name another one by --model-config"
            ) from error
    if not index_path(folder).is_file():
        raise ModelError(f"{folder} has no {INDEX}; expected a pipeline's folder in diffusers' layout")
    return ModelFile(path=path, config=folder, shapes=shapes)


def file_tensors(path: Path, item: str | None = None) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return dtype, by safetensors' name, and shape of a file's tensors, from its header; `item` names it in errors."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np") as file:  # type: ignore[no-untyped-call, unused-ignore] # imports no torch
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
            return {name: (str(own.get_dtype()), tuple(own.get_shape())) for name, own in slices.items()}
    except (OSError, SafetensorError) as error:
        what = f"{item or path} cannot be read as safetensors: {error_line(error)}"
        raise ModelError(f"{what}; download the model again") from error


def refuse_config_without_file(model: object, config: str | None) -> None:
    """Check that `--model-config` is given for a single file only."""
    if config is not None:
        raise UsageError(f"--model-config is {config}, and --model {model} is not a {SUFFIX} file; leave it out")


def _inferred_config(path: Path, shapes: Mapping[str, tuple[int, ...]]) -> str:
    """Return the name of the published model on the hub whose layout a file has."""
    import torch
    from diffusers.loaders.single_file_utils import DIFFUSERS_DEFAULT_PIPELINE_PATHS, fetch_diffusers_config

    tensors = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    named = str(fetch_diffusers_config(tensors)["pretrained_model_name_or_path"])
    is_default = named == DIFFUSERS_DEFAULT_PIPELINE_PATHS[_DEFAULT_KIND]["pretrained_model_name_or_path"]
    if is_default and not any(name.startswith(_UNET_PREFIX) for name in shapes):
        raise ModelError(
            f"{path} holds no model whose layout diffusers knows; expected a checkpoint with the UNet or transformer; name its "
            "configuration by --model-config"
        )
    return named


def read_model_json(path: Path) -> dict[str, Any]:
    """Return the object in one of a model's JSON files."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(found, dict):
        raise ModelError(f"{path} holds {found!r:.80}, expected a JSON object")
    return found


def error_line(error: Exception) -> str:
    r"""Return the first line of a library's error message; the others hold advice that is not meant for our users.

    >>> error_line(OSError("it is not there.\n\nPlease see https://example.org"))
    'it is not there'
    """
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return first[:200].rstrip(".")


# ---------------------------------------------------------------------------------------------------------------- weight files
# Find a model component's weight files: plain ones, or a variant such as `diffusion_pytorch_model.fp16.safetensors`.
#
# diffusers and transformers load a variant only by its name; otherwise they report a missing `.bin`.

DIFFUSERS = ("diffusion_pytorch_model",)
TRANSFORMERS = ("model", "pytorch_model")
# adapters, as diffusers and peft load them
LORA_FILE, PEFT_FILE = "pytorch_lora_weights.safetensors", "adapter_model.safetensors"
_PREFERRED = ("fp32", "fp16", "bf16")  # most precise first, for several variants without plain weights
_PARTS = r"(-\d{5}-of-\d{5})"
_SUFFIX = r"\.(?:safetensors|bin)"


def variant_of(item: str, names: Iterable[str], bases: tuple[str, ...]) -> str | None:
    """Return the variant by which to load a component's weights, from its file names; None for plain weights.

    >>> variant_of("vae/", ["config.json", "diffusion_pytorch_model.fp16.safetensors"], DIFFUSERS)
    'fp16'
    >>> variant_of("vae/", ["diffusion_pytorch_model.bin", "diffusion_pytorch_model.fp16.bin"], DIFFUSERS) is None
    True
    """
    there = sorted(names)
    base = "|".join(map(re.escape, bases))
    if any(re.fullmatch(rf"(?:{base}){_PARTS}?{_SUFFIX}", name) for name in there):
        return None
    # the part number follows the variant in one library and precedes it in the other
    pattern = re.compile(rf"(?:{base})(?:\.(\w+){_PARTS}?|{_PARTS}\.(\w+)){_SUFFIX}")
    found = {match[1] or match[4] for name in there if (match := pattern.fullmatch(name)) is not None}
    if not found:
        wanted = ", ".join(f"{name}.safetensors, {name}.bin" for name in bases)
        raise ModelError(
            f"{item} has no weights: looked for {wanted}, these in parts (-00001-of-00002) and in variants "
            f"({bases[0]}.fp16.safetensors); it has {', '.join(there) or 'no file'}; download the model again"
        )
    chosen = next((name for name in _PREFERRED if name in found), None) or (found.pop() if len(found) == 1 else None)
    if chosen is None:
        raise ModelError(
            f"{item} has its weights in the variants {', '.join(sorted(found))} and none without a variant's name; "
            "keep one of them"
        )
    return chosen


def safetensors_of(names: Iterable[str], bases: tuple[str, ...], variant: str | None) -> list[str]:
    """Return the names of a component's .safetensors files of a variant, None for the plain ones; empty if it has only others.

    >>> safetensors_of(["model-00001-of-00002.safetensors", "model.fp16.safetensors", "model.bin"], TRANSFORMERS, None)
    ['model-00001-of-00002.safetensors']
    """
    base, own = "|".join(map(re.escape, bases)), "" if variant is None else re.escape(f".{variant}")
    pattern = re.compile(rf"(?:{base})(?:{own}{_PARTS}?|{_PARTS}{own})\.safetensors")
    return sorted(name for name in names if pattern.fullmatch(name))


# ----------------------------------------------------------------------------------------------------------------- fingerprint
# Digests that identify the encoder of a store's columns, so that a different one is detected.

# fields that differ between library versions or machines
_VOLATILE = ("transformers_version", "torch_dtype", "dtype")


def config_hash(config: Mapping[str, Any]) -> str:
    """Return the digest of an encoder's `config.json`, 32 hexadecimal digits.

    Pass the file's own content, not a library's parsed config, which adds the library's defaults and bookkeeping. Names that
    begin with an underscore are ignored.
    """
    return json_hash({key: value for key, value in config.items() if key not in _VOLATILE and not key.startswith("_")})


def json_hash(value: object) -> str:
    """Return the digest of a value as JSON, 32 hexadecimal digits."""
    return hashlib.blake2b(json.dumps(value, sort_keys=True, default=str).encode(), digest_size=16).hexdigest()


def weights_hash(module: nn.Module, but: frozenset[str] = frozenset()) -> str:
    """Return the digest of an encoder's weights, 32 hexadecimal digits: names and bytes, without those in `but`.

    Floats are taken in 32 bits, one tensor at a time, so that weights have the same digest in any dtype that they are saved in.
    """
    import torch

    tensors, state = module.state_dict(), xxhash.xxh3_128()
    for name in sorted(tensors.keys() - but):
        tensor = tensors[name].detach().cpu()
        wide = tensor.float() if tensor.is_floating_point() else tensor
        state.update(name.encode())
        state.update(wide.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return state.hexdigest()
