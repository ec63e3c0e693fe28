"""What a model's hash stands for, and what is taken for a hub's name."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from bucketline.errors import ModelError
from bucketline.ingest.encoders.arrays import weights_of
from bucketline.ingest.encoders.model_folder import open_model
from bucketline.store.provenance import config_hash, weights_hash

if TYPE_CHECKING:
    from pathlib import Path


def test_a_weights_hash_changes_with_any_weight_and_with_a_name_and_with_nothing_else() -> None:
    torch.manual_seed(0)
    module = torch.nn.Linear(3, 2)
    before = weights_hash(weights_of(module))
    assert weights_hash(weights_of(module.requires_grad_(requires_grad=False))) == before
    with torch.no_grad():
        module.weight[1, 2] += 1e-6
    assert weights_hash(weights_of(module)) != before


def test_a_config_hash_leaves_out_what_changes_from_machine_to_machine() -> None:
    config = {"a": 1, "block": [2, 3], "_name_or_path": "x", "transformers_version": "5.0"}
    assert config_hash(config) == config_hash({"block": [2, 3], "a": 1, "_diffusers_version": "0.3", "_name_or_path": "y"})
    assert config_hash(config) != config_hash({**config, "a": 2})


def test_a_name_of_one_slash_is_taken_for_a_hubs_and_anything_else_for_a_path(tmp_path: Path) -> None:
    assert open_model(str(tmp_path)).is_local
    assert not open_model("owner/model").is_local
    for name in ("model", "./owner/model", "/owner/model", "~/model", "a/b/c"):
        with pytest.raises(ModelError, match="is not a folder; expected a model folder in diffusers' layout"):
            open_model(name)


def test_a_config_that_is_no_json_is_named(tmp_path: Path) -> None:
    (tmp_path / "unet").mkdir()
    assert open_model(str(tmp_path)).config("vae") is None
    (tmp_path / "unet" / "config.json").write_text("{", encoding="ascii")
    with pytest.raises(ModelError, match=r"unet/config.json is not JSON"):
        open_model(str(tmp_path)).config("unet")
