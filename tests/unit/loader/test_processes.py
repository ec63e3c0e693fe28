"""A loader in processes that are forked or spawned after it was made, at the interpreter's end, and under Ctrl-C."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from bucketline.errors import DeliveryError
from bucketline.loader import Loader, LoaderConfig
from bucketline.loader.service import client
from bucketline.loader.service.server import Service
from bucketline.store import Store
from tests.commands import spawn
from tests.leftovers import wait_until
from tests.serving import serving

SERVICES = [None, "auto"]


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
        _, err = process.communicate(timeout=120)
        with os.fdopen(read, "rb") as watched:
            assert watched.read() == b""
    assert process.returncode == code
    assert "Fatal" not in err
    assert code == -2 or err == ""


@pytest.mark.slow
def test_a_client_that_is_killed_leaves_nothing_in_the_service(store: Store, tmp_path: Path) -> None:
    with serving(tmp_path / "s", store.path) as server:
        descriptors = f"/proc/{server.pid}/fd"
        before = len(os.listdir(descriptors))  # noqa: PTH208 - only their number
        for _ in range(2):
            ran = spawn([sys.executable, "-c", LEFT + "import os; os.kill(os.getpid(), 9)", store.path, tmp_path / "s"])
            assert ran.code == -9
        assert wait_until(lambda: len(os.listdir(descriptors)) == before)  # noqa: PTH208
        server.terminate()
        assert "no client now, 2 since the start" in server.communicate(timeout=120)[1].splitlines()[-1]


@pytest.mark.parametrize("service", [None, "a service"])
def test_threads_that_the_system_does_not_start_are_an_error_that_leaves_none(
    store: Store, monkeypatch: pytest.MonkeyPatch, service: str | None
) -> None:
    before = set(threading.enumerate())
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
    assert wait_until(lambda: set(threading.enumerate()) <= before)
