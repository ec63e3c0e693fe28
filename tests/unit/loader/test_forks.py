"""A process that is forked while a thread fills batches: whatever that thread was doing, the child's own iteration ends."""

from __future__ import annotations

import os
import signal
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bucketline.loader import Loader, LoaderConfig
from bucketline.loader.collate.window import Window
from bucketline.loader.plan.plan import Plan
from bucketline.store import Store
from bucketline.store.shard import reader
from tests.kit import make_store, samples_of

CONFIG = LoaderConfig(batch_size=2, epochs=1, prefetch_bytes=1)
CHILD_S = 120  # before a child that hangs is ended by SIGALRM

MOMENTS: dict[str, tuple[object, str]] = {
    "while it plans the copies": (Window, "copy_plans"),
    "while it maps a shard": (reader.SealedShard, "opened"),
    "while it plans": (Plan, "draw"),
    "while it opens an index": (reader, "check_shard_id"),
}


@pytest.fixture
def two_shards(tmp_path: Path) -> Store:
    return make_store(tmp_path / "s", *(samples_of({"train/64x64": 12}, prefix) for prefix in ("a/", "b/")))


class Held:
    """Stops the first thread that calls a function, just before the call (of `open`: just after), until it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: object, name: str) -> None:
        self.is_inside, self._pid = threading.Event(), os.getpid()
        self.may_go: threading.Event = threading.Event()
        call: Callable[..., Any] = getattr(owner, name)

        def held(*args: object, **options: object) -> object:
            given = call(*args, **options) if name == "open" else None
            if os.getpid() == self._pid and not self.is_inside.is_set():
                self.is_inside.set()
                self.may_go.wait(60)
            return call(*args, **options) if given is None else given

        monkeypatch.setattr(owner, name, held)


def in_child(work: Callable[[], bool]) -> int:
    """Run some work in a process that is forked off; 0 where it gave True, minus a signal's number where that ended it."""
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(CHILD_S)
        try:
            os._exit(0 if work() else 3)
        except BaseException:  # noqa: BLE001 - the child must not continue as a test
            traceback.print_exc()
            os._exit(4)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # forking while threads run is what is tested
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_child_that_is_forked_at_any_moment_iterates(two_shards: Store, monkeypatch: pytest.MonkeyPatch, moment: str) -> None:
    with Loader(two_shards, CONFIG) as own:
        expected = [batch.ids.tolist() for batch in own]
    store = Store.open(two_shards.path)
    held = Held(monkeypatch, *MOMENTS[moment])
    with Loader(store, CONFIG) as loader:
        found: list[list[list[int]]] = []

        def iterate() -> None:
            if moment == "while it opens an index":
                assert store.shards[0].name_of("train/64x64", 0) is not None
            found.extend(batch.ids.tolist() for batch in loader.forever())

        def iterates() -> bool:
            assert store.shards[0].name_of("train/64x64", 0) is not None
            delivered = len(found)  # to the parent before the fork, where it was let go first: the child continues from there
            remaining = [batch.ids.tolist() for batch in loader.forever()]
            started = len(expected) - len(remaining)  # 0 after the last batch as well: the next iteration starts over
            behind = (started - delivered) % len(expected)  # 1: handed out and not yet appended
            return remaining == expected[started:] and behind in {0, 1}

        parent = threading.Thread(target=iterate)
        parent.start()
        try:
            assert held.is_inside.wait(60)
            assert in_child(iterates) == 0
        finally:
            held.may_go.set()
            parent.join()
        assert found == expected
