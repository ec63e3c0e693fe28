"""The encoders of a run, loaded at first use if the store already tells what they are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from bucketline.errors import FingerprintError
from bucketline.families.family import Padding
from bucketline.ingest.encoders.model_folder import open_model
from bucketline.ingest.other_options import refuse_other_options
from bucketline.ingest.pipeline.model.packed_model import PACKED_MODEL, model_state, packed_model, record_packed_model
from bucketline.store.format.columns import LatentKind
from bucketline.store.format.manifest import refuse_difference
from bucketline.store.format.manifest_entries import text_entry
from bucketline.store.write.publish import Contents
from bucketline.typed_json import encode

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from bucketline.ingest.config import PackConfig
    from bucketline.ingest.pipeline.model.load_encoders import Encoders
    from bucketline.store.format.manifest import Manifest
    from bucketline.store.format.text_block import TextSpec
    from bucketline.typed_json import Json


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderFacts:
    """The provenance of encoders and their text columns: what a run needs to know before it encodes."""

    vae: Mapping[str, Json]
    text: Mapping[str, Json]
    columns: TextSpec

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

    def __init__(self, config: PackConfig, local_rank: int) -> None:
        """Find the model; nothing is loaded yet.

        Raises:
            ModelError, UsageError: as `open_model`.
        """
        self.model = open_model(config.model, config.model_config)
        self._config, self._local_rank = config, local_rank
        self._state = model_state(config, self.model)  # before anything is loaded
        self._loaded: Encoders | None = None
        self.on_shared_cores = False  # once loaded: the encoders run on the CPU

    @property
    def is_loaded(self) -> bool:
        """True once the encoders have been loaded."""
        return self._loaded is not None

    def recall(self, store: Path, manifest: Manifest | None) -> bool | None:
        """Return whether the encoders ran on the CPU if the store records this model; None if it does not."""
        found = packed_model(store, manifest, self._state)
        return None if found is None else found.on_shared_cores

    def loaded(self) -> Encoders:
        """Load the encoders, or return those that were loaded before.

        Raises:
            ModelError, UsageError: as `load_encoders` and `chosen_device`.
        """
        if self._loaded is None:
            from bucketline.ingest.pipeline.model import load_encoders
            from bucketline.ingest.pipeline.model.device import chosen_device

            device = chosen_device(self._config.device, self._local_rank)
            self._loaded = load_encoders.load_encoders(self._config, self.model, device)
            self.on_shared_cores = device.type == "cpu"
        return self._loaded

    def facts(self) -> EncoderFacts:
        """Load the encoders and return their facts."""
        encoders = self.loaded()
        return EncoderFacts(vae=encoders.vae.provenance, text=encoders.text.provenance, columns=encoders.text.columns)

    def loaded_for(self, store: Path, manifest: Manifest) -> Encoders:
        """Return the loaded encoders, compared with those that a store was made with.

        Raises:
            FingerprintError: if they differ; the store then no longer records a model.
            ModelError, UsageError: as `loaded`.
        """
        facts = self.facts()
        contents = Contents(
            encoders={"vae": dict(facts.vae), "text_encoder": dict(facts.text)},
            rules=dict(manifest.rules),
            max_captions=manifest.max_captions,
            text=text_entry(facts.columns),
        )
        try:
            refuse_other_options(self._config, manifest, contents)
            refuse_difference({"text": encode(manifest.text)}, {"text": encode(contents.text)})
        except FingerprintError:
            (store / PACKED_MODEL).unlink(missing_ok=True)
            raise
        return self.loaded()

    def record(self, store: Path, manifest: Manifest, *, loaded_on_shared_cores: bool | None = None) -> None:
        """Record the model in a store that it was compared with, if it was loaded and its files did not change meanwhile.

        `loaded_on_shared_cores`: where another process loaded it for this one; None if it was loaded here, or not at all.

        Raises:
            StoreError: if the record cannot be written.
        """
        state = self._state
        if self._loaded is not None:
            loaded_on_shared_cores = self.on_shared_cores
        if loaded_on_shared_cores is None or state is None or model_state(self._config, self.model) != state:
            return
        if packed_model(store, manifest, state) is None:
            record_packed_model(store, manifest, state, on_shared_cores=loaded_on_shared_cores)


def _number(value: Json) -> int:
    assert isinstance(value, int)
    return value
