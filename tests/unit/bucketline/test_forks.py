"""A fork goes through every lock of the process, also while other threads make new ones."""

from __future__ import annotations

import itertools
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bucketline.errors import LockedError, StoreError
from bucketline.files.atomic_write import FileLock
from bucketline.forks import ForkSafeLock, JoinableThread, OwnerProcess
from bucketline.ingest.parallel.ranks import RunFiles
from bucketline.ingest.pipeline.slice_packer import RowWriter
from bucketline.loader import Loader, LoaderConfig
from bucketline.store import Store
from bucketline.store.folder import LocalFolder
from bucketline.store.write.publish import lock_store, prepare_store
from tests.commands import spawn
from tests.kit import IMAGES, empty_store, open_writer, spec_of
from tests.leftovers import wait_until


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # forking while threads run is what is tested
def test_locks_may_be_made_during_forks(monkeypatch: pytest.MonkeyPatch) -> None:
    unraisable: list[object] = []
    monkeypatch.setattr("sys.unraisablehook", unraisable.append)  # what a handler of a fork raises ends there
    kept = deque((ForkSafeLock() for _ in range(1000)), maxlen=1000)
    has_forked, interval = threading.Event(), sys.getswitchinterval()
    sys.setswitchinterval(1e-6)

    def make_locks() -> None:
        while not has_forked.is_set():
            kept.append(ForkSafeLock())

    threads = [threading.Thread(target=make_locks) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(20):
            child = os.fork()
            if child == 0:
                os._exit(0)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        sys.setswitchinterval(interval)
        has_forked.set()
        for thread in threads:
            thread.join()
    assert not unraisable, unraisable


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_process_is_not_the_owner() -> None:
    owner = OwnerProcess()
    assert owner.is_current
    if (child := os.fork()) == 0:
        os._exit(int(owner.is_current))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


# Ctrl-C in `Thread.start` leaves open whether the thread runs: nobody fails to join it, and its target never runs later.


class Interrupted(threading.Event):
    """In place of what `Thread.start` waits for: Ctrl-C comes when the thread exists, and before that is known to others."""

    def __init__(self, thread: threading.Thread, may_begin: threading.Event) -> None:
        super().__init__()
        self._thread, self._may_begin, self._exists = thread, may_begin, threading.Event()

    def wait(self, timeout: float | None = None) -> bool:
        self._exists.wait(timeout)
        assert self._thread.ident is not None
        raise KeyboardInterrupt

    def set(self) -> None:
        self._exists.set()
        self._may_begin.wait()
        super().set()


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return IMAGES.make_store(tmp_path / "s", IMAGES.samples({"train/64x64": 4}))


@pytest.fixture
def interrupted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """Have each start of a thread interrupted; call what is given to let the threads continue, and to wait for their end."""
    real, started, may_begin = threading.Thread.start, list[threading.Thread](), threading.Event()

    def start(thread: threading.Thread) -> None:
        monkeypatch.setattr(thread, "_started", Interrupted(thread, may_begin))
        started.append(thread)
        real(thread)

    def release() -> None:
        may_begin.set()
        assert wait_until(lambda: not {*started} & {*threading.enumerate()}), "a thread runs that nobody ends"

    monkeypatch.setattr(threading.Thread, "start", start)
    yield release
    release()
    assert started


@pytest.mark.parametrize("runs_first", [False, True])
def test_a_thread_whose_start_was_interrupted_is_joined_at_once_or_when_it_has_ended(
    interrupted: Callable[[], None], *, runs_first: bool
) -> None:
    ran: list[int] = []
    thread = JoinableThread(lambda: ran.append(1), name="ours")
    with pytest.raises(KeyboardInterrupt):
        thread.start()
    for do in (interrupted, thread.join) if runs_first else (thread.join, interrupted):
        do()
    assert ran == [1] * runs_first


def test_a_thread_that_was_never_started_is_joined_at_once() -> None:
    JoinableThread(lambda: None, name="ours").join()


def test_ctrl_c_while_prefetch_threads_start_is_all_that_a_loop_sees(store: Store, interrupted: Callable[[], None]) -> None:
    with Loader(store, LoaderConfig(batch_size=1, threads=2)) as loader:
        with pytest.raises(KeyboardInterrupt):
            next(iter(loader))
        interrupted()
    assert not [thread for thread in threading.enumerate() if thread.name == "bucketline-builder"]


def test_ctrl_c_while_the_writing_thread_starts_is_all_that_a_pack_sees(interrupted: Callable[[], None]) -> None:
    with pytest.raises(KeyboardInterrupt), RowWriter(lambda: pytest.fail("nothing is to be written")) as writer:
        writer.put(spec_of("train/64x64"), [], [], begins_shard=False)
    interrupted()


def test_ctrl_c_while_heartbeats_start_is_all_that_a_rank_sees(interrupted: Callable[[], None], tmp_path: Path) -> None:
    files = RunFiles(LocalFolder(tmp_path), tmp_path, 0, 2)
    with pytest.raises(KeyboardInterrupt):
        files.begin_beats(lambda: 0)
    files.leave()
    interrupted()


# One writer at a time, and the second is told who the first is.


HOLD = "import sys; from pathlib import Path; from bucketline.files.atomic_write import FileLock; FileLock(Path(sys.argv[1]))"


def test_a_second_holder_is_refused_with_the_first_one_named(tmp_path: Path) -> None:
    with FileLock(tmp_path / "a.lock"), pytest.raises(LockedError, match=rf"pid: {os.getpid()}.*wait until it has finished"):
        FileLock(tmp_path / "a.lock")


def test_who_waits_for_a_lock_says_so_once_and_has_it_once_it_is_released(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("bucketline.files.atomic_write.SAY_AFTER_S", 0.0)
    lock, tries = FileLock(tmp_path / "a.lock"), itertools.count()

    def slept(_: float) -> None:
        if next(tries) == 20:
            lock.release()

    monkeypatch.setattr("bucketline.files.atomic_write.time.sleep", slept)
    FileLock(tmp_path / "a.lock", tmp_path, wait_s=1000.0).release()
    assert capfd.readouterr().err.count(f"{tmp_path} is being written by another process (pid: {os.getpid()}") == 1


def test_another_process_is_refused_too(tmp_path: Path) -> None:
    prepare_store(tmp_path / "s")
    with lock_store(tmp_path / "s") as lock:
        ran = spawn([sys.executable, "-c", HOLD, lock.path])
    assert ran.code == 1
    assert f"LockedError: {tmp_path / 's'} is being written by another process" in ran.err
    assert f"pid: {os.getpid()}" in ran.err


def test_a_lock_given_back_can_be_taken_again(tmp_path: Path) -> None:
    lock = FileLock(tmp_path / "a.lock")
    lock.release()
    lock.release()
    FileLock(tmp_path / "a.lock").release()


def test_the_lock_of_a_process_that_died_is_free(tmp_path: Path) -> None:
    died = spawn([sys.executable, "-c", f"{HOLD}; import os; os._exit(9)", tmp_path / "a.lock"])
    assert died.code == 9
    FileLock(tmp_path / "a.lock").release()


def test_two_writers_of_one_shard_are_refused(tmp_path: Path) -> None:
    empty_store(tmp_path)
    writer = open_writer(tmp_path, "a")
    with pytest.raises(LockedError):
        open_writer(tmp_path, "a")
    open_writer(tmp_path, "b").close()
    writer.close()


def test_a_folder_that_is_not_there_is_an_error_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"nowhere/a.lock cannot be written: No such file"):
        FileLock(tmp_path / "nowhere" / "a.lock")
