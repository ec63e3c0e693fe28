"""The samples that every peer is given, and the gate that each must pass."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bucketline.bench.peers.formats.limits import Resident
from bucketline.bench.peers.gate import GateError, PeerBatch, check, sums_up, touch
from bucketline.bench.peers.registry import Way
from bucketline.bench.peers.samples import Sample, SetShape, expected, pack, sample, unpack, words_sum

SHAPE = SetShape(buckets=((8, 8, 4), (8, 16, 6)), batch_size=2, tokens=(2, 5), token_width=8)


@pytest.fixture
def batches(tmp_path: Path) -> list[PeerBatch]:
    return list(Resident().open(SHAPE, tmp_path, Way()).begin())


def are_equal(first: Sample, second: Sample) -> bool:
    pairs: list[tuple[Any, Any]] = list(zip(first, second, strict=True))
    return all(np.array_equal(a, b) for a, b in pairs)


def test_a_sample_is_the_same_whatever_was_asked_for_before() -> None:
    first = sample(SHAPE, 7)
    sample(SHAPE, 3)
    again = sample(SHAPE, 7)
    assert are_equal(first, again)
    assert first.latent.shape == (4, 8, 16)
    assert len(sample(SHAPE, 0).tokens) == 5, "the longest caption is there"


def test_a_bucket_that_is_no_whole_batches_is_refused() -> None:
    with pytest.raises(ValueError, match="bucket 8x8 has 3 rows, expected a multiple of the batch size 2"):
        SetShape(buckets=((8, 8, 3),), batch_size=2)


def test_a_value_of_bytes_gives_its_sample_back() -> None:
    for number in (0, 5):
        own = sample(SHAPE, number)
        found = unpack(pack(own), SHAPE)
        assert are_equal(own, found)


def test_batches_that_are_right_pass_and_add_up(batches: list[PeerBatch]) -> None:
    wanted = expected(SHAPE)
    passed = check(batches, SHAPE, wanted)
    assert (passed.batches, passed.num_bytes) == (5, SHAPE.delivered_bytes)
    assert sorted(passed.order) == list(range(10))
    assert sums_up(3 * sum(map(touch, batches)), 3, wanted)
    assert not sums_up(sum(map(touch, batches[1:])), 1, wanted)


def flip_a_bit(batch: PeerBatch) -> PeerBatch:
    batch.latent.view(np.uint8)[1, 2, 3, 4] ^= 1
    return batch


def pad_with_something(batch: PeerBatch) -> PeerBatch:
    batch.mask[0, -1] = False
    batch.tokens[0, -1] = 1
    return batch


def leave_a_hole_in_the_mask(batch: PeerBatch) -> PeerBatch:
    batch.mask[0, 0], batch.tokens[0, 0] = False, 0
    return batch


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (flip_a_bit, "has other bytes than were written"),
        (pad_with_something, "values after a caption's own tokens"),
        (leave_a_hole_in_the_mask, "a mask is not the first tokens of a caption"),
        (lambda batch: batch._replace(latent=batch.latent.astype(np.float32)), "latent is float32"),
        (lambda batch: batch._replace(tokens=np.asfortranarray(batch.tokens)), "tokens is not contiguous"),
        (lambda batch: batch._replace(latent=batch.latent[:1]), "latent is float16"),
        (lambda batch: batch._replace(number=batch.number[[0, 0]]), "has other bytes"),
        (lambda batch: batch._replace(number=batch.number + 100), "sample 1"),
    ],
)
def test_a_batch_that_is_wrong_is_refused(
    batches: list[PeerBatch], change: Callable[[PeerBatch], PeerBatch], message: str
) -> None:
    batches[2] = change(batches[2])
    with pytest.raises((GateError, IndexError), match=message):
        check(batches, SHAPE, expected(SHAPE))


def test_samples_that_never_came_or_came_twice_are_named(batches: list[PeerBatch]) -> None:
    with pytest.raises(GateError, match="of 10 samples 2 were missing and 0 came more than once"):
        check(batches[1:], SHAPE, expected(SHAPE))
    with pytest.raises(GateError, match="0 were missing and 2 came more than once"):
        check([*batches, batches[0]], SHAPE, expected(SHAPE))


def test_what_is_not_contiguous_cannot_be_touched() -> None:
    with pytest.raises(ValueError, match="is not contiguous"):
        words_sum(np.zeros((4, 8), dtype=np.float16).T)
