"""Captions of any length, tokens end to end, read by the safetensors package."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bucketline.errors import CorruptError
from bucketline.store.format.block import Column
from bucketline.store.format.hashing import caption_digest
from bucketline.store.format.text_block import DIGEST, Caption, TextSpec, encode_text_block, make_caption, read_text_block
from tests.kit import read_with_safetensors

SPEC = TextSpec(
    tokens=(Column(name="tokens", dtype="F32", shape=(3,)), Column(name="second", dtype="F16", shape=(2,))),
    fixed=(Column(name="pooled", dtype="F32", shape=(4,)),),
)


def caption(n: int, length: int) -> Caption:
    random = np.random.default_rng(n)
    tokens = {"tokens": random.normal(size=(length, 3)).astype("<f4"), "second": random.normal(size=(length, 2)).astype("<f2")}
    return make_caption(SPEC, caption_digest(str(n)), tokens, {"pooled": random.normal(size=4).astype("<f4")})


@given(lengths=st.lists(st.integers(0, 40), min_size=1, max_size=12), first_row=st.integers(0, 1 << 32))
@settings(max_examples=80)
def test_ragged_captions_come_back_as_they_were(lengths: list[int], first_row: int) -> None:
    captions = [caption(n, length) for n, length in enumerate(lengths)]
    block = encode_text_block(SPEC, captions, first_row)
    assert len(block) == SPEC.block_bytes(len(lengths), sum(lengths))
    read = read_text_block(SPEC, block, "x")
    assert (read.first_row, read.bad(), np.diff(read.starts).tolist()) == (first_row, [], lengths)
    for n, own in enumerate(captions):
        assert dict(read.parts(n)) == {**own.fixed, **own.tokens, DIGEST: own.digest}


def test_the_safetensors_package_reads_a_text_block() -> None:
    captions = [caption(n, length) for n, length in enumerate([2, 0, 5])]
    found = read_with_safetensors(encode_text_block(SPEC, captions, 0))
    assert np.frombuffer(found["starts"]["data"], "<i8").tolist() == [0, 2, 2, 7]
    assert found["tokens"]["shape"] == [7, 3]
    assert found["second"]["shape"] == [7, 2]
    assert found["pooled"]["shape"] == [3, 4]
    assert bytes(found["tokens"]["data"]) == b"".join(c.tokens["tokens"] for c in captions)
    assert bytes(found["digest"]["data"]) == b"".join(c.digest for c in captions)


def test_every_tensor_is_aligned_to_its_items_for_any_number_of_captions() -> None:
    for lengths in ([1], [1, 2], [3, 0, 4], [1] * 7):
        num_tokens = sum(lengths)
        begin = {tensor.name: tensor.begin for tensor in SPEC.tensors(len(lengths), num_tokens)}
        for column in (*SPEC.tokens, *SPEC.fixed):
            assert (SPEC.header_bytes + begin[column.name]) % column.item_bytes == 0


def test_damage_to_a_caption_is_found_whichever_byte_it_is() -> None:
    block = encode_text_block(SPEC, [caption(n, length) for n, length in enumerate([2, 0, 3])], 0)
    for at in range(SPEC.header_bytes, len(block)):
        damaged = bytearray(block)
        damaged[at] ^= 0x20
        try:
            assert len(read_text_block(SPEC, bytes(damaged), "x").bad()) == 1
        except CorruptError as error:
            assert "`starts`" in str(error)  # noqa: PT017 - either way of noticing is right


@pytest.mark.parametrize("starts", [[1, 2, 5], [0, 6, 5], [0, 2, 4], [0, -1, 5], [0, 2, 1 << 60]])
def test_starts_that_do_not_run_from_nothing_to_all_tokens_are_refused(starts: list[int]) -> None:
    block = bytearray(encode_text_block(SPEC, [caption(0, 2), caption(1, 3)], 0))
    block[SPEC.header_bytes : SPEC.header_bytes + 24] = np.array(starts, "<i8").tobytes()
    with pytest.raises(CorruptError, match=r"block 7: `starts` does not run from 0 to its 5 tokens"):
        read_text_block(SPEC, bytes(block), "block 7")


@pytest.mark.parametrize("length", [0, 8, 64, -1, -64])
def test_a_text_block_cut_short_is_refused(length: int) -> None:
    block = encode_text_block(SPEC, [caption(0, 2)], 0)
    with pytest.raises(CorruptError, match=r"^block 7: "):
        read_text_block(SPEC, block[:length], "block 7")


def test_a_text_block_of_another_encoder_is_refused() -> None:
    other = TextSpec(tokens=(Column(name="tokens", dtype="F32", shape=(4,)),))
    tokens = {"tokens": np.zeros((2, 4), "<f4")}
    block = encode_text_block(other, [make_caption(other, bytes(16), tokens, {})], 0)
    with pytest.raises(CorruptError, match=r"not that of a text block of this store"):
        read_text_block(SPEC, block, "x")


def test_token_columns_of_different_lengths_are_refused() -> None:
    tokens = {"tokens": np.zeros((2, 3), "<f4"), "second": np.zeros((3, 2), "<f2")}
    with pytest.raises(ValueError, match=r"text column 'tokens' takes F32 \[3, 3\], got float32 \[2, 3\]"):
        make_caption(SPEC, bytes(16), tokens, {"pooled": np.zeros(4, "<f4")})
