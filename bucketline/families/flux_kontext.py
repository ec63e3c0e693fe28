"""Flux.1 Kontext: Flux.1 with one reference behind the target's tokens; its text encoders see captions only."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bucketline.families.flux import Flux
from bucketline.families.packing import image_ids
from bucketline.families.references import KontextReferences

if TYPE_CHECKING:
    from collections.abc import Mapping

    from bucketline.loader import Batch


class FluxKontext(Flux):
    """Flux.1 Kontext: takes what Flux.1 does, and the reference's latents, whose position ids begin with 1."""

    name = "flux_kontext"
    pipelines = ("FluxKontextPipeline",)
    references = KontextReferences(most=1)

    def with_references(self, given: Mapping[str, Any], batch: Batch) -> dict[str, Any]:
        """Put the reference behind the target."""
        import torch

        scaled = batch.scaled_references()
        ids = [image_ids(one) for one in scaled]
        for one in ids:
            one[:, 0] = 1
        return {
            **given,
            "hidden_states": torch.cat([given["hidden_states"], *map(self.as_tokens, scaled)], dim=1),
            "img_ids": torch.cat([given["img_ids"], *ids]),
        }

    def draw(self, pipeline: Any, given: Mapping[str, Any], batch: Batch, negative: Batch | None = None) -> None:  # noqa: ANN401
        """Call the pipeline with the image's own area, to which it resizes it."""
        super().draw(pipeline, {**given, "max_area": given["height"] * given["width"]}, batch, negative)
