"""A loader in processes that are forked or spawned after it was made, at the interpreter's end, and under Ctrl-C."""

from __future__ import annotations

import gc
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch.utils.data import DataLoader

from bucketline.errors import DeliveryError, UsageError
from bucketline.loader import Batch, BatchDataset, Loader, LoaderConfig
from bucketline.loader.collate.window import Window
from bucketline.loader.plan.plan import Plan
from bucketline.loader.service import client
from bucketline.loader.service.server import Service
from bucketline.store import Store
from bucketline.store.shard import reader, row_locator
from bucketline.torch_dtypes import as_stored
from tests.commands import spawn
from tests.conditioned import Form, conditioned_store
from tests.kit import make_store, samples_of
from tests.leftovers import in_child, wait_until
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


# A process that is forked while a thread fills batches: whatever that thread was doing, the child's own iteration ends.


CONFIG = LoaderConfig(batch_size=2, epochs=1, prefetch_bytes=1)

MOMENTS: dict[str, tuple[object, str]] = {
    "while it plans the copies": (Window, "copy_plans"),
    "while it maps a shard": (reader.SealedShard, "opened"),
    "while it plans": (Plan, "draw"),
    "while it opens a sidecar": (row_locator, "check_shard_id"),
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


# Batches for those who are not in a loop of their own over torch tensors: numpy, torch's `DataLoader`.


def read(store: Store, config: LoaderConfig) -> list[Batch]:
    with Loader(store, config) as loader:
        return list(loader.forever())


@pytest.mark.parametrize("dtype", ["F16", "F32", "BF16"])
def test_numpy_arrays_are_the_tensors_own_memory_while_one_of_them_is_held(tmp_path: Path, dtype: str) -> None:
    store, _ = conditioned_store(tmp_path / "s", Form(dtype=dtype))
    config = LoaderConfig(batch_size=3, epochs=1, flip=0.5, prefetch_bytes=1)
    expected = [batch.latents.clone() for batch in read(store, config)]
    held = []
    with Loader(store, config) as loader:
        for batch in loader:
            found = batch.numpy()
            for name, tensor in batch.by_name().items():
                assert found[name].ctypes.data == tensor.data_ptr()
                assert found[name].shape == tensor.shape
                assert (found[name].dtype == "uint16") == (tensor.dtype is torch.bfloat16)
            held.append(found["latents"])
            del batch, found
    assert all(one.tobytes() == as_stored(other).tobytes() for one, other in zip(held, expected, strict=True))
    with pytest.raises(UsageError, match="a batch on meta"):
        read(store, config)[0].to("meta").numpy()


def test_torchs_dataloader_gives_the_loaders_own_batches(store: Store) -> None:
    config = LoaderConfig(batch_size=2, epochs=2, caption_dropout=0.5)
    expected = read(store, config)
    with Loader(store, config) as loader:
        batches = DataLoader(BatchDataset(loader), batch_size=None)
        found = cast("list[Batch]", [batch for _ in range(2) for batch in batches])
    for one, other in zip(found, expected, strict=True):
        assert isinstance(one, Batch)
        assert all(torch.equal(tensor, other.by_name()[name]) for name, tensor in one.by_name().items())


def test_the_datasets_state_is_the_loaders_and_counts_what_the_dataloader_gave(store: Store) -> None:
    config = LoaderConfig(batch_size=1, epochs=1)
    expected = [batch.ids.tolist() for batch in read(store, config)]
    with Loader(store, config) as loader:
        dataset = BatchDataset(loader)
        assert len(dataset) == len(loader) == len(expected)
        found = [batch.ids.tolist() for _, batch in zip(range(7), DataLoader(dataset, batch_size=None), strict=False)]
        state = dataset.state_dict()
        assert state == loader.state_dict()
        assert state["step"] == 7
    with Loader(store, config) as loader:
        dataset = BatchDataset(loader)
        dataset.load_state_dict(state)
        found += [batch.ids.tolist() for batch in DataLoader(dataset, batch_size=None)]
    assert found == expected


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_worker_processes_are_refused_with_what_to_do(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.1
    )  # how long it waits for a worker that failed: 5 s
    with Loader(store, LoaderConfig(batch_size=1, epochs=1)) as loader:
        batches = DataLoader(BatchDataset(loader), batch_size=None, num_workers=2, multiprocessing_context="fork")
        with pytest.raises(UsageError, match=r"a DataLoader with 2 workers cannot read .* num_workers=0"):
            next(iter(batches))
        del batches
        gc.collect()  # its iterator ends here, and not in another test
