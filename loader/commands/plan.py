"""`loader plan`: print what an epoch reads, without reading it."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from bucketline.command_line import counted, human_bytes, one_line, print_json, printable
from bucketline.errors import UsageError
from bucketline.loader.commands.planned_options import PlannedOptions
from bucketline.typed_json import encode

if TYPE_CHECKING:
    from rich.console import Console

    from bucketline.loader.config import LoaderConfig
    from bucketline.loader.plan.bill import Bill
    from bucketline.loader.plan.plan import Plan
    from bucketline.loader.plan.rates import Rates
    from bucketline.store.read.store import OpenShards

_MAX_EPOCHS = 100_000  # the batches between two epochs are drawn one by one


@dataclass(frozen=True, kw_only=True)
class PlanCommand(PlannedOptions):
    """Print a run's steps and each bucket's batches. Reads no rows.

    A step is an optimizer step. Its global batch is world size x rows of a micro-batch x accumulation, from one bucket.
    All rows are shuffled, and any batch may come at any step. With `--window`, each machine's part of a global batch comes from
    shards of its own, of which 16 at a time are read in one go and so many rows mixed, and the buckets take turns in proportion
    to their batches. With `--window 0`, rows come in stored order, one bucket after the other.

    With `--world-size 64@8` and `--cache-bytes`, print the bill of a window as well, which is chosen by the cache if none is
    given: what that many machines (8), each with such a cache, fetch from the store and read from their caches in each epoch.
    This also reads the extents, 33 KB for each GiB.

    Example: loader plan photos.store --batch 8 --world-size 2 --epochs 3
    """

    SECTION = "plan: what to count and print"
    FIRST = ("of_run", "batch", "world_size", "epochs", "split", "seed", "window", "columns", "bill", "list_batches", "json")

    epochs: int = 1
    """Passes over the rows."""
    columns: Annotated[str | None, tyro.conf.arg(metavar="NAME,NAME")] = None
    """Roles of columns, such as target,control/depth: print their bytes per micro-batch; and ragged groups, whose lines are
    then in the bill, as those of captions are. Default: no bytes are printed."""
    bill: Annotated[str | None, tyro.conf.arg(metavar="KEY=NUMBER,…")] = None
    """Rates for the bill, to say whether steps wait, of a machine's bandwidth and the seconds of a step that does not, such as
    bandwidth=10Gbit,step=0.4; and what it costs, of the prices of 1000 requests and of a GB that leaves the store, such as
    requests=0.0004,egress=0.09."""
    list_batches: Annotated[bool, tyro.conf.arg(name="list")] = False
    """Print each step's sample ids, by rank."""
    json: bool = False
    """Print one JSON object."""

    def __post_init__(self) -> None:
        PlannedOptions.__post_init__(self)
        self._expect(f"1 to {_MAX_EPOCHS}", lambda epochs: 1 <= epochs <= _MAX_EPOCHS, "epochs")
        if self.of_run is not None:
            return
        if self.world_size.machines is not None and self.cache_bytes is None:
            raise UsageError(f"--world-size is {self.world_size} without --cache-bytes, the size of each machine's cache")
        if self.bill is not None and self.world_size.machines is None:
            raise UsageError(f"--bill is {self.bill}, and it is of machines; give their number as well: --world-size 64@8")

    def run(self) -> int:
        from bucketline.loader.mixture import join
        from bucketline.loader.plan.make_plan import make_plan, plan_counts
        from bucketline.loader.plan.rates import parse_rates

        rates = parse_rates(self.bill or "", "--bill")
        shares, config, world_size, _ = self.planned(epochs=None, columns=("target",))
        store = join(shares)
        roles, groups = self._columns(store)
        config = replace(config, columns=roles or ("target",), ragged=groups)
        cache_bytes = self.remote().cache_bytes
        machines = self.world_size.machines if self.of_run is None else config.lanes if cache_bytes is not None else None
        if self.bill is not None and machines is None:
            raise UsageError(f"--bill is {self.bill}, and --run {self.of_run} has no window, or --cache-bytes is not given")
        plan = make_plan(store, config, world_size=world_size, cache_bytes=None if machines is None else cache_bytes)
        report = plan_counts(plan, self.epochs, config.split)
        if roles:
            self._add_bytes(report, store, config)
        report["stores"] = [
            {"path": str(share.store.place), "generation": share.store.manifest.generation, "repeats": share.repeats}
            for share in shares
        ]
        report["small_buckets"] = plan.small_buckets(can_drop=False)  # who reads the report may have no --split
        if self.list_batches:
            report["batches"] = [_batch(store, plan, step, world_size) for step in range(report["steps"])]
        if machines is not None:
            report["bill"] = encode(self._bill(store, plan, config, machines, rates))
        if self.json:
            print_json(report)
        else:
            _print_report(report)
        if (small := plan.small_buckets()) is not None:
            print(f"warning: {printable(small)}", file=sys.stderr)
        return 0

    def _columns(self, store: OpenShards) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the roles and the ragged groups that are named."""
        names = () if self.columns is None else tuple(name.strip() for name in self.columns.split(","))
        return tuple(one for one in names if one not in store.ragged), tuple(one for one in names if one in store.ragged)

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

    def _bill(self, store: OpenShards, plan: Plan, config: LoaderConfig, machines: int, rates: Rates) -> Bill:
        from bucketline.loader.plan.bill import make_bill, store_lines
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
            store_lines(store, plan, config.split, ragged=config.ragged, roles=config.columns),
            plan,
            machines=machines,
            epochs=max(2, self.epochs),
            cache_bytes=cache_bytes,
            ring_bytes=needs.ring_of(cache_bytes),
            kept_bytes=needs.kept_bytes,
            step_bytes=rates.step_bytes,
            prices=rates.prices,
        )


def _batch(store: OpenShards, plan: Plan, step: int, world_size: int) -> dict[str, Any]:
    shares = plan.draw([(step, rank) for rank in range(world_size)], world_size)
    bucket = store.bucket(shares[0].bucket)
    ids = [bucket.sample_ids(share.rows) for share in shares]
    return {"step": step, "epoch": shares[0].epoch, "bucket": bucket.name, "ranks": ids}


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
