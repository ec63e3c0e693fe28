"""A caption that comes again: its embedding may differ by rounding, and by no more."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from bucketline.store.write.caption_sketch import CaptionSketch

rng = np.random.default_rng(3)
TOKENS = rng.standard_normal((77, 64)).astype(np.float32)


def test_an_embedding_that_another_batch_rounded_otherwise_is_the_same() -> None:
    one, other = (torch.from_numpy(TOKENS + noise).to(torch.bfloat16) for noise in (0, rng.normal(0, 0.01, TOKENS.shape)))
    assert not torch.equal(one, other)
    assert CaptionSketch.of({"tokens": one}).is_like(CaptionSketch.of({"tokens": other}))


@pytest.mark.parametrize(
    "other",
    [
        {"tokens": rng.standard_normal((77, 64)).astype(np.float32)},
        {"tokens": TOKENS * 1.3},
        {"tokens": TOKENS[::-1].copy()},
        {"tokens": TOKENS[:76]},
        {"tokens": TOKENS.astype(np.float16)},
        {"pooled": TOKENS},
        {"tokens": TOKENS, "pooled": TOKENS[0]},
        {"tokens": np.zeros_like(TOKENS)},
        {"tokens": np.full_like(TOKENS, np.nan)},
        {},
    ],
    ids=["another", "wider", "turned", "shorter", "dtype", "column", "columns", "zeros", "nan", "nothing"],
)
def test_another_embedding_is_not(other: dict[str, object]) -> None:
    own = CaptionSketch.of({"tokens": TOKENS})
    assert own.is_like(CaptionSketch.of({"tokens": TOKENS.copy()}))
    assert not own.is_like(CaptionSketch.of(other))


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e300, 1e38])
def test_what_is_not_finite_is_compared_exactly(value: float) -> None:
    """As in a ragged group that allows it; 1e300 and sums of 1e38 are beyond 32 bits."""
    one, same, other = (CaptionSketch.of({"own": {"hidden": np.array([[1.0, own]] * 99)}}) for own in (value, value, -1.0))
    assert one.is_like(same)
    assert not one.is_like(other)


def test_numbers_of_classes_are_compared_exactly() -> None:
    one, same, other = (CaptionSketch.of({"class": np.array([[number]], np.int64)}) for number in (7, 7, 8))
    assert one.is_like(same)
    assert not one.is_like(other)
