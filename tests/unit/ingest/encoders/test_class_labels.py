"""Class labels in place of captions: names, numbers, the null class, and texts that are not classes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from bucketline.errors import ModelError, UsageError
from bucketline.ingest.encoders.model_folder import open_model
from bucketline.ingest.encoders.text.class_labels import ClassLabels
from bucketline.ingest.encoders.text.registry import load_caption_encoder
from bucketline.ingest.encoders.text_columns import TextSettings
from bucketline.loader import Loader, LoaderConfig
from bucketline.store import Store
from tests.commands import call
from tests.family_models import write_dit
from tests.models import png

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
    source = tmp_path / "images"
    source.mkdir()
    for n, label in enumerate(("tabby", "1", None, "dog", "machine")):
        (source / f"{n}.png").write_bytes(png(16, 24, seed=n))
        if label is not None:
            (source / f"{n}.txt").write_text(label, encoding="utf-8")
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
