"""A family: a model of one's own that is called as Chroma is, and saved under classes of its own."""

from __future__ import annotations

from bucketline.families.chroma import Chroma


class OwnChroma(Chroma):
    """Chroma with a transformer and a pipeline of another name."""

    name = "own-chroma"
    pipelines = ("OwnChromaPipeline",)
    model_class = "OwnChromaTransformer2DModel"
