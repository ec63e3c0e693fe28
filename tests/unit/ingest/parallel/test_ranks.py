"""The files of ranks, on a disk and in a bucket without a common disk; ranks that are late, silent or dead."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import monotonic, sleep

import pytest

from bucketline.command_line import launch_name
from bucketline.errors import RankError, StoreError
from bucketline.ingest.parallel import ranks as module
from bucketline.ingest.parallel.ranks import PackRanks, RunFiles
from bucketline.ingest.parallel.signals import Interrupts
from bucketline.ingest.summary import RunSummary
from bucketline.store.folder import Folder, LocalFolder
from bucketline.typed_json import Json
from tests.kit import tree
from tests.object_storage import in_memory


@dataclass
class Said:
    a: Json


SAID = Said(["\udcff", 1 << 70])
Places = list[tuple["Folder", "Path"]]


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "POLL_S", (0.01, 0.01))
    monkeypatch.setattr(module, "CHECK_S", (0.0, 0.0))
    monkeypatch.setattr(module, "LAST_WORDS_S", 5.0)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")


def places(tmp_path: Path, kind: str, count: int = 2) -> Places:
    """Return for each rank the folder of the files, and the one on its own disk."""
    if kind == "disk":
        return [(LocalFolder(tmp_path / "s"), tmp_path / "s")] * count
    bucket = in_memory()
    return [(bucket, tmp_path / f"disk {rank if kind == 'bucket' else 0}") for rank in range(count)]


def in_ranks(at: Places, *works: Callable[[PackRanks], object]) -> list[object]:
    """Run a function a rank, each in a thread; give what each gave or raised."""
    gave: list[object] = [None] * len(works)

    def be(rank: int) -> None:
        try:
            own = RunFiles(*at[rank], rank, len(works))
            with PackRanks(rank=rank, world_size=len(works), interrupts=Interrupts(), files=own) as ranks:
                gave[rank] = works[rank](ranks)
        except BaseException as error:  # noqa: BLE001 - looked at by the test
            gave[rank] = error

    threads = [threading.Thread(target=be, args=(rank,), daemon=True) for rank in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
        assert not thread.is_alive()
    return gave


def done(ranks: PackRanks, number: int = 0) -> list[int]:
    """End the share of a source with so many images packed; return the numbers of all on rank 0."""
    return [summary.packed for summary in ranks.done(RunSummary(packed=number), lambda: None)]


def told(ranks: PackRanks) -> Said:
    return ranks.tell("said", SAID if ranks.is_first else None, Said)


@pytest.mark.parametrize("kind", ["disk", "bucket", "bucket and disk"])
def test_values_and_parts_go_from_rank_0_to_all_and_summaries_come_back_and_nothing_stays(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FILE_BYTES", 4)
    parts = [b"P1", b"", b"3", b"long" * 100]

    def work(ranks: PackRanks) -> object:
        own = ranks.deal([[b"0"], list(parts), []] if ranks.is_first else None)
        said = told(ranks)
        ranks.check()
        first = done(ranks, 10 * ranks.rank)
        return said, own, first, ranks.deal([[b"0"], [b"1"], [b"2"]] if ranks.is_first else None), done(ranks, ranks.rank)

    at = places(tmp_path, kind, 3)
    gave = in_ranks(at, work, work, work)
    assert gave[0] == (SAID, [b"0"], [0, 10, 20], [b"0"], [0, 1, 2])
    assert gave[1:] == [(SAID, parts, [], [b"1"], []), (SAID, [], [], [b"2"], [])]
    assert list(at[0][0].names()) == []
    assert tree(tmp_path) == {}


def test_ranks_know_whether_they_share_a_disk(tmp_path: Path) -> None:
    for kind, shared in (("disk", True), ("bucket and disk", True), ("bucket", False)):
        gave = in_ranks(places(tmp_path, kind), *[lambda ranks: (ranks.shares_disk, done(ranks))[0]] * 2)
        assert gave == [shared, shared]


def test_a_rank_ends_as_soon_as_its_share_is_done_and_rank_0_waits_for_all(tmp_path: Path) -> None:
    has_ended = threading.Event()

    def early(ranks: PackRanks) -> object:
        try:
            return done(ranks, 1)
        finally:
            has_ended.set()

    def first(ranks: PackRanks) -> object:
        assert has_ended.wait(60.0)
        until = monotonic() + 0.2
        while monotonic() < until:
            ranks.check()
        return done(ranks)

    assert in_ranks(places(tmp_path, "disk"), first, early) == [[0, 1], []]


@pytest.mark.parametrize("kind", ["disk", "bucket"])
def test_what_a_killed_run_has_left_misleads_no_rank_and_is_removed_from_a_disk(kind: str, tmp_path: Path) -> None:
    at = places(tmp_path, kind)
    folder, launch = at[0][0], f"pending/runs/{launch_name()}-2"
    folder.write(f"{launch}/open.json", json.dumps("0123").encode())
    for name in ("said-0.json", "0-end.json", "done-0-1.json", "0.lock"):
        folder.write(f"{launch}/0123/{name}", b"0")
    folder.write(f"{launch}/0123/welcome.json", json.dumps({"process": "p", "tickets": {"1": "abcd"}}).encode())
    gave: list[object] = []

    def be(rank: int) -> None:
        with PackRanks(rank=rank, world_size=2, interrupts=Interrupts(), files=RunFiles(*at[rank], rank, 2)) as ranks:
            gave.append((told(ranks), done(ranks, 7)))

    late = threading.Timer(0.2, be, (0,))  # rank 1 has read what was left
    late.start()
    be(1)
    late.join(30.0)
    assert sorted(gave, key=str) == [(SAID, [7, 7]), (SAID, [])]
    if kind == "disk":
        assert list((tmp_path / "s" / "pending").iterdir()) == []


def test_a_rank_that_does_not_come_is_named_and_no_folder_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "COME_WITHIN_S", 0.1)
    own = RunFiles(LocalFolder(tmp_path / "a" / "s"), tmp_path / "a" / "s", 0, 3)
    with (
        pytest.raises(RankError, match=r"rank 0 of 3 cannot reach the others: rank 1 did not come within 0 s; start all ranks"),
        PackRanks(rank=0, world_size=3, interrupts=Interrupts(), files=own),
    ):
        pass
    assert list(tmp_path.iterdir()) == []
    late = RunFiles(LocalFolder(tmp_path / "s"), tmp_path / "s", 1, 3)
    with (
        pytest.raises(
            RankError, match=r"rank 1 of 3 .*rank 0 did not come to \S+/s/pending/runs/[\w-]+ within 0 s; .* on a disk"
        ),
        PackRanks(rank=1, world_size=3, interrupts=Interrupts(), files=late),
    ):
        pass
    monkeypatch.delenv("MASTER_PORT")
    with pytest.raises(RankError, match="rank 1 of 3 cannot reach the others: start all ranks together, with torchrun or"):
        late.meet()
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "kept").touch()
    first = RunFiles(LocalFolder(tmp_path / "s"), tmp_path / "s", 0, 3)
    with pytest.raises(RankError, match="rank 0 of 3"), PackRanks(rank=0, world_size=3, interrupts=Interrupts(), files=first):
        pass
    assert (tmp_path / "s" / "kept").exists()


@pytest.mark.parametrize("kind", ["disk", "bucket"])
def test_the_end_of_a_run_leaves_the_files_of_another_with_its_launchers_name(kind: str, tmp_path: Path) -> None:
    folder, disk = places(tmp_path, kind, 1)[0]
    first, second = (RunFiles(folder, disk, 0, 2) for _ in range(2))
    first._launch = second._launch = "pending/runs/same"
    first._open()
    second._open()
    second.write("plan-0.json", b"{}")
    first.remove(is_all=True)
    assert second.read("plan-0.json") == b"{}"
    assert second._named() == second._run
    assert second._lock_of(0).exists()
    second.remove(is_all=True)
    assert list(folder.names()) == []


def test_files_in_a_bucket_that_are_a_day_old_stay_as_long_as_their_run_is_alive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LEFT_S", 1.0)
    folder, disk = places(tmp_path, "bucket", 1)[0]
    for run, name in (("left", "done-0-1.json"), ("alive", "done-0-1.json")):
        folder.write(f"pending/runs/a/{run}/{name}", b"")
    sleep(2.1)  # a bucket's clock may have whole seconds
    folder.write("pending/runs/a/alive/0-beat", b"")
    RunFiles(folder, disk, 0, 2)._remove_left()
    assert {file.name for file in folder.names()} == {f"pending/runs/a/alive/{name}" for name in ("0-beat", "done-0-1.json")}


def test_a_rank_of_another_version_is_named(tmp_path: Path) -> None:
    folder, launch = LocalFolder(tmp_path / "s"), f"pending/runs/{launch_name()}-2"

    def other() -> None:
        until = monotonic() + 30.0
        while folder.look_up(f"{launch}/open.json") is None:
            assert monotonic() < until
            sleep(0.01)
        hello = {"ticket": "t", "process": "pid 7 on node", "version": "0.0.9"}
        folder.write(f"{launch}/{json.loads(folder.read(f'{launch}/open.json'))}/1-hello.json", json.dumps(hello).encode())

    threading.Thread(target=other, daemon=True).start()
    own = RunFiles(folder, tmp_path / "s", 0, 2)
    with (
        pytest.raises(
            RankError, match=r"rank 1 \(pid 7 on node\) has version 0\.0\.9 of bucketline, rank 0 has .*; install the"
        ),
        PackRanks(rank=0, world_size=2, interrupts=Interrupts(), files=own),
    ):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_a_store_is_an_error_of_rank_0(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "pending").symlink_to(tmp_path)
    for name, says in (("file", "cannot make .*file a store"), ("s", "pending is a link")):
        with pytest.raises(StoreError, match=says):
            RunFiles(LocalFolder(tmp_path / name), tmp_path / name, 0, 2).meet()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "s"]


def test_a_rank_that_is_silent_is_named_and_in_the_end_given_up(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for name, seconds in (("BEAT_EVERY_S", 0.01), ("SILENT_S", 0.5), ("GIVEN_UP_S", 1.0)):
        monkeypatch.setattr(module, name, seconds)
    over = threading.Event()

    def first(ranks: PackRanks) -> object:
        try:
            return done(ranks)
        finally:
            over.set()

    def hangs(ranks: PackRanks) -> object:
        ranks.check()  # from now on it is expected to look for messages
        return over.wait(60.0)

    gave = in_ranks(places(tmp_path, "bucket"), first, hangs)
    assert isinstance(gave[0], RankError)
    assert f"rank 1 (pid {os.getpid()} on {socket.gethostname()}) does not answer; the other ranks have stopped" in str(gave[0])
    assert capfd.readouterr().err.count("warning: rank 1 (pid") == 1


def test_a_rank_at_work_is_waited_for_however_long_it_takes(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for name, seconds in (("BEAT_EVERY_S", 0.01), ("SILENT_S", 1.2), ("GIVEN_UP_S", 1.5)):
        monkeypatch.setattr(module, name, seconds)

    def at_work(ranks: PackRanks, *, packs: bool) -> object:
        until = monotonic() + 2.5
        while monotonic() < until:
            sleep(0.01)
            if packs:
                ranks.check()
        return done(ranks, 1)

    loading, packing = (partial(at_work, packs=packs) for packs in (False, True))
    gave = in_ranks(places(tmp_path, "disk", 3), done, loading, packing)
    assert gave == [[0, 1, 1], [], []]
    assert "silent" not in capfd.readouterr().err


def test_a_dead_rank_is_noticed_at_work_within_seconds(tmp_path: Path) -> None:
    """A collective would notice it when the work is done."""
    ended_at: list[float] = []

    def first(ranks: PackRanks) -> None:
        while not ended_at or monotonic() < ended_at[0] + 60.0:
            ranks.check()

    def dead(ranks: PackRanks) -> None:
        assert ranks._files._lock is not None
        ended_at.append(monotonic())
        ranks._files._lock.release()  # as the system does when a process ends
        ranks._files.leave()
        ranks.world_size = 1  # and says nothing more

    gave = in_ranks(places(tmp_path, "disk"), first, dead)
    assert isinstance(gave[0], RankError)
    assert "ended without a message" in str(gave[0])


def test_a_failing_rank_ends_all_also_without_a_common_disk(tmp_path: Path) -> None:
    def failing(ranks: PackRanks) -> None:
        raise StoreError("the disk is full")

    def working(ranks: PackRanks) -> None:
        while True:
            ranks.check()
            sleep(0.01)

    gave = in_ranks(places(tmp_path, "bucket", 3), working, failing, working)
    assert str(gave[0]) == "rank 1: the disk is full (the other ranks have stopped, before anything was encoded)"
    assert isinstance(gave[0], RankError)
    assert [type(one) for one in gave[1:]] == [SystemExit, SystemExit]
    assert [str(one) for one in gave[1:]] == ["1", "1"]
