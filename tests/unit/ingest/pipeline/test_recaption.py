"""Captions that changed, at their images or by the rules: text is encoded, latents stay those that were stored."""

from __future__ import annotations

import os
from operator import attrgetter
from pathlib import Path

import numpy as np
import pytest

from bucketline.ingest.encoders.vae import LatentColumns
from bucketline.ingest.pipeline import image_reader
from bucketline.store import Store
from bucketline.store.format.block import caption_digest
from tests.commands import call
from tests.family_models import write_dit
from tests.kit import by_id, flip_row, tree
from tests.models import SMALL, pack, png


def rows_of(store: Path) -> dict[str, tuple[tuple[object, ...], dict[str, bytes]]]:
    """Return every sample's record and row, without what its captions, its time and its place in the store decide."""
    fields = attrgetter("bucket", "split", "content", "original_size", "resized", "crop")
    return {name: (fields(held.record), held.columns) for name, held in by_id(Store.open(store)).items()}


def forbid_encoding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_reader, "decode_image", lambda *_: pytest.fail("an image was decoded"))
    monkeypatch.setattr(LatentColumns, "encode", lambda *_: pytest.fail("an image was encoded"))


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--latents", "moments", "--flip"),
        ("--latents", "sample", "--flip", "--crop", "random", "--val-fraction", "0.3"),
        ("--dtype", "BF16", "--crop", "random"),
        ("--check", "content"),
    ],
)
def test_latents_are_kept_where_only_captions_changed(
    options: tuple[str, ...], source: Path, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = pack(source, tmp_path / "s", model, *options).json
    before = rows_of(tmp_path / "s")
    for path in sorted(source.rglob("*.png")):
        path.with_suffix(".txt").write_text(f"the house\na {path.stem} dog\n", encoding="ascii")
    with monkeypatch.context() as patched:
        forbid_encoding(patched)
        report = pack(source, tmp_path / "s", model, *options).json
    assert (report["packed"], report["latents_kept"], report["unchanged"], report["rejected"]) == (14, 14, 0, 0)
    assert (report["crop_loss"], report["enlarged"]) == (first["crop_loss"], first["enlarged"])
    assert rows_of(tmp_path / "s") == before
    store = Store.open(tmp_path / "s")
    shard, record = store.sample("a/000.png")
    assert record.captions == ("the house", "a 000 dog")
    assert store.caption(store.shards.index(shard), record.caption_rows[0]).digest == caption_digest("the house")
    assert call("store", "verify", tmp_path / "s").code == 0
    assert pack(source, tmp_path / "s", model, *options).json["unchanged"] == 14


def test_a_touched_file_keeps_its_latents_and_a_changed_one_does_not(packed: Path, tmp_path: Path, model: Path) -> None:
    before = rows_of(tmp_path / "s")
    os.utime(packed / "a" / "000.png", ns=(1, 1))
    (packed / "a" / "002.png").write_bytes(png(20, 30, 99))
    (packed / "a" / "002.txt").write_text("red\n", encoding="ascii")
    (packed / "b" / "001.txt").write_text("blue\n", encoding="ascii")
    report = pack(packed, tmp_path / "s", model).json  # in one batch with one that is encoded
    assert (report["packed"], report["latents_kept"], report["unchanged"]) == (3, 2, 11)
    after = rows_of(tmp_path / "s")
    assert [sample_id for sample_id in before if before[sample_id] != after[sample_id]] == ["a/002.png"]
    assert pack(packed, tmp_path / "s", model).json["unchanged"] == 14


def test_a_damaged_row_is_not_copied_but_encoded(packed: Path, tmp_path: Path, model: Path) -> None:
    before = rows_of(tmp_path / "s")
    damaged = flip_row(tmp_path / "s", "train/16x24", 0)
    (packed / damaged).with_suffix(".txt").write_text("blue\n", encoding="ascii")
    report = pack(packed, tmp_path / "s", model).json
    assert (report["packed"], report["latents_kept"]) == (1, 0)
    (fields, row), (fields_before, row_before) = rows_of(tmp_path / "s")[damaged], before[damaged]
    assert fields == fields_before
    np.testing.assert_allclose(
        np.frombuffer(row["latent"], "<f2").astype(float), np.frombuffer(row_before["latent"], "<f2").astype(float), atol=4e-3
    )


RULES = ("--caption-template", "dog", "--caption-template", "{caption} of the house")
PACKED = ("packed", "latents_kept", "unchanged", "rejected")


def captions_of(store: Path) -> dict[str, tuple[str, ...]]:
    return {sample_id: held.record.captions for sample_id, held in by_id(Store.open(store)).items()}


def rules_of(store: Path) -> tuple[object, object]:
    rules = Store.open(store).manifest.rules
    return rules["caption_template"], rules["shuffle_tags"]


def test_rules_are_recorded_and_an_unchanged_image_stays_unchanged(source: Path, tmp_path: Path, model: Path) -> None:
    shuffled = ("--shuffle-tags", "3:1")
    (source / "a" / "000.txt").write_text("a cat, red, green, blue\n", encoding="ascii")
    assert pack(source, tmp_path / "s", model, *RULES, *shuffled).code == 0
    assert rules_of(tmp_path / "s") == (["dog", "{caption} of the house"], "3:1")
    captions = captions_of(tmp_path / "s")["a/000.png"]
    assert len(captions) == 3
    assert all(caption.startswith("dog, a cat, ") and caption.endswith(" of the house") for caption in captions)
    assert len(Store.open(tmp_path / "s").sample("a/000.png")[1].caption_rows) == 3
    report = pack(source, tmp_path / "s", model, *RULES, *shuffled, "--recaption").json
    assert (report["unchanged"], report["packed"], report["generation"], report["recaptioned"]) == (14, 0, 1, None)


@pytest.mark.parametrize(
    ("first", "then", "words"),
    [
        (
            (),
            RULES,
            "no --caption-template, this run has --caption-template dog --caption-template '{caption} of the house'",
        ),
        (
            ("--caption-template", "dog"),
            ("--caption-template", "cat"),
            "--caption-template dog, this run has --caption-template cat",
        ),
        (("--shuffle-tags", 2), ("--shuffle-tags", 3), "--shuffle-tags 2, this run has --shuffle-tags 3"),
    ],
)
def test_other_rules_are_refused_with_the_option_that_allows_them(
    first: tuple[object, ...], then: tuple[object, ...], words: str, source: Path, tmp_path: Path, model: Path
) -> None:
    assert pack(source, tmp_path / "s", model, *first).code == 0
    before = tree(tmp_path / "s")
    ran = pack(source, tmp_path / "s", model, *then, "--json")
    assert (ran.code, ran.out) == (1, "")
    assert words in ran.err
    assert "add --recaption to encode the captions again" in ran.err
    assert tree(tmp_path / "s") == before
    other_grid = call("ingest", "pack", source, tmp_path / "s", "--model", model, "--grid", "16x16", "--recaption", *then)
    assert other_grid.code == 1
    assert "--grid 16x24,24x16, this run has --grid " in other_grid.err
    assert "--recaption" not in other_grid.err
    assert tree(tmp_path / "s") == before


@pytest.mark.parametrize("options", [(), ("--latents", "sample", "--flip", "--crop", "random")])
def test_recaption_encodes_no_image_and_gives_the_store_that_these_rules_would_have_made(
    options: tuple[str, ...], source: Path, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert pack(source, tmp_path / "s", model, *options).code == 0
    assert pack(source, tmp_path / "t", model, *options, *RULES).code == 0
    before, plain = rows_of(tmp_path / "s"), captions_of(tmp_path / "s")
    with monkeypatch.context() as patched:
        forbid_encoding(patched)
        report = pack(source, tmp_path / "s", model, *options, *RULES, "--recaption").json
    assert tuple(report[name] for name in PACKED) == (14, 14, 0, 0)
    assert report["recaptioned"] == "caption_template = [], now ['dog', '{caption} of the house']"
    assert report["captions_as_before"] == 0
    assert rows_of(tmp_path / "s") == before
    assert captions_of(tmp_path / "s") == captions_of(tmp_path / "t")
    assert rules_of(tmp_path / "s") == rules_of(tmp_path / "t")
    assert call("store", "verify", tmp_path / "s").code == 0
    assert pack(source, tmp_path / "s", model, *options, *RULES).json["unchanged"] == 14
    assert pack(source, tmp_path / "s", model, *options, "--recaption").json["latents_kept"] == 14
    assert captions_of(tmp_path / "s") == plain
    assert rules_of(tmp_path / "s") == ([], None)


def test_rules_that_change_no_caption_are_recorded_all_the_same(source: Path, tmp_path: Path, model: Path) -> None:
    assert pack(source, tmp_path / "s", model, "--shuffle-tags", 2).code == 0
    report = pack(source, tmp_path / "s", model, "--shuffle-tags", 3, "--recaption").json
    assert (report["unchanged"], report["generation"]) == (14, 2)
    assert pack(source, tmp_path / "s", model, "--shuffle-tags", 3).code == 0


def test_what_a_recaption_cannot_reach_is_counted(packed: Path, tmp_path: Path, model: Path) -> None:
    (packed / "a" / "000.png").unlink()
    (packed / "b" / "001.txt").unlink()
    (packed / "b" / "001.txt").symlink_to("nowhere.txt")
    before = captions_of(tmp_path / "s")
    ran = call("ingest", "pack", packed, tmp_path / "s", "--model", model, *SMALL, *RULES, "--recaption").done()
    change = "caption_template = [], now ['dog', '{caption} of the house']"
    assert f"captions are made by other rules: {change}; only their text is encoded" in ran.out
    assert "with the captions of the rules before: 2 samples" in ran.out
    after = captions_of(tmp_path / "s")
    assert {sample_id for sample_id in before if before[sample_id] == after[sample_id]} == {"a/000.png", "b/001.png"}


def test_a_recaption_needs_room_for_all_rows(
    source: Path, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import shutil

    assert pack(source, tmp_path / "s", model).code == 0
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    assert pack(source, tmp_path / "s", model).code == 0
    pack(source, tmp_path / "s", model, *RULES, "--recaption").fails("writing 14 images again, with other captions, to ")


def test_more_variants_than_a_sample_holds_are_refused(source: Path, tmp_path: Path, model: Path) -> None:
    asked = ("--shuffle-tags", 5, "--caption-template", "a {caption}", "--caption-template", "the {caption}")
    for command in (("pack", source, tmp_path / "s"), ("scan", source)):
        ran = call("ingest", *command, "--model", model, *asked)
        assert ran.code == 2
        assert "2 templates and --shuffle-tags 5 make 10 captions of each, max_captions is 8" in ran.err
    assert not (tmp_path / "s").exists()


def test_a_model_of_classes_takes_no_caption_rules(source: Path, tmp_path: Path) -> None:
    dit = write_dit(tmp_path / "dit", {0: "cat", 1: "dog"})
    ran = call("ingest", "pack", source, tmp_path / "s", "--model", dit, "--grid", "16x16", "--caption-template", "ohwx")
    assert ran.code == 2
    assert f"--caption-template: {dit} takes a class, not text; leave the option out" in ran.err
