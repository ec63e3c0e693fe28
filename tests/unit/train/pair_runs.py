"""A store of edit pairs with masks, written from arrays for a family's tiny pipeline, and runs on it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from bucketline.families.vaes import batch_norm
from bucketline.store import Column, LatentColumn, MaskColumn, ReferenceColumn, StoreWriter, TextSpec
from bucketline.store.format.block import POOLED, TOKENS
from bucketline.train.config import TrainConfig
from bucketline.train.model import open_model_config
from tests.family_models import write_pipeline
from tests.kit import seed_of
from tests.unit.families.forms import CHANNELS, facts_for

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

PX = 2  # of an image, of a latent's position
LENGTH = 6  # of every caption
ROWS = {  # by split and the latents of targets and references
    ("train", (8, 8)): 3,
    ("train", (8, 8), (8, 12)): 5,
    ("train", (8, 8), (8, 12), (4, 4)): 4,
    ("val", (8, 8), (8, 12), (4, 4)): 2,
    ("val", (8, 8), (8, 12)): 3,
}


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """A pipeline's folder, and a store for it."""

    model: Path
    store: Path

    def config(self, output: Path, **changes: Any) -> TrainConfig:
        asked: dict[str, Any] = {
            "store": (self.store,),
            "model": self.model,
            "output_dir": output,
            "batch_size": "2",
            "accumulation": 2,
            "max_steps": 6,
            "log_every": 1,
            "warmup_steps": 0,
            "learning_rate": 1e-3,
            "ema": 0.5,
            "val_timesteps": 2,
            "num_images": 0,
            "image_steps": 2,
        }
        return TrainConfig(**{**asked, **changes})


def drawn(name: str, *shape: int) -> NDArray[np.float16]:
    return np.random.default_rng(seed_of(name)).normal(size=shape).astype("<f2")


def write_pairs(
    root: Path, form: str, *, rows: dict[tuple[Any, ...], int] | None = None, masks: bool = True, optional: bool = False
) -> Pairs:
    """Write a pipeline and a store with no, one or two references a row, if the family takes as many, and masks."""
    folder = write_pipeline(root / "model", form)
    opened, facts = open_model_config(folder), facts_for(folder)
    assert opened.family.references is not None
    given = rows or {key: count for key, count in ROWS.items() if len(key) - 2 <= opened.family.references.most}
    most = max(len(key) - 2 for key in given)
    columns = [LatentColumn(channels=CHANNELS, downscale=PX)]
    columns += [ReferenceColumn(n, channels=CHANNELS, downscale=PX) for n in range(most)]
    columns += [replace(MaskColumn(downscale=PX), optional=optional)] * masks
    widths = {name: Column(name=name, dtype="F16", shape=(width,)) for name, width in facts.text.items()}

    def embedded(text: str) -> dict[str, Any]:
        lengths = {TOKENS: (LENGTH,), POOLED: ()}
        return {name: drawn(f"{name} of {text}", *lengths[name], *column.shape) for name, column in widths.items()}

    with StoreWriter(
        root / "pairs.store",
        encoders=_encoders(folder, opened.family.name),
        columns=columns,
        text=TextSpec(tokens=(widths[TOKENS],), fixed=tuple(own for name, own in widths.items() if name == POOLED)),
        empty_caption=embedded(""),
    ) as writer:
        for (split, target, *references), count in given.items():
            for n in range(count):
                name = f"{split}/{target}{references}{n}"
                arrays: dict[str, Any] = {"target": drawn(name, CHANNELS, *target)}
                arrays |= {f"reference/{at}": drawn(f"{name} {at}", CHANNELS, *size) for at, size in enumerate(references)}
                if masks:
                    arrays["mask"] = np.clip(drawn(f"mask of {name}", *target) * 255 + 128, 0, 255).astype("u1") * (n != 1)
                writer.add(name, split, arrays, {text: embedded(text) for text in (f"make it {n}",)})
    return Pairs(model=folder, store=root / "pairs.store")


def _encoders(folder: Path, family: str) -> dict[str, Any]:
    """Return the provenance of a tiny pipeline's VAE and captions, as far as a run reads it."""
    import diffusers

    kind: Any = diffusers.AutoencoderKLFlux2 if family.startswith("flux2") else diffusers.AutoencoderKL
    vae = kind.from_pretrained(folder / "vae")
    scaling = (
        {"batch_norm": batch_norm(vae)}
        if family.startswith("flux2")
        else {
            "scaling_factor": vae.config.scaling_factor,
            "shift_factor": vae.config.shift_factor,
        }
    )
    return {
        "vae": {"latent_channels": CHANNELS, **scaling},
        "text_encoder": {"padding": "max_length", "max_tokens": LENGTH, "family": family},
    }
