"""All cases, one after the other, each in a process of its own; or one by its name.

`python -m bucketline.bench` at sizes that take minutes, `--full` at those that the marks are for.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path  # noqa: TC003 - tyro reads it
from typing import Any

from bucketline.bench.harness import header, print_table
from bucketline.commands import guarded, print_json
from bucketline.errors import BucketlineError, UsageError

QUICK: dict[str, tuple[str, ...]] = {
    "against_peers": ("--batches-per-bucket", "4", "--repeats", "2", "--least-s", "0.3", "--ways", "1"),
    "disk_bytes": ("--row-kib", "8", "32", "128", "--rows", "1000"),
    "hot_gather": ("--rows-per-shard", "64", "--batches", "48"),
    "ragged_text": ("--captions-per-shard", "6", "--batches", "4", "--repeats", "3", "--depths", "8", "32"),
    "cold_gather": ("--size-mib", "256", "--batches", "32", "--batches-of-get", "2", "--repeats", "3", "--depths", "8", "32"),
    "open_cost": ("--rows", "1000", "1000000", "--shards", "1", "30", "100"),
    "ingest_stages": ("--repeats", "3"),
    "ingest_memory": ("--repeats", "1"),
    "ingest_again": ("--repeats", "1"),
    "plan_cost": (),
    "first_batch": ("--rows", "1000000"),
    "delivery": ("--rows-per-shard", "64", "--batches", "96", "--repeats", "3"),
    "busy_trainer": ("--rows-per-shard", "64", "--batches", "96", "--repeats", "3"),
    "rank_memory": ("--repeats", "1"),
    "batch_parts": ("--rows-per-shard", "64", "--batches", "96", "--repeats", "3"),
    "training": ("--rows", "64", "--steps", "8", "--repeats", "5"),
}
FULL: dict[str, tuple[str, ...]] = {
    "against_peers": (),
    "disk_bytes": (),
    "hot_gather": ("--rows-per-shard", "256", "--batches", "256"),
    "ragged_text": ("--captions-per-shard", "28", "--batches", "16"),
    "cold_gather": ("--size-mib", "2048", "--batches", "384", "--batches-of-get", "8"),
    "open_cost": (),
    "plan_cost": ("--repeats", "15"),
    "first_batch": ("--repeats", "15"),
    "delivery": ("--rows-per-shard", "256", "--batches", "512"),
    "busy_trainer": ("--rows-per-shard", "256", "--batches", "512", "--paced-batches", "100"),
    "rank_memory": ("--rows-per-shard", "256"),
    "batch_parts": ("--rows-per-shard", "256"),
    "training": ("--repeats", "20"),  # of the tiny model; those for a GPU are asked for by --model
    "ingest_stages": ("--images", "400"),
    "ingest_memory": (),
    "ingest_again": ("--images", "2000"),
}


@dataclass(frozen=True, kw_only=True)
class All:
    """Run every case and print the figures of all.

    A case alone: `python -m bucketline.bench NAME`, `--full` after it for the sizes that the marks are for, and `--help` for
    what it takes. Cases: against_peers, disk_bytes, hot_gather, ragged_text, cold_gather, open_cost, ingest_stages,
    ingest_memory, ingest_again, plan_cost, first_batch, delivery, busy_trainer, rank_memory, batch_parts, training.

    Example: python -m bucketline.bench --json
    """

    full: bool = False
    """At the sizes that the marks are for: some 12 GiB of disk and an hour."""
    only: tuple[str, ...] = ()
    """Run these cases alone."""
    publish: Path | None = None
    """Leave results.json, RESULTS.md and plots in this folder as well, in the place of those of a run before; after each case,
    so that a run that is broken off leaves what it had."""
    stores: Path | None = None
    """Make the stores in this folder and keep them; temporary ones unless given."""
    json: bool = False
    """Print one JSON object."""

    def run(self) -> int:
        cases = FULL if self.full else QUICK
        if unknown := [name for name in self.only if name not in cases]:
            raise UsageError(f"--only has {', '.join(unknown)}; expected of {', '.join(cases)}")
        results: list[dict[str, Any]] = []
        besides: dict[str, Any] = {}
        cases = {name: sizes for name, sizes in cases.items() if not self.only or name in self.only}
        about = header()  # before anything that is left makes the working tree another one
        configuration: dict[str, str] = {}
        document: dict[str, Any] = {"header": about, "results": results}
        failed: list[str] = []
        for name, sizes in cases.items():
            print(f"{name} {' '.join(sizes)}", file=sys.stderr)
            begun = time.monotonic()
            where = [] if self.stores is None else ["--stores", str(self.stores)]
            command = [sys.executable, "-m", f"bucketline.bench.{name}", *sizes, *where, "--json"]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, stdin=subprocess.DEVNULL)
            print(f"{name} took {time.monotonic() - begun:.0f} s", file=sys.stderr)
            if done.returncode:
                failed.append(name)
                print(f"the case {name} ended with {done.returncode}; its own message stands above", file=sys.stderr)
                continue
            found = json.loads(done.stdout)
            results += found["results"]
            besides |= {key: value for key, value in found["header"].items() if key not in about}
            configuration[name] = " ".join(sizes)
            document = {"header": {**about, **besides, "configuration": configuration}, "results": results}
            if self.publish is not None:
                from bucketline.bench.publish import publish

                publish(document, self.publish)
        if self.publish is not None:
            print(f"wrote {self.publish}", file=sys.stderr)
        if self.json:
            print_json(document)
        else:
            print(", ".join(f"{name} {value}" for name, value in about.items()))
            print_table(results)
        if failed:
            raise BucketlineError(f"cases that failed, whose messages stand above: {', '.join(failed)}")
        return 0


def main() -> int:
    """Hand the arguments to the case that the first of them names; or run all."""
    if len(sys.argv) > 1 and sys.argv[1] in QUICK:
        name = sys.argv.pop(1)
        if sys.argv[1:2] == ["--full"]:
            sys.argv[1:2] = FULL[name]
        return int(importlib.import_module(f"bucketline.bench.{name}").main())

    import tyro

    return guarded(lambda: tyro.cli(All, prog="python -m bucketline.bench", config=(tyro.conf.FlagCreatePairsOff,)).run())


if __name__ == "__main__":
    sys.exit(main())
