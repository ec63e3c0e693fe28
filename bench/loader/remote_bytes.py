"""Bytes that leave a store in object storage, epoch by epoch, and their forecast: 1 to 8 machines, and small caches."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from bucketline.bench.harness import Case, Mark, Result, run_case
from bucketline.command_line import counted

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from bucketline.bench.loader.remote_delivery import Runs
    from bucketline.bench.workers.remote_reader import Part, RemoteRun
    from bucketline.loader.plan.bill import Bill
    from bucketline.store import Store

CASE = "remote_bytes"
ONCE = Mark(bound=1.02, is_at_most=True)  # of the lines' bytes, over all machines, in the first epoch
NEVER_AGAIN = Mark(bound=0.002, is_at_most=True)  # in the later ones, if the caches together hold the store
KEEPS_HALF = Mark(bound=0.52, is_at_most=True)  # in the later ones, with a cache of half the store
FORECAST = Mark(bound=0.05, is_at_most=True)  # of the bytes and the requests


@dataclass(frozen=True, kw_only=True)
class RemoteBytes(Case):
    """Count the bytes of lines that a server sends in each epoch, as a share of the store's, and compare them with the bill.

    Each machine is a process with a cache of its own; they run one after the other, since they do not talk to each other. The
    caches hold the store, but for one machine whose cache has half of it, and one whose cache has room for two windows.
    `forecast`: by how much the bill before the run is off, the worst of the bytes and of the requests of all epochs, as a share
    of what was measured, or of the first epoch's where hardly anything was.

    Lines where two machines' shares meet are fetched by both: for the mark of 8 machines, a store needs 1,000 lines (8 GB).

    Example: python -m bucketline.bench.loader.remote_bytes --rows-per-shard 5400
    """

    num_shards: int = 3
    """Shards of the store."""
    rows_per_shard: int = 5400
    """Rows per shard."""
    row_kib: int = 512
    """KiB per row of latents."""
    batch_size: int = 32
    """Rows of a global batch."""
    machines: tuple[int, ...] = (1, 2, 4, 8)
    """Machines that share an epoch."""
    caches: tuple[float, ...] = (0.5, 0.04)
    """Sizes of one machine's cache, in stores."""
    epochs: int = 3
    """Epochs whose bytes are counted."""

    def measure(self, folder: Path) -> list[Result]:
        from bucketline.bench.fixtures.pushed_store import pushed
        from bucketline.bench.fixtures.server_process import ServerProcess
        from bucketline.bench.fixtures.synthetic_store import StoreShape, kept_store, latent_shape
        from bucketline.bench.loader.remote_delivery import Runs
        from bucketline.bench.workers.remote_reader import RemoteRun
        from bucketline.store import Store

        shape = StoreShape(
            num_shards=self.num_shards, rows_per_shard=self.rows_per_shard, latent_shape=latent_shape(self.row_kib)
        )
        path = kept_store(folder, shape)
        pushed(path, folder / "served")
        store, results = Store.open(path), list[Result]()
        with ServerProcess(folder / "served") as server:
            run = RemoteRun(reader="loader", server=server.url, name=path.name, store=str(path), epochs=self.epochs)
            runs = Runs(folder=folder, server=server, run=run)
            for machines in self.machines:
                own = replace(
                    run, world_size=machines, batch_size=self.batch_size // machines, cache_bytes=_num_bytes(store) + (1 << 30)
                )
                marks: tuple[Mark | None, ...] = (ONCE, *(NEVER_AGAIN for _ in range(self.epochs - 1)))
                results += self._results(counted(machines, "machine"), runs, own, store, marks)
            for share in self.caches:
                own = replace(run, batch_size=self.batch_size, cache_bytes=int(share * _num_bytes(store)))
                marks = (ONCE, *(KEEPS_HALF if share == 0.5 else None for _ in range(self.epochs - 1)))
                results += self._results(f"a cache of {share:g} of the store", runs, own, store, marks)
        return results

    def _results(self, name: str, runs: Runs, run: RemoteRun, store: Store, marks: Sequence[Mark | None]) -> list[Result]:
        parts = [part for rank in range(run.world_size) for part in runs.parts(replace(run, rank=rank))]
        bill = bill_of(run, store)
        epochs = [parts[epoch :: self.epochs] for epoch in range(self.epochs)]
        sent = [sum(part.line_bytes for part in own) for own in epochs]
        results = [
            _figure(f"{CASE}, {name}", f"epoch {number}", "of the store", value / bill.read_bytes, mark)
            for number, (value, mark) in enumerate(zip(sent, marks, strict=True), 1)
        ]
        off = _figure(f"{CASE}, {name}", "forecast", "off", _off(epochs, bill), FORECAST)
        return [*results, off]


def bill_of(run: RemoteRun, store: Store) -> Bill:
    """Return the bill of a run."""
    from bucketline.loader.plan.bill import make_bill, store_lines
    from bucketline.loader.plan.cache_needs import ring_of, sidecar_bytes_of
    from bucketline.loader.plan.make_plan import plan_of

    config, machines, cache_bytes = run.config(store.path), run.world_size, run.cache_bytes or 0
    plan = plan_of(store, config, machines)
    return make_bill(
        store_lines(store, plan, config.split),
        plan,
        machines=machines,
        epochs=run.epochs,
        cache_bytes=cache_bytes,
        ring_bytes=ring_of(store, plan, machines, cache_bytes),
        kept_bytes=sidecar_bytes_of(store),
    )


def _off(epochs: Sequence[Sequence[Part]], bill: Bill) -> float:
    """Return the largest share by which the forecast differs in an epoch, of bytes or of requests."""
    worst = 0.0
    for own, forecast in zip(epochs, bill.epochs, strict=True):
        for measured, expected, first in (
            (sum(part.line_bytes for part in own), forecast.store_bytes, bill.epochs[0].store_bytes),
            (sum(part.line_gets for part in own), forecast.gets, bill.epochs[0].gets),
        ):
            worst = max(worst, abs(expected - measured) / (measured if measured > first / 100 else first))
    return worst


def _num_bytes(store: Store) -> int:
    from bucketline.loader.plan.cache_needs import num_bytes_of

    return num_bytes_of(store)


def _figure(case: str, subject: str, unit: str, value: float, mark: Mark | None) -> Result:
    """Return a figure that does not vary."""
    own = round(value, 6)
    return Result(case=case, subject=subject, unit=unit, median=own, q1=own, q3=own, repeats=1, limit_ratio=own, mark=mark)


def main() -> int:
    """Make the store, serve it, count and print."""
    return run_case(RemoteBytes)


if __name__ == "__main__":
    sys.exit(main())
