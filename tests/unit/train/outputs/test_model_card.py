"""The fields of model cards, as huggingface_hub's own loader reads them."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import pytest
from huggingface_hub import ModelCard

from bucketline.families.registry import FAMILIES
from bucketline.train.outputs.model_card import card_fields
from bucketline.train.run import train
from tests.unit.train.tiny_run import ALONE, config

if TYPE_CHECKING:
    from pathlib import Path

LICENSE = {"license": "other", "license_name": "flux-1-dev", "license_link": "LICENSE.md"}
CARD = """---
base_model: someone/an-earlier-model
datasets: [someone/images]
license: other
license_name: flux-1-dev
license_link: LICENSE.md
tags: [text-to-image]
---
# A model
"""


def fields_of(card: Path | str) -> dict[str, Any]:
    """Return the fields that a card has."""
    loaded = ModelCard(card) if isinstance(card, str) else ModelCard.load(card)
    return {name: value for name, value in vars(loaded.data).items() if value is not None}


def test_a_run_from_a_hubs_model_names_it_and_its_licence_also_when_it_is_trained_on(folder: Path) -> None:
    cached = folder / "hub" / "models--black-forest-labs--FLUX.1-dev" / "snapshots" / "abc"
    shutil.copytree(folder / "model", cached)
    (cached / "README.md").write_text(CARD, encoding="utf-8")
    first = train(config(folder, model=cached, max_steps=1), ALONE).checkpoint
    wanted = {
        **LICENSE,
        "library_name": "diffusers",
        "pipeline_tag": "text-to-image",
        "base_model": "black-forest-labs/FLUX.1-dev",
        "base_model_relation": "finetune",
        "tags": ["diffusers-training", "sd", "bucketline"],
    }
    assert fields_of(first / "README.md") == wanted
    again = train(config(folder, model=first, max_steps=1, output_dir=folder / "again", lora_rank=2), ALONE).checkpoint
    of_adapters = {"base_model_relation": "adapter", "tags": ["diffusers-training", "sd", "lora", "bucketline"]}
    assert fields_of(again / "README.md") == {**wanted, **of_adapters}


@pytest.mark.parametrize("card", [None, "# no fields", "---\n- a\n- list\n---\n", "---\n: {\n---\n", "---\nlicense:\n---\n"])
def test_what_is_not_known_is_left_out(tmp_path: Path, card: str | None) -> None:
    if card is not None:
        (tmp_path / "README.md").write_text(card, encoding="utf-8")
    by_name = {one.name: one for one in FAMILIES}
    found = fields_of(card_fields(tmp_path, by_name["class_labels"], adapters=True))
    assert found == {"library_name": "peft", "tags": ["diffusers-training", "class-labels", "lora", "bucketline"]}


def test_a_single_file_takes_no_licence_of_the_folder_that_it_is_in_unless_a_hub_put_it_there(tmp_path: Path) -> None:
    family = next(one for one in FAMILIES if one.name == "flux")
    cached = tmp_path / "models--someone--files" / "snapshots" / "abc"
    for folder in (tmp_path / "downloads", cached):
        folder.mkdir(parents=True)
        (folder / "README.md").write_text(CARD, encoding="utf-8")
        (folder / "flux.safetensors").touch()
    loose = fields_of(card_fields(tmp_path / "downloads" / "flux.safetensors", family, adapters=False))
    assert not loose.keys() & {*LICENSE, "base_model"}
    kept = fields_of(card_fields(cached / "flux.safetensors", family, adapters=False))
    assert kept["base_model"] == "someone/files"
    assert {name: kept[name] for name in LICENSE} == LICENSE
