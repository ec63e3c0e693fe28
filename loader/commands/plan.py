"""`loader plan`: print what an epoch reads, without reading it."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from bucketline.command_line import counted, print_json
from bucketline.errors import PlanError
from bucketline.loader.config import SHUFFLE_WINDOW, WINDOW_BLOCKS, BatchOptions, Remainder

if TYPE_CHECKING:
    from bucketline.loader.plan.plan import Plan
    from bucketline.store.read.store import OpenShards


@dataclass(frozen=True, kw_only=True)
class PlanCommand(BatchOptions):
    """Print the steps of a training run and each bucket's batches. Reads no rows.

    A step is an optimizer step. Its global batch is world size x rows of a micro-batch x accumulation, from one bucket.
    With `--shuffle full`, any batch may come at any step. With `blocks`, a bucket's rows are read in windows of
    `--shuffle-window` rows, each made of 16 blocks of neighbouring rows, and the buckets take turns in proportion to their
    batches. With `lines`, each of `--lanes` equal parts of a global batch comes from shards of its own, of which 16 at a time
    are read from front to back and mixed. With `none`, rows come in stored order, one bucket after the other.

    Example: loader plan photos.store --batch-size 8 --world-size 2 --epochs 3
    """

    stores: tyro.conf.Positional[tuple[str, ...]]
    """Folders or URLs of the stores. Write `photos.store:3` to read a store's rows three times per pass.
    A folder packed from a data set file stands for its stores and their repeats."""
    world_size: int = 1
    """Number of training ranks."""
    epochs: int = 1
    """Passes over the rows."""
    split: str = "train"
    """Split to read: train or val."""
    remainder: Remainder = Remainder.CARRY
    """How to handle rows that do not fill a global batch: carry, drop or partial."""
    shuffle_window: int = SHUFFLE_WINDOW
    """Rows that --shuffle blocks mixes at a time, and each lane of --shuffle lines (there at most 2 GiB)."""
    list_batches: Annotated[bool, tyro.conf.arg(name="list")] = False
    """Print each step's sample ids, by rank."""
    store_option: Annotated[tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(metavar="KEY=VALUE")] = ()
    """KEY=VALUE for the client of object storage, such as region=eu-central-1; may be repeated. Secrets: by the environment."""
    json: bool = False
    """Print one JSON object."""

    def __post_init__(self) -> None:
        BatchOptions.__post_init__(self)
        self._expect_at_least(1, "world_size", "epochs")
        self._expect_at_least(WINDOW_BLOCKS, "shuffle_window")

    def run(self) -> int:
        from bucketline.loader.mixture import join, open_shares
        from bucketline.loader.plan.plan import make_plan

        shares = open_shares(self.stores, self.remote())
        store = join(shares)
        plan = make_plan(store, self.for_loader(), world_size=self.world_size)
        steps = plan.steps_before(self.epochs)
        if steps == 0:
            raise PlanError(plan.without_step())
        report = self._report(plan, steps)
        report["stores"] = [
            {"path": str(share.store.place), "generation": share.store.manifest.generation, "repeats": share.repeats}
            for share in shares
        ]
        if self.list_batches:
            report["batches"] = [self._batch(store, plan, step) for step in range(steps)]
        if self.json:
            print_json(report)
        else:
            _print_report(report)
        if (small := plan.small_buckets()) is not None:
            print(f"warning: {small}", file=sys.stderr)
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

    def _batch(self, store: OpenShards, plan: Plan, step: int) -> dict[str, Any]:
        shares = plan.draw([(step, rank) for rank in range(self.world_size)], self.world_size)
        bucket = store.bucket(shares[0].bucket)
        ids = [bucket.sample_ids(share.rows) for share in shares]
        return {"step": step, "epoch": shares[0].epoch, "bucket": bucket.name, "ranks": ids}


def _print_report(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    if len(report["stores"]) > 1 or report["stores"][0]["repeats"] > 1:
        for store in report["stores"]:
            console.print(f"{store['path']} x {store['repeats']}", highlight=False, markup=False, soft_wrap=True)
    console.print(f"{counted(report['steps'], 'step')}, {counted(report['rows'], 'row')} delivered")
    table = Table("bucket", "rows", "global batch", "batches", "carried", "repeats")
    for bucket in report["buckets"]:
        values = (bucket[name] for name in ("name", "rows", "global_batch", "batches", "carried", "repeats"))
        table.add_row(*map(str, values))
    console.print(table)
    for batch in report.get("batches", []):
        console.print(f"step {batch['step']} (epoch {batch['epoch']}) {batch['bucket']}", highlight=False)
        for rank, ids in enumerate(batch["ranks"]):
            console.print(f"  rank {rank}: {', '.join(ids)}", highlight=False, markup=False, soft_wrap=True)
