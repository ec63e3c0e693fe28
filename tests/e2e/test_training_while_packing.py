"""Packing and training at once, one following the other, both killed and resumed."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from dataclasses import asdict, replace
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from bucketline.errors import BucketlineError
from bucketline.ingest.packing.share import SharePacker
from bucketline.loader.seen import read_run
from bucketline.store import Store
from bucketline.store.format.manifest import MANIFEST
from bucketline.store.verify.verify import verify
from tests.commands import Ran, call
from tests.forked_ranks import ForkedRanks, RunningRanks
from tests.models import SMALL, write_images
from tests.unit.train.tiny_run import as_arguments, config, losses, write_unet

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from multiprocessing.synchronize import Event

    from bucketline.train.config import TrainConfig

pytestmark = pytest.mark.slow

NUM_IMAGES = 120
FIRST_ROWS = 9  # on which training begins
LONGEST_S = 300.0
SLOWED_S = 0.02  # between two images, while packing must not come to its end


@pytest.fixture(scope="module")
def ranks() -> Iterator[ForkedRanks]:
    with ForkedRanks() as started:
        yield started


class Packing:
    """`ingest pack --publish-every` in a process of its own, which stops after each generation, so that training follows."""

    def __init__(self, source: Path, store: Path, model: Path) -> None:
        self._store, self._answer = store, store.with_name("account.json")
        options = ["--model", model, *SMALL, "--batch-size", "2", "--publish-every", "0.05s", "--json"]
        context = get_context("fork")  # without imports of its own
        self._is_free = context.Event()
        self._process = context.Process(target=_pack, args=(self._is_free, self._answer, source, store, *options), daemon=True)
        self._process.start()

    @property
    def rows(self) -> int:
        return Store.open(self._store).manifest.samples if (self._store / MANIFEST).exists() else 0

    def add(self, rows: int) -> None:
        wanted = self.rows + rows
        while True:
            is_stopped, found = self._is_stopped, self.rows  # in this order: no generation comes in between
            if found >= wanted:
                return
            assert self._process.is_alive(), f"packing has ended with {self._process.exitcode}, {found} of {wanted} rows packed"
            self._go_on(is_stopped=is_stopped)

    def kill(self) -> None:
        self._process.kill()
        self._process.join()

    def finish(self) -> dict[str, int]:
        self._is_free.set()
        end = time.monotonic() + LONGEST_S
        while self._process.is_alive() and time.monotonic() < end:
            self._go_on(is_stopped=self._is_stopped)
        done = Ran(**json.loads(self._answer.read_bytes())).done()
        return done.json

    @property
    def _is_stopped(self) -> bool:
        stat = Path(f"/proc/{self._process.pid}/stat").read_text(encoding="utf-8")
        return stat.rpartition(")")[2].split()[0] == "T"

    def _go_on(self, *, is_stopped: bool) -> None:
        if is_stopped:
            assert self._process.pid is not None
            os.kill(self._process.pid, signal.SIGCONT)
        time.sleep(0.005)


def _pack(is_free: Event, answer: Path, *arguments: object) -> None:
    """Pack; until it is free, slowly, and stopped after each generation that is published."""
    commit, publish_due, published = SharePacker.commit, SharePacker.publish_due, threading.Event()

    def noting(self: SharePacker) -> None:
        commit(self)
        published.set()

    def stopping(self: SharePacker) -> None:
        published.clear()
        publish_due(self)
        if not is_free.is_set():
            time.sleep(SLOWED_S)
            if published.is_set():
                os.kill(os.getpid(), signal.SIGSTOP)

    SharePacker.commit = noting  # type: ignore[method-assign]  # in this process only
    SharePacker.publish_due = stopping  # type: ignore[method-assign]
    answer.write_text(json.dumps(asdict(call("ingest", "pack", *arguments))), encoding="utf-8")


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + LONGEST_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def schedule(asked: TrainConfig) -> list[tuple[int, tuple[int, ...]]]:
    """Return the steps at which the run's plan changed, with the generations of each; none before it begins."""
    try:
        return [(one.step, one.state.generations) for one in read_run(asked.output_dir).lines]
    except BucketlineError:
        return []


def checkpoints(asked: TrainConfig) -> list[int]:
    return [int(one.name.removeprefix("step-")) for one in asked.output_dir.glob("checkpoints/step-????????")]


def wait_for_generations(number: int, asked: TrainConfig, running: RunningRanks) -> list[tuple[int, tuple[int, ...]]]:
    until(lambda: len(schedule(asked)) >= number or not all(Path(f"/proc/{pid}").exists() for pid in running.pids))
    found = schedule(asked)
    assert len(found) >= number, running.wait().err
    return found


def test_both_are_killed_and_continue_to_the_end(tmp_path: Path, ranks: ForkedRanks, model: Path) -> None:
    write_unet(tmp_path / "model", in_channels=4, out_channels=4, cross_attention_dim=8)
    write_images(tmp_path / "photos", NUM_IMAGES)
    asked = config(tmp_path, accumulation=1, max_steps=100_000, log_every=1, save_every=5, follow=True)
    store = Path(asked.store[0])
    packing = Packing(tmp_path / "photos", store, model)
    packing.add(FIRST_ROWS)
    running = ranks.start(2, as_arguments(asked))
    wait_for_generations(1, asked, running)
    packing.add(1)
    wait_for_generations(2, asked, running)
    until(lambda: bool(checkpoints(asked)))
    packing.kill()
    for pid in running.pids:
        os.kill(pid, signal.SIGKILL)
    assert running.wait().code != 0
    known = [one for one in schedule(asked) if one[0] <= max(checkpoints(asked))]
    before = packing.rows

    packing = Packing(tmp_path / "photos", store, model)
    packing.add(1)
    newest = Store.open(store).manifest.generation
    running = ranks.start(2, as_arguments(replace(asked, resume=True)))
    until(lambda: schedule(asked)[-1][1] >= (newest,) and max(checkpoints(asked)) > schedule(asked)[-1][0])
    for pid in running.pids:
        os.kill(pid, signal.SIGTERM)
    done = packing.finish()
    assert running.wait().code == 0
    assert (done["packed"] + done["unchanged"], done["unchanged"] >= before) == (NUM_IMAGES, True)
    assert not verify(Store.open(store), lambda _: None, 1).corrupt
    found = schedule(asked)
    assert found[: len(known)] == known
    end = json.loads((asked.output_dir / "status.json").read_bytes())["step"]

    assert len([line for line in losses(asked.output_dir) if line[1] != "null"]) == end
    listed = call("loader", "seen", "--run", asked.output_dir, "--all", "--json").done()
    counts = [json.loads(line)["count"] for line in listed.out.splitlines()]
    assert sum(counts) == end * 4
    assert len(counts) == Store.open(store, found[-1][1][0]).manifest.samples
