"""Runs `ingest pack` in ranks to which something happens at a given moment, without a launcher. Not a test itself.

Arguments: for each run a store, a number of ranks and a failure (see `noted_pack`), `s,3,1:row:20:kill`, then `--` and what
`ingest` is told, with `{}` for the store and `RANK` for the rank. Prints a JSON list: of each run the ranks' exit codes,
and what they wrote to stdout and stderr; the exit code of a rank that had not ended after some minutes, and was killed, is
null. The encoders are imported once. The ids of what each rank committed are in `STORE.committed.RANK`; of a store in a
bucket, in the file that the variable NOTES names, with the rank.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import tempfile
from pathlib import Path
from time import monotonic
from typing import Any

from tests.commands import kept_port
from tests.fault.ground import import_for_packs
from tests.fault.noted_pack import ended_within, fork_pack

HUNG_S = 300.0  # a run takes 5 s on a quiet machine; a busy one must not look hung


def run(num_ranks: int, failure: str, asked: list[str], notes: str | None = None) -> dict[str, Any]:
    """Run the ranks to their ends; `notes`, or else STORE.committed, is what the names of their notes begin with."""
    exchange: Any = importlib.import_module("bucketline.ingest.parallel.exchange")
    exchange.CHECK_S = (0.0, 0.0)  # at every image; the images here take milliseconds
    with kept_port() as port, tempfile.TemporaryDirectory() as folder:
        os.environ |= {"WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        notes = notes or f"{asked[2].removeprefix('file://')}.committed"
        children = [
            fork_pack([part.replace("RANK", str(rank)) for part in asked], notes, Path(folder, f"{rank}"), failure, rank)
            for rank in range(num_ranks)
        ]
        until = monotonic() + HUNG_S
        codes = [ended_within(child, max(0.0, until - monotonic())) for child in children]
        written = {
            name: [Path(folder, f"{rank}.{name}").read_text(encoding="utf-8") for rank in range(num_ranks)]
            for name in ("out", "err")
        }
    return {"codes": codes, **written}


def main() -> None:
    """Run one after the other."""
    at = sys.argv.index("--")
    import_for_packs()
    runs = []
    for asked in sys.argv[1:at]:
        store, num_ranks, failure = asked.split(",")
        told = [part.format(store) for part in sys.argv[at + 1 :]]
        runs.append(run(int(num_ranks), failure, told, os.environ.get("NOTES")))
    print(json.dumps(runs))


if __name__ == "__main__":
    main()
