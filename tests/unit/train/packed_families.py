"""A store for each family, packed by `ingest` from the family's own tiny pipeline, and runs on it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bucketline.train.config import TrainConfig
from tests.commands import call
from tests.family_models import write_dit, write_pipeline
from tests.models import png

FAMILIES = ("sd", "sdxl", "dit", "pixart_alpha", "pixart_sigma", "sd3", "flux")
CLASSES = {0: "cat", 1: "dog", 2: "house"}
TEXTS = ("a red cat", "a blue dog", "the house")


@dataclass(frozen=True, kw_only=True)
class Packed:
    """A model folder and the store that was packed with it."""

    family: str
    model: Path
    store: Path

    @property
    def part(self) -> str:
        return "unet" if self.family in ("sd", "sdxl") else "transformer"

    @property
    def pipeline(self) -> bool:
        """True if the family's pipeline in diffusers takes adapters."""
        return self.family in ("sd", "sdxl", "sd3", "flux")

    @property
    def model_class(self) -> Any:
        """Its class in diffusers."""
        import diffusers

        config = json.loads((self.model / self.part / "config.json").read_text(encoding="utf-8"))
        return getattr(diffusers, config["_class_name"])

    def config(self, output: Path, **changes: Any) -> TrainConfig:
        asked: dict[str, Any] = {
            "store": (self.store,),
            "model": self.model,
            "output_dir": output,
            "batch_size": "4",
            "max_steps": 2,
            "log_every": 1,
            "warmup_steps": 0,
            "ema": 0.5,
            "val_timesteps": 2,
            "num_images": 0,
            "image_steps": 2,
        }
        return TrainConfig(**{**asked, **changes})


def pack_family(root: Path, family: str, *more: object, change: Callable[[Path], None] = lambda _: None) -> Packed:
    """Write the family's pipeline, `change` it, and pack a dozen images with it, of two sizes where it takes them."""
    model, store, images = root / family, root / f"{family}.store", root / f"{family} images"
    images.mkdir()
    is_dit = family == "dit"
    for n in range(12):
        (images / f"{n}.png").write_bytes(png(16, 16 if is_dit or n % 2 else 24, seed=n))
        (images / f"{n}.txt").write_text(CLASSES[n % 3] if is_dit else TEXTS[n % 3], encoding="utf-8")
    if is_dit:
        write_dit(model, CLASSES)
    else:
        write_pipeline(model, family)
    change(model)
    grid = "16x16" if is_dit else "16x16,16x24"
    asked = ("--grid", grid, "--min-size-px", 8, "--val-fraction", 0.25, "--json")
    ran = call("ingest", "pack", images, store, "--model", model, *asked, *more).done()
    assert ran.json["packed"] == 12
    return Packed(family=family, model=model, store=store)
