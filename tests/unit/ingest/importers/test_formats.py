"""Peculiarities of formats: several models or sizes in one place, mirrored images, hashed names, paths of other machines."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tests.commands import call
from tests.unit.ingest.importers.known import Form, Known, assert_as_packed, assert_same_bits, read_store, run_import, undone
from tests.unit.ingest.importers.writers import (
    FORMS,
    ai_toolkit,
    ai_toolkit_file,
    diffusion_pipe_values,
    kohya,
    kohya_latent,
    musubi,
    onetrainer,
    simpletuner,
    tensor,
)


@pytest.mark.parametrize("family", ["sd", "sd3", "flux"])
def test_kohyas_other_models(family: str, known: Callable[[str], Known], tmp_path: Path) -> None:
    own = known(family)
    summary = run_import("kohya", kohya(tmp_path / "cache", own), tmp_path / "s.store", own).done().json
    assert summary["text"] == "encode"
    assert_as_packed(tmp_path / "s.store", own, Form(scaled=family == "flux"))


def test_of_kohyas_caches_of_two_models_one_has_to_be_chosen(known: Callable[[str], Known], tmp_path: Path) -> None:
    own = known("sdxl")
    source = kohya(tmp_path / "cache", own)
    for sample in own.samples:
        kohya_latent(source, sample, "flux", np.zeros((16, 8, 8), dtype="f4"))
    run_import("kohya", source, tmp_path / "s.store", own).fails("has latents of several models", "flux (6)")
    run_import("kohya", source, tmp_path / "s.store", own, "--variant", "sdxl").done()
    assert_as_packed(tmp_path / "s.store", own, FORMS["kohya"])


def test_kohyas_mirrored_latents_become_the_columns_mirror_and_a_sample_without_is_rejected(
    known: Callable[[str], Known], tmp_path: Path
) -> None:
    own = known("sd")
    source = tmp_path / "cache"
    for n, sample in enumerate(own.samples):
        mirrored = {} if n == 5 else {"latents_flipped": sample.latent[:, :, ::-1].copy()}
        kohya_latent(source, sample, "sd", sample.latent, **mirrored)
    summary = run_import("kohya", source, tmp_path / "s.store", own, "--text", "none").done().json
    assert (summary["imported"], summary["rejected"]) == (5, 1)
    assert "no latent of the mirrored image" in summary["rejects"][0]["detail"]
    assert call("store", "info", tmp_path / "s.store", "--json").json["rules"]["import"]["flip"] is True


def test_several_sizes_in_one_file_of_kohyas_become_samples_of_their_own(known: Callable[[str], Known], tmp_path: Path) -> None:
    own, source = known("flux"), tmp_path / "cache"
    sample = own.samples[0]
    large, small = own.fed(sample.latent), own.fed(sample.latent[:, :8, :8])
    path = kohya_latent(source, sample, "flux", large)
    found = {**np.load(path), "latents_8x8": small, "original_size_8x8": np.array(sample.original_wh)}
    np.savez(path, **found)
    run_import("kohya", source, tmp_path / "s.store", own, "--text", "none").done()
    _, high, wide = sample.latent.shape
    stored = {one.id: one.latent.shape[1:] for one in read_store(tmp_path / "s.store")}
    assert stored == {f"{sample.stem}/{high}x{wide}": (high, wide), f"{sample.stem}/8x8": (8, 8)}


def test_a_centred_crop_is_what_pack_makes_if_the_user_says_so(known: Callable[[str], Known], tmp_path: Path) -> None:
    own = known("sdxl")
    run_import("kohya", kohya(tmp_path / "cache", own), tmp_path / "s.store", own, "--crop", "center").done()
    assert_as_packed(tmp_path / "s.store", own, FORMS["kohya"], crops="center")
    run_import("kohya", tmp_path / "cache", tmp_path / "other.store", own, "--crop", "source").fails(
        "kohya does not record crops", code=2
    )


def test_musubis_unscaled_latents_and_unknown_architectures(known: Callable[[str], Known], tmp_path: Path) -> None:
    own = known("flux")
    source = musubi(tmp_path / "zi", own, "zi")
    summary = run_import("musubi", source, tmp_path / "s.store", own, "--text", "none").done().json
    assert (summary["variant"], summary["scaling_undone"]) == ("zi", "none")
    ids = {sample.id: sample.stem.rpartition("/")[2] for sample in own.samples}
    assert_as_packed(tmp_path / "s.store", own, Form(scaled=False, text="none"), ids=ids)
    run_import("musubi", musubi(tmp_path / "qil", own, "qil"), tmp_path / "other.store", own).fails("latents of 'qil'")
    run_import("musubi", musubi(tmp_path / "f2d", own, "f2d"), tmp_path / "other.store", own).fails(
        "channels, the VAE of", ", packed "
    )


@pytest.mark.parametrize(("hashed", "packed"), [(True, True), (False, False)])
def test_simpletuners_names_hashed_or_not_and_files_gzipped_or_not(
    *, hashed: bool, packed: bool, known: Callable[[str], Known], tmp_path: Path
) -> None:
    own = known("flux")
    source = simpletuner(tmp_path / "cache", own, hashed=hashed, packed=packed)
    run_import("simpletuner", source, tmp_path / "s.store", own).done()
    assert_as_packed(tmp_path / "s.store", own, FORMS["simpletuner"], crops="source")


def test_a_model_that_simpletuners_table_lacks_is_refused(known: Callable[[str], Known], tmp_path: Path) -> None:
    own = known("sdxl")
    run_import("simpletuner", simpletuner(tmp_path / "cache", own, model="ltxvideo"), tmp_path / "s.store", own).fails(
        "how they are scaled is unknown; known are sd1x"
    )
    assert not (tmp_path / "s.store").exists()


def test_a_crop_of_a_larger_image_is_rejected_unless_crops_are_unknown(known: Callable[[str], Known], tmp_path: Path) -> None:
    own = known("sdxl")
    source = simpletuner(tmp_path / "cache", own)
    path = source / "aspect_ratio_bucket_metadata_my-data.json"
    metadata = json.loads(path.read_text(encoding="utf-8"))
    first = next(iter(metadata.values()))
    first["intermediary_size"] = [2 * side for side in first["intermediary_size"]]
    path.write_text(json.dumps(metadata), encoding="utf-8")
    summary = run_import("simpletuner", source, tmp_path / "s.store", own).done().json
    assert summary["rejected_by_reason"] == {"crop unknown or impossible": 1}
    assert "--crop unknown imports it" in summary["rejects"][0]["detail"]
    run_import("simpletuner", source, tmp_path / "other.store", own, "--crop", "unknown").done()
    assert_as_packed(tmp_path / "other.store", own, FORMS["simpletuner"])


def test_ai_toolkits_sizes_crops_and_mirrored_copies(known: Callable[[str], Known], tmp_path: Path) -> None:
    own = known("sdxl")
    source, first = ai_toolkit(tmp_path / "cache", own), own.samples[0]
    ai_toolkit_file(source, own, first, "sdxl", flip_x=True)
    summary = run_import("ai-toolkit", source, tmp_path / "s.store", own).done().json
    assert (summary["found"], summary["imported"], summary["text"]) == (7, 7, "source")
    stored = {sample.id: sample for sample in read_store(tmp_path / "s.store")}
    for sample in own.samples:
        found = stored[sample.id]
        assert_same_bits(found.latent, undone(own, sample.latent, FORMS["ai-toolkit"]), "F16")
        assert_same_bits(found.tokens, sample.tokens, "F16")
        assert found.record.original_size == found.record.resized == sample.record.resized
        assert found.record.crop == sample.record.crop
    mirrored = stored[f"{first.id}/flip_x"]
    assert_same_bits(mirrored.latent[:, :, ::-1], undone(own, first.latent, FORMS["ai-toolkit"]), "F16")


def test_pixels_in_ai_toolkits_latents_are_rejected(known: Callable[[str], Known], tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    own = known("sdxl")
    source = ai_toolkit(tmp_path / "cache", own)
    path = ai_toolkit_file(source, own, own.samples[0], "sdxl")
    found = load_file(path)
    metadata = {"filename": "0.png", "latent_space_version": "sdxl", "scale_to_width": "60", "scale_to_height": "40"}
    metadata |= {"crop_x": "0", "crop_y": "0"}
    save_file({"latent": (100 * found["latent"]).to(torch.uint8)}, path, metadata)
    summary = run_import("ai-toolkit", source, tmp_path / "s.store", own).done().json
    assert summary["rejected"] == 1
    assert "its latent is uint8" in summary["rejects"][0]["detail"]


def test_a_video_of_diffusion_pipe_is_rejected_among_images(known: Callable[[str], Known], tmp_path: Path) -> None:
    own = known("flux")
    values: list[Any] = [
        {
            "latents": tensor(own.fed(sample.latent))[:, None].repeat(1, 3 if n == 0 else 1, 1, 1),
            "mask": None,
            "image_spec": ("photos.tar", sample.id),
            "caption": sample.caption,
        }
        for n, sample in enumerate(own.samples[:3])
    ]
    diffusion_pipe_values(tmp_path / "cache" / "flux" / "cache_1.500x48x32x1" / "latents", values)
    summary = run_import("diffusion-pipe", tmp_path / "cache", tmp_path / "s.store", own).done().json
    assert (summary["imported"], summary["rejected"]) == (2, 1)
    assert "of a video" in summary["rejects"][0]["detail"]


def test_two_files_of_one_image_are_told_apart_by_their_names(known: Callable[[str], Known], tmp_path: Path) -> None:
    own, source = known("sd"), tmp_path / "cache"
    sample = own.samples[0]
    kohya_latent(source, sample, "sd", sample.latent)
    wider = replace(sample, record=replace(sample.record, original_size=(80, 120)))
    kohya_latent(source, wider, "sd", sample.latent)
    run_import("kohya", source, tmp_path / "s.store", own, "--text", "none").done()
    width, height = sample.original_wh
    assert {one.id for one in read_store(tmp_path / "s.store")} == {
        f"{sample.stem}_{width:04d}x{height:04d}_sd",
        f"{sample.stem}_0120x0080_sd",
    }


def test_masks_and_control_images_are_counted_and_left_out(known: Callable[[str], Known], tmp_path: Path) -> None:
    own = known("sd")
    for n, sample in enumerate(own.samples):
        mask = {"alpha_mask": np.ones(sample.bucket_hw, "f4")} if n else {}
        kohya_latent(tmp_path / "kohya", sample, "sd", sample.latent, **mask)
    for path in onetrainer(tmp_path / "onetrainer", own).glob("image/*/*/[0-9].pt"):
        torch.save(torch.load(path) | {"latent_mask": torch.ones(1, 8, 8), "latent_conditioning_image": None}, path)
    for kind, left_out in (("kohya", {"alpha_mask": 5}), ("onetrainer", {"latent_mask": 6})):
        ran = run_import(kind, tmp_path / kind, tmp_path / f"{kind}.store", own, "--text", "none").done()
        assert (ran.json["imported"], ran.json["left_out"]) == (6, left_out)


@pytest.fixture(scope="module")
def flux2(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[torch.Tensor]]:
    """A tiny VAE of Flux.2's class that has the statistics of its latents, and latents of some images, `[4, h, w]` each."""
    from diffusers import AutoencoderKLFlux2, Flux2Pipeline

    folder = tmp_path_factory.mktemp("flux2")
    blocks = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
    torch.manual_seed(0)
    vae: Any = AutoencoderKLFlux2(block_out_channels=(4, 4), norm_num_groups=2, latent_channels=4, **blocks)
    with torch.no_grad():
        images = [2 * torch.rand(1, 3, *size) - 1 for size in ((32, 48), (48, 32), (32, 48))]
        latents = [vae.encode(image).latent_dist.mode() for image in images]
        packed = [Flux2Pipeline._patchify_latents(latent) for latent in latents]
        flat = torch.cat([one.flatten(2) for one in packed], dim=2)[0]
        vae.bn.running_mean.copy_(flat.mean(dim=1))
        vae.bn.running_var.copy_(flat.var(dim=1))
    vae.save_pretrained(folder / "vae")
    (folder / "model_index.json").write_text(json.dumps({"_class_name": "Flux2Pipeline"}), encoding="utf-8")
    return folder, [latent[0] for latent in latents]


def test_flux2s_latents_are_unpacked_by_the_statistics_among_its_vaes_weights(
    flux2: tuple[Path, list[torch.Tensor]], tmp_path: Path
) -> None:
    from diffusers import AutoencoderKLFlux2, Flux2Pipeline

    model, latents = flux2
    vae: Any = AutoencoderKLFlux2.from_pretrained(model / "vae")
    mean, var = vae.bn.running_mean.view(1, -1, 1, 1), vae.bn.running_var.view(1, -1, 1, 1)
    source = tmp_path / "cache"
    source.mkdir()
    for n, latent in enumerate(latents):
        fed = (Flux2Pipeline._patchify_latents(latent[None]) - mean) / torch.sqrt(var + vae.config.batch_norm_eps)
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
        np.testing.assert_allclose(stored[str(n)].latent, latent.numpy(), rtol=2**-9, atol=2**-9)
        assert stored[str(n)].caption == f"a cat {n}"
    (model / "vae" / "diffusion_pytorch_model.safetensors").rename(tmp_path / "weights")
    call("ingest", "import", "musubi", source, tmp_path / "o.store", "--model", model).fails(
        "the statistics that scale Flux.2's latents are among its weights"
    )
