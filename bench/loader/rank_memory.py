"""Total memory of several ranks on one machine, with in-process loading and with one service."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bucketline.bench.harness import Case, Result, Subject, alternate, run_case, summarise
from bucketline.errors import BucketlineError

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True, kw_only=True)
class RankMemory(Case):
    """Measure the total memory of 1, 2 and 4 ranks as PSS, in which a page shared by n processes counts 1/n for each.

    Every rank reads some epochs and holds one batch. `store` is the shards' pages; it does not depend on the number of ranks,
    since they are held once. `buffers and the rest` is everything else, minus what the same processes use before they create
    a loader.

    Example: python -m bucketline.bench.loader.rank_memory --ranks 1 2 4
    """

    num_shards: int = 32
    """Shards of the store."""
    rows_per_shard: int = 64
    """Rows per shard."""
    row_kib: int = 128
    """KiB per row of latents."""
    batch_size: int = 16
    """Rows per batch and rank."""
    prefetch_mib: int = 64
    """MiB of batches filled ahead, per rank."""
    epochs: int = 3
    """Epochs that each rank reads. Rows that come from the disk are not mapped; rows of later epochs are."""
    ranks: tuple[int, ...] = (1, 2, 4)
    """Numbers of ranks; each is measured."""

    def measure(self, folder: Path) -> list[Result]:
        from bucketline.bench.fixtures.synthetic_store import StoreShape, kept_store, latent_shape

        shape = StoreShape(
            num_shards=self.num_shards, rows_per_shard=self.rows_per_shard, latent_shape=latent_shape(self.row_kib)
        )
        path = kept_store(folder, shape)
        measured: dict[tuple[int, bool, int], dict[str, float]] = {}

        def of(num_ranks: int, part: str, *, is_served: bool) -> Callable[[int], float]:
            def measure(number: int) -> float:
                key = (num_ranks, is_served, number)
                if key not in measured:
                    measured[key] = self._run(path, num_ranks, is_served=is_served)
                return measured[key][part]

            return measure

        subjects = [
            Subject(
                name=f"{part}, {ranks} rank{'s' if ranks > 1 else ''}, {'the service' if is_served else 'in the process'}",
                measure=of(ranks, part, is_served=is_served),
                limit=f"{part}, {min(self.ranks)} rank{'s' if min(self.ranks) > 1 else ''}, in the process",
            )
            for part in ("store", "buffers and the rest")
            for is_served in (False, True)
            for ranks in self.ranks
        ]
        return summarise("rank_memory", "MB", subjects, alternate(subjects, self.repeats))

    def _run(self, store: Path, num_ranks: int, *, is_served: bool) -> dict[str, float]:
        """Start the ranks, let each read its epochs, and add up the memory of all processes while they hold a batch."""
        with ExitStack() as stack:
            socket = store.parent / f"{num_ranks}.sock"
            processes = []
            if is_served:
                command = [sys.executable, "-P", "-m", "bucketline.loader.cli", "serve", str(store), "--socket", str(socket)]
                processes.append(stack.enter_context(_Process(command, "stderr")))
            asked = [self.batch_size, self.prefetch_mib, self.epochs, num_ranks]
            ranks = []
            for rank in range(num_ranks):
                command = [
                    sys.executable,
                    "-P",
                    "-m",
                    "bucketline.bench.loader.rank_memory",
                    "rank",
                    str(store),
                    str(socket) if is_served else "",
                    *map(str, [rank, *asked]),
                ]
                ranks.append(stack.enter_context(_Process(command, "stdout")))
            for process in ranks:
                process.wait_for_line()  # it has read
            processes += ranks
            together = {"store": 0.0, "buffers and the rest": 0.0}
            for process in processes:
                found = _pss(process.pid, store)
                together["store"] += found[0] / 1e6
                together["buffers and the rest"] += (found[1] - process.before_bytes) / 1e6
            return together


class _Process:
    """A process that prints a line once everything is imported, and ends when its input closes."""

    def __init__(self, command: list[str], says_at: str) -> None:
        self._says_at = says_at
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=pipe if says_at == "stderr" else None, text=True
        )
        self.pid = self._process.pid
        self.wait_for_line()
        self.before_bytes = _pss(self.pid, Path("/nowhere"))[1]

    def wait_for_line(self) -> None:
        stream = self._process.stderr if self._says_at == "stderr" else self._process.stdout
        assert stream is not None
        if not stream.readline():
            raise BucketlineError(f"a process of rank_memory ended with {self._process.wait()}; see its message above")

    def __enter__(self) -> _Process:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.communicate()


def _pss(pid: int, store: Path) -> tuple[int, int]:
    """Return a process's PSS in bytes: of the store's files, and of everything else."""
    of_store = rest = 0
    is_store = False
    for line in Path(f"/proc/{pid}/smaps").read_text(encoding="utf-8", errors="replace").splitlines():
        name, _, value = line.partition(":")
        if name == "Pss":
            num_bytes = int(value.split()[0]) << 10
            of_store, rest = (of_store + num_bytes, rest) if is_store else (of_store, rest + num_bytes)
        elif not value.endswith("kB") and "-" in name.split(" ")[0]:
            is_store = str(store) in line
    return of_store, rest


def _rank(store: str, socket: str, rank: int, batch_size: int, prefetch_mib: int, epochs: int, num_ranks: int) -> None:
    """Run as a rank: report once imported, read the epochs, report again, and hold the last batch until the input closes."""
    from bucketline.loader import Loader, LoaderConfig

    config = LoaderConfig(batch_size=batch_size, prefetch_bytes=prefetch_mib << 20)
    print(json.dumps("imported"), flush=True)
    with Loader(store, config, rank=rank, world_size=num_ranks, service=socket or None) as loader:
        batches = loader.forever()
        batch = next(batches)
        for _ in range(loader.plan.steps_before(epochs) - 1):
            batch = next(batches)
        for tensor in batch.tensors():
            tensor.sum()
        print(json.dumps("read"), flush=True)
        sys.stdin.read()


def main() -> int:
    """Make the store, measure and print; or run as a rank."""
    if sys.argv[1:2] == ["rank"]:
        store, socket, *numbers = sys.argv[2:]
        _rank(store, socket, *map(int, numbers))
        return 0
    return run_case(RankMemory)


if __name__ == "__main__":
    sys.exit(main())
