"""Masks and latents of control images become columns, which the loader delivers for the rows that have them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from bucketline.store import Store
from bucketline.store.format.hashing import draw
from tests.commands import call
from tests.unit.ingest.importers.delivered import delivered
from tests.unit.ingest.importers.known import Known, Sample, read_store, run_import
from tests.unit.ingest.importers.writers import diffusion_pipe_values, kohya_latent, musubi, onetrainer, tensor

TEXTLESS = ("--text", "none")


def eighths(height: int, width: int) -> NDArray[np.uint8]:
    """Return a mask, as an image editor writes it, that is unlike its mirror image."""
    drawn = np.random.default_rng(height).integers(0, 256, (height, width), dtype="u1")
    drawn[:, 0] = 255
    return drawn


def control_of(sample: Sample) -> NDArray[np.float32]:
    return np.ascontiguousarray(sample.latent[:, ::-1])


def assert_close(found: torch.Tensor, expected: NDArray[np.float32]) -> None:
    np.testing.assert_allclose(found.float().numpy(), expected, rtol=2**-9, atol=2**-9)


def kohya_with_masks(folder: Path, own: Known, *, without: int, **more: Any) -> Path:
    for n, sample in enumerate(own.samples):
        mask = {} if n == without else {"alpha_mask": eighths(*sample.bucket_hw).astype("f4") / 255}
        mirrored = {name: sample.latent[:, :, ::-1].copy() for name in more}
        kohya_latent(folder, sample, "sd", sample.latent, **mask, **mirrored)
    return folder


def test_kohyas_alpha_masks_are_stored_in_px_where_they_are(known: Callable[[str], Known], tmp_path: Path) -> None:
    own = known("sd")
    source = kohya_with_masks(tmp_path / "cache", own, without=2)
    ran = run_import("kohya", source, tmp_path / "s.store", own, *TEXTLESS).done()
    assert (ran.json["imported"], ran.json["columns"], ran.json["left_out"]) == (6, ["mask"], {})
    found = delivered(tmp_path / "s.store", "mask")
    for n, sample in enumerate(own.samples):
        row = found[sample.stem]
        assert_close(row.latent, sample.latent)
        if n == 2:
            assert not row.columns
        else:
            np.testing.assert_array_equal(row.columns["mask"].numpy(), eighths(*sample.bucket_hw))
    assert Store.open(tmp_path / "s.store").manifest.columns["mask"].optional
    assert call("store", "verify", tmp_path / "s.store").code == 0
    again = run_import("kohya", source, tmp_path / "s.store", own, *TEXTLESS)
    assert (again.json["unchanged"], again.json["columns"]) == (6, ["mask"])


def test_masks_are_mirrored_with_their_latents(known: Callable[[str], Known], tmp_path: Path) -> None:
    own = known("sd")
    source = kohya_with_masks(tmp_path / "cache", own, without=0, latents_flipped=True)
    assert run_import("kohya", source, tmp_path / "s.store", own, *TEXTLESS).code == 0
    found = Store.open(tmp_path / "s.store")
    bucket = found.bucket(own.samples[1].record.bucket)
    rows = np.arange(bucket.num_rows)
    mask, mirrored, there = (bucket.read(rows, name) for name in ("mask", "mask/flipped", "present/mask"))
    assert there.any()
    np.testing.assert_array_equal(mirrored, mask[:, :, ::-1])


def test_columns_can_be_left_out_and_are_counted(known: Callable[[str], Known], tmp_path: Path) -> None:
    own = known("sd")
    source = kohya_with_masks(tmp_path / "cache", own, without=2)
    ran = run_import("kohya", source, tmp_path / "s.store", own, *TEXTLESS, "--columns", "none")
    assert (ran.json["imported"], ran.json["columns"], ran.json["left_out"]) == (6, [], {"mask": 5})
    assert not Store.open(tmp_path / "s.store").manifest.columns
    run_import("kohya", source, tmp_path / "o.store", own, *TEXTLESS, "--columns", "control/depth").fails(
        "no sample has a column control/depth"
    )
    assert run_import("kohya", source, tmp_path / "o.store", own, "--columns", "target").code == 2


def test_a_column_that_no_checked_sample_had_is_rejected_by_name(
    known: Callable[[str], Known], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bucketline.ingest.importers import planning

    own = known("sd")
    checked = min(range(6), key=lambda n: draw(own.samples[n].stem, "check", "import"))
    source = kohya_with_masks(tmp_path / "cache", own, without=checked)
    monkeypatch.setattr(planning, "CHECKED", 1)
    ran = run_import("kohya", source, tmp_path / "s.store", own, *TEXTLESS)
    assert (ran.json["imported"], ran.json["rejected"]) == (1, 5)
    assert "--columns mask imports it into a new store, --columns none leaves it out" in ran.json["rejects"][0]["detail"]
    named = run_import("kohya", source, tmp_path / "o.store", own, *TEXTLESS, "--columns", "mask")
    assert (named.json["imported"], named.json["columns"]) == (6, ["mask"])


@pytest.mark.parametrize("bad", [np.full((4, 4), 0.5), np.full((32, 48), 1.5), np.full((32, 48), np.nan), np.ones((2, 32, 48))])
def test_a_mask_that_is_none_is_rejected(bad: NDArray[np.float64], known: Callable[[str], Known], tmp_path: Path) -> None:
    own = known("sd")
    source = kohya_with_masks(tmp_path / "cache", own, without=6)
    first = next(sample for sample in own.samples if sample.bucket_hw == (32, 48))
    kohya_latent(source, first, "sd", first.latent, alpha_mask=bad.astype("f4"))
    ran = run_import("kohya", source, tmp_path / "s.store", own, *TEXTLESS).done()
    (reject,) = ran.json["rejects"]
    assert reject["id"] == first.stem
    assert "its mask" in reject["detail"]


def test_onetrainers_masks_are_of_the_latents_size_and_its_conditioning_images_controls(
    known: Callable[[str], Known], tmp_path: Path
) -> None:
    own = known("sd")
    source = onetrainer(tmp_path / "cache", own)
    for path in source.glob("image/*/*/[0-9].pt"):
        sample = own.samples[int(path.stem)]
        more = {"latent_mask": tensor(eighths(*sample.latent.shape[1:]).astype("f4") / 255)[None]}
        more["latent_conditioning_image"] = tensor(control_of(sample))
        torch.save(torch.load(path) | more, path)
    ran = run_import("onetrainer", source, tmp_path / "s.store", own, *TEXTLESS).done()
    assert ran.json["columns"] == ["control/conditioning", "mask"]
    found = delivered(tmp_path / "s.store", "control/conditioning", "mask")
    for sample in own.samples:
        row = found[sample.id]
        np.testing.assert_array_equal(row.columns["mask"].numpy(), eighths(*sample.latent.shape[1:]))
        assert_close(row.columns["control/conditioning"], control_of(sample))


def test_diffusion_pipes_controls_are_unscaled_like_its_latents(known: Callable[[str], Known], tmp_path: Path) -> None:
    own = known("flux")
    values: list[Any] = [
        {
            "latents": tensor(own.fed(sample.latent)),
            "control_latents": tensor(own.fed(control_of(sample))) if n else None,
            "mask": tensor(eighths(*sample.bucket_hw).astype("f4") / 255) if n == 1 else None,
            "image_spec": (None, f"/data/{sample.id}"),
            "caption": [sample.caption],
        }
        for n, sample in enumerate(own.samples)
    ]
    diffusion_pipe_values(tmp_path / "cache" / "flux" / "cache_1.500x48x32x1" / "latents", values)
    run_import("diffusion-pipe", tmp_path / "cache", tmp_path / "s.store", own, *TEXTLESS).done()
    found = delivered(tmp_path / "s.store", "control/image", "mask")
    assert [sorted(found[sample.id].columns) for sample in own.samples[:3]] == [
        [],
        ["control/image", "mask"],
        ["control/image"],
    ]
    for sample in own.samples[1:]:
        assert_close(found[sample.id].columns["control/image"], control_of(sample))


def test_musubis_control_images_and_one_of_another_size(known: Callable[[str], Known], tmp_path: Path) -> None:
    own = known("flux")
    source = musubi(tmp_path / "cache", own, "fk")
    for n, sample in enumerate(own.samples):
        (path,) = source.glob(f"{sample.stem.rpartition('/')[2]}_*x*_fk.safetensors")
        control = own.fed(control_of(sample))[:, : 4 if n == 5 else None]
        _, h, w = control.shape
        tensors = {**load_file(path), f"latents_control_1x{h}x{w}_float32": tensor(control)[:, None]}
        metadata = {"architecture": "fk", "width": str(sample.original_wh[0]), "height": str(sample.original_wh[1])}
        save_file(tensors, path, metadata)
    ran = run_import("musubi", source, tmp_path / "s.store", own, *TEXTLESS)
    assert (ran.json["imported"], ran.json["rejected"]) == (5, 1)
    assert "expected one shape; --columns none leaves it out" in ran.json["rejects"][0]["detail"]
    found = delivered(tmp_path / "s.store", "control/image")
    for sample in own.samples[:5]:
        assert_close(found[sample.stem.rpartition("/")[2]].columns["control/image"], control_of(sample))


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
    ran = call("ingest", "import", "auto", source, tmp_path / "s.store", *asked, "--json").done()
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
