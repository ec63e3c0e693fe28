"""diffusers' modular pipelines, made and called as its other pipelines are."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

_TEXT_STEPS = ("text_encoder", "denoise.text_conditioning")  # of the workflow from text to images: these make embeddings
_DECODING = "decode."  # how the names of its last steps begin


class ModularAsPipeline:
    """A modular pipeline that is called with a guidance, and with a prompt or its embeddings."""

    def __init__(self, modular: Any) -> None:  # noqa: ANN401 - diffusers has no types
        vars(self)["modular"] = modular

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - likewise
        return getattr(vars(self)["modular"], name)

    def __setattr__(self, name: str, value: Any) -> None:  # noqa: ANN401 - likewise
        setattr(self.modular, name, value)

    def __call__(self, *, guidance_scale: float = 1.0, max_sequence_length: int = 512, **given: Any) -> SimpleNamespace:  # noqa: ANN401 - likewise
        """Return `images`, as other pipelines do: latents if that is the `output_type`."""
        from diffusers import ClassifierFreeGuidance
        from diffusers.modular_pipelines import SequentialPipelineBlocks

        steps = dict(self.modular.blocks.get_workflow("text2image").sub_blocks)
        if "prompt_embeds" in given:
            steps = {name: step for name, step in steps.items() if name not in _TEXT_STEPS}
        else:
            given["max_sequence_length"] = max_sequence_length
        if is_latent := given.get("output_type") == "latent":
            del given["output_type"]
            steps = {name: step for name, step in steps.items() if not name.startswith(_DECODING)}
        called = type(self.modular)(blocks=SequentialPipelineBlocks.from_blocks_dict(steps))
        parts = {name: part for name, part in self.modular.components.items() if name in called.components}
        called.update_components(**{**parts, "guider": ClassifierFreeGuidance(guidance_scale=guidance_scale)})
        called.vae = self.modular.vae  # which tells sizes, also if nothing is decoded
        return SimpleNamespace(images=called(**given, output="latents" if is_latent else "images"))


def modular_pipeline(kind: Any, parts: Mapping[str, Any]) -> ModularAsPipeline:  # noqa: ANN401 - likewise
    """Return the modular pipeline of a class, of these parts only."""
    made = kind()
    made.update_components(**parts)
    return ModularAsPipeline(made)
