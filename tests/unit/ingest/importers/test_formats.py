"""Peculiarities of formats: several models or sizes in one place, mirrored images, hashed names, odd and hostile values."""

from __future__ import annotations

import gc
import io
import json
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
from bucketline.ingest.importers.cache import CacheEntry, ListRequest
from bucketline.ingest.importers.formats import kohya as kohya_format
from bucketline.ingest.importers.formats.mds import IMPORTER
from bucketline.ingest.importers.reading import listed
from bucketline.ingest.importers.rows import read_entry
from bucketline.store import Store
from tests.commands import call
from tests.family_models import tiny_flux2_vae
from tests.models import SMALL, write_images
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


def test_of_kohyas_caches_of_two_models_one_has_to_be_chosen(sdxl: Known, tmp_path: Path) -> None:
    source = kohya(tmp_path / "cache", sdxl)
    for sample in sdxl.samples:
        kohya_latent(source, sample, "flux", np.zeros((16, 8, 8), dtype="f4"))
    run_import("kohya", source, tmp_path / "s.store", sdxl).fails("has latents of several models", "flux (6)")
    run_import("kohya", source, tmp_path / "s.store", sdxl, "--variant", "sdxl").done()
    assert_as_packed(tmp_path / "s.store", sdxl, FORMS["kohya"])


@pytest.mark.parametrize(("of_last", "detail"), [("none", "no latent of the mirrored image"), ("text", "latents_flipped")])
def test_kohyas_mirrored_latents_are_a_column_that_each_sample_has(
    of_last: str, detail: str, sd: Known, tmp_path: Path
) -> None:
    for n, sample in enumerate(sd.samples):
        odd = {"latents_flipped": np.full(sample.latent.shape, "x")} if of_last == "text" else {}
        mirrored = odd if n == 5 else {"latents_flipped": sample.latent[:, :, ::-1].copy()}
        kohya_latent(tmp_path / "cache", sample, "sd", sample.latent, **mirrored)
    summary = run_import("kohya", tmp_path / "cache", tmp_path / "s.store", sd, "--text", "none").done().json
    assert (summary["imported"], summary["rejected"]) == (5, 1)
    assert detail in summary["rejects"][0]["detail"]
    assert call("store", "info", tmp_path / "s.store", "--json").json["rules"]["import"]["flip"] is True


def test_several_sizes_in_one_file_of_kohyas_become_samples_of_their_own(flux: Known, tmp_path: Path) -> None:
    source, sample = tmp_path / "cache", flux.samples[0]
    path = kohya_latent(source, sample, "flux", flux.fed(sample.latent))
    small: dict[str, Any] = {
        "latents_8x8": flux.fed(sample.latent[:, :8, :8]),
        "original_size_8x8": np.array(sample.original_wh),
    }
    np.savez(path, **np.load(path), **small)
    run_import("kohya", source, tmp_path / "s.store", flux, "--text", "none").done()
    _, high, wide = sample.latent.shape
    stored = {one.id: one.latent.shape[1:] for one in read_store(tmp_path / "s.store")}
    assert stored == {f"{sample.stem}/{high}x{wide}": (high, wide), f"{sample.stem}/8x8": (8, 8)}


def test_a_centred_crop_is_what_pack_makes_if_the_user_says_so(sdxl: Known, tmp_path: Path) -> None:
    source = kohya(tmp_path / "cache", sdxl)
    run_import("kohya", source, tmp_path / "s.store", sdxl, "--crop", "center").done()
    assert_as_packed(tmp_path / "s.store", sdxl, FORMS["kohya"], crops="center")
    refused = run_import("kohya", source, tmp_path / "other.store", sdxl, "--crop", "source")
    refused.fails("kohya does not record crops", code=2)


def test_musubis_unscaled_latents_and_unknown_architectures(flux: Known, tmp_path: Path) -> None:
    source, other = musubi(tmp_path / "zi", flux, "zi"), tmp_path / "other.store"
    summary = run_import("musubi", source, tmp_path / "s.store", flux, "--text", "none").done().json
    assert (summary["variant"], summary["scaling_undone"]) == ("zi", "none")
    ids = {sample.id: sample.stem.rpartition("/")[2] for sample in flux.samples}
    assert_as_packed(tmp_path / "s.store", flux, Form(scaled=False, text="none"), ids=ids)
    run_import("musubi", musubi(tmp_path / "qil", flux, "qil"), other, flux).fails("latents of 'qil'")
    run_import("musubi", musubi(tmp_path / "f2d", flux, "f2d"), other, flux).fails("channels, the VAE of", ", packed ")


@pytest.mark.parametrize(("hashed", "packed"), [(True, True), (False, False)])
def test_simpletuners_names_hashed_and_files_gzipped_or_not(*, hashed: bool, packed: bool, flux: Known, tmp_path: Path) -> None:
    source = simpletuner(tmp_path / "cache", flux, hashed=hashed, packed=packed)
    run_import("simpletuner", source, tmp_path / "s.store", flux).done()
    assert_as_packed(tmp_path / "s.store", flux, FORMS["simpletuner"], crops="source")


def test_a_model_that_simpletuners_table_lacks_is_refused(sdxl: Known, tmp_path: Path) -> None:
    source = simpletuner(tmp_path / "cache", sdxl, model="ltxvideo")
    run_import("simpletuner", source, tmp_path / "s.store", sdxl).fails("how they are scaled is unknown; known are sd1x")
    assert not (tmp_path / "s.store").exists()


def test_a_crop_of_a_larger_image_is_rejected_unless_crops_are_unknown(sdxl: Known, tmp_path: Path) -> None:
    source = simpletuner(tmp_path / "cache", sdxl)
    path = source / "aspect_ratio_bucket_metadata_my-data.json"
    metadata = json.loads(path.read_text(encoding="utf-8"))
    first = next(iter(metadata.values()))
    first["intermediary_size"] = [2 * side for side in first["intermediary_size"]]
    path.write_text(json.dumps(metadata), encoding="utf-8")
    summary = run_import("simpletuner", source, tmp_path / "s.store", sdxl).done().json
    assert summary["rejected_by_reason"] == {"crop unknown or impossible": 1}
    assert "--crop unknown imports it" in summary["rejects"][0]["detail"]
    run_import("simpletuner", source, tmp_path / "other.store", sdxl, "--crop", "unknown").done()
    assert_as_packed(tmp_path / "other.store", sdxl, FORMS["simpletuner"])


def test_ai_toolkits_sizes_crops_and_mirrored_copies(sdxl: Known, tmp_path: Path) -> None:
    source, first = ai_toolkit(tmp_path / "cache", sdxl), sdxl.samples[0]
    ai_toolkit_file(source, sdxl, first, "sdxl", flip_x=True)
    summary = run_import("ai-toolkit", source, tmp_path / "s.store", sdxl).done().json
    assert (summary["found"], summary["imported"], summary["text"]) == (7, 7, "source")
    stored = {sample.id: sample for sample in read_store(tmp_path / "s.store")}
    for sample in sdxl.samples:
        found = stored[sample.id]
        assert_same_bits(found.latent, undone(sdxl, sample.latent, FORMS["ai-toolkit"]), "F16")
        assert_same_bits(found.tokens, sample.tokens, "F16")
        assert found.record.original_size == found.record.resized == sample.record.resized
        assert found.record.crop == sample.record.crop
    mirrored = stored[f"{first.id}/flip_x"]
    assert_same_bits(mirrored.latent[:, :, ::-1], undone(sdxl, first.latent, FORMS["ai-toolkit"]), "F16")


def test_a_video_of_diffusion_pipe_is_rejected_among_images(flux: Known, tmp_path: Path) -> None:
    values: list[Any] = [
        {
            "latents": tensor(flux.fed(sample.latent))[:, None].repeat(1, 3 if n == 0 else 1, 1, 1),
            "mask": None,
            "image_spec": ("photos.tar", sample.id),
            "caption": sample.caption,
        }
        for n, sample in enumerate(flux.samples[:3])
    ]
    diffusion_pipe_values(tmp_path / "cache" / "flux" / "cache_1.500x48x32x1" / "latents", values)
    summary = run_import("diffusion-pipe", tmp_path / "cache", tmp_path / "s.store", flux).done().json
    assert (summary["imported"], summary["rejected"]) == (2, 1)
    assert "of a video" in summary["rejects"][0]["detail"]


def test_two_files_of_one_image_are_told_apart_by_their_names(sd: Known, tmp_path: Path) -> None:
    source, sample = tmp_path / "cache", sd.samples[0]
    wider = replace(sample, record=replace(sample.record, original_size=(80, 120)))
    paths = [kohya_latent(source, one, "sd", sample.latent) for one in (sample, wider)]
    run_import("kohya", source, tmp_path / "s.store", sd, "--text", "none").done()
    names = {path.relative_to(source).with_suffix("").as_posix() for path in paths}
    assert {one.id for one in read_store(tmp_path / "s.store")} == names


def test_masks_and_control_images_are_counted_and_left_out(sd: Known, tmp_path: Path) -> None:
    for n, sample in enumerate(sd.samples):
        mask = {"alpha_mask": np.ones(sample.bucket_hw, "f4")} if n else {}
        kohya_latent(tmp_path / "kohya", sample, "sd", sample.latent, **mask)
    for path in onetrainer(tmp_path / "onetrainer", sd).glob(LATENTS["onetrainer"]):
        torch.save(torch.load(path) | {"latent_mask": torch.ones(1, 8, 8), "latent_conditioning_image": None}, path)
    for kind, left_out in (("kohya", {"alpha_mask": 5}), ("onetrainer", {"latent_mask": 6})):
        ran = run_import(kind, tmp_path / kind, tmp_path / f"{kind}.store", sd, "--text", "none").done()
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
        metadata = {"architecture": "f2d", "width": str(4 * w), "height": str(4 * h), "format_version": "1.0.1"}
        save_file({f"latents_{h}x{w}_float32": fed[0].contiguous()}, source / f"{n}_0048x0048_f2d.safetensors", metadata)
        text = {"architecture": "f2d", "caption1": f"a cat {n}"}
        save_file({"ctx_vec_float32": torch.ones(4, 6)}, source / f"{n}_f2d_te.safetensors", text)
    asked = ("--model", model, "--text", "none")
    ran = call("ingest", "import", "musubi", source, tmp_path / "s.store", *asked, "--json").done()
    assert (ran.json["variant"], ran.json["imported"], ran.json["text"]) == ("f2d", 3, "none")
    assert ran.json["scaling_undone"] == "packed 2 x 2 and normalised"
    stored = {sample.id: sample for sample in read_store(tmp_path / "s.store")}
    for n, latent in enumerate(latents):
        np.testing.assert_allclose(stored[str(n)].latent, latent[0].numpy(), rtol=2**-9, atol=2**-9)
        assert stored[str(n)].caption == f"a cat {n}"
    (model / "vae" / "diffusion_pytorch_model.safetensors").unlink()
    refused = call("ingest", "import", "musubi", source, tmp_path / "o.store", "--model", model)
    refused.fails("the statistics that scale Flux.2's latents are among its weights")


# Odd and hostile files: one of six, the last; a row says its kind, what is made of it, and what its reject names.


def npz(change: Callable[[dict[str, Any]], bytes]) -> Callable[[Path], None]:
    def spoil(path: Path) -> None:
        with np.load(path) as found:
            path.write_bytes(change(dict(found)))

    return spoil


def saved(**arrays: Any) -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    return buffer.getvalue()


def damaged_lzma(arrays: dict[str, Any]) -> bytes:
    """Return an npz whose LZMA streams end in something else: the damage is found while they are decompressed."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_LZMA) as archive, zipfile.ZipFile(io.BytesIO(saved(**arrays))) as plain:
        for name in plain.namelist():
            archive.writestr(name, plain.read(name))
    data = bytearray(buffer.getvalue())
    at = data.index(b".npy") + 4
    data[at + 12 : at + 60] = bytes(range(48))
    return bytes(data)


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
    "latents of float128": ("kohya", npz(lambda own: saved(**own | {"latents": own["latents"].astype(np.longdouble)})), ""),
    "latents of dates": ("kohya", npz(lambda own: saved(**own | {"latents": np.zeros(own["latents"].shape, "M8[s]")})), ""),
    "damaged LZMA": ("kohya", npz(damaged_lzma), ""),
    "a size of text": ("kohya", npz(lambda own: saved(**own | {"original_size": np.array(["wide", "high"])})), ""),
    "a size of a million": ("kohya", npz(lambda own: saved(**own | {"original_size": np.ones(1 << 20)})), ""),
    "complex latents": ("kohya", npz(lambda own: saved(**own | {"latents": own["latents"].astype("c8")})), ""),
    "meta": ("simpletuner", torch_file(lambda latent: latent.to("meta")), ""),
    "sparse": ("simpletuner", torch_file(lambda latent: latent.to_sparse()), ""),
    "quantised": ("simpletuner", torch_file(lambda latent: torch.quantize_per_tensor(latent, 0.1, 0, torch.qint8)), ""),
    "complex": ("simpletuner", torch_file(lambda latent: latent.to(torch.complex64)), ""),
    "nested": ("simpletuner", torch_file(lambda latent: torch.nested.as_nested_tensor(list(latent))), ""),
    "compressed": ("simpletuner", deflated, "has more bytes unpacked"),
    "strides": ("onetrainer", torch_file(with_strides), "has the shape [4, 32768, 16384], 4294967296 bytes, and its file"),
    "pixels": ("ai-toolkit", of_pixels, "its latent is uint8"),
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
        ran = run_import(kind, source, tmp_path / "s.store", own, "--text", "none")
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, limits)
    assert ran.code == 0, ran.err
    assert (ran.json["imported"], ran.json["rejected"]) == (5, 1)
    (reject,) = ran.json["rejects"]
    assert (reject["reason"], detail in reject["detail"]) == ("unusable cache entry", True), reject
    assert len(read_store(tmp_path / "s.store")) == 5


def test_a_tensor_that_was_saved_as_a_parameter_is_imported(sdxl: Known, tmp_path: Path) -> None:
    source = simpletuner(tmp_path / "cache", sdxl)
    torch_file(torch.nn.Parameter)(max(source.glob(LATENTS["simpletuner"])))
    ran = run_import("simpletuner", source, tmp_path / "s.store", sdxl, "--text", "none").done()
    assert (ran.json["imported"], ran.json["rejected"]) == (6, 0)


def test_one_odd_image_among_what_is_new_does_not_refuse_a_later_run(sdxl: Known, tmp_path: Path) -> None:
    source, store, first = tmp_path / "cache", tmp_path / "s.store", sdxl.samples[0]
    for sample in sdxl.samples[1:]:
        kohya_latent(source, sample, "sdxl", sample.latent)
    assert run_import("kohya", source, store, sdxl, "--text", "none").json["imported"] == 5
    for factor, imported, reasons in ((0.25, 1, {}), (50, 0, {"wrongly scaled latent": 1})):
        kohya_latent(source, first, "sdxl", first.latent * np.float32(factor))
        ran = run_import("kohya", source, store, sdxl, "--text", "none").done()
        assert (ran.json["imported"], ran.json["unchanged"], ran.json["rejected_by_reason"]) == (imported, 5, reasons)


# MDS as Streaming writes it: merged indexes, arrays by their dtype; and indexes that are damaged.


SHAPE = (4, 32, 32)
ASKED = ("--vae", "sd", "--trust-scale", "--dtype", "F32", "--json")


def values(number: int, dtype: str = "<f2") -> NDArray[Any]:
    latent: NDArray[Any] = np.random.default_rng(number).standard_normal(SHAPE).astype(dtype)
    return latent


def written(folder: Path, latents: list[NDArray[Any]] | int = 3, kind: str = "bytes") -> Path:
    given = [values(n) for n in range(latents)] if isinstance(latents, int) else latents
    rows = [{"latents_256": one.tobytes(), "key": f"{folder.name}-{n}".encode()} for n, one in enumerate(given)]
    mds_shard(folder, rows, {"latents_256": kind, "key": "str"})
    return folder


def stored(path: Path) -> dict[str, NDArray[Any]]:
    bucket = Store.open(path).bucket("train/256x256")
    rows = np.arange(bucket.num_rows)
    return dict(zip(bucket.sample_ids(rows), bucket.read(rows, "latent"), strict=True))


def assert_imported(source: Path, expected: list[NDArray[Any]]) -> None:
    run_import("mds", source, source.parent / "s.store", None, *ASKED).done()
    found = stored(source.parent / "s.store")
    assert len(found) == len(expected)
    for n, latent in enumerate(expected):
        assert np.array_equal(found[f"{source.name}-{n}"], (latent.astype("f4").astype("f8") / 0.18215).astype("f4"))


@pytest.mark.parametrize(("kind", "dtype"), [("bytes", "<f2"), ("bytes", "<f4"), ("ndarray:float16:4,32,32", "<f2")])
def test_latents_are_read_by_the_dtype_that_was_written(kind: str, dtype: str, tmp_path: Path) -> None:
    expected = [values(n, dtype) for n in range(3)]
    assert_imported(written(tmp_path / "cache", expected, kind), expected)


@pytest.mark.parametrize("kind", ["ndarray:uint16:4,32,32", "ndarray:uint16", "ndarray", "pkl"])
def test_what_may_be_the_bits_of_bf16_is_refused_by_its_column(kind: str, tmp_path: Path) -> None:
    bits = [(values(n, "<f4").view("<u4") >> 16).astype("<u2") for n in range(3)]
    run_import("mds", written(tmp_path / "cache", bits, kind), tmp_path / "s.store", None, *ASKED).fails(
        f"its column latents_256 is {kind}"
    )
    assert not (tmp_path / "s.store").exists()


def test_a_merged_index_is_imported_once(tmp_path: Path) -> None:
    """As `streaming.base.util.merge_index` writes it, next to the indexes of the folders."""
    source, shards = tmp_path / "cache", []
    for part in "ab":
        folder = written(source / part, 2)
        (shard,) = json.loads((folder / "index.json").read_text(encoding="utf-8"))["shards"]
        shard["raw_data"]["basename"] = f"{part}/{shard['raw_data']['basename']}"
        shards.append(shard)
    (source / "index.json").write_text(json.dumps({"version": 2, "shards": shards}), encoding="utf-8")
    run_import("mds", source, tmp_path / "s.store", None, *ASKED).done()
    assert sorted(stored(tmp_path / "s.store")) == ["a-0", "a-1", "b-0", "b-1"]
    shards[0]["samples"] = 1  # an index that is not current
    (source / "index.json").write_text(json.dumps({"version": 2, "shards": shards}), encoding="utf-8")
    ran = run_import("mds", source, tmp_path / "t.store", None, *ASKED)
    assert "is not the shard of 1 samples that its index lists" in ran.err


def test_a_shard_that_is_there_only_compressed_is_refused_by_name(tmp_path: Path) -> None:
    source = written(tmp_path / "cache", 1)
    (source / "shard.00000.mds").rename(source / "shard.00000.mds.zstd")
    index = json.loads((source / "index.json").read_text(encoding="utf-8"))
    run_import("mds", source, tmp_path / "s.store", None, *ASKED).fails("shard.00000.mds is missing", "restore it")
    index["shards"][0] |= {"compression": "zstd:7", "zip_data": {"basename": "shard.00000.mds.zstd", "bytes": 9, "hashes": {}}}
    (source / "index.json").write_text(json.dumps(index), encoding="utf-8")
    run_import("mds", source, tmp_path / "s.store", None, *ASKED).fails("shard.00000.mds is missing", "decompress it")


ODD_SHARDS: tuple[Any, ...] = (None, -1, 10**30, 1.5, "", "x", "\0", "../../x", "/etc/passwd", [], {}, True, "\ud800")


@pytest.mark.parametrize("field", ["samples", "column_names", "column_encodings", "column_sizes", "raw_data"])
def test_an_index_of_odd_values_is_an_error_or_a_reject(field: str, tmp_path: Path) -> None:
    source = written(tmp_path / "cache", 1)
    index = json.loads((source / "index.json").read_text(encoding="utf-8"))
    inner: tuple[Any, ...] = tuple({"basename": odd, "bytes": 10} for odd in ODD_SHARDS) + tuple(
        [odd, odd] for odd in ODD_SHARDS
    )
    sizes = tuple({"basename": "shard.00000.mds", "bytes": odd} for odd in ODD_SHARDS)
    num_refused = 0
    for odd in (*ODD_SHARDS, *inner, *sizes):
        index["shards"][0][field] = odd
        (source / "index.json").write_text(json.dumps(index), encoding="utf-8")
        try:
            listing = listed(IMPORTER, ListRequest(source=source))
            for entry in listing.entries:
                read_entry(IMPORTER, source, entry, listing.variant)
        except (SourceError, RejectedError):
            num_refused += 1
    assert num_refused > len(ODD_SHARDS)


def test_a_samples_lengths_that_do_not_add_up_are_a_reject(tmp_path: Path) -> None:
    source = written(tmp_path / "cache", 2)
    path = source / "shard.00000.mds"
    data = bytearray(path.read_bytes())
    _, first = struct.unpack("<II", data[:8])
    data[first : first + 4] = struct.pack("<I", 0xFFFFFFF0)
    path.write_bytes(data)
    ran = run_import("mds", source, tmp_path / "s.store", None, *ASKED)
    assert (ran.json["imported"], ran.json["rejected"]) == (1, 1)


def test_an_export_has_the_mirrored_images_latents_and_they_come_back(model: Path, tmp_path: Path) -> None:
    write_images(tmp_path / "images", 3)
    packing = ("--model", model, *SMALL, "--flip", "--dtype", "F32")
    assert call("ingest", "pack", tmp_path / "images", tmp_path / "s", *packing).code == 0
    assert call("store", "export", tmp_path / "s", tmp_path / "out", "--format", "mds").code == 0
    run_import("mds", tmp_path / "out", tmp_path / "t", None, "--model", model, "--trust-scale", "--text", "none").done()
    before, after = Store.open(tmp_path / "s"), Store.open(tmp_path / "t")
    assert before.buckets()
    for bucket in before.buckets():
        other, rows = after.bucket(bucket.name), np.arange(bucket.num_rows)
        place = {sample_id: row for row, sample_id in enumerate(other.sample_ids(rows))}
        order = np.array([place[sample_id] for sample_id in bucket.sample_ids(rows)])
        for column in ("latent", "latent_flipped"):
            assert np.allclose(bucket.read(rows, column), other.read(order, column), rtol=2e-3, atol=2e-3)


def test_arrays_are_read_by_several_threads_at_once(tmp_path: Path) -> None:
    """Between two allocations the collector may let another thread parse a header, which numpy's parser does not bear."""
    np.savez(tmp_path / "a_0128x0096_sd.npz", latents=np.zeros((4, 12, 16), np.float32), original_size=[128, 96])
    entry = CacheEntry(path="a_0128x0096_sd.npz", at=("",))
    threshold, interval, callbacks = gc.get_threshold(), sys.getswitchinterval(), gc.callbacks.copy()
    gc.callbacks.append(lambda *_: list(map(str, range(50))).clear())  # Python code, during which threads may change
    gc.set_threshold(50)
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as threads:
            read = list(threads.map(lambda _: kohya_format.IMPORTER.read(tmp_path, entry, ""), range(4000)))
    finally:
        gc.callbacks[:] = callbacks
        gc.set_threshold(*threshold)
        sys.setswitchinterval(interval)
    assert {tuple(cached.latent.shape) for cached in read} == {(4, 12, 16)}
