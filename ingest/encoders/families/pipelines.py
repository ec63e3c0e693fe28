"""The pipelines of diffusers whose captions are encoded as a family's, by the class that a `model_index.json` names."""

from __future__ import annotations

import difflib

FAMILY_OF: dict[str, str] = {
    name: family
    for family, names in {
        "sd": (
            "StableDiffusionPipeline",
            "StableDiffusionImg2ImgPipeline",
            "StableDiffusionInpaintPipeline",
            "StableDiffusionControlNetPipeline",
            "StableDiffusionControlNetImg2ImgPipeline",
            "StableDiffusionControlNetInpaintPipeline",
            "StableDiffusionControlNetXSPipeline",
            "StableDiffusionDepth2ImgPipeline",
            "StableDiffusionUpscalePipeline",
            "LatentConsistencyModelPipeline",
            "LatentConsistencyModelImg2ImgPipeline",
        ),
        "sdxl": (
            "StableDiffusionXLPipeline",
            "StableDiffusionXLImg2ImgPipeline",
            "StableDiffusionXLInpaintPipeline",
            "StableDiffusionXLControlNetPipeline",
            "StableDiffusionXLControlNetImg2ImgPipeline",
            "StableDiffusionXLControlNetInpaintPipeline",
            "StableDiffusionXLControlNetUnionPipeline",
            "StableDiffusionXLControlNetXSPipeline",
        ),
        "sd3": (
            "StableDiffusion3Pipeline",
            "StableDiffusion3Img2ImgPipeline",
            "StableDiffusion3InpaintPipeline",
            "StableDiffusion3ControlNetPipeline",
            "StableDiffusion3ControlNetInpaintingPipeline",
        ),
        "flux": (
            "FluxPipeline",
            "FluxImg2ImgPipeline",
            "FluxInpaintPipeline",
            "FluxControlPipeline",
            "FluxControlImg2ImgPipeline",
            "FluxControlInpaintPipeline",
            "FluxFillPipeline",
            "FluxKontextPipeline",
            "FluxKontextInpaintPipeline",
        ),
        "pixart_alpha": ("PixArtAlphaPipeline",),
        "pixart_sigma": ("PixArtSigmaPipeline",),
    }.items()
    for name in names
}
"""Family by pipeline. Each has the text of the family's own `encode_prompt`, which a test compares."""

CLASS_CONDITIONAL = "DiTPipeline"
_SHOWN = (
    "StableDiffusionPipeline",
    "StableDiffusionXLPipeline",
    "StableDiffusion3Pipeline",
    "FluxPipeline",
    "PixArtAlphaPipeline",
    "PixArtSigmaPipeline",
    CLASS_CONDITIONAL,
)
_ENDING = "Pipeline"


def known_pipelines(name: str) -> str:
    """Return the known pipelines for a message, with the nearest to `name` if there is one that is like it.

    >>> known_pipelines("FluxxPipeline").partition(";")[2]
    ' the nearest is FluxPipeline'
    """
    known = f"known are {', '.join(_SHOWN)} and their variants"
    ends = {one.removesuffix(_ENDING): one for one in (*FAMILY_OF, CLASS_CONDITIONAL)}
    nearest = difflib.get_close_matches(name.removesuffix(_ENDING), ends, n=1)
    return f"{known}; the nearest is {ends[nearest[0]]}" if nearest else known
