"""A run that encodes nothing loads no weights, and encoders other than the store's never write a row."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from bucketline.errors import UsageError
from bucketline.ingest.encoders.model_folder import ModelFolder
from bucketline.ingest.pipeline import load_encoders
from bucketline.ingest.pipeline.device import chosen_device
from bucketline.store import Store
from bucketline.store.verify.verify import verify
from tests.commands import spawn
from tests.kit import edit_json, tree
from tests.models import SMALL, pack, png, write_images, write_model

HEAVY = {"torch", "diffusers", "transformers", "huggingface_hub", "matplotlib", "rich", "PIL.ImageDraw"}


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    """A folder with `photos` and the store `s` of them."""
    folder = tmp_path_factory.mktemp("packed")
    write_images(folder / "photos", 6)
    assert pack(folder / "photos", folder / "s", model).code == 0
    return folder


@pytest.fixture
def again(packed: Path, tmp_path: Path) -> Path:
    """A copy of `packed` to change."""
    return shutil.copytree(packed, tmp_path / "again")


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Note each time that encoders are loaded."""
    names, own = [], load_encoders.load_text_encoder

    def noted(config: Any, model: ModelFolder, device: Any) -> Any:
        names.append(model.name)
        return own(config, model, device)

    monkeypatch.setattr(load_encoders, "load_text_encoder", noted)
    return names


def test_a_run_again_loads_neither_the_encoders_nor_the_libraries(packed: Path, model: Path) -> None:
    asked = ["pack", packed / "photos", packed / "s", "--model", model, *SMALL, "--json"]
    code = (
        f"import sys\nfrom bucketline.ingest.cli import main\nmain({[*map(str, asked)]})\nprint(*sys.modules, file=sys.stderr)"
    )
    ran = spawn([sys.executable, "-P", "-c", code])
    assert (ran.code, ran.json["unchanged"], ran.json["packed"]) == (0, 6, 0)
    assert not HEAVY & {*ran.err.split()}


def test_the_encoders_are_loaded_when_an_image_or_caption_is_to_be_encoded(again: Path, model: Path, loads: list[str]) -> None:
    assert pack(again / "photos", again / "s", model).json["unchanged"] == 6
    (again / "photos" / "a" / "bad.png").write_bytes(b"no image")
    assert pack(again / "photos", again / "s", model).json["rejected"] == 1
    assert loads == []
    (again / "photos" / "a" / "bad.png").write_bytes(png(30, 40))
    torch.backends.cuda.enable_cudnn_sdp(True)
    assert pack(again / "photos", again / "s", model).json["packed"] == 1
    assert not torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]
    (again / "photos" / "a" / "bad.txt").write_text("a cat", encoding="ascii")
    assert pack(again / "photos", again / "s", model).json["latents_kept"] == 1
    assert len(loads) == 2
    assert verify(Store.open(again / "s"), lambda _: None).strays == ()
    changed = pack(again / "photos", again / "s", model, "--recaption", "--caption-template", "red")
    assert (changed.json["packed"], len(loads)) == (7, 3)
    assert "--dtype" not in changed.err
    refused = pack(again / "photos", again / "s", model, "--dtype", "F32")
    assert "--dtype fp16, this run has --dtype fp32" in refused.err
    assert len(loads) == 3, "options are compared without weights"


def test_a_run_that_encodes_nothing_says_what_it_did_not_compare(again: Path, model: Path) -> None:
    ran = pack(again / "photos", again / "s", model)
    assert (ran.code, ran.json["unchanged"]) == (0, 6)
    note = "there was nothing to encode, so no weights were loaded; not compared with the store: the encoders' weights, "
    assert [one for one in ran.json["notes"] if note in one]
    (again / "photos" / "new.png").write_bytes(png(30, 40))
    assert not [one for one in pack(again / "photos", again / "s", model).json["notes"] if note in one]


def test_a_model_of_other_weights_is_refused_before_a_row_is_written(again: Path, tmp_path: Path) -> None:
    other, store = write_model(tmp_path / "other", seed=1), again / "s"
    assert pack(again / "photos", store, other).json["unchanged"] == 6, "nothing is encoded, nothing is loaded"
    before = tree(store)
    (again / "photos" / "new.png").write_bytes(png(30, 40))
    refused = pack(again / "photos", store, other)
    assert (refused.code, refused.out) == (1, "")
    assert "was made with other options than this run has" in refused.err
    assert "weights_hash" in refused.err
    assert tree(store) == before


@pytest.mark.parametrize(("part", "field"), [("vae", "scaling_factor"), ("text_encoder", "layer_norm_eps")])
def test_another_configuration_is_refused_though_nothing_is_encoded(
    part: str, field: str, again: Path, tmp_path: Path, loads: list[str]
) -> None:
    other = write_model(tmp_path / "other")
    edit_json(other / part / "config.json", **{field: 0.5})
    for more in ((), ("--dry-run",)):
        refused = pack(again / "photos", again / "s", other, *more).fails(f"encoders.{part}.config_hash")
        assert refused.out == ""
    assert loads == []


def test_encoders_are_loaded_once_for_all_sources_of_a_file(
    packed: Path, model: Path, tmp_path: Path, loads: list[str]
) -> None:
    write_images(tmp_path / "more", 2)
    file = tmp_path / "data.toml"
    file.write_text(f'[[source]]\npath = "{packed / "photos"}"\n[[source]]\npath = "{tmp_path / "more"}"\n', encoding="ascii")
    assert pack(file, tmp_path / "data", model).code == 0
    assert len(loads) == 1
    ran = pack(file, tmp_path / "data", model)
    assert [source["unchanged"] for source in ran.json["sources"].values()] == [6, 2]
    assert len(loads) == 1
    write_images(tmp_path / "more", 3)
    ran = pack(file, tmp_path / "data", model)
    assert [source["packed"] for source in ran.json["sources"].values()] == [0, 3]
    assert len(loads) == 2


# The device that a rank encodes on.


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


def test_more_ranks_than_gpus_share_them(two_gpus: None) -> None:
    assert [chosen_device("auto", rank).index for rank in range(4)] == [0, 1, 0, 1]


def test_a_gpu_that_is_not_there_is_refused_with_those_that_are(two_gpus: None) -> None:
    assert chosen_device("cuda:1", 0).index == 1
    with pytest.raises(UsageError, match="this machine has 2 CUDA devices, expected cuda:0 to cuda:1"):
        chosen_device("cuda:7", 0)
