"""The fate of single images: an account that adds up, values that stay with their ids, and no crash."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from bucketline.ingest.encoders.model_folder import open_model
from bucketline.ingest.encoders.text_columns import TextSettings
from bucketline.ingest.encoders.text_encoders import TextEncoder
from bucketline.ingest.encoders.vae import VaeEncoder
from bucketline.ingest.images.crop import Framing
from bucketline.ingest.images.decode import decode_image
from bucketline.ingest.images.grid import parse_grid
from bucketline.ingest.pipeline.slice_packer import ShardFill
from bucketline.loader import Loader, LoaderConfig
from bucketline.store import Store
from bucketline.store.write import shard_writer
from tests.commands import call
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
            pixels = decode_image((source / sample_id).read_bytes(), framing, sample_id).pixels
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
    assert report["captions_truncated"] == 1
    store = Store.open(tmp_path / "s")
    assert len(store.sample("a/000.png")[1].captions) == 5
    row = store.sample("b/001.png")[1].caption_rows[0]
    assert len(store.read_caption(0, row)["tokens"]) == 12


def test_captions_that_are_cut_are_listed_until_they_are_packed_again(source: Path, tmp_path: Path, model: Path) -> None:
    def listed() -> list[dict[str, Any]]:
        return [json.loads(line) for line in (tmp_path / "s" / "long_captions.jsonl").read_bytes().splitlines()]

    for name in ("a/000", "b/001"):
        (source / f"{name}.txt").write_text("red " * 10 + "cat dog", encoding="ascii")
    ran = call("ingest", "pack", source, tmp_path / "s", "--model", model, *SMALL)
    assert "  2 captions cut by text_encoder\n" in ran.out
    assert f"images with cut captions: a/000.png, b/001.png; each with what was cut in {tmp_path}/s/long_captions" in ran.out
    line = {"encoder": "text_encoder", "tokens": 14, "limit": 12, "cut": "cat dog"}
    assert listed() == [{"id": "a/000.png", **line}, {"id": "b/001.png", **line}]
    assert pack(source, tmp_path / "s", model).json["captions_cut"] == {}
    assert listed() == [{"id": "a/000.png", **line}, {"id": "b/001.png", **line}]
    (source / "a" / "000.txt").write_text("a cat", encoding="ascii")
    with (tmp_path / "s" / "long_captions.jsonl").open("a") as file:
        file.write("no line of ours\n")
    assert pack(source, tmp_path / "s", model).json["captions_truncated"] == 0
    assert listed() == [{"id": "b/001.png", **line}]
    (source / "b" / "001.png").unlink()
    assert pack(source, tmp_path / "s", model, "--prune").json["pruned"] == 1
    assert listed() == []
    assert call("store", "verify", tmp_path / "s", "--json").json["strays"] == []


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
    assert "cropped away in train/16x24: 25.0 % of the pixels on average, 50.0 % at most, of 3 images" in again.out
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
