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
from pathlib import Path  # noqa: TC003 - a command's annotations are read
from typing import TYPE_CHECKING, NamedTuple

from bucketline.bench.harness import Case, header, print_table, run_case
from bucketline.command_line import guarded, parse_command, print_json
from bucketline.errors import BucketlineError, UsageError

if TYPE_CHECKING:
    from bucketline.bench.report import Document


class Run(NamedTuple):
    """A case, or a part of one that a flag selects, with its sizes."""

    place: str  # module of `bucketline.bench.cases`, and class
    quick: str = ""
    full: str = ""

    @property
    def case(self) -> type[Case]:
        module, _, name = self.place.partition(":")
        found: type[Case] = getattr(importlib.import_module(f"bucketline.bench.cases.{module}"), name)
        return found


RUNS = {
    "peers": Run("peers:Peers", "--batches-per-bucket 4 --repeats 2 --least-s 0.3 --ways 1"),
    "peers --remote": Run(
        "peers:RemotePeers", "--batches-per-bucket 4 --repeats 1 --ways 1 --cache-share 4", "--repeats 2 --ways 1"
    ),
    "hot": Run("hot:Hot", "--rows-per-shard 64 --batches 96 --repeats 3", "--rows-per-shard 256 --batches 512"),
    "hot --text": Run("hot:HotText", "--rows 96 --batches 12 --repeats 3"),
    "hot --busy": Run(
        "hot:HotBusy",
        "--rows-per-shard 64 --batches 96 --repeats 3",
        "--rows-per-shard 256 --batches 512 --paced-batches 100",
    ),
    "hot --rows": Run("hot:HotRows", "--samples 256 --repeats 2"),
    "hot --many": Run("hot:HotMany", "--rows 4000 --buckets 100 --shards 100 --batches 100 --repeats 2"),
    "start": Run("start:Start", "--rows 1000 1000000 --shards 1 30 100 --many-rows 4000 --many 100"),
    "start --batch": Run("start:FirstBatch", "--rows 1000000", "--repeats 15"),
    "stream": Run("stream:Stream", "--rows-per-shard 64 --first-batch-rows 10000 100000 --repeats 3"),
    "stream --machines": Run("stream:StreamMachines", "--rows-per-shard 128 --ranks 1 2 --repeats 1"),
    "stream --service": Run("stream:StreamService", "--rows-per-shard 64 --batches 64 --repeats 3", "--repeats 15"),
    "scale": Run("scale:Scale", full="--repeats 15"),
    "write": Run("writing:Write", "--rows 300 --tiny-rows 1000 --repeats 2"),
    "write --memory": Run("writing:WriteMemory", "--rows 1000 4000"),
    "pack": Run("pack:Pack", "--repeats 3", "--images 400"),
    "pack --again": Run("pack:PackAgain", "--repeats 1", "--images 20000"),
    "pack --memory": Run("pack:PackMemory", "--repeats 1"),
    "import": Run("importing:Import", "--repeats 3", "--samples 4000"),
    "train": Run("train:Train", "--rows 64 --steps 8 --repeats 5", "--repeats 20"),  # the tiny model; GPU models: --model
    "train --saves": Run("train:TrainSaves", "--repeats 3", "--repeats 9"),
    "train --references": Run("references:TrainReferences", "--repeats 3", "--repeats 15"),
}
CASES = tuple(dict.fromkeys(name.split()[0] for name in RUNS))


@dataclass(frozen=True, kw_only=True)
class All:
    """Run every case and print all results.

    To run one case: `python -m bucketline.bench NAME`, then `--full` for the sizes that the targets refer to, or `--help` for
    its options. Cases: peers (--remote), hot (--rows, --many, --text, --busy), start (--batch), stream (--machines, --service),
    scale, write (--memory), pack (--again, --memory), import, train (--saves, --references). A flag selects another
    part of a case.

    Example: python -m bucketline.bench --json
    """

    full: bool = False
    """Use the sizes that the targets refer to. Takes about 12 GiB of disk and an hour."""
    only: tuple[str, ...] = ()
    """Run only these of peers, hot, start, stream, scale, write, pack, import and train. Default: all."""
    publish: Path | None = None
    """Also write results.json, RESULTS.md and plots to this folder after each case, replacing earlier ones. With --only, the
    other cases' published results stay, each with the commit that it was measured at."""
    stores: Path | None = None
    """Make the stores in this folder and keep them. Default: a temporary folder."""
    json: bool = False
    """Print one JSON object."""

    def run(self) -> int:
        if unknown := [name for name in self.only if name not in CASES]:
            raise UsageError(f"--only has {', '.join(unknown)}; expected names from {', '.join(CASES)}")
        from bucketline.bench.report import RESULTS, publish, read_document, with_run

        runs = {name: run for name, run in RUNS.items() if not self.only or name.split()[0] in self.only}
        about = header()  # before any output makes the working tree dirty
        document: Document = {"header": about, "results": []}
        published = document
        if self.only and self.publish is not None and (self.publish / RESULTS).exists():
            published = read_document(self.publish / RESULTS)
        failed: list[str] = []
        for name, case in runs.items():
            sizes = case.full if self.full else case.quick
            print(f"{name} {sizes}", file=sys.stderr)
            begun = time.monotonic()
            where = [] if self.stores is None else ["--stores", str(self.stores)]
            command = [sys.executable, "-P", "-m", "bucketline.bench", *name.split(), *sizes.split(), *where, "--json"]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, stdin=subprocess.DEVNULL)
            print(f"{name} took {time.monotonic() - begun:.0f} s", file=sys.stderr)
            if done.returncode:
                failed.append(name)
                print(f"the case {name} ended with {done.returncode}; see its message above", file=sys.stderr)
                continue
            found = json.loads(done.stdout)
            found["header"] |= about  # its own commit is dirty once something is published
            run = {"arguments": sizes, "date": time.strftime("%Y-%m-%d", time.gmtime())}
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
    if len(sys.argv) > 1 and sys.argv[1] in CASES:
        name, given = sys.argv[1], sys.argv[2:]
        chosen = max((one for one in RUNS if one.split()[0] == name and set(one.split()[1:]) <= set(given)), key=len)
        flags, run = chosen.split()[1:], RUNS[chosen]
        own = run.full.split() if "--full" in given else [one for one in run.quick.split() if one in flags]
        return run_case(run.case, [*own, *(one for one in given if one not in (*flags, "--full"))])

    return guarded(lambda: parse_command(All, sys.argv[1:], "python -m bucketline.bench").run())


if __name__ == "__main__":
    sys.exit(main())
