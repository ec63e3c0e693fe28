"""Qwen-Image-Edit-Plus, of the models 2509 and 2511: Qwen-Image-Edit with up to three references, seen smaller by the text.

The modulation of 2511's references at timestep 0 (`zero_cond_t`) is the transformer's own.
"""

from __future__ import annotations

from bucketline.families.qwenimage_edit import QwenImageEdit
from bucketline.families.references import References


class QwenImageEditPlus(QwenImageEdit):
    """Qwen-Image-Edit-Plus: takes what Qwen-Image-Edit does."""

    name = "qwenimage_edit_plus"
    pipelines = ("QwenImageEditPlusPipeline",)
    references = References(most=3, text_sees=True, text_area_px=384**2)
    most_drawn = 1  # its pipeline refuses more
