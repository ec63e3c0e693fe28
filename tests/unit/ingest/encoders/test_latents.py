"""The stored forms of an image's latent: mode, sample or moments, its mirror image, in which dtype, and what is refused."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

from bucketline.errors import ModelError
from bucketline.families.packing import PATCH
from bucketline.families.vaes import PACKED_VAES
from bucketline.ingest.encoders.model_folder import open_model
from bucketline.ingest.encoders.text_model import load_text_part
from bucketline.ingest.encoders.vae import LatentColumns, OomRetry, VaeEncoder, seed_of
from bucketline.ingest.images.crop import latent_sizes
from bucketline.quantised_linear import QuantisedLinear
from bucketline.store import Store
from bucketline.store.format.block import LatentKind
from tests.commands import Ran, call
from tests.family_models import t5_tokenizer, tiny_dc, tiny_flux2_vae, tiny_qwen21_vae, tiny_qwen_vae, tiny_vae
from tests.models import colour_image, png, write_files, write_model

CPU = torch.device("cpu")
SIZE = (16, 24)


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """Five images of their bucket's size, so that nothing is resized."""
    return write_files(tmp_path / "images", {f"{n}.png": png(*SIZE, seed=n) for n in range(5)})


def pack(source: Path, store: Path, model: Path, *more: object) -> Ran:
    asked = ("--grid", "16x24", "--min-size-px", 8, "--dtype", "F32", "--batch-size", 1, "--json")
    return call("ingest", "pack", source, store, "--model", model, *asked, *more)


def with_vae(folder: Path, vae: Any) -> Path:
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
def test_a_flipped_latent_is_the_mirrored_images_not_the_mirrored_latent(images: Path, tmp_path: Path, model: Path) -> None:
    assert pack(images, tmp_path / "s", model, "--flip").code == 0
    vae, plain = diffusers_vae(model), rows(tmp_path / "s", "latent")
    for sample_id, stored in rows(tmp_path / "s", "latent_flipped").items():
        expected = vae.encode(pixels_of(images / sample_id, mirrored=True)).latent_dist.mode()[0].numpy()
        np.testing.assert_array_equal(stored, expected)
        assert np.abs(stored - plain[sample_id][:, :, ::-1]).max() > 1e-3


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
        pack(images, tmp_path / "t", folder, "--latents", latents).fails(
            "AutoencoderDC has no distribution, only one latent", code=2
        )
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

    def encode(
        self, pixels: NDArray[np.uint8], seeds: Sequence[int] = (), *, are_references: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.sizes.append(len(pixels))
        if len(pixels) > 2:
            raise torch.cuda.OutOfMemoryError("no room")
        return super().encode(pixels, seeds, are_references=are_references)


def test_a_batch_that_finds_no_room_is_halved_until_it_does_and_that_is_remembered(model: Path) -> None:
    images = [(f"{n}.png", colour_image(*SIZE, n)) for n in range(7)]
    plain = LatentColumns(VaeEncoder(open_model(str(model)), CPU, "F32", latents=LatentKind.SAMPLE), flip=True)
    tight = RoomForTwo(open_model(str(model)), CPU, "F32", latents=LatentKind.SAMPLE)
    tight.sizes = []
    columns = LatentColumns(tight, flip=True)
    found, expected = columns.encode(images), plain.encode(images)
    assert len(found) == 7
    for row, wanted in zip(found, expected, strict=True):
        assert not isinstance(row, str)
        assert not isinstance(wanted, str)
        for name in ("latent", "latent_flipped"):
            np.testing.assert_allclose(row[name], wanted[name], atol=1e-5)
    assert tight.sizes == [7, 4, 2, 2, 2, 2, 2, 2, 1, 1]
    tight.sizes.clear()
    columns.encode(images)
    assert max(tight.sizes) == 2


NO_MEMORY = [
    torch.cuda.OutOfMemoryError("tried to allocate 3 GiB"),
    RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("CUDA error: out of memory"),
]


@pytest.mark.parametrize("error", [*NO_MEMORY, RuntimeError("CUDA error: an illegal memory access was encountered")], ids=str)
def test_what_finds_no_memory_is_halved_in_order_and_one_item_alone_is_an_error(error: Exception) -> None:
    def double(items: Sequence[int]) -> list[int]:
        if len(items) > 2 or 99 in items:
            raise error
        return [2 * item for item in items]

    halving = OomRetry(double, "image")
    if error not in NO_MEMORY:
        with pytest.raises(RuntimeError, match="illegal memory access"):
            halving(range(5))
        return
    assert halving(range(23), "16x24 px") == [2 * n for n in range(23)]
    with pytest.raises(ModelError, match=f"not enough GPU memory to encode one image of 64x64 px: {re.escape(str(error))}"):
        halving([1, 99], "64x64 px")


# The VAE classes that images are encoded with: each as the VAE itself does it, and as its pipeline undoes it.

TINY = {
    "AutoencoderKL": tiny_vae,
    "AutoencoderDC": tiny_dc,
    "AutoencoderKLFlux2": tiny_flux2_vae,
    "AutoencoderKLQwenImage": tiny_qwen_vae,
    "AutoencoderKLQwenImage21": tiny_qwen21_vae,
}


def test_every_known_class_is_tried() -> None:
    assert set(TINY) == set(PACKED_VAES)


@pytest.mark.parametrize("kind", list(TINY))
def test_a_vaes_latents_are_its_own_mode_and_come_back(tmp_path: Path, kind: str) -> None:
    torch.manual_seed(0)
    vae = TINY[kind]().eval()
    vae.save_pretrained(tmp_path / "vae")
    model = open_model(str(tmp_path))
    encoder = VaeEncoder(model, CPU, "F32")
    pixels = np.random.default_rng(0).integers(0, 256, (2, 32, 64, 3), dtype=np.uint8)
    latents, is_finite = encoder.encode(pixels)
    height, width = 32 // encoder.downscale, 64 // encoder.downscale
    assert latents.shape == (2, encoder.latent_channels, height, width)
    assert latent_sizes(model) == (kind, encoder.downscale, encoder.latent_channels)
    assert bool(is_finite.all())
    with torch.no_grad():
        expected = own_mode(vae, torch.from_numpy(pixels).permute(0, 3, 1, 2) / 127.5 - 1)
    torch.testing.assert_close(latents, expected, rtol=0, atol=1e-5)
    assert encoder.decode(latents).shape == pixels.shape


def own_mode(vae: Any, images: torch.Tensor) -> torch.Tensor:
    """Return the latents that the VAE itself makes of images, [B, 3, H, W], as its pipelines give them to it."""
    kind = type(vae).__name__
    if kind == "AutoencoderKLQwenImage21":
        images = torch.cat([images, torch.ones(len(images), 1, *images.shape[2:])], dim=1)
    if kind.startswith("AutoencoderKLQwenImage"):
        return vae.encode(images.unsqueeze(2)).latent_dist.mode().squeeze(2)  # type: ignore[no-any-return]
    found = vae.encode(images)
    return found.latent if kind == "AutoencoderDC" else found.latent_dist.mode()  # type: ignore[no-any-return]


def test_moments_of_a_vae_with_frames_are_its_means_and_log_variances(tmp_path: Path) -> None:
    vae = tiny_qwen_vae().eval()
    vae.save_pretrained(tmp_path / "vae")
    encoder = VaeEncoder(open_model(str(tmp_path)), CPU, "F32", latents=LatentKind.MOMENTS)
    pixels = np.full((1, 8, 16, 3), 80, dtype=np.uint8)
    with torch.no_grad():
        own = vae.encode(torch.from_numpy(pixels).permute(0, 3, 1, 2)[:, :, None] / 127.5 - 1).latent_dist
    expected = torch.cat([own.mean, own.logvar], dim=1)[:, :, 0]
    torch.testing.assert_close(encoder.encode(pixels)[0], expected, rtol=0, atol=1e-5)


def test_a_flux2_store_records_the_batch_norm_of_patches(tmp_path: Path) -> None:
    vae = tiny_flux2_vae()
    vae.save_pretrained(tmp_path / "vae")
    found = VaeEncoder(open_model(str(tmp_path)), CPU, "F32").provenance["batch_norm"]
    assert isinstance(found, dict)
    assert found["mean"] == vae.bn.running_mean.tolist()
    assert len(found["std"]) == 4 * PATCH**2  # type: ignore[arg-type]


# Text encoders in 8 and 4 bits: how far their embeddings are off, what their weights take, and what a store records.

TEXT = "a red house of the green dog and a cat"
# relative errors of the last hidden state of two layers of random weights; the bounds are twice what was measured
MOST_OFF = {"BF16": 0.015, "int8": 0.035, "nf4": 0.45}
WEIGHT_BYTES = {"F32": 4.0, "BF16": 2.0, "int8": 1.05, "nf4": 0.55}  # of a linear layer, with its scales


def write_encoder(folder: Path, kind: str, dtype: torch.dtype = torch.bfloat16) -> Path:
    """Write a text encoder of a real class, wide enough that its linear layers are most of it."""
    import transformers

    transformers.logging.disable_progress_bar()
    torch.manual_seed(1)
    t5_tokenizer().save_pretrained(folder / "tokenizer")
    if kind == "T5":
        sizes: dict[str, Any] = {"d_model": 128, "d_kv": 32, "d_ff": 256, "num_layers": 2, "num_heads": 4, "vocab_size": 64}
        encoder: Any = transformers.T5EncoderModel(transformers.T5Config(**sizes, feed_forward_proj="gated-gelu"))
    else:
        sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
        config = transformers.Qwen3Config(**sizes, num_key_value_heads=2, head_dim=32, vocab_size=64)
        encoder = transformers.Qwen3Model(config)
    encoder.to(dtype).save_pretrained(folder / "text_encoder")
    return folder


@pytest.fixture(scope="module", params=["T5", "Qwen3"])
def encoder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_encoder(tmp_path_factory.mktemp("encoder"), request.param)


def loaded(folder: Path, dtype: str) -> Any:
    return load_text_part(open_model(str(folder)), "text_encoder", "tokenizer", device=CPU, dtype=dtype)


@torch.inference_mode()
def hidden(part: Any) -> torch.Tensor:
    state: torch.Tensor = part.encoder(**part.tokenizer(TEXT, return_tensors="pt")).last_hidden_state
    return state.float()


def num_bytes(part: Any) -> int:
    tensors = [*part.encoder.parameters(), *part.encoder.buffers()]
    return sum(tensor.nbytes for tensor in tensors)


def test_the_error_of_an_embedding_is_bounded_and_fewer_bits_are_further_off(encoder: Path) -> None:
    whole = hidden(loaded(encoder, "F32"))
    off = {dtype: float((hidden(loaded(encoder, dtype)) - whole).norm() / whole.norm()) for dtype in MOST_OFF}
    assert 0 < off["BF16"] < off["int8"] < off["nf4"]
    assert all(off[dtype] < most for dtype, most in MOST_OFF.items()), off


def test_the_weights_take_their_bits_and_the_digest_is_that_of_the_weights_before(encoder: Path) -> None:
    whole = loaded(encoder, "F32")
    linear = sum(layer.weight.numel() for layer in whole.encoder.modules() if type(layer) is torch.nn.Linear)
    others = sum(tensor.numel() for tensor in whole.encoder.parameters()) - linear
    for dtype, each in WEIGHT_BYTES.items():
        part = loaded(encoder, dtype)
        most = linear * each + others * (4 if dtype == "F32" else 2) + 1024
        assert 0.8 * most < num_bytes(part) <= most, dtype
        assert part.provenance == {**whole.provenance, "dtype": dtype}
        assert any(isinstance(layer, QuantisedLinear) for layer in part.encoder.modules()) is (dtype in ("int8", "nf4"))


@pytest.mark.parametrize("saved", [torch.float32, torch.float16, torch.bfloat16])
def test_the_digest_does_not_depend_on_the_dtype_that_weights_are_loaded_in(saved: torch.dtype, tmp_path: Path) -> None:
    folder = write_encoder(tmp_path, "T5", saved)
    by_dtype = {dtype: loaded(folder, dtype).provenance["weights_hash"] for dtype in ("F32", "F16", "BF16", "int8")}
    assert len(set(by_dtype.values())) == 1


def test_rotary_frequencies_keep_their_precision(tmp_path: Path) -> None:
    folder = write_encoder(tmp_path, "Qwen3")
    whole = loaded(folder, "F32").encoder.rotary_emb.inv_freq
    for dtype in ("BF16", "F16", "nf4"):
        assert torch.equal(loaded(folder, dtype).encoder.rotary_emb.inv_freq, whole)


def test_weights_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    folder = write_encoder(tmp_path, "T5")
    (folder / "text_encoder" / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(ModelError, match=r"text_encoder/model\.safetensors cannot be read as safetensors"):
        loaded(folder, "nf4")
