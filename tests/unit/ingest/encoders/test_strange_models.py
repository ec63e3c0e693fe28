"""Model folders of strangers: code that is never run, names that are not a model's, and embeddings that are not finite."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from bucketline.errors import ModelError
from bucketline.ingest.encoders.model_folder import open_model
from bucketline.ingest.encoders.text.registry import load_caption_encoder
from bucketline.ingest.encoders.text_columns import TextSettings
from tests.commands import call
from tests.family_models import write_pipeline
from tests.kit import edit_json
from tests.models import SMALL, write_images

CPU = torch.device("cpu")


@pytest.fixture
def own(model: Path, tmp_path: Path) -> Path:
    """A model folder of this test's own."""
    return shutil.copytree(model, tmp_path / "model")


def spoil(weights: Path, name: str, value: float) -> None:
    """Set all values of one tensor."""
    tensors = load_file(weights)
    tensors[name].fill_(value)
    save_file(tensors, weights, metadata={"format": "pt"})


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e6])
def test_an_empty_caption_that_is_not_finite_is_refused_before_anything_is_written(
    value: float, own: Path, tmp_path: Path
) -> None:
    weights = own / "text_encoder" / "model.safetensors"
    spoil(weights, "encoder.layer.0.output.LayerNorm.bias", value)
    write_images(tmp_path / "photos", 4, captions=False)
    ran = call("ingest", "pack", tmp_path / "photos", tmp_path / "s", "--model", own, *SMALL)
    assert (ran.code, ran.out) == (1, "")
    assert ran.err.startswith(f"error: {own}: the empty caption's tokens are not finite as F16; ")
    assert "--text-dtype" in ran.err
    assert not (tmp_path / "s").exists()


def test_a_pooled_embedding_of_the_empty_caption_is_looked_at_as_well(tmp_path: Path) -> None:
    folder = write_pipeline(tmp_path / "model", "sdxl", force_zeros_for_empty_prompt=False)
    spoil(folder / "text_encoder_2" / "model.safetensors", "text_projection.weight", float("nan"))
    with pytest.raises(ModelError, match=r"the empty caption's pooled are not finite as F32"):
        load_caption_encoder(open_model(str(folder)), CPU, TextSettings(stored_dtype="F32"))


def test_an_empty_caption_that_its_pipeline_sets_to_zeros_is_taken_whatever_the_encoder_gives(tmp_path: Path) -> None:
    folder = write_pipeline(tmp_path / "model", "sdxl")
    spoil(folder / "text_encoder_2" / "model.safetensors", "text_projection.weight", float("nan"))
    assert load_caption_encoder(open_model(str(folder)), CPU, TextSettings()).encode([""])[0].is_finite


def asks_for_own_code(folder: Path, file: str, **automatic: Any) -> Path:
    """Have a part's JSON name a class of its own Python file, which leaves a mark where it is run; give the mark."""
    mark = folder.parent / "was-run"
    (folder / "own.py").write_text(f"open({str(mark)!r}, 'w').close()\n", encoding="utf-8")
    edit_json(folder / file, auto_map=automatic)
    return mark


@pytest.mark.parametrize("part", ["text_encoder", "tokenizer"])
@pytest.mark.parametrize("command", ["pack", "scan"])
def test_a_models_own_code_is_never_run_even_where_standard_input_says_yes(
    part: str, command: str, own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if part == "text_encoder":
        edit_json(own / part / "config.json", model_type="a_kind_of_its_own")
        mark = asks_for_own_code(own / part, "config.json", AutoConfig="own.Config", AutoModel="own.Model")
    else:
        edit_json(own / part / "tokenizer_config.json", tokenizer_class="OwnTokenizer")
        mark = asks_for_own_code(own / part, "tokenizer_config.json", AutoTokenizer=["own.Tokenizer", None])
    write_images(tmp_path / "photos", 2)
    places = (tmp_path / "photos", tmp_path / "s") if command == "pack" else (tmp_path / "photos",)
    monkeypatch.setattr("sys.stdin", io.StringIO("y\ny\ny\n"))
    ran = call("ingest", command, *places, "--model", own, *SMALL)
    assert not mark.exists()
    assert (ran.code, ran.out) == (1, "")
    assert ran.err.startswith(f"error: {own}: {part}/ requires custom code (auto_map), which is never run; ")
    assert len(ran.err.splitlines()) == 1


@pytest.mark.parametrize(
    "architectures",
    [*([name] for name in ("Trainer", "models", "set_seed", "NoSuchClass", "AutoTokenizer")), [5], "BertModel", [[]], {"a": 1}],
    ids=str,
)
def test_an_architecture_that_is_not_a_model_is_passed_over(architectures: object, own: Path, tmp_path: Path) -> None:
    """Only the kind of model says what to load then, as where no architecture is named."""
    edit_json(own / "text_encoder" / "config.json", architectures=architectures)
    write_images(tmp_path / "photos", 2)
    ran = call("ingest", "pack", tmp_path / "photos", tmp_path / "s", "--model", own, *SMALL, "--json").done()
    assert ran.json["packed"] == 2


@pytest.mark.parametrize("architecture", ["T5EncoderModel", "CLIPTextModel", "ViTModel"])
def test_an_architecture_that_does_not_suit_is_an_error_in_words(architecture: str, own: Path, tmp_path: Path) -> None:
    edit_json(own / "text_encoder" / "config.json", architectures=[architecture])
    write_images(tmp_path / "photos", 2)
    ran = call("ingest", "pack", tmp_path / "photos", tmp_path / "s", "--model", own, *SMALL)
    assert (ran.code, ran.out) == (1, "")
    assert ran.err.startswith(f"error: {own}: ")
    assert len(ran.err.splitlines()) == 1


def test_a_configuration_that_says_nothing_is_an_error_in_words(own: Path) -> None:
    (own / "text_encoder" / "config.json").write_text(json.dumps({"architectures": ["Trainer"]}), encoding="ascii")
    with pytest.raises(ModelError, match="its text encoder a Trainer, and how that encodes captions is not known"):
        load_caption_encoder(open_model(str(own)), CPU, TextSettings())
    with pytest.raises(ModelError, match=r"cannot be loaded"):
        load_caption_encoder(open_model(str(own)), CPU, TextSettings(is_plain=True))


INDEX = {"_class_name": "StableDiffusionPipeline", "vae": ["diffusers", "AutoencoderKL"]}


@pytest.mark.parametrize("command", ["pack", "scan"])
@pytest.mark.parametrize(
    ("part", "named", "found"),
    [("vae", "AutoencoderDC", "AutoencoderKL"), ("text_encoder", "BertModelWithProjection", "BertModel")],
)
def test_an_index_that_names_another_class_than_the_part_has_is_refused_before_anything_is_written(
    part: str, named: str, found: str, command: str, own: Path, tmp_path: Path
) -> None:
    (own / "model_index.json").write_text(json.dumps({**INDEX, part: ["its library", named]}), encoding="ascii")
    write_images(tmp_path / "photos", 2)
    places = (tmp_path / "photos", tmp_path / "s") if command == "pack" else (tmp_path / "photos",)
    ran = call("ingest", command, *places, "--model", own, *SMALL)
    assert (ran.code, ran.out) == (1, "")
    assert ran.err == (
        f"error: {own}: model_index.json names the class {named} for {part}/, and {part}/config.json {found}, expected the "
        "same; take both from one model\n"
    )
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize(
    ("named", "architecture"), [("Qwen3Model", "Qwen3ForCausalLM"), ("T5EncoderModel", "T5ForConditionalGeneration")]
)
def test_an_index_may_name_the_class_of_an_encoder_without_its_head(named: str, architecture: str, own: Path) -> None:
    edit_json(own / "text_encoder" / "config.json", architectures=[architecture])
    index = {**INDEX, "text_encoder": ["transformers", named], "text_encoder_2": [None, None]}
    (own / "model_index.json").write_text(json.dumps(index), encoding="ascii")
    assert open_model(str(own)).path == own


@pytest.mark.parametrize(
    ("part", "kept", "lacks"),
    [
        ("vae", "diffusion_pytorch_model.safetensors", "no config.json; it has diffusion_pytorch_model.safetensors"),
        ("text_encoder", "model.safetensors", "no config.json; it has model.safetensors"),
        ("tokenizer", "nothing", "no tokenizer_config.json; it has no file"),
        ("tokenizer", "tokenizer.json", "no tokenizer_config.json; it has tokenizer.json"),
        (
            "tokenizer",
            "tokenizer_config.json",
            "no vocabulary (tokenizer.json, vocab.json, vocab.txt, or a .model file); it has tokenizer_config.json",
        ),
    ],
)
def test_a_part_that_lacks_its_configuration_or_vocabulary_says_so(
    part: str, kept: str, lacks: str, own: Path, tmp_path: Path
) -> None:
    for file in (own / part).iterdir():
        if file.name != kept:
            file.unlink()
    write_images(tmp_path / "photos", 2)
    ran = call("ingest", "pack", tmp_path / "photos", tmp_path / "s", "--model", own, *SMALL)
    assert (ran.code, ran.out) == (1, "")
    assert ran.err == f"error: {own}: {part}/ has {lacks}; download or save the model again\n"
