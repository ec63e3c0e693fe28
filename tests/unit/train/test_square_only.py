"""The failure: diffusers' DiT gives a latent of 4x16 back as 8x8, without a word. Such buckets are refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bucketline.errors import UsageError
from bucketline.train.load import load
from tests.family_models import tiny_model
from tests.unit.train.tiny_run import facts

SQUARE, WIDE = ("train/16x16", 8, 8), ("train/16x24", 8, 12)
OF_CLASSES = {"latent_channels": 4, "text": {"class_labels": 1}, "num_classes": 3, "shows_padding": True}


def write_dit(folder: Path, **fields: Any) -> Path:
    tiny_model("dit").save_config(folder / "transformer")
    path = folder / "transformer" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text(encoding="utf-8")), **fields}), encoding="utf-8")
    return folder


def test_diffusers_dit_turns_what_is_not_square_into_a_square() -> None:
    """The control: were this fixed upstream, the refusal could go."""
    with torch.no_grad():
        labels = torch.zeros(1).long()
        out = tiny_model("dit", patch_size=1)(torch.zeros(1, 4, 4, 16), timestep=labels, class_labels=labels).sample
    assert out.shape[-2:] == (8, 8)


@pytest.mark.parametrize("name", [{}, {"_class_name": "Transformer2DModel"}], ids=["its name", "its older name"])
def test_a_store_with_a_bucket_that_is_not_square_is_refused_by_the_buckets_name(tmp_path: Path, name: dict[str, Any]) -> None:
    write_dit(tmp_path, **name)
    with pytest.raises(UsageError, match=r"the store has the size train/16x24, and the model is a DiTTransformer2DModel"):
        load(tmp_path, facts(**OF_CLASSES, latent_sizes=(SQUARE, WIDE)), seed=0)


def test_square_buckets_are_taken(tmp_path: Path) -> None:
    family, _ = load(write_dit(tmp_path), facts(**OF_CLASSES, latent_sizes=(SQUARE,)), seed=0)
    assert family.model_class == "DiTTransformer2DModel"
