"""The command `loader`: print what would be read, without reading it; read for others."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from bucketline.commands import print_json, run_one_of
from bucketline.errors import PlanError, UsageError
from bucketline.loader.commands.serve import Serve
from bucketline.loader.commands.stats import Stats

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bucketline.loader.plan import Plan
    from bucketline.store import Store


@dataclass(frozen=True, kw_only=True)
class PlanCommand:
    """Print what training would read: steps, and per bucket its batches. No row is read.

    A step is an optimizer step; its global batch is world size x batch size x accumulation, of one bucket.

    Example: loader plan photos.store --batch-size 8 --world-size 2 --epochs 3
    """

    store: tyro.conf.Positional[Path]
    """The store's folder."""
    batch_size: int
    """Rows of a micro-batch, per rank."""
    world_size: int = 1
    """Ranks that train."""
    epochs: int = 1
    """Passes over the rows."""
    accum: int = 1
    """Micro-batches of one optimizer step."""
    seed: int = 0
    """Decides the order."""
    split: str = "train"
    """The split to read: train or val."""
    remainder: str = "carry"
    """What becomes of rows that do not fill a global batch: carry, drop or partial."""
    list_batches: Annotated[bool, tyro.conf.arg(name="list")] = False
    """Print every step's sample ids, by rank."""
    json: bool = False
    """Print one JSON object."""

    def run(self) -> int:
        from bucketline.loader.plan import Remainder, make_plan
        from bucketline.store import Store

        for name in ("batch_size", "world_size", "epochs", "accum"):
            if getattr(self, name) < 1:
                raise UsageError(f"--{name.replace('_', '-')} is {getattr(self, name)}, expected 1 or more")
        if not 0 <= self.seed < 1 << 63:
            raise UsageError(f"--seed is {self.seed}, expected 0 to 2^63 - 1")
        if self.remainder not in set(Remainder):
            raise UsageError(f"--remainder is {self.remainder!r}, expected one of {', '.join(Remainder)}")
        store = Store.open(self.store)
        size = self.world_size * self.batch_size * self.accum
        plan = make_plan(store, split=self.split, seed=self.seed, global_batch=size, remainder=Remainder(self.remainder))
        steps = plan.steps_before(self.epochs)
        if steps == 0:
            raise PlanError(plan.without_step())
        report = self._report(plan, steps)
        if self.list_batches:
            report["batches"] = [self._batch(store, plan, step) for step in range(steps)]
        if self.json:
            print_json(report)
        else:
            _print_report(report)
        return 0

    def _report(self, plan: Plan, steps: int) -> dict[str, Any]:
        counts = [plan.count(bucket, self.epochs) for bucket in plan.buckets]
        return {
            "steps": steps,
            "rows": sum(count.batches * count.bucket.global_batch for count in counts),
            "plan": plan.digest,
            "buckets": [
                {
                    "name": count.bucket.name,
                    "split": self.split,
                    "rows": count.bucket.num_rows,
                    "global_batch": count.bucket.global_batch,
                    "batches": count.batches,
                    "carried": count.carried,
                    "repeats": count.repeats,
                }
                for count in counts
            ],
        }

    def _batch(self, store: Store, plan: Plan, step: int) -> dict[str, Any]:
        from bucketline.loader.plan import slice_of_rank

        planned = plan.at(step)
        ids = store.bucket(planned.bucket).sample_ids(planned.rows)
        ranks = [ids[slice_of_rank(rank, self.world_size, len(ids))] for rank in range(self.world_size)]
        return {"step": step, "epoch": planned.epoch, "bucket": planned.bucket, "ranks": ranks}


def _print_report(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    console.print(f"{report['steps']} steps, {report['rows']} rows delivered")
    table = Table("bucket", "rows", "global batch", "batches", "carried", "repeats")
    for bucket in report["buckets"]:
        values = (bucket[name] for name in ("name", "rows", "global_batch", "batches", "carried", "repeats"))
        table.add_row(*map(str, values))
    console.print(table)
    for batch in report.get("batches", []):
        console.print(f"step {batch['step']} (epoch {batch['epoch']}) {batch['bucket']}", highlight=False)
        for rank, ids in enumerate(batch["ranks"]):
            console.print(f"  rank {rank}: {', '.join(ids)}", highlight=False, markup=False, soft_wrap=True)


def main(args: Sequence[str] | None = None, prog: str = "loader") -> int:
    """Run the command `loader`."""
    return run_one_of(prog, __doc__ or "", {"plan": PlanCommand, "serve": Serve, "stats": Stats}, args)


if __name__ == "__main__":
    sys.exit(main())
