"""Quantised tokens: the error of every value is bounded and measured, and what cannot be held is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from numpy.typing import NDArray

from bucketline.store.format.block import Column
from bucketline.store.format.hashing import caption_digest
from bucketline.store.format.text_block import TextSpec, delivered, quantised_caption, quantised_spec
from bucketline.store.format.text_codec import (
    TextError,
    as_e4m3,
    dequantise,
    e4m3_values,
    is_storable,
    measured_error,
    quantise,
)

F16_MAX = 65504.0
ANY_VALUE = st.floats(-F16_MAX, F16_MAX, width=32)
TOKENS = arrays.arrays(np.float32, st.tuples(st.integers(0, 5), st.sampled_from([1, 31, 32, 33, 64, 100])), elements=ANY_VALUE)


def random_tokens(num_tokens: int, width: int, scale: float = 1.0) -> NDArray[np.float32]:
    return (np.random.default_rng(width).normal(size=(num_tokens, width)) * scale).astype("<f4")


@settings(max_examples=60)
@given(tokens=TOKENS)
def test_no_value_of_i8_is_off_by_more_than_half_its_groups_scale(tokens: NDArray[np.float32]) -> None:
    stored = quantise(tokens, "I8")
    scale = np.repeat(stored["tokens_scale"].astype(np.float64), 32, axis=1)[:, : tokens.shape[1]]
    exact = stored["tokens"].astype(np.float64) * scale
    assert (np.abs(exact - tokens) <= scale / 2 * (1 + 2.0**-15)).all()
    assert (np.abs(stored["tokens"].astype(int)) <= 127).all()
    found = dequantise(stored)
    assert found.dtype == np.float16
    assert np.isfinite(found).all()
    assert found.tobytes() == exact.astype(np.float32).astype(np.float16).tobytes()
    assert not found[tokens == 0].any()


@given(tokens=TOKENS)
@settings(max_examples=60)
def test_a_scale_of_i8_is_the_smallest_that_reaches_the_largest_value(tokens: NDArray[np.float32]) -> None:
    scales = quantise(tokens, "I8")["tokens_scale"].astype(np.float64)
    for n in range(scales.shape[1]):
        largest = np.abs(tokens[:, 32 * n : 32 * n + 32]).max(axis=1, initial=0.0).astype(np.float64)
        below = np.nextafter(scales[:, n].astype(np.float16), np.float16(0)).astype(np.float64)
        reaches = scales[:, n] * 127 >= largest * (1 - 2.0**-23)
        assert (reaches | (scales[:, n] == 515.5)).all()
        assert ((below * 127 < largest) | (scales[:, n] == 0)).all()


@given(tokens=TOKENS)
@settings(max_examples=60)
def test_no_value_of_f8_is_off_by_more_than_a_sixteenth_or_half_a_step(tokens: NDArray[np.float32]) -> None:
    stored = quantise(tokens, "F8_E4M3")
    scale = stored["tokens_scale"].astype(np.float64)
    exact = e4m3_values()[stored["tokens"]].astype(np.float64) * scale
    assert (np.abs(exact - tokens) <= np.maximum(np.abs(tokens) / 16, scale * 2.0**-10) * (1 + 1e-5) + 1e-38).all()
    found = dequantise(stored)
    assert np.isfinite(found).all()
    assert not found[tokens == 0].any()


@pytest.mark.parametrize("dtype", ["I8", "F8_E4M3"])
def test_no_value_becomes_infinite_between_the_largest_of_f16_and_what_rounds_to_it(dtype: str) -> None:
    values = np.arange(65500, 65520, 2.0**-8, dtype=np.float32)
    tokens = np.repeat(values, 32).reshape(-1, 32)
    tokens.flags.writeable = False
    assert dequantise(quantise(tokens, dtype)).max() <= 65504


@pytest.mark.parametrize("dtype", ["I8", "F8_E4M3"])
@pytest.mark.parametrize("magnitude", [1e-44, 1e-38, 6e-8, 1e-6, 0.007, 1.0, 65504.0])
def test_extreme_magnitudes_are_held_as_well_as_f16_holds_them(dtype: str, magnitude: float) -> None:
    tokens = np.full((1, 64), magnitude, dtype=np.float32)
    tokens[0, ::2] *= -1
    found = dequantise(quantise(tokens, dtype)).astype(np.float64)
    assert np.abs(found - tokens).max() <= max(magnitude * 2.0**-8, 2.0**-24)


@pytest.mark.parametrize("dtype", ["I8", "F8_E4M3"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 65520.0, -1e30])
def test_what_f16_does_not_hold_is_refused(dtype: str, value: float) -> None:
    tokens = np.ones((2, 40), dtype=np.float32)
    tokens[1, 39] = value
    with pytest.raises(ValueError, match=f"NaN, infinite or beyond ±65504, which {dtype} does not hold"):
        quantise(tokens, dtype)


def test_a_few_large_channels_spoil_only_their_neighbours() -> None:
    """The figures of the design: four channels 100 times larger cost int8 per 32 values a few percent, per token a third."""
    tokens = random_tokens(64, 4096)
    tokens[:, [7, 300, 1301, 2900]] *= 100
    ordinary = np.abs(tokens).max(axis=0) < 20
    errors = {}
    for dtype in ("I8", "F8_E4M3"):
        found = dequantise(quantise(tokens, dtype))
        errors[dtype] = float(np.linalg.norm((found - tokens)[:, ordinary]) / np.linalg.norm(tokens[:, ordinary]))
    assert 0.02 < errors["I8"] < 0.04
    assert 0.02 < errors["F8_E4M3"] < 0.04


@pytest.mark.parametrize("dtype", ["I8", "F8_E4M3"])
def test_what_is_quantised_can_be_stored_and_what_no_value_becomes_cannot(dtype: str) -> None:
    columns = quantise(np.concatenate([random_tokens(5, 40, 6e4 / 8).clip(-65504, 65504), np.zeros((1, 40), "f4")]), dtype)
    tokens, scale = columns["tokens"], columns["tokens_scale"]
    assert is_storable(tokens, scale).all()
    for value in (np.nan, np.inf, -1, 1.001 * scale.dtype.type(515.5 if dtype == "I8" else 65504 / 448)):
        strange = scale.copy()
        strange[2, 0] = value
        assert is_storable(tokens, strange).tolist() == [True, True, False, True, True, True]
    strange = tokens.copy()
    strange[4, 7] = -128 if dtype == "I8" else 0xFF
    assert is_storable(strange, scale).tolist() == [True, True, True, True, False, True]


def test_e4m3_rounds_as_torch_does() -> None:
    random = np.random.default_rng(0)
    values = np.concatenate(
        [
            e4m3_values()[np.isfinite(e4m3_values())],
            (random.normal(size=4000) * 10.0 ** random.uniform(-4, 2.5, 4000)).astype("<f4"),
            np.arange(-448, 448, 0.25, dtype="<f4"),
            np.ldexp(np.arange(64), -12).astype("<f4"),
        ]
    ).astype("<f4")
    values = values[np.abs(values) <= 448]
    expected = torch.from_numpy(values).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    found = as_e4m3(values)
    assert np.array_equal(found & 0x7F, expected & 0x7F)
    delivered_by_torch = torch.from_numpy(expected).view(torch.float8_e4m3fn).float().numpy()
    assert np.array_equal(e4m3_values()[found], delivered_by_torch)


def test_every_code_of_e4m3_has_the_value_that_torch_gives_it() -> None:
    codes = np.arange(256, dtype=np.uint8)
    expected = torch.from_numpy(codes).view(torch.float8_e4m3fn).float().numpy()
    assert np.array_equal(e4m3_values(), expected, equal_nan=True)


def test_a_caption_comes_back_as_it_is_delivered() -> None:
    spec = quantised_spec("I8", 40, (Column(name="pooled", dtype="F16", shape=(3,)),))
    assert [column.name for column in (*spec.fixed, *spec.tokens)] == ["pooled", "tokens", "tokens_scale"]
    shown = [(column.name, column.dtype) for column in (*spec.delivered.fixed, *spec.delivered.tokens)]
    assert shown == [("pooled", "F16"), ("tokens", "F16")]
    tokens, pooled = random_tokens(6, 40), np.arange(3, dtype="<f2")
    caption = quantised_caption(spec, caption_digest("a"), tokens, {"pooled": pooled})
    assert caption.num_bytes == 6 * (40 + 2 * 2) + 6
    found = delivered(spec, caption)
    assert found.fixed == {"pooled": pooled.tobytes()}
    assert found.tokens == {"tokens": dequantise(quantise(tokens, "I8")).tobytes()}
    assert caption.error is not None
    assert 0 < float(caption.error[0]) < 0.01


STRANGE: list[list[tuple[str, str, tuple[int, ...]]]] = [
    [("tokens", "I8", (64,)), ("tokens_scale", "F16", (3,))],
    [("tokens", "I8", (64,)), ("tokens_scale", "F32", (2,))],
    [("tokens", "F16", (64,)), ("tokens_scale", "F16", (2,))],
    [("tokens_scale", "F16", (2,))],
    [("more", "F16", (2,)), ("tokens", "I8", (64,)), ("tokens_scale", "F16", (2,))],
]


@pytest.mark.parametrize("columns", STRANGE)
def test_scales_that_do_not_suit_their_tokens_are_refused(columns: list[Any]) -> None:
    from bucketline.store.format.schema import text_entry

    spec = TextSpec(tokens=tuple(Column(name=n, dtype=d, shape=s) for n, d, s in columns))
    with pytest.raises(ValueError, match="tokens_scale takes tokens of I8 or F8_E4M3"):
        text_entry(spec)


def test_the_error_of_a_caption_is_relative_worst_token_and_worst_channel() -> None:
    tokens = np.zeros((3, 4), dtype="<f4")
    tokens[0], tokens[1, 1] = [3, 0, 0, 4], 5
    found = tokens.astype("<f2")
    assert measured_error(tokens, found).tolist() == [0, 1, 0]
    found[1] = [0, 4, 3, 0]
    relative, cosine, channel = measured_error(tokens, found).tolist()
    assert relative == pytest.approx(np.sqrt((1 + 9) / 50))
    assert cosine == pytest.approx(0.8)
    assert channel == pytest.approx(np.sqrt(9 / 12.5))  # channel 2 has nothing of its own: relative to the median of 9 and 16
    found[1] = [0, 4, 0, 0]
    assert measured_error(tokens, found)[2] == pytest.approx(1 / 5)


def test_errors_of_shards_are_joined_by_their_captions() -> None:
    one = TextError.of(np.array([[0.01, 0.99, 0.1], [0.03, 0.97, 0.3]], dtype="<f4"))
    two = TextError.of(np.array([[0.08, 0.90, 0.2]], dtype="<f4"))
    both = TextError.joined([one, two])
    assert both is not None
    assert (both.captions, both.relative_max, both.cosine_min, both.channel_max) == pytest.approx((3, 0.08, 0.9, 0.3))
    assert both.relative_mean == pytest.approx(0.04)
    assert TextError.joined([None, one, None]) == one
    assert TextError.joined([]) is TextError.joined([None]) is None
