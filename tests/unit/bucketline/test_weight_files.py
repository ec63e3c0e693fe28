"""Weights that a folder holds only as a variant (`*.fp16.safetensors`) are loaded, for packing and for training."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from bucketline.errors import ModelError
from bucketline.weight_files import DIFFUSERS, TRANSFORMERS, variant_of
from tests.commands import call
from tests.models import SMALL, write_images


@pytest.fixture
def own(model: Path, tmp_path: Path) -> Path:
    """A model folder of this test's own."""
    return shutil.copytree(model, tmp_path / "model")


def as_variant(folder: Path, variant: str, *, in_parts: bool = False) -> None:
    """Write a model's VAE and text encoder again, only as a variant, by the libraries themselves."""
    import diffusers
    import transformers

    kinds: dict[str, Any] = {"vae": diffusers.AutoencoderKL, "text_encoder": transformers.BertModel}
    for part, kind in kinds.items():
        loaded = kind.from_pretrained(folder / part)
        for path in (folder / part).glob("*.safetensors"):
            path.unlink()
        more = {"max_shard_size": "1KB"} if in_parts else {}
        loaded.save_pretrained(folder / part, variant=variant, **more)
        assert not (folder / part / "model.safetensors").exists()


def pack(folder: Path, place: Path) -> Any:
    write_images(place / "photos", 4)
    return call("ingest", "pack", place / "photos", place / "s", "--model", folder, *SMALL, "--json")


@pytest.mark.parametrize("in_parts", [False, True])
@pytest.mark.parametrize("variant", ["fp16", "bf16", "non_ema"])
def test_a_folder_of_a_variant_alone_is_packed_with(variant: str, own: Path, tmp_path: Path, *, in_parts: bool) -> None:
    as_variant(own, variant, in_parts=in_parts)
    ran = pack(own, tmp_path).done()
    assert ran.json["packed"] == 4


@pytest.mark.parametrize("part", ["vae", "text_encoder"])
def test_a_part_without_weights_is_named_with_what_was_looked_for(part: str, own: Path, tmp_path: Path) -> None:
    for path in (own / part).glob("*.safetensors"):
        path.rename(path.with_suffix(".msgpack"))
    ran = pack(own, tmp_path)
    base = "diffusion_pytorch_model" if part == "vae" else "model"
    assert (ran.code, ran.out) == (1, "")
    assert ran.err.startswith(f"error: {own}: {part}/ has no weights: looked for {base}.safetensors, {base}.bin, ")
    assert f"({base}.fp16.safetensors); it has config.json, {base}.msgpack; " in ran.err
    assert len(ran.err.splitlines()) == 1


def test_the_trainer_loads_a_variant_and_names_what_it_looked_for(tmp_path: Path) -> None:
    from diffusers import UNet2DConditionModel

    from bucketline.families.family import StoreFacts
    from bucketline.train.models.load import load
    from tests.kit import TOKEN_WIDTH
    from tests.unit.train.tiny_run import UNET

    facts = StoreFacts(latent_channels=2, text={"tokens": TOKEN_WIDTH}, num_classes=None, shows_padding=True, latent_sizes=())
    kind: Any = UNet2DConditionModel
    saved = kind.from_config(UNET)
    saved.save_pretrained(tmp_path / "unet", variant="fp16")
    _, loaded = load(tmp_path, facts, 0)
    expected = saved.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in loaded.state_dict().items())
    weights = tmp_path / "unet" / "diffusion_pytorch_model.fp16.safetensors"
    weights.rename(weights.with_name("weights.safetensors"))
    with pytest.raises(
        ModelError, match=r"unet/ has no weights: looked for diffusion_pytorch_model\.safetensors.*weights\.saf"
    ):
        load(tmp_path, facts, 0)


def test_the_trainer_compares_a_vae_of_a_variant_alone_with_the_stores(own: Path, tmp_path: Path) -> None:
    from bucketline.store import Store
    from bucketline.train.models.load import read_vae

    as_variant(own, "fp16")
    assert pack(own, tmp_path).code == 0
    _, other = read_vae(own / "vae", Store.open(tmp_path / "s").manifest.encoders)
    assert other is None


@pytest.mark.parametrize(
    ("names", "bases", "expected"),
    [
        (["model.safetensors", "model.fp16.safetensors"], TRANSFORMERS, None),
        (["pytorch_model.bin"], TRANSFORMERS, None),
        (["model-00001-of-00002.safetensors", "model.safetensors.index.json"], TRANSFORMERS, None),
        (["model.fp16-00001-of-00002.safetensors", "model.safetensors.index.fp16.json"], TRANSFORMERS, "fp16"),
        (["diffusion_pytorch_model-00001-of-00002.fp16.safetensors"], DIFFUSERS, "fp16"),
        (["diffusion_pytorch_model.bf16.bin", "diffusion_pytorch_model.fp16.safetensors"], DIFFUSERS, "fp16"),
        (["diffusion_pytorch_model.non_ema.bin"], DIFFUSERS, "non_ema"),
    ],
)
def test_plain_weights_come_first_then_the_most_precise_variant(
    names: list[str], bases: tuple[str, ...], expected: str | None
) -> None:
    assert variant_of("part/", names, bases) == expected


@pytest.mark.parametrize("names", [[], ["config.json"], ["model.safetensors"], ["diffusion_pytorch_model.fp16.msgpack"]])
def test_what_holds_no_weights_is_refused(names: list[str]) -> None:
    with pytest.raises(ModelError, match=r"part/ has no weights: looked for diffusion_pytorch_model\.safetensors"):
        variant_of("part/", names, DIFFUSERS)


def test_several_variants_of_which_none_is_known_are_named() -> None:
    names = ["diffusion_pytorch_model.ema.bin", "diffusion_pytorch_model.non_ema.bin"]
    with pytest.raises(ModelError, match=r"in the variants ema, non_ema and none without"):
        variant_of("part/", names, DIFFUSERS)
