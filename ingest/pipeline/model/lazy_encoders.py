"""The encoders of a run, loaded at first use if the store already tells what they are."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from bucketline.allocator import free_memory
from bucketline.errors import FingerprintError
from bucketline.families.family import Padding
from bucketline.ingest.encoders.model_folder import open_model
from bucketline.ingest.other_options import refuse_other_options
from bucketline.ingest.pipeline.model.packed_model import PACKED_MODEL, model_state, packed_model, record_packed_model
from bucketline.ingest.pipeline.model.phases import PhasePlan, may_be_two, plan_phases
from bucketline.store.format.columns import LatentKind
from bucketline.store.format.manifest import refuse_difference
from bucketline.store.format.manifest_entries import text_entry
from bucketline.store.write.publish import Contents
from bucketline.typed_json import encode

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import torch

    from bucketline.ingest.config import PackConfig
    from bucketline.ingest.encoders.text_columns import CaptionEncoder
    from bucketline.ingest.encoders.vae import VaeEncoder
    from bucketline.store.format.manifest import Manifest
    from bucketline.store.format.text_block import TextSpec
    from bucketline.typed_json import Json

_PARTS = ("vae", "text_encoder")  # as manifests call them


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderFacts:
    """The provenance of encoders and their text columns: what a run needs to know before it encodes."""

    vae: Mapping[str, Json]
    text: Mapping[str, Json]
    columns: TextSpec
    is_text_first: bool = False  # captions are kept on the disk before their rows are written

    @property
    def downscale(self) -> int:
        """Px per latent pixel, each way."""
        return _number(self.vae["downscale"])

    @property
    def stored_channels(self) -> int:
        return _number(self.vae["latent_channels"]) * (2 if self.vae["latents"] == LatentKind.MOMENTS.value else 1)

    @property
    def max_tokens(self) -> int:
        """Maximum number of stored tokens per caption."""
        return _number(self.text["max_tokens"])

    @property
    def padding(self) -> Padding:
        return Padding(str(self.text["padding"]))


def facts_of(manifest: Manifest) -> EncoderFacts:
    """Return the facts of the encoders that a store was made with."""
    vae, text = manifest.encoders["vae"], manifest.encoders["text_encoder"]
    assert isinstance(vae, dict)
    assert isinstance(text, dict)
    return EncoderFacts(vae=vae, text=text, columns=manifest.text.spec())


class LazyEncoders:
    """The encoders of a run's model on one rank."""

    def __init__(self, config: PackConfig, local_rank: int, processes: int = 1) -> None:
        """Find the model; nothing is loaded yet. `processes` share this machine.

        Raises:
            ModelError, UsageError: as `open_model`.
        """
        self.model = open_model(config.model, config.model_config)
        self._config, self._local_rank, self._processes = config, local_rank, processes
        self._state = model_state(config, self.model)  # before anything is loaded
        self._vae: VaeEncoder | None = None
        self._text: CaptionEncoder | None = None
        self._known: dict[str, Mapping[str, Json]] = {}  # provenance of what was loaded, even if it is freed
        self._columns: TextSpec | None = None
        self.on_shared_cores = False  # once loaded: the encoders run on the CPU

    @property
    def is_loaded(self) -> bool:
        """True once all encoders have been loaded."""
        return len(self._known) == len(_PARTS)

    @cached_property
    def may_be_two_phases(self) -> bool:
        """True if `phases` may be two; imports no torch."""
        return may_be_two(self._config, self.model)

    @cached_property
    def phases(self) -> PhasePlan:
        """The order of the encoders: if it is two phases, loading VAE or text encoders frees the others."""
        return plan_phases(self._config, self.model, self._device(), self._processes)

    def recall(self, store: Path, manifest: Manifest | None) -> bool | None:
        """Return whether the encoders ran on the CPU if the store records this model; None if it does not."""
        found = packed_model(store, manifest, self._state)
        return None if found is None else found.on_shared_cores

    def vae(self) -> VaeEncoder:
        """Load the VAE, or return it if it is loaded.

        Raises:
            ModelError, UsageError: as `load_vae_encoder` and `chosen_device`.
        """
        if self._vae is None:
            from bucketline.ingest.pipeline.model import load_encoders

            device = self._device()
            if self.phases.are_two:
                self._text = None
                free_memory(device)
            self._vae = load_encoders.load_vae_encoder(self._config, self.model, device)
            self._known["vae"] = self._vae.provenance
        return self._vae

    def text(self) -> CaptionEncoder:
        """Load the text encoders, or return them if they are loaded; raises what `vae` does."""
        if self._text is None:
            from bucketline.ingest.pipeline.model import load_encoders

            device = self._device()
            if self.phases.are_two:
                self._vae = None
                free_memory(device)
            self._text = load_encoders.load_text_encoder(self._config, self.model, device)
            self._known["text_encoder"], self._columns = self._text.provenance, self._text.columns
        return self._text

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

    def vae_for(self, store: Path, manifest: Manifest) -> VaeEncoder:
        """Return the loaded VAE, compared with the one that a store was made with.

        Raises:
            FingerprintError: if they differ; the store then no longer records a model.
            ModelError, UsageError: as `vae`.
        """
        loaded = self.vae()
        self._compare(store, manifest)
        return loaded

    def text_for(self, store: Path, manifest: Manifest) -> CaptionEncoder:
        """Return the loaded text encoders, compared with those that a store was made with; raises what `vae_for` does."""
        loaded = self.text()
        self._compare(store, manifest)
        return loaded

    def _compare(self, store: Path, manifest: Manifest) -> None:
        """Compare all that was loaded with what a store was made with."""
        known = {name: dict(own) for name, own in self._known.items()}
        contents = Contents(
            encoders={**manifest.encoders, **known},
            rules=dict(manifest.rules),
            max_captions=manifest.max_captions,
            text=manifest.text if self._columns is None else text_entry(self._columns),
        )
        try:
            refuse_other_options(self._config, manifest, contents)
            refuse_difference({"text": encode(manifest.text)}, {"text": encode(contents.text)})
        except FingerprintError:
            (store / PACKED_MODEL).unlink(missing_ok=True)
            raise

    def _device(self) -> torch.device:
        from bucketline.ingest.pipeline.model.device import chosen_device

        device = chosen_device(self._config.device, self._local_rank)
        self.on_shared_cores = device.type == "cpu"
        return device

    def record(self, store: Path, manifest: Manifest, *, loaded_on_shared_cores: bool | None = None) -> None:
        """Record the model in a store that it was compared with, if it was loaded and its files did not change meanwhile.

        `loaded_on_shared_cores`: where another process loaded it for this one; None if it was loaded here, or not at all.

        Raises:
            StoreError: if the record cannot be written.
        """
        state = self._state
        if self.is_loaded:
            loaded_on_shared_cores = self.on_shared_cores
        if loaded_on_shared_cores is None or state is None or model_state(self._config, self.model) != state:
            return
        if packed_model(store, manifest, state) is None:
            record_packed_model(store, manifest, state, on_shared_cores=loaded_on_shared_cores)


def _number(value: Json) -> int:
    assert isinstance(value, int)
    return value
