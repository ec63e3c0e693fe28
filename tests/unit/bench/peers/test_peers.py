"""The peers that this environment can run, through what their own processes do: write, gate, time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bucketline.bench.harness import cpu_s, descendants, read_bytes
from bucketline.bench.peers.formats.limits import Resident
from bucketline.bench.peers.registry import BY_NAME, ENTRIES, Way
from bucketline.bench.peers.samples import (
    GateError,
    PeerBatch,
    Sample,
    SetShape,
    check,
    expected,
    pack,
    sample,
    sums_up,
    touch,
    unpack,
    words_sum,
)
from bucketline.bench.peers.worker import gate, own_folder, read_expected, timed, write, write_expected
from tests.commands import spawn

SHAPE = SetShape(buckets=((8, 8, 4), (8, 16, 8)), batch_size=2, tokens=(2, 5), token_width=8)
HERE = (
    "resident batches",
    "memcpy",
    "O_DIRECT",
    "bucketline",
    "LMDB in a DataLoader",
    "a .pt file each",
    "an .npz file each",
    "a .safetensors file each",
    "WebDataset",
)


def task(peer: str, folder: Path) -> dict[str, Any]:
    return {"peer": peer, "folder": str(folder), "shape": asdict(SHAPE), "way": asdict(Way())}


@pytest.mark.filterwarnings("ignore")  # as in a peer's own process
@pytest.mark.parametrize("peer", HERE)
def test_a_peer_delivers_every_sample_once_with_the_right_bytes_and_is_timed(peer: str, tmp_path: Path) -> None:
    write_expected(tmp_path, expected(SHAPE))
    write(task(peer, tmp_path))
    seen = gate(task(peer, tmp_path))
    assert seen["batches"] == seen["full_batches"] == 6
    for least_s in (0.0, None):
        (found,) = timed(task(peer, tmp_path), least_s)
        assert found.passes >= 1
        assert 0 < found.first_batch_s <= found.wall_s
        assert 0 < found.num_bytes <= found.passes * SHAPE.delivered_bytes


def test_a_format_with_a_wrong_byte_does_not_pass_the_gate(tmp_path: Path) -> None:
    from bucketline.bench.peers.samples import GateError

    write_expected(tmp_path, expected(SHAPE))
    write(task("O_DIRECT", tmp_path))
    file = own_folder(tmp_path, "O_DIRECT") / "samples.raw"
    data = bytearray(file.read_bytes())
    data[100] ^= 1
    file.write_bytes(data)
    with pytest.raises(GateError, match="sample 0 has other bytes"):
        gate(task("O_DIRECT", tmp_path))
    with pytest.raises(GateError, match="are not every sample once a pass"):
        timed(task("O_DIRECT", tmp_path))


def test_what_is_expected_is_read_back(tmp_path: Path) -> None:
    wanted = expected(SHAPE)
    write_expected(tmp_path, wanted)
    assert read_expected(tmp_path) == wanted


def test_every_peer_has_ways_and_a_name_of_its_own() -> None:
    assert len(BY_NAME) == len(ENTRIES)
    assert all(entry.hot or entry.cold or entry.remote for entry in ENTRIES)


def test_the_processor_time_of_a_child_is_counted() -> None:
    before = cpu_s()
    spawn(["python", "-c", "sum(range(2_000_000))"]).done()
    assert cpu_s() > before
    assert descendants() == []
    assert read_bytes() >= 0


# The samples that every peer is given, and the gate that each must pass.


GATE_SHAPE = SetShape(buckets=((8, 8, 4), (8, 16, 6)), batch_size=2, tokens=(2, 5), token_width=8)


@pytest.fixture
def batches(tmp_path: Path) -> list[PeerBatch]:
    return list(Resident().open(GATE_SHAPE, tmp_path, Way()).begin())


def are_equal(first: Sample, second: Sample) -> bool:
    pairs: list[tuple[Any, Any]] = list(zip(first, second, strict=True))
    return all(np.array_equal(a, b) for a, b in pairs)


def test_a_sample_is_the_same_whatever_was_asked_for_before() -> None:
    first = sample(GATE_SHAPE, 7)
    sample(GATE_SHAPE, 3)
    again = sample(GATE_SHAPE, 7)
    assert are_equal(first, again)
    assert first.latent.shape == (4, 8, 16)
    assert len(sample(GATE_SHAPE, 0).tokens) == 5, "the longest caption is there"


def test_a_bucket_that_is_no_whole_batches_is_refused() -> None:
    with pytest.raises(ValueError, match="bucket 8x8 has 3 rows, expected a multiple of the batch size 2"):
        SetShape(buckets=((8, 8, 3),), batch_size=2)


def test_a_value_of_bytes_gives_its_sample_back() -> None:
    for number in (0, 5):
        own = sample(GATE_SHAPE, number)
        found = unpack(pack(own), GATE_SHAPE)
        assert are_equal(own, found)


def test_batches_that_are_right_pass_and_add_up(batches: list[PeerBatch]) -> None:
    wanted = expected(GATE_SHAPE)
    passed = check(batches, GATE_SHAPE, wanted)
    assert (passed.batches, passed.num_bytes) == (5, GATE_SHAPE.delivered_bytes)
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
        check(batches, GATE_SHAPE, expected(GATE_SHAPE))


def test_samples_that_never_came_or_came_twice_are_named(batches: list[PeerBatch]) -> None:
    with pytest.raises(GateError, match="of 10 samples 2 were missing and 0 came more than once"):
        check(batches[1:], GATE_SHAPE, expected(GATE_SHAPE))
    with pytest.raises(GateError, match="0 were missing and 2 came more than once"):
        check([*batches, batches[0]], GATE_SHAPE, expected(GATE_SHAPE))


def test_what_is_not_contiguous_cannot_be_touched() -> None:
    with pytest.raises(ValueError, match="is not contiguous"):
        words_sum(np.zeros((4, 8), dtype=np.float16).T)
