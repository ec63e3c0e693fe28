"""Grids hold what their names say, at every step, and each bucket's key stands for one shape."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bucketline.errors import UsageError
from bucketline.ingest.images.bucket_grid import MAX_TOKENS, Grid, Size, parse_grid
from bucketline.ingest.images.geometry import bucket_placement

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


@pytest.mark.parametrize(
    ("height", "width", "bucket"), [(1200, 1800, "832x1216"), (1800, 1200, "1216x832"), (3000, 500, "2048x512")]
)
def test_photographs_come_into_the_sdxl_sizes_that_people_expect(height: int, width: int, bucket: str) -> None:
    assert str(bucket_placement(height, width, grid("sdxl")).bucket) == bucket


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


@pytest.mark.parametrize(
    "text", ["tokens:0:16", "tokens:16:0", f"tokens:{MAX_TOKENS + 1}:16", "tokens:", "tokens", "sd", "SDXL", "sdxl:8"]
)
def test_what_is_no_grid_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--grid"):
        grid(text)


@given(
    step=st.sampled_from(STEPS),
    multiple=st.integers(4, 24),
    sizes=st.lists(st.tuples(st.integers(1, 6000), st.integers(1, 6000)), min_size=1, max_size=30),
)
def test_at_every_step_one_key_stands_for_one_shape_and_one_shape_for_one_key(
    step: int, multiple: int, sizes: list[tuple[int, int]]
) -> None:
    """The failure was 1088x704 and 1152x704 coming out of two stages as 136 and as 144: 704 / 8 = 88, 1088 / 8 = 136."""
    for text in (f"area:{multiple * step}:{step}", f"tokens:{multiple * multiple}:{step}"):
        shapes: dict[str, tuple[int, int]] = {}
        for height, width in sizes:
            placement = bucket_placement(height, width, grid(text))
            assert placement.bucket.height_px % step == placement.bucket.width_px % step == 0
            latent = placement.crop[2] // 8, placement.crop[3] // 8
            assert shapes.setdefault(str(placement.bucket), latent) == latent
            assert placement == bucket_placement(height, width, grid(text))
        assert len(set(shapes.values())) == len(shapes)
