"""The fate of single images: an account that adds up, values that stay with their ids, and no crash."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from bucketline.ingest.encoders.model_folder import open_model
from bucketline.ingest.encoders.text_columns import TextSettings
from bucketline.ingest.encoders.text_encoders import TextEncoder
from bucketline.ingest.encoders.vae import LatentColumns, VaeEncoder
from bucketline.ingest.images.crop import Framing, parse_grid
from bucketline.ingest.images.decode import decode_image
from bucketline.ingest.parallel.items import Share
from bucketline.ingest.pipeline import image_reader
from bucketline.ingest.pipeline.captions import EncodedCaption, KeptCaptions, remove_kept_captions
from bucketline.ingest.pipeline.slice_packer import ShardFill, SlicePacker
from bucketline.loader import Loader, LoaderConfig
from bucketline.store import Store
from bucketline.store.format.block import caption_digest
from bucketline.store.verify.verify import verify
from bucketline.store.write import shard_writer
from tests.commands import call
from tests.family_models import write_dit
from tests.kit import by_id, caption_of, flip_row, make_store, tree
from tests.models import SMALL, in_file, pack, png, write_files


def rejects(store: Path) -> dict[str, str]:
    lines = [json.loads(line) for line in (store / "rejects.jsonl").read_text(encoding="ascii").splitlines()]
    return {line["id"]: line["reason"] for line in lines}


def test_an_image_that_fails_shifts_no_other(source: Path, tmp_path: Path, model: Path) -> None:
    """Rows are compared with those of each image packed by itself, with broken ones between them."""
    for n in range(0, 14, 3):
        (source / "ab"[n % 2] / f"{n:03d}+broken.png").write_bytes(b"no image")
    assert pack(source, tmp_path / "s", model, "--batch-size", 3).code == 0
    store = Store.open(tmp_path / "s")
    vae = VaeEncoder(open_model(str(model)), torch.device("cpu"), "F16")
    framing = Framing(grid=parse_grid(SMALL[1], step_px=2, align_px=2), min_size_px=8)
    for bucket in store.buckets():
        rows = np.arange(bucket.num_rows)
        for sample_id, latent in zip(bucket.sample_ids(rows), bucket.read(rows, "latent"), strict=True):
            pixels = decode_image((source / sample_id).read_bytes(), framing, sample_id)[0]
            np.testing.assert_allclose(latent, vae.encode(np.stack([pixels]))[0][0].numpy(), atol=4e-3)


def test_stored_tokens_are_those_that_the_encoder_gives(packed: Path, tmp_path: Path, model: Path) -> None:
    store = Store.open(tmp_path / "s")
    text = TextEncoder(open_model(str(model)), torch.device("cpu"), TextSettings())
    for sample_id in ("a/002.png", "b/005.png", "a/000.png"):
        _, record = store.sample(sample_id)
        for caption, row in zip(record.captions or ("",), record.caption_rows, strict=True):
            expected = text.encode([caption])[0].tokens.numpy()
            np.testing.assert_allclose(store.read_caption(0, row)["tokens"], expected, atol=2e-3)
            assert len(expected) == 2 + len(caption.split())


def test_a_latent_that_is_no_number_is_a_reject_of_that_image_alone(
    source: Path, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode = VaeEncoder.encode

    def first_is_nan(
        self: VaeEncoder, pixels: NDArray[np.uint8], seeds: Sequence[int] = ()
    ) -> tuple[torch.Tensor, torch.Tensor]:
        latents, is_finite = (found.clone() for found in encode(self, pixels, seeds))
        latents[0, 0, 0, 0] = torch.nan
        is_finite[0] = False
        return latents, is_finite

    monkeypatch.setattr(VaeEncoder, "encode", first_is_nan)
    report = pack(source, tmp_path / "s", model, "--batch-size", 4).json
    assert report["found"] == report["packed"] + report["rejected"] == 14
    assert report["rejected_by_reason"] == {"latent not finite in the stored dtype": report["rejected"]}
    store = Store.open(tmp_path / "s")
    for bucket in store.buckets():
        assert np.isfinite(bucket.read(np.arange(bucket.num_rows), "latent")).all()


def test_an_image_that_became_a_reject_drops_its_older_row_and_comes_back(packed: Path, tmp_path: Path, model: Path) -> None:
    good = (packed / "a" / "000.png").read_bytes()
    (packed / "a" / "000.png").write_bytes(b"broken")
    report = pack(packed, tmp_path / "s", model).json
    assert (report["packed"], report["unchanged"], report["rejected"]) == (0, 13, 1)
    assert Store.open(tmp_path / "s").manifest.samples == 13
    assert pack(packed, tmp_path / "s", model).json["rejected"] == 1
    (packed / "a" / "000.png").write_bytes(good)
    report = pack(packed, tmp_path / "s", model).json
    assert (report["packed"], report["unchanged"], report["rejected"]) == (1, 13, 0)
    store = Store.open(tmp_path / "s")
    assert store.sample("a/000.png")
    assert (store.manifest.samples, rejects(tmp_path / "s")) == (14, {})


def test_captions_beyond_those_kept_and_beyond_the_encoder_are_counted(source: Path, tmp_path: Path, model: Path) -> None:
    (source / "a" / "000.txt").write_text("\n".join(f"cat {n}" for n in range(5)), encoding="ascii")
    (source / "b" / "001.txt").write_text("red " * 40, encoding="ascii")
    report = pack(in_file(tmp_path / "d.toml", source, max_captions=3), tmp_path / "s", model).json
    assert report["captions_beyond"] == ["a/000.png"]
    assert report["captions_cut"] == {"text_encoder": 1}
    store = Store.open(tmp_path / "s")
    assert len(store.sample("a/000.png")[1].captions) == 5
    row = store.sample("b/001.png")[1].caption_rows[0]
    assert len(store.read_caption(0, row)["tokens"]) == 12


def test_counts_of_cut_captions_are_those_of_the_store(
    source: Path, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether a pack is whole or was stopped after some batches, and whatever changes or goes later."""
    whole, stopped = tmp_path / "s", tmp_path / "stopped"

    def said(store: Path) -> tuple[dict[str, int], dict[str, list[Any]]]:
        assert not verify(Store.open(store), lambda _: None, 1).corrupt
        rows = [json.loads(line) for line in call("store", "ls", store, "--json").out.splitlines()]
        counts: dict[str, int] = call("store", "info", store, "--json").json["captions_cut"]
        return counts, {one["id"]: one["cuts"] for one in rows if one["cuts"]}

    for name in ("a/000", "b/001"):
        (source / f"{name}.txt").write_text("red " * 10 + "cat dog", encoding="ascii")
    ran = call("ingest", "pack", source, whole, "--model", model, *SMALL)
    assert "  2 captions of the store cut by text_encoder\n" in ran.out
    assert f"  what was cut: `store report {whole}`, or `cuts` in `store ls {whole} --json`" in ran.out
    cut = ["text_encoder", 14, 12, "cat dog"]
    expected = {"text_encoder": 2}, {"a/000.png": [cut], "b/001.png": [cut]}
    assert said(whole) == expected
    encode, batches = SlicePacker._encode, list[str]()

    def stopping(packer: SlicePacker, bucket: str, on_image: Callable[[], None]) -> None:
        batches.append(bucket)
        if len(batches) == 4:
            raise KeyboardInterrupt
        encode(packer, bucket, on_image)

    monkeypatch.setattr(SlicePacker, "_encode", stopping)
    assert pack(source, stopped, model, "--batch-size", 2).code == 130
    call("store", "compact", stopped).done()  # which adopts what there is
    again = pack(source, stopped, model).done().json
    assert (again["packed"], again["unchanged"], again["captions_cut"]) == (8, 6, {"text_encoder": 2})
    assert again["without_caption"] == len((whole / "without_caption.jsonl").read_bytes().splitlines())
    assert said(stopped) == expected
    assert Store.open(stopped).manifest.captions_cut == Store.open(whole).manifest.captions_cut
    (source / "a" / "000.txt").write_text("a cat", encoding="ascii")
    assert pack(source, whole, model).json["captions_cut"] == {"text_encoder": 1}
    assert said(whole) == ({"text_encoder": 1}, {"b/001.png": [cut]})
    call("store", "compact", whole).done()
    assert said(whole) == ({"text_encoder": 1}, {"b/001.png": [cut]})
    (source / "b" / "001.png").unlink()
    assert pack(source, whole, model, "--prune").json["captions_cut"] == {}
    assert said(whole) == ({}, {})


@pytest.mark.parametrize("dtype", ["F16", "BF16", "F32"])
def test_latents_are_stored_as_asked_and_read_as_stored(source: Path, tmp_path: Path, model: Path, dtype: str) -> None:
    assert pack(source, tmp_path / "s", model, "--dtype", dtype).code == 0
    wanted = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}[dtype]
    with Loader(tmp_path / "s", LoaderConfig(batch_size=3, epochs=1)) as loader:
        for batch in loader:
            assert batch.latents.dtype is batch.tokens.dtype is wanted
            assert bool(torch.isfinite(batch.latents.float()).all())


def test_a_run_makes_many_shards_of_their_size(
    source: Path, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ShardFill, "is_full", lambda self, _: self.num_rows > 0)
    assert pack(source, tmp_path / "s", model, "--batch-size", 2).json["packed"] == 14
    store = Store.open(tmp_path / "s")
    assert len(store.shards) > 4
    assert store.manifest.samples == 14
    assert call("store", "verify", tmp_path / "s").code == 0


@pytest.mark.slow
def test_two_packs_that_encode_captions_first_share_what_they_keep(tmp_path: Path) -> None:
    """Whose captions have been encoded by another pack loses them neither while it reads nor while it adds some."""
    manifest, texts = make_store(tmp_path).manifest, ("a cat", "a dog", "a red house")
    first, second = (KeptCaptions(tmp_path, manifest, Share(rank=0, world_size=1)) for _ in range(2))
    with ExitStack() as held:
        for kept, text in zip((first, second), texts, strict=False):
            writer = kept.writer(held, caption_of(""), 1 << 24)
            writer.add_caption(text, EncodedCaption(caption=caption_of(text)))
    second.reopen()
    first.close()
    remove_kept_captions(tmp_path)
    third = KeptCaptions(tmp_path, manifest, Share(rank=0, world_size=1))
    assert second.missing(texts) == third.missing(texts) == ["a red house"]
    found = [own.caption.digest for own in second.of(texts[:2]) if isinstance(own, EncodedCaption)]
    assert found == [caption_digest(text) for text in texts[:2]]
    second.close()
    third.close()
    remove_kept_captions(tmp_path)
    assert {*tree(tmp_path / "pending")} == {"writer.lock"}


def test_long_captions_beside_small_rows_fill_shards_as_rows_do(
    source: Path, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A record holds its captions' whole texts; of the rest, 14 images of 16x24 px, a shard would hardly notice."""
    monkeypatch.setattr(shard_writer, "SPARE_MAP_BYTES", 1 << 20)
    for image in source.rglob("*.png"):
        image.with_suffix(".txt").write_text(f"a cat {image.stem} " + "of the house " * 20_000, encoding="ascii")
    ran = pack(in_file(tmp_path / "d.toml", source, shard_size="1MiB"), tmp_path / "s", model, "--batch-size", 2)
    assert (ran.code, ran.json["packed"]) == (0, 14), ran.err
    store = Store.open(tmp_path / "s")
    assert max(entry.record_bytes for entry in store.manifest.shards) < 3 << 20
    assert call("store", "verify", tmp_path / "s").code == 0


SIZES = ((32, 48), (32, 64), (32, 96), (60, 40))


def test_the_loss_by_crop_is_reported_by_bucket(tmp_path: Path, model: Path) -> None:
    photos = write_files(tmp_path / "photos", {f"{n}.png": png(*size) for n, size in enumerate(SIZES)})
    ran = pack(photos, tmp_path / "s", model)
    assert ran.json["crop_loss"] == {
        "train/16x24": {"images": 3, "mean": 0.25, "max": 0.5},
        "train/24x16": {"images": 1, "mean": 0.0, "max": 0.0},
    }
    again = call("ingest", "pack", photos, tmp_path / "t", "--model", model, *SMALL)
    assert "crop loss: 18.8 % of the area on average, at most 50.0 % (train/16x24)" in again.out
    assert pack(photos, tmp_path / "s", model).json["crop_loss"] == {}


def test_a_random_crop_is_recorded_where_it_was_made_and_is_the_same_at_every_run(tmp_path: Path, model: Path) -> None:
    photos = write_files(tmp_path / "photos", {f"{n}.png": png(32, 200, n) for n in range(6)})
    crops: list[list[tuple[int, ...]]] = []
    for name in ("s", "t"):
        assert pack(photos, tmp_path / name, model, "--crop", "random", "--max-crop", "1").code == 0
        store = Store.open(tmp_path / name)
        crops.append([store.sample(f"{n}.png")[1].crop for n in range(6)])
        for n in range(6):
            record = store.sample(f"{n}.png")[1]
            left, source_left, width = record.crop[1], record.crop_in_source[1], record.crop_in_source[3]
            assert (source_left, source_left + width) == (2 * left, 2 * left + 48)
    assert crops[0] == crops[1]
    assert len({crop[1] for crop in crops[0]}) > 3


# Captions that changed, at their images or by the rules: text is encoded, latents stay those that were stored.


def rows_of(store: Path) -> dict[str, tuple[tuple[object, ...], dict[str, bytes]]]:
    """Return every sample's record and row, without what its captions, its time and its place in the store decide."""
    fields = attrgetter("bucket", "split", "content", "original_size", "resized", "crop")
    return {name: (fields(held.record), held.columns) for name, held in by_id(Store.open(store)).items()}


def forbid_encoding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_reader, "decode_placed", lambda *_: pytest.fail("an image was decoded"))
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
    ran = pack(source, tmp_path / "s", model, *then, "--json").fails(words, "add --recaption to encode the captions again")
    assert ran.out == ""
    assert tree(tmp_path / "s") == before
    other_grid = call(
        "ingest", "pack", source, tmp_path / "s", "--model", model, "--grid", "16x16", "--recaption", *then
    ).fails("--grid 16x24,24x16, this run has --grid ")
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
    assert f"caption rules changed: {change}; only text is encoded" in ran.out
    assert "kept with captions of the old rules: 2 samples" in ran.out
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
        call("ingest", *command, "--model", model, *asked).fails(
            "2 templates and --shuffle-tags 5 make 10 captions of each, max_captions is 8", code=2
        )
    assert not (tmp_path / "s").exists()


def test_a_model_of_classes_takes_no_caption_rules(source: Path, tmp_path: Path) -> None:
    dit = write_dit(tmp_path / "dit", {0: "cat", 1: "dog"})
    call("ingest", "pack", source, tmp_path / "s", "--model", dit, "--grid", "16x16", "--caption-template", "ohwx").fails(
        f"--caption-template: {dit} takes a class, not text; leave the option out", code=2
    )
