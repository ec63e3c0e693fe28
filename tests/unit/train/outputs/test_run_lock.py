"""One run at a time writes to a folder, whoever began it and wherever it was stopped."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import socket
from typing import TYPE_CHECKING

import pytest

from bucketline.errors import LockedError, NoLocksError, UsageError
from bucketline.train import log
from bucketline.train import run as run_module
from bucketline.train import step as step_module
from bucketline.train.log import RunLock
from bucketline.train.run import FRESH, find_start, take_folder, train
from bucketline.train.save import Saver
from tests.kit import tree
from tests.unit.train.tiny_run import ALONE, config

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("resume", [False, True])
def test_a_second_run_in_the_folder_of_a_running_one_is_refused_and_changes_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *, resume: bool
) -> None:
    asked = config(folder, max_steps=3, save_every="1")
    real, refused = step_module.train_step, []

    def step(*args: object) -> object:
        before = tree(asked.output_dir)
        with pytest.raises(LockedError) as error:
            train(dataclasses.replace(asked, resume=resume), ALONE)
        refused.append(str(error.value))
        assert tree(asked.output_dir) == before
        return real(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(run_module, "train_step", step)
    monkeypatch.setattr(Saver, "save", lambda saver, *_: saver.saved)  # a thread would change the folder meanwhile
    with contextlib.suppress(KeyError):  # its summary names a checkpoint
        train(asked, ALONE)
    assert len(refused) == 3
    for message in refused:
        assert message.startswith(f"{asked.output_dir} is being written by another process")
        assert f'"pid": {os.getpid()}, "host": "{socket.gethostname()}"' in message
        assert message.endswith("wait until it has finished, or stop it, or choose another --output-dir")


def test_a_folder_is_free_again_when_its_run_has_ended_or_was_refused(folder: Path) -> None:
    asked = config(folder, max_steps=1)
    train(asked, ALONE)
    with pytest.raises(UsageError, match="already has a run; continue it with --resume"):
        train(asked, ALONE)
    assert train(dataclasses.replace(asked, max_steps=2, resume=True), ALONE).steps_done == 2


def test_the_kernel_frees_the_folder_of_a_run_that_was_killed(folder: Path) -> None:
    asked = config(folder)
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            take_folder(asked, RunLock(asked.output_dir), FRESH)
            os.write(writing, b".")
            signal.pause()
        os._exit(1)
    os.close(writing)
    assert os.read(reading, 1) == b"."
    with pytest.raises(LockedError, match=rf'"pid": {pid}'):
        find_start(asked, RunLock(asked.output_dir))
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    os.close(reading)
    with contextlib.closing(RunLock(asked.output_dir)) as lock:
        assert find_start(asked, lock) == FRESH
        take_folder(asked, lock, FRESH)


def test_a_run_that_began_and_ended_since_the_folder_was_looked_at_is_seen(folder: Path) -> None:
    asked = config(folder, max_steps=1)
    waiting = RunLock(asked.output_dir)
    start = find_start(asked, waiting)
    train(asked, ALONE)
    with contextlib.closing(waiting), pytest.raises(UsageError, match="already has a run; continue it with --resume"):
        take_folder(asked, waiting, start)


def test_a_file_system_without_locks_is_told_and_no_reason_to_stop(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object, **__: object) -> object:
        raise NoLocksError("this file system has no advisory locks")

    monkeypatch.setattr(log, "FileLock", refuse)
    train(config(folder, max_steps=1), ALONE)
    assert "this file system has no advisory locks; nothing keeps another run from writing" in caplog.text
