"""The error of quantised tokens: of a caption, of a shard's captions, of a store's."""

from __future__ import annotations

import numpy as np
import pytest

from bucketline.store.format.text_codec import TextError, measured_error


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
