"""What a model's hash stands for, and what is taken for a hub's name."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from bucketline.errors import ModelError
from bucketline.ingest.encoders.loaded import hash_of_weights, refuse_incomplete
from bucketline.ingest.encoders.model_folder import open_model
from bucketline.store.provenance import config_hash

if TYPE_CHECKING:
    from pathlib import Path


def test_a_weights_hash_changes_with_any_weight_and_with_a_name_and_with_nothing_else() -> None:
    torch.manual_seed(0)
    module = torch.nn.Linear(3, 2)
    before = hash_of_weights(module)
    assert hash_of_weights(module.requires_grad_(requires_grad=False)) == before
    with torch.no_grad():
        module.weight[1, 2] += 1e-6
    assert hash_of_weights(module) != before


def test_a_config_hash_leaves_out_what_changes_from_machine_to_machine() -> None:
    config = {"a": 1, "block": [2, 3], "_name_or_path": "x", "transformers_version": "5.0"}
    assert config_hash(config) == config_hash({"block": [2, 3], "a": 1, "_diffusers_version": "0.3", "_name_or_path": "y"})
    assert config_hash(config) != config_hash({**config, "a": 2})


def test_a_config_hash_does_not_follow_the_order_of_a_librarys_sets(tmp_path: Path) -> None:
    """diffusers keeps `_use_default_values`, a list made from a set, in a loaded configuration."""
    assert config_hash({"a": 1, "_use_default_values": ["x", "y"]}) == config_hash({"a": 1, "_use_default_values": ["y", "x"]})


def test_weights_that_are_missing_are_refused_by_name_but_for_those_that_nothing_reads() -> None:
    assert refuse_incomplete("text_encoder/", {"missing_keys": ["pooler.dense.bias"]}, unread="pooler.") == {
        "pooler.dense.bias"
    }
    with pytest.raises(ModelError, match=r"text_encoder/ is not whole: 1 of its weights are missing, such as layer\.0\.weight"):
        refuse_incomplete("text_encoder/", {"missing_keys": ["layer.0.weight", "pooler.x"]}, unread="pooler.")
    with pytest.raises(ModelError, match="mismatched"):
        refuse_incomplete("vae/", {"mismatched_keys": [("conv.weight", (1,), (2,))]})


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
