"""Model kinds: each in a module of its own, behind one small protocol. Nothing else knows the kind."""

from __future__ import annotations

from bucketline.train.families.dit import Dit
from bucketline.train.families.family import Family, StoreFacts
from bucketline.train.families.flux import Flux
from bucketline.train.families.pixart import PixArt
from bucketline.train.families.sd3 import Sd3
from bucketline.train.families.sdxl import Sdxl
from bucketline.train.families.stable_diffusion import StableDiffusion

FAMILIES: tuple[type[Family], ...] = (StableDiffusion, Sdxl, Dit, PixArt, Sd3, Flux)

__all__ = ["FAMILIES", "Family", "StoreFacts"]
