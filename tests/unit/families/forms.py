"""Every form's tiny model, batches of captions of any lengths for it, and its pipeline with a store that `ingest` packed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from bucketline.families.family import Family, Padding, StoreFacts
from bucketline.families.registry import family_of_pipeline
from bucketline.loader import Batch
from bucketline.store.format.block import CLASS_LABELS, POOLED, TOKENS
from bucketline.train.model import open_model_config
from tests.commands import Ran, call
from tests.family_models import FORMS, tiny_model
from tests.models import png

CHANNELS = 4  # of every tiny model's latents
EVERY_FORM = (*FORMS, "dit")


def write_form(root: Path, form: str) -> Path:
    folder, part = root / re.sub(r"\W", "-", form), "unet" if form in ("sd", "sdxl") else "transformer"
    torch.manual_seed(sum(map(ord, form)))
    tiny_model(form).save_pretrained(folder / part)
    return folder


def facts_for(folder: Path) -> StoreFacts:
    opened = open_model_config(folder)
    config, kind = opened.config, opened.family
    model = kind(config, StoreFacts(latent_channels=CHANNELS, text={}))
    classes = config.get("num_embeds_ada_norm") if kind.name == CLASS_LABELS else None
    text = {CLASS_LABELS: 1} if classes else {TOKENS: model.token_width}
    return StoreFacts(
        latent_channels=CHANNELS,
        text={**text, POOLED: model.pooled_width} if model.pooled_width else text,
        num_classes=classes if isinstance(classes, int) else None,
        shows_padding=kind.padding is Padding.MAX_LENGTH,
        latent_sizes=(("train/form", 8, 8 if kind.is_square_only else 12),),
    )


def batch_of_lengths(family: Family, lengths: Sequence[int], longest: int, *, first: int = 0) -> Batch:
    """Return a batch of captions of as many tokens each, padded to the `longest`.

    A row's values are those of its number, from `first` on.
    """
    count, (bucket, height, width) = len(lengths), family.store.latent_sizes[0]
    numbers = torch.arange(first, first + count)
    generators = [torch.Generator().manual_seed(int(number)) for number in numbers]

    def rows(*shape: int) -> Tensor:
        return torch.stack([torch.randn(shape, generator=one) for one in generators])

    latents, is_labelled = rows(CHANNELS, height, width), family.store.num_classes is not None
    token_width = family.store.text.get(TOKENS, 1)
    own = [torch.randn(length, token_width, generator=one) for length, one in zip(lengths, generators, strict=True)]
    sizes = torch.tensor([[8 * height, 8 * width]] * count, dtype=torch.int32)
    return Batch(
        step=0,
        micro_step=0,
        epoch=0,
        bucket=bucket,
        columns={"target": latents},
        tokens=torch.stack([pad(one, (0, 0, 0, longest - len(one))) for one in own]),
        token_mask=torch.arange(longest) < torch.tensor(lengths)[:, None],
        original_size=sizes,
        crop=torch.zeros_like(sizes),
        target_size=sizes,
        weight=torch.ones(count),
        keys=numbers * 7919 + 1,
        ids=torch.zeros(count, 16, dtype=torch.uint8),
        flipped=torch.zeros(count, dtype=torch.bool),
        text_fixed={POOLED: rows(family.pooled_width)} if family.pooled_width else {},
        class_labels=numbers % (family.store.num_classes or 1) if is_labelled else None,
    )


def predicted(family: Family, model: Any, batch: Batch) -> Tensor:
    """Return the prediction of a batch's latents, as they are, at a timestep of its own for each row."""
    is_flow = "Flow" in str(family.scheduler.get("_class_name"))
    timesteps = (batch.keys % 1000).float()
    prediction: Tensor = family.predict(model, batch.latents, timesteps if is_flow else timesteps.long(), batch)
    return prediction


TEXTS = ("a red cat", "a blue dog of the house")


@dataclass(frozen=True, kw_only=True)
class Packed:
    """A family's tiny pipeline, and a store that was packed with it."""

    form: str
    model: Path
    images: Path
    store: Path

    @property
    def family(self) -> type[Family]:
        found = family_of_pipeline(FORMS[self.form].pipeline)
        assert found is not None
        return found

    @property
    def encoder(self) -> str:
        """A text encoder that the family cannot do without."""
        return next(part.encoder for part in self.family.parts if not part.is_optional)

    @property
    def tokenizer(self) -> str:
        return next(part.tokenizer for part in self.family.parts if not part.is_optional)


def ingest(command: str, packed: Packed, model: Path, *more: object) -> Ran:
    height, width = FORMS[packed.form].size
    return call("ingest", command, packed.images, *more, "--model", model, "--grid", f"{height}x{width}", "--min-size-px", 8)


def pack(form: str, model: Path, root: Path) -> Packed:
    height, width = FORMS[form].size
    made = Packed(form=form, model=model, images=root / "images", store=root / "store")
    made.images.mkdir()
    for n, text in enumerate(TEXTS):
        (made.images / f"{n}.png").write_bytes(png(height, width, seed=n))
        (made.images / f"{n}.txt").write_text(text, encoding="utf-8")
    ingest("pack", made, model, made.store).done()
    return made
