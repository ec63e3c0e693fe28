"""The case that compares: ratios, marks, the check of the order, and what is left out."""

from __future__ import annotations

from pathlib import Path

import pytest

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
from bucketline.bench.peers.registry import CAPABILITIES, ENTRIES, QUESTIONS, Can
from bucketline.bench.peers.worker import Timed
from bucketline.errors import UsageError
from tests.unit.bench.measured import read_results

pytestmark = pytest.mark.slow

LMDB, PT = f"{BEST}, 0 workers", "a .pt file each, 0 workers"


def timed(cpu_s: float, wall_s: float = 1.0) -> Timed:
    return Timed(wall_s=wall_s, cpu_s=cpu_s, first_batch_s=0.1, num_bytes=10**9, read_bytes=10**9, passes=1)


def by_subject(results: list[Result], case: str) -> dict[str, Result]:
    return {one.subject: one for one in results if one.case == case}


def test_hot_marks_are_on_processor_time_with_and_without_touching() -> None:
    cpu = {TOUCHED: 0.1, MEMCPY: 0.2, ONE_THREAD: 0.25, LMDB: 0.45, PT: 3.0}
    results = hot_results({name: [[timed(own)]] * 2 for name, own in cpu.items()})
    gross = by_subject(results, "peers, hot, CPU")
    assert (gross[ONE_THREAD].limit_ratio, gross[ONE_THREAD].is_met) == (1.25, True)
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
    results = cold_results({name: [[timed(1.0, own)]] * 2 for name, own in wall.items()})
    assert by_subject(results, "peers, cold, delivered")[ONE_THREAD].limit_ratio == 0.8
    ours = by_subject(results, "peers, cold, delivered, against LMDB")[ONE_THREAD]
    assert (ours.limit_ratio, ours.is_met) == (2.0, False)


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


def test_every_loader_answers_every_question_with_a_reason() -> None:
    loaders = {one.loader for one in CAPABILITIES}
    assert len(CAPABILITIES) == len(loaders) * len(QUESTIONS)
    assert all(one.why for one in CAPABILITIES)
    assert {one.can for one in CAPABILITIES} == set(Can)


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


def test_every_peer_with_an_environment_has_requirements_that_are_pinned() -> None:
    for name in {entry.environment for entry in ENTRIES if entry.environment}:
        lines = (environments.REQUIREMENTS / f"{name}.txt").read_text(encoding="utf-8").splitlines()
        assert all("==" in line for line in lines if not line.startswith("#"))


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
    assert header["peers"]["left_out"].keys() == {"environment litdata", "environment streaming", "environment webdataset"}
    assert header["peers"]["gate"][FROM_SERVER]["batches"] == 4
    cases = {one["case"]: one for one in results}
    assert cases["peers, remote, 0 ms, pass 1, bytes sent"]["median"] >= 1
    assert cases["peers, remote, 0 ms, pass 2, bytes sent"]["median"] == 0
    assert cases["peers, remote, 0 ms, pass 2, samples"]["unit"] == "samples/s"
