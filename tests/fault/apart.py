"""A piece of work in a process of its own, with a limit of time, so that a crash and a hang are outcomes like others."""

from __future__ import annotations

import itertools
import json
import os
import pkgutil
import signal
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from bucketline.errors import BucketlineError
from bucketline.loader.service.sockets import readable
from tests.fault.record import GOOD, Outcome, Wrong

HANG_S = 10.0


class How:
    """How a piece of work ended: done, refused by an error of ours, with another exception, by a signal, or not in time."""

    DONE, REFUSED = Outcome.COMPLETED, Outcome.CLEAN_ERROR
    DEFECT, DIED, HUNG = Outcome.DEFECT, Outcome.CRASH, Outcome.HANG


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    how: Outcome  # one of How
    said: str  # the error, or the signal
    gave: Any = None  # what JSON takes
    signal: int = 0

    def done(self) -> Any:
        """Return what it gave; raise `Wrong` unless it came to its end."""
        if self.how is not How.DONE:
            raise Wrong(self.said, self.how if self.how not in GOOD else Outcome.DEFECT)
        return self.gave

    def fair(self) -> Outcome:
        """Return its outcome, if it came to its end or was refused; raise `Wrong` otherwise."""
        return self.how if self.how in GOOD else self.done()


class Apart:
    def __init__(self, work: Callable[[], object]) -> None:
        """Fork it; what it prints goes nowhere, what it gives must be what JSON takes."""
        reader, writer = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(reader)
            _be_child(work, writer)
        os.close(writer)
        self._pipe = reader

    def kill(self, number: int = signal.SIGKILL) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def is_over(self) -> bool:
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def ended(self, limit_s: float = HANG_S) -> Ended:
        """Wait for its end, at most so long from now; a process that continues then has hung, and is killed."""
        until = time.monotonic() + limit_s
        said, has_hung = b"", False
        while not (has_hung := not readable([self._pipe], until - time.monotonic())) and (part := os.read(self._pipe, 1 << 16)):
            said += part
        if has_hung:
            self.kill()
        os.close(self._pipe)
        status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        if has_hung:
            return Ended(how=How.HUNG, said=f"no end within {limit_s:g} s")
        if status < 0 or not said:
            name = signal.Signals(-status).name if status < 0 else f"exit code {status} without a word"
            return Ended(how=How.DIED, said=f"ended by {name}", signal=max(0, -status))
        how, text, gave = json.loads(said)
        return Ended(how=Outcome(how), said=text, gave=gave)


def apart(work: Callable[[], object], limit_s: float = HANG_S) -> Ended:
    """Run a piece of work in a forked process to its end, or to the limit."""
    return Apart(work).ended(limit_s)


def killed_at(function: str, call: int, work: Callable[[], object]) -> None:
    """Run a piece of work in a process that is killed at one of a function's calls, from 1; it is named with its module."""
    module, _, name = function.rpartition(".")

    def until_then() -> None:
        owner, left = pkgutil.resolve_name(f"bucketline.{module}"), itertools.count(call, -1)
        own = getattr(owner, name)
        setattr(owner, name, lambda *a, **k: os.kill(os.getpid(), signal.SIGKILL) if next(left) == 1 else own(*a, **k))
        work()

    ended = apart(until_then, 60.0)
    assert ended.how is How.DIED, ended.said


def _be_child(work: Callable[[], object], writer: int) -> None:
    answer: tuple[str, str, object] = (How.DEFECT, "", None)
    try:
        null = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(null, fd)
        answer = (How.DONE, "", work())
    except BucketlineError as error:
        answer = (How.REFUSED, f"{type(error).__name__}: {error}", None)
    except BaseException as error:  # noqa: BLE001 - told to the parent; a forked process must not continue from here
        where = traceback.extract_tb(error.__traceback__)[-1]
        answer = (How.DEFECT, f"{error!r:.400} in {where.name}, {where.filename}:{where.lineno}", None)
    finally:
        told = json.dumps(answer).encode()
        while told:
            told = told[os.write(writer, told) :]
        os._exit(0)
