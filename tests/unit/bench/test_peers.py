"""The peers: what their own processes do, and the case that compares them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bucketline.bench.apart import cpu_s, descendants, read_bytes
from bucketline.bench.cases.peers import (
    BEST,
    FROM_SERVER,
    MEMCPY,
    ONE_THREAD,
    TOUCHED,
    Peers,
    RemotePeers,
    chosen,
    cold_results,
    disk_results,
    hot_results,
    order_results,
)
from bucketline.bench.harness import Result, run_case
from bucketline.bench.peers import environments
from bucketline.bench.peers.environments import Environment, Failure, environment
from bucketline.bench.peers.formats.limits import Resident
from bucketline.bench.peers.registry import ENTRIES, Way
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
from bucketline.bench.peers.worker import Timed, gate, own_folder, read_expected, timed, write, write_expected
from bucketline.errors import UsageError
from tests.commands import spawn
from tests.unit.bench.test_cases import read_results

pytestmark = pytest.mark.slow
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


def test_the_processor_time_of_a_child_is_counted() -> None:
    before, others = cpu_s(), set(descendants())
    spawn(["python", "-c", "sum(range(2_000_000))"]).done()
    assert cpu_s() > before
    assert set(descendants()) <= others, "a child that ended is none; those of earlier tests may live"
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


LMDB, PT = f"{BEST}, 0 workers", "a .pt file each, 0 workers"


def told(cpu_s: float, wall_s: float = 1.0) -> Timed:
    return Timed(wall_s=wall_s, cpu_s=cpu_s, first_batch_s=0.1, num_bytes=10**9, read_bytes=10**9, passes=1)


def by_subject(results: list[Result], case: str) -> dict[str, Result]:
    return {one.subject: one for one in results if one.case == case}


def test_hot_marks_are_on_processor_time_with_and_without_touching() -> None:
    cpu = {TOUCHED: 0.1, MEMCPY: 0.2, ONE_THREAD: 0.25, LMDB: 0.45, PT: 3.0}
    results = hot_results({name: [[told(own)]] * 2 for name, own in cpu.items()})
    gross = by_subject(results, "peers, hot, CPU")
    assert (gross[ONE_THREAD].limit_ratio, gross[ONE_THREAD].is_met) == (1.25, False)
    net = by_subject(results, "peers, hot, CPU less touching")
    assert (net[ONE_THREAD].median, net[ONE_THREAD].limit_ratio, net[ONE_THREAD].is_met) == (0.15, 1.5, False)
    assert TOUCHED not in net
    beside = by_subject(results, "peers, hot, CPU, against Bucketline")
    assert (beside[LMDB].limit_ratio, beside[LMDB].is_met) == (1.8, False)
    assert (beside[PT].limit_ratio, beside[PT].is_met) == (12.0, True)
    assert MEMCPY not in beside
    assert not by_subject(results, "peers, hot, order"), "two rounds tell nothing of their order"


def test_cold_we_are_held_against_the_fastest_way_of_lmdb_and_of_direct_reads() -> None:
    wall = {"O_DIRECT, 16 threads": 0.5, "O_DIRECT, 32 threads": 0.4, ONE_THREAD: 0.5, LMDB: 2.0, f"{BEST}, 2 workers": 1.0}
    results = cold_results({name: [[told(1.0, own)]] * 2 for name, own in wall.items()})
    assert by_subject(results, "peers, cold, delivered")[ONE_THREAD].limit_ratio == 0.8
    assert by_subject(results, "peers, cold, delivered, against LMDB")[ONE_THREAD].limit_ratio == 2.0
    ours = by_subject(results, "peers, cold, CPU, against LMDB")[ONE_THREAD]
    assert (ours.limit_ratio, ours.is_met) == (1.0, True)
    first = by_subject(results, "peers, cold, first batch, against the first peer")
    assert (set(first), first[ONE_THREAD].is_met) == ({LMDB, ONE_THREAD}, True)


def test_a_ranking_that_turns_with_the_order_is_counted() -> None:
    steady = {"a": [1.0, 1.1] * 3, "b": [2.0, 2.1] * 3}
    (result,) = order_results("case", steady)
    assert (result.median, result.is_met) == (0.0, True)
    (result,) = order_results("case", {**steady, "c": [3.0, 1.5] * 3})
    assert (result.median, result.is_met) == (1.0, False), "c is above b in odd rounds, and below it in even ones"
    (result,) = order_results("case", {**steady, "c": [3.0, 1.5, 1.9, 1.5, 3.0, 1.5]})
    assert result.median == 0.0, "where they overlap nothing is claimed"


def test_disk_bytes_are_told_of_those_who_write_any() -> None:
    assert [(one.subject, one.median) for one in disk_results({"a": 0, "b": 150}, 100)] == [("b", 1.5)]


def test_what_runs_in_a_peers_environment_imports_nothing_else_of_ours_and_only_numpy() -> None:
    """Only `bucketline/__init__.py` and `bench` are linked into it, and some have no torch."""
    code = "import sys, bucketline.bench.apart, bucketline.bench.peers.worker; print(*sys.modules)"
    loaded = spawn([sys.executable, "-P", "-c", code]).done().out.split()
    assert {name for name in loaded if name.startswith("bucketline.")} == {
        name for name in loaded if name.startswith("bucketline.bench")
    }
    assert not {"torch", "lmdb", "cyclopts", "xxhash"} & set(loaded)


def test_a_name_that_is_no_peer_is_refused() -> None:
    with pytest.raises(UsageError, match="--only has nobody; expected names from"):
        chosen(ENTRIES, ("nobody",))
    assert chosen(ENTRIES, ()) == [*ENTRIES]
    local = [entry for entry in ENTRIES if entry.hot or entry.cold]
    assert {entry.name for entry in chosen(local, ("LitData",))} == {
        "resident batches",
        "memcpy",
        "O_DIRECT",
        "bucketline",
        "LitData",
    }


def test_an_environment_that_does_not_install_is_a_failure_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environments, "REQUIREMENTS", tmp_path)
    (tmp_path / "broken.txt").write_text(f"{tmp_path}/no-such.whl\n", encoding="utf-8")
    found = environment("broken", tmp_path / "made")
    assert isinstance(found, Failure)
    assert found.name == "broken"
    assert "pip" in found.reason
    assert not (tmp_path / "made" / "broken").exists()
    missing = environment("unheard-of", tmp_path / "made")
    assert isinstance(missing, Failure)
    assert "there is no unheard-of.txt" in missing.reason


def test_an_environment_is_made_once_and_sees_of_us_what_it_runs_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environments, "REQUIREMENTS", tmp_path)
    (tmp_path / "empty.txt").write_text("# nothing\n", encoding="utf-8")
    monkeypatch.setattr(environments, "_make", lambda _name, own, _file: own.mkdir(parents=True))
    monkeypatch.setattr(environments, "_versions", lambda _own, _wanted: {})
    made = environment("empty", tmp_path / "made")
    assert isinstance(made, Environment)
    assert made.ours is not None
    assert sorted(path.name for path in (made.ours / "bucketline").iterdir()) == ["__init__.py", "bench"]
    assert made.variables()["PYTHONPATH"] == str(made.ours)
    monkeypatch.setattr(environments, "_make", lambda *_: pytest.fail("it was made again"))
    assert environment("empty", tmp_path / "made") == made


def test_the_case_runs_with_a_peer_that_has_no_environment(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environments, "REQUIREMENTS", tmp_path / "none")
    small = ["--batches-per-bucket=1", "--batch-size=4", "--repeats=1", "--least-s=0.01", "--ways=1", "--json"]
    where = [f"--stores={tmp_path}", f"--environments={tmp_path / 'made'}", "--only", "LitData"]
    assert run_case(Peers, [*small, *where]) == 0
    header, results = read_results(capsys)
    assert header["peers"]["left_out"].keys() == {"environment litdata"}
    assert header["peers"]["gate"][ONE_THREAD]["batches"] == 4
    cases = {one["case"] for one in results}
    assert {"peers, hot, delivered", "peers, hot, CPU", "peers, cold, delivered", "peers, disk"} <= cases
    assert all(one["mark"] is None for one in results), "the marks are for larger sets"


def test_the_peers_that_read_from_a_server_run_without_any_of_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environments, "REQUIREMENTS", tmp_path / "none")
    small = ["--batches-per-bucket=1", "--batch-size=4", "--repeats=1", "--latency-ms=0", "--cache-share=100", "--json"]
    assert run_case(RemotePeers, [*small, f"--stores={tmp_path}", f"--environments={tmp_path / 'made'}"]) == 0
    header, results = read_results(capsys)
    without = ("litdata", "streaming", "webdataset", "lance", "datasets")
    assert header["peers"]["left_out"].keys() == {f"environment {name}" for name in without}
    assert header["peers"]["gate"][FROM_SERVER]["batches"] == 4
    cases = {one["case"]: one for one in results}
    assert cases["peers, remote, 0 ms, pass 1, bytes sent"]["median"] >= 1
    assert cases["peers, remote, 0 ms, pass 2, bytes sent"]["median"] == 0
    assert cases["peers, remote, 0 ms, pass 2, samples"]["unit"] == "samples/s"
