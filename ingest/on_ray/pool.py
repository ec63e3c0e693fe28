"""The pool of workers: start them, give each one slice after another, and replace those that are lost."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any, TypeVar

import ray
from ray.exceptions import RayError, RayTaskError

from bucketline import errors
from bucketline.command_line import counted
from bucketline.errors import BucketlineError, RankError
from bucketline.ingest.on_ray.worker import PackWorker, Status, WorkerFailure
from bucketline.ingest.pipeline.slice_worker import PackedSlice

if TYPE_CHECKING:
    from collections.abc import Callable

    from bucketline.ingest.config import PackConfig
    from bucketline.ingest.on_ray.cluster import Workers
    from bucketline.ingest.on_ray.slices import Attempt, SliceTable

T = TypeVar("T")

_POLL_S = 0.2
_ASK_EVERY_S = 1.0  # for progress
_SAY_EVERY_S = 30.0  # that workers are awaited
MAX_FAILED_STARTS = 3  # in a row
CLOSE_S = 10.0
LAST_SLICE_S = 60.0  # to seal what a stopped worker has encoded


@dataclass(slots=True)
class _Member:
    """A worker, from its request on."""

    actor: Any
    call: Any  # the answer that is awaited; None if it is idle
    name: str = ""  # empty until it has started
    attempt: Attempt | None = None
    status: Any = None  # the answer about its progress that is awaited
    num_done: int = 0  # images of its slice
    slowest: str = ""


class RayWorkers:
    """The workers of a run."""

    def __init__(self, config: PackConfig, workers: Workers, check: Callable[[], None]) -> None:
        """Request workers when they are needed; `check` is called several times a second, and may raise."""
        self._config, self._workers, self.check = config, workers, check
        self._members: list[_Member] = []
        self._failed_starts = 0
        self._has_begun = False
        self._say_at = monotonic() + _SAY_EVERY_S
        self._ask_at = 0.0
        kind: Any = ray.remote(PackWorker)
        self._kind = kind.options(num_cpus=workers.cpus, num_gpus=workers.gpus, max_restarts=0, max_concurrency=2)

    @property
    def num_working(self) -> int:
        """Number of workers that have started."""
        return sum(bool(member.name) for member in self._members)

    @property
    def _idle(self) -> list[_Member]:
        return [member for member in self._members if member.name and member.call is None]

    @property
    def num_done(self) -> int:
        """Images done of the slices that are being packed."""
        return sum(member.num_done for member in self._members)

    @property
    def slowest(self) -> str:
        """The stage that most workers wait for."""
        stages = [member.slowest for member in self._members if member.slowest]
        return max(set(stages), key=stages.count, default="")

    def ask(self, question: Callable[[Any], Any]) -> Any:  # noqa: ANN401 - Ray has no types
        """Return one worker's answer; another is asked if it is lost."""
        for _ in range(MAX_FAILED_STARTS):
            self._grow(1)
            while not (idle := self._idle):
                self._poll()
                self._grow(1)
            member = idle[0]
            member.call = question(member.actor)
            while member in self._members and member.call is not None:
                for found, answer in self._poll():
                    if found is member:
                        return _raised(answer)
        raise RankError(f"{MAX_FAILED_STARTS} workers were lost one after the other; see Ray's logs for the reason")

    def pack(
        self, table: SliceTable, begin: Callable[[Any, Attempt], Any], take: Callable[[Attempt, PackedSlice], None]
    ) -> None:
        """Have all slices packed. `begin` starts a slice on an actor, and `take` is called with each outcome."""
        while table.num_left:
            self._grow(min(self._workers.most, table.num_left))
            self._has_begun = self._has_begun or self.num_working >= min(self._workers.least, table.num_left)
            for member in self._idle if self._has_begun else ():
                if (attempt := table.pop()) is not None:
                    member.attempt, member.call = attempt, begin(member.actor, attempt)
            for member, answer in self._poll(table):
                attempt, member.attempt, member.num_done, member.status = member.attempt, None, 0, None
                packed = _raised(answer)
                if attempt is not None and isinstance(packed, PackedSlice):
                    take(attempt, packed)
                    table.finish()

    def stop(self, take: Callable[[Attempt, PackedSlice], None]) -> None:
        """Have the workers end their slices where they are, and take what they have encoded."""
        self.check = lambda: None
        for member in self._members:
            with contextlib.suppress(RayError):
                member.actor.stop.remote()
        until = monotonic() + LAST_SLICE_S
        while any(member.attempt is not None for member in self._members) and monotonic() < until:
            for member, answer in self._poll():
                attempt, member.attempt = member.attempt, None
                if attempt is not None and isinstance(answer, PackedSlice):
                    take(attempt, answer)

    def close(self) -> None:
        """End all workers; those that are idle remove what they have on their disks."""
        with contextlib.suppress(RayError):
            ray.wait([member.actor.close.remote() for member in self._idle], num_returns=len(self._idle), timeout=CLOSE_S)
        for member in self._members:
            with contextlib.suppress(RayError):
                ray.kill(member.actor)
        self._members = []

    def _grow(self, wanted: int) -> None:
        while len(self._members) < wanted:
            actor = self._kind.remote(self._config)
            self._members.append(_Member(actor=actor, call=actor.ready.remote()))

    def _poll(self, table: SliceTable | None = None) -> list[tuple[_Member, Any]]:
        """Wait a moment; return the workers that have answered, with their answers, and forget those that are lost."""
        self.check()
        self._ask()
        by_call = {member.call: member for member in self._members if member.call is not None}
        if not by_call:
            sleep(_POLL_S)
        answers = []
        done, _ = ray.wait(list(by_call), num_returns=1, timeout=_POLL_S)
        for call in done:
            member = by_call[call]
            try:
                answer = ray.get(call)
            except RayTaskError as error:
                raise RankError(f"the worker {member.name} failed: {error}; rerun the command to continue") from error
            except RayError as error:
                self._lose(member, error, table)
                continue
            member.call = None
            if member.name:
                answers.append((member, answer))
            else:
                member.name, self._failed_starts = str(answer), 0
        self._say_if_waiting()
        return answers

    def _lose(self, member: _Member, error: RayError, table: SliceTable | None) -> None:
        self._members.remove(member)
        with contextlib.suppress(RayError):
            ray.kill(member.actor)
        why = " ".join(str(error).split())[:500]
        if not member.name:
            self._failed_starts += 1
            if self._failed_starts == MAX_FAILED_STARTS:
                raise RankError(
                    f"workers do not start: {why}; every node needs bucketline[ingest,ray] of the same versions, and the model"
                ) from error
        if member.attempt is not None and table is not None:
            table.retry(member.attempt, why)
            what = f"slice {member.attempt.number} is packed again by another"
            print(f"warning: the worker {member.name} was lost; {what}", file=sys.stderr, flush=True)

    def _ask(self) -> None:
        """Ask the workers for their progress, and note what they have answered."""
        if monotonic() < self._ask_at:
            return
        self._ask_at = monotonic() + _ASK_EVERY_S
        for member in self._members:
            if member.attempt is None:
                continue
            with contextlib.suppress(RayError):
                if member.status is None:
                    member.status = member.actor.status.remote()
                elif ray.wait([member.status], timeout=0)[0]:
                    status, member.status = ray.get(member.status), None
                    if isinstance(status, Status):
                        member.num_done, member.slowest = status.num_done, status.slowest

    def _say_if_waiting(self) -> None:
        if self._has_begun or monotonic() < self._say_at:
            return
        self._say_at = monotonic() + _SAY_EVERY_S
        free = ray.available_resources()
        print(
            f"waiting for {counted(self._workers.least, 'worker')} of {self._workers}, {self.num_working} have started; "
            f"free in the cluster: {free.get('CPU', 0):g} CPU, {free.get('GPU', 0):g} GPU",
            file=sys.stderr,
            flush=True,
        )


def _raised(answer: Any) -> Any:  # noqa: ANN401 - Ray has no types
    """Return a worker's answer, or raise the error that it is."""
    if not isinstance(answer, WorkerFailure):
        return answer
    kind = getattr(errors, answer.kind, RankError)
    raise (kind if isinstance(kind, type) and issubclass(kind, BucketlineError) else RankError)(answer.message)
