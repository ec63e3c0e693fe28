"""What the trainer refuses to train on: a store that holds something it would leave out."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from bucketline.errors import ModelError
from bucketline.store import Store
from bucketline.store.block import BlockSpec, Column
from bucketline.store.manifest import TextEntry, column_entries, read_manifest
from bucketline.store.text_block import TextSpec
from bucketline.train.assemble import refuse_unread_columns
from tests.building import TEXT, rewrite_manifest
from tests.unit.train.tiny_run import TEXT_ENCODER, VAE, make_training_store

if TYPE_CHECKING:
    from pathlib import Path


def refused(path: Path, **changes: Any) -> None:
    rewrite_manifest(path, **changes)
    refuse_unread_columns(Store(path, read_manifest(path)))


def text_entry(tokens: tuple[Column, ...], fixed: tuple[Column, ...] = ()) -> TextEntry:
    spec = TextSpec(tokens=tokens, fixed=fixed)
    return TextEntry(header_bytes=spec.header_bytes, tokens=column_entries(tokens), fixed=column_entries(fixed))


@pytest.mark.parametrize(
    ("part", "field", "value"),
    [
        ("vae", "latents", "moments"),
        ("vae", "latents_mean", [0.0, 1.0]),
        ("vae", "latents_std", [1.0, 2.0]),
        ("text_encoder", "empty_caption", "zeros"),
        ("text_encoder", "empty_caption", "null_class"),
    ],
)
def test_encoders_whose_columns_mean_something_else_are_refused_by_field(
    tmp_path: Path, part: str, field: str, value: Any
) -> None:
    encoders: dict[str, Any] = {"vae": dict(VAE), "text_encoder": dict(TEXT_ENCODER)}
    encoders[part][field] = value
    path = make_training_store(tmp_path / "s").path
    with pytest.raises(ModelError, match=rf"its manifest has encoders\.{part}\.{field} "):
        refused(path, encoders=encoders)


def test_columns_that_nothing_would_read_are_refused_by_name(tmp_path: Path) -> None:
    path = make_training_store(tmp_path / "s").path
    pooled = Column(name="pooled", dtype="F16", shape=(4,))
    labels = Column(name="class_labels", dtype="I64", shape=(1,))
    with pytest.raises(ModelError, match=r"text\.fixed pooled, expected no column"):
        refused(path, text=text_entry(TEXT.tokens, (pooled,)))
    with pytest.raises(ModelError, match=r"text\.tokens class_labels, expected tokens alone"):
        refused(path, text=text_entry((labels,)))


def test_a_column_of_flipped_latents_is_refused(tmp_path: Path) -> None:
    store = make_training_store(tmp_path / "s")
    refuse_unread_columns(store)
    first, *others = store.manifest.buckets
    columns = {**first.columns, "latent_flipped": first.columns["latent"]}
    spec = BlockSpec(
        bucket=first.name, columns=tuple(Column(name=name, dtype=c.dtype, shape=c.shape) for name, c in columns.items())
    )
    flipped = replace(first, columns=columns, header_bytes=spec.header_bytes)
    store.manifest = replace(store.manifest, buckets=(flipped, *others))
    with pytest.raises(ModelError, match=r"buckets\.columns latent_flipped, expected latent alone"):
        refuse_unread_columns(store)
