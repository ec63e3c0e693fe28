"""The facts of a run's encoders: what must be known of them before anything is encoded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from bucketline.families.family import Padding
from bucketline.fingerprint import config_hash
from bucketline.ingest.images.model_sizes import latent_sizes
from bucketline.ingest.rules import Phases
from bucketline.store.format.columns import LatentKind

if TYPE_CHECKING:
    from collections.abc import Mapping

    from bucketline.ingest.config import PackConfig
    from bucketline.ingest.encoders.model_folder import ModelFolder
    from bucketline.store.format.manifest import Manifest
    from bucketline.store.format.text_block import TextSpec
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
    def stored_channels(self) -> int:
        return _number(self.vae["latent_channels"]) * (2 if self.vae["latents"] == LatentKind.MOMENTS.value else 1)

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
