"""The encoders of a run: what must be known of them, their device, the order of two phases, and when each is loaded."""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bucketline.command_line import human_bytes
from bucketline.errors import ModelError, UsageError
from bucketline.families.family import Padding
from bucketline.families.registry import family_of_pipeline
from bucketline.ingest.config import refuse_other_options
from bucketline.ingest.encoders.model_folder import WEIGHT_BYTES, open_model, part_weights
from bucketline.ingest.encoders.text_columns import TextSettings
from bucketline.ingest.images.crop import latent_sizes
from bucketline.ingest.rules import Phases
from bucketline.model_file import DIFFUSERS, TRANSFORMERS, config_hash
from bucketline.store.format.block import LatentKind
from bucketline.store.format.manifest import refuse_difference
from bucketline.store.format.schema import text_entry
from bucketline.torch_setup import avoid_cudnn_attention, free_memory, keep_freed_memory
from bucketline.typed_json import encode

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch

    from bucketline.ingest.config import PackConfig
    from bucketline.ingest.encoders.model_folder import ModelFolder
    from bucketline.ingest.encoders.text_columns import CaptionEncoder
    from bucketline.ingest.encoders.vae import VaeEncoder
    from bucketline.store.format.manifest import Manifest
    from bucketline.store.format.text import TextSpec
    from bucketline.typed_json import Json


NOT_COMPARED = "the encoders' weights, their tokenizers and the default of --max-tokens"  # by `facts_without_weights`


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderFacts:
    """The provenance of encoders and their text columns."""

    vae: Mapping[str, Json]
    text: Mapping[str, Json]
    columns: TextSpec
    is_text_first: bool = False  # captions are kept on the disk before their rows are written

    @property
    def downscale(self) -> int:
        """Px per latent pixel, each way."""
        return _number(self.vae["downscale"])

    @property
    def latent_channels(self) -> int:
        return _number(self.vae["latent_channels"])

    @property
    def stored_channels(self) -> int:
        return self.latent_channels * (2 if self.vae["latents"] == LatentKind.MOMENTS.value else 1)

    @property
    def max_tokens(self) -> int:
        """Maximum number of stored tokens per caption."""
        return _number(self.text["max_tokens"])

    @property
    def padding(self) -> Padding:
        return Padding(str(self.text["padding"]))


def facts_without_weights(config: PackConfig, model: ModelFolder, manifest: Manifest) -> EncoderFacts:
    """Return the facts of a store's encoders, with the fields that the model tells without weights as a run of it has them.

    What differs from the manifest is for `refuse_other_options` to find; NOT_COMPARED is what it cannot find here.
    """
    found = (manifest.encoders.get(name) for name in ("vae", "text_encoder"))
    vae, text = (dict(encoder) if isinstance(encoder, dict) else {} for encoder in found)
    kind, downscale, _ = latent_sizes(model)
    vae |= {"class": kind, "config_hash": config_hash(model.config("vae") or {}), "downscale": downscale}
    if "dtype" in text:  # of one encoder
        text["config_hash"] = config_hash(model.config("text_encoder") or {})
    if isinstance(parts := text.get("parts"), dict):
        text["parts"] = {
            name: {**part, "config_hash": config_hash(model.config(name) or {})} if isinstance(part, dict) else part
            for name, part in parts.items()
        }
    return EncoderFacts(vae=vae, text=text, columns=manifest.text.spec(), is_text_first=config.phases is Phases.TWO)


def _number(value: Json) -> int:
    assert isinstance(value, int)
    return value


# --------------------------------------------------------------------------------------------------------------------- device


def refuse_no_cuda(name: str) -> None:
    """Check the device that `--device` names, as far as that is known without importing torch: by its build, and the driver."""
    if not name.startswith("cuda"):
        return
    build = importlib.metadata.version("torch").partition("+")[2]
    try:
        if build != "cpu" and not build.startswith("rocm"):
            ctypes.CDLL("libcuda.so.1")
    except OSError:
        build = "cpu"
    if build == "cpu":
        raise _no_cuda(name)


def _no_cuda(name: str) -> UsageError:
    return UsageError(f"--device {name}: this machine has no CUDA device that torch can use")


def chosen_device(name: str, local_rank: int) -> torch.device:
    """Return the device that `--device` names; for `auto`, this rank's CUDA device if there is one, else the CPU.

    More ranks than GPUs share them.
    """
    import torch

    if name == "auto":
        if not torch.cuda.is_available():
            return torch.device("cpu")
        return torch.device("cuda", local_rank % torch.cuda.device_count())
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UsageError(f"--device {name!r} is not a device; expected auto, cpu, cuda or cuda:N") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise _no_cuda(name)
    if device.type == "cuda" and (device.index or 0) >= (count := torch.cuda.device_count()):
        raise UsageError(f"--device {name}: this machine has {count} CUDA devices, expected cuda:0 to cuda:{count - 1}")
    return device


def share_of_cores(local_world_size: int) -> int:
    """Return the number of cores per process, if `local_world_size` processes share the available cores."""
    return max(1, len(os.sched_getaffinity(0)) // local_world_size)


# ---------------------------------------------------------------------------------------------------------------------- phases
# The order of a pack's encoders: with two phases, all captions come first, and VAE and text encoders never share memory.

SMALL_BYTES = 1 << 30  # of all weights: nobody gains by freeing some of them
SHARE = 0.5  # of the free memory that weights may take; the rest is for what encoding a batch takes, and for images
TEXT_ENCODERS = ("text_encoder", "text_encoder_2", "text_encoder_3", "text_encoder_4", "text_conditioner")


@dataclass(frozen=True, slots=True, kw_only=True)
class PhasePlan:
    """The order of a run's encoders, and why."""

    are_two: bool
    reason: str

    def __str__(self) -> str:
        order = "two phases, all captions before the images" if self.are_two else "one phase"
        return f"{order}: {self.reason}"


def weight_bytes(config: PackConfig, model: ModelFolder) -> tuple[int, int] | None:
    """Return the memory that a model's text encoders and its VAE take, by the headers of their files.

    None if these do not tell, or there is no text.
    """
    names = [name for name in TEXT_ENCODERS if model.has(name)]
    try:
        text = [part_weights(model, name, TRANSFORMERS + DIFFUSERS)[0] for name in names]
        vae = part_weights(model, "vae", DIFFUSERS)[0]
    except ModelError:  # loading says what is wrong
        return None
    if not (vae and text and all(text)):
        return None
    return int(sum(text) * WEIGHT_BYTES[config.encode_dtype]), int(vae * WEIGHT_BYTES[config.vae_dtype])


def may_be_two(config: PackConfig, model: ModelFolder) -> bool:
    """Return whether a run may have two phases: the option says so, or its encoders are not small. Imports no torch."""
    if config.phases is not Phases.AUTO:
        return config.phases is Phases.TWO and any(model.has(name) for name in TEXT_ENCODERS)
    sizes = weight_bytes(config, model)
    return sizes is not None and sum(sizes) > SMALL_BYTES


def plan_phases(config: PackConfig, model: ModelFolder, device: torch.device, processes: int) -> PhasePlan:
    """Return the order that `phases` names; for `auto`, by the weights' sizes and the free memory, shared by `processes`."""
    if not may_be_two(config, model):
        return PhasePlan(are_two=False, reason="phases is one, or the encoders are small")
    sizes = weight_bytes(config, model) if config.phases is Phases.AUTO else None
    if sizes is None:
        return PhasePlan(are_two=True, reason="phases is two")
    free = free_bytes(device) // (processes if device.type == "cpu" else 1)
    text, vae, are_two = *map(human_bytes, sizes), sum(sizes) > SHARE * free
    than = "more" if are_two else "not more"
    reason = f"the text encoders take {text} and the VAE {vae}, {than} than half of the {human_bytes(free)} that are free"
    return PhasePlan(are_two=are_two, reason=reason)


def free_bytes(device: torch.device) -> int:
    """Return the free memory of a GPU; for the CPU, of this machine or of the control group with a limit of its own."""
    if device.type == "cuda":
        import torch

        return int(torch.cuda.mem_get_info(device)[0])
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    free = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    group = Path("/sys/fs/cgroup")
    try:
        limit, used = ((group / name).read_text(encoding="ascii").strip() for name in ("memory.max", "memory.current"))
    except OSError:
        return free
    return free if limit == "max" else min(free, max(0, int(limit) - int(used)))


# -------------------------------------------------------------------------------------------------------------------- encoders


def load_vae_encoder(config: PackConfig, model: ModelFolder, device: torch.device) -> VaeEncoder:
    from bucketline.ingest.encoders.vae import VaeEncoder  # imports torch

    _prepare(device)
    return VaeEncoder(model, device, config.dtype, latents=LatentKind(config.latents), encode_dtype=config.vae_dtype)


def load_text_encoder(
    config: PackConfig, model: ModelFolder, device: torch.device, *, sees_images: bool = False
) -> CaptionEncoder:
    """Load the text encoders of a model folder; raises what `load_vae_encoder` does."""
    from bucketline.ingest.encoders.text_encoders import load_caption_encoder

    _prepare(device)
    settings = TextSettings(
        stored_dtype=config.text_dtype or config.dtype,
        encode_dtype=config.encode_dtype,
        max_tokens=config.max_tokens,
        sees_images=sees_images,
        is_plain=config.text is not None,
    )
    return load_caption_encoder(model, device, settings)


def _prepare(device: torch.device) -> None:
    avoid_cudnn_attention()
    if device.type == "cpu":
        keep_freed_memory()


class Encoders:
    """The encoders of a run's model on one rank."""

    def __init__(self, config: PackConfig, local_rank: int, processes: int = 1) -> None:
        """Find the model; nothing is loaded yet. `processes` share this machine."""
        self.model = open_model(config.model, config.model_config)
        refuse_no_cuda(config.device)
        self._config, self._local_rank, self._processes = config, local_rank, processes
        self._parts: dict[str, Any] = {}  # that are loaded
        self._known: dict[str, Mapping[str, Json]] = {}  # provenance of what was loaded, even if it is freed
        self._columns: TextSpec | None = None
        self._sees_images = False  # captions are encoded with their sample's references
        self.on_shared_cores = False  # once a device is chosen: the encoders run on the CPU

    @property
    def may_be_two_phases(self) -> bool:
        """True if `phases` may be two; imports no torch."""
        return not self._sees_images and may_be_two(self._config, self.model)

    @property
    def phases(self) -> PhasePlan:
        """The order of the encoders: if it is two phases, loading VAE or text encoders frees the others."""
        if self._sees_images:  # which are not kept between phases
            return PhasePlan(are_two=False, reason="the text encoder sees the references")
        return self._phases

    @cached_property
    def _phases(self) -> PhasePlan:
        return plan_phases(self._config, self.model, self._device(), self._processes)

    def vae(self, manifest: Manifest | None = None) -> VaeEncoder:
        """Load the VAE, or return it if it is loaded; compare it with the one that a store was made with."""
        loaded: VaeEncoder = self._loaded("vae", load_vae_encoder, manifest)
        return loaded

    def text(self, manifest: Manifest | None = None) -> CaptionEncoder:
        """Load the text encoders, or return them if they are loaded; compare them as `vae` does, and raise what it does."""
        if manifest is not None:
            self._see(sees_images=manifest.sees_images)
        load = partial(load_text_encoder, sees_images=True) if self._sees_images else load_text_encoder
        loaded: CaptionEncoder = self._loaded("text_encoder", load, manifest)
        return loaded

    def _see(self, *, sees_images: bool) -> None:
        """Have captions encoded with their sample's references, or without."""
        if sees_images is not self._sees_images:
            self._sees_images = sees_images
            self._parts.pop("text_encoder", None)
            self._known.pop("text_encoder", None)

    def _loaded(self, name: str, load: Callable[..., Any], manifest: Manifest | None) -> Any:  # noqa: ANN401 - either encoder
        if name not in self._parts:
            device = self._device()
            if self.phases.are_two:
                self._parts.clear()
                free_memory(device)
            self._parts[name] = own = load(self._config, self.model, device)
            self._known[name] = own.provenance
            if name == "text_encoder":
                self._columns = own.columns
        if manifest is not None:
            self._compare(manifest)
        return self._parts[name]

    def load_early(self) -> None:
        """Load what a plan does not change: all encoders, unless captions may be encoded with references."""
        family = family_of_pipeline(str(self.model.index().get("_class_name")))
        if family is not None and family.references is not None and family.references.text_sees:
            self.vae()
        else:
            self.facts(sees_images=False)

    def facts(self, *, sees_images: bool) -> EncoderFacts:
        """Return the facts of the encoders; those that were not loaded before are loaded, the text encoders last."""
        self._see(sees_images=sees_images)
        if "vae" not in self._known:
            self.vae()
        if "text_encoder" not in self._known:
            self.text()
        assert self._columns is not None
        known = self._known
        is_text_first = self.phases.are_two
        return EncoderFacts(vae=known["vae"], text=known["text_encoder"], columns=self._columns, is_text_first=is_text_first)

    def _compare(self, manifest: Manifest) -> None:
        known = {name: dict(own) for name, own in self._known.items()}
        refuse_other_options(self._config, manifest, {**manifest.encoders, **known})
        if self._columns is not None:
            refuse_difference({"text": encode(manifest.text)}, {"text": encode(text_entry(self._columns))})

    def _device(self) -> torch.device:
        device = chosen_device(self._config.device, self._local_rank)
        self.on_shared_cores = device.type == "cpu"
        return device
