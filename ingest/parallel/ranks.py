"""Coordinate several processes that pack one source: share values, deal out items, and end together.

Ranks exchange JSON files (`Exchange`). A rank that fails leaves a last word; one that is killed loses its lock. Rank 0 then
tells the others, which stop between images and commit, and reports the cause. No rank waits for a process that is gone; one
whose heartbeats stop is named in a warning, and given up after half an hour.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING, TypeVar, cast

from bucketline.command_line import counted
from bucketline.errors import BucketlineError, RankError, UsageError
from bucketline.ingest.parallel.signals import Stopped, exit_code_of
from bucketline.typed_json import decode, encode

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from bucketline.ingest.parallel.exchange import Exchange
    from bucketline.ingest.parallel.signals import Interrupts
    from bucketline.typed_json import Json

T = TypeVar("T")

LAST_WORDS_S = 20.0  # how long rank 0 waits for the others to stop; torchrun kills 30 s after its SIGTERM
SILENT_S = 120.0  # then warn; a batch on slow cores, or sealing a large shard, may take this long
GIVEN_UP_S = 1800.0
FIRST_ENDS_S = 60.0  # how long the others wait for rank 0, which may finish a batch and then wait for them
GO_ON = "rerun the command, with any number of ranks, to continue"
MESSAGE_BYTES = 64 << 20  # of a listing, in one file


class _OtherRankEnded(KeyboardInterrupt):
    """Another rank has ended, or rank 0 told all ranks to end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LastWord:
    """Why a rank ends; `cause` is None if it was told to, or has finished. Of rank 0: what tells the others to end."""

    cause: str | None
    exit_code: int
    num_encoded: int


class PackRanks:
    """The processes of this run. A single process writes no messages."""

    def __init__(self, *, rank: int, world_size: int, interrupts: Interrupts, exchange: Exchange | None = None) -> None:
        """`exchange` carries the messages of several processes; one process needs none."""
        self.rank, self.world_size = rank, world_size
        self._interrupts = interrupts
        self._exchange = cast("Exchange", exchange)
        self._turn = 0  # number of the next message of rank 0, and of what it is given in return
        self._beats: dict[int, tuple[float, float]] = {}  # when a rank's last heartbeat was written, and when it was first seen
        self._silent: set[int] = set()  # ranks named in a warning
        self._given_up: set[int] = set()
        self._ended: dict[int, LastWord | None] = {}  # in order of arrival; None if it ended without a word
        self._num_checks = 0  # since the last message between ranks
        self._look_at = 0.0
        self._is_over = self._has_stopped = False

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def shares_disk(self) -> bool:
        """True if this process sees the disk of rank 0, or as rank 0 that of all; always true of one process."""
        return self.world_size == 1 or self._exchange.shares_disk

    def __enter__(self) -> PackRanks:
        if self.world_size == 1:
            return self
        try:
            if self.is_first:
                self._exchange.meet()
            else:
                with self._interrupts.at_once():  # one process says that nothing was encoded, for all
                    self._exchange.meet()
        except BaseException:
            if self.is_first:
                self._exchange.remove(is_all=True)
            raise
        self._beats = dict.fromkeys(self._exchange.processes, (0.0, monotonic()))
        self._exchange.begin_beats(lambda: self._num_checks)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """End together with the other ranks: rank 0 reports the cause once for all, the others end silently."""
        if self.world_size == 1:
            return
        try:
            if self._is_over or error is None:
                self._part()
                return
            self._interrupts.end()
            if self.is_first:
                self._end_all(error)
            else:
                self._end_after_first(error)
        finally:
            self._exchange.leave()
            if self.is_first:
                self._exchange.remove(is_all=len(self._ended) == self.world_size - 1)

    def from_first(self, make: Callable[[], T], kind: type[T]) -> T:
        """Return the value, of a `kind`, that `make` returns on rank 0, sent to all as JSON; its error ends all ranks."""
        if self.world_size == 1:
            return make()
        self._num_checks = 0
        if self.is_first:
            self._look()
            value = make()
            self._exchange.say(self._next(0), _as_bytes(encode(value)))
            return value
        return decode(kind, json.loads(self._of_first(self._next(0))))

    def deal(self, make: Callable[[], list[list[bytes]]]) -> list[bytes]:
        """Return this rank's parts of what `make` returns on rank 0: lines without their ends. Rank 0 empties the others."""
        if self.world_size == 1:
            return make()[0]
        own: list[list[bytes]] = []
        turn = self._turn

        def dealt() -> list[int]:
            parts = make()
            own.append(parts[0])
            return [0, *(self._deal_to(rank, parts[rank], turn) for rank in range(1, self.world_size))]

        numbers = self.from_first(dealt, list[int])
        if own:
            return own[0]
        names = [f"0-{turn:04d}-{self.rank}-{number:04d}" for number in range(numbers[self.rank])]
        return [part for name in names for part in self._of_first(name).split(b"\n")]

    def gather(
        self,
        value: T,
        *,
        is_last: bool = True,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> list[T] | None:
        """Return the values of all ranks, in rank order, on rank 0, and None on the others, which may end if it `is_last`.

        Rank 0 calls `meanwhile` as long as it waits.
        """
        if self.world_size == 1:
            return [value]
        found: list[T] | None = None
        if self.is_first:
            names = [self._next(rank, turn=self._turn) for rank in range(1, self.world_size)]
            found = [value, *(decode(type(value), json.loads(data)) for data in self._of_others(names, meanwhile))]
        else:
            self._exchange.say(self._next(self.rank, turn=self._turn), _as_bytes(encode(value)))
        self.from_first(bool, bool)  # nobody ends before all are known
        self._is_over = is_last
        return found

    def check(self) -> None:
        """Check for messages of other ranks; does nothing if called again too soon."""
        if self.world_size > 1 and (now := monotonic()) >= self._look_at:
            self._look_at = now + self._exchange.check_s
            self._num_checks += 1
            self._look()

    def _next(self, rank: int, *, turn: int | None = None) -> str:
        """Return the name of the next message of a rank; rank 0's begins another turn."""
        if turn is None:
            turn, self._turn = self._turn, self._turn + 1
        return f"{rank}-{turn:04d}.json"

    def _deal_to(self, rank: int, parts: list[bytes], turn: int) -> int:
        """Write parts of a listing for a rank, and return the number of files."""
        number = 0
        parts.reverse()
        while parts:
            together = [parts.pop()]
            while parts and sum(map(len, together)) + len(parts[-1]) < MESSAGE_BYTES:
                together.append(parts.pop())
            self._exchange.say(f"0-{turn:04d}-{rank}-{number:04d}", b"\n".join(together))
            number += 1
        return number

    def _of_first(self, name: str) -> bytes:
        while (data := self._exchange.read(name)) is None:
            self._look()
            self._look_for_beat(0, self._exchange.beat_at(0))
            time.sleep(self._exchange.poll_s)
        return data

    def _of_others(self, names: list[str], meanwhile: Callable[[], None]) -> list[bytes]:
        while True:
            there = self._look()
            missing = [rank for rank, name in enumerate(names, 1) if name not in there]
            if not missing:
                return [self._exchange.read(name) or b"" for name in names]
            self._num_checks += 1
            meanwhile()
            for rank in missing:
                beat = there.get(f"{rank}-beat")
                self._look_for_beat(rank, 0.0 if beat is None else beat)
            time.sleep(self._exchange.poll_s)

    def _look_for_beat(self, rank: int, beat_at: float) -> None:
        """Warn about a rank whose heartbeats have stopped, finally give it up."""
        if beat_at != self._beats[rank][0]:
            self._beats[rank] = beat_at, monotonic()
            self._silent.discard(rank)
        silent_s = monotonic() - self._beats[rank][1]
        if silent_s >= GIVEN_UP_S:
            self._given_up.add(rank)
            self._ended[rank] = None
            raise _OtherRankEnded
        if silent_s >= SILENT_S and rank not in self._silent:
            self._silent.add(rank)
            print(
                f"warning: rank {rank} ({self._exchange.processes[rank]}) has been silent for {silent_s:.0f} s; still waiting "
                "for it; if it hangs, stop this run with Ctrl-C: what is committed is kept",
                file=sys.stderr,
                flush=True,
            )

    def _look(self) -> dict[str, float]:
        """Look for what concerns this rank; return when each message was written, by name, on rank 0 only."""
        there = self._heard()
        if self._ended:
            raise _OtherRankEnded
        return there

    def _heard(self) -> dict[str, float]:
        """Note which ranks have ended, and why; return what is there on rank 0."""
        gone = [rank for rank in self._exchange.processes if rank not in self._ended and self._exchange.has_ended(rank)]
        if not self.is_first:
            if 0 not in self._ended and ((word := self._exchange.read("0-end.json")) is not None or gone):
                self._ended[0] = None if word is None else decode(LastWord, json.loads(word))
            return {}
        there = {name: file.modified_s for name, file in self._exchange.listed().items()}
        for rank in self._exchange.processes:
            if rank not in self._ended and f"{rank}-end.json" in there:
                self._ended[rank] = decode(LastWord, json.loads(self._exchange.read(f"{rank}-end.json") or b""))
        self._ended |= {rank: None for rank in gone if rank not in self._ended}
        return there

    def stop(self, error: BaseException) -> None:
        """Stop the other ranks because of an error on rank 0, and wait for their last words; once for all."""
        if self.world_size > 1 and not self._has_stopped:
            self._has_stopped = True
            self._interrupts.end()
            self._say_last(None, self._exit_code(error), _num_encoded(error))
            self._wait_for_ends(LAST_WORDS_S)

    def _end_all(self, error: BaseException) -> None:
        """Stop the other ranks, and raise the cause unless it is rank 0's own failure."""
        self.stop(error)
        if not isinstance(error, KeyboardInterrupt):
            return
        num_encoded = _num_encoded(error) + sum(word.num_encoded for word in self._ended.values() if word is not None)
        for rank, word in self._ended.items():
            if word is not None and word.cause is not None:
                message = f"rank {rank}: {word.cause} (the other ranks have stopped, {kept(num_encoded)})"
                raise (UsageError if word.exit_code == 2 else RankError)(message) from error
        for rank, word in self._ended.items():
            if word is None:
                raise RankError(self._gone(rank, num_encoded)) from error
        raise Stopped(self._exit_code(error), num_encoded) from error

    def _end_after_first(self, error: BaseException) -> None:
        """Report to rank 0 why this rank ends, wait for it to end first, and raise what it cannot report."""
        is_stopped, is_told = isinstance(error, KeyboardInterrupt), False
        if self._ended.get(0, error) is not None:  # also an answer to rank 0's word
            self._say_last(None if is_stopped else _cause(error), self._exit_code(error), _num_encoded(error))
            until = monotonic() + FIRST_ENDS_S
            while monotonic() < until and not self._exchange.has_ended(0) and self._exchange.is_open:
                self._heard()
                time.sleep(self._exchange.poll_s)
            self._heard()
            is_told = self._ended.get(0) is not None or not self._exchange.is_open  # closed: it has this rank's word
        if is_told and isinstance(error, KeyboardInterrupt | BucketlineError):
            raise SystemExit(self._exit_code(error)) from error  # rank 0 reports this cause, or its own
        if is_stopped:
            raise RankError(self._gone(0, _num_encoded(error))) from error

    def _part(self) -> None:
        """End after all values are known; rank 0 waits for the others to have read that."""
        if self.is_first:
            self._wait_for_ends(LAST_WORDS_S)
        else:
            self._say_last(None, 0, 0)

    def _say_last(self, cause: str | None, exit_code: int, num_encoded: int) -> None:
        self._exchange.leave()
        word = LastWord(cause=cause, exit_code=exit_code, num_encoded=num_encoded)
        self._exchange.say(f"{self.rank}-end.json", _as_bytes(encode(word)))

    def _wait_for_ends(self, within_s: float) -> None:
        until = monotonic() + within_s
        self._heard()
        while len(self._ended) < self.world_size - 1 and monotonic() < until:
            time.sleep(self._exchange.poll_s)
            self._heard()

    def _exit_code(self, error: BaseException) -> int:
        """Return this rank's exit code: after another rank's end that rank's code, if known."""
        if not isinstance(error, KeyboardInterrupt):
            return 2 if isinstance(error, UsageError) else 1
        if not _is_other_ranks(error):
            return exit_code_of(error)
        word = next(iter(self._ended.values()), None)
        return 1 if word is None else word.exit_code

    def _gone(self, rank: int, num_encoded: int) -> str:
        is_gone = rank in self._ended and rank not in self._given_up
        how = "ended without a message: killed, or out of memory" if is_gone else "does not answer"
        who = "the other ranks have" if self.is_first else f"rank {self.rank} has"
        return f"rank {rank} ({self._exchange.processes[rank]}) {how}; {who} stopped, {kept(num_encoded)}; {GO_ON}"


def _as_bytes(value: Json) -> bytes:
    return json.dumps(value).encode("ascii")


def _is_other_ranks(error: BaseException) -> bool:
    """Return True if this rank ends because another one ended."""
    return isinstance(error, _OtherRankEnded) or isinstance(error.__cause__, _OtherRankEnded)


def _num_encoded(error: BaseException) -> int:
    return error.num_encoded if isinstance(error, Stopped) else 0


def _cause(error: BaseException) -> str:
    return str(error) if isinstance(error, BucketlineError) else f"{type(error).__name__}: {error}"


def kept(num_encoded: int) -> str:
    """Return what of a run is kept, for messages."""
    return f"with {counted(num_encoded, 'image')} encoded and committed" if num_encoded else "before anything was encoded"
