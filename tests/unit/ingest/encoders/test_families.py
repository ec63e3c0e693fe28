"""The captions that `ingest pack` stores for each family, compared with those of the family's own diffusers pipeline."""

from __future__ import annotations

import inspect
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

from bucketline.errors import ModelError, UsageError
from bucketline.families.registry import FAMILIES, family_named, family_of_pipeline
from bucketline.ingest.encoders.model_folder import open_model
from bucketline.ingest.encoders.text_columns import CaptionEncoder, TextSettings
from bucketline.ingest.encoders.text_encoders import ClassLabels, load_caption_encoder, text_family_of
from bucketline.ingest.encoders.text_model import load_text_part
from bucketline.loader import Loader, LoaderConfig
from bucketline.store import Store
from tests.commands import call
from tests.family_models import PIPELINES, T5_WIDTH, write_dit, write_pipeline
from tests.models import png, write_files, write_images

CPU = torch.device("cpu")
TEXTS = ("a red cat", "The GREEN house of dogs ", "a blue dog of the house " * 40)
TOLERANCE = {"F32": 0.0, "F16": 1e-3}  # of the largest value; sums of a batch of another size are ordered otherwise


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("families")
    return {family: write_pipeline(root / family.replace(" ", "-"), family) for family in PIPELINES}


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four images of one size, one without a caption."""
    folder = tmp_path_factory.mktemp("images")
    for n, text in enumerate(("", *TEXTS)):
        (folder / f"{n}.png").write_bytes(png(16, 24, seed=n))
        (folder / f"{n}.txt").write_text(text, encoding="utf-8")
    return folder


def encoder_of(folder: Path, **settings: Any) -> CaptionEncoder:
    return load_caption_encoder(open_model(str(folder)), CPU, TextSettings(**settings))


def pack(source: Path, store: Path, model: Path, *more: object) -> Any:
    asked = ("--grid", "16x24", "--min-size-px", 8, "--json")
    return call("ingest", "pack", source, store, "--model", model, *asked, *more)


def whole_pipeline(folder: Path) -> Any:
    import diffusers

    kind: Any = diffusers.StableDiffusionXLPipeline
    return kind.from_pretrained(folder, local_files_only=True)


@torch.no_grad()
def by_pipeline(pipeline: Any, text: str) -> dict[str, NDArray[Any]]:
    """Ask SDXL's whole pipeline for what its model would see of a text, and of none where it is empty."""
    tokens, empty, pooled, empty_pooled = pipeline.encode_prompt(
        text, device=CPU, num_images_per_prompt=1, do_classifier_free_guidance=True
    )
    if text == "":
        tokens, pooled = empty, empty_pooled
    return {"tokens": tokens[0].numpy(), "pooled": pooled[0].numpy()}


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_columns_are_those_of_the_pipeline(dtype: str, folders: dict[str, Path], images: Path, tmp_path: Path) -> None:
    """Of SDXL; those of every family before they are stored are compared in `unit/families/test_families.py`."""
    ran = pack(images, tmp_path / "s", folders["sdxl"], "--dtype", dtype, "--batch-size", 1 if dtype == "F32" else 3).done()
    assert ran.json["packed"] == 4
    store, pipeline = Store.open(tmp_path / "s"), whole_pipeline(folders["sdxl"])
    for n, text in enumerate(("", *TEXTS)):
        _, record = store.sample(f"{n}.png")
        stored = store.read_caption(0, record.caption_rows[0])
        expected = by_pipeline(pipeline, text.strip())
        assert set(expected) == {name for name in stored if name in ("tokens", "pooled")}
        for name, values in expected.items():
            assert stored[name].shape == values.shape, name
            assert stored[name].dtype == (np.float32 if dtype == "F32" else np.float16)
            assert np.abs(stored[name].astype(np.float32) - values).max() <= TOLERANCE[dtype] * np.abs(values).max()
    (bucket,) = store.buckets()
    for sample_id, latent in zip(bucket.sample_ids(np.arange(4)), bucket.read(np.arange(4), "latent"), strict=True):
        pixels = torch.from_numpy(np.array(Image.open(images / sample_id))).permute(2, 0, 1)[None].float() / 127.5 - 1
        with torch.no_grad():
            expected_latent = pipeline.vae.encode(pixels).latent_dist.mode()[0].numpy()
        assert np.abs(latent.astype(np.float32) - expected_latent).max() <= TOLERANCE[dtype] * np.abs(expected_latent).max()


def test_an_sdxl_that_does_not_zero_the_empty_prompt_stores_it_encoded(images: Path, tmp_path: Path) -> None:
    folder = write_pipeline(tmp_path / "model", "sdxl", force_zeros_for_empty_prompt=False)
    encoder = encoder_of(folder, stored_dtype="F32")
    assert encoder.provenance["empty_caption"] == "encoded"
    found = encoder.encode([""])[0]
    assert bool(found.tokens.any())
    np.testing.assert_array_equal(found.fixed["pooled"].numpy(), by_pipeline(whole_pipeline(folder), "")["pooled"])


def test_an_sdxl_stores_zeros_for_the_empty_caption_and_says_so(folders: dict[str, Path]) -> None:
    encoder = encoder_of(folders["sdxl"])
    empty, other = encoder.encode(["", "a cat"])
    assert encoder.provenance["empty_caption"] == "zeros"
    assert not empty.tokens.any()
    assert not empty.fixed["pooled"].any()
    assert bool(other.tokens.any())


@pytest.mark.parametrize(
    ("family", "texts"),
    [
        ("sd", {"cat " * 75: False, "cat " * 76: True}),
        ("sd3", {"cat " * 200: False, "cat " * 256: True}),
        ("flux", {"cat " * 511: False, "cat " * 512: True}),
        ("pixart_alpha", {"CAT " * 119: False, "cat " * 120: True}),
        ("pixart_sigma", {"cat " * 299: False, "cat " * 300: True}),
    ],
)
def test_a_caption_is_cut_where_no_part_sees_it_whole(family: str, texts: dict[str, bool], folders: dict[str, Path]) -> None:
    encoder = encoder_of(folders[family])
    assert [found.is_truncated for found in encoder.encode(list(texts))] == list(texts.values())


def test_each_part_that_cuts_a_caption_is_named_with_what_it_cuts(folders: dict[str, Path]) -> None:
    def cuts(family: str, text: str) -> dict[str, tuple[int, int, str]]:
        encoder = encoder_of(folders[family])
        return {cut.encoder: (cut.tokens, cut.limit, cut.cut) for cut in encoder.encode([text])[0].cuts}

    assert cuts("sd", "cat " * 75) == {}
    assert cuts("sd", "cat " * 77) == {"text_encoder": (79, 77, "cat cat")}
    clips = {name: (102, 77, ("cat " * 25).strip()) for name in ("text_encoder", "text_encoder_2")}
    assert cuts("sd3", "cat " * 100) == clips  # the T5 sees all of it
    assert cuts("sdxl", "cat " * 100) == clips
    assert cuts("flux", "cat " * 600).keys() == {"text_encoder", "text_encoder_2"}


def test_a_t5_takes_as_many_tokens_as_asked_and_a_clip_its_own(folders: dict[str, Path]) -> None:
    def with_tokens(family: str) -> tuple[int, ...]:
        encoder = encoder_of(folders[family], max_tokens=20)
        assert encoder.max_tokens == encoder.provenance["max_tokens"]
        return tuple(encoder.encode(["cat " * 100])[0].tokens.shape)

    assert with_tokens("flux") == (20, T5_WIDTH)
    assert with_tokens("sd3") == (97, T5_WIDTH)
    assert with_tokens("pixart_sigma") == (20, T5_WIDTH)
    for family in ("sd", "sdxl"):
        with pytest.raises(UsageError, match=f"--max-tokens 20: captions of {family} have a fixed number of tokens"):
            with_tokens(family)
    with pytest.raises(UsageError, match="--max-tokens is 5000, expected 512 or fewer"):
        encoder_of(folders["flux"], max_tokens=5000)


def test_each_part_of_a_family_is_in_the_fingerprint(folders: dict[str, Path], images: Path, tmp_path: Path) -> None:
    """Packing another image after the second text encoder was changed is refused, and the part named."""
    folder = write_pipeline(tmp_path / "model", "flux")
    images = shutil.copytree(images, tmp_path / "images")
    assert pack(images, tmp_path / "s", folder).code == 0
    first = min(images.glob("*.png"))
    shutil.copyfile(first, images / "another.png")
    provenance = Store.open(tmp_path / "s").manifest.encoders["text_encoder"]
    assert isinstance(provenance, dict)
    parts = provenance["parts"]
    assert isinstance(parts, dict)
    wanted = {"class", "config_hash", "weights_hash", "tokenizer_hash", "dtype", "layer", "max_tokens"}
    assert {name: set(part) for name, part in parts.items() if isinstance(part, dict)} == {
        "text_encoder": wanted,
        "text_encoder_2": wanted,
    }
    import transformers

    kind: Any = transformers.T5EncoderModel
    other = kind.from_pretrained(folder / "text_encoder_2")
    with torch.no_grad():
        next(other.parameters()).mul_(1.5)
    other.save_pretrained(folder / "text_encoder_2")
    pack(images, tmp_path / "s", folder).fails("encoders.text_encoder.parts.text_encoder_2.weights_hash")


def test_a_t5_that_came_later_is_another_encoder(folders: dict[str, Path]) -> None:
    without, whole = (encoder_of(folders[family]).provenance["parts"] for family in ("sd3 without T5", "sd3"))
    assert isinstance(without, dict)
    assert isinstance(whole, dict)
    assert without["text_encoder_3"] is None
    assert whole["text_encoder_3"] is not None


def test_the_family_follows_from_the_index_or_from_the_parts(folders: dict[str, Path], model: Path, tmp_path: Path) -> None:
    wanted = {family: family_named(family.removesuffix(" without T5")) for family in folders}
    assert {family: text_family_of(open_model(str(folder))) for family, folder in folders.items()} == wanted
    # nothing tells these apart
    wanted |= {"pixart_sigma": wanted["pixart_alpha"], "flux_kontext": wanted["flux"]}
    for family, folder in folders.items():
        copy = tmp_path / folder.name
        copy.mkdir()
        for part in folder.iterdir():
            if part.is_dir():
                (copy / part.name).symlink_to(part)
        assert text_family_of(open_model(str(copy))) is wanted[family], family
    assert text_family_of(open_model(str(model))) is None
    write_dit(tmp_path / "dit", {0: "cat"})
    assert text_family_of(open_model(str(tmp_path / "dit"))) is family_named("class_labels")
    (tmp_path / "dit" / "model_index.json").unlink()
    assert text_family_of(open_model(str(tmp_path / "dit"))) is family_named("class_labels")


def test_a_stable_diffusion_without_a_clip_stores_a_captions_own_tokens_alone(model: Path, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path / "model")
    (tmp_path / "model" / "model_index.json").write_text('{"_class_name": "StableDiffusionPipeline"}', encoding="ascii")
    encoder = encoder_of(tmp_path / "model")
    assert (encoder.provenance["family"], encoder.padding) == ("transformers", "valid")
    assert [len(found.tokens) for found in encoder.encode(["a red cat", ""])] == [5, 2]


def test_an_sd3_without_t5_and_without_its_width_is_refused(tmp_path: Path) -> None:
    folder = write_pipeline(tmp_path / "model", "sd3 without T5")
    (folder / "transformer" / "config.json").unlink()
    with pytest.raises(ModelError, match=r"no transformer/config\.json with a joint_attention_dim"):
        encoder_of(folder)


def test_a_t5_in_half_precision_keeps_the_weights_that_would_overflow_in_f32(folders: dict[str, Path]) -> None:
    part = load_text_part(open_model(str(folders["pixart_alpha"])), "text_encoder", "tokenizer", device=CPU, dtype="F16")
    kinds: dict[bool, set[torch.dtype]] = {True: set(), False: set()}
    for name, weights in part.encoder.named_parameters():
        kinds["wo" in name.split(".")].add(weights.dtype)
    assert kinds == {True: {torch.float32}, False: {torch.float16}}
    encoder = encoder_of(folders["pixart_alpha"], encode_dtype="F16")
    assert encoder.encode(["a red cat"])[0].is_finite


def test_text_parts_compute_in_the_dtype_asked_for_and_say_so(folders: dict[str, Path]) -> None:
    model = open_model(str(folders["flux"]))
    whole, half = (load_caption_encoder(model, CPU, TextSettings(encode_dtype=dtype)) for dtype in ("F32", "BF16"))
    first, second = (encoder.encode(["a red cat"])[0].tokens.float() for encoder in (whole, half))
    assert 0 < float((first - second).abs().max()) < 0.05 * float(first.abs().max())
    parts = half.provenance["parts"]
    assert isinstance(parts, dict)
    assert [part["dtype"] for part in parts.values() if isinstance(part, dict)] == ["BF16", "BF16"]


# Class labels in place of captions: names, numbers, the null class, and texts that are not classes.

NAMES = {0: "tabby, tiger cat", 1: "crane", 2: "crane, machine"}


@pytest.fixture(scope="module")
def dit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A DiT of three classes; two of them share a name."""
    return write_dit(tmp_path_factory.mktemp("dit") / "model", NAMES)


def labels(folder: Path) -> ClassLabels:
    return ClassLabels(open_model(str(folder)))


def test_a_class_is_named_by_any_of_its_names_or_by_its_number_and_by_nothing_else(dit: Path) -> None:
    captions = ("tabby", "tiger cat", "tabby, tiger cat", " machine ", "0", "2", "crane, machine", "")
    found = labels(dit).encode(captions)
    assert [int(embedding.tokens) for embedding in found] == [0, 0, 0, 2, 0, 2, 2, 3]
    assert all(e.refusal is None and e.tokens.shape == (1, 1) and e.tokens.dtype is torch.int64 for e in found)
    for wrong in ("3", "-1", "1.0", "dog", "Tabby", "\u0663", "9" * 400):
        assert "is not a class of the model; expected one of its 6 names or a number from 0 to 2" in str(
            labels(dit).encode([wrong])[0].refusal
        )
    assert labels(dit).encode(["crane"])[0].refusal == "the name 'crane' stands for several classes (1, 2); give the number"


def test_labels_are_stored_as_a_token_and_an_unknown_one_is_a_reject_of_its_image(dit: Path, tmp_path: Path) -> None:
    source = write_files(tmp_path / "images", {f"{n}.png": png(16, 24, seed=n) for n in range(5)})
    write_files(source, {"0.txt": "tabby", "1.txt": "1", "3.txt": "dog", "4.txt": "machine"})
    asked = ("--model", dit, "--grid", "16x16", "--min-size-px", 8, "--json")
    ran = call("ingest", "pack", source, tmp_path / "s", *asked).done()
    assert (ran.json["packed"], ran.json["without_caption"]) == (4, 1)
    assert ran.json["rejected_by_reason"] == {"caption that the model does not take": 1}
    (reject,) = map(json.loads, (tmp_path / "s" / "rejects.jsonl").read_text(encoding="ascii").splitlines())
    assert reject["id"] == "3.png"
    assert "'dog' is not a class" in reject["detail"]
    store = Store.open(tmp_path / "s")
    found = {}
    for name in ("0.png", "1.png", "2.png", "4.png"):
        stored = store.read_caption(0, store.sample(name)[1].caption_rows[0])["class_labels"]
        assert stored.shape == (1, 1)
        assert stored.dtype == np.int64
        found[name] = int(stored[0, 0])
    assert found == {"0.png": 0, "1.png": 1, "2.png": 3, "4.png": 2}
    with Loader(tmp_path / "s", LoaderConfig(batch_size=2, epochs=1, caption_dropout=1.0)) as loader:
        assert all((batch.tokens == 3).all() for batch in loader)  # dropped: the null class


def test_names_are_in_the_fingerprint_and_may_stand_in_the_transformers_configuration(dit: Path, tmp_path: Path) -> None:
    other = write_dit(tmp_path / "other", {**NAMES, 0: "tabby"})
    before, after = labels(dit).provenance, labels(other).provenance
    assert {name for name in before if before[name] != after[name]} == {"names_hash"}
    path = other / "transformer" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text("utf-8")), "id2label": {"1": "dog"}}), encoding="utf-8")
    (other / "model_index.json").unlink()
    assert int(labels(other).encode(["dog"])[0].tokens) == 1


def test_what_makes_no_sense_of_a_model_of_classes_is_refused(dit: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="id2label has '7'"):
        labels(write_dit(tmp_path / "names", {7: "cat"}))
    folder = write_dit(tmp_path / "numbers", NAMES)
    (folder / "transformer" / "config.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ModelError, match=r"num_embeds_ada_norm None, expected the number of classes"):
        labels(folder)
    with pytest.raises(UsageError, match="takes a class, not text"):
        load_caption_encoder(open_model(str(dit)), torch.device("cpu"), TextSettings(max_tokens=3))


# A model whose pipeline is not known is refused by name, by each command that would encode its captions.


NOVEL = {
    "_class_name": "NovelImagePipeline",
    "text_encoder": ["transformers", "BertModel"],
    "vae": ["diffusers", "AutoencoderKL"],
}
ASKED = ("--grid", "16x16", "--min-size-px", 8)
UNKNOWN_PIPELINES = sorted(name for family in FAMILIES if family.parts for name in family.pipelines)


def named(model: Path, folder: Path, **index: object) -> Path:
    shutil.copytree(model, folder)
    (folder / "model_index.json").write_text(json.dumps({**NOVEL, **index}), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def novel(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
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
        assert "last hidden state" not in meant.out
        shutil.rmtree(tmp_path / "s", ignore_errors=True)


def test_a_store_remembers_that_plain_was_meant_and_its_prompts_are_plain(novel: Path, tmp_path: Path) -> None:
    write_images(tmp_path / "images", 2)
    asked = ("ingest", "pack", tmp_path / "images", tmp_path / "s", *ASKED, "--model", novel)
    assert call(*asked, "--text", "plain").code == 0
    assert "text plain" in call("store", "info", tmp_path / "s").out
    (tmp_path / "prompts.txt").write_text("a cat\n", encoding="utf-8")
    call("ingest", "prompts", tmp_path / "prompts.txt", tmp_path / "s", "--model", novel).done()
    write_images(tmp_path / "images", 3)
    assert "--text plain" in call(*asked).done().out  # there is an image to encode now
    assert len(Store.open(tmp_path / "s").manifest.shards) == 2


def test_a_model_that_names_no_pipeline_says_what_its_captions_became(model: Path, tmp_path: Path) -> None:
    write_images(tmp_path / "images", 2)
    ran = call("ingest", "pack", tmp_path / "images", tmp_path / "s", *ASKED, "--model", model).done()
    assert "the last hidden state of its BertModel is stored" in ran.out


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


@pytest.mark.parametrize("name", UNKNOWN_PIPELINES)
def test_a_known_pipeline_encodes_prompts_by_the_same_code_as_its_familys(name: str) -> None:
    import diffusers

    def code(pipeline: str) -> list[str]:
        methods = ("encode_prompt", "_get_clip_prompt_embeds", "_get_t5_prompt_embeds")
        found = (getattr(getattr(diffusers, pipeline), method, None) for method in methods)
        return ["" if method is None else inspect.getsource(method).rpartition('"""')[2] for method in found]

    family = family_of_pipeline(name)
    assert family is not None
    assert code(name) == code(family.pipelines[0])
