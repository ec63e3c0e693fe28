"""Run all benchmark cases, each in a separate process, or one by name.

`python -m bucketline.bench` uses sizes that take minutes; `--full` uses the sizes that the targets refer to.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path  # noqa: TC003 - tyro reads it
from typing import TYPE_CHECKING

from bucketline.bench.harness import header, print_table
from bucketline.command_line import guarded, print_json
from bucketline.errors import BucketlineError, UsageError

if TYPE_CHECKING:
    from bucketline.bench.report import Document

MODULES = {  # of `bucketline.bench`
    "against_peers": "peers.against_peers",
    "hot_gather": "store.hot_gather",
    "cold_gather": "store.cold_gather",
    "open_cost": "store.open_cost",
    "ragged_text": "loader.ragged_text",
    "quantised_text": "loader.quantised_text",
    "plan_cost": "loader.plan_cost",
    "first_batch": "loader.first_batch",
    "delivery": "loader.delivery",
    "delivery_columns": "loader.delivery_columns",
    "network_delivery": "loader.network_delivery",
    "remote_delivery": "loader.remote_delivery",
    "remote_peers": "peers.remote_peers",
    "busy_trainer": "loader.busy_trainer",
    "rank_memory": "loader.rank_memory",
    "ingest_stages": "ingest.stages",
    "ingest_memory": "ingest.memory",
    "ingest_again": "ingest.repack",
    "listing_against_store": "ingest.listing_against_store",
    "ingest_import": "ingest.cache_import",
    "training": "train.loader_share",
    "checkpoint_pause": "train.checkpoint_pause",
    "base_error": "train.base_error",
}
QUICK: dict[str, tuple[str, ...]] = {
    "against_peers": ("--batches-per-bucket", "4", "--repeats", "2", "--least-s", "0.3", "--ways", "1"),
    "hot_gather": ("--rows-per-shard", "64", "--batches", "48"),
    "ragged_text": ("--captions-per-shard", "6", "--batches", "4", "--repeats", "3", "--depths", "8", "32"),
    "quantised_text": ("--rows", "96", "--batches", "12", "--repeats", "3"),
    "cold_gather": ("--size-mib", "256", "--batches", "32", "--batches-of-get", "2", "--repeats", "3", "--depths", "8", "32"),
    "open_cost": ("--rows", "1000", "1000000", "--shards", "1", "30", "100"),
    "ingest_stages": ("--repeats", "3"),
    "ingest_memory": ("--repeats", "1"),
    "ingest_again": ("--repeats", "1"),
    "ingest_import": ("--repeats", "3"),
    "listing_against_store": ("--samples", "100000", "200000", "--shards", "10", "40", "--repeats", "3"),
    "plan_cost": (),
    "first_batch": ("--rows", "1000000"),
    "delivery": ("--rows-per-shard", "64", "--batches", "96", "--repeats", "3"),
    "delivery_columns": ("--rows-per-shard", "32", "--batches", "48", "--repeats", "3"),
    "network_delivery": ("--rows-per-shard", "64", "--batches", "64", "--repeats", "3"),
    "remote_delivery": ("--rows-per-shard", "64", "--first-batch-rows", "10000", "100000", "--repeats", "3"),
    "remote_peers": ("--batches-per-bucket", "4", "--repeats", "1", "--ways", "1", "--cache-share", "4"),
    "busy_trainer": ("--rows-per-shard", "64", "--batches", "96", "--repeats", "3"),
    "rank_memory": ("--repeats", "1"),
    "training": ("--rows", "64", "--steps", "8", "--repeats", "5"),
    "checkpoint_pause": ("--repeats", "3"),
    "base_error": ("--repeats", "3"),
}
FULL: dict[str, tuple[str, ...]] = {
    "against_peers": (),
    "hot_gather": ("--rows-per-shard", "256", "--batches", "256"),
    "ragged_text": ("--captions-per-shard", "28", "--batches", "16"),
    "quantised_text": (),
    "cold_gather": ("--size-mib", "2048", "--batches", "384", "--batches-of-get", "8"),
    "open_cost": (),
    "plan_cost": ("--repeats", "15"),
    "first_batch": ("--repeats", "15"),
    "delivery": ("--rows-per-shard", "256", "--batches", "512"),
    "delivery_columns": ("--rows-per-shard", "128", "--batches", "256"),
    "network_delivery": ("--repeats", "15"),
    "remote_delivery": (),
    "remote_peers": ("--repeats", "2", "--ways", "1"),
    "busy_trainer": ("--rows-per-shard", "256", "--batches", "512", "--paced-batches", "100"),
    "rank_memory": ("--rows-per-shard", "256"),
    "training": ("--repeats", "20"),  # the tiny model; select the GPU models with --model
    "checkpoint_pause": ("--repeats", "9"),
    "base_error": (),
    "ingest_stages": ("--images", "400"),
    "ingest_memory": (),
    "ingest_again": ("--images", "20000"),
    "ingest_import": ("--samples", "4000"),
    "listing_against_store": (),
}


@dataclass(frozen=True, kw_only=True)
class All:
    """Run every case and print all results.

    To run one case: `python -m bucketline.bench NAME`, then `--full` for the sizes that the targets refer to, or `--help` for
    its options. Cases: against_peers, hot_gather, ragged_text, quantised_text, cold_gather, open_cost,
    ingest_stages, ingest_memory, ingest_again, ingest_import, listing_against_store,
    plan_cost, first_batch, delivery, delivery_columns, network_delivery,
    remote_delivery, remote_peers, busy_trainer, rank_memory, training,
    checkpoint_pause, base_error.

    Example: python -m bucketline.bench --json
    """

    full: bool = False
    """Use the sizes that the targets refer to. Takes about 12 GiB of disk and an hour."""
    only: tuple[str, ...] = ()
    """Run only these cases. Default: all."""
    publish: Path | None = None
    """Also write results.json, RESULTS.md and plots to this folder after each case, replacing earlier ones. With --only, the
    other cases' published results stay, each with the commit that it was measured at."""
    stores: Path | None = None
    """Make the stores in this folder and keep them. Default: a temporary folder."""
    json: bool = False
    """Print one JSON object."""

    def run(self) -> int:
        cases = FULL if self.full else QUICK
        if unknown := [name for name in self.only if name not in cases]:
            raise UsageError(f"--only has {', '.join(unknown)}; expected names from {', '.join(cases)}")
        from bucketline.bench.report import RESULTS, publish, read_document, with_run

        cases = {name: sizes for name, sizes in cases.items() if not self.only or name in self.only}
        about = header()  # before any output makes the working tree dirty
        document: Document = {"header": about, "results": []}
        published = document
        if self.only and self.publish is not None and (self.publish / RESULTS).exists():
            published = read_document(self.publish / RESULTS)
        failed: list[str] = []
        for name, sizes in cases.items():
            print(f"{name} {' '.join(sizes)}", file=sys.stderr)
            begun = time.monotonic()
            where = [] if self.stores is None else ["--stores", str(self.stores)]
            command = [sys.executable, "-P", "-m", f"bucketline.bench.{MODULES[name]}", *sizes, *where, "--json"]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, stdin=subprocess.DEVNULL)
            print(f"{name} took {time.monotonic() - begun:.0f} s", file=sys.stderr)
            if done.returncode:
                failed.append(name)
                print(f"the case {name} ended with {done.returncode}; see its message above", file=sys.stderr)
                continue
            found = json.loads(done.stdout)
            found["header"] |= about  # its own commit is dirty once something is published
            run = {"arguments": " ".join(sizes), "date": time.strftime("%Y-%m-%d", time.gmtime())}
            document = with_run(document, name, found, **run)
            published = with_run(published, name, found, **run)
            if self.publish is not None:
                publish(published, self.publish)
        if self.publish is not None:
            print(f"wrote {self.publish}", file=sys.stderr)
        if self.json:
            print_json(document)
        else:
            print(", ".join(f"{name} {value}" for name, value in about.items()))
            print_table(document["results"])
        if failed:
            raise BucketlineError(f"these cases failed, see their messages above: {', '.join(failed)}")
        return 0


def main() -> int:
    """Run the case that the first argument names, or all cases."""
    if len(sys.argv) > 1 and sys.argv[1] in QUICK:
        name = sys.argv.pop(1)
        if sys.argv[1:2] == ["--full"]:
            sys.argv[1:2] = FULL[name]
        return int(importlib.import_module(f"bucketline.bench.{MODULES[name]}").main())

    import tyro

    return guarded(lambda: tyro.cli(All, prog="python -m bucketline.bench", config=(tyro.conf.FlagCreatePairsOff,)).run())


if __name__ == "__main__":
    sys.exit(main())
