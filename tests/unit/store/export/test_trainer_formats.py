"""`store export` to other trainers' caches: where they look, read back as they read them, and the same when imported again."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from bucketline.store import Axis, LatentColumn, RowColumn, Store, StoreWriter
from bucketline.store.read.iter_samples import Selection, live_samples
from bucketline.store.read.verified_sample import checked_row
from tests.commands import Ran, call
from tests.unit.ingest.importers.known import Form, Known, assert_as_packed, make_known, run_import
from tests.unit.ingest.importers.writers import FORMS, ai_toolkit, ai_toolkit_file, diffusion_pipe, kohya, kohya_latent

PX = (Axis(name="height_px", step=1), Axis(name="width_px", step=1))
LATENT = (Axis(name="height_px", step=2), Axis(name="width_px", step=2))


def exported(store: Path, kind: str, output: Path, *options: Any) -> Ran:
    """Export a store; it takes no more than was estimated."""
    asked = ("store", "export", store, output, "--format", kind, "--json", *options)
    planned, ran = call(*asked, "--dry-run"), call(*asked)
    if ran.code == 0:
        files = [path for path in output.rglob("*") if path.is_file()]
        assert (ran.json["files"], ran.json["bytes"]) == (len(files), sum(path.stat().st_size for path in files))
        assert planned.json == {**ran.json, "files": None, "bytes": None, "dry_run": True}
    return ran


def packed(known: Known) -> Path:
    return known.images.parent / "packed.store"


@pytest.mark.parametrize("family", ["sd", "sdxl", "sd3", "flux"])
def test_kohyas_files_are_read_by_numpy_and_named_after_images(
    known: Callable[[str], Known], family: str, tmp_path: Path
) -> None:
    own = known(family)
    exported(packed(own), "kohya", tmp_path / "out").done()
    for sample in own.samples:
        width, height = sample.original_wh
        with np.load(tmp_path / "out" / f"{sample.stem}_{width:04d}x{height:04d}_{family}.npz") as found:
            end = f"_{sample.latent.shape[1]}x{sample.latent.shape[2]}" if family in ("sd3", "flux") else ""
            wanted = own.fed(sample.latent) if family == "flux" else sample.latent
            np.testing.assert_allclose(found["latents" + end], wanted, rtol=1e-6, atol=1e-6)
            assert found["latents" + end].dtype == np.float32
            assert found["original_size" + end].tolist() == [width, height]
            top, left, high, wide = sample.record.crop
            assert found["crop_ltrb" + end].tolist() == [left, top, left + wide, top + high]
        assert (tmp_path / "out" / f"{sample.stem}.txt").read_text(encoding="utf-8") == f"{sample.caption}\n"


@pytest.mark.parametrize("family", ["sd", "sdxl", "sd3", "flux"])
def test_an_export_to_kohyas_form_is_imported_again_as_it_was(
    known: Callable[[str], Known], family: str, tmp_path: Path
) -> None:
    own = known(family)
    exported(packed(own), "kohya", tmp_path / "out").done()
    ran = run_import("kohya", tmp_path / "out", tmp_path / "s.store", own).done()
    assert ran.json["text"] == "encode"
    form, stems = Form(scaled=family == "flux"), {sample.id: sample.stem for sample in own.samples}
    assert_as_packed(tmp_path / "s.store", own, form, ids=stems)


@pytest.mark.parametrize("family", ["sd", "flux"])
def test_an_export_to_mds_is_imported_again_as_it_was(known: Callable[[str], Known], family: str, tmp_path: Path) -> None:
    own = known(family)
    exported(packed(own), "mds", tmp_path / "out", "--shard-size", "8KiB").done()
    assert len(list((tmp_path / "out" / "train").glob("*/*.mds"))) > 2
    run_import("mds", tmp_path / "out", tmp_path / "s.store", own).done()
    assert_as_packed(tmp_path / "s.store", own, FORMS["mds"])


def mds_samples(folder: Path) -> dict[str, dict[str, bytes]]:
    """Return the columns of each sample by its key, read as the shards' own descriptions say."""
    found = {}
    for bucket in sorted((folder / "train").iterdir()):
        (shard,) = json.loads((bucket / "index.json").read_text(encoding="utf-8"))["shards"]
        data = (bucket / shard["raw_data"]["basename"]).read_bytes()
        assert len(data) == shard["raw_data"]["bytes"]
        (number,) = struct.unpack_from("<I", data)
        offsets = struct.unpack_from(f"<{number + 1}I", data, 4)
        described = json.loads(data[4 * (number + 2) : offsets[0]])
        assert described["column_names"] == sorted(described["column_names"]) == shard["column_names"]
        for begin, end in pairwise(offsets):
            sizes, names = described["column_sizes"], described["column_names"]
            at = begin + 4 * sizes.count(None)
            free = iter(struct.unpack_from(f"<{sizes.count(None)}I", data, begin))
            values = {}
            for name, size in zip(names, sizes, strict=True):
                length = next(free) if size is None else size
                values[name], at = data[at : at + length], at + length
            assert at == end
            found[values["key"].decode()] = values
    return found


def test_an_mds_shard_is_as_its_description_says(known: Callable[[str], Known], tmp_path: Path) -> None:
    own = known("sd")
    exported(packed(own), "mds", tmp_path / "out").done()
    found = mds_samples(tmp_path / "out")
    for sample in own.samples:
        values, (height, width) = found[sample.id], sample.bucket_hw
        latent = np.frombuffer(values[f"latents_{height}x{width}"], dtype="<f2").reshape(sample.latent.shape)
        np.testing.assert_allclose(latent, own.fed(sample.latent), rtol=2**-10, atol=1e-6)
        assert values["caption"].decode() == sample.caption
        assert np.frombuffer(values["caption_latents"], dtype="<f2").tolist() == sample.tokens.astype("<f2").ravel().tolist()


def test_a_store_of_another_model_is_refused_by_name(known: Callable[[str], Known], tmp_path: Path) -> None:
    own = known("pixart_sigma")
    refused = call("store", "export", packed(own), tmp_path / "out", "--format", "kohya")
    assert refused.code == 1
    assert "text family 'pixart_sigma'; kohya's caches are written for sd, sdxl, sd3, flux" in refused.err
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def with_columns(known: Callable[[str], Known], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with masks of the image's size, of all samples but one, and control latents of all but another."""
    own, folder = known("sd"), tmp_path_factory.mktemp("columns")
    with StoreWriter(
        folder / "s.store",
        encoders=Store.open(packed(own)).manifest.encoders,
        columns=[
            LatentColumn(channels=4, downscale=2, dtype="F32"),
            RowColumn(role="mask", dtype="U8", shape=(PX[0], PX[1]), optional=True),
            RowColumn(role="control/depth", dtype="F32", shape=(4, *LATENT), optional=True, encoder="vae"),
        ],
    ) as writer:
        for n, sample in enumerate(own.samples):
            mask = np.random.default_rng(n).integers(0, 256, sample.bucket_hw, dtype="u1")
            columns = {"target": sample.latent, "mask": mask, "control/depth": np.ascontiguousarray(sample.latent[:, ::-1])}
            columns.pop({1: "mask", 2: "control/depth"}.get(n, ""), None)
            writer.add(sample.id, "train", columns)
    return folder / "s.store"


def columns_of(store: Path) -> dict[str, dict[str, bytes]]:
    """Return the mask and the control latent of each sample that has them, by its name without suffix."""
    opened, found = Store.open(store), dict[str, dict[str, bytes]]()
    for listed in live_samples(opened, Selection()):
        row = checked_row(opened, listed.shard, listed.record)
        roles = [role for role in ("mask", "control/depth") if row.get(f"present/{role}", b"\0") != b"\0"]
        found[listed.record.id.removesuffix(".png")] = {role: bytes(row[role]) for role in roles}
    return found


def test_masks_go_out_to_kohyas_form_and_a_control_is_not(
    known: Callable[[str], Known], with_columns: Path, tmp_path: Path
) -> None:
    refused = exported(with_columns, "kohya", tmp_path / "out")
    assert refused.code == 1
    assert "has a column control/depth: kohya's caches have no place for it, only for a mask; --columns mask" in refused.err
    assert exported(with_columns, "kohya", tmp_path / "none", "--columns", "none").code == 0
    assert exported(with_columns, "kohya", tmp_path / "out", "--columns", "mask").code == 0
    expected = {name: own["mask"] for name, own in columns_of(with_columns).items() if "mask" in own}
    for sample in known("sd").samples:
        with np.load(next((tmp_path / "out").glob(f"{sample.stem}_*_sd.npz"))) as found:
            if sample.stem not in expected:
                assert "alpha_mask" not in found
                continue
            mask = found["alpha_mask"]
            assert (mask.dtype, mask.shape) == (np.float32, sample.bucket_hw)
            assert np.rint(255 * mask).astype("u1").tobytes() == expected[sample.stem]
    assert len(expected) == 5


def test_masks_and_controls_go_out_to_mds(known: Callable[[str], Known], with_columns: Path, tmp_path: Path) -> None:
    assert exported(with_columns, "mds", tmp_path / "out").code == 0
    found, expected = mds_samples(tmp_path / "out"), columns_of(with_columns)
    for sample in known("sd").samples:
        values, own = found[sample.id], expected[sample.stem]
        assert values["mask"] == own.get("mask", b"")
        assert values["mask_shape"].decode() == ("x".join(map(str, sample.bucket_hw)) if "mask" in own else "")
        control = np.frombuffer(own.get("control/depth", b""), "<f4")
        np.testing.assert_allclose(
            np.frombuffer(values["control/depth"], "<f2"), known("sd").fed(control), rtol=2**-10, atol=1e-6
        )


def test_columns_are_named_for_trainers_formats_only(with_columns: Path, tmp_path: Path) -> None:
    assert exported(with_columns, "safetensors", tmp_path / "out", "--columns", "mask").code == 2
    missing = exported(with_columns, "mds", tmp_path / "out", "--columns", "control/edges")
    assert (missing.code, "has no column 'control/edges' next to its latents, only control/depth, mask" in missing.err) == (
        1,
        True,
    )


@pytest.mark.parametrize("step", [-1, 1], ids=["mirrored", "the same"])
def test_a_mask_of_the_mirrored_image_that_is_none_is_refused(step: int, known: Callable[[str], Known], tmp_path: Path) -> None:
    own = known("sd")
    sample = own.samples[0]
    roles = [role + end for role in ("target", "mask") for end in ("", "/flipped")]
    mask = np.random.default_rng(0).integers(0, 256, sample.bucket_hw, dtype="u1")
    values = [sample.latent, sample.latent[:, :, ::-1], mask, mask[:, ::step]]
    columns = [
        RowColumn(role=role, dtype="U8", shape=PX) if "mask" in role else RowColumn(role=role, dtype="F32", shape=(4, *LATENT))
        for role in roles
    ]
    encoders = Store.open(packed(own)).manifest.encoders
    with StoreWriter(tmp_path / "s.store", encoders=encoders, columns=columns) as writer:
        writer.add(sample.id, "train", dict(zip(roles, values, strict=True)))
    ran = exported(tmp_path / "s.store", "kohya", tmp_path / "out")
    assert ran.code == (0 if step == -1 else 1)
    assert step == -1 or f"sample '{sample.id}': its mask/flipped is not the mirror image of its mask" in ran.err


@pytest.fixture
def flux(known: Callable[[str], Known]) -> Known:
    return known("flux")


def found_by_size(images: Path, out: Path, family: str) -> dict[str, set[str]]:
    """Return the keys of the cache that sd-scripts looks for by an image's name and size; of images that have one."""
    found = {}
    for path in images.rglob("*.png"):
        with Image.open(path) as image:
            width, height = image.size
        name = path.relative_to(images).with_name(f"{path.stem}_{width:04d}x{height:04d}_{family}.npz")
        if (out / name).is_file():
            with np.load(out / name) as arrays:
                found[str(path.relative_to(images))] = set(arrays.files)
    return found


@pytest.mark.parametrize("with_images", [False, True], ids=["cache only", "next to the images"])
def test_several_sizes_of_an_image_go_into_one_file_as_they_came(*, with_images: bool, flux: Known, tmp_path: Path) -> None:
    source = tmp_path / "cache"
    if with_images:
        kohya(source, flux)
    for sample in flux.samples:
        sizes: dict[str, Any] = {}
        path = source
        for cut in (slice(None), slice(0, 8)):
            latent = flux.fed(sample.latent[:, cut, cut])
            path = kohya_latent(source, sample, "flux", latent)
            with np.load(path) as arrays:
                sizes |= dict(arrays)
        np.savez(path, **sizes)
    imported = run_import("kohya", source, tmp_path / "s.store", flux, "--text", "none", "--dtype", "F32")
    assert imported.json["imported"] == 12
    assert exported(tmp_path / "s.store", "kohya", tmp_path / "out").done().json["samples"] == 12
    found = found_by_size(flux.images, tmp_path / "out", "flux")
    assert found.keys() == {sample.id for sample in flux.samples}
    for sample in flux.samples:
        _, h, w = sample.latent.shape
        keys = ("latents", "original_size", "crop_ltrb")
        assert found[sample.id] == {f"{key}_{size}" for key in keys for size in (f"{h}x{w}", "8x8")}
    for path in source.rglob("*_flux.npz"):
        with np.load(path) as before, np.load(tmp_path / "out" / path.relative_to(source)) as after:
            for key in (key for key in before.files if key.startswith("latents")):
                np.testing.assert_allclose(after[key], before[key], rtol=1e-6, atol=1e-6)


def test_two_images_of_one_name_are_not_taken_for_two_sizes(flux: Known, tmp_path: Path) -> None:
    source = kohya(tmp_path / "cache", flux)
    sample = flux.samples[0]
    assert run_import("kohya", source, tmp_path / "s.store", flux, "--text", "none").code == 0
    other = kohya(tmp_path / "other", replace(flux, samples=(replace(sample, latent=sample.latent[:, :8, :8]),)))
    (other / f"{sample.stem}.png").rename(other / f"{sample.stem}.jpg")
    store = tmp_path / "s.store"
    assert run_import("kohya", source, store, flux, "--text", "none").code == 0
    assert run_import("kohya", other, store, flux, "--text", "none").code == 0
    call("store", "export", store, tmp_path / "out", "--format", "kohya").fails("have one name in kohya's caches")


def test_a_sample_is_refused_if_the_size_of_its_image_is_unknown(flux: Known, tmp_path: Path) -> None:
    source = diffusion_pipe(tmp_path / "cache", flux)
    assert run_import("diffusion-pipe", source, tmp_path / "s.store", flux, "--text", "none").code == 0
    call("store", "export", tmp_path / "s.store", tmp_path / "out", "--format", "kohya").fails("size of its image is unknown")
    assert not (tmp_path / "out").exists()


def test_the_latent_of_a_mirrored_image_is_refused_by_name(tmp_path: Path) -> None:
    own = make_known(tmp_path / "known", "sdxl", count=2)
    source = ai_toolkit(tmp_path / "cache", own)
    ai_toolkit_file(source, own, own.samples[0], "sdxl", flip_x=True)
    assert run_import("ai-toolkit", source, tmp_path / "s.store", own, "--text", "none").code == 0
    refused = call("store", "export", tmp_path / "s.store", tmp_path / "out", "--format", "kohya")
    assert refused.code == 1
    assert f"'{own.samples[0].id}/flip_x' is of the mirrored image" in refused.err
