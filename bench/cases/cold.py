"""Cost of delivering complete batches from the disk, compared with O_DIRECT random reads of a row's or a caption's size."""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from bucketline.bench.harness import Case, Mark, Result, Subject, alternate, run_case
from bucketline.errors import UsageError

if TYPE_CHECKING:
    from bucketline.bench.cold_runs import ColdRun

MARK = Mark(bound=0.9)


@dataclass(frozen=True, kw_only=True)
class Cold(Case):
    """Measure a loader's batches end to end, each repeat in a fresh process after the store's pages were dropped.

    Bytes are those of the payload, without padding. A repeat counts only if the process's `read_bytes` grew by at least 0.95 of
    them. Otherwise it is retried, and then the case fails. The limit is O_DIRECT random reads of a row's size, with the fastest
    number of threads on this machine; with `--text`, of the captions' sizes: 60 to 512 tokens of 4,096 x F16, next to tiny
    latents.

    Example: python -m bucketline.bench cold --text --num-shards 32 --threads 1 2 --json
    """

    num_shards: int = 32
    """Shards of the store. A batch spans most of them."""
    rows_per_shard: int = 128
    """Rows per shard."""
    row_kib: int = 128
    """KiB per row of latents."""
    text: bool = False
    """Read large captions and tiny latents instead."""
    batch_size: int = 32
    """Rows per batch."""
    batches: int = 96
    """Batches per repeat, of distinct rows; at most as many as the store has."""
    threads: tuple[int, ...] = (1, 2)
    """Numbers of prefetch threads; each is measured."""
    depths: tuple[int, ...] = (4, 8, 16, 32)
    """Thread counts of the O_DIRECT reads; the fastest is the limit."""

    def measure(self, folder: Path) -> list[Result]:
        from bucketline.bench.cold_runs import DIRECT, ColdRun, with_best_depth
        from bucketline.bench.fixtures.synthetic_store import StoreShape, kept_store, latent_shape

        shape = StoreShape(
            num_shards=self.num_shards, rows_per_shard=self.rows_per_shard, latent_shape=latent_shape(self.row_kib)
        )
        if self.text:
            shape = replace(shape, latent_shape=(4, 8, 8), tokens=(60, 512), token_width=4096)
        if shape.num_rows < self.batch_size:
            raise UsageError(f"the store has {shape.num_rows} rows, a batch is {self.batch_size}; make the store larger")
        path, batches = kept_store(folder, shape), min(self.batches, shape.num_rows // self.batch_size)
        run = ColdRun(reader="direct", store=str(path), plan="", batch_size=self.batch_size, batches=batches)
        with tempfile.TemporaryDirectory() as plans:
            subjects = [
                *(self._subject(f"{DIRECT}, {n} threads", replace(run, threads=n), Path(plans)) for n in self.depths),
                *(
                    self._subject(
                        f"loader, {n} thread{'s' if n > 1 else ''}", replace(run, reader="loader", threads=n), Path(plans)
                    )
                    for n in self.threads
                ),
            ]
            return with_best_depth("cold, text" if self.text else "cold", subjects, alternate(subjects, self.repeats))

    def _subject(self, name: str, run: ColdRun, plans: Path) -> Subject:
        """Return a subject whose runs of a round read what that round's plan file lists, as all others' do."""
        from bucketline.bench.cold_runs import cold_rate, plan_captions, plan_rows

        store = Path(run.store)

        def measure(number: int) -> float:
            plan = plans / f"{number}.npz"
            if not plan.exists():
                (plan_captions if self.text else plan_rows)(store, run.batch_size, run.batches, number, plan)
            return cold_rate(replace(run, plan=str(plan)), store)

        return Subject(name=name, measure=measure, mark=MARK if run.reader == "loader" else None)


def main() -> int:
    """Make the store, measure and print."""
    return run_case(Cold)


if __name__ == "__main__":
    sys.exit(main())
