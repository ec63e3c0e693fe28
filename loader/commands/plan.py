"""`loader plan`: print what an epoch reads, without reading it."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from bucketline.command_line import counted, one_line, print_json, printable, say
from bucketline.loader.commands.batch_options import PlannedOptions
from bucketline.options import Arg

if TYPE_CHECKING:
    from bucketline.loader.mixture import Mixture
    from bucketline.loader.plan.plan import Plan
    from bucketline.store import Store


@dataclass(frozen=True, kw_only=True)
class PlanCommand(PlannedOptions):
    """Print a run's steps and each bucket's batches. Reads no rows.

    A step is an optimizer step. Its global batch is world size x rows of a micro-batch x accumulation, from one bucket.
    All rows are shuffled, and any batch may come at any step. With `--window`, each machine's part of a global batch comes from
    shards of its own, of which 16 at a time are read in one go and so many rows mixed, and the buckets take turns in proportion
    to their batches. With `--window 0`, rows come in stored order, one bucket after the other.

    With `--world-size 64@8` and `--cache-bytes`, the window is the one that each of that many machines (8) would choose by a
    cache of this size. Requests are those for lines of 8 MiB that fetch the stores once from object storage.

    Example: loader plan photos.store --batch-size 8 --world-size 2 --epochs 3
    """

    SECTION = "plan: what to count and print"
    FIRST = ("of_run", "batch_size", "world_size", "epochs", "split", "seed", "window", "list_batches", "json")

    epochs: int = 1
    """Passes over the rows."""
    list_batches: Annotated[bool, Arg(name="list")] = False
    """Print each step's sample ids, by rank."""
    json: bool = False
    """Print one JSON object."""

    def __post_init__(self) -> None:
        PlannedOptions.__post_init__(self)
        self._expect_at_least(1, "epochs")

    def run(self) -> int:
        from bucketline.loader.mixture import join
        from bucketline.loader.plan.plan import make_plan, plan_counts
        from bucketline.store.format.block import LINE_BYTES

        stores, config, world_size, _ = self.planned(epochs=None)
        store = join(stores)
        cache_bytes = self.remote().cache_bytes if self.world_size.machines is not None else None
        plan = make_plan(store, config, world_size=world_size, cache_bytes=cache_bytes)
        report = plan_counts(plan, self.epochs, config.split)
        report["stores"] = [
            {"path": str(weighted.store.place), "generation": weighted.store.manifest.generation, "repeats": weighted.repeats}
            for weighted in stores
        ]
        report["requests"] = sum(-(-file.entry.lmdb.num_bytes // LINE_BYTES) for file in store.files)
        report["small_buckets"] = plan.small_buckets(can_drop=False)  # who reads the report may have no --split
        if self.list_batches:
            report["batches"] = [_batch(store, plan, step, world_size) for step in range(report["steps"])]
        if self.json:
            print_json(report)
        else:
            _print_report(report)
        if (small := plan.small_buckets()) is not None:
            print(f"warning: {printable(small)}", file=sys.stderr)
        return 0


def _batch(store: Store | Mixture, plan: Plan, step: int, world_size: int) -> dict[str, Any]:
    planned = plan.draw([(step, rank) for rank in range(world_size)], world_size)
    bucket = store.bucket(planned[0].bucket)
    ids = [bucket.sample_ids(part.rows) for part in planned]
    return {"step": step, "epoch": planned[0].epoch, "bucket": bucket.name, "ranks": ids}


def _print_report(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    if len(report["stores"]) > 1 or report["stores"][0]["repeats"] > 1:
        for store in report["stores"]:
            console.print(f"{one_line(str(store['path']))} x {store['repeats']}", highlight=False, markup=False, soft_wrap=True)
    counts = f"{counted(report['steps'], 'step')}, {counted(report['rows'], 'row')} delivered"
    say(f"{counts}; {counted(report['requests'], 'request')} would fetch the stores from object storage")
    headings = ("bucket", "rows", "global batch", "batches", "carried")
    table = Table(*headings)
    for bucket in report["buckets"]:
        table.add_row(*(str(bucket[name]) for name in ("name", "rows", "global_batch", "batches", "carried")))
    console.print(table)
    for batch in report.get("batches", []):
        console.print(f"step {batch['step']} (epoch {batch['epoch']}) {batch['bucket']}", highlight=False)
        for rank, ids in enumerate(batch["ranks"]):
            console.print(f"  rank {rank}: {', '.join(map(one_line, ids))}", highlight=False, markup=False, soft_wrap=True)
