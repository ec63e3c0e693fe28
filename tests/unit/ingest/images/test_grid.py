"""Grids hold what their names say; bucket, size and crop follow only from an image's size and the grid."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bucketline.errors import UsageError
from bucketline.ingest.encoders.model_folder import open_model
from bucketline.ingest.images.crop import (
    DRAW_BITS,
    MAX_SIDE_PX,
    MAX_TOKENS,
    Crop,
    Framing,
    Grid,
    NoBucketError,
    RejectedError,
    Size,
    bucket_placement,
    crop_draw,
    crop_limit,
    model_grid,
    parse_grid,
)
from bucketline.ingest.rules import SplitBy, held_out

STEPS = (8, 16, 32, 64)
SD15 = """256x832 256x896 256x960 256x1024 320x704 320x768 384x640 448x576 512x512
          576x448 640x384 704x320 768x320 832x256 896x256 960x256 1024x256"""


def grid(text: str, step_px: int = 64, token_px: int | None = None) -> Grid:
    return parse_grid(text, step_px=step_px, align_px=8, token_px=token_px)


def test_sd15_is_the_usual_list() -> None:
    assert [str(size) for size in grid("sd15").sizes] == SD15.split()
    assert grid("sd15").name == "sd15"


def test_sdxl_is_the_published_list() -> None:
    sizes = grid("sdxl").sizes
    assert len(sizes) == 40
    assert grid("sdxl").name == "sdxl"
    for size in sizes:
        assert size.height_px % 64 == size.width_px % 64 == 0
        assert 0.9 <= size.height_px * size.width_px / 1024**2 <= 1.01
        assert Fraction(1, 4) <= Fraction(size.height_px, size.width_px) <= 4
    alone = [size for size in sizes if Size(size.width_px, size.height_px) not in sizes]
    assert alone == [Size(704, 1344)]  # the paper's own list has it one way only
    assert {Size(1024, 1024), Size(832, 1216), Size(1216, 832), Size(512, 2048), Size(2048, 512)} <= set(sizes)


@given(num_tokens=st.integers(1, 5000), token_px=st.sampled_from(STEPS))
def test_a_token_grid_has_every_layout_of_exactly_so_many_tokens_and_no_other(num_tokens: int, token_px: int) -> None:
    expected = {
        Size(height * token_px, num_tokens // height * token_px)
        for height in range(1, num_tokens + 1)
        if num_tokens % height == 0 and Fraction(1, 4) <= Fraction(height * height, num_tokens) <= 4
    }
    if not expected:
        with pytest.raises(UsageError, match=r"form no rectangle from 1:4 to 4:1; tokens:\d"):
            grid(f"tokens:{num_tokens}", token_px=token_px)
        return
    found = grid(f"tokens:{num_tokens}", token_px=token_px)
    assert set(found.sizes) == expected
    assert found.name == f"tokens:{num_tokens}:{token_px}"


def test_what_a_token_grid_proposes_instead_is_one() -> None:
    with pytest.raises(UsageError, match=r"4093 tokens form no rectangle .* tokens:(\d+) forms (\d+)") as error:
        grid("tokens:4093", token_px=16)
    proposed, count = str(error.value).rsplit("tokens:", 1)[1].split(" forms ")
    assert len(grid(f"tokens:{proposed}", token_px=16).sizes) == int(count) > 3


def test_a_token_grid_needs_to_know_what_a_token_covers() -> None:
    with pytest.raises(UsageError, match=r"no transformer that defines a token's size; add it: tokens:1024:16"):
        grid("tokens:1024")
    assert [str(size) for size in grid("tokens:1024:16").sizes] == ["256x1024", "512x512", "1024x256"]
    with pytest.raises(UsageError, match="a token of 12 px must cover a multiple of 8 px"):
        grid("tokens:1024:12")


SIDES = st.one_of(st.integers(1, 40), st.integers(1, 3000), st.integers(1, 1 << 28))
GRIDS = st.builds(
    lambda sizes: Grid(name="drawn", sizes=tuple(sorted(set(sizes)))),
    st.lists(
        st.builds(Size, st.integers(1, 64).map(lambda n: 8 * n), st.integers(1, 64).map(lambda n: 8 * n)),
        min_size=1,
        max_size=9,
    ),
)


@given(height=SIDES, width=SIDES, grid=GRIDS)
@settings(max_examples=400)
def test_an_image_covers_the_bucket_that_keeps_most_of_it_with_a_centred_crop(height: int, width: int, grid: Grid) -> None:
    def kept(size: Size) -> Fraction:
        across, down = size.width_px * height, size.height_px * width
        return Fraction(min(across, down), max(across, down))

    placement = bucket_placement(height, width, grid)
    bucket = placement.bucket
    assert bucket in grid.sizes
    assert kept(bucket) == max(map(kept, grid.sizes))
    alike = [size for size in grid.sizes if kept(size) == kept(bucket)]
    assert bucket.height_px * bucket.width_px == max(size.height_px * size.width_px for size in alike)
    assert placement.crop[2:] == (bucket.height_px, bucket.width_px)
    assert placement.resized[0] == bucket.height_px or placement.resized[1] == bucket.width_px
    for axis, source in enumerate((height, width)):
        at, size, resized = placement.crop[axis], placement.crop[axis + 2], placement.resized[axis]
        assert 0 <= at <= resized - size
        assert abs(resized - size - 2 * at) <= 1
        begin, length = placement.crop_in_source[axis], placement.crop_in_source[axis + 2]
        assert 0 <= begin < begin + length <= source
        exact_begin, exact_end = Fraction(at * source, resized), Fraction((at + size) * source, resized)
        assert begin <= exact_begin < begin + 1
        assert begin + length - 1 < exact_end <= begin + length
    assert 0.0 <= placement.cropped_away < 1.0
    assert abs(placement.cropped_away - float(1 - kept(bucket))) < 1e-12
    turned = Grid(name="turned", sizes=tuple(sorted(Size(size.width_px, size.height_px) for size in grid.sizes)))
    other = bucket_placement(width, height, turned)
    assert placement.enlarged == other.enlarged
    if bucket == Size(other.bucket.width_px, other.bucket.height_px):  # else two kept the same
        assert placement.resized == other.resized[::-1]
        assert (placement.top, placement.left) == (other.left, other.top)


@given(size=st.integers(1, 64).map(lambda n: 8 * n), other=st.integers(1, 64).map(lambda n: 8 * n))
def test_an_image_of_a_buckets_own_size_is_neither_resized_nor_cropped(size: int, other: int) -> None:
    placement = bucket_placement(size, other, Grid(name="x", sizes=(Size(size, other),)))
    assert placement.resized == (size, other)
    assert placement.crop_in_source == (0, 0, size, other)
    assert not placement.enlarged


@given(height=SIDES, width=SIDES, grid=GRIDS, draw=st.integers(0, (1 << DRAW_BITS) - 1))
@settings(max_examples=300)
def test_a_drawn_crop_lies_inside_and_differs_only_in_where_it_begins(height: int, width: int, grid: Grid, draw: int) -> None:
    drawn, middle = bucket_placement(height, width, grid, draw=draw), bucket_placement(height, width, grid)
    assert (drawn.bucket, drawn.resized, drawn.source) == (middle.bucket, middle.resized, middle.source)
    assert 0 <= drawn.top <= drawn.resized[0] - drawn.bucket.height_px
    assert 0 <= drawn.left <= drawn.resized[1] - drawn.bucket.width_px
    top, left, box_height, box_width = drawn.crop_in_source
    assert min(top, left) >= 0
    assert min(box_height, box_width) >= 1
    assert top + box_height <= height
    assert left + box_width <= width


def test_draws_reach_both_ends_and_every_place_between_equally_often() -> None:
    grid = parse_grid("square:64", step_px=64, align_px=8)
    assert bucket_placement(64, 100, grid, draw=0).left == 0
    assert bucket_placement(64, 100, grid, draw=(1 << DRAW_BITS) - 1).left == 36
    assert bucket_placement(100, 64, grid, draw=(1 << DRAW_BITS) - 1).crop == (36, 0, 64, 64)
    places = [bucket_placement(64, 67, grid, draw=crop_draw(f"{n}.png")).left for n in range(4000)]
    counts = [places.count(left) for left in range(4)]
    assert sum(counts) == 4000
    assert max(abs(count - 1000) for count in counts) < 120
    for draw in (-1, 1 << DRAW_BITS):
        with pytest.raises(ValueError, match="a draw of"):
            bucket_placement(64, 64, grid, draw=draw)


def test_the_draw_of_an_id_never_changes() -> None:
    """Literal values: a store made yesterday must be added to tomorrow."""
    assert [crop_draw(sample_id) for sample_id in ("a.png", "a.jpg", "cats/ö.png")] == [
        *(17299756907605959221, 16864635185785317599, 467097385632747825)
    ]
    framing = Framing(grid=parse_grid("square:64", step_px=64, align_px=8), crop=Crop.RANDOM)
    assert framing.place("a.png", 64, 1000) == framing.place("a.png", 64, 1000)
    assert framing.place("a.png", 64, 1000).left != framing.place("a.jpg", 64, 1000).left


@given(
    height=st.integers(1, 900), width=st.integers(1, 900), grid=GRIDS, limit=st.fractions(Fraction(1, 4), 4, max_denominator=50)
)
@settings(max_examples=300)
def test_the_best_bucket_within_the_limit_of_enlarging_is_taken(height: int, width: int, grid: Grid, limit: Fraction) -> None:
    def enlarging(size: Size) -> Fraction:
        return max(Fraction(size.height_px, height), Fraction(size.width_px, width))

    allowed = tuple(size for size in grid.sizes if enlarging(size) <= limit)
    if not allowed:
        with pytest.raises(NoBucketError) as error:
            bucket_placement(height, width, grid, max_upscale=limit)
        assert error.value.least == min(map(enlarging, grid.sizes)) > limit
        return
    assert bucket_placement(height, width, grid, max_upscale=limit) == bucket_placement(
        height, width, Grid(name="allowed", sizes=allowed)
    )


@pytest.mark.parametrize(("height", "width"), [(0, 5), (5, 0), (-1, 5)])
def test_an_image_without_a_size_has_no_place(height: int, width: int) -> None:
    with pytest.raises(ValueError, match="has no place"):
        bucket_placement(height, width, parse_grid("square:64", step_px=64, align_px=8))


def test_grids_are_what_they_are_called() -> None:
    for text, sizes in (("square:64", ["64x64"]), ("64x48,48x64", ["48x64", "64x48"]), ("64x48,64x48", ["64x48"])):
        assert [str(size) for size in parse_grid(text, step_px=32, align_px=8).sizes] == sizes
    area = {str(size) for size in parse_grid("area:128:64", step_px=32, align_px=8).sizes}
    assert {"128x128", "64x256", "256x64"} <= area
    assert area <= {"64x64", "64x128", "64x192", "64x256", "128x64", "128x128", "192x64", "256x64"}
    assert parse_grid("area:512", step_px=64, align_px=8).name == "area:512:64"


@given(side=st.integers(1, 40).map(lambda n: 8 * n), step=st.integers(1, 8).map(lambda n: 8 * n))
def test_an_area_grid_keeps_its_promises_and_is_the_same_upright_and_lying(side: int, step: int) -> None:
    if step > side:
        with pytest.raises(UsageError, match="the step must be"):
            parse_grid(f"area:{side}:{step}", step_px=8, align_px=8)
        return
    grid = parse_grid(f"area:{side}:{step}", step_px=8, align_px=8)
    for size in grid.sizes:
        assert size.height_px * size.width_px <= side * side
        assert size.height_px % step == size.width_px % step == 0
        assert max(size.height_px, size.width_px) <= 2 * side
        assert 2 * min(size.height_px, size.width_px) >= side
        assert Size(size.width_px, size.height_px) in grid.sizes


@pytest.mark.parametrize(
    "text",
    [
        *("", "square", "square:", "square:0", "square:12", "square:-8", "64x", "64x64,", "64*64", "area:0", "area:64:0"),
        *("0x64", "64x64;rm", f"square:{MAX_SIDE_PX + 8}", "area:8192:8", "64x60", "sd", "SDXL", "sdxl:8"),
        *("tokens:0:16", "tokens:16:0", f"tokens:{MAX_TOKENS + 1}:16", "tokens:", "tokens"),
    ],
)
def test_what_is_no_grid_is_refused_with_what_is(text: str) -> None:
    with pytest.raises(UsageError, match="--grid"):
        parse_grid(text, step_px=64, align_px=8)


@pytest.mark.parametrize(("height_px", "width_px"), [(1, 1 << 27), (1 << 27, 1)])
def test_an_image_whose_crop_could_not_be_recorded_is_a_reject_of_its_own(height_px: int, width_px: int) -> None:
    framing = Framing(grid=parse_grid("square:1024", step_px=64, align_px=8))
    with pytest.raises(RejectedError, match=r"too large: .* a side would have 137438953472 px, at most 2147483647 fit"):
        framing.place("a.png", height_px, width_px)
    assert framing.place("a.png", height_px, height_px).resized == (1024, 1024)


@pytest.mark.parametrize("size", [(100, 399), (100, 400), (400, 100), (100, 100), (100, 401), (401, 100), (100, 20_000)])
def test_an_image_is_rejected_if_its_crop_loses_more_than_allowed(size: tuple[int, int]) -> None:
    framing = Framing(grid=parse_grid("square:64", step_px=64, align_px=8), max_crop=crop_limit(0.75))
    if max(size) <= 400:
        assert framing.place("a.png", *size).cropped_away <= 0.75
        return
    with pytest.raises(RejectedError, match=r"too much cropped away: .* more than --max-crop 75 %") as error:
        framing.place("a.png", *size)
    assert error.value.placement == bucket_placement(*size, framing.grid)
    assert f"{size[0]}x{size[1]} px, in its bucket of 64x64 the crop would lose" in str(error.value.detail)


@pytest.mark.parametrize("share", [1.0, None])
def test_a_crop_limit_of_one_or_none_is_no_limit(share: float | None) -> None:
    framing = Framing(grid=parse_grid("square:64", step_px=64, align_px=8), max_crop=crop_limit(share))
    assert framing.place("a.png", 1, 100_000).cropped_away == pytest.approx(0.99999)


@pytest.mark.parametrize("share", [0.0, -0.5, 1.01, float("nan"), float("inf")])
def test_a_crop_limit_is_a_share(share: float) -> None:
    with pytest.raises(UsageError, match="--max-crop is"):
        crop_limit(share)


IDS = [f"photo{n % 97}/{n}.png" for n in range(20_000)]


@pytest.mark.parametrize("fraction", [0.01, 0.1, 0.5, 0.9])
def test_about_the_fraction_asked_for_is_held_out(fraction: float) -> None:
    share = sum(held_out(i, fraction, SplitBy.ID) for i in IDS) / len(IDS)
    assert abs(share - fraction) < 0.015


def test_nothing_is_held_out_of_nothing_and_a_larger_fraction_holds_out_what_a_smaller_one_does() -> None:
    assert not any(held_out(i, 0.0, by) for i in IDS for by in SplitBy)
    small, large = ({i for i in IDS if held_out(i, fraction, SplitBy.ID)} for fraction in (0.1, 0.2))
    assert small < large


@given(folder=st.text("abc/é", max_size=8), names=st.lists(st.text("xyz", min_size=1, max_size=5), min_size=2, max_size=5))
def test_by_folder_all_images_of_a_folder_share_one_split(folder: str, names: list[str]) -> None:
    ids = [f"{folder}/{name}.png".lstrip("/") for name in names]
    assert len({held_out(i, 0.5, SplitBy.FOLDER) for i in ids}) == 1


def test_the_split_of_a_given_id_never_changes() -> None:
    """A literal: what was held out last year is held out today."""
    assert [n for n in range(12) if held_out(f"{n}.png", 0.3, SplitBy.ID)] == [3, 9, 11]


# A model's own grid, what its tokens cover, and the sizes that it must not be given.


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


def grid_of_model(folder: Path, wanted: str | None = None, downscale: int = 8) -> Grid:
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
    assert grid_of_model(tmp_path).name == name


@pytest.mark.parametrize(("transformer", "token_px"), [(PIXART, 16), (FLUX, 16), (PIXART | {"patch_size": 1}, 8)])
def test_a_token_covers_what_the_transformer_says(tmp_path: Path, transformer: dict[str, Any], token_px: int) -> None:
    write(tmp_path, transformer=transformer)
    assert grid_of_model(tmp_path, "tokens:1024").name == f"tokens:1024:{token_px}"
    for size in grid_of_model(tmp_path, "tokens:3600").sizes:
        assert size.height_px // token_px * (size.width_px // token_px) == 3600


def test_a_model_without_a_transformer_has_no_tokens(tmp_path: Path) -> None:
    write(tmp_path, unet=UNET)
    with pytest.raises(UsageError, match="no transformer that defines a token's size"):
        grid_of_model(tmp_path, "tokens:1024")


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
            grid_of_model(tmp_path, wanted)
        assert "use --grid square:" in str(error.value)
    assert grid_of_model(tmp_path, "256x256,512x512").name == "256x256,512x512"
    assert grid_of_model(tmp_path, "square:512").name == "square:512"
    assert grid_of_model(tmp_path).name.startswith("square:")


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
    assert grid_of_model(tmp_path, "128x512").name == "128x512"
