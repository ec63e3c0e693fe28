"""Captions of a model whose text encoder sees the references: what a batch has of a row is what the encoder returns for it."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from bucketline.ingest.encoders.model_folder import open_model
from bucketline.ingest.encoders.text_columns import TextSettings
from bucketline.ingest.encoders.text_encoders import PromptEncoder, load_caption_encoder
from bucketline.loader import Loader, LoaderConfig
from bucketline.store import Store
from bucketline.store.format.block import sample_digest
from tests import language_models
from tests.commands import call
from tests.family_models import tiny_qwen_vae
from tests.kit import faults
from tests.models import write_files
from tests.unit.ingest.partners.kit import data_file, packed, picture

PAIR, OWN = (64, 96), (70, 50)
CAPTIONS = {"a": "a red cat\nthe house", "b": "a red cat", "c": "", "d": "a dog"}
REFERENCES = {"a": (PAIR, OWN), "b": (OWN,), "c": (PAIR,), "d": ()}


@pytest.fixture(scope="module")
def edit_plus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("edit plus")
    torch.manual_seed(0)
    language_models.qwen25_vl(edits=True).eval().save_pretrained(folder / "text_encoder")
    language_models.qwen_edit_processor().save_pretrained(folder / "processor")
    tiny_qwen_vae().save_pretrained(folder / "vae")
    index = {
        "_class_name": "QwenImageEditPlusPipeline",
        "text_encoder": ["transformers", "Qwen2_5_VLForConditionalGeneration"],
        "processor": ["transformers", "Qwen2VLProcessor"],
    }
    (folder / "model_index.json").write_text(json.dumps(index), encoding="ascii")
    return folder


def write_pairs(root: Path) -> Path:
    files: dict[str, str | bytes] = {f"{name}.png": picture(n, PAIR) for n, name in enumerate(REFERENCES)}
    for name, sizes in REFERENCES.items():
        files |= {f"{name}_{n}.png": picture(10 + n, size) for n, size in enumerate(sizes)}
    files |= {f"{name}.txt": text for name, text in CAPTIONS.items() if text}
    write_files(root / "data", files)
    fields = {"references": "same:{stem}_{n}", "references_optional": True, "references_area": 64}
    return data_file(root / "data.toml", "data", **fields)


def test_a_row_has_the_states_of_its_own_images_before_each_of_its_captions(tmp_path: Path, edit_plus: Path) -> None:
    file, store = write_pairs(tmp_path), tmp_path / "s"
    report = packed(file, store, edit_plus, "--text-dtype", "fp32").done().json
    assert (report["packed"], report["without_caption"]) == (4, 1)
    assert not faults(store)
    encoder = load_caption_encoder(
        open_model(str(edit_plus)), torch.device("cpu"), TextSettings(stored_dtype="F32", sees_images=True)
    )
    assert isinstance(encoder, PromptEncoder)
    rule = encoder._family.references
    assert rule is not None
    by_digest = {sample_digest(f"{name}.png"): name for name in REFERENCES}
    for dropout in (0.0, 1.0):
        found = set()
        for batch in Loader(store, LoaderConfig(batch_size=1, caption_dropout=dropout, epochs=1)):
            name = by_digest[batch.ids[0].numpy().tobytes()]
            found.add(name)
            shown = []
            for n, size in enumerate(REFERENCES[name]):
                image = Image.open(io.BytesIO(picture(10 + n, size))).convert("RGB")
                if size == PAIR:
                    image = image.resize((48, 32), Image.Resampling.LANCZOS)
                shown.append(rule.for_text(image, image))
            texts = [text for text in CAPTIONS[name].split("\n") if text] if not dropout else []
            seen = encoder.encode_seen(texts, shown)
            wholes = [torch.cat([seen.images, own.tokens]) for own in (*seen.captions, *(() if texts else (seen.empty,)))]
            tokens = batch.tokens[0][batch.token_mask[0].bool()]
            equal = [
                whole for whole in wholes if whole.shape == tokens.shape and torch.allclose(whole, tokens, rtol=0, atol=5e-5)
            ]
            assert equal, (name, dropout)
            assert batch.image_tokens is not None
            assert int(batch.image_tokens.sum()) == int(seen.is_image.sum())
            sizes = [tuple(np.array(one.shape[-2:]) * 2) for one in batch.references]
            assert sizes == [(32, 48) if size == PAIR else rule.size(*size, 64**2) for size in REFERENCES[name]]
        assert found == set(REFERENCES)


def test_a_new_caption_is_encoded_with_its_images_and_mirror_images_are_refused(tmp_path: Path, edit_plus: Path) -> None:
    file, store = write_pairs(tmp_path), tmp_path / "s"
    packed(file, store, edit_plus).done()
    (tmp_path / "data" / "b.txt").write_text("the green house", encoding="ascii")
    assert packed(file, store, edit_plus, "--dry-run").done().json["recaptioned"] == 1
    done = packed(file, store, edit_plus).done().json
    assert (done["packed"], done["unchanged"]) == (1, 3)
    assert Store.open(store).sample("b.png")[1].captions == ("the green house",)
    ran = packed(file, tmp_path / "t", edit_plus, "--flip")
    assert ran.code
    assert "--flip" in ran.err
    report = call("ingest", "scan", file, "--model", edit_plus, "--json").done().json
    assert report["references"] == {"0": 1, "1": 2, "2": 1}
    assert report["bytes_per_sample"].keys() >= {"latent", "references"}


def test_images_alone_beside_pairs_are_encoded_as_these(tmp_path: Path, edit_plus: Path) -> None:
    images = {"pairs/a.png": 1, "before/a.png": 2, "alone/b.png": 3}
    write_files(tmp_path, {name: picture(seed, PAIR) for name, seed in images.items()} | {"alone/b.txt": "a red cat"})
    pairs = '[[source]]\npath = "pairs"\nreferences = "before"\nreferences_area = 64\n[[source]]\npath = "alone"\n'
    for more in ("", "references_optional = true\n"):
        file = tmp_path / "data.toml"
        file.write_text(f'{pairs}{more}[rules]\ngrid = "32x48"\nmin_size_px = 8\n', encoding="ascii")
        ran = packed(file, tmp_path / "stores", edit_plus)
        assert bool(ran.code) == (not more)
        scanned = call("ingest", "scan", file, "--model", edit_plus)
        assert more or all("set references_optional = true for alone" in one.err for one in (ran, scanned))
    batches = [*Loader(tmp_path / "stores", LoaderConfig(batch_size=1, epochs=1))]
    assert sorted(len(batch.references) for batch in batches) == [0, 1]
