"""The command `loader`: print what would be read, without reading it; read for others."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from bucketline.commands import print_json, run_one_of
from bucketline.errors import PlanError, UsageError
from bucketline.loader.commands.serve import Serve
from bucketline.loader.commands.stats import Stats

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bucketline.loader.config import LoaderConfig
    from bucketline.loader.plan import Plan
    from bucketline.store.reader import OpenShards


@dataclass(frozen=True, kw_only=True)
class PlanCommand:
    """Print what training would read: steps, and per bucket its batches. No row is read.

    A step is an optimizer step; its global batch is world size x rows of a micro-batch x accumulation, of one bucket.
    With `--shuffle full` any batch may come at any step. With `blocks` a bucket's rows are read in windows of
    `--shuffle-window` rows, of 16 blocks of neighbouring rows each, and the buckets take turns in proportion to their
    batches. With `none` rows come as stored, bucket after bucket.

    Example: loader plan photos.store --batch-size 8 --world-size 2 --epochs 3
    """

    stores: tyro.conf.Positional[tuple[str, ...]]
    """The stores' folders; `photos.store:3` to read a store's rows three times a pass."""
    batch_size: int | None = None
    """Rows of a micro-batch, per rank; this, or one of the next two."""
    batch_pixels: int | None = None
    """Pixels of a micro-batch, per rank: as many rows as fit, by their bucket's height x width."""
    batch_tokens: int | None = None
    """Latent positions (h x w of the latent) of a micro-batch, per rank: as many rows as fit."""
    batch_multiple: int = 1
    """With pixels or tokens: rows are a multiple of this, and at least that many."""
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
    shuffle: str = "full"
    """The order of rows and steps: full, blocks or none."""
    shuffle_window: int = 4096
    """With blocks: rows that are mixed with one another."""
    list_batches: Annotated[bool, tyro.conf.arg(name="list")] = False
    """Print every step's sample ids, by rank."""
    json: bool = False
    """Print one JSON object."""

    def run(self) -> int:
        from bucketline.loader.plan import make_plan
        from bucketline.loader.stores import join, open_shares

        for name in ("batch_size", "batch_pixels", "batch_tokens", "batch_multiple", "world_size", "epochs", "accum"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise UsageError(f"--{name.replace('_', '-')} is {value}, expected 1 or more")
        if not 0 <= self.seed < 1 << 63:
            raise UsageError(f"--seed is {self.seed}, expected 0 to 2^63 - 1")
        config = self._config()
        shares = open_shares(self.stores)
        store = join(shares)
        plan = make_plan(store, config, world_size=self.world_size)
        steps = plan.steps_before(self.epochs)
        if steps == 0:
            raise PlanError(plan.without_step())
        report = self._report(plan, steps)
        report["stores"] = [
            {"path": str(share.store.path), "generation": share.store.manifest.generation, "repeats": share.repeats}
            for share in shares
        ]
        if self.list_batches:
            report["batches"] = [self._batch(store, plan, step) for step in range(steps)]
        if self.json:
            print_json(report)
        else:
            _print_report(report)
        return 0

    def _config(self) -> LoaderConfig:
        from bucketline.loader.config import LoaderConfig
        from bucketline.loader.plan import Remainder
        from bucketline.loader.row_order import Shuffle

        for name, choices in (("remainder", Remainder), ("shuffle", Shuffle)):
            if getattr(self, name) not in set(choices):
                raise UsageError(f"--{name} is {getattr(self, name)!r}, expected one of {', '.join(choices)}")
        return LoaderConfig(
            batch_size=self.batch_size,
            batch_pixels=self.batch_pixels,
            batch_tokens=self.batch_tokens,
            batch_multiple=self.batch_multiple,
            accumulation=self.accum,
            seed=self.seed,
            split=self.split,
            remainder=Remainder(self.remainder),
            epochs=self.epochs,
            shuffle=Shuffle(self.shuffle),
            shuffle_window=self.shuffle_window,
        )

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
