"""Several processes that pack one source: who takes which image, how they agree, and how they end together.

Rank 0 is connected to every other rank. A rank that fails tells it, one that is killed loses its connection; rank 0 then
tells the others, which stop between images and commit, and says what the cause was. No wait is for a process that is gone.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import pickle
from dataclasses import dataclass
from multiprocessing.connection import wait
from time import monotonic
from typing import TYPE_CHECKING, Any, TypeVar, cast

from bucketline.commands import counted
from bucketline.errors import BucketlineError, RankError, UsageError
from bucketline.ingest.interrupts import Stopped, exit_code_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from bucketline.ingest.interrupts import Interrupts
    from bucketline.ingest.links import Link

T = TypeVar("T")

LOOK_EVERY_S = 1.0  # at the other ranks, between images
LAST_WORDS_S = 20.0  # rank 0 waits so long for the others to stop; torchrun kills 30 s after its SIGTERM
FIRST_ENDS_S = 60.0  # the others wait so long for rank 0, which may have a batch to finish and then waits for them
GO_ON = "run the same command again, with any number of ranks, to go on"


def rank_of(sample_id: str, world_size: int) -> int:
    """Give the rank that packs a sample: by a hash of its id, so that it does not depend on the others."""
    digest = hashlib.blake2b(sample_id.encode("utf-8", "surrogateescape"), digest_size=8, person=b"bucketline.rank").digest()
    return int.from_bytes(digest, "little") % world_size


@dataclass(frozen=True, slots=True)
class _Value:
    """What a rank gives, or rank 0 made."""

    value: Any


@dataclass(frozen=True, slots=True)
class _Stop:
    """From rank 0: commit, say your last word and end with this exit code."""

    exit_code: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _LastWord:
    """To rank 0: why this rank ends; no cause where it was only asked to."""

    cause: str | None
    exit_code: int
    num_encoded: int


class _OtherRankEnded(KeyboardInterrupt):
    """Another rank has ended, or rank 0 says that all are to end."""


class Ranks:
    """The processes of this run; with one, nothing is sent anywhere, and nothing of it is loaded."""

    def __init__(self, *, rank: int, world_size: int, interrupts: Interrupts) -> None:
        self.rank, self.world_size = rank, world_size
        self._interrupts = interrupts
        self._links: dict[int, Link] | None = None
        self._values: dict[int, Any] = {}
        self._ended: dict[int, _LastWord | None] = {}  # in the order in which rank 0 heard; None: without a word
        self._told: _Stop | None = None
        self._look_at = 0.0

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def __enter__(self) -> Ranks:
        if self.world_size > 1:
            from bucketline.ingest.links import connect

            with self._interrupts.at_once():  # torch asks for its store again and again, and hears nothing meanwhile
                self._links = connect(self.rank, self.world_size)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """End with the others: rank 0 with the cause, one line for all; they without a word of their own.

        Raises:
            RankError: the other rank's failure, or that it is gone.
            Stopped: where all were stopped by a signal.
            SystemExit: on the others, once rank 0 knows why.
        """
        if self._links is None:
            return
        if error is None:
            self._part()
            return
        self._interrupts.end()
        if self.is_first:
            atexit.register(self._part)  # the others wait for that: until what is raised here has been printed
            self._end_all(error)
        else:
            self._end_after_first(error)

    def from_first(self, make: Callable[[], T]) -> T:
        """Let rank 0 make a value and give it to all; its error ends everybody.

        Raises:
            BucketlineError: what `make` raised, on rank 0.
            KeyboardInterrupt: where another rank has ended.
        """
        if not self.is_first:
            return cast("T", self._heard_from_first())
        self._look(0.0)
        value = make()
        if self._links is not None:
            message = pickle.dumps(_Value(value))
            for link in self._links.values():
                self._send_bytes(link, message)
        return value

    def gather(self, value: T) -> list[T] | None:
        """Collect every rank's value, in order of the ranks, on rank 0; None on the others. Then the ranks part.

        Raises:
            KeyboardInterrupt: where another rank has ended before that.
        """
        if self._links is None:
            return [value]
        if not self.is_first:
            self._send_bytes(self._links[0], pickle.dumps(_Value(value)))
            self._heard_from_first()
            self._part()
            return None
        while len(self._values) < self.world_size - 1:
            self._look(None)
        self.from_first(lambda: None)
        self._part()
        return [value, *(self._values[rank] for rank in range(1, self.world_size))]

    def check(self) -> None:
        """Look at most once a second whether every other rank is still at work.

        Raises:
            KeyboardInterrupt: where one has ended.
        """
        if self._links is not None and (now := monotonic()) >= self._look_at:
            self._look_at = now + LOOK_EVERY_S
            self._look(0.0)

    def _look(self, timeout_s: float | None) -> None:
        """Wait until there is word of another rank, and take it; without a timeout, for as long as that takes."""
        for link in self._ready(timeout_s):
            if not isinstance(self._receive(link), _Value):
                raise _OtherRankEnded

    def _heard_from_first(self) -> object:
        assert self._links is not None
        message = self._receive(self._links[0])
        if not isinstance(message, _Value):
            raise _OtherRankEnded
        return message.value

    def _ready(self, timeout_s: float | None) -> list[Link]:
        """Wait for word of the ranks that have not ended; none where all have, or the time is over."""
        links: list[Any] = [link for rank, link in (self._links or {}).items() if rank not in self._ended]
        return cast("list[Link]", wait(links, timeout_s)) if links else []

    def _receive(self, link: Link) -> _Value | _Stop | _LastWord | None:
        """Receive a message and note what it says; None where the process has ended without a word."""
        message: _Value | _Stop | _LastWord | None = None
        with contextlib.suppress(EOFError, OSError):
            message = link.connection.recv()
        if isinstance(message, _Value):
            if self.is_first:
                self._values[link.rank] = message.value
        elif isinstance(message, _Stop):
            self._told = message
        else:
            self._ended[link.rank] = message
        return message

    def _send_bytes(self, link: Link, message: bytes) -> None:
        try:
            link.connection.send_bytes(message)
        except OSError as error:
            self._receive(link)  # it may have said why before it ended
            raise _OtherRankEnded from error

    def _end_all(self, error: BaseException) -> None:
        """Make the others stop, hear their last words, and raise the cause where it is not rank 0's own failure."""
        assert self._links is not None
        exit_code = self._exit_code(error)
        for rank, link in self._links.items():
            if self._ended.get(rank, error) is not None:  # also those that have said why they end: rank 0 has heard
                with contextlib.suppress(OSError):
                    link.connection.send(_Stop(exit_code))
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
        """Tell rank 0 why this rank ends, and end after it; raise what it cannot say."""
        assert self._links is not None
        link, is_stopped = self._links[0], isinstance(error, KeyboardInterrupt)
        if 0 not in self._ended:
            cause = None if is_stopped else _cause(error)
            word = _LastWord(cause=cause, exit_code=self._exit_code(error), num_encoded=_num_encoded(error))
            with contextlib.suppress(OSError):
                link.connection.send(word)
            until = monotonic() + FIRST_ENDS_S
            while self._ready(max(until - monotonic(), 0.0)):
                self._receive(link)
        if self._told is not None and isinstance(error, KeyboardInterrupt | BucketlineError):
            raise SystemExit(self._exit_code(error)) from error  # rank 0 has heard, or has a cause of its own
        if is_stopped:
            raise RankError(self._gone(0, _num_encoded(error))) from error

    def _exit_code(self, error: BaseException) -> int:
        """Give what this rank ends with: after another one's end what that one ended with, if anybody knows."""
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
        how = "is gone without a word, killed or out of memory" if rank in self._ended else "does not answer"
        who = "the other ranks have" if self.is_first else f"rank {self.rank} has"
        return f"rank {rank} ({self._links[rank].process}) {how}; {who} stopped, {_kept(num_encoded)}; {GO_ON}"

    def _part(self) -> None:
        if self._links is not None:
            for link in self._links.values():
                link.connection.close()
            self._links = None


def _is_other_ranks(error: BaseException) -> bool:
    """Say whether what ends this rank is that another one ended."""
    return isinstance(error, _OtherRankEnded) or isinstance(error.__cause__, _OtherRankEnded)


def _num_encoded(error: BaseException) -> int:
    return error.num_encoded if isinstance(error, Stopped) else 0


def _cause(error: BaseException) -> str:
    return str(error) if isinstance(error, BucketlineError) else f"{type(error).__name__}: {error}"


def _kept(num_encoded: int) -> str:
    return f"with {counted(num_encoded, 'image')} encoded and committed" if num_encoded else "before anything was encoded"
