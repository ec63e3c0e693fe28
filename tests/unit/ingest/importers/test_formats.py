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
    run_import("musubi", musubi(tmp_path / "f2d", own, "f2d"), tmp_path / "other.store", own).fails("channels, the VAE of")


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
