"""Stores with every kind of column that ingest writes: mirror images, moments, pooled embeddings, classes."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from bucketline.ingest.images.bucket_grid import parse_grid
from bucketline.ingest.images.geometry import place
from bucketline.store import Store
from bucketline.store.format.block import BlockSpec, Column, fixed_columns
from bucketline.store.format.hashing import caption_digest, sample_digest
from bucketline.store.format.manifest import TextEntry, column_entries, write_manifest
from bucketline.store.format.text_block import Caption, TextSpec, make_caption
from bucketline.store.write.publish import Contents, lock_store, new_manifest, prepare_store, publish
from bucketline.store.write.seal import seal
from bucketline.store.write.shard_writer import ShardWriter
from tests.building import FLOATS, MAX_CAPTIONS, make_sample

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from numpy.typing import NDArray

    from bucketline.store import SampleRecord

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
    large: bool = False  # latents beyond what is read by the map where it is cold

    @property
    def text(self) -> TextSpec:
        if self.classes:
            return TextSpec(tokens=(Column(name="class_labels", dtype="I64", shape=(1,)),))
        pooled = (Column(name="pooled", dtype=self.dtype, shape=(POOLED_WIDTH,)),) if self.pooled else ()
        return TextSpec(tokens=(Column(name="tokens", dtype=self.dtype, shape=(WIDTH,)),), fixed=pooled)

    def spec(self, height: int, width: int) -> BlockSpec:
        channels = (4 if self.latents == "moments" else 2) * (32 if self.large else 1)
        names = ("latent", "latent_flipped") if self.flip else ("latent",)
        shape = (channels, height // 8, width // 8)
        latents = (Column(name=name, dtype=self.dtype, shape=shape) for name in names)
        return BlockSpec(bucket=f"train/{height}x{width}", columns=(*fixed_columns(MAX_CAPTIONS), *latents))


@dataclass(frozen=True, kw_only=True)
class Row:
    """The values that were put in."""

    columns: Mapping[str, NDArray[Any]]  # `latent` and where there is one `latent_flipped`
    record: SampleRecord


def values(name: str, shape: tuple[int, ...], dtype: str) -> NDArray[Any]:
    """Make values that follow from a name; of BF16 their bits."""
    random = np.random.default_rng(int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little"))
    if dtype == "BF16":
        return (random.normal(size=shape).astype("<f4").view("<u4") >> 16).astype("<u2")
    return random.normal(size=shape).astype(FLOATS[dtype])


def tokens_of(form: Form, text: str) -> NDArray[Any]:
    """Return a caption's tokens, `[T, D]`, or its class, `[1, 1]`."""
    if form.classes:
        return np.array([[int(text) if text else NUM_CLASSES]], dtype="<i8")
    return values(f"tokens of {text}", (form.length or len(text.split()) + 1, WIDTH), form.dtype)


def pooled_of(form: Form, text: str) -> NDArray[Any]:
    return values(f"pooled of {text}", (POOLED_WIDTH,), form.dtype)


def _caption(form: Form, text: str) -> Caption:
    fixed = {"pooled": pooled_of(form, text)} if form.text.fixed else {}
    return make_caption(form.text, caption_digest(text), {form.text.tokens[0].name: tokens_of(form, text)}, fixed)


def texts_of(form: Form, n: int) -> tuple[str, ...]:
    """Return row n's captions: none, one, two or three."""
    if form.classes:
        return (str(n % NUM_CLASSES),) if n % 4 else ()
    return tuple(f"{'very ' * k}image {n}" for k in range(n % 4))


def conditioned_store(path: Path, form: Form) -> tuple[Store, dict[bytes, Row]]:
    """Make a store of one shard, its images placed as `ingest` places them; give its rows by the digest of their ids."""
    text = TextEntry(
        header_bytes=form.text.header_bytes, tokens=column_entries(form.text.tokens), fixed=column_entries(form.text.fixed)
    )
    vae = {"scaling_factor": 0.5, **({} if form.latents is None else {"latents": form.latents})}
    encoders: dict[str, Any] = {"vae": vae, "text_encoder": {"num_classes": NUM_CLASSES} if form.classes else {}}
    prepare_store(path)
    contents = Contents(encoders=encoders, rules={}, max_captions=MAX_CAPTIONS, text=text)
    manifest = write_manifest(path, new_manifest(contents))
    rows: dict[bytes, Row] = {}
    with lock_store(path):
        writer = ShardWriter(path, "g0", form.text, _caption(form, ""), 1 << 24)
        for n in range(form.num_rows):
            digest, row = _add(writer, form, n)
            rows[digest] = row
            if n % 9 == 8:
                writer.commit()
        writer.commit()
        writer.close()
        seal(path, "g0")
        manifest = publish(path, manifest, ["g0"], [])
    return Store(path, manifest), rows


def _add(writer: ShardWriter, form: Form, n: int) -> tuple[bytes, Row]:
    random = np.random.default_rng(n)
    height, width = (int(side) for side in random.integers(30, 3000, 2))
    placed = place(height, width, GRID, draw=int(random.integers(0, 1 << 63)))
    size = placed.bucket
    spec = form.spec(size.height_px, size.width_px)
    name, texts = f"{n}.png", texts_of(form, n)
    record = replace(
        make_sample(name, spec.bucket, texts).record,
        original_size=(height, width),
        resized=placed.resized,
        crop=placed.crop,
        crop_in_source=placed.crop_in_source,
    )
    latents = {c.name: values(f"{c.name} of {n}", c.shape, c.dtype) for c in spec.columns if c.name.startswith("latent")}
    for text in texts:
        writer.add_caption(_caption(form, text))
    writer.add(spec=spec, latents=latents, record=record, captions=[caption_digest(text) for text in texts or ("",)])
    return sample_digest(name), Row(columns=latents, record=record)
