"""The stored forms of an image's latent: mode, sample or moments, its mirror image, in which dtype, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

from bucketline.errors import ModelError, UsageError
from bucketline.ingest.encoders.latents import LatentColumns
from bucketline.ingest.encoders.model_folder import open_model
from bucketline.ingest.encoders.oom_retry import OomRetry
from bucketline.ingest.encoders.vae import VaeEncoder, seed_of
from bucketline.store import Store
from bucketline.store.format.columns import LatentKind
from tests.commands import Ran, call
from tests.family_models import tiny_dc, tiny_vae
from tests.models import colour_image, png, write_model

CPU = torch.device("cpu")
SIZE = (16, 24)


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """Five images of their bucket's size, so that nothing is resized."""
    folder = tmp_path / "images"
    folder.mkdir()
    for n in range(5):
        (folder / f"{n}.png").write_bytes(png(*SIZE, seed=n))
    return folder


def pack(source: Path, store: Path, model: Path, *more: object) -> Ran:
    asked = ("--grid", "16x24", "--min-size-px", 8, "--dtype", "F32", "--batch-size", 1, "--json")
    return call("ingest", "pack", source, store, "--model", model, *asked, *more)


def with_vae(folder: Path, vae: Any) -> Path:
    """Write the tests' model with another VAE."""
    import shutil

    write_model(folder)
    shutil.rmtree(folder / "vae")
    vae.save_pretrained(folder / "vae")
    return folder


def rows(store: Path, column: str) -> dict[str, NDArray[Any]]:
    (bucket,) = Store.open(store).buckets()
    numbers = np.arange(bucket.num_rows)
    return dict(zip(bucket.sample_ids(numbers), bucket.read(numbers, column), strict=True))


def pixels_of(path: Path, *, mirrored: bool = False) -> torch.Tensor:
    with Image.open(path) as image:
        values = np.array(image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if mirrored else image)
    return torch.from_numpy(values).permute(2, 0, 1)[None].contiguous().float() / 127.5 - 1


def diffusers_vae(model: Path) -> Any:
    from diffusers import AutoencoderKL

    kind: Any = AutoencoderKL
    return kind.from_pretrained(model / "vae").eval()


@torch.no_grad()
def test_moments_are_mean_and_log_variance_as_diffusers_gives_them(images: Path, tmp_path: Path, model: Path) -> None:
    assert pack(images, tmp_path / "s", model, "--latents", "moments").code == 0
    vae = diffusers_vae(model)
    for sample_id, stored in rows(tmp_path / "s", "latent").items():
        posterior = vae.encode(pixels_of(images / sample_id)).latent_dist
        np.testing.assert_array_equal(stored, torch.cat([posterior.mean, posterior.logvar], dim=1)[0].numpy())
    provenance = Store.open(tmp_path / "s").manifest.encoders["vae"]
    assert isinstance(provenance, dict)
    assert (provenance["latents"], provenance["latent_channels"]) == ("moments", 4)


@torch.no_grad()
def test_a_sample_is_drawn_by_its_id_whatever_its_batch(images: Path, tmp_path: Path, model: Path) -> None:
    for name, size in (("alone", 1), ("together", 5)):
        assert pack(images, tmp_path / name, model, "--latents", "sample", "--flip", "--batch-size", size).code == 0
    vae, seen = diffusers_vae(model), []
    for column, mirrored in (("latent", False), ("latent_flipped", True)):
        together = rows(tmp_path / "together", column)
        for sample_id, stored in rows(tmp_path / "alone", column).items():
            posterior = vae.encode(pixels_of(images / sample_id, mirrored=mirrored)).latent_dist
            generator = torch.Generator().manual_seed(seed_of(sample_id, column))
            np.testing.assert_array_equal(stored, posterior.sample(generator)[0].numpy())
            np.testing.assert_allclose(together[sample_id], stored, atol=1e-5)
            seen.append(((stored - posterior.mean[0].numpy()) / posterior.std[0].numpy()).round(3).tobytes())
    assert len(set(seen)) == 10


def test_the_seed_of_a_sample_is_a_fixed_function_of_id_and_column() -> None:
    assert seed_of("a/b.png", "latent") == seed_of("a/b.png", "latent")
    assert len({seed_of(name, column) for name in ("a.png", "b.png", "\udcff") for column in ("latent", "latent_flipped")}) == 6


@torch.no_grad()
def test_a_flipped_latent_is_that_of_the_mirrored_image_and_not_the_mirrored_latent(
    images: Path, tmp_path: Path, model: Path
) -> None:
    assert pack(images, tmp_path / "s", model, "--flip").code == 0
    vae, plain = diffusers_vae(model), rows(tmp_path / "s", "latent")
    for sample_id, stored in rows(tmp_path / "s", "latent_flipped").items():
        expected = vae.encode(pixels_of(images / sample_id, mirrored=True)).latent_dist.mode()[0].numpy()
        np.testing.assert_array_equal(stored, expected)
        assert np.abs(stored - plain[sample_id][:, :, ::-1]).max() > 1e-3


def test_another_choice_of_latents_or_flips_is_refused_naming_it(images: Path, tmp_path: Path, model: Path) -> None:
    assert pack(images, tmp_path / "s", model).code == 0
    for option, field in (
        (("--flip",), "no --flip, this run has --flip"),
        (("--latents", "sample"), "--latents mode, this run has --latents sample"),
        (("--encode-dtype", "BF16"), "--encode-dtype fp32, this run has --encode-dtype bf16"),
        (("--max-tokens", "5"), "--max-tokens 12, this run has --max-tokens 5"),
    ):
        ran = pack(images, tmp_path / "s", model, *option)
        assert ran.code == 1
        assert field in ran.err


@torch.no_grad()
def test_an_autoencoder_without_a_posterior_gives_its_latent_and_nothing_else(images: Path, tmp_path: Path) -> None:
    from diffusers import AutoencoderDC

    folder = with_vae(tmp_path / "dc", tiny_dc())
    assert pack(images, tmp_path / "s", folder, "--flip").code == 0
    kind: Any = AutoencoderDC
    vae = kind.from_pretrained(folder / "vae").eval()
    for column, mirrored in (("latent", False), ("latent_flipped", True)):
        for sample_id, stored in rows(tmp_path / "s", column).items():
            expected = vae.encode(pixels_of(images / sample_id, mirrored=mirrored)).latent[0].numpy()
            assert stored.shape == (4, 8, 12)
            np.testing.assert_array_equal(stored, expected)
    provenance = Store.open(tmp_path / "s").manifest.encoders["vae"]
    assert isinstance(provenance, dict)
    assert (provenance["class"], provenance["scaling_factor"], provenance["shift_factor"]) == ("AutoencoderDC", 0.41, 0.0)
    for latents in ("sample", "moments"):
        ran = pack(images, tmp_path / "t", folder, "--latents", latents)
        assert ran.code == 2
        assert "AutoencoderDC has no distribution, only one latent" in ran.err
        assert not (tmp_path / "t").exists()


def test_a_vae_of_another_class_is_refused_by_name(tmp_path: Path) -> None:
    import diffusers

    kind: Any = diffusers.VQModel
    folder = with_vae(tmp_path / "vq", kind(block_out_channels=(4,), norm_num_groups=2, num_vq_embeddings=8))
    with pytest.raises(ModelError, match="vae/ is a VQModel, expected AutoencoderKL or AutoencoderDC"):
        VaeEncoder(open_model(str(folder)), CPU, "F16")


def test_a_vae_that_overflows_in_f16_gets_f32_instead_of_it_and_bf16_as_asked(tmp_path: Path) -> None:
    """Practically every published VAE says so, or says nothing, which means the same."""
    pixels = np.stack([colour_image(*SIZE, n) for n in range(2)])
    found = {}
    for must in (True, False):
        torch.manual_seed(0)
        folder = with_vae(tmp_path / str(must), tiny_vae(force_upcast=must))
        for asked in ("F16", "BF16"):
            vae = VaeEncoder(open_model(str(folder)), CPU, "F32", encode_dtype=asked)
            found[must, asked] = (vae.provenance["dtype"], vae.encode(pixels)[0])
    assert {key: dtype for key, (dtype, _) in found.items()} == {
        (True, "F16"): "F32",
        (True, "BF16"): "BF16",
        (False, "F16"): "F16",
        (False, "BF16"): "BF16",
    }
    exact = found[True, "F16"][1]
    assert torch.equal(found[True, "BF16"][1], found[False, "BF16"][1])
    assert 1e-4 < float((found[True, "BF16"][1] - exact).abs().max()) < 0.05 * float(exact.abs().max())


def test_what_scales_latents_is_recorded(tmp_path: Path) -> None:
    vae = tiny_vae(scaling_factor=0.5, shift_factor=0.25, latents_mean=[0.0, 1.0, 2.0, 3.0], latents_std=[1.0, 2.0, 3.0, 4.0])
    found = VaeEncoder(open_model(str(with_vae(tmp_path / "m", vae))), CPU, "F16").provenance
    assert (found["scaling_factor"], found["shift_factor"]) == (0.5, 0.25)
    assert (found["latents_mean"], found["latents_std"]) == ([0.0, 1.0, 2.0, 3.0], [1.0, 2.0, 3.0, 4.0])


def test_a_latent_beyond_the_range_of_the_stored_dtype_is_a_reject_that_says_so(images: Path, tmp_path: Path) -> None:
    vae = tiny_vae()
    with torch.no_grad():
        vae.quant_conv.bias.fill_(70_000.0)
    folder = with_vae(tmp_path / "large", vae)
    ran = pack(images, tmp_path / "s", folder, "--dtype", "F16")
    assert ran.code == 1
    assert ran.json["rejected_by_reason"] == {"latent not finite in the stored dtype": 5}
    lines = [json.loads(line) for line in (tmp_path / "s" / "rejects.jsonl").read_text(encoding="ascii").splitlines()]
    assert [line["id"] for line in lines] == [f"{n}.png" for n in range(5)]
    assert {line["detail"] for line in lines} == {"latent as F16: infinite, or beyond the dtype's range"}
    assert pack(images, tmp_path / "t", folder, "--dtype", "BF16").json["packed"] == 5


class RoomForTwo(VaeEncoder):
    """A VAE on a device that holds two images."""

    sizes: list[int]

    def encode(self, pixels: NDArray[np.uint8], seeds: Sequence[int] = ()) -> tuple[torch.Tensor, torch.Tensor]:
        self.sizes.append(len(pixels))
        if len(pixels) > 2:
            raise torch.cuda.OutOfMemoryError("no room")
        return super().encode(pixels, seeds)


def test_a_batch_that_finds_no_room_is_halved_until_it_does_and_that_is_remembered(model: Path) -> None:
    images = [(f"{n}.png", colour_image(*SIZE, n)) for n in range(7)]
    plain = LatentColumns(VaeEncoder(open_model(str(model)), CPU, "F32", latents=LatentKind.SAMPLE), flip=True)
    tight = RoomForTwo(open_model(str(model)), CPU, "F32", latents=LatentKind.SAMPLE)
    tight.sizes = []
    columns = LatentColumns(tight, flip=True)
    found, expected = columns.encode(images), plain.encode(images)
    assert len(found) == 7
    for row, wanted in zip(found, expected, strict=True):
        assert row.problem is None
        for name in ("latent", "latent_flipped"):
            np.testing.assert_allclose(row.columns[name], wanted.columns[name], atol=1e-5)
    assert tight.sizes == [7, 4, 2, 2, 2, 2, 2, 2, 1, 1]
    tight.sizes.clear()
    columns.encode(images)
    assert max(tight.sizes) == 2


def test_halves_are_in_order_and_one_item_without_room_is_an_error_that_names_its_kind() -> None:
    def double(items: Sequence[int]) -> list[int]:
        if len(items) > 2 or 99 in items:
            raise torch.cuda.OutOfMemoryError("tried to allocate 3 GiB")
        return [2 * item for item in items]

    halving = OomRetry(double, "image")
    assert halving(range(23), "16x24 px") == [2 * n for n in range(23)]
    with pytest.raises(ModelError, match="not enough GPU memory to encode one image of 64x64 px: tried to allocate 3 GiB"):
        halving([1, 99], "64x64 px")


@pytest.mark.parametrize(
    "said",
    [
        "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "CUDA error: out of memory",
    ],
)
def test_libraries_of_cuda_that_find_no_memory_are_halved_as_well_and_other_errors_are_not(said: str) -> None:
    def double(items: Sequence[int]) -> list[int]:
        if len(items) > 2:
            raise RuntimeError(said)
        return [2 * item for item in items]

    assert OomRetry(double, "image")(range(5)) == [0, 2, 4, 6, 8]
    said = "CUDA error: an illegal memory access was encountered"
    with pytest.raises(RuntimeError, match="illegal memory access"):
        OomRetry(double, "image")(range(5))


def test_options_that_make_no_sense_are_refused(images: Path, tmp_path: Path, model: Path) -> None:
    for option, message in ((0, "--max-tokens is 0, expected 1 or more"), (13, "accepts at most 12")):
        ran = pack(images, tmp_path / "s", model, "--max-tokens", option)
        assert ran.code == 2
        assert message in ran.err
    with pytest.raises(UsageError):
        VaeEncoder(open_model(str(with_vae(tmp_path / "dc", tiny_dc()))), CPU, "F16", latents=LatentKind.MOMENTS)
