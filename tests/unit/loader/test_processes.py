"""A loader in processes that are forked or spawned after it was made, at the interpreter's end, and under Ctrl-C."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import traceback
from typing import TYPE_CHECKING

import pytest

from bucketline.errors import DeliveryError
from bucketline.loader import Loader, LoaderConfig
from bucketline.loader.service import client
from bucketline.loader.service.server import Service
from tests.commands import spawn
from tests.leftovers import held, left_since, wait_until
from tests.serving import serving

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from bucketline.store import Store

SERVICES = [None, "auto"]
LONG_WITH_A_SERVICE = [None, pytest.param("auto", marks=pytest.mark.slow)]


def in_child(work: Callable[[], object]) -> int:
    """Run some work in a process that is forked off; give its exit code, 0 where the work gave something true."""
    child = os.fork()
    if child == 0:
        try:
            os._exit(0 if work() else 3)
        except BaseException:  # noqa: BLE001 - the child must not continue as a test
            traceback.print_exc()
            os._exit(4)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def ids_of(loader: Loader) -> list[list[list[int]]]:
    return [batch.ids.tolist() for batch in loader.forever()]


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # forking while threads run is what is tested
@pytest.mark.parametrize("service", LONG_WITH_A_SERVICE)
def test_a_forked_child_iterates_on_its_own_and_changes_nothing_for_its_parent(store: Store, service: str | None) -> None:
    config = LoaderConfig(batch_size=2, epochs=2, prefetch_bytes=1)
    with Loader(store, config) as own:
        expected = ids_of(own)
    with Loader(store, config, service=service) as loader:
        batches = loader.forever()
        kept = [next(batches) for _ in range(3)]

        def new_iteration() -> bool:
            found = [batch.ids.tolist() for batch in loader.forever()]
            loader.close()
            return found == expected[3:]

        def same_loop() -> bool:
            kept.clear()  # the parent holds these still: their end here must not free its memory
            found = [batch.ids.tolist() for batch in batches]
            loader.close()
            return found == expected[3:]

        assert in_child(new_iteration) == 0
        assert in_child(same_loop) == 0
        rest = [batch.ids.tolist() for batch in batches]
        assert rest == expected[3:]
        assert [batch.ids.tolist() for batch in kept] == expected[:3]


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
@pytest.mark.parametrize("service", SERVICES)
def test_a_forked_child_that_only_ends_leaves_the_parents_loader_alone(store: Store, service: str | None) -> None:
    with Loader(store, LoaderConfig(batch_size=1), service=service) as loader:
        batches = loader.forever()
        assert next(batches).step == 0

        def drop() -> bool:
            nonlocal batches, loader
            del batches, loader
            return True

        assert in_child(drop) == 0
        assert [next(batches).step for _ in range(80)] == list(range(1, 81))


@pytest.mark.parametrize("service", LONG_WITH_A_SERVICE)
def test_a_loader_goes_on_in_another_process_from_its_state(store: Store, service: str | None) -> None:
    with Loader(store, LoaderConfig(batch_size=2, epochs=2), service=service) as loader:
        batches = loader.forever()
        for _ in range(4):
            next(batches)
        data = pickle.dumps(loader)
        expected = [batch.ids.tolist() for batch in batches]
    with pickle.loads(data) as again:
        assert ids_of(again) == expected


SPAWNED = """
import multiprocessing, sys
from bucketline.errors import DeliveryError
from bucketline.loader import Loader, LoaderConfig
from bucketline.loader.service.server import Service

def work(loader, out):
    out.put([batch.step for batch in loader.forever()])
    loader.close()

if __name__ == "__main__":
    loader = Loader(sys.argv[1], LoaderConfig(batch_size=2, epochs=1))
    batches, num_batches = loader.forever(), len(loader)
    next(batches)
    context = multiprocessing.get_context("spawn")
    out = context.Queue()
    child = context.Process(target=work, args=(loader, out))
    child.start()
    theirs = out.get(timeout=60)
    child.join()
    assert theirs == [batch.step for batch in batches] == list(range(1, num_batches)), theirs
"""


@pytest.mark.slow
def test_a_spawned_child_reads_what_its_parent_would(store: Store, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SPAWNED, encoding="ascii")
    ran = spawn([sys.executable, tmp_path / "script.py", store.path])
    assert (ran.code, ran.out, ran.err) == (0, "", "")


LEFT = """
import sys
import threading
from bucketline.errors import DeliveryError
from bucketline.loader import Loader, LoaderConfig
from bucketline.loader.service.server import Service
service = sys.argv[2] if len(sys.argv) > 2 else None
loader = Loader(sys.argv[1], LoaderConfig(batch_size=1), service=service)
batches = loader.forever()
held = [next(batches) for _ in range(5)]
print("ready", flush=True)
"""
ENDS = {"": 0, "raise SystemExit(3)": 3, "import os; os.kill(os.getpid(), 9)": -9, "sys.stdin.read()": -2}


@pytest.mark.parametrize(
    ("service", "end"),
    [
        pytest.param(
            service, end, marks=() if (service, end) in {(None, ""), ("auto", "sys.stdin.read()")} else pytest.mark.slow
        )
        for service in SERVICES
        for end in ENDS
    ],
)
def test_a_process_that_ends_in_any_way_leaves_no_process_behind(store: Store, service: str | None, end: str) -> None:
    code = ENDS[end]
    read, write = os.pipe()
    arguments = [sys.executable, "-c", LEFT + end, str(store.path), *([service] if service else [])]
    # every process that comes of this one holds `write`: its other end is read to the end when all are gone
    with subprocess.Popen(
        arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, pass_fds=[write], text=True
    ) as process:
        os.close(write)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        if end == "sys.stdin.read()":
            process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
        with os.fdopen(read, "rb") as watched:
            assert watched.read() == b""
    assert process.returncode == code
    assert "Fatal" not in err
    assert code == -2 or err == ""


@pytest.mark.slow
def test_a_client_that_is_killed_leaves_nothing_in_the_service(store: Store, tmp_path: Path) -> None:
    from tests.commands import call

    with serving(tmp_path / "s", store.path) as server:
        descriptors = f"/proc/{server.pid}/fd"
        before = len(os.listdir(descriptors))  # noqa: PTH208 - only their number
        for _ in range(2):
            ran = spawn([sys.executable, "-c", LEFT + "import os; os.kill(os.getpid(), 9)", store.path, tmp_path / "s"])
            assert ran.code == -9
        assert wait_until(lambda: len(os.listdir(descriptors)) == before)  # noqa: PTH208
        stats = call("loader", "stats", "--socket", tmp_path / "s", "--json").json
        assert (stats["clients"], stats["clients_so_far"]) == ([], 2)


@pytest.mark.parametrize("service", SERVICES)
def test_a_loop_that_is_left_leaves_nothing(store: Store, service: str | None) -> None:
    before = held()
    loader = Loader(store, LoaderConfig(batch_size=1, threads=2), service=service)
    for batch in loader.forever():
        assert batch.step == 0
        break
    del batch
    loader.close()
    assert left_since(before) == {}

    def fail() -> None:
        for batch in loader.forever():
            raise ValueError(batch.step)

    with pytest.raises(ValueError, match=r"^1$"):
        fail()
    loader.close()
    assert left_since(before) == {}


@pytest.mark.parametrize("service", [None, "a service"])
def test_threads_that_the_system_does_not_start_are_an_error_that_leaves_none(
    store: Store, monkeypatch: pytest.MonkeyPatch, service: str | None
) -> None:
    before = threading.active_count()
    real, started = threading.Thread.start, 0

    def start(thread: threading.Thread) -> None:
        nonlocal started
        if thread.name == "bucketline-builder":
            started += 1
            if started > 2:
                raise RuntimeError("can't start new thread")
        real(thread)

    served = Service([store.path])
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    monkeypatch.setattr(threading.Thread, "start", start)
    words = "only 2 of 3 prefetch threads could be started: can't start new thread; use fewer"
    with ours, Loader(store, LoaderConfig(batch_size=1, threads=3), service=service and "/unused") as loader:
        if service:
            monkeypatch.setattr(client, "connected", lambda _: ours)
            served.take_in(theirs)
        with pytest.raises(DeliveryError, match=words):
            for _ in loader.forever():
                pass
    theirs.close()
    served.stop()
    assert wait_until(lambda: threading.active_count() == before)
