"""A model's own grid, what its tokens cover, and the sizes that it must not be given."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bucketline.errors import UsageError
from bucketline.ingest.encoders.model_folder import open_model
from bucketline.ingest.images.grid import Grid, model_grid
from tests.commands import call

DIT = {"_class_name": "DiTTransformer2DModel", "sample_size": 32, "patch_size": 2, "in_channels": 4}
PUBLISHED_DIT = {"_class_name": "Transformer2DModel", "norm_type": "ada_norm_zero", "sample_size": 32, "patch_size": 2}
PIXART = {"_class_name": "PixArtTransformer2DModel", "sample_size": 128, "patch_size": 2, "in_channels": 4}
FLUX = {"_class_name": "FluxTransformer2DModel", "patch_size": 1, "in_channels": 64}
UNET = {"_class_name": "UNet2DConditionModel", "sample_size": 64, "block_out_channels": [320, 640, 1280, 1280]}


def write(folder: Path, **parts: Any) -> None:
    for name, config in parts.items():
        path = folder / "model_index.json" if name == "index" else folder / name / "config.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(config), encoding="ascii")


def grid(folder: Path, wanted: str | None = None, downscale: int = 8) -> Grid:
    return model_grid(wanted, open_model(str(folder)), downscale)


@pytest.mark.parametrize(
    ("parts", "name"),
    [
        ({"unet": UNET}, "area:512:64"),
        ({"unet": UNET | {"sample_size": [96, 96]}}, "area:768:64"),
        ({"unet": UNET | {"block_out_channels": [1, 1]}}, "area:512:16"),
        ({"transformer": PIXART}, "area:1024:64"),
        ({"transformer": FLUX}, "area:1024:64"),
        ({"transformer": DIT}, "square:256"),
        ({}, "area:512:64"),
    ],
)
def test_a_model_has_a_grid_of_its_own(tmp_path: Path, parts: dict[str, Any], name: str) -> None:
    write(tmp_path, **parts)
    assert grid(tmp_path).name == name


@pytest.mark.parametrize(("transformer", "token_px"), [(PIXART, 16), (FLUX, 16), (PIXART | {"patch_size": 1}, 8)])
def test_a_token_covers_what_the_transformer_says(tmp_path: Path, transformer: dict[str, Any], token_px: int) -> None:
    write(tmp_path, transformer=transformer)
    assert grid(tmp_path, "tokens:1024").name == f"tokens:1024:{token_px}"
    for size in grid(tmp_path, "tokens:3600").sizes:
        assert size.height_px // token_px * (size.width_px // token_px) == 3600


def test_a_model_without_a_transformer_has_no_tokens(tmp_path: Path) -> None:
    write(tmp_path, unet=UNET)
    with pytest.raises(UsageError, match="no transformer that defines a token's size"):
        grid(tmp_path, "tokens:1024")


SQUARE_ONLY = [
    {"transformer": DIT},
    {"transformer": PUBLISHED_DIT},
    {"index": {"_class_name": "DiTPipeline", "transformer": ["diffusers", "Transformer2DModel"]}},
    {"index": {"_class_name": "OwnPipeline", "transformer": ["diffusers", "DiTTransformer2DModel"]}},
]


@pytest.mark.parametrize("parts", SQUARE_ONLY)
def test_sizes_that_are_not_square_are_refused_for_a_dit(tmp_path: Path, parts: dict[str, Any]) -> None:
    write(tmp_path, **parts)
    for wanted, size in (("256x256,128x512", "128x512"), ("area:256:64", "128x384"), ("sdxl", "512x1856")):
        with pytest.raises(UsageError, match=rf"has the size {size}, and the model is a DiTTransformer2DModel") as error:
            grid(tmp_path, wanted)
        assert "use --grid square:" in str(error.value)
    assert grid(tmp_path, "256x256,512x512").name == "256x256,512x512"
    assert grid(tmp_path, "square:512").name == "square:512"
    assert grid(tmp_path).name.startswith("square:")


@pytest.mark.parametrize(
    "parts",
    [
        {"transformer": PIXART},
        {"transformer": PUBLISHED_DIT | {"norm_type": "ada_norm_single"}},
        {"index": {"_class_name": "StableDiffusionPipeline", "unet": ["diffusers", "UNet2DConditionModel"]}},
    ],
)
def test_sizes_that_are_not_square_are_taken_for_every_other_model(tmp_path: Path, parts: dict[str, Any]) -> None:
    write(tmp_path, **parts)
    assert grid(tmp_path, "128x512").name == "128x512"


def test_pack_refuses_a_grid_that_a_dit_turns_into_squares_before_it_writes(tmp_path: Path, source: Path, model: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for part in model.iterdir():
        (folder / part.name).symlink_to(part)
    write(folder, transformer=DIT)
    asked = ("--model", folder, "--min-size-px", "8", "--text", "plain")
    ran = call("ingest", "pack", source, tmp_path / "s", *asked, "--grid", "16x24,24x16")
    assert ran.code == 2
    assert "--grid '16x24,24x16' has the size 16x24, and the model is a DiTTransformer2DModel" in ran.err
    assert not (tmp_path / "s").exists()
    call("ingest", "pack", source, tmp_path / "s", *asked, "--grid", "square:16").done()
