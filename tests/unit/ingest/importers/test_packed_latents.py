"""Masks and control images, which are left out, and Flux.2's latents, which are packed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tests.commands import call
from tests.unit.ingest.importers.known import Known, read_store, run_import
from tests.unit.ingest.importers.writers import kohya_latent, onetrainer


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
