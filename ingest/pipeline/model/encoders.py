"""The encoders of a run: each is loaded when something is to be encoded by it, and compared with the store's."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

from bucketline.allocator import free_memory
from bucketline.ingest.encoders.model_folder import open_model
from bucketline.ingest.other_options import refuse_other_options
from bucketline.ingest.pipeline.model.device import chosen_device, refuse_no_cuda
from bucketline.ingest.pipeline.model.encoder_facts import EncoderFacts
from bucketline.ingest.pipeline.model.phases import PhasePlan, may_be_two, plan_phases
from bucketline.store.format.manifest import refuse_difference
from bucketline.store.format.schema import text_entry
from bucketline.typed_json import encode

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from bucketline.ingest.config import PackConfig
    from bucketline.ingest.encoders.text_columns import CaptionEncoder
    from bucketline.ingest.encoders.vae import VaeEncoder
    from bucketline.store.format.manifest import Manifest
    from bucketline.store.format.text_block import TextSpec
    from bucketline.typed_json import Json


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
        self.on_shared_cores = False  # once a device is chosen: the encoders run on the CPU

    @cached_property
    def may_be_two_phases(self) -> bool:
        """True if `phases` may be two; imports no torch."""
        return may_be_two(self._config, self.model)

    @cached_property
    def phases(self) -> PhasePlan:
        """The order of the encoders: if it is two phases, loading VAE or text encoders frees the others."""
        return plan_phases(self._config, self.model, self._device(), self._processes)

    def vae(self, manifest: Manifest | None = None) -> VaeEncoder:
        """Load the VAE, or return it if it is loaded; compare it with the one that a store was made with."""
        loaded: VaeEncoder = self._loaded("vae", "load_vae_encoder", manifest)
        return loaded

    def text(self, manifest: Manifest | None = None) -> CaptionEncoder:
        """Load the text encoders, or return them if they are loaded; compare them as `vae` does, and raise what it does."""
        loaded: CaptionEncoder = self._loaded("text_encoder", "load_text_encoder", manifest)
        return loaded

    def _loaded(self, name: str, function: str, manifest: Manifest | None) -> Any:  # noqa: ANN401 - either encoder
        if name not in self._parts:
            from bucketline.ingest.pipeline.model import load_encoders

            device = self._device()
            if self.phases.are_two:
                self._parts.clear()
                free_memory(device)
            self._parts[name] = own = getattr(load_encoders, function)(self._config, self.model, device)
            self._known[name] = own.provenance
            if name == "text_encoder":
                self._columns = own.columns
        if manifest is not None:
            self._compare(manifest)
        return self._parts[name]

    def facts(self) -> EncoderFacts:
        """Return the facts of the encoders; those that were not loaded before are loaded, the text encoders last."""
        if "vae" not in self._known:
            self.vae()
        if "text_encoder" not in self._known:
            self.text()
        assert self._columns is not None
        known = self._known
        is_text_first = self.phases.are_two
        return EncoderFacts(vae=known["vae"], text=known["text_encoder"], columns=self._columns, is_text_first=is_text_first)

    def _compare(self, manifest: Manifest) -> None:
        """Compare all that was loaded with what a store was made with."""
        known = {name: dict(own) for name, own in self._known.items()}
        refuse_other_options(self._config, manifest, {**manifest.encoders, **known})
        if self._columns is not None:
            refuse_difference({"text": encode(manifest.text)}, {"text": encode(text_entry(self._columns))})

    def _device(self) -> torch.device:
        device = chosen_device(self._config.device, self._local_rank)
        self.on_shared_cores = device.type == "cpu"
        return device
