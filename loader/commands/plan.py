"""`loader plan`: print what an epoch reads, without reading it."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from bucketline.command_line import counted, human_bytes, one_line, print_json, printable
from bucketline.errors import UsageError
from bucketline.loader.commands.batch_options import BatchOptions
from bucketline.loader.config import Remainder
from bucketline.typed_json import encode

if TYPE_CHECKING:
    from rich.console import Console

    from bucketline.loader.config import LoaderConfig
    from bucketline.loader.plan.bill import Bill
    from bucketline.loader.plan.plan import Plan
    from bucketline.store.read.store import OpenShards

_MAX_EPOCHS = 100_000  # the batches between two epochs are drawn one by one


@dataclass(frozen=True, kw_only=True)
class PlanCommand(BatchOptions):
    """Print a run's steps and each bucket's batches. Reads no rows.

    A step is an optimizer step. Its global batch is world size x rows of a micro-batch x accumulation, from one bucket.
    All rows are shuffled, and any batch may come at any step. With `--window`, each machine's part of a global batch comes from
    shards of its own, of which 16 at a time are read in one go and so many rows mixed, and the buckets take turns in proportion
    to their batches. With `--window 0`, rows come in stored order, one bucket after the other.

    With `--machines` and `--cache-bytes`, print the bill of a window as well, which is chosen by the cache if none is given:
    what that many machines, each with such a cache, fetch from the store and read from their caches in each epoch. This also
    reads the extents, 33 KB for each GiB.

    Example: loader plan photos.store --batch 8 --world-size 2 --epochs 3
    """

    SECTION = "plan: what to count and print"
    FIRST = (
        "batch",
        "world_size",
        "epochs",
        "split",
        "columns",
        "machines",
        "bandwidth",
        "prices",
        "list_batches",
        "json",
    )

    stores: tyro.conf.Positional[tuple[str, ...]]
    """Folders or URLs of the stores. Write `photos.store:3` to read a store's rows three times per pass,
    and `photos.store:0.5` to read half of them, others in each.
    A folder packed from a data set file stands for its stores and their repeats."""
    world_size: int = 1
    """Number of training ranks."""
    epochs: int = 1
    """Passes over the rows."""
    split: str = "train"
    """Split to read: train or val."""
    remainder: Remainder = Remainder.CARRY
    """How to handle rows that do not fill a global batch: carry, drop or partial."""
    columns: str | None = None
    """Roles of columns, separated by commas: target,control/depth. Adds their bytes per micro-batch; captions are not counted.
    Default: no bytes are printed."""
    ragged: str | None = None
    """Names of ragged groups that are read, separated by commas: their lines are in the bill, as those of captions are."""
    machines: int | None = None
    """Print what this many machines fetch; --world-size is a multiple of it, and by default one rank on each."""
    bandwidth: str | None = None
    """Each machine's bandwidth, and the seconds of a step that does not wait, such as 10Gbit,0.4: say whether it waits."""
    prices: str | None = None
    """Prices of 1000 requests and of a GB that leaves the store, such as 0.0004,0.09. Without them, no costs are printed."""
    list_batches: Annotated[bool, tyro.conf.arg(name="list")] = False
    """Print each step's sample ids, by rank."""
    store_option: Annotated[tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(metavar="KEY=VALUE")] = ()
    """KEY=VALUE for the client of object storage, such as region=eu-central-1; may be repeated. Secrets: by the environment."""
    json: bool = False
    """Print one JSON object."""

    def __post_init__(self) -> None:
        BatchOptions.__post_init__(self)
        self._expect_at_least(1, "world_size", "machines")
        self._expect(f"1 to {_MAX_EPOCHS}", lambda epochs: 1 <= epochs <= _MAX_EPOCHS, "epochs")
        if self.machines is None:
            for name in ("bandwidth", "prices"):
                if getattr(self, name) is not None:
                    raise UsageError(f"{self._named(name)} is for a bill; set --machines too")
            return
        if self.cache_bytes is None:
            raise UsageError("--machines is set without --cache-bytes, the size of each machine's cache")
        if self.world_size == 1:
            object.__setattr__(self, "world_size", self.machines)
        if self.world_size % self.machines:
            raise UsageError(f"--world-size is {self.world_size}, expected a multiple of --machines {self.machines}")

    def run(self) -> int:
        from bucketline.loader.mixture import join, open_shares
        from bucketline.loader.plan.make_plan import make_plan, plan_counts

        shares = open_shares(self.stores, self.remote())
        store = join(shares)
        own = {} if self.machines is None or self.window == 0 else {"lanes": self.machines}
        config = self.for_loader(epochs=None, columns=self._roles(), ragged=names_in(self.ragged), **own)
        cache_bytes = None if self.machines is None else self.remote().cache_bytes
        plan = make_plan(store, config, world_size=self.world_size, cache_bytes=cache_bytes)
        report = plan_counts(plan, self.epochs, self.split)
        if self.columns is not None:
            self._add_bytes(report, store, config)
        report["stores"] = [
            {"path": str(share.store.place), "generation": share.store.manifest.generation, "repeats": share.repeats}
            for share in shares
        ]
        report["small_buckets"] = plan.small_buckets(can_drop=False)  # who reads the report may have no --remainder
        if self.list_batches:
            report["batches"] = [self._batch(store, plan, step) for step in range(report["steps"])]
        if self.machines is not None:
            report["bill"] = encode(self._bill(store, plan, self.machines))
        if self.json:
            print_json(report)
        else:
            _print_report(report)
        if (small := plan.small_buckets()) is not None:
            print(f"warning: {printable(small)}", file=sys.stderr)
        return 0

    def _roles(self) -> tuple[str, ...]:
        return ("target",) if self.columns is None else names_in(self.columns)

    def _add_bytes(self, report: dict[str, Any], store: OpenShards, config: LoaderConfig) -> None:
        """Add to each bucket's entry the bytes of the requested columns in a rank's micro-batch."""
        from bucketline.loader.collate.columns import make_conditioning

        report["columns"] = list(config.columns)
        for entry in report["buckets"]:
            bucket = store.bucket(entry["name"])
            requested = make_conditioning(store, [bucket], config).columns
            names = [name for column in requested for name in (column.name, column.present) if name is not None]
            row_bytes = sum(bucket.column(name).row_bytes for name in names)
            entry["column_bytes"] = row_bytes * config.rows_of(bucket)

    def _bill(self, store: OpenShards, plan: Plan, machines: int) -> Bill:
        from bucketline.loader.plan.bill import make_bill, parse_bandwidth, parse_prices, store_lines
        from bucketline.loader.plan.cache_needs import CacheNeeds

        cache_bytes = self.remote().cache_bytes
        assert cache_bytes is not None
        needs = CacheNeeds(store, plan, machines)
        if (reason := needs.why_too_small(cache_bytes)) is not None:
            raise UsageError(reason)
        if not plan.window:
            order = "in stored order" if plan.window == 0 else "shuffled, since the cache holds the store"
            raise UsageError(f"a bill is of rows that are mixed in windows, and all are {order}; set --window 4096")
        return make_bill(
            store_lines(store, plan, self.split, ragged=names_in(self.ragged), roles=self._roles()),
            plan,
            machines=machines,
            epochs=max(2, self.epochs),
            cache_bytes=cache_bytes,
            ring_bytes=needs.ring_of(cache_bytes),
            kept_bytes=needs.kept_bytes,
            step_bytes=None if self.bandwidth is None else parse_bandwidth(self.bandwidth, "--bandwidth"),
            prices=None if self.prices is None else parse_prices(self.prices, "--prices"),
        )

    def _batch(self, store: OpenShards, plan: Plan, step: int) -> dict[str, Any]:
        shares = plan.draw([(step, rank) for rank in range(self.world_size)], self.world_size)
        bucket = store.bucket(shares[0].bucket)
        ids = [bucket.sample_ids(share.rows) for share in shares]
        return {"step": step, "epoch": shares[0].epoch, "bucket": bucket.name, "ranks": ids}


def names_in(text: str | None) -> tuple[str, ...]:
    """Return the names in a list that is separated by commas."""
    return () if text is None else tuple(name.strip() for name in text.split(","))


def _print_report(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    if len(report["stores"]) > 1 or report["stores"][0]["repeats"] > 1:
        for store in report["stores"]:
            console.print(f"{one_line(str(store['path']))} x {store['repeats']}", highlight=False, markup=False, soft_wrap=True)
    console.print(f"{counted(report['steps'], 'step')}, {counted(report['rows'], 'row')} delivered")
    headings = ("bucket", "rows", "global batch", "batches", "carried", "repeats")
    table = Table(*headings, *(["columns per micro-batch"] if "columns" in report else []))
    for bucket in report["buckets"]:
        values = (bucket[name] for name in ("name", "rows", "global_batch", "batches", "carried", "repeats"))
        table.add_row(*map(str, values), *([human_bytes(bucket["column_bytes"])] if "columns" in report else []))
    console.print(table)
    if "bill" in report:
        _print_bill(console, report["bill"])
    for batch in report.get("batches", []):
        console.print(f"step {batch['step']} (epoch {batch['epoch']}) {batch['bucket']}", highlight=False)
        for rank, ids in enumerate(batch["ranks"]):
            console.print(f"  rank {rank}: {', '.join(map(one_line, ids))}", highlight=False, markup=False, soft_wrap=True)


def _print_bill(console: Console, bill: dict[str, Any]) -> None:
    from rich.table import Table

    first = bill["epochs"][0]
    has_costs, is_timed = first["cost"] is not None, first["waits"] is not None
    more = [*(["steps wait"] if is_timed else []), *(["costs"] if has_costs else [])]
    table = Table("epoch", "requests", "from the store", "times the store", "from the caches", *more)
    for epoch in bill["epochs"]:
        values = [
            str(epoch["epoch"]),
            f"{epoch['gets']:,}",
            human_bytes(epoch["store_bytes"]),
            f"{epoch['times_store']:.3f}",
            human_bytes(epoch["cache_bytes"]),
            *(["yes" if epoch["waits"] else "no"] if is_timed else []),
            *([f"{epoch['cost']:.2f}"] if has_costs else []),
        ]
        table.add_row(*values)
    say = partial(console.print, highlight=False, markup=False, soft_wrap=True)
    say(
        f"{counted(bill['machines'], 'machine')} with {counted(bill['lanes'], 'lane')} together, caches of "
        f"{human_bytes(bill['cache_bytes'])} each, {human_bytes(bill['ring_bytes'])} of it for lines that are not kept"
    )
    console.print(table)
    goal = "no step waits after the first epoch" if is_timed else "no line is fetched twice in an epoch"
    say(f"the smallest cache with which {goal}: {human_bytes(bill['smallest_cache_bytes'])}")
    for line in bill["assumed"]:
        say(f"assumed: {line}")
