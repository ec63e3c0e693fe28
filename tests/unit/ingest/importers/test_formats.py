"""Peculiarities of formats: several models or sizes in one place, mirrored images, captions, odd and hostile values."""

from __future__ import annotations

import gc
import io
import json
import os
import resource
import struct
import sys
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.torch import save_file

from bucketline.errors import SourceError
from bucketline.ingest.images.crop import RejectedError
from bucketline.ingest.importers.cache import IMPORTERS
from bucketline.ingest.importers.config import ImportConfig
from bucketline.ingest.importers.planning import listed
from bucketline.ingest.importers.reading import read_entry, read_npz
from bucketline.store import Store
from tests.commands import call
from tests.family_models import tiny_flux2_vae
from tests.process_memory import in_memory
from tests.unit.ingest.importers.known import Form, Known, assert_as_packed, assert_same_bits, read_store, run_import, undone
from tests.unit.ingest.importers.writers import (
    FORMS,
    LATENTS,
    WRITERS,
    ai_toolkit,
    ai_toolkit_file,
    diffusion_pipe_values,
    kohya,
    kohya_latent,
    mds_shard,
    musubi,
    onetrainer,
    simpletuner,
    tensor,
)

NO_TEXT = ("--text", "none")


def test_of_kohyas_caches_of_two_models_one_has_to_be_chosen(sdxl: Known, tmp_path: Path) -> None:
    source = kohya(tmp_path / "cache", sdxl)
    for sample in sdxl.samples:
        kohya_latent(source, sample, "flux", np.zeros((16, 8, 8), dtype="f4"))
    run_import("kohya", source, tmp_path / "s.store", sdxl).fails("has latents of several models", "flux (6)")
    run_import("kohya", source, tmp_path / "s.store", sdxl, "--variant", "sdxl").done()
    assert_as_packed(tmp_path / "s.store", sdxl, FORMS["kohya"])


@pytest.mark.parametrize(("of_last", "detail"), [("none", "no latent of the mirrored image"), ("text", "numpy.str_")])
def test_kohyas_mirrored_latents_are_a_column_that_each_sample_has(
    of_last: str, detail: str, sd: Known, tmp_path: Path
) -> None:
    for n, sample in enumerate(sd.samples):
        odd = {"latents_flipped": np.full(sample.latent.shape, "x")} if of_last == "text" else {}
        mirrored = odd if n == 5 else {"latents_flipped": sample.latent[:, :, ::-1].copy()}
        kohya_latent(tmp_path / "cache", sample, "sd", sample.latent, **mirrored)
    summary = run_import("kohya", tmp_path / "cache", tmp_path / "s.store", sd, *NO_TEXT).done().json
    assert (summary["imported"], summary["rejected"]) == (5, 1)
    assert detail in summary["rejects"][0]["detail"]
    store = Store.open(tmp_path / "s.store")
    for bucket in store.buckets():
        rows = np.arange(bucket.num_rows)
        assert np.array_equal(bucket.read(rows, "latent_flipped"), np.flip(bucket.read(rows, "latent"), axis=3))


def test_several_sizes_in_one_file_of_kohyas_become_samples_of_their_own(flux: Known, tmp_path: Path) -> None:
    source, sample = tmp_path / "cache", flux.samples[0]
    path = kohya_latent(source, sample, "flux", flux.fed(sample.latent))
    small: dict[str, Any] = {"latents_8x8": flux.fed(sample.latent[:, :8, :8])}
    np.savez(path, **np.load(path), **small)
    run_import("kohya", source, tmp_path / "s.store", flux, *NO_TEXT).done()
    _, high, wide = sample.latent.shape
    stored = {one.id: one.latent.shape[1:] for one in read_store(tmp_path / "s.store")}
    assert stored == {f"{sample.stem}/{high}x{wide}": (high, wide), f"{sample.stem}/8x8": (8, 8)}


def test_two_caches_of_one_image_are_told_apart_by_their_files(sd: Known, tmp_path: Path) -> None:
    source, sample = tmp_path / "cache", sd.samples[0]
    wider = replace(sample, record=replace(sample.record, original_size=(80, 120)))
    first, second = sorted(kohya_latent(source, one, "sd", sample.latent) for one in (sample, wider))
    assert first != second
    run_import("kohya", source, tmp_path / "s.store", sd, *NO_TEXT).done()
    assert {one.id for one in read_store(tmp_path / "s.store")} == {
        sample.stem,
        f"{sample.stem} ({second.relative_to(source)})",
    }


def test_two_images_of_kohyas_that_share_a_cache_file_are_rejected_with_both_names(sd: Known, tmp_path: Path) -> None:
    source, first = kohya(tmp_path / "cache", sd), sd.samples[0]
    (source / first.id).with_suffix(".jpg").write_bytes((source / first.id).read_bytes())
    ran = run_import("kohya", source, tmp_path / "s.store", sd).done()
    assert (ran.json["imported"], ran.json["rejected"]) == (5, 1)
    name = first.stem.rpartition("/")[2]
    assert f"{name}.png and {name}.jpg share it" in ran.json["rejects"][0]["detail"]


def test_a_size_that_only_an_old_file_of_kohyas_has_is_checked(sd: Known, tmp_path: Path) -> None:
    source = tmp_path / "cache"
    for n, sample in enumerate(sd.samples):
        path = kohya_latent(source, sample, "sd", sample.latent)
        size = {0: {"original_size": np.array(["wide", "high"])}, 1: {}}.get(n, {"original_size": sample.original_wh})
        np.savez(source / f"{sample.stem}.npz", latents=sample.latent, **size)
        path.unlink()
    ran = run_import("kohya", source, tmp_path / "s.store", sd, *NO_TEXT).done()
    assert (ran.json["variant"], ran.json["imported"]) == ("sd or sdxl", 4)
    assert "it has no original_size, only latents" in str(ran.json["rejects"])
    assert "original is ['high', 'wide'], expected two numbers" in str(ran.json["rejects"])
    sizes = {sample.stem: sample.record.original_size for sample in sd.samples[2:]}
    assert {one.id: one.record.original_size for one in read_store(tmp_path / "s.store")} == sizes


def test_a_centred_crop_is_what_pack_makes_if_the_user_says_so(sdxl: Known, tmp_path: Path) -> None:
    source = kohya(tmp_path / "cache", sdxl)
    run_import("kohya", source, tmp_path / "s.store", sdxl, "--crop", "center").done()
    assert_as_packed(tmp_path / "s.store", sdxl, FORMS["kohya"], crops="center")
    refused = run_import("kohya", source, tmp_path / "other.store", sdxl, "--crop", "source")
    refused.fails("kohya does not record crops", code=2)


def test_musubis_unscaled_latents_and_unknown_architectures(flux: Known, tmp_path: Path) -> None:
    source, other = musubi(tmp_path / "zi", flux, "zi"), tmp_path / "other.store"
    summary = run_import("musubi", source, tmp_path / "s.store", flux, *NO_TEXT).done().json
    assert (summary["variant"], summary["scaling_undone"]) == ("zi", "none")
    assert summary["left_out"] == {"control latents": 6}
    ids = {sample.id: sample.stem.rpartition("/")[2] for sample in flux.samples}
    assert_as_packed(tmp_path / "s.store", flux, Form(scaled=False, has_text=False), ids=ids)
    run_import("musubi", musubi(tmp_path / "qil", flux, "qil"), other, flux).fails("'qil'", "known are hv, zi")
    run_import("musubi", musubi(tmp_path / "f2d", flux, "f2d"), other, flux).fails("channels, the VAE of", ", packed ")
    run_import("musubi", source, other, flux, "--trigger", "ohwx").fails("caption1 of the text caches", code=2)


@pytest.mark.parametrize(("hashed", "packed"), [(True, True), (False, False)])
def test_simpletuners_names_hashed_and_files_gzipped_or_not(*, hashed: bool, packed: bool, flux: Known, tmp_path: Path) -> None:
    source = simpletuner(tmp_path / "cache", flux, hashed=hashed, packed=packed)
    run_import("simpletuner", source, tmp_path / "s.store", flux).done()
    assert_as_packed(tmp_path / "s.store", flux, FORMS["simpletuner"], crops="source")


def test_a_model_of_simpletuner_is_in_the_table_and_named_if_the_cache_does_not_say_it(sdxl: Known, tmp_path: Path) -> None:
    source, store = simpletuner(tmp_path / "cache", sdxl), tmp_path / "s.store"
    other = simpletuner(tmp_path / "other", sdxl, model="ltxvideo")
    run_import("simpletuner", other, store, sdxl).fails("how they are scaled is unknown; known are sd1x")
    for path in (source / "cache" / "text").iterdir():
        path.unlink()
    run_import("simpletuner", source, store, sdxl).fails("does not say its model; known are sd1x", "--variant")
    assert run_import("simpletuner", source, store, sdxl, "--variant", "sdxl").done().json["imported"] == 6


def changed_metadata(source: Path, change: Callable[[dict[str, Any]], None]) -> None:
    path = source / "aspect_ratio_bucket_metadata_my-data.json"
    metadata = json.loads(path.read_text(encoding="utf-8"))
    change(metadata)
    path.write_text(json.dumps(metadata), encoding="utf-8")


def test_a_crop_is_stored_as_recorded_if_it_is_in_the_image(sdxl: Known, tmp_path: Path) -> None:
    source, (first, second, *_) = simpletuner(tmp_path / "cache", sdxl), sdxl.samples

    def change(images: dict[str, Any]) -> None:
        larger, outside = list(images.values())[:2]
        larger["intermediary_size"] = [2 * side for side in larger["intermediary_size"]]
        larger["crop_coordinates"] = [5, 7]
        outside["crop_coordinates"] = [9, 9]

    changed_metadata(source, change)
    summary = run_import("simpletuner", source, tmp_path / "s.store", sdxl).done().json
    assert summary["rejected_by_reason"] == {"crop unknown or impossible": 1}
    assert (summary["rejects"][0]["id"], "--crop unknown imports it" in summary["rejects"][0]["detail"]) == (second.id, True)
    record = next(one.record for one in read_store(tmp_path / "s.store") if one.id == first.id)
    assert (record.crop, record.resized) == ((5, 7, *first.bucket_hw), tuple(2 * side for side in first.record.resized))
    (top, left), (height, width) = record.crop_in_source[:2], first.record.original_size
    assert (top, left) == (5 * height // record.resized[0], 7 * width // record.resized[1])


def test_two_images_of_simpletuners_that_share_a_cache_file_are_both_rejected(sdxl: Known, tmp_path: Path) -> None:
    source, first = simpletuner(tmp_path / "cache", sdxl), sdxl.samples[0]
    changed_metadata(source, lambda images: images.update({next(iter(images)).replace(".png", ".jpg"): {}}))
    ran = run_import("simpletuner", source, tmp_path / "u.store", sdxl).done()
    assert (ran.json["imported"], ran.json["rejected"]) == (5, 2)
    assert all(f"{first.stem}.jpg share it" in reject["detail"] for reject in ran.json["rejects"])


def test_ai_toolkits_sizes_crops_and_mirrored_copies(sdxl: Known, tmp_path: Path) -> None:
    source, first = ai_toolkit(tmp_path / "cache", sdxl), sdxl.samples[0]
    ai_toolkit_file(source, sdxl, first, "sdxl", flip_x=True)
    summary = run_import("ai-toolkit", source, tmp_path / "s.store", sdxl).done().json
    assert (summary["found"], summary["imported"]) == (7, 7)
    mirrored = next(one for one in read_store(tmp_path / "s.store") if one.id == f"{first.id}/flip_x")
    assert_same_bits(mirrored.latent[:, :, ::-1], undone(sdxl, first.latent, FORMS["ai-toolkit"]), "F16")
    assert mirrored.caption == first.caption


@pytest.mark.parametrize(
    ("kind", "trigger", "in_file", "captions"),
    [
        ("ai-toolkit", "ohwx", "[trigger] cat,\nat noon", ("ohwx cat,\nat noon",)),
        ("ai-toolkit", "ohwx", "a cat", ("ohwx a cat",)),
        ("ai-toolkit", None, "a [name] cat", ("a  cat",)),
        ("simpletuner", "ohwx", "a cat\n\nat noon\n", ("ohwx a cat", "ohwx at noon")),
        ("simpletuner", "ohwx", "", ("ohwx",)),
        ("kohya", "ohwx", "a cat\nanother line\n", ("ohwx a cat",)),
    ],
)
def test_a_caption_file_is_what_the_trainer_makes_of_it(
    kind: str, trigger: str | None, in_file: str, captions: tuple[str, ...], sdxl: Known, tmp_path: Path
) -> None:
    source = WRITERS[kind][0](tmp_path / "cache", sdxl)
    for sample in sdxl.samples:
        (source / sample.id).with_suffix(".txt").write_text(in_file, encoding="utf-8")
    asked = () if trigger is None else ("--trigger", trigger)
    run_import(kind, source, tmp_path / "s.store", sdxl, *NO_TEXT, *asked).done()
    assert {sample.record.captions for sample in read_store(tmp_path / "s.store")} == {captions}


@pytest.mark.parametrize("newest", [0, 1])
def test_of_two_groups_of_onetrainers_the_newest_has_the_image(newest: int, sd: Known, tmp_path: Path) -> None:
    source = onetrainer(tmp_path / "cache", sd)
    (group,) = (source / "image").iterdir()
    halved = replace(sd, samples=tuple(replace(sample, latent=sample.latent / np.float32(2)) for sample in sd.samples))
    (other,) = (onetrainer(tmp_path / "other", halved) / "image").iterdir()
    names = sorted(("a" * 64, "b" * 64), reverse=newest == 1)
    group = group.rename(source / "image" / names[0])
    other = other.rename(source / "image" / names[1])
    for folder, at in ((group, 2), (other, 1)):
        os.utime(folder / "variation-0" / "aggregate.pt", ns=(at * 10**18, at * 10**18))
    ran = run_import("onetrainer", source, tmp_path / "s.store", sd, "--captions", sd.images).done()
    assert "6 images are in several groups: the newest is taken" in ran.json["notes"]
    assert_as_packed(tmp_path / "s.store", sd, FORMS["onetrainer"], crops="source")


def test_a_video_of_diffusion_pipe_is_rejected_among_images(flux: Known, tmp_path: Path) -> None:
    values: list[Any] = [
        {
            "latents": tensor(flux.fed(sample.latent))[:, None].repeat(1, 3 if n == 0 else 1, 1, 1),
            "mask": None,
            "image_spec": ("photos.tar", sample.id),
            "caption": 7 if n == 1 else sample.caption,
        }
        for n, sample in enumerate(flux.samples[:3])
    ]
    diffusion_pipe_values(tmp_path / "cache" / "flux" / "cache_1.500x48x32x1" / "latents", values)
    summary = run_import("diffusion-pipe", tmp_path / "cache", tmp_path / "s.store", flux).done().json
    assert (summary["imported"], summary["rejected"]) == (1, 2)
    assert "of a video" in str(summary["rejects"])
    assert "its caption is 7, expected a list of texts" in str(summary["rejects"])


def test_masks_and_control_images_are_counted_and_left_out(sd: Known, tmp_path: Path) -> None:
    for n, sample in enumerate(sd.samples):
        mask = {"alpha_mask": np.ones(sample.bucket_hw, "f4")} if n else {}
        kohya_latent(tmp_path / "kohya", sample, "sd", sample.latent, **mask)
    for path in onetrainer(tmp_path / "onetrainer", sd).glob(LATENTS["onetrainer"]):
        torch.save(torch.load(path) | {"latent_mask": torch.ones(1, 8, 8), "latent_conditioning_image": None}, path)
    for kind, left_out in (("kohya", {"alpha_mask": 5}), ("onetrainer", {"latent_mask": 6})):
        ran = run_import(kind, tmp_path / kind, tmp_path / f"{kind}.store", sd, *NO_TEXT).done()
        assert (ran.json["imported"], ran.json["left_out"]) == (6, left_out)


def test_flux2s_latents_are_unpacked_by_the_statistics_among_its_vaes_weights(tmp_path: Path) -> None:
    from diffusers import Flux2Pipeline

    model, source = tmp_path / "model", tmp_path / "cache"
    torch.manual_seed(0)
    vae: Any = tiny_flux2_vae()
    with torch.no_grad():
        images = [2 * torch.rand(1, 3, *size) - 1 for size in ((32, 48), (48, 32), (32, 48))]
        latents = [vae.encode(image).latent_dist.mode() for image in images]
        packed = [Flux2Pipeline._patchify_latents(latent) for latent in latents]
        flat = torch.cat([one.flatten(2) for one in packed], dim=2)[0]
        mean, var = vae.bn.running_mean.copy_(flat.mean(dim=1)), vae.bn.running_var.copy_(flat.var(dim=1))
    vae.save_pretrained(model / "vae")
    (model / "model_index.json").write_text(json.dumps({"_class_name": "Flux2Pipeline"}), encoding="utf-8")
    source.mkdir()
    for n, latent in enumerate(packed):
        fed = (latent - mean.view(1, -1, 1, 1)) / torch.sqrt(var.view(1, -1, 1, 1) + vae.config.batch_norm_eps)
        _, _, h, w = fed.shape
        save_file({f"latents_{h}x{w}_float32": fed[0].contiguous()}, source / f"{n}_0048x0048_f2d.safetensors")
    asked = ("--model", model, *NO_TEXT)
    ran = call("ingest", "import", "musubi", source, tmp_path / "s.store", *asked, "--json").done()
    assert (ran.json["variant"], ran.json["imported"]) == ("f2d", 3)
    assert ran.json["scaling_undone"] == "packed 2 x 2 and normalised"
    assert ran.json["spread"] == pytest.approx(1, abs=0.05)
    stored = {sample.id: sample for sample in read_store(tmp_path / "s.store")}
    for n, latent in enumerate(latents):
        np.testing.assert_allclose(stored[str(n)].latent, latent[0].numpy(), rtol=2**-9, atol=2**-9)
    (model / "vae" / "diffusion_pytorch_model.safetensors").unlink()
    refused = call("ingest", "import", "musubi", source, tmp_path / "o.store", "--model", model)
    refused.fails("the statistics that scale Flux.2's latents are among its weights")


# Odd and hostile files: one of six, the last; a row says its kind, what is made of it, and what its reject names.


def npz(**changes: Callable[[NDArray[Any]], Any]) -> Callable[[Path], None]:
    def spoil(path: Path) -> None:
        with np.load(path) as found:
            np.savez(path, **{**found, **{name: change(found[name]) for name, change in changes.items()}})

    return spoil


def torch_file(change: Callable[[Any], Any]) -> Callable[[Path], None]:
    return lambda path: torch.save(change(torch.load(path, weights_only=True)), path)


def with_strides(found: dict[str, Any]) -> dict[str, Any]:
    """Return a latent of 8 GiB as float32, of one value."""
    return {**found, "latent_image": torch.ones(1, dtype=torch.float16).as_strided((4, 1 << 15, 1 << 14), (0, 0, 0))}


def deflated(path: Path) -> None:
    buffer = io.BytesIO()
    torch.save(torch.zeros(4, 1 << 10, 1 << 10), buffer)
    with zipfile.ZipFile(buffer) as plain, zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed:
        for name in plain.namelist():
            packed.writestr(name, plain.read(name))


def of_pixels(path: Path) -> None:
    with safe_open(path, "pt") as file:
        metadata, latent = file.metadata(), file.get_tensor("latent")
    save_file({"latent": (100 * latent).to(torch.uint8)}, path, metadata)


ODD: dict[str, tuple[str, Callable[[Path], None], str]] = {
    "latents of float128": ("kohya", npz(latents=lambda own: own.astype(np.longdouble)), "numpy.longdouble"),
    "latents of dates": ("kohya", npz(latents=lambda own: np.zeros(own.shape, "M8[s]")), "datetime64"),
    "complex latents": ("kohya", npz(latents=lambda own: own.astype("c8")), "latents is complex64"),
    "meta": ("simpletuner", torch_file(lambda latent: latent.to("meta")), "tensor (meta"),
    "sparse": ("simpletuner", torch_file(lambda latent: latent.to_sparse()), "tensor (cpu sparse_coo"),
    "quantised": ("simpletuner", torch_file(lambda one: torch.quantize_per_tensor(one, 0.1, 0, torch.qint8)), "qint8"),
    "nested": ("simpletuner", torch_file(lambda latent: torch.nested.as_nested_tensor(list(latent))), "tensor (cpu nested"),
    "a list": ("simpletuner", torch_file(lambda latent: [latent]), "it holds a list"),
    "compressed": ("simpletuner", deflated, "has more bytes unpacked"),
    "strides": ("onetrainer", torch_file(with_strides), "of the shape [4, 32768, 16384], whose values"),
    "pixels": ("ai-toolkit", of_pixels, "latent is uint8"),
}


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's, of prototypes and of what it will no longer quantise
@pytest.mark.parametrize("how", ODD)
def test_an_odd_file_is_a_reject_that_takes_no_memory(how: str, known: Callable[[str], Known], tmp_path: Path) -> None:
    kind, spoil, detail = ODD[how]
    write, family = WRITERS[kind]
    own = known(family)
    source = write(tmp_path / "cache", own)
    spoil(max(source.glob(LATENTS[kind])))
    limits = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (in_memory("VmData") + (1 << 30), limits[1]))
    try:
        ran = run_import(kind, source, tmp_path / "s.store", own, *NO_TEXT)
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, limits)
    assert ran.code == 0, ran.err
    assert (ran.json["imported"], ran.json["rejected"]) == (5, 1)
    (reject,) = ran.json["rejects"]
    assert (reject["reason"], detail in reject["detail"]) == ("unusable cache entry", True), reject


def test_a_tensor_that_was_saved_as_a_parameter_is_imported(sdxl: Known, tmp_path: Path) -> None:
    source = simpletuner(tmp_path / "cache", sdxl)
    torch_file(torch.nn.Parameter)(max(source.glob(LATENTS["simpletuner"])))
    ran = run_import("simpletuner", source, tmp_path / "s.store", sdxl, *NO_TEXT).done()
    assert (ran.json["imported"], ran.json["rejected"]) == (6, 0)


def test_arrays_are_read_by_several_threads_at_once(tmp_path: Path) -> None:
    """Between two allocations the collector may let another thread parse a header, which numpy's parser does not bear."""
    np.savez(tmp_path / "a.npz", latents=np.zeros((4, 12, 16), np.float32), original_size=[128, 96])
    threshold, interval, callbacks = gc.get_threshold(), sys.getswitchinterval(), gc.callbacks.copy()
    gc.callbacks.append(lambda *_: list(map(str, range(50))).clear())  # Python code, during which threads may change
    gc.set_threshold(50)
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as threads:
            read = list(threads.map(lambda _: read_npz(tmp_path, "a.npz", lambda _: True), range(4000)))
    finally:
        gc.callbacks[:] = callbacks
        gc.set_threshold(*threshold)
        sys.setswitchinterval(interval)
    assert {own["latents"].shape for own in read} == {(4, 12, 16)}


# MDS as Streaming writes it: merged indexes, arrays by their dtype; and indexes that are damaged.


ASKED = ("--vae", "sd", "--trust-scale", "--dtype", "F32")


def values(number: int, dtype: str = "<f2") -> NDArray[Any]:
    latent: NDArray[Any] = np.random.default_rng(number).standard_normal((4, 32, 32)).astype(dtype)
    return latent


def written(folder: Path, latents: list[NDArray[Any]] | int = 3, kind: str = "bytes") -> Path:
    given = [values(n) for n in range(latents)] if isinstance(latents, int) else latents
    rows = [{"latents_256": one.tobytes(), "key": f"{folder.name}-{n}".encode()} for n, one in enumerate(given)]
    mds_shard(folder, rows, {"latents_256": kind, "key": "str"})
    return folder


@pytest.mark.parametrize(("kind", "dtype"), [("bytes", "<f2"), ("bytes", "<f4"), ("ndarray:float16:4,32,32", "<f2")])
def test_latents_are_read_by_the_dtype_that_was_written(kind: str, dtype: str, tmp_path: Path) -> None:
    expected = [values(n, dtype) for n in range(3)]
    run_import("mds", written(tmp_path / "cache", expected, kind), tmp_path / "s.store", None, *ASKED).done()
    found = {one.id: one.latent for one in read_store(tmp_path / "s.store")}
    for n, latent in enumerate(expected):
        assert np.array_equal(found[f"cache-{n}"], (latent.astype("f4").astype("f8") / 0.18215).astype("f4"))


@pytest.mark.parametrize("kind", ["ndarray:uint16:4,32,32", "ndarray", "pkl"])
def test_what_may_be_the_bits_of_bf16_is_refused_by_its_column(kind: str, tmp_path: Path) -> None:
    bits = [(values(n, "<f4").view("<u4") >> 16).astype("<u2") for n in range(3)]
    ran = run_import("mds", written(tmp_path / "cache", bits, kind), tmp_path / "s.store", None, *ASKED)
    ran.fails(f"its column latents_256 is {kind}")


def test_a_merged_index_is_imported_once_and_a_shard_that_it_lists_wrongly_is_named(tmp_path: Path) -> None:
    """As `streaming.base.util.merge_index` writes it, next to the indexes of the folders."""
    source, shards = tmp_path / "cache", []
    for part in "ab":
        folder = written(source / part, 2)
        (shard,) = json.loads((folder / "index.json").read_text(encoding="utf-8"))["shards"]
        shard["raw_data"]["basename"] = f"{part}/{shard['raw_data']['basename']}"
        shards.append(shard)

    def imported(store: str) -> Any:
        (source / "index.json").write_text(json.dumps({"version": 2, "shards": shards}), encoding="utf-8")
        return run_import("mds", source, tmp_path / store, None, *ASKED)

    imported("s.store").done()
    assert sorted(one.id for one in read_store(tmp_path / "s.store")) == ["a-0", "a-1", "b-0", "b-1"]
    shards[0]["samples"] = 1  # an index that is not current
    imported("t.store").fails("is not the shard of 1 samples that its index lists")
    (source / "b" / "shard.00000.mds").rename(source / "b" / "shard.00000.mds.zstd")
    shards[0]["samples"], shards[1]["compression"] = 2, "zstd:7"
    imported("t.store").fails("shard.00000.mds is missing", "decompress it")


ODD_VALUES: tuple[Any, ...] = (None, -1, 10**30, 1.5, "", "x", "\0", "../../x", "/etc/passwd", [], {}, True, "\ud800")


@pytest.mark.parametrize("field", ["samples", "column_names", "column_encodings", "column_sizes", "raw_data"])
def test_an_index_of_odd_values_is_an_error_or_a_reject(field: str, tmp_path: Path) -> None:
    source, importer, num_refused = written(tmp_path / "cache", 1), IMPORTERS["mds"], 0
    index = json.loads((source / "index.json").read_text(encoding="utf-8"))
    inner = [{"basename": odd, "bytes": 10} for odd in ODD_VALUES] + [[odd, odd] for odd in ODD_VALUES]
    sizes = [{"basename": "shard.00000.mds", "bytes": odd} for odd in ODD_VALUES]
    for odd in (*ODD_VALUES, *inner, *sizes):
        index["shards"][0][field] = odd
        (source / "index.json").write_text(json.dumps(index), encoding="utf-8")
        try:
            listing = listed(importer, ImportConfig(kind="mds", source=source, place=tmp_path / "s.store"))
            for entry in listing.entries:
                read_entry(importer, source, entry)
        except (SourceError, RejectedError):
            num_refused += 1
    assert num_refused > len(ODD_VALUES)


def test_a_samples_lengths_that_do_not_add_up_are_a_reject(tmp_path: Path) -> None:
    source = written(tmp_path / "cache", 2)
    path = source / "shard.00000.mds"
    data = bytearray(path.read_bytes())
    _, first = struct.unpack("<II", data[:8])
    data[first : first + 4] = struct.pack("<I", 0xFFFFFFF0)
    path.write_bytes(data)
    ran = run_import("mds", source, tmp_path / "s.store", None, *ASKED)
    assert (ran.json["imported"], ran.json["rejected"]) == (1, 1)
