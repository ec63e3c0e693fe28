"""Be `ingest pack`, or a rank of it, that commits after every image and writes down what it has committed. Not a test.

Arguments: a file, which gets `.RANK` and then the ids of the samples whose commit has returned; a failure; and what
`ingest` is told. The failure is `-` for none, or `RANK:MOMENT:NAME`: what happens to that rank, and when.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import threading
from typing import TYPE_CHECKING, Any, NoReturn

import lmdb

from bucketline.errors import ModelError
from tests.fault.packs_at_moments import commit_often, note_commits

if TYPE_CHECKING:
    from collections.abc import Callable

MOMENTS = {
    "list": ("bucketline.ingest.packing.run", "take_apart"),
    "load": ("bucketline.ingest.pipeline.model.load_encoders", "load_text_encoder"),
    "end": ("bucketline.ingest.pipeline.row_writer", "RowWriter.__exit__"),  # only the last shard is to be sealed
    "gather": ("bucketline.ingest.parallel.ranks", "PackRanks.gather"),
    "publish": ("bucketline.ingest.pack", "finish"),
}  # and a number: at that block's writing


def full_disk() -> NoReturn:
    raise lmdb.DiskError("mdb_txn_commit: No space left on device")


def full_for_sealing() -> None:
    """Have the disk refuse whatever is sealed from now on."""
    sealing: Any = importlib.import_module("bucketline.store.write.seal")
    sealing._write_anew = lambda *_: full_disk()


def defect() -> NoReturn:
    raise RuntimeError("nobody expects this")


def bad_model() -> NoReturn:
    raise ModelError("the model is not as on the other ranks")


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


FAILURES: dict[str, Callable[[], object]] = {
    "disk": full_disk,
    "sealing": full_for_sealing,
    "defect": defect,
    "model": bad_model,
    "term": lambda: signal_to_process(signal.SIGTERM),
    "ctrl-c": lambda: signal_to_process(signal.SIGINT),
    "two-ctrl-c": two_ctrl_c,
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
}


def fail_at(failure: str, rank: int) -> None:
    """Have the failure at its moment, if it is this rank's."""
    if failure == "-":
        return
    of_rank, moment, name = failure.split(":")
    if int(of_rank) != rank:
        return
    is_numbered = moment.isdigit()
    module, path = ("bucketline.store.write.shard_writer", "_put_block") if is_numbered else MOMENTS[moment]
    owner: Any = importlib.import_module(module)
    *outer, last = path.split(".")
    for part in outer:
        owner = getattr(owner, part)
    function, left = getattr(owner, last), [int(moment) if is_numbered else 1]

    def failing(*args: Any, **kwargs: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            FAILURES[name]()
        return function(*args, **kwargs)

    setattr(owner, last, failing)


def be_rank(rank: int, notes: str, failure: str, asked: list[str]) -> int:
    """Run `ingest` with `asked`; give its exit code."""
    commit_often()
    note_commits(f"{notes}.{rank}")
    note_signals()
    fail_at(failure, rank)
    return int(importlib.import_module("bucketline.ingest.cli").main(asked))


if __name__ == "__main__":
    for imported in ("bucketline.ingest.cli", "bucketline.ingest.pack"):  # while it imports, a rank ends as any process does
        importlib.import_module(imported)
    sys.exit(be_rank(int(os.environ.get("RANK", "0")), sys.argv[1], sys.argv[2], sys.argv[3:]))
