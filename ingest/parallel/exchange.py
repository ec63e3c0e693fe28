"""The files by which the ranks of a run find each other and exchange messages, and the parts of a source that each packs.

Rank 0 makes `pending/ranks/LAUNCH/RUN/`: LAUNCH is what the launcher tells all ranks, RUN is drawn, and named in `open.json`
next to it. A file has one writer, and except for heartbeats it is written once. All are in one folder: each heartbeat that a
rank writes there also renews what an NFS client of its machine knows of the folder.

A process that ends, for whatever reason, loses its lock. On a disk that ranks share, that is how they know; a rank that shares
none with rank 0 is known by its heartbeats only.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import socket
import threading
import time
from array import array
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from bucketline import __version__
from bucketline.command_line import launch_name
from bucketline.errors import RankError, StoreError
from bucketline.files.atomic_write import FileLock, is_held
from bucketline.forks import JoinableThread
from bucketline.ingest.sources.source import SourceItem
from bucketline.ingest.summary import as_line
from bucketline.store.folder import MissingObjectError
from bucketline.store.format.block import sample_digest
from bucketline.store.shard.reader import KEY
from bucketline.store.write.publish import RANKS_FOLDER, refuse_linked_folders

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from bucketline.ingest.sources.source import Listing
    from bucketline.store.folder import Folder, ListedFile


COME_WITHIN_S = 300.0  # ranks start together; importing torch is the most that one may lag behind
BEAT_EVERY_S = 5.0
LEFT_S = 86400.0  # messages in a bucket that are older are a killed run's
POLL_S = (0.05, 1.0)  # while waiting for a message: on a disk, at a URL
CHECK_S = (1.0, 5.0)  # while packing
_TOGETHER = "start all ranks together, with torchrun or with MASTER_ADDR and MASTER_PORT of rank 0's machine"
_WELCOME = "0-welcome.json"


class Exchange:
    """The messages of one run, as one of its ranks sees them."""

    def __init__(self, folder: Folder, disk: Path, rank: int, world_size: int) -> None:
        """Write nothing yet. `folder` is where messages are, `disk` the store's folder on this machine, for locks."""
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
        self._launch = f"pending/{RANKS_FOLDER}/{launch}-{self._world_size}"
        if self._rank == 0:
            self._open()
            self._welcome()
        else:
            self._join()

    def begin_beats(self, num_checks: Callable[[], int]) -> None:
        """Write a heartbeat every few seconds, unless `num_checks` is the same positive number as the time before."""

        def beat() -> None:
            before = -1
            while not self._is_over.wait(BEAT_EVERY_S):
                if (now := num_checks()) != before or not now:
                    with suppress(StoreError):
                        self._folder.write(self._path(f"{self._rank}-beat"), b"%d" % now)
                before = now

        self._beats = JoinableThread(beat, name="bucketline-beat")
        self._beats.start()

    def say(self, name: str, data: bytes) -> None:
        """Write a message; no other has its name."""
        self._folder.write(self._path(name), data)

    def read(self, name: str) -> bytes | None:
        """Return a message; None if it is not there yet."""
        try:
            return self._folder.read(self._path(name))
        except MissingObjectError:
            return None

    def listed(self) -> dict[str, ListedFile]:
        """Return what has been written, by name."""
        return {file.name.rpartition("/")[2]: file for file in self._folder.names(self._path(""))}

    def beat_at(self, rank: int) -> float:
        """Return when a rank's last heartbeat was written, by the clock of the folder; 0 if there is none."""
        found = self._folder.look_up(self._path(f"{rank}-beat"))
        return 0.0 if found is None else found.modified_s

    def has_ended(self, rank: int) -> bool:
        """Return True if a rank's process is known to have ended."""
        return rank in self._locks and not is_held(self._locks[rank])

    @property
    def is_open(self) -> bool:
        """False once rank 0 has removed the messages."""
        return self._folder.look_up(self._path(_WELCOME)) is not None

    def leave(self) -> None:
        """End heartbeats; nothing writes here any more except the caller."""
        self._is_over.set()
        if self._beats is not None:
            self._beats.join()

    def remove(self, *, is_all: bool) -> None:
        """End the run on rank 0: remove the messages. Without `is_all`, those stay that a late rank is to find."""
        with suppress(StoreError):  # a bucket that nothing may be removed from
            self._folder.remove([self._path(_WELCOME), f"{self._launch}/open.json"])
            if is_all:
                self._folder.remove([self._path(name) for name in self.listed()])
        if is_all:
            shutil.rmtree(self._disk / self._launch, ignore_errors=True)
            with suppress(OSError):
                for folder in self._made:
                    folder.rmdir()  # unless something has been made in it

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
        self._made = [own.parents[2], *(path for path in own.parents[3:] if not path.exists())]
        try:
            own.parent.mkdir(parents=True)
        except OSError as error:
            raise StoreError(f"cannot make {self._disk} a store: {error.strerror}") from error
        self._lock = FileLock(own, self._disk)
        self._folder.write(f"{self._launch}/open.json", json.dumps(self._run).encode())

    def _welcome(self) -> None:
        until = time.monotonic() + COME_WITHIN_S
        tickets: dict[int, str] = {}
        while len(tickets) < self._world_size - 1:
            there = self.listed()
            for rank in range(1, self._world_size):
                if rank not in tickets and f"{rank}-hello.json" in there:
                    hello = json.loads(self.read(f"{rank}-hello.json") or b"")
                    if hello["version"] != __version__:
                        raise RankError(
                            f"rank {rank} ({hello['process']}) has version {hello['version']} of bucketline, rank 0 has "
                            f"{__version__}; install the same on all machines"
                        )
                    tickets[rank], self.processes[rank] = hello["ticket"], hello["process"]
                    with suppress(FileNotFoundError):  # on another disk
                        self._locks[rank] = os.open(self._lock_of(rank), os.O_RDONLY | os.O_CLOEXEC)
            self._wait(until, lambda: f"rank {min(set(range(1, self._world_size)) - tickets.keys())} did not come")
        self.say(_WELCOME, json.dumps({"process": _this_process(), "tickets": tickets}).encode())

    def _join(self) -> None:
        """Follow `open.json` until rank 0 welcomes this process: what a killed run has left does not."""
        until, ticket = time.monotonic() + COME_WITHIN_S, secrets.token_hex(8)
        while True:
            with suppress(MissingObjectError):
                run = json.loads(self._folder.read(f"{self._launch}/open.json"))
                if run != self._run:
                    self._greet(str(run), ticket)
                welcome = json.loads(self.read(_WELCOME) or b"{}")
                if welcome and welcome["tickets"].get(str(self._rank)) == ticket:
                    self.processes = {0: welcome["process"]}
                    return
            self._wait(until, lambda: f"rank 0 did not come to {self._folder.place(self._launch)}")

    def _greet(self, run: str, ticket: str) -> None:
        self._run = run
        for fd in self._locks.values():
            os.close(fd)
        self._locks = {}
        with suppress(FileNotFoundError):
            self._locks[0] = os.open(self._lock_of(0), os.O_RDONLY | os.O_CLOEXEC)
            self._lock = FileLock(self._lock_of(self._rank), self._disk)
        hello = {"ticket": ticket, "process": _this_process(), "version": __version__}
        self._folder.write(self._path(f"{self._rank}-hello.json"), json.dumps(hello).encode())

    def _wait(self, until: float, what: Callable[[], str]) -> None:
        if time.monotonic() >= until:
            raise RankError(
                f"rank {self._rank} of {self._world_size} cannot reach the others: {what()} within {COME_WITHIN_S:.0f} s; "
                f"{_TOGETHER}, and put the store on a disk that all machines share, or at a URL"
            )
        time.sleep(self.poll_s)

    def _remove_left(self) -> None:
        """Remove the messages of runs whose rank 0 has ended."""
        for folder in (self._disk / "pending" / RANKS_FOLDER).glob("*/*"):
            with suppress(OSError):
                fd = os.open(folder / "0.lock", os.O_RDONLY | os.O_CLOEXEC)
                if not is_held(fd):
                    shutil.rmtree(folder, ignore_errors=True)
                os.close(fd)
        if self._folder.deadline_s:
            old = time.time() - LEFT_S
            with suppress(StoreError):
                left = self._folder.names(f"pending/{RANKS_FOLDER}")
                self._folder.remove([file.name for file in left if file.modified_s < old])


def _this_process() -> str:
    return f"pid {os.getpid()} on {socket.gethostname()}"


# ---------------------------------------------------------------------------------------------------------------------- shares


def rank_of(digest: bytes, world_size: int) -> int:
    """Return the rank that packs a sample. It depends only on the digest of the sample's id, not on other samples."""
    return int.from_bytes(digest[:8], "little") % world_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """The samples that one rank packs."""

    rank: int
    world_size: int

    def of(self, keys: NDArray[np.bytes_]) -> NDArray[np.bool_]:
        """Return for each sample, given `as_keys` of the digests, whether this rank packs it; agrees with `rank_of`."""
        mine: NDArray[np.bool_] = keys.view("<u8")[::2] % self.world_size == self.rank
        return mine


# ------------------------------------------------------------------------------------------------------------------ item parts
# Split a listing: each rank keeps the items that it packs, as JSON; rank 0 keeps an outline of all items.
#
# An item takes 430 to 610 bytes as Python objects, about the size of its id and captions when packed, and about 24 bytes in
# the outline (`python -m bucketline.bench scale --listing`).

_PART_ITEMS = 1000  # items per part


@dataclass(frozen=True, slots=True, kw_only=True)
class Outline:
    """Rank 0's summary of a listing, for N images with C captions."""

    keys: NDArray[np.bytes_]  # [N] digests of the ids, in the listing's order
    num_captions: NDArray[np.int32]  # [N]
    caption_chars: NDArray[np.int32]  # [C] lengths, image after image
    listing: Listing  # without its items
    without_caption: bytes  # lines of `without_caption.jsonl`, rejects included

    @property
    def num_items(self) -> int:
        return len(self.keys)


class ItemParts:
    """The items of one rank in the listing's order, unpacked during iteration."""

    def __init__(self, parts: Sequence[bytes] = ()) -> None:
        """Take the output of `pack_items`."""
        self.parts: list[bytes] = []
        self._num_items = 0
        for part in parts:
            self.append(part, len(unpack_items(part)))

    def append(self, part: bytes, num_items: int) -> None:
        self.parts.append(part)
        self._num_items += num_items

    def __len__(self) -> int:
        return self._num_items

    def __iter__(self) -> Iterator[SourceItem]:
        for part in self.parts:
            yield from unpack_items(part)


def take_apart(listing: Listing, world_size: int) -> tuple[Outline, list[ItemParts]]:
    """Return a listing's outline and each rank's items. Empties `listing.items` in the process, to free memory."""
    items = listing.items
    digests, num_captions, caption_chars, without_caption = bytearray(), array("i"), array("i"), bytearray()
    slices = [ItemParts() for _ in range(world_size)]
    waiting: list[list[SourceItem]] = [[] for _ in range(world_size)]
    items.reverse()  # popped from the end one by one
    while items:
        item = items.pop()
        digest = sample_digest(item.id)
        digests += digest
        num_captions.append(len(item.captions))
        if not item.captions:
            without_caption += as_line(item.id)
        caption_chars.extend(map(len, item.captions))
        rank = rank_of(digest, world_size)
        own = waiting[rank]
        own.append(item)
        if len(own) == _PART_ITEMS:
            slices[rank].append(pack_items(own), len(own))
            own.clear()
    for rank, own in enumerate(waiting):
        if own:
            slices[rank].append(pack_items(own), len(own))
    outline = Outline(
        keys=np.frombuffer(bytes(digests), dtype=KEY),
        num_captions=np.array(num_captions, dtype=np.int32),
        caption_chars=np.array(caption_chars, dtype=np.int32),
        listing=listing,
        without_caption=bytes(without_caption),
    )
    return outline, slices


def pack_items(items: Sequence[SourceItem]) -> bytes:
    """Serialise items as JSON: id, captions, caption error, whether that is temporary, split, and position."""
    fields = [
        (item.id, item.captions, item.caption_error, item.is_caption_out_of_reach, item.held_out, item.at) for item in items
    ]
    return json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")


def unpack_items(part: bytes) -> list[SourceItem]:
    return [
        SourceItem(
            id=sample_id,
            captions=tuple(captions),
            caption_error=error,
            is_caption_out_of_reach=is_out_of_reach,
            held_out=is_held_out,
            at=tuple(at),
        )
        for sample_id, captions, error, is_out_of_reach, is_held_out, at in json.loads(part.decode("utf-8", "surrogatepass"))
    ]
