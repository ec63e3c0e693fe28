"""Stores with every kind of column that ingest writes: mirror images, moments, pooled embeddings, classes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bucketline.ingest.images.crop import bucket_placement, parse_grid
from bucketline.store import Column, LatentColumn, RowColumn, Store, TextSpec
from bucketline.store.format.block import sample_digest
from bucketline.store.format.text import dequantise, quantise, quantised_spec
from tests import kit
from tests.kit import FLOATS, Sample, make_sample, seed_of

NUM_CLASSES = 10
WIDTH, POOLED_WIDTH = 5, 3
GRID = parse_grid("64x64,64x128,128x64", step_px=64, align_px=8)


@dataclass(frozen=True, kw_only=True)
class Form:
    """The contents of a store's rows."""

    dtype: str = "F16"
    flip: bool = True
    latents: str | None = "mode"
    pooled: bool = True
    classes: bool = False
    length: int | None = None  # of every caption; None: as many tokens as words, and one more
    num_rows: int = 40
    quantised: str | None = None  # the dtype of its tokens, I8 or F8_E4M3
    large: bool = False  # latents beyond what is read by the map where it is cold

    @property
    def text(self) -> TextSpec:
        if self.classes:
            return TextSpec(tokens=(Column(name="class_labels", dtype="I64", shape=(1,)),))
        pooled = (Column(name="pooled", dtype=self.dtype, shape=(POOLED_WIDTH,)),) if self.pooled else ()
        if self.quantised:
            return quantised_spec(self.quantised, WIDTH, pooled)
        return TextSpec(tokens=(Column(name="tokens", dtype=self.dtype, shape=(WIDTH,)),), fixed=pooled)

    @property
    def columns(self) -> tuple[RowColumn, ...]:
        channels = (4 if self.latents == "moments" else 2) * (32 if self.large else 1)
        names = ("latent", "latent_flipped") if self.flip else ("latent",)
        return tuple(LatentColumn(name=name, channels=channels, dtype=self.dtype) for name in names)


def values(name: str, shape: tuple[int, ...], dtype: str) -> NDArray[Any]:
    """Make values that follow from a name; of BF16 their bits."""
    random = np.random.default_rng(seed_of(name))
    if dtype == "BF16":
        return (random.normal(size=shape).astype("<f4").view("<u4") >> 16).astype("<u2")
    return random.normal(size=shape).astype(FLOATS[dtype])


def tokens_of(form: Form, text: str) -> NDArray[Any]:
    """Return a caption's tokens as they are delivered, `[T, D]`, or its class, `[1, 1]`."""
    tokens = _tokens_of(form, text)
    return dequantise(quantise(tokens.astype("<f4"), form.quantised)) if form.quantised else tokens


def _tokens_of(form: Form, text: str) -> NDArray[Any]:
    if form.classes:
        return np.array([[int(text) if text else NUM_CLASSES]], dtype="<i8")
    return values(f"tokens of {text}", (form.length or len(text.split()) + 1, WIDTH), form.dtype)


def pooled_of(form: Form, text: str) -> NDArray[Any]:
    return values(f"pooled of {text}", (POOLED_WIDTH,), form.dtype)


def _embedding(form: Form, text: str) -> dict[str, NDArray[Any]]:
    fixed = {"pooled": pooled_of(form, text)} if form.text.delivered.fixed else {}
    return {form.text.tokens[0].name: _tokens_of(form, text), **fixed}


def texts_of(form: Form, n: int) -> tuple[str, ...]:
    if form.classes:
        return (str(n % NUM_CLASSES),) if n % 4 else ()
    return tuple(f"{'very ' * k}image {n}" for k in range(n % 4))


def conditioned_store(path: Path, form: Form) -> tuple[Store, dict[bytes, Sample]]:
    """Make a store of one shard, its images placed as `ingest` places them; return its rows by the digest of their ids."""
    return growing_store(path, form, [range(form.num_rows)])


def growing_store(path: Path, form: Form, parts: Sequence[range]) -> tuple[Store, dict[bytes, Sample]]:
    """Make a store of a shard for each range of rows, each published as a generation of its own; or add them to it."""
    vae = {"scaling_factor": 0.5, **({} if form.latents is None else {"latents": form.latents})}
    encoders = {"vae": vae, "text_encoder": {"num_classes": NUM_CLASSES} if form.classes else {}}
    shards = [[_row(form, n) for n in part] for part in parts]
    made = kit.Form(columns=form.columns, encoders=encoders, text=form.text, embed=partial(_embedding, form))
    return made.make_store(path, *shards), {sample_digest(row.id): row for shard in shards for row in shard}


def _row(form: Form, n: int) -> Sample:
    random = np.random.default_rng(n)
    height, width = (int(side) for side in random.integers(30, 3000, 2))
    placed = bucket_placement(height, width, GRID, draw=int(random.integers(0, 1 << 63)))
    bucket = f"train/{placed.bucket.height_px}x{placed.bucket.width_px}"
    sample = make_sample(f"{n}.png", bucket, texts_of(form, n))
    record = replace(
        sample.record,
        original_size=(height, width),
        resized=placed.resized,
        crop=placed.crop,
        crop_in_source=placed.crop_in_source,
    )
    columns = {own.role: own.in_bucket(bucket) for own in form.columns}
    drawn = {role: values(f"{c.name} of {n}", c.shape, c.dtype) for role, c in columns.items()}
    return replace(sample, columns=drawn, record=record)
