"""A set of samples in every peer's format, and the processes that write, gate and time them. Failures are kept by name."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from bucketline.bench.cold_runs import FROM_DISK, TRIES, drop_pages
from bucketline.bench.peers.environments import Environment, Failure, environment, own_environment
from bucketline.bench.peers.peer import Remote
from bucketline.bench.peers.registry import OURS, OWN, subject
from bucketline.bench.peers.samples import expected
from bucketline.bench.peers.worker import Streamed, Task, Timed, own_folder, write_expected
from bucketline.errors import BucketlineError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from bucketline.bench.peers.peer import Way
    from bucketline.bench.peers.registry import Entry
    from bucketline.bench.peers.samples import SetShape

PROCESS_S = 900  # time limit of a task


class PeerError(BucketlineError):
    """A peer's process failed, or its read was not cold."""


@dataclass(slots=True, kw_only=True)
class PeerSet:
    """The samples of one shape in a folder, and the peers that can deliver them."""

    folder: Path
    shape: SetShape
    environments: Path  # folder of the environments
    failures: list[Failure] = field(default_factory=list)
    gates: dict[str, dict[str, Any]] = field(default_factory=dict)  # by subject
    disk_bytes: dict[str, int] = field(default_factory=dict)  # by peer
    made: dict[str, Environment] = field(default_factory=dict)

    def prepare(self, entries: Sequence[Entry], num_ways: int) -> list[tuple[Entry, str, Way]]:
        """Write every format and check the first ways of reading it at the gate. Return those that passed.

        Raises:
            PeerError: if one in our own environment fails, which is a bug in Bucketline or in the limits.
        """
        return [passed for entry in self.written(entries) for passed in self._gated(entry, num_ways)]

    def written(self, entries: Sequence[Entry]) -> list[Entry]:
        """Make the environments and write every format. Return the entries for which that worked."""
        self.folder.mkdir(parents=True, exist_ok=True)
        write_expected(self.folder, expected(self.shape))
        self.made[OWN] = own_environment()
        for name in dict.fromkeys(entry.environment for entry in entries if entry.environment != OWN):
            found = environment(name, self.environments)
            if isinstance(found, Failure):
                self._fail(Failure(name=f"environment {found.name}", reason=found.reason))
            else:
                self.made[name] = found
        return [entry for entry in entries if entry.environment in self.made and self._is_written(entry)]

    def _is_written(self, entry: Entry) -> bool:
        try:
            self._write(entry)
        except PeerError as error:
            self._refused(entry, entry.name, error)
            return False
        return True

    def _gated(self, entry: Entry, num_ways: int) -> list[tuple[Entry, str, Way]]:
        ways = {**entry.hot(num_ways), **entry.cold(num_ways)}
        return [(entry, name, way) for name, way in ways.items() if self._passes(entry, name, way)]

    def gated_remotely(self, entry: Entry, num_ways: int, endpoint: str, cache_bytes: int) -> list[tuple[Entry, str, Way]]:
        """Check the first ways of reading a format from a server at the gate. Return those that passed."""
        passed = []
        for name, way in entry.remote(num_ways).items():
            with self._remote(entry, endpoint, cache_bytes) as remote:
                if self._passes(entry, name, way, remote=asdict(remote)):
                    passed.append((entry, name, way))
        return passed

    def _passes(self, entry: Entry, name: str, way: Way, **more: Any) -> bool:  # noqa: ANN401 - fields of a task
        full = subject(entry.name, name)
        print(f"gate: {full}", file=sys.stderr)
        try:
            self.gates[full] = self._run(entry, way, "gate", **more)
        except PeerError as error:
            self._refused(entry, full, error)
            return False
        return True

    def _refused(self, entry: Entry, name: str, error: PeerError) -> None:
        if entry.environment == OWN:
            raise error
        self._fail(Failure(name=name, reason=str(error)))

    def _fail(self, failure: Failure) -> None:
        print(f"left out: {failure.name}: {failure.reason}", file=sys.stderr)
        self.failures.append(failure)

    def _write(self, entry: Entry) -> None:
        if own_folder(self.folder, entry.name).exists():
            own = own_folder(self.folder, entry.name)
            self.disk_bytes[entry.name] = sum(path.lstat().st_blocks * 512 for path in own.rglob("*"))
            return
        print(f"writing {entry.name}", file=sys.stderr)
        self.disk_bytes[entry.name] = self._run(entry, next(iter(entry.ways.values())), "write")["disk_bytes"]

    def hot(self, entry: Entry, way: Way, least_s: float) -> Timed:
        """Time passes in a separate process, after at least one untimed pass."""
        return Timed(**self._run(entry, way, "time", least_s=least_s))

    def cold(self, entry: Entry, way: Way, payload_bytes: int) -> Timed:
        """Drop the format's pages and time one pass in a fresh process.

        Raises:
            PeerError: if no attempt read enough of the samples' bytes from the disk.
        """
        read = 0
        for _ in range(TRIES):
            drop_pages(own_folder(self.folder, entry.name))
            timed = Timed(**self._run(entry, way, "time", is_cold=True))
            if timed.read_bytes >= FROM_DISK * payload_bytes:
                return timed
            read = timed.read_bytes
        raise PeerError(
            f"{entry.name} read {read} bytes from the disk for a payload of {payload_bytes}, expected {FROM_DISK} of it at "
            f"least, {TRIES} times; give --stores a folder on a disk (not tmpfs) that nobody else reads"
        )

    def stream(self, entry: Entry, way: Way, endpoint: str, cache_bytes: int, passes: int) -> list[Streamed]:
        """Time passes over a format on a server of the set's parent folder, with an empty cache at first."""
        with self._remote(entry, endpoint, cache_bytes) as remote:
            found = self._run(entry, way, "stream", remote=asdict(remote), passes=passes)
        return [Streamed(**one) for one in found["passes"]]

    @contextmanager
    def _remote(self, entry: Entry, endpoint: str, cache_bytes: int) -> Iterator[Remote]:
        with tempfile.TemporaryDirectory(prefix="cache-", dir=self.folder.parent, ignore_cleanup_errors=True) as cache:
            prefix = own_folder(self.folder, entry.name).name
            yield Remote(endpoint=endpoint, bucket=self.folder.name, prefix=prefix, cache=cache, cache_bytes=cache_bytes)

    def _run(self, entry: Entry, way: Way, do: str, **more: Any) -> dict[str, Any]:  # noqa: ANN401 - fields of a task
        """Run one task in a separate process and return its result.

        Raises:
            PeerError: if the process fails or takes too long; includes its last line of output.
        """
        task = Task(
            do=do,
            peer=entry.name,
            folder=str(self.folder),
            shape=asdict(self.shape),
            way=asdict(way),
            **more,
        )
        own = self.made[entry.environment]
        command = own.command(json.dumps(asdict(task)))
        pipe = subprocess.PIPE
        with subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True, env=own.variables(), cwd=self.folder
        ) as process:
            try:
                out, err = process.communicate(timeout=PROCESS_S)
            except subprocess.TimeoutExpired as late:
                process.kill()
                raise PeerError(f"{entry.name}: the task `{do}` took more than {PROCESS_S} s") from late
        if process.returncode:
            last = ([line for line in err.strip().splitlines() if line.strip()] or [f"it ended with {process.returncode}"])[-1]
            raise PeerError(f"{entry.name}: the task `{do}` failed: {last.strip()[:300]}")
        found: dict[str, Any] = json.loads(out.strip().splitlines()[-1])
        return found

    def about(self) -> dict[str, Any]:
        """Return the participants with their versions, the gate's observations, and the excluded peers."""
        return {
            "environments": {name: made.versions for name, made in self.made.items() if name != OWN},
            "gate": self.gates,
            "left_out": {failure.name: failure.reason for failure in self.failures},
        }

    def leave_out(self, name: str, error: PeerError) -> None:
        """Record a subject that failed while it was timed.

        Raises:
            PeerError: if the subject is Bucketline.
        """
        if name.startswith(OURS):
            raise error
        self._fail(Failure(name=name, reason=str(error)))
