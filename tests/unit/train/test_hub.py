"""Uploads by huggingface_hub's own client to a server on this machine, and the fields of model cards."""

from __future__ import annotations

import json
import logging
import shutil
import threading
from concurrent.futures import wait
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from huggingface_hub import ModelCard, constants

from bucketline.errors import UsageError
from bucketline.families.registry import FAMILIES
from bucketline.train.export import HubUpload, card_fields
from bucketline.train.run import train
from tests.hub_server import TOKEN, Hub, running_hub
from tests.unit.train.tiny_run import ALONE, config

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")  # huggingface_hub's of httpx


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with running_hub() as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)  # the server knows the older way to upload large files
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield hub


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def test_a_finished_run_is_on_the_hub_and_a_resumed_one_adds_a_commit(folder: Path, hub: Hub) -> None:
    asked = config(folder, max_steps=4, lora_rank=2, push_to_hub="me/photos", export_every=2)
    train(asked, ALONE)
    assert hub.is_private == {"me/photos": True}
    assert hub.commits == {"me/photos": ["4 steps"]}
    export = asked.output_dir / "exports" / "step-00000004"
    names = {path.name for path in export.iterdir()}
    assert names == {"README.md", "pytorch_lora_weights.safetensors", "kohya_lora.safetensors"}
    assert hub.files["me/photos"] == {name: (export / name).read_bytes() for name in names}
    train(replace(asked, max_steps=6, resume=True), ALONE)
    assert hub.commits["me/photos"] == ["4 steps", "6 steps"]


def test_a_hub_that_refuses_costs_warnings_and_no_run(
    folder: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_of_somebody_else")
    asked = config(folder, max_steps=2, push_to_hub="me/photos")
    assert train(asked, ALONE).steps_done == 2
    assert json.loads((asked.output_dir / "status.json").read_bytes())["state"] == "done"
    said = [line for line in warnings_in(caplog) if "me/photos" in line]
    export = asked.output_dir / "exports" / "step-00000002"
    assert len(said) == 3, "of the repository, of the upload, and what does it"
    assert said[0].startswith("--push-to-hub me/photos: HfHubHTTPError: Client error")
    assert said[2] == f"{export} is not uploaded: hf upload me/photos {export} does it"
    assert not hub.files


def test_a_run_without_a_token_is_told_how_to_have_one(
    tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    HubUpload("me/photos", lambda _: None).finish(lambda: False)
    assert "there is no token, so uploads fail until `hf auth login` or HF_TOKEN gives one" in caplog.text


def test_a_signal_ends_the_wait_for_an_upload(tmp_path: Path, hub: Hub, caplog: pytest.LogCaptureFixture) -> None:
    hub.answers_commits.clear()
    (tmp_path / "README.md").write_text("# a card", encoding="utf-8")
    upload = HubUpload("me/slow", lambda _: None)
    upload.push(tmp_path, "1 step")
    stopping = threading.Event()
    asked_for = threading.Timer(0.3, stopping.set)
    asked_for.start()
    upload.finish(stopping.is_set)
    assert "is not uploaded" in caplog.text
    hub.answers_commits.set()
    assert upload._pushed is not None
    wait([upload._pushed[1]], 30)
    assert hub.commits["me/slow"] == ["1 step"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"push_to_hub": "https://me:secret@host/a"}, "--push-to-hub is 'https://host/a', expected the name of a repository"),
        ({"push_to_hub": "a/b/c"}, "--push-to-hub is 'a/b/c', expected the name of a repository"),
        ({"export_every": 0}, "--export-every is 0"),
    ],
)
def test_options_of_exports_that_cannot_work_are_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        config(tmp_path, **options)


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
