"""A set of samples in every peer's format, and the processes that write, gate and time them. Failures are kept by name."""

from __future__ import annotations

import math
import sys
import tempfile
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from bucketline.bench.apart import apart
from bucketline.bench.harness import FROM_DISK, TRIES, Subject, alternate, drop_pages
from bucketline.bench.peers import worker
from bucketline.bench.peers.environments import Environment, Failure, environment, own_environment
from bucketline.bench.peers.registry import OURS, Remote
from bucketline.bench.peers.samples import SetShape, expected
from bucketline.bench.peers.worker import Task, Timed, own_folder, write_expected
from bucketline.errors import BucketlineError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from bucketline.bench.peers.registry import Entry, Way, Ways

PROCESS_S = 900  # time limit of a task


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """A peer in one configuration."""

    entry: Entry
    name: str  # of both
    way: Way


@dataclass(slots=True, kw_only=True)
class PeerSet:
    """The samples of one shape in a folder, and the peers that can deliver them."""

    folder: Path
    shape: SetShape
    environments: Path  # folder of the environments
    failures: dict[str, str] = field(default_factory=dict)  # reasons by name
    gates: dict[str, dict[str, Any]] = field(default_factory=dict)  # by contender
    disk_bytes: dict[str, int] = field(default_factory=dict)  # by peer
    made: dict[str, Environment] = field(default_factory=dict)

    def write(self, entries: Sequence[Entry]) -> list[Entry]:
        """Make the environments and write every format. Return the entries for which that worked."""
        self.folder.mkdir(parents=True, exist_ok=True)
        write_expected(self.folder, expected(self.shape))
        for name in dict.fromkeys(entry.environment for entry in entries):
            found = environment(name, self.environments) if name else own_environment()
            if isinstance(found, Failure):
                self._fail(f"environment {found.name}", found.reason)
            else:
                self.made[name] = found
        written = []
        for entry in entries:
            own = own_folder(self.folder, entry.name)
            with self._unless_it_fails(entry, entry.name):
                if entry.environment not in self.made:
                    continue
                if not own.exists():
                    print(f"writing {entry.name}", file=sys.stderr)
                    self._run(entry, next(iter((entry.hot or entry.cold or entry.remote).values())), worker.write)
                self.disk_bytes[entry.name] = worker.disk_bytes(own)
                written.append(entry)
        return written

    def gate(self, entries: Sequence[Entry], ways: Callable[[Entry], Ways], **remote: Any) -> list[Contender]:  # noqa: ANN401
        """Check configurations at the gate, with `remote` those that read from a server. Return those that passed."""
        passed = []
        for entry in entries:
            for name, way in ways(entry).items():
                one = Contender(entry=entry, name=f"{entry.name}, {name}", way=way)
                print(f"gate: {one.name}", file=sys.stderr)
                with self._unless_it_fails(entry, one.name), self._remote(entry, **remote) as place:
                    self.gates[one.name] = self._run(entry, way, worker.gate, remote=place)
                    passed.append(one)
        return passed

    def time(
        self, contenders: Sequence[Contender], repeats: int, measure: Callable[[Contender], list[Timed]]
    ) -> dict[str, list[list[Timed]]]:
        """Time all in alternation; return the measurements of each round, by name, of those that never failed."""
        found: dict[str, list[list[Timed]]] = {one.name: [] for one in contenders}

        def measured(one: Contender) -> Callable[[int], float]:
            def of_round(_: int) -> float:
                if one.name in found:
                    try:
                        found[one.name].append(measure(one))
                    except BucketlineError as error:
                        del found[one.name]
                        if one.name.startswith(OURS):
                            raise
                        self._fail(one.name, str(error))
                return math.nan

            return of_round

        alternate([Subject(name=one.name, measure=measured(one)) for one in contenders], repeats, warm_up=False)
        return found

    def hot(self, one: Contender, least_s: float) -> list[Timed]:
        """Time passes in a separate process, after at least one untimed pass."""
        return self._timed(one, None, least_s)

    def cold(self, one: Contender, payload_bytes: int) -> list[Timed]:
        """Drop the format's pages and time one pass in a fresh process."""
        read = 0
        for _ in range(TRIES):
            drop_pages(own_folder(self.folder, one.entry.name))
            timed = self._timed(one, None)
            read = timed[0].read_bytes
            if read >= FROM_DISK * payload_bytes:
                return timed
        raise BucketlineError(
            f"{one.name} read {read} bytes from the disk for a payload of {payload_bytes}, expected {FROM_DISK} of it at "
            f"least, {TRIES} times; give --stores a folder on a disk (not tmpfs) that nobody else reads"
        )

    def stream(self, one: Contender, endpoint: str, cache_bytes: int, passes: int) -> list[Timed]:
        """Time passes over a format on a server of the set's parent folder, with an empty cache at first."""
        with self._remote(one.entry, endpoint, cache_bytes) as remote:
            return self._timed(one, remote, None, passes)

    def about(self) -> dict[str, Any]:
        """Return the participants with their versions, the gate's observations, and the excluded peers."""
        versions = {name: made.versions for name, made in self.made.items() if name}
        return {"environments": versions, "gate": self.gates, "left_out": self.failures}

    def _timed(self, one: Contender, remote: Remote | None, *arguments: float | None) -> list[Timed]:
        return [Timed(**found) for found in self._run(one.entry, one.way, worker.timed, *arguments, remote=remote)]

    @contextmanager
    def _remote(self, entry: Entry, endpoint: str = "", cache_bytes: int = 0) -> Iterator[Remote | None]:
        if not endpoint:
            yield None
            return
        with tempfile.TemporaryDirectory(prefix="cache-", dir=self.folder.parent, ignore_cleanup_errors=True) as cache:
            prefix = own_folder(self.folder, entry.name).name
            yield Remote(endpoint=endpoint, bucket=self.folder.name, prefix=prefix, cache=cache, cache_bytes=cache_bytes)

    @contextmanager
    def _unless_it_fails(self, entry: Entry, name: str) -> Iterator[None]:
        try:
            yield
        except BucketlineError as error:
            if not entry.environment:
                raise
            self._fail(name, str(error))

    def _fail(self, name: str, reason: str) -> None:
        print(f"left out: {name}: {reason}", file=sys.stderr)
        self.failures[name] = reason

    def _run(self, entry: Entry, way: Way, do: Callable[..., object], *arguments: object, remote: Remote | None = None) -> Any:  # noqa: ANN401 - what it returns
        task = Task(
            peer=entry.name,
            folder=str(self.folder),
            shape=asdict(self.shape),
            way=asdict(way),
            remote=None if remote is None else asdict(remote),
        )
        made = self.made[entry.environment]
        return apart(do, task, *arguments, **made.options(), cwd=self.folder, timeout_s=PROCESS_S)
