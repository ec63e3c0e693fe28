"""A process that is forked, at moments drawn at random, while a loader iterates; and sidecars truncated while they are read."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Generator, Iterator
from copy import deepcopy
from itertools import islice, pairwise
from pathlib import Path

from bucketline.errors import BucketlineError, UsageError
from bucketline.loader import Batch, Loader
from tests.fault.apart import How, apart
from tests.fault.forcing import Bench, Ended, WrongEndError, started

CHILD_S = 120  # before a child is taken to hang; it may start a service, which imports torch: seconds of CPU
FORKS = 8  # of one loader
COPIES = 8


def _forked(work: Callable[[], bool]) -> None:
    """Run some work in a process that is forked off.

    Raises:
        WrongEndError: if it hangs, fails or dies.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # forking while threads run is what is tried
        ended = apart(work, CHILD_S)
    if ended.gave is not True:
        raise WrongEndError(f"no answer in {CHILD_S} s from a child" if ended.how is How.HUNG else f"a child: {ended}")


def _ids(batches: Iterator[Batch], count: int) -> list[object]:
    return [batch.ids.tolist() for batch in islice(batches, count)]


def fork_while_read(bench: Bench, service: str | None) -> Ended:
    """Fork again and again; a child iterates, or a copy of its loader, or its parent's loop, or it leaves the loader alone."""
    config = bench.config(epochs=8, threads=bench.random.choice([1, 2, 3]), verify=bench.random.random() < 0.3)
    path = bench.store()
    with Loader(path, config) as own:
        expected = [batch.ids.tolist() for batch in own.forever()]
    longest = 0.0
    with started(Loader(path, config, service=service)) as loader:
        for _ in range(FORKS):
            taken = bench.random.randrange(len(expected) - 4)
            loader.load_state_dict({**loader.state_dict(), "step": taken, "micro_step": 0})
            batches = loader.forever()
            if _ids(batches, 1) != expected[taken : taken + 1]:
                raise WrongEndError("differs: the parent's first batch")
            taken += 1
            end = time.perf_counter() + bench.random.random() * 0.01
            while time.perf_counter() < end:  # somewhere within what the threads do
                pass
            use = bench.random.choice(["iterates", "copies", "continues", "leaves it alone"])

            def work(use: str = use, taken: int = taken, batches: Iterator[Batch] = batches) -> bool:
                if use == "leaves it alone":
                    return True
                if use == "copies":
                    with pickle.loads(pickle.dumps(loader)) as sent:
                        return _ids(sent.forever(), 3) == expected[taken : taken + 3]
                return _ids(loader.forever() if use == "iterates" else batches, 3) == expected[taken : taken + 3]

            begun = time.perf_counter()
            _forked(work)
            longest = max(longest, time.perf_counter() - begun)
            if _ids(batches, 3) != expected[taken : taken + 3]:
                raise WrongEndError("differs: the parent's batches after a fork")
    return Ended(seconds=min(longest, 1.0), how="clean end")  # a child has its own limit: it makes buffers and threads again


def _by_epochs(loader: Loader) -> Generator[Batch]:
    while True:
        yield from loader


def copy_at_any_moment(bench: Bench, service: str | None) -> Ended:
    """Pickle or copy a loader, or fork the process, after any batch, also an epoch's last: the copy gives what it would.

    With `forever` that is the next batch; a `for` begins the next epoch, once one has been begun.
    """
    config, path = bench.config(epochs=4), bench.store()
    with Loader(path, config) as own:
        expected = [(batch.epoch, batch.step, batch.ids.tolist()) for batch in own.forever()]
    ends = [n for n, (one, other) in enumerate(pairwise(expected), 1) if one[0] != other[0]]
    longest = 0.0
    with started(Loader(path, config, service=service)) as loader:
        for _ in range(COPIES):
            taken = bench.random.choice([bench.random.randrange(1, ends[-1]), *ends])
            loader.load_state_dict({**loader.state_dict(), "step": 0, "micro_step": 0, "epoch": 0})
            by_epochs = bench.random.random() < 0.5
            batches = _by_epochs(loader) if by_epochs else loader.forever()
            if [(one.epoch, one.step, one.ids.tolist()) for one in islice(batches, taken)] != expected[:taken]:
                raise WrongEndError("differs: the batches before a copy")
            at = min(end for end in ends if end >= taken) if by_epochs else taken
            how = bench.random.choice(["pickled", "copied", "forked"])

            def rest(loader: Loader = loader, at: int = at, *, by_epochs: bool = by_epochs) -> bool:
                wanted = [ids for _, _, ids in expected[at : at + 3]]
                try:
                    return _ids(_by_epochs(loader) if by_epochs else loader.forever(), len(wanted)) == wanted
                except UsageError:  # no epoch is left
                    return False

            begun = time.perf_counter()
            if how == "forked":
                _forked(rest)
            else:
                with pickle.loads(pickle.dumps(loader)) if how == "pickled" else deepcopy(loader) as copy:
                    if not rest(started(copy)):
                        where = "an epoch's end" if taken in ends else f"batch {taken}"
                        raise WrongEndError(f"differs: what a loader that was {how} at {where} gives")
            longest = max(longest, time.perf_counter() - begun)
    return Ended(seconds=min(longest, 1.0), how="clean end")  # as above


def _sidecars(path: Path) -> list[Path]:
    return [path / "shards" / f"{shard}.extents" for shard in ("g0", "g1")]


def truncate_sidecars_read_plainly(bench: Bench, service: str | None) -> Ended:
    """Truncate the sidecars while batches are read by plain reads: what was read stays, what was not is an error."""
    path = bench.store()
    config = bench.config(plain_reads=True, prefetch_bytes=1, epochs=8)  # more than is located ahead
    with Loader(path, config) as own:
        expected = [batch.ids.tolist() for batch in own.forever()]
    with started(Loader(path, config, service=service)) as loader:
        batches = loader.forever()
        taken = 1 + bench.random.randrange(2)
        found: list[object] = _ids(batches, taken)
        for file in _sidecars(path):
            os.truncate(file, bench.random.choice([0, 0, 100, file.stat().st_size - 1]))
        begun = time.perf_counter()
        how = "clean end"
        try:
            for batch in batches:
                found.append(batch.ids.tolist())
                begun = time.perf_counter()
        except BucketlineError as error:
            if "extents" not in str(error):
                raise WrongEndError(f"{error}; expected the file's name") from error
            how = type(error).__name__
        if found != expected[: len(found)] or (how == "clean end" and len(found) != len(expected)):
            raise WrongEndError("differs: the batches")
    return Ended(seconds=time.perf_counter() - begun, how=how)


_MAPPED = """
import sys
from bucketline.loader import Loader, LoaderConfig
config = LoaderConfig(batch_size=1, prefetch_bytes=1, epochs=1000)
with Loader(sys.argv[1], config) as loader:
    for batch in loader.forever():
        if batch.step == 3:
            print("ready", flush=True)
            sys.stdin.read()
"""


def truncate_sidecars_mapped(bench: Bench, _service: str | None) -> Ended:
    """Truncate the sidecars under the map of a process: it ends by SIGBUS, as the documents say, and does not hang."""
    path = bench.store()
    command = [sys.executable, "-c", _MAPPED, str(path)]
    null = subprocess.DEVNULL
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=null) as process:
        assert process.stdout is not None
        if process.stdout.readline() != b"ready\n":
            raise WrongEndError("the process that reads did not begin")
        for file in _sidecars(path):
            os.truncate(file, 0)
        begun = time.perf_counter()
        try:
            process.communicate(timeout=CHILD_S)
        except subprocess.TimeoutExpired:
            process.kill()
            raise WrongEndError(f"no answer in {CHILD_S} s from a process whose sidecars were truncated") from None
    if process.returncode != -signal.SIGBUS:
        raise WrongEndError(f"it ended with {process.returncode}, expected SIGBUS")
    return Ended(seconds=min(time.perf_counter() - begun, 1.0), how="clean end")
