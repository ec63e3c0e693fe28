"""Model families: one module each, behind a small interface. No other code depends on the family."""

from __future__ import annotations

from bucketline.train.models.dit import Dit
from bucketline.train.models.flux import Flux
from bucketline.train.models.model import ModelFamily, StoreFacts
from bucketline.train.models.pixart import PixArt
from bucketline.train.models.sd3 import Sd3
from bucketline.train.models.sdxl import Sdxl
from bucketline.train.models.stable_diffusion import StableDiffusion

FAMILIES: tuple[type[ModelFamily], ...] = (Sdxl, StableDiffusion, Dit, PixArt, Sd3, Flux)
"""The first that takes a model is its family."""

__all__ = ["FAMILIES", "ModelFamily", "StoreFacts"]
