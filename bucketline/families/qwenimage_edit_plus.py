"""Qwen-Image-Edit-Plus, of the models 2509 and 2511: Qwen-Image-Edit with up to three references, seen smaller by the text.

The modulation of 2511's references at timestep 0 (`zero_cond_t`) is the transformer's own.
"""

from __future__ import annotations

from typing import Any

from bucketline.families.qwenimage import QwenImage
from bucketline.families.qwenimage_edit import QwenImageEdit
from bucketline.families.references import References


class QwenImageEditPlus(QwenImageEdit):
    """Qwen-Image-Edit-Plus: takes what Qwen-Image-Edit does."""

    name = "qwenimage_edit_plus"
    pipelines = ("QwenImageEditPlusPipeline",)
    references = References(most=3, text_sees=True, text_area_px=384**2)
    most_drawn = 1  # its pipeline refuses more
    tokens_beside = 7  # Picture 1: and two marks

    @classmethod
    def num_dropped(cls, pipeline: Any, caption: str) -> int:  # noqa: ANN401 - diffusers has no types
        """Return the number of the chat's tokens before the caption, without those of images."""
        return QwenImage.num_dropped(pipeline, caption)
