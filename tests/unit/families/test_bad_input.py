"""A model that is not whole, or whose parts are of another, is refused by the commands before anything is written."""

from __future__ import annotations

import inspect
import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from diffusers.models.transformers.transformer_qwenimage21 import QwenImage21Rope

from bucketline.errors import UsageError
from bucketline.families.family import Family
from bucketline.families.registry import FAMILIES, family_named, takes_images
from bucketline.ingest.encoders.model_folder import open_model
from bucketline.ingest.encoders.text_columns import TextSettings
from bucketline.ingest.encoders.text_encoders import load_caption_encoder
from bucketline.model_file import index_path
from bucketline.store import Store
from bucketline.train import main as trainer
from tests.commands import Ran, call, called
from tests.family_models import FORMS, open_pipeline, write_pipeline
from tests.kit import edit_json, rewrite_manifest
from tests.models import png
from tests.unit.families.forms import Packed, ingest
from tests.unit.families.oracle import one_step

UNKNOWN = {"transformer": "StableAudioDiTModel", "unet": "Kandinsky3UNet"}
FLOW = "FlowMatchEulerDiscreteScheduler"


def train(packed: Packed, model: Path, output: Path, *more: object) -> Ran:
    asked = {"--store": packed.store, "--model": model, "--output-dir": output, "--batch-size": 2, "--max-steps": 1}
    return called(trainer.main, *(one for pair in asked.items() for one in pair), "--num-images", 0, *more)


def assert_refused(ran: Ran, output: Path, *words: str) -> None:
    """Check that a command was refused in one line with these words, and wrote nothing."""
    assert ran.code == 1, (ran.code, ran.out, ran.err)
    *before, said = ran.err.splitlines()
    assert said.startswith("error: "), ran.err
    assert not any(line.startswith(("error: ", "Traceback")) for line in before), ran.err
    assert ran.out == ""
    assert not output.exists(), sorted(output.rglob("*"))
    for word in words:
        assert word in said, (word, said)


def assert_not_packed(packed: Packed, model: Path, tmp_path: Path, *words: str, is_scanned: bool = False) -> None:
    """Check that pack refuses a model, and scan, unless it scans without what is wrong."""
    store = tmp_path / "store"
    assert_refused(ingest("pack", packed, model, store), store, *words)
    if not is_scanned:
        assert_refused(ingest("scan", packed, model), store, *words)


def assert_not_trained(packed: Packed, model: Path, tmp_path: Path, *words: str) -> None:
    assert_refused(train(packed, model, tmp_path / "run"), tmp_path / "run", *words)


@pytest.fixture
def model(packed: Packed, tmp_path: Path) -> Path:
    return shutil.copytree(packed.model, tmp_path / "model")


def name_class(model: Path, part: str, kind: str) -> None:
    library, _, *source = json.loads(index_path(model).read_bytes())[part]
    edit_json(index_path(model), **{part: [library, kind, *source]})


def others(family: type[Family]) -> Iterator[type[Family]]:
    """Yield families, the nearest in the alphabet first, in whose index a model of this one would be wrong."""
    at = FAMILIES.index(family)
    return (one for one in (*FAMILIES[at + 1 :], *FAMILIES) if one.parts and one.model_class != family.model_class)


def test_a_model_that_draws_from_images_is_neither_packed_with_nor_trained(packed: Packed, model: Path, tmp_path: Path) -> None:
    """By its index: such a model may be of the same class, and of as many channels, as the one of captions only."""
    name = FORMS[packed.form].pipeline
    for wrong in (name.replace("Pipeline", "FillPipeline"), name.replace("Pipeline", "ControlNetPipeline")):
        edit_json(index_path(model), _class_name=wrong)
        words = (
            str(model),
            f"the pipeline {wrong}, which draws from an image that is not a reference",
            f"take the model of a {name}",
        )
        assert_not_packed(packed, model, tmp_path, *words)
        assert_not_trained(packed, model, tmp_path, *words)


DRAWS_WITHOUT = {"Flux2Pipeline", "Flux2KleinPipeline", "Flux2KleinKVPipeline", "QwenImage21Pipeline", "ZImageOmniPipeline"}
"""Pipelines of captions that take images if they are given some."""
OF_OTHER_MODELS = {"SanaWMPipeline", "StableDiffusionGLIGENPipeline", "StableDiffusionGLIGENTextImagePipeline"}
"""Whose transformer or UNet is of another class or has other layers, as its configuration says."""


def test_the_pipelines_of_diffusers_that_take_an_image_are_those_that_are_refused() -> None:
    stems = tuple(family.pipelines[0].removesuffix("Pipeline") for family in FAMILIES)
    kinds = [name for name in dir(diffusers) if name.startswith(stems) and name.endswith("Pipeline") and "Modular" not in name]
    assert len(kinds) > len(FAMILIES)
    of_references = {family.pipelines[0] for family in FAMILIES if family.references is not None}
    for name in sorted({*kinds} - DRAWS_WITHOUT - OF_OTHER_MODELS - of_references):
        given = inspect.signature(getattr(diffusers, name).__call__).parameters
        if any(one in ("image", "control_image") for one in given):
            assert takes_images({"_class_name": name}), name
    for name in {family.pipelines[0] for family in FAMILIES} | DRAWS_WITHOUT:
        assert takes_images({"_class_name": name}) is None, name


@pytest.mark.parametrize("part", ["vae", "encoder", "tokenizer"])
def test_a_part_that_the_index_names_and_that_is_not_there_is_named(
    part: str, packed: Packed, model: Path, tmp_path: Path
) -> None:
    folder = {"encoder": packed.encoder, "tokenizer": packed.tokenizer}.get(part, part)
    shutil.rmtree(model / folder)
    there = ", ".join(sorted(path.name for path in model.iterdir() if path.is_dir()))
    words = (f"{model} lacks the part {folder}/; it has {there}; expected a model in diffusers' layout",)
    assert_not_packed(packed, model, tmp_path, *words, is_scanned=True)


def test_a_model_without_its_transformer_or_unet_is_not_trained(packed: Packed, model: Path, tmp_path: Path) -> None:
    shutil.rmtree(model / packed.family.folder)
    assert_not_trained(packed, model, tmp_path, f"{model} has neither unet/config.json nor transformer/config.json", "must be")


def test_a_vae_of_another_class_is_refused(packed: Packed, model: Path, tmp_path: Path) -> None:
    edit_json(model / "vae" / "config.json", _class_name="AutoencoderTiny")
    words = ("for vae/", "AutoencoderTiny", "expected the same; take both from one model")
    assert_not_packed(packed, model, tmp_path, *words)
    name_class(model, "vae", "AutoencoderTiny")
    assert_not_packed(packed, model, tmp_path, "vae/ is a AutoencoderTiny, expected AutoencoderKL or ", " a model ")
    found = "vae is not the VAE that the store was packed with: its class is AutoencoderTiny, the store has "
    assert_not_trained(packed, model, tmp_path, found, "pack the source")


def test_a_text_encoder_of_another_class_is_refused(packed: Packed, model: Path, tmp_path: Path) -> None:
    edit_json(model / packed.encoder / "config.json", architectures=["RoFormerModel"], model_type="roformer")
    words = (f"for {packed.encoder}/", f"{packed.encoder}/config.json RoFormerModel, expected the same; take both from one")
    assert_not_packed(packed, model, tmp_path, *words)
    name_class(model, packed.encoder, "RoFormerModel")
    kind = next(part.kind for part in packed.family.parts if part.encoder == packed.encoder)
    assert_not_packed(packed, model, tmp_path, f"which takes a {kind}Model", "RoFormerModel", " model")
    words = (f"{packed.encoder} is not the text encoder that the store was packed with: its config_hash is ", "pack the source")
    assert_not_trained(packed, model, tmp_path, *words)


def test_a_transformer_or_unet_of_another_class_is_refused(packed: Packed, model: Path, tmp_path: Path) -> None:
    family = packed.family
    path = model / family.folder / "config.json"
    foreign = next((one for one in others(family) if one.folder == family.folder), None)
    for kind in (UNKNOWN[family.folder], foreign.model_class if foreign else "UNet2DModel"):
        edit_json(path, _class_name=kind)
        words = (
            f"names the pipeline {FORMS[packed.form].pipeline}, and {family.folder}/config.json is a {kind}",
            f"expected {family.folder}/ with a {family.model_class} of that pipeline; take both from one model",
        )
        assert_not_packed(packed, model, tmp_path, *words)
        assert_not_trained(packed, model, tmp_path, *words, f"or remove {index_path(model).name}")
    index_path(model).unlink()
    edit_json(path, _class_name=f"{family.model_class}s")
    found = f"_class_name is '{family.model_class}s', expected one of "
    assert_not_trained(packed, model, tmp_path, found, f"the nearest is {family.folder}/ {family.model_class}")


def test_an_index_that_crosses_two_families_is_refused(packed: Packed, model: Path, tmp_path: Path) -> None:
    family = packed.family
    foreign = next(others(family)).pipelines[0]
    edit_json(index_path(model), _class_name=foreign)
    words = (f"names the pipeline {foreign}, and {family.folder}/config.json is a {family.model_class}", "take both from one")
    assert_not_packed(packed, model, tmp_path, *words)
    assert_not_trained(packed, model, tmp_path, *words)


def test_a_scheduler_of_another_kind_is_refused_unless_an_objective_is_named(
    packed: Packed, model: Path, tmp_path: Path
) -> None:
    is_flow = packed.family.scheduler.get("_class_name") == FLOW
    path = model / "scheduler" / "scheduler_config.json"
    for kind in ("FlowMatchHeunDiscreteScheduler", "EDMEulerScheduler", "AutoencoderKL", *["DDIMScheduler"] * is_flow):
        path.write_text(json.dumps({"_class_name": kind}), encoding="utf-8")
        words = (str(path), f"_class_name is {kind}, expected a ", FLOW, "take the scheduler published with ")
        assert_not_trained(packed, model, tmp_path, *words, *["or set --objective"] * is_flow)
    asked = train(packed, model, tmp_path / "run", "--objective", "flow")
    assert "trained 1 step" in asked.out, asked.err


def test_a_vae_of_other_channels_than_the_model_takes_is_refused(packed: Packed, model: Path, tmp_path: Path) -> None:
    family = packed.family
    path = model / family.folder / "config.json"
    channels = json.loads(path.read_bytes())["in_channels"]
    edit_json(path, in_channels=2 * channels)
    found = f"in_channels {2 * channels}, expected {channels}, since the latents of vae/ have 4 channels"
    assert_not_packed(packed, model, tmp_path, found, "take both from one model")
    found = f"in_channels is {2 * channels}, expected {channels}, since the store's latents"
    assert_not_trained(packed, model, tmp_path, found, "pack the source with")


def test_a_store_of_another_family_is_refused_though_it_is_as_wide(packed: Packed, tmp_path: Path) -> None:
    """By weights that were trained with other captions; a model that starts at random may learn them."""
    family, foreign = packed.family, next(others(packed.family))
    store = shutil.copytree(packed.store, tmp_path / "other.store")
    encoders = Store.open(store).manifest.encoders
    text = encoders["text_encoder"]
    assert isinstance(text, dict)
    assert text["family"] == family.name
    rewrite_manifest(store, encoders={**encoders, "text_encoder": {**text, "family": foreign.name}})
    alone = tmp_path / "model"  # without encoders, which would tell
    for part in (family.folder, "scheduler"):
        shutil.copytree(packed.model / part, alone / part)
    shutil.copy(index_path(packed.model), alone)
    words = (
        f"the weights are of the family {family.name}, and the store's captions were encoded by {foreign.pipelines[0]}, ",
        f"expected {family.pipelines[0]}: pack the source with this model's own encoders, or remove the weights",
    )
    there = replace(packed, store=store)
    assert_not_trained(there, alone, tmp_path, *words)
    for path in (alone / family.folder).glob("*.safetensors"):
        path.unlink()
    assert "trained 1 step" in train(there, alone, tmp_path / "run").out


# Captions that a family's pipeline or model does not take, or not to their end.

CPU = torch.device("cpu")
IMAGE = "a red <|image_pad|> cat"


@pytest.fixture(scope="module")
def qwenimage21(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pipeline(tmp_path_factory.mktemp("qwenimage21") / "model", "qwenimage21")


def encoder_of(folder: Path, **settings: Any) -> Any:
    return load_caption_encoder(open_model(str(folder)), CPU, TextSettings(stored_dtype="F32", **settings))


def test_a_token_that_stands_for_an_image_is_refused_in_a_caption_as_by_the_pipeline(qwenimage21: Path) -> None:
    captions = ("a red cat", IMAGE, "a <|video_pad|>")
    whole, *refused = encoder_of(qwenimage21).encode(captions)
    assert whole.refusal is None
    assert torch.equal(whole.tokens, encoder_of(qwenimage21).encode(["a red cat"])[0].tokens)
    pipeline = open_pipeline(qwenimage21, "qwenimage21")
    for caption, found in zip(captions[1:], refused, strict=True):
        assert "which stands for an image to QwenImage21Pipeline; remove it" in found.refusal
        with pytest.raises(ValueError, match="tokens in the text but no"):
            one_step(pipeline, [caption], height=64, width=96, true_cfg_scale=1.0)


def test_a_caption_is_refused_where_nothing_cuts_it_and_the_model_has_no_positions_for_it(qwenimage21: Path) -> None:
    encoder = encoder_of(qwenimage21)
    short, long = encoder.encode(["cat " * 4000, "cat " * 4096])
    assert short.refusal is None
    assert not short.is_truncated
    assert "tokens, and QwenImage21Pipeline takes up to 4096, uncut; shorten it" in long.refusal
    assert not long.cuts


def test_the_longest_caption_leaves_the_image_the_last_position_that_is_right() -> None:
    family = family_named("qwenimage21")
    assert family is not None
    last = family.parts[0].most_tokens
    assert last is not None
    (turns,) = QwenImage21Rope(10000, [2]).freqs  # of the first position's angle, 1
    is_right = [torch.allclose(turns[place], torch.polar(*torch.tensor([1.0, place]))) for place in (last, last + 1)]
    assert is_right == [True, False]


# With the chat around it; HiDream's pipeline gives its CLIPs 218 positions.
HIDREAM_CUTS = {"text_encoder": 218, "text_encoder_2": 218, "text_encoder_3": 512, "text_encoder_4": 512}


@pytest.mark.parametrize(
    ("family", "most", "cuts"), [("qwenimage", 1024, {"text_encoder": 1024 + 34}), ("hidream_image", 512, HIDREAM_CUTS)]
)
def test_no_more_tokens_are_kept_than_the_pipeline_would_give(
    family: str, most: int, cuts: dict[str, int], tmp_path: Path
) -> None:
    folder = write_pipeline(tmp_path / "model", family)
    with pytest.raises(UsageError, match=f"--max-tokens is {most + 1}, expected {most} or fewer"):
        encoder_of(folder, max_tokens=most + 1)
    encoder = encoder_of(folder, max_tokens=most)
    (found,) = encoder.encode(["cat " * 2 * most])
    assert len(found.tokens) == encoder.max_tokens == most
    assert {cut.encoder: cut.limit for cut in found.cuts} == cuts


@pytest.mark.parametrize("family", ["sd3", "flux", "chroma", "lumina2"])
def test_no_more_tokens_are_taken_than_the_pipelines_call_takes(family: str, tmp_path: Path) -> None:
    folder = write_pipeline(tmp_path / "model", family)
    pipeline = open_pipeline(folder, family)
    with pytest.raises(ValueError, match="`max_sequence_length` cannot be greater than 512"):
        one_step(pipeline, ["a red cat"], height=16, width=16, max_sequence_length=513)
    with pytest.raises(UsageError, match="--max-tokens is 513, expected 512 or fewer"):
        encoder_of(folder, max_tokens=513)


def test_pack_rejects_an_image_by_its_refused_caption(qwenimage21: Path, tmp_path: Path) -> None:
    images = tmp_path / "images"
    images.mkdir()
    for n, caption in enumerate(("a cat", IMAGE)):
        (images / f"{n}.png").write_bytes(png(64, 96, seed=n))
        (images / f"{n}.txt").write_text(caption, encoding="utf-8")
    asked = ("--model", qwenimage21, "--grid", "64x96", "--min-size-px", 8, "--json")
    ran = call("ingest", "pack", images, tmp_path / "s", *asked).done()
    assert ran.json["packed"] == 1
    assert ran.json["rejected_by_reason"] == {"caption that the model does not take": 1}
