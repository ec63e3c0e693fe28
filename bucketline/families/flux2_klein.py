"""Flux.2 Klein: Flux.2 without guidance as an input, and three hidden states of a Qwen3 instead of a Mistral 3's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bucketline.families.chats import user_turn
from bucketline.families.family import Part, variants
from bucketline.families.flux2 import Flux2

if TYPE_CHECKING:
    from collections.abc import Mapping

    from bucketline.typed_json import Json


class Flux2Klein(Flux2):
    """Flux.2 Klein: takes what Flux.2 does, but for guidance."""

    name = "flux2_klein"
    pipelines = variants("Flux2Klein")
    parts = (Part(kind="Qwen3", layer="hidden_states[9, 18, 27]", is_open=True),)

    @classmethod
    def takes(cls, kind: str, config: Mapping[str, Json]) -> bool:
        """Return whether a model of the class is told no guidance."""
        return kind == cls.model_class and not config.get("guidance_embeds", True)

    @classmethod
    def cleaned(cls, pipeline: Any, captions: list[str]) -> list[str]:  # noqa: ANN401 - diffusers has no types
        """Return captions in the pipeline's chat, whose answer begins with a thought of nothing."""
        return [user_turn(pipeline.tokenizer, caption, thinks=False) for caption in captions]
