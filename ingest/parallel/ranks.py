"""Coordinate several processes that pack one source: share values, deal out items, and end together.

Rank 0 is connected to every other rank. A rank that fails tells rank 0; one that is killed loses its connection. Rank 0
then tells the others, which stop between images and commit, and reports the cause. No rank waits for a process that is
gone; one that sends no heartbeat is named in a warning, and given up after half an hour. All messages are JSON.
"""

from __future__ import annotations

import atexit
import contextlib
import sys
from multiprocessing.connection import wait
from time import monotonic
from typing import TYPE_CHECKING, Any, TypeVar, cast

from bucketline.command_line import counted
from bucketline.errors import BucketlineError, RankError, UsageError
from bucketline.ingest.parallel.messages import (
    Alive,
    LastWord,
    ListingPart,
    Message,
    Note,
    Stop,
    Value,
    from_bytes,
    message_bytes,
)
from bucketline.ingest.parallel.signals import Stopped, exit_code_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from bucketline.ingest.parallel.connections import Link
    from bucketline.ingest.parallel.signals import Interrupts
    from bucketline.typed_json import Json

T = TypeVar("T")

RANK_LOOK_EVERY_S = 1.0  # check for messages between images
LAST_WORDS_S = 20.0  # how long rank 0 waits for the others to stop; torchrun kills 30 s after its SIGTERM
RANK_ALIVE_EVERY_S = 5.0  # heartbeat, between images and while waiting
SILENT_S = 120.0  # then warn; a batch on slow cores, or sealing a large shard, may take this long
GIVEN_UP_S = 1800.0
FIRST_ENDS_S = 60.0  # how long the others wait for rank 0, which may finish a batch and then wait for them
GO_ON = "rerun the command, with any number of ranks, to continue"


class _OtherRankEnded(KeyboardInterrupt):
    """Another rank has ended, or rank 0 told all ranks to end."""


class PackRanks:
    """The processes of this run. A single process sends nothing and does not load the networking code."""

    def __init__(self, *, rank: int, world_size: int, interrupts: Interrupts, local_world_size: int | None = None) -> None:
        """`local_world_size`: number of ranks on this machine; None if unknown."""
        self.rank, self.world_size = rank, world_size
        self._is_one_machine = local_world_size == world_size
        self._interrupts = interrupts
        self._links: dict[int, Link] | None = None
        self._values: dict[int, Json] = {}
        self._notes: list[tuple[int, Json]] = []
        self._heard_at: dict[int, float] = {}
        self._silent: set[int] = set()  # ranks named in a warning
        self._given_up: set[int] = set()
        self._alive_at = 0.0
        self._ended: dict[int, LastWord | None] = {}  # in order of arrival; None if it ended without a word
        self._told: Stop | None = None
        self._look_at = 0.0

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def __enter__(self) -> PackRanks:
        if self.world_size > 1:
            from bucketline.ingest.parallel.connections import connect_ranks

            with self._interrupts.at_once():  # torch retries the rendezvous and ignores signals meanwhile
                self._links = connect_ranks(self.rank, self.world_size, is_one_machine=self._is_one_machine)
            self._heard_at = dict.fromkeys(self._links, monotonic())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """End together with the other ranks: rank 0 reports the cause once for all, the others end silently.

        Raises:
            RankError: if another rank failed or is gone.
            Stopped: if all were stopped by a signal.
            SystemExit: on the others, once rank 0 knows the cause.
        """
        if self._links is None:
            return
        if error is None:
            self._part()
            return
        self._interrupts.end()
        if self.is_first:
            atexit.register(self._part)  # the others wait for this, until the error raised here has been printed
            self._end_all(error)
        else:
            self._end_after_first(error)

    def from_first(self, make: Callable[[], T], as_json: Callable[[T], Json], from_json: Callable[[Json], T]) -> T:
        """Return the value that `make` returns on rank 0, sent to all ranks as JSON; an error of `make` ends all ranks.

        Raises:
            BucketlineError: on rank 0, what `make` raised.
            KeyboardInterrupt: if another rank has ended.
        """
        if not self.is_first:
            return from_json(self._value_of_first())
        self._look(0.0)
        value = make()
        if self._links is not None:
            message = message_bytes(Value(as_json(value)))
            for link in self._links.values():
                self._send(link, message)
        return value

    def deal(self, make: Callable[[], list[list[bytes]]]) -> list[bytes]:
        """Return this rank's parts of what `make` returns on rank 0. Rank 0 removes parts from the lists as it sends them.

        Raises:
            BucketlineError, KeyboardInterrupt: as `from_first`.
        """
        if not self.is_first:
            num_parts, own = self._value_of_first(), list[bytes]()
            while type(num_parts) is int and len(own) < num_parts:
                message = self._heard_from_first()
                if not isinstance(message, ListingPart):
                    raise _OtherRankEnded
                own.append(message.data)
            return own
        self._look(0.0)
        parts = make()
        for rank, link in (self._links or {}).items():
            self._send(link, message_bytes(Value(len(parts[rank]))))
            parts[rank].reverse()
            while parts[rank]:
                self._send(link, message_bytes(ListingPart(parts[rank].pop())))
        return parts[0]

    def gather(
        self,
        value: T,
        as_json: Callable[[T], Json],
        from_json: Callable[[Json], T],
        *,
        is_last: bool = True,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> list[T] | None:
        """Return the values of all ranks, in rank order, on rank 0, and None on the others; disconnect if it `is_last`.

        Rank 0 calls `meanwhile` every few seconds as long as it waits.

        Raises:
            KeyboardInterrupt: if another rank ended before, or does not answer.
        """
        if self._links is None:
            return [value]
        if not self.is_first:
            self._send(self._links[0], message_bytes(Value(as_json(value))))
            self._wait_for({0})  # rank 0 answers
            del self._values[0]
            if is_last:
                self._part()
            return None
        self._wait_for(set(self._links), meanwhile)
        self.from_first(lambda: None, lambda _: None, lambda _: None)
        if is_last:
            self._part()
        return [value, *(from_json(self._values.pop(rank)) for rank in range(1, self.world_size))]

    def note(self, value: Json) -> None:
        """Send a value to rank 0, which does not wait for it.

        Raises:
            KeyboardInterrupt: if rank 0 has ended.
        """
        assert self._links is not None
        self._send(self._links[0], message_bytes(Note(value)))

    def notes(self) -> list[tuple[int, Json]]:
        """Return the ranks' notes that have arrived on rank 0 since the last call, with their ranks."""
        found, self._notes = self._notes, []
        return found

    def check(self) -> None:
        """Check for messages of other ranks and send heartbeats; does nothing if called again within a second.

        Raises:
            KeyboardInterrupt: if a rank has ended.
        """
        if self._links is not None and (now := monotonic()) >= self._look_at:
            self._look_at = now + RANK_LOOK_EVERY_S
            self._look(0.0)
            self._say_alive()

    def _say_alive(self) -> None:
        assert self._links is not None
        if (now := monotonic()) >= self._alive_at:
            self._alive_at = now + RANK_ALIVE_EVERY_S
            for link in self._links.values():
                self._send(link, message_bytes(Alive()))

    def _wait_for(self, ranks: set[int], meanwhile: Callable[[], None] = lambda: None) -> None:
        """Wait for the values of `ranks`, calling `meanwhile` now and then; warn about a silent rank, finally give it up."""
        while missing := ranks - self._values.keys():
            self._look(RANK_ALIVE_EVERY_S)
            meanwhile()
            if self.is_first:
                self._say_alive()
            for rank in missing - self._values.keys():
                silent_s = monotonic() - self._heard_at[rank]
                if silent_s >= GIVEN_UP_S:
                    self._given_up.add(rank)
                    self._ended[rank] = None
                    raise _OtherRankEnded
                if silent_s >= SILENT_S and rank not in self._silent:
                    self._silent.add(rank)
                    print(self._is_silent(rank, silent_s), file=sys.stderr, flush=True)

    def _is_silent(self, rank: int, silent_s: float) -> str:
        assert self._links is not None
        return (
            f"warning: rank {rank} ({self._links[rank].process}) has been silent for {silent_s:.0f} s; still waiting for it; "
            "if it hangs, stop this run with Ctrl-C: what is committed is kept"
        )

    def _look(self, timeout_s: float | None) -> None:
        """Wait at most `timeout_s` for messages and receive them; without a timeout, wait until one arrives."""
        for link in self._ready(timeout_s):
            if not isinstance(self._receive(link), Value | Note | Alive):
                raise _OtherRankEnded

    def _heard_from_first(self) -> Message | None:
        assert self._links is not None
        while isinstance(message := self._receive(self._links[0]), Alive):
            pass
        return message

    def _value_of_first(self) -> Json:
        message = self._heard_from_first()
        if not isinstance(message, Value):
            raise _OtherRankEnded
        del self._values[0]
        return message.value

    def _ready(self, timeout_s: float | None) -> list[Link]:
        """Return the connections with a message, of ranks that have not ended; none after the timeout or if all have ended."""
        links: list[Any] = [link for rank, link in (self._links or {}).items() if rank not in self._ended]
        return cast("list[Link]", wait(links, timeout_s)) if links else []

    def _receive(self, link: Link) -> Message | None:
        """Receive and record a message; None if the process ended without a word or sent something invalid."""
        message: Message | None = None
        with contextlib.suppress(EOFError, OSError, ValueError, LookupError, TypeError, RecursionError):
            message = from_bytes(link.receive())
        self._heard_at[link.rank] = monotonic()
        self._silent.discard(link.rank)
        if isinstance(message, Value):
            self._values[link.rank] = message.value
        elif isinstance(message, Note):
            self._notes.append((link.rank, message.value))
        elif isinstance(message, Stop):
            self._told = message
        elif isinstance(message, LastWord) or message is None:
            self._ended[link.rank] = message
        return message

    def _send(self, link: Link, message: bytes) -> None:
        try:
            link.send(message)
        except OSError as error:
            self._receive(link)  # it may have sent its reason before it ended
            raise _OtherRankEnded from error

    def _end_all(self, error: BaseException) -> None:
        """Stop the other ranks, receive their last words, and raise the cause unless it is rank 0's own failure."""
        assert self._links is not None
        exit_code = self._exit_code(error)
        for rank, link in self._links.items():
            if self._ended.get(rank, error) is not None:  # also to those that sent their last word, as an acknowledgement
                with contextlib.suppress(OSError):
                    link.send(message_bytes(Stop(exit_code)))
        until = monotonic() + LAST_WORDS_S
        while ready := self._ready(max(until - monotonic(), 0.0)):
            for link in ready:
                self._receive(link)
        if not isinstance(error, KeyboardInterrupt):
            return
        num_encoded = _num_encoded(error) + sum(word.num_encoded for word in self._ended.values() if word is not None)
        for rank, word in self._ended.items():
            if word is not None and word.cause is not None:
                message = f"rank {rank}: {word.cause} (the other ranks have stopped, {_kept(num_encoded)})"
                raise (UsageError if word.exit_code == 2 else RankError)(message) from error
        for rank, word in self._ended.items():
            if word is None:
                raise RankError(self._gone(rank, num_encoded)) from error
        raise Stopped(exit_code, num_encoded) from error

    def _end_after_first(self, error: BaseException) -> None:
        """Report to rank 0 why this rank ends, wait for it to end first, and raise what it cannot report."""
        assert self._links is not None
        link, is_stopped = self._links[0], isinstance(error, KeyboardInterrupt)
        if 0 not in self._ended:
            cause = None if is_stopped else _cause(error)
            word = LastWord(cause=cause, exit_code=self._exit_code(error), num_encoded=_num_encoded(error))
            with contextlib.suppress(OSError):
                link.send(message_bytes(word))
            until = monotonic() + FIRST_ENDS_S
            while self._ready(max(until - monotonic(), 0.0)):
                self._receive(link)
        if self._told is not None and isinstance(error, KeyboardInterrupt | BucketlineError):
            raise SystemExit(self._exit_code(error)) from error  # rank 0 reports this cause, or its own
        if is_stopped:
            raise RankError(self._gone(0, _num_encoded(error))) from error

    def _exit_code(self, error: BaseException) -> int:
        """Return this rank's exit code: after another rank's end that rank's code, if known."""
        if not isinstance(error, KeyboardInterrupt):
            return 2 if isinstance(error, UsageError) else 1
        if not _is_other_ranks(error):
            return exit_code_of(error)
        if self._told is not None:
            return self._told.exit_code
        word = next(iter(self._ended.values()), None)
        return 1 if word is None else word.exit_code

    def _gone(self, rank: int, num_encoded: int) -> str:
        assert self._links is not None
        is_gone = rank in self._ended and rank not in self._given_up
        how = "ended without a message: killed, or out of memory" if is_gone else "does not answer"
        who = "the other ranks have" if self.is_first else f"rank {self.rank} has"
        return f"rank {rank} ({self._links[rank].process}) {how}; {who} stopped, {_kept(num_encoded)}; {GO_ON}"

    def _part(self) -> None:
        if self._links is not None:
            for link in self._links.values():
                link.connection.close()
            self._links = None


def _is_other_ranks(error: BaseException) -> bool:
    """Return True if this rank ends because another one ended."""
    return isinstance(error, _OtherRankEnded) or isinstance(error.__cause__, _OtherRankEnded)


def _num_encoded(error: BaseException) -> int:
    return error.num_encoded if isinstance(error, Stopped) else 0


def _cause(error: BaseException) -> str:
    return str(error) if isinstance(error, BucketlineError) else f"{type(error).__name__}: {error}"


def _kept(num_encoded: int) -> str:
    return f"with {counted(num_encoded, 'image')} encoded and committed" if num_encoded else "before anything was encoded"
