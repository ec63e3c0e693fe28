"""Captions encoded with their sample's images, compared with the families' own diffusers pipelines called row by row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from PIL import Image

from bucketline.errors import ModelError, UsageError
from bucketline.families.registry import FAMILIES, family_named
from bucketline.families.seen import SeenText
from bucketline.ingest.encoders.model_folder import open_model
from bucketline.ingest.encoders.text_columns import Embedding, SeeingEncoder, TextSettings
from bucketline.ingest.encoders.text_encoders import load_caption_encoder
from bucketline.store import Column, LatentColumn, RaggedGroup, Store, StoreWriter
from bucketline.store.format.block import IS_IMAGE, SEEN_EMPTY, SEEN_IMAGES, TOKENS
from bucketline.store.prompt_file import decode_prompts
from tests import language_models
from tests.commands import call

CPU = torch.device("cpu")
TEXTS = ("a red cat", "The GREEN house of dogs, <|vision_end|> and {braces} ", "a blue dog of the house " * 40)
KINDS: dict[str, tuple[str, str, int]] = {  # pipeline, its encoder, the fewest images
    "qwenimage_edit": ("QwenImageEditPipeline", "Qwen2_5_VLForConditionalGeneration", 1),
    "qwenimage_edit_plus": ("QwenImageEditPlusPipeline", "Qwen2_5_VLForConditionalGeneration", 0),
    "qwenimage21": ("QwenImage21Pipeline", "Qwen3VLForConditionalGeneration", 0),
}
CASES = [
    (family, count) for family, (_, _, least) in KINDS.items() for count in range(least, 2 if family == "qwenimage_edit" else 4)
]


def parts_of(family: str) -> tuple[Any, Any]:
    torch.manual_seed(0)
    if family == "qwenimage21":
        return language_models.qwen3_vl().eval(), language_models.qwen3_vl_processor()
    return language_models.qwen25_vl(edits=True).eval(), language_models.qwen_edit_processor()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    for family, (pipeline, encoder, _) in KINDS.items():
        text, processor = parts_of(family)
        text.save_pretrained(root / family / "text_encoder")
        processor.save_pretrained(root / family / "processor")
        index = {"_class_name": pipeline, "text_encoder": ["transformers", encoder], "processor": ["transformers", "X"]}
        (root / family / "model_index.json").write_text(json.dumps(index), encoding="utf-8")
    return {family: root / family for family in KINDS}


def pipeline_of(family: str) -> Any:
    """Return diffusers' pipeline of the parts in `folders`."""
    import diffusers

    text, processor = parts_of(family)
    more = {} if family == "qwenimage21" else {"tokenizer": processor.tokenizer}
    kind: Any = getattr(diffusers, KINDS[family][0])
    return kind(scheduler=None, vae=None, transformer=None, text_encoder=text, processor=processor, **more)


def load(folder: Path, **settings: Any) -> SeeingEncoder:
    encoder = load_caption_encoder(
        open_model(str(folder)), CPU, TextSettings(**{"stored_dtype": "F32", "sees_images": True, **settings})
    )
    assert encoder.sees_images
    return cast("SeeingEncoder", encoder)


def images(count: int) -> list[Image.Image]:
    rng = np.random.default_rng(count)
    sizes = ((96, 160), (128, 64), (96, 96))
    return [Image.fromarray(rng.integers(0, 256, (*size, 3), dtype=np.uint8)) for size in sizes[:count]]


@torch.inference_mode()
def asked(pipeline: Any, text: str, given: list[Image.Image], is_image: torch.Tensor) -> torch.Tensor:
    """Return what the pipeline gives its model of a text, [T, D]."""
    whole, mask, *others = pipeline.encode_prompt(text, image=given or None, device=CPU)
    assert mask is None
    if others:  # Qwen-Image 2.1's says which positions are of images
        assert torch.equal(others[0][0], torch.cat([is_image, torch.zeros(whole.shape[1] - len(is_image)).bool()]))
    found: torch.Tensor = whole[0]
    return found


@pytest.mark.parametrize(("family", "count"), CASES)
def test_the_images_part_and_each_captions_own_are_together_what_the_pipeline_returns(
    family: str, count: int, folders: dict[str, Path]
) -> None:
    """To the bit, of the empty caption too, which is the negative prompt.

    Only the images' part of a sample's other captions differs from their own by the rounding of sums of another length.
    """
    encoder, pipeline, given = load(folders[family]), pipeline_of(family), images(count)
    for text in ("", *TEXTS):
        alone = encoder.encode_seen([text], given)
        whole = asked(pipeline, text, given, alone.is_image)
        assert torch.equal(torch.cat([alone.images, alone.captions[0].tokens]), whole), text
    seen = encoder.encode_seen(TEXTS, given)
    for text, own in zip(("", *TEXTS), (seen.empty, *seen.captions), strict=True):
        whole, start = asked(pipeline, text, given, seen.is_image), len(seen.images)
        assert torch.equal(own.tokens, whole[start:])
        assert torch.allclose(seen.images, whole[:start], rtol=0, atol=5e-5)
        assert text != TEXTS[0] or torch.equal(seen.images, whole[:start])
        assert (own.is_finite, own.refusal, own.cuts) == (True, None, ())
    patches = [pipeline.processor.image_processor.get_number_of_image_patches(one.height, one.width) // 4 for one in given]
    assert int(seen.is_image.sum()) == sum(patches)
    assert len(seen.images) == len(seen.is_image)


@pytest.mark.parametrize(("family", "count"), CASES)
def test_the_images_part_does_not_depend_on_the_captions_and_the_captions_on_the_images(
    family: str, count: int, folders: dict[str, Path]
) -> None:
    encoder, given = load(folders[family]), images(count)
    first, other = encoder.encode_seen(TEXTS[:1], given), encoder.encode_seen(TEXTS[1:], given)
    assert torch.allclose(first.images, other.images, rtol=0, atol=5e-5)
    assert torch.equal(first.empty.tokens, other.empty.tokens)
    if count:
        turned = encoder.encode_seen(TEXTS[:1], [one.transpose(Image.Transpose.FLIP_LEFT_RIGHT) for one in given])
        assert not torch.equal(first.images, turned.images)
        assert not torch.equal(first.captions[0].tokens, turned.captions[0].tokens)


@pytest.mark.parametrize("family", KINDS)
def test_tokens_of_images_are_counted_from_the_configuration(family: str, folders: dict[str, Path]) -> None:
    model, encoder = open_model(str(folders[family])), load(folders[family])
    kind = family_named(family)
    assert kind is not None
    assert issubclass(kind, SeenText)
    pixels = model.pixels("processor")
    for count in (1, 3) if family != "qwenimage_edit" else (1,):
        given = images(count)
        found = len(encoder.encode_seen((), given).images)
        expected = kind.seen_tokens(pixels, [(one.height, one.width) for one in given])
        # the tiny tokenizer has more tokens for `<image1>`
        assert abs(found - expected) <= 8 * count if family == "qwenimage21" else found == expected


def test_families_whose_text_sees_images_are_those_that_say_so() -> None:
    seeing = [one for one in FAMILIES if one.references is not None and one.references.text_sees]
    assert seeing == [one for one in FAMILIES if issubclass(one, SeenText)]


def test_a_processor_saved_as_published_is_read_like_one_that_transformers_5_saved(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    folder = folders["qwenimage_edit"]
    for file in folder.rglob("*.*"):
        if file.name != "processor_config.json":
            (tmp_path / file.relative_to(folder)).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / file.relative_to(folder)).write_bytes(file.read_bytes())
    config = {"image_processor_type": "Qwen2VLImageProcessor", "processor_class": "Qwen2_5_VLProcessor", "patch_size": 14}
    config |= {"min_pixels": 3136, "max_pixels": 12845056}
    with pytest.raises(ModelError, match=r"processor/ has no preprocessor_config\.json"):
        load(tmp_path)
    (tmp_path / "processor" / "preprocessor_config.json").write_text(json.dumps(config), encoding="utf-8")
    assert load(tmp_path).provenance == load(folder).provenance
    config["max_pixels"] = 3136
    (tmp_path / "processor" / "preprocessor_config.json").write_text(json.dumps(config), encoding="utf-8")
    assert load(tmp_path).provenance != load(folder).provenance
    config["image_processor_type"] = "CLIPImageProcessor"
    (tmp_path / "processor" / "preprocessor_config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(ModelError, match="CLIPImageProcessor, expected a Qwen2VLImageProcessor"):
        load(tmp_path)


@pytest.mark.parametrize("family", KINDS)
def test_a_caption_that_stands_for_an_image_or_is_too_long_is_refused_and_the_others_are_not(
    family: str, folders: dict[str, Path]
) -> None:
    encoder, given = load(folders[family]), images(1)
    most = encoder.max_tokens - (17 if family == "qwenimage21" else 0)  # which images take of its model's positions
    bad = ("a <|image_pad|>", "<|video_pad|>", "a " * (most + 1))
    seen = encoder.encode_seen((*bad, TEXTS[0]), given)
    assert "stands for an image" in str(seen.captions[0].refusal)
    assert "stands for an image" in str(seen.captions[1].refusal)
    assert f"takes up to {most}" in str(seen.captions[2].refusal)
    same(seen.captions[3], encoder.encode_seen(TEXTS[:1], given).captions[0])


def same(one: Embedding, other: Embedding) -> None:
    assert torch.equal(one.tokens, other.tokens)
    assert (one.refusal, one.cuts) == (other.refusal, other.cuts)


def test_the_wrong_number_of_images_is_refused(folders: dict[str, Path]) -> None:
    edit, plus = load(folders["qwenimage_edit"]), load(folders["qwenimage_edit_plus"])
    with pytest.raises(UsageError, match="takes 1 reference of a sample, found 0"):
        edit.encode_seen(TEXTS, ())
    with pytest.raises(UsageError, match="takes 1 reference of a sample, found 0"):
        edit.encode(TEXTS)
    with pytest.raises(UsageError, match="takes 1 reference of a sample, found 2"):
        edit.encode_seen(TEXTS, images(2))
    with pytest.raises(UsageError, match="takes 0 to 3 references of a sample, found 4"):
        plus.encode_seen(TEXTS, images(2) * 2)


def test_an_image_that_cannot_be_seen_is_refused_and_nothing_encoded(folders: dict[str, Path]) -> None:
    """Qwen-Image 2.1's model has a place for 32 by 32 px; its text encoder makes small images larger."""
    encoder = load(folders["qwenimage21"])
    for height, width in ((16, 16), (48, 64)):
        seen = encoder.encode_seen(TEXTS, [Image.new("RGB", (width, height)), *images(1)])
        assert f"an image of {height} by {width} px" in str(seen.empty.refusal)
        assert [one.refusal for one in seen.captions] == [seen.empty.refusal] * len(TEXTS)
    long = load(folders["qwenimage_edit"]).encode_seen(TEXTS, [Image.new("RGB", (6432, 32))])
    assert "a side is more than 200 times the other" in str(long.empty.refusal)


@pytest.mark.parametrize("family", ["qwenimage_edit_plus", "qwenimage21"])
def test_captions_without_images_are_those_of_a_sample_without_any(family: str, folders: dict[str, Path]) -> None:
    encoder = load(folders[family])
    seen = encoder.encode_seen(TEXTS, ())
    assert seen.images.shape == (0, encoder.columns.tokens[0].shape[0])
    for text, one in zip(("", *TEXTS), (seen.empty, *seen.captions), strict=True):
        same(encoder.encode([text])[0], one)


@pytest.mark.parametrize("dtype", ["F16", "I8"])
def test_prompts_are_encoded_without_images(dtype: str, folders: dict[str, Path], tmp_path: Path) -> None:
    folder = folders["qwenimage_edit_plus"]
    encoder = load(folder, stored_dtype=dtype)
    tokens = encoder.columns.delivered.tokens[0]
    groups = {SEEN_IMAGES: [Column(name=IS_IMAGE, dtype="U8", shape=()), tokens], SEEN_EMPTY: [tokens]}
    nothing = {TOKENS: np.zeros((0, *tokens.shape), "f2")}
    with StoreWriter(
        tmp_path / "s",
        columns=[LatentColumn(channels=4)],
        encoders={"vae": {"downscale": 8}, "text_encoder": encoder.provenance},
        text=encoder.columns,
        ragged={name: RaggedGroup(columns=own, encoder="text_encoder") for name, own in groups.items()},
    ) as writer:
        entries = {SEEN_IMAGES: {IS_IMAGE: np.zeros(0, "u1"), **nothing}, SEEN_EMPTY: nothing}
        writer.add("a", "train/64x64", {"latent": np.zeros((4, 8, 8), "f2")}, ragged=entries)
    (tmp_path / "p.txt").write_text("a red cat\n", encoding="utf-8")
    call("ingest", "prompts", tmp_path / "p.txt", tmp_path / "s", "--model", folder).done()
    store = Store.open(tmp_path / "s")
    found = decode_prompts(store.manifest, (tmp_path / "p.safetensors").read_bytes(), "p")
    for text, own in zip(("", "a red cat"), encoder.encode(["", "a red cat"]), strict=True):
        stored = found.embedding(text)[TOKENS]
        assert np.allclose(stored.astype("f4"), own.tokens.float().numpy(), rtol=0, atol=1e-3 if dtype == "F16" else 0.05)


@pytest.mark.parametrize("family", KINDS)
@pytest.mark.parametrize("dtype", ["BF16", "int8", "nf4"])
def test_weights_of_fewer_bits_see_images_too(family: str, dtype: str, folders: dict[str, Path]) -> None:
    encoder = load(folders[family], encode_dtype=dtype, stored_dtype="F16")
    seen, exact = encoder.encode_seen(TEXTS, images(1)), load(folders[family]).encode_seen(TEXTS, images(1))
    for one, other in zip((seen.images, seen.empty.tokens), (exact.images, exact.empty.tokens), strict=True):
        assert one.dtype == torch.float16
        assert one.shape == other.shape
        assert bool(one.isfinite().all())
    if dtype == "BF16":
        assert float((seen.images - exact.images).norm() / exact.images.norm()) < 0.05


def test_quantised_captions_have_their_images_part_in_f16(folders: dict[str, Path]) -> None:
    seen = load(folders["qwenimage_edit"], stored_dtype="I8").encode_seen(TEXTS, images(1))
    assert seen.images.dtype == seen.empty.tokens.dtype == torch.float16
    assert {one.tokens.dtype for one in seen.captions} == {torch.float32}


def test_images_are_prepared_and_seen_once_a_sample(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    encoder: Any = load(folders["qwenimage_edit"])
    calls: list[str] = []
    pipeline = encoder._pipeline

    def noted(own: Any, name: str) -> Any:
        def call(*given: Any, **more: Any) -> Any:
            calls.append(name)
            return own(*given, **more)

        return call

    for owner, name in ((pipeline.processor.image_processor, "preprocess"), (pipeline.text_encoder.model.visual, "forward")):
        monkeypatch.setattr(owner, name, noted(getattr(owner, name), name))
    for _ in range(2):
        encoder.encode_seen(TEXTS, images(1))
    assert calls == ["preprocess", "forward"] * 2
