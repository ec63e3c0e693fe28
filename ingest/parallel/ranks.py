"""The ranks of a run: the files by which they know of each other, and how they end together.

Rank 0 makes `pending/runs/LAUNCH/RUN/`: LAUNCH is what the launcher tells all ranks, RUN is drawn, and named in `open.json`
next to it. A file there has one writer and, except for heartbeats, is written once; of source S:

    R.lock           held as long as the process of rank R lives, if it sees the disk of rank 0
    R-hello.json     rank R has come; welcome.json: rank 0 has met all
    listed-S.json    rank 0 has listed the source; items-S-R-N: what rank R is to pack
    plan-S.json      the store is there
    done-S-R.json    rank R has packed and committed its share: its summary
    R-end.json       rank R has ended, and why
    R-beat           heartbeats, of ranks that share no disk with rank 0

Ranks commit for themselves. A rank that fails says why in its last file; one that is killed loses its lock. Then the others
stop between images and commit, and rank 0 reports the cause. No rank waits for a process that is gone; one whose heartbeats
stop is named in a warning, and given up after half an hour.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import socket
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING, TypeVar, cast

from bucketline import __version__
from bucketline.command_line import counted, launch_name
from bucketline.errors import BucketlineError, RankError, StoreError, UsageError
from bucketline.files.atomic_write import FileLock, is_held
from bucketline.forks import JoinableThread
from bucketline.ingest.parallel.signals import Stopped, exit_code_of
from bucketline.ingest.summary import RunSummary
from bucketline.store.folder import MissingObjectError
from bucketline.store.write.publish import RUNS_FOLDER, refuse_linked_folders
from bucketline.typed_json import decode, encode

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from types import TracebackType

    from bucketline.ingest.parallel.signals import Interrupts
    from bucketline.store.folder import Folder
    from bucketline.typed_json import Json

T = TypeVar("T")

# --------------------------------------------------------------------------------------------------------------- files of a run

COME_WITHIN_S = 300.0  # ranks start together; importing torch is the most that one may lag behind
BEAT_EVERY_S = 5.0
LEFT_S = 86400.0  # files in a bucket that are older are a killed run's
POLL_S = (0.05, 1.0)  # while waiting for a file: on a disk, at a URL
CHECK_S = (1.0, 5.0)  # while packing
_TOGETHER = "start all ranks together, with torchrun or with MASTER_ADDR and MASTER_PORT of rank 0's machine"
_WELCOME = "welcome.json"


class RunFiles:
    """The files of one run, as one of its ranks sees them."""

    def __init__(self, folder: Folder, disk: Path, rank: int, world_size: int) -> None:
        """Write nothing yet. `folder` is where the files are, `disk` the store's folder on this machine, for locks."""
        self._folder, self._disk = folder, disk
        self._rank, self._world_size = rank, world_size
        is_far = folder.deadline_s > 0
        self.poll_s, self.check_s = POLL_S[is_far], CHECK_S[is_far]
        self.processes: dict[int, str] = {}  # of the others on rank 0, of rank 0 on the others: their names in messages
        self._launch = ""
        self._run = ""
        self._made: list[Path] = []  # folders to remove once they are empty, the innermost first
        self._lock: FileLock | None = None
        self._locks: dict[int, int] = {}  # descriptors of the others' lock files
        self._is_over = threading.Event()
        self._beats: JoinableThread | None = None

    @property
    def shares_disk(self) -> bool:
        """True if this rank sees the disk of rank 0, or as rank 0 that of all."""
        return self._locks.keys() == self.processes.keys()

    def meet(self) -> None:
        """Wait until all ranks are there."""
        if (launch := launch_name()) is None:
            raise RankError(f"rank {self._rank} of {self._world_size} cannot reach the others: {_TOGETHER}")
        self._launch = f"pending/{RUNS_FOLDER}/{launch}-{self._world_size}"
        if self._rank == 0:
            self._open()
            self._welcome()
        else:
            self._join()

    def begin_beats(self, num_checks: Callable[[], int]) -> None:
        """Write a heartbeat every few seconds, unless `num_checks` is the same positive number as the time before."""
        self._beats = JoinableThread(self._beat, args=(num_checks,), name="bucketline-beat")
        self._beats.start()

    def _beat(self, num_checks: Callable[[], int]) -> None:
        before = -1
        while not self._is_over.wait(BEAT_EVERY_S):
            if (now := num_checks()) != before or not now:
                with suppress(StoreError):
                    self.write(f"{self._rank}-beat", b"%d" % now)
            before = now

    def write(self, name: str, data: bytes) -> None:
        self._folder.write(self._path(name), data)

    def read(self, name: str) -> bytes | None:
        """Return the content of a file; None if it is not there yet."""
        try:
            return self._folder.read(self._path(name))
        except MissingObjectError:
            return None

    def times(self) -> dict[str, float]:
        """Return when each file was written, by name."""
        return {file.name.rpartition("/")[2]: file.modified_s for file in self._folder.names(self._path(""))}

    def beat_at(self, rank: int) -> float:
        """Return when a rank's last heartbeat was written, by the clock of the folder; 0 if there is none."""
        beat = self._folder.look_up(self._path(f"{rank}-beat"))
        return 0.0 if beat is None else beat.modified_s

    def has_ended(self, rank: int) -> bool:
        """Return True if a rank's process is known to have ended."""
        return rank in self._locks and not is_held(self._locks[rank])

    @property
    def are_there(self) -> bool:
        """False once rank 0 has removed the files."""
        return self._folder.look_up(self._path(_WELCOME)) is not None

    def leave(self) -> None:
        """End heartbeats; nothing writes here any more except the caller."""
        self._is_over.set()
        if self._beats is not None:
            self._beats.join()

    def remove(self, *, is_all: bool) -> None:
        """End the run on rank 0: remove its files. Without `is_all`, those stay that a late rank is to find."""
        if not self._run:  # it has none yet
            return
        with suppress(StoreError):  # a bucket that nothing may be removed from
            self._folder.remove([self._path(_WELCOME), *(self._path(name) for name in (self.times() if is_all else ()))])
            if self._named() == self._run:
                self._folder.remove([f"{self._launch}/open.json"])
        if is_all:
            shutil.rmtree(self._disk / self._path(""), ignore_errors=True)
            with suppress(OSError):
                for folder in self._made:
                    folder.rmdir()  # unless something has been made in it

    def _named(self) -> str:
        """Return the run that `open.json` names."""
        return str(json.loads(self._folder.read(f"{self._launch}/open.json")))

    def _path(self, name: str) -> str:
        return f"{self._launch}/{self._run}/{name}".rstrip("/")

    def _lock_of(self, rank: int) -> Path:
        return self._disk / self._path(f"{rank}.lock")

    def _open(self) -> None:
        """Make the run's folder on the disk, whose lock says that rank 0 lives, and then name it."""
        refuse_linked_folders(self._disk)
        self._remove_left()
        self._run = secrets.token_hex(8)
        own = self._lock_of(0)
        self._made = [*own.parents[1:3], *(path for path in own.parents[3:] if not path.exists())]
        while not own.exists():  # another launch may just have taken it for one that was left
            try:
                own.parent.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise StoreError(f"cannot make {self._disk} a store: {error.strerror}") from error
            self._lock = FileLock(own, self._disk, wait_s=COME_WITHIN_S)
        self._folder.write(f"{self._launch}/open.json", json.dumps(self._run).encode())

    def _welcome(self) -> None:
        until = monotonic() + COME_WITHIN_S
        tickets: dict[int, str] = {}
        while missing := [rank for rank in range(1, self._world_size) if rank not in tickets]:
            for rank in missing:
                if (data := self.read(f"{rank}-hello.json")) is None:
                    continue
                hello = json.loads(data)
                if hello["version"] != __version__:
                    raise RankError(
                        f"rank {rank} ({hello['process']}) has version {hello['version']} of bucketline, rank 0 has "
                        f"{__version__}; install the same on all machines"
                    )
                tickets[rank], self.processes[rank] = hello["ticket"], hello["process"]
                with suppress(FileNotFoundError):  # on another disk
                    self._locks[rank] = os.open(self._lock_of(rank), os.O_RDONLY | os.O_CLOEXEC)
            self._wait(until, f"rank {missing[0]} did not come")
        self.write(_WELCOME, json.dumps({"process": _this_process(), "tickets": tickets}).encode())

    def _join(self) -> None:
        """Follow `open.json` until rank 0 welcomes this process: what a killed run has left does not."""
        until, ticket = monotonic() + COME_WITHIN_S, secrets.token_hex(8)
        while True:
            with suppress(MissingObjectError):
                if (run := self._named()) != self._run:
                    self._greet(run, ticket)
                welcome = json.loads(self.read(_WELCOME) or b"{}")
                if welcome and welcome["tickets"].get(str(self._rank)) == ticket:
                    self.processes = {0: welcome["process"]}
                    return
            self._wait(until, f"rank 0 did not come to {self._folder.place(self._launch)}")

    def _greet(self, run: str, ticket: str) -> None:
        self._run = run
        for fd in self._locks.values():
            os.close(fd)
        self._locks = {}
        with suppress(FileNotFoundError):
            self._locks[0] = os.open(self._lock_of(0), os.O_RDONLY | os.O_CLOEXEC)
            self._lock = FileLock(self._lock_of(self._rank), self._disk)
        hello = {"ticket": ticket, "process": _this_process(), "version": __version__}
        self.write(f"{self._rank}-hello.json", json.dumps(hello).encode())

    def _wait(self, until: float, problem: str) -> None:
        if monotonic() >= until:
            raise RankError(
                f"rank {self._rank} of {self._world_size} cannot reach the others: {problem} within {COME_WITHIN_S:.0f} s; "
                f"{_TOGETHER}, and put the store on a disk that all machines share, or at a URL"
            )
        time.sleep(self.poll_s)

    def _remove_left(self) -> None:
        """Remove the files of runs whose rank 0 has ended."""
        for path in (self._disk / "pending" / RUNS_FOLDER).glob("*/*/0.lock"):
            with suppress(StoreError), FileLock(path):  # unless another process has it
                shutil.rmtree(path.parent, ignore_errors=True)
        if self._folder.deadline_s:
            with suppress(StoreError):
                left = list(self._folder.names(f"pending/{RUNS_FOLDER}"))
                new = {file.name.rpartition("/")[0] for file in left if file.modified_s >= time.time() - LEFT_S}
                self._folder.remove([file.name for file in left if file.name.rpartition("/")[0] not in new])


def _this_process() -> str:
    return f"pid {os.getpid()} on {socket.gethostname()}"


# ------------------------------------------------------------------------------------------------------------------------ ranks

LAST_WORDS_S = 20.0  # how long rank 0 waits for the others to stop; torchrun kills 30 s after its SIGTERM
SILENT_S = 120.0  # then warn; a batch on slow cores, or sealing a large shard, may take this long
GIVEN_UP_S = 1800.0
GO_ON = "rerun the command, with any number of ranks, to continue"
FILE_BYTES = 64 << 20  # of a listing, in one file


class _OtherRankEnded(KeyboardInterrupt):
    """Another rank has failed, or was stopped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LastWord:
    """How a rank has ended; `cause` is None if it was stopped, or has finished: then its exit code is 0."""

    cause: str | None
    exit_code: int
    num_encoded: int


class PackRanks:
    """The processes of this run. A single process writes no files."""

    def __init__(self, *, rank: int, world_size: int, interrupts: Interrupts, files: RunFiles | None = None) -> None:
        """`files` are those of several processes; one process needs none."""
        self.rank, self.world_size = rank, world_size
        self._interrupts = interrupts
        self._files = cast("RunFiles", files)
        self._source = 0  # number of the source that is packed
        self._beats: dict[int, tuple[float, float]] = {}  # when a rank's last heartbeat was written, and when it was first seen
        self._silent: set[int] = set()  # ranks named in a warning
        self._given_up: set[int] = set()
        self._ended: dict[int, LastWord | None] = {}  # in order of arrival; None if it ended without a word
        self._num_packed = 0  # by this rank, of the sources that are done
        self._num_checks = 0  # 0 while there is no reason to check: before a source's first image
        self._look_at = 0.0

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def title(self) -> str | None:
        """The title of this rank's progress; None for ranks that show none."""
        return ("pack" if self.world_size == 1 else f"pack (rank 0 of {self.world_size})") if self.is_first else None

    @property
    def shares_disk(self) -> bool:
        """True if this process sees the disk of rank 0, or as rank 0 that of all; always true of one process."""
        return self.world_size == 1 or self._files.shares_disk

    def __enter__(self) -> PackRanks:
        if self.world_size == 1:
            return self
        try:
            if self.is_first:
                self._files.meet()
            else:
                with self._interrupts.at_once():  # one process says that nothing was encoded, for all
                    self._files.meet()
        except BaseException:
            if self.is_first:
                self._files.remove(is_all=True)
            raise
        self._beats = dict.fromkeys(self._files.processes, (0.0, monotonic()))
        self._files.begin_beats(lambda: self._num_checks)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """End together with the other ranks: rank 0 reports the cause once for all, the others end silently."""
        if self.world_size == 1:
            return
        try:
            if error is not None:
                self._interrupts.end()
            if not self.is_first:
                self._end(error)
            elif error is None:
                self._wait_for_ends()
            else:
                self._end_all(error)
        finally:
            self._files.leave()
            if self.is_first:
                self._files.remove(is_all=self._have_all_ended)

    def tell(self, name: str, value: T | None, kind: type[T]) -> T:
        """Return rank 0's `value`, of a `kind`, on all ranks."""
        if self.world_size == 1 or value is not None:
            assert value is not None
            if self.world_size > 1:
                self._look()
                self._files.write(f"{name}-{self._source}.json", _as_bytes(encode(value)))
            return value
        return decode(kind, json.loads(self._of_first(f"{name}-{self._source}.json")))

    def deal(self, parts: list[list[bytes]] | None) -> list[bytes]:
        """Return this rank's parts of those that rank 0 has: lines without their ends. Rank 0 empties the others."""
        numbers = self.tell(
            "listed", None if parts is None else [0, *map(self._deal_to, range(1, len(parts)), parts[1:])], list[int]
        )
        if parts is not None:
            return parts[0]
        names = [self._items(self.rank, number) for number in range(numbers[self.rank])]
        return [part for name in names for part in self._of_first(name).split(b"\n")]

    def _deal_to(self, rank: int, parts: list[bytes]) -> int:
        """Write parts of a listing for a rank, and return the number of files."""
        number = 0
        parts.reverse()
        while parts:
            together = [parts.pop()]
            while parts and sum(map(len, together)) + len(parts[-1]) < FILE_BYTES:
                together.append(parts.pop())
            self._files.write(self._items(rank, number), b"\n".join(together))
            number += 1
        return number

    def _items(self, rank: int, number: int) -> str:
        return f"items-{self._source}-{rank}-{number:04d}"

    def done(self, summary: RunSummary, meanwhile: Callable[[], None]) -> list[RunSummary]:
        """Tell that this rank has packed its share of a source; return the summaries of all on rank 0, none on the others.

        Rank 0 calls `meanwhile` as long as it waits.
        """
        self._num_packed += summary.packed
        summaries = [summary]
        if self.world_size > 1 and self.is_first:
            names = [f"done-{self._source}-{rank}.json" for rank in range(1, self.world_size)]
            summaries += [decode(RunSummary, json.loads(data)) for data in self._of_others(names, meanwhile)]
        elif self.world_size > 1:
            self._files.write(f"done-{self._source}-{self.rank}.json", _as_bytes(encode(summary)))
        self._source += 1
        self._num_checks = 0
        return summaries if self.is_first else []

    def check(self) -> None:
        """Raise if another rank has failed or was stopped; does nothing if called again too soon."""
        if self.world_size > 1 and (now := monotonic()) >= self._look_at:
            self._look_at = now + self._files.check_s
            self._num_checks += 1
            self._look()

    def _of_first(self, name: str) -> bytes:
        while (data := self._files.read(name)) is None:
            self._look()
            self._look_for_beat(0, self._files.beat_at(0))
            time.sleep(self._files.poll_s)
        return data

    def _of_others(self, names: list[str], meanwhile: Callable[[], None]) -> list[bytes]:
        while True:
            times = self._look()
            missing = [rank for rank, name in enumerate(names, 1) if name not in times]
            if not missing:
                return [self._files.read(name) or b"" for name in names]
            self._num_checks += 1
            meanwhile()
            for rank in missing:
                self._look_for_beat(rank, times.get(f"{rank}-beat", 0.0))
            time.sleep(self._files.poll_s)

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
                f"warning: rank {rank} ({self._files.processes[rank]}) has been silent for {silent_s:.0f} s; still waiting "
                "for it; if it hangs, stop this run with Ctrl-C: what is committed is kept",
                file=sys.stderr,
                flush=True,
            )

    def _look(self) -> dict[str, float]:
        """Raise if a rank whose end this rank notices has failed or was stopped; return what `_noted` does."""
        times = self._noted()
        if any(word is None or word.exit_code for word in self._ended.values()):
            raise _OtherRankEnded
        return times

    def _noted(self) -> dict[str, float]:
        """Note which ranks have ended, and how; return when each file was written, by name, on rank 0 only."""
        gone = [rank for rank in self._files.processes if rank not in self._ended and self._files.has_ended(rank)]
        times = self._files.times() if self.is_first else {}
        for rank in self._files.processes:
            name = f"{rank}-end.json"
            if rank not in self._ended and (name in times or not self.is_first) and (data := self._files.read(name)):
                self._ended[rank] = decode(LastWord, json.loads(data))
        is_done = f"done-{self._source}-{{}}.json".format
        self._ended |= {rank: None for rank in gone if rank not in self._ended and is_done(rank) not in times}
        return times

    def _end_all(self, error: BaseException) -> None:
        """Stop the other ranks, and raise the cause unless it is rank 0's own failure."""
        self._say_last(None, self._exit_code(error), _num_encoded(error))
        self._wait_for_ends()
        if not isinstance(error, KeyboardInterrupt):
            return
        words = [word for word in self._ended.values() if word is not None]
        num_encoded = _num_encoded(error) + sum(word.num_encoded for word in words)
        for rank, word in self._ended.items():
            if word is not None and word.cause is not None:
                message = f"rank {rank}: {word.cause} (the other ranks have stopped, {kept(num_encoded)})"
                raise (UsageError if word.exit_code == 2 else RankError)(message) from error
        for rank, word in self._ended.items():
            if word is None:
                raise RankError(self._gone(rank, num_encoded)) from error
        raise Stopped(self._exit_code(error), num_encoded) from error

    def _end(self, error: BaseException | None) -> None:
        """Tell rank 0 how this rank ends, and raise what it cannot report."""
        if error is None:
            self._say_last(None, 0, self._num_packed)
            return
        is_stopped = isinstance(error, KeyboardInterrupt)
        self._noted()
        if self._ended.get(0, error) is not None or not self._files.are_there:  # rank 0 lives, or has told why it ended
            self._say_last(None if is_stopped else _cause(error), self._exit_code(error), _num_encoded(error))
            if isinstance(error, KeyboardInterrupt | BucketlineError):
                raise SystemExit(self._exit_code(error)) from error  # rank 0 reports this cause, or its own
        elif is_stopped:
            raise RankError(self._gone(0, _num_encoded(error))) from error

    def _say_last(self, cause: str | None, exit_code: int, num_encoded: int) -> None:
        self._files.leave()
        word = LastWord(cause=cause, exit_code=exit_code, num_encoded=num_encoded)
        self._files.write(f"{self.rank}-end.json", _as_bytes(encode(word)))

    def _wait_for_ends(self) -> None:
        until = monotonic() + LAST_WORDS_S
        self._noted()
        while not self._have_all_ended and monotonic() < until:
            time.sleep(self._files.poll_s)
            self._noted()

    @property
    def _have_all_ended(self) -> bool:
        return all(rank in self._ended or self._files.has_ended(rank) for rank in self._files.processes)

    def _exit_code(self, error: BaseException) -> int:
        """Return this rank's exit code: after another rank's end that rank's code, if known."""
        if not isinstance(error, KeyboardInterrupt):
            return 2 if isinstance(error, UsageError) else 1
        if not _is_other_ranks(error):
            return exit_code_of(error)
        failed = [word for word in self._ended.values() if word is None or word.exit_code]
        return failed[0].exit_code if failed and failed[0] is not None else 1

    def _gone(self, rank: int, num_encoded: int) -> str:
        is_gone = rank in self._ended and rank not in self._given_up
        how = "ended without a message: killed, or out of memory" if is_gone else "does not answer"
        who = "the other ranks have" if self.is_first else f"rank {self.rank} has"
        return f"rank {rank} ({self._files.processes[rank]}) {how}; {who} stopped, {kept(num_encoded)}; {GO_ON}"


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
