"""A model whose pipeline is not known is refused by name, by each command that would encode its captions."""

from __future__ import annotations

import inspect
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from bucketline.errors import ModelError
from bucketline.families.registry import FAMILIES, family_of_pipeline
from bucketline.ingest.encoders.model_folder import open_model
from bucketline.ingest.encoders.text_encoders import text_family_of
from bucketline.store import Store
from tests.commands import call
from tests.models import write_files, write_images

NOVEL = {
    "_class_name": "NovelImagePipeline",
    "text_encoder": ["transformers", "BertModel"],
    "vae": ["diffusers", "AutoencoderKL"],
}
ASKED = ("--grid", "16x16", "--min-size-px", 8)
PIPELINES = sorted(name for family in FAMILIES if family.parts for name in family.pipelines)


def named(model: Path, folder: Path, **index: object) -> Path:
    """Copy a model, and name its pipeline."""
    shutil.copytree(model, folder)
    (folder / "model_index.json").write_text(json.dumps({**NOVEL, **index}), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def novel(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a pipeline that nobody knows."""
    return named(model, tmp_path_factory.mktemp("novel") / "model")


def test_pack_scan_and_dry_run_refuse_it_and_plain_packs_it(novel: Path, tmp_path: Path) -> None:
    write_images(tmp_path / "images", 2)
    asked = (*ASKED, "--model", novel)
    for command in (
        ("pack", tmp_path / "images", tmp_path / "s", *asked),
        ("pack", tmp_path / "images", tmp_path / "s", *asked, "--dry-run"),
        ("scan", tmp_path / "images", *asked),
    ):
        ran = call("ingest", *command)
        assert ran.code == 1, ran.out
        for word in ("NovelImagePipeline", "StableDiffusionXLPipeline", "FluxPipeline", "--text plain"):
            assert word in ran.err
        assert not (tmp_path / "s" / "manifest.json").exists()
        meant = call("ingest", *command, "--text", "plain").done()
        assert "if that is what the model takes" not in meant.out
        shutil.rmtree(tmp_path / "s", ignore_errors=True)


def test_a_store_remembers_that_plain_was_meant_and_its_prompts_are_plain(novel: Path, tmp_path: Path) -> None:
    write_images(tmp_path / "images", 2)
    asked = ("ingest", "pack", tmp_path / "images", tmp_path / "s", *ASKED, "--model", novel)
    assert call(*asked, "--text", "plain").code == 0
    assert 'text "plain"' in call("store", "info", tmp_path / "s").out
    (tmp_path / "prompts.txt").write_text("a cat\n", encoding="utf-8")
    call("ingest", "prompts", tmp_path / "prompts.txt", tmp_path / "s", "--model", novel).done()
    write_images(tmp_path / "images", 3)
    assert "--text plain" in call(*asked).done().out  # there is an image to encode now
    assert len(Store.open(tmp_path / "s").manifest.shards) == 2


def test_a_model_that_names_no_pipeline_says_what_its_captions_became(model: Path, tmp_path: Path) -> None:
    write_images(tmp_path / "images", 2)
    ran = call("ingest", "pack", tmp_path / "images", tmp_path / "s", *ASKED, "--model", model).done()
    assert "captions are the last hidden state of a BertModel" in ran.out


LLAMA, QWEN = ["LlamaForCausalLM"], ["Qwen2_5_VLForConditionalGeneration"]
OF_LLAMA = {"_class_name": "StableDiffusionPipeline", "text_encoder": ["transformers", "LlamaModel"]}
TWO = {"text_encoder_2": ["transformers", "BertModel"]}
REFUSED: list[tuple[dict[str, Any] | None, dict[str, dict[str, Any]], str]] = [  # an index, parts' configurations, and words
    ({"_class_name": "StableDifusionXLPipeline"}, {}, "the nearest is StableDiffusionXLPipeline"),
    ({"_class_name": "HunyuanDiTPipeline", **TWO}, {}, "its pipeline is HunyuanDiTPipeline.*has several text encoders"),
    (OF_LLAMA, {"text_encoder": {"architectures": ["LlamaModel"]}}, "its text encoder a LlamaModel"),
    (None, {"transformer": {"_class_name": "StableAudioDiTModel"}}, "its transformer is a StableAudioDiTModel"),
    (None, {"unet": {"_class_name": "Kandinsky3UNet"}}, "its unet is a Kandinsky3UNet"),
    (None, {"text_encoder": {"architectures": QWEN}}, "a Qwen2_5_VLForConditionalGeneration"),
    (None, {"text_encoder_2": {"architectures": LLAMA}}, "several text encoders"),
    (None, {"text_encoder_4": {"architectures": LLAMA}}, "several text encoders"),
]


@pytest.mark.parametrize(("index", "parts", "words"), REFUSED)
def test_a_pipeline_or_part_that_is_not_known_is_refused_by_name(
    index: dict[str, Any] | None, parts: dict[str, dict[str, Any]], words: str, model: Path, tmp_path: Path
) -> None:
    folder = named(model, tmp_path / "model", **index or {})
    if index is None:
        (folder / "model_index.json").unlink()
    write_files(folder, {f"{part}/config.json": json.dumps(config) for part, config in parts.items()})
    with pytest.raises(ModelError, match=words):
        text_family_of(open_model(str(folder)))


def test_plain_is_refused_of_several_text_encoders(model: Path, tmp_path: Path) -> None:
    folder = named(model, tmp_path / "model", **TWO)
    with pytest.raises(ModelError, match="has several text encoders"):
        text_family_of(open_model(str(folder)), is_plain=True)
    assert text_family_of(open_model(str(model)), is_plain=True) is None


@pytest.mark.parametrize("name", PIPELINES)
def test_a_known_pipeline_encodes_prompts_by_the_same_code_as_its_familys(name: str) -> None:
    import diffusers

    def code(pipeline: str) -> list[str]:
        methods = ("encode_prompt", "_get_clip_prompt_embeds", "_get_t5_prompt_embeds")
        found = (getattr(getattr(diffusers, pipeline), method, None) for method in methods)
        return ["" if method is None else inspect.getsource(method).rpartition('"""')[2] for method in found]

    family = family_of_pipeline(name)
    assert family is not None
    assert code(name) == code(family.pipelines[0])
