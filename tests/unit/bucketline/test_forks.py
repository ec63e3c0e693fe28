"""A fork goes through every lock of the process, also while other threads make new ones."""

from __future__ import annotations

import os
import sys
import threading
from collections import deque

import pytest

from bucketline.forks import ForkSafeLock, OwnerProcess


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
