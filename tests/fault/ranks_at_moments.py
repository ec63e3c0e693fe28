"""Runs `ingest pack` in several ranks to which something happens at a given moment, without a launcher. Not a test itself.

Arguments: for each run a store, a number of ranks and a failure (see `noted_pack`), `s,3,1:20:kill`, then `--` and what
`ingest` is told, with `{}` for the store and `RANK` for the rank. Prints a JSON list: of each run the ranks' exit codes, and
what they wrote to stdout and stderr; the exit code of a rank that had not ended after a minute, and was killed, is null. The
encoders are imported once. The ids of what each rank committed are in `STORE.committed.RANK`.
"""

from __future__ import annotations

import importlib
import json
import os
import socket
import sys
import tempfile
import traceback
from pathlib import Path
from time import monotonic
from typing import Any

from tests.fault.noted_pack import be_rank
from tests.fault.told_to_stop import ended_within

HUNG_S = 300.0  # a run takes 5 s on a quiet machine; a busy one must not look hung


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def fork_rank(rank: int, failure: str, asked: list[str], output: Path, notes: str) -> int:
    """Start a rank whose output goes to files; give its process id."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            for fd, name in ((1, "out"), (2, "err")):
                os.dup2(os.open(output / f"{name}.{rank}", os.O_WRONLY | os.O_CREAT), fd)
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            code = be_rank(rank, notes, failure, [part.replace("RANK", str(rank)) for part in asked])
        except SystemExit as end:
            code = int(str(end.code))
        except BaseException:  # noqa: BLE001 - said where it can be seen; a forked process must not continue from here
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    return child


def run(num_ranks: int, failure: str, asked: list[str], notes: str | None = None) -> dict[str, Any]:
    """Run the ranks to their ends; `notes`, or else STORE.committed, is what the names of their notes begin with."""
    os.environ |= {"WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    with tempfile.TemporaryDirectory() as folder:
        notes = notes or f"{asked[2].removeprefix('file://')}.committed"
        children = [fork_rank(rank, failure, asked, Path(folder), notes) for rank in range(num_ranks)]
        until = monotonic() + HUNG_S
        codes = [ended_within(child, max(0.0, until - monotonic())) for child in children]
        written = {
            name: [(Path(folder) / f"{name}.{rank}").read_text() for rank in range(num_ranks)] for name in ("out", "err")
        }
    return {"codes": codes, **written}


def main() -> None:
    """Run one after the other."""
    at = sys.argv.index("--")
    import torch

    torch.set_num_threads(1)
    modules = ("diffusers.models.autoencoders.autoencoder_kl", "transformers.models.bert", "rich.progress")
    for module in ("bucketline.ingest.pack", "bucketline.ingest.cli", "bucketline.ingest.parallel.exchange", *modules):
        importlib.import_module(module)
    exchange: Any = importlib.import_module("bucketline.ingest.parallel.exchange")
    exchange.CHECK_S = (0.0, 0.0)  # at every image; the images here take milliseconds
    runs = []
    for asked in sys.argv[1:at]:
        store, num_ranks, failure = asked.split(",")
        runs.append(run(int(num_ranks), failure, [part.format(store) for part in sys.argv[at + 1 :]]))
    print(json.dumps(runs))


if __name__ == "__main__":
    main()
