"""The peers that this environment can run, through what their own processes do: write, gate, time."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from bucketline.bench.harness import cpu_s, descendants, read_bytes
from bucketline.bench.peers.registry import BY_NAME, ENTRIES, Way
from bucketline.bench.peers.samples import SetShape, expected
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
    from bucketline.bench.peers.gate import GateError

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
