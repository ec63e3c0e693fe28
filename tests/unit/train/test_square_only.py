"""The failure: diffusers' DiT gives a latent of 4x16 back as 8x8, without a word. Such buckets are refused by name."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch

from bucketline.errors import ModelError, UsageError
from bucketline.train.families.square_only import refuse_unsquare_buckets
from tests.building import make_store, samples_of

if TYPE_CHECKING:
    from pathlib import Path

    from bucketline.store import Store


def write_dit(folder: Path, **fields: Any) -> None:
    (folder / "transformer").mkdir()
    config = {"_class_name": "DiTTransformer2DModel", **fields}
    (folder / "transformer" / "config.json").write_text(json.dumps(config), encoding="ascii")


def test_diffusers_dit_turns_what_is_not_square_into_a_square() -> None:
    """The control: were this mended upstream, the refusal could go."""
    from diffusers import DiTTransformer2DModel

    kind: Any = DiTTransformer2DModel
    model = kind(
        num_attention_heads=1, attention_head_dim=8, in_channels=4, num_layers=1, sample_size=8, patch_size=1, norm_num_groups=1
    )
    with torch.no_grad():
        out = model(torch.zeros(1, 4, 4, 16), timestep=torch.zeros(1).long(), class_labels=torch.zeros(1).long()).sample
    assert out.shape[-2:] == (8, 8)


def test_a_store_with_a_bucket_that_is_not_square_is_refused_by_the_buckets_name(tmp_path: Path, store: Store) -> None:
    write_dit(tmp_path)
    with pytest.raises(UsageError, match=r"the store has the size train/64x128, and the model is a DiTTransformer2DModel"):
        refuse_unsquare_buckets(tmp_path, store.buckets())


def test_square_buckets_and_other_models_are_taken(tmp_path: Path, store: Store) -> None:
    refuse_unsquare_buckets(tmp_path, store.buckets())
    write_dit(tmp_path)
    square = make_store(tmp_path / "square.store", samples_of({"train/64x64": 3}, "a/"))
    refuse_unsquare_buckets(tmp_path, square.buckets())
    (tmp_path / "transformer" / "config.json").write_text('{"_class_name": "SD3Transformer2DModel"}', encoding="ascii")
    refuse_unsquare_buckets(tmp_path, store.buckets())


def test_a_configuration_that_cannot_be_read_is_named(tmp_path: Path, store: Store) -> None:
    (tmp_path / "model_index.json").write_text("{", encoding="ascii")
    with pytest.raises(ModelError, match=r"model_index\.json cannot be read as JSON"):
        refuse_unsquare_buckets(tmp_path, store.buckets())
