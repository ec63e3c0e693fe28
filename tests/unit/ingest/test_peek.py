"""`ingest peek`: the image is what the model's VAE makes of the stored latent, and of no other VAE's."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

from bucketline.store import Store
from tests.commands import Ran, call
from tests.family_models import tiny_dc
from tests.kit import flip_bit, make_store, samples_of, tree
from tests.models import colour_image, encoded, pack, write_images, write_model

TURNED = "turned\n\udcff.jpg"  # is on its side in the file, as cameras write it


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory, model: Path) -> dict[str, Store]:
    """Stores by dtype that the tiny model packed, with an image whose file says that it is to be turned."""
    folder = tmp_path_factory.mktemp("peek")
    write_images(folder / "photos", 6)
    exif = Image.Exif()
    exif[0x0112] = 6
    (folder / "photos" / TURNED).write_bytes(encoded(Image.fromarray(colour_image(34, 22)), "JPEG", exif=exif))
    for dtype in ("F16", "BF16"):
        pack(folder / "photos", folder / dtype, model, "--dtype", dtype).done()
    return {dtype: Store.open(folder / dtype) for dtype in ("F16", "BF16")}


@pytest.fixture
def packed(stores: dict[str, Store]) -> Store:
    return stores["F16"]


def peek(store: Store, sample_id: str, model: Path, png: Path, *more: object) -> Ran:
    return call("ingest", "peek", store.path, sample_id, "--model", model, "-o", png, *more)


def decoded(store: Store, sample_id: str, model: Path) -> NDArray[np.uint8]:
    """Decode a stored latent by diffusers itself."""
    from diffusers import AutoencoderKL

    record = store.sample(sample_id)[1]
    bucket = store.bucket(record.bucket)
    row = bucket.sample_ids(np.arange(bucket.num_rows)).index(sample_id)
    stored = bucket.read(np.array([row]), "latent")
    latent = torch.from_numpy(stored)
    latent = latent.view(torch.bfloat16) if stored.dtype == np.uint16 else latent
    vae: Any = AutoencoderKL
    with torch.no_grad():
        image = vae.from_pretrained(model / "vae").decode(latent.float()).sample[0]
    pixels: NDArray[np.uint8] = np.rint((image.clamp(-1, 1) + 1).mul(127.5).numpy()).astype(np.uint8).transpose(1, 2, 0)
    return pixels


@pytest.mark.parametrize("dtype", ["F16", "BF16"])
def test_the_image_is_what_the_vae_makes_of_a_latent(dtype: str, stores: dict[str, Store], model: Path, tmp_path: Path) -> None:
    packed = stores[dtype]
    for sample_id in ("a/000.png", "b/001.png", TURNED):
        ran = peek(packed, sample_id, model, tmp_path / "out.png", "--json").done()
        record = packed.sample(sample_id)[1]
        bucket = packed.bucket(record.bucket)
        with Image.open(tmp_path / "out.png") as image:
            assert (image.format, image.mode) == ("PNG", "RGB")
            found = np.asarray(image)
        assert found.shape == (bucket.height_px, bucket.width_px, 3)
        assert np.array_equal(found, decoded(packed, sample_id, model))
        assert ran.json == {
            "png": str(tmp_path / "out.png"),
            "id": sample_id,
            "bucket": bucket.name,
            "height_px": bucket.height_px,
            "width_px": bucket.width_px,
            "captions": json.loads(json.dumps(record.captions)),
        }
        (tmp_path / "out.png").unlink()


def test_an_image_that_lies_on_its_side_in_its_file_comes_out_upright(packed: Store, model: Path, tmp_path: Path) -> None:
    assert packed.sample(TURNED)[1].original_size == (22, 34)
    ran = peek(packed, TURNED, model, tmp_path / "out.png")
    assert ran.out == f"{tmp_path / 'out.png'}: turned\\n\\udcff.jpg of train/16x24, 16x24 px, height first\n"
    with Image.open(tmp_path / "out.png") as image:
        assert (image.height, image.width) == (16, 24)


def test_another_vae_than_the_stores_is_refused_with_field_and_both_values(packed: Store, model: Path, tmp_path: Path) -> None:
    stored: Any = packed.manifest.encoders["vae"]
    other = write_model(tmp_path / "other", seed=1)
    ran = peek(packed, "a/000.png", other, tmp_path / "out.png")
    assert (ran.code, ran.out) == (1, "")
    assert f"encoders.vae.weights_hash = {stored['weights_hash']}, {other} has " in ran.err
    assert "name the model that the store was packed with" in ran.err
    shutil.copytree(model, tmp_path / "edited")
    config = tmp_path / "edited" / "vae" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text(encoding="utf-8")), "scaling_factor": 0.5}), encoding="utf-8")
    ran = peek(packed, "a/000.png", tmp_path / "edited", tmp_path / "out.png")
    assert ran.code == 1
    assert f"encoders.vae.config_hash = {stored['config_hash']}, {tmp_path / 'edited'} has " in ran.err
    assert not (tmp_path / "out.png").exists()


def test_a_store_that_does_not_say_which_vae_made_it_is_refused(model: Path, tmp_path: Path) -> None:
    store = make_store(tmp_path / "s", samples_of({"train/64x64": 1}))
    peek(store, "train/64x64/0.png", model, tmp_path / "out.png").fails("the store was made with encoders.vae.class = None")
    assert not (tmp_path / "out.png").exists()


def test_a_damaged_row_is_not_shown(packed: Store, model: Path, tmp_path: Path) -> None:
    shutil.copytree(packed.path, tmp_path / "s")
    store = Store.open(tmp_path / "s")
    bucket = store.buckets()[0]
    flip_bit(store.shards[0].paths.lmdb, 8 * int(bucket.locate(np.array([0])).offsets(bucket.spec, "latent")[0]) + 3)
    (sample_id,) = bucket.sample_ids(np.array([0]))
    ran = peek(store, sample_id, model, tmp_path / "out.png")
    assert ran.code == 1
    assert f"sample {sample_id!r}: the row's bytes do not match their checksum" in ran.err
    assert not (tmp_path / "out.png").exists()


def test_bad_requests_to_peek_are_refused_and_change_nothing(packed: Store, model: Path, tmp_path: Path) -> None:
    (tmp_path / "there.png").write_bytes(b"mine")
    (tmp_path / "empty").mkdir()
    out = tmp_path / "out.png"
    whole = packed.path
    cases: list[tuple[object, str, object, object, int, str]] = [
        (whole, "a/000.png", model, tmp_path / "there.png", 2, "there.png exists; name a file"),
        (whole, "a/000.png", model, whole / "x.png", 2, "is inside the store"),
        (whole, "a/000.png", model, tmp_path / "no" / "x.png", 2, "no is not a folder; make it first"),
        (whole, "a/000.png", model, tmp_path / "x.jpg", 2, "x.jpg does not end in .png"),
        (whole, "../x", model, out, 1, "has no sample '../x'; ids are paths in the source"),
        (whole, "l" * 10_000, model, out, 1, "has no sample 'lll"),
        (whole, "a/000.png", tmp_path / "nowhere", out, 1, "nowhere is not a folder"),
        (whole, "a/000.png", tmp_path / "empty", out, 1, "lacks the part vae/"),
        (tmp_path / "nowhere", "a/000.png", model, out, 1, "nowhere is not a store"),
    ]
    call("ingest", "peek", whole, "a/000.png", "--model", model, "-o", out, "--device", "abacus").fails(
        "is not a device", code=2
    )
    before = tree(tmp_path), tree(packed.path)
    for store, sample_id, own, place, code, words in cases:
        ran = call("ingest", "peek", store, sample_id, "--model", own, "-o", place)
        assert (ran.code, ran.out) == (code, ""), words
        assert words in ran.err
        assert len(ran.err) < 1000
        assert (tree(tmp_path), tree(packed.path)) == before


def test_of_moments_and_mirror_images_the_mean_as_it_was_is_shown(model: Path, tmp_path: Path) -> None:
    """An image of the mode is one of the mean: the two stores give the same image."""
    write_images(tmp_path / "photos", 3)
    images = []
    for name, more in {"mode": (), "moments": ("--latents", "moments", "--flip")}.items():
        pack(tmp_path / "photos", tmp_path / name, model, *more).done()
        peek(Store.open(tmp_path / name), "b/001.png", model, tmp_path / f"{name}.png").done()
        images.append((tmp_path / f"{name}.png").read_bytes())
    assert images[0] == images[1]


def test_the_latents_of_an_autoencoder_without_a_distribution_are_shown(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    shutil.rmtree(model / "vae")
    tiny_dc().save_pretrained(model / "vae")
    write_images(tmp_path / "photos", 1)
    pack(tmp_path / "photos", tmp_path / "s", model, "--dtype", "F32").done()
    store = Store.open(tmp_path / "s")
    peek(store, "a/000.png", model, tmp_path / "out.png").done()
    (bucket,) = store.buckets()
    with torch.no_grad():
        image = tiny_dc().from_pretrained(model / "vae").decode(torch.from_numpy(bucket.read(np.array([0]), "latent"))).sample
    expected = np.rint((image[0].clamp(-1, 1) + 1).mul(127.5).numpy()).astype(np.uint8).transpose(1, 2, 0)
    with Image.open(tmp_path / "out.png") as found:
        assert np.array_equal(np.asarray(found), expected)
