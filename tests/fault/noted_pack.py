"""`ingest pack` in ranks to which something happens at a given moment, and that note what they have committed. Not a test.

`python -m tests.fault.noted_pack RUN... -- ASKED...` runs what `ingest` is told, `{}` being the store and `RANK` the rank, for
each run: a store, a number of ranks and a failure, `s,3,1:row:20:kill`. It prints a JSON list: of each run the ranks' exit
codes, null of a rank that had to be killed after some minutes, and what they wrote to stdout and stderr. The encoders are
imported once. Each rank commits after every image; the ids of what it has committed are in `STORE.committed.RANK`, or, of a
store in a bucket, in the file that the variable NOTES names, with the rank. Under a launcher, which sets RANK, it is that rank
itself: `NOTES FAILURE -- ASKED...`.

A failure is `-` for none, or `RANK:MOMENT:NAME`: what happens to that rank, and when. A moment is a name below and `:N` for the
N-th call of its function, otherwise the first, before it, or after it if `+` follows.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any
from unittest.mock import Mock

import lmdb

from bucketline.errors import ModelError
from tests.commands import ROOT, call, kept_port, spawn
from tests.fault.apart import Apart, How
from tests.fault.ground import import_for_packs

HUNG_S = 300.0  # a run takes 5 s on a quiet machine; a busy one must not look hung

MOMENTS = {
    "list": ("bucketline.ingest.packing.run", "take_apart"),
    "meet": ("bucketline.ingest.parallel.ranks", "RunFiles.meet"),
    "load": ("bucketline.ingest.pipeline.model", "load_text_encoder"),
    "commit": ("bucketline.store.write.shard_writer", "ShardWriter._write"),
    "row": ("bucketline.store.write.shard_writer", "_put_block"),
    "end": ("bucketline.ingest.pipeline.slice_packer", "RowWriter.__exit__"),  # only the last shard is to be sealed
    "done": ("bucketline.ingest.parallel.ranks", "PackRanks.done"),
    "compact": ("bucketline.store.write.seal", "_put_in_order"),
    "sidecar": ("bucketline.store.write.seal", "write_durably"),
    "move": ("bucketline.store.write.seal", "move_durably"),
    "finish": ("bucketline.ingest.pack", "finish"),
    "publish": ("bucketline.store.write.publish", "publish"),
    "manifest": ("bucketline.store.format.manifest", "write_or_explain"),
    "send": ("bucketline.store.transfer", "Uploader._send"),
    "note": ("bucketline.store.transfer", "write_or_explain"),
    "shorten": ("bucketline.store.transfer", "make_sparse"),
    "url-commit": ("bucketline.store.change.commit", "commit"),
    "let-go": ("bucketline.store.sync.working", "WorkingStore._let_go"),
    "never": ("bucketline.store.change.compact", "compact"),  # no pack calls it
}


FULL = lmdb.DiskError("mdb_txn_commit: No space left on device")


def full_for_sealing() -> None:
    sealing: Any = importlib.import_module("bucketline.store.write.seal")
    sealing._put_in_order = Mock(side_effect=FULL)


NOTED = threading.Event()  # a signal has come to the thread that hears signals


def note_signals() -> None:
    interrupts: Any = importlib.import_module("bucketline.ingest.parallel.signals").Interrupts
    note = interrupts._note

    def noting(*args: Any) -> None:
        note(*args)
        NOTED.set()

    interrupts._note = noting


def signal_to_process(number: int) -> None:
    """Send a signal as the system does: to the main thread, whichever one is at its moment."""
    signal.pthread_kill(threading.main_thread().ident or 0, number)


def two_ctrl_c() -> None:
    """Press twice; not before the first was heard, or the system makes one of both."""
    signal_to_process(signal.SIGINT)
    assert NOTED.wait(30)
    signal_to_process(signal.SIGINT)


def stop_for_a_while() -> None:
    """Be stopped, and continued by another process."""
    pid = os.getpid()
    if os.fork() == 0:
        time.sleep(PAUSED_S)
        os.kill(pid, signal.SIGCONT)
        os._exit(0)
    os.kill(pid, signal.SIGSTOP)


def clock_apart() -> None:
    real = time.time
    time.time = lambda: real() + CLOCK_APART_S


PAUSED_S, CLOCK_APART_S = 3.0, 2 * 86400.0
FAILURES: dict[str, Callable[[], object]] = {
    "disk": Mock(side_effect=FULL),
    "sealing": full_for_sealing,
    "defect": Mock(side_effect=RuntimeError("nobody expects this")),
    "model": Mock(side_effect=ModelError("the model is not as on the other ranks")),
    "term": lambda: signal_to_process(signal.SIGTERM),
    "ctrl-c": lambda: signal_to_process(signal.SIGINT),
    "two-ctrl-c": two_ctrl_c,
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "late": lambda: time.sleep(PAUSED_S),
    "clock": clock_apart,
    "pause": stop_for_a_while,
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
}


def fail_at(failure: str, rank: int) -> None:
    """Have the failure at its moment, if it is this rank's."""
    of_rank, _, rest = failure.partition(":")
    if of_rank != str(rank):
        return
    moment, _, name = rest.rpartition(":")
    what, _, number = moment.partition(":")
    module, path = MOMENTS[what]
    owner: Any = importlib.import_module(module)
    *outer, last = path.split(".")
    for part in outer:
        owner = getattr(owner, part)
    function, left, after = getattr(owner, last), [int(number.rstrip("+") or 1)], number.endswith("+")

    def failing(*args: Any, **kwargs: Any) -> Any:
        left[0] -= 1
        is_moment = left[0] == 0
        if is_moment and not after:
            FAILURES[name]()
        result = function(*args, **kwargs)
        if is_moment and after:
            FAILURES[name]()
        return result

    setattr(owner, last, failing)


def commit_often() -> None:
    """Commit after every image and close a shard after a few rows, so that there are many moments to die at."""
    writer: Any = importlib.import_module("bucketline.store.write.shard_writer")
    writer.COMMIT_BYTES, writer.FLUSH_AFTER_S = 1, -1.0
    packer: Any = importlib.import_module("bucketline.ingest.pipeline.slice_packer")
    packer.ShardFill.is_full = lambda self, _: self.num_rows > 12


def note_commits(path: str) -> None:
    from bucketline.store.format.schema import decode_record
    from bucketline.store.write.seal import RECORD_HEAD

    writer: Any = importlib.import_module("bucketline.store.write.shard_writer").ShardWriter
    write = writer._write
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def noted(self: Any, chosen: list[Any]) -> None:
        write(self, chosen)
        records = [record[RECORD_HEAD.size :] for own in chosen for record in own.records]
        ids = [decode_record(record, "a record that was committed").id for record in records]
        os.write(fd, "".join(f"{sample_id}\n" for sample_id in ids).encode())

    writer._write = noted


def prepare_rank(rank: int, notes: str, failure: str) -> None:
    """Commit often, note what is committed, and have the failure, if it is this rank's."""
    commit_often()
    note_commits(f"{notes}.{rank}")
    note_signals()
    fail_at(failure, rank)


def be_rank(rank: int, notes: str, failure: str, asked: list[str]) -> int:
    prepare_rank(rank, notes, failure)
    return int(importlib.import_module("bucketline.ingest.cli").main(asked))


def fork_pack(asked: list[str], notes: str, failure: str = "-", rank: int | None = None) -> Apart:
    gc.collect()  # what libraries left: a signal in one of their `__del__` in the child would be printed, and lost

    def work() -> dict[str, Any]:
        if rank is not None:
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        prepare_rank(rank or 0, notes, failure)
        return asdict(call("ingest", *asked))

    return Apart(work)


def ended_within(process: Apart, limit_s: float) -> tuple[int | None, str, str]:
    """Return a pack's exit code, None if it had to be killed, and what it wrote to stdout and stderr."""
    ended = process.ended(limit_s)
    if ended.how is How.DONE:
        return ended.gave["code"], ended.gave["out"], ended.gave["err"]
    if ended.how is How.DEFECT and "KeyboardInterrupt" in ended.said:  # before it listens
        return 128 + signal.SIGINT, "", ""
    codes = {How.HUNG: None, How.DIED: -ended.signal or 1}
    return codes.get(ended.how, 1), "", "" if ended.how in codes else f"Traceback: {ended.said}\n"


def run(num_ranks: int, failure: str, asked: list[str], notes: str | None = None) -> dict[str, Any]:
    """Run the ranks to their ends; `notes`, or else STORE.committed, is what the names of their notes begin with."""
    ranks_module: Any = importlib.import_module("bucketline.ingest.parallel.ranks")
    ranks_module.CHECK_S = (0.0, 0.0)  # at every image; the images here take milliseconds
    with kept_port() as port:
        os.environ |= {"WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        notes = notes or f"{asked[2].removeprefix('file://')}.committed"
        ranks = [
            fork_pack([part.replace("RANK", str(rank)) for part in asked], notes, failure, rank) for rank in range(num_ranks)
        ]
        until = time.monotonic() + HUNG_S
        codes, out, err = zip(*(ended_within(rank, max(0.0, until - time.monotonic())) for rank in ranks), strict=True)
    return {"codes": [*codes], "out": [*out], "err": [*err]}


def run_apart(runs: Sequence[str], asked: Sequence[object], **environment: str) -> list[dict[str, Any]]:
    """Run them in a process of its own, as the command above; return what it prints."""
    command = [sys.executable, "-m", "tests.fault.noted_pack", *runs, "--", *asked]
    found: list[dict[str, Any]] = json.loads(spawn(command, PYTHONPATH=str(ROOT), **environment).done().out)
    return found


def main() -> int:
    at = sys.argv.index("--")
    given, asked = sys.argv[1:at], sys.argv[at + 1 :]
    if "RANK" in os.environ:
        for imported in ("bucketline.ingest.cli", "bucketline.ingest.pack"):  # while it imports, it ends as any process does
            importlib.import_module(imported)
        return be_rank(int(os.environ["RANK"]), given[0], given[1], asked)
    import_for_packs()
    runs = []
    for store, num_ranks, failure in (one.split(",") for one in given):
        runs.append(run(int(num_ranks), failure, [part.format(store) for part in asked], os.environ.get("NOTES")))
    print(json.dumps(runs))
    return 0


if __name__ == "__main__":
    sys.exit(main())
