"""Packing and training at once, one following the other, both killed and resumed: the losses of an uninterrupted run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from bucketline.errors import BucketlineError
from bucketline.loader.seen import read_run
from bucketline.loader.state import schedule_of
from bucketline.store import Store
from tests.commands import ROOT, call
from tests.forked_ranks import ForkedRanks, RunningRanks
from tests.unit.train.tiny_run import as_arguments, config, losses, write_unet, write_vae

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from bucketline.train.config import TrainConfig
    from bucketline.train.data import Schedule

pytestmark = pytest.mark.slow

PART_ROWS = 4  # of each generation
LONGEST_S = 90.0


@pytest.fixture(scope="module")
def ranks() -> Iterator[ForkedRanks]:
    """A process that forks ranks."""
    with ForkedRanks() as started:
        yield started


def pack(store: Path, parts: int) -> None:
    """Add samples that are not there yet, and publish a generation of a few of them at a time."""
    from tests.building import add_samples, store_writer
    from tests.unit.train.tiny_run import encoders, samples

    wanted = samples({"train/128x128": 3 * parts, "train/192x128": parts})
    with store_writer(store, encoders=encoders()) as writer:
        left = [sample for sample in wanted if sample.id not in writer]
        for first in range(0, len(left), PART_ROWS):
            add_samples(writer, left[first : first + PART_ROWS], commit_every=1)
            writer.publish()
            time.sleep(0.4)


def packer(store: Path, parts: int) -> subprocess.Popen[bytes]:
    program = f"from pathlib import Path; from {__name__} import pack; pack(Path({str(store)!r}), {parts})"
    return subprocess.Popen([sys.executable, "-c", program], cwd=ROOT)


def schedule(asked: TrainConfig) -> Schedule:
    """Return the schedule of the newest checkpoint; an empty one if there is none yet."""
    try:
        return schedule_of(read_run(asked.output_dir).state)
    except BucketlineError:
        return ()


def until(condition: Callable[[], bool], running: RunningRanks) -> None:
    end = time.monotonic() + LONGEST_S
    while not condition():
        assert time.monotonic() < end
        assert all(Path(f"/proc/{pid}").exists() for pid in running.pids), running.wait().err
        time.sleep(0.05)


def test_both_are_killed_and_go_on_and_the_losses_are_those_of_the_schedule(tmp_path: Path, ranks: ForkedRanks) -> None:
    write_vae(write_unet(tmp_path / "model"))
    store, parts = tmp_path / "tiny.store", 60
    asked = config(
        tmp_path, accumulation=1, max_steps=100_000, log_every=1, checkpoint_every=5, follow=True, wait_rows=PART_ROWS + 1
    )
    packing = packer(store, parts)
    running = ranks.start(2, as_arguments(asked))
    until(lambda: len(schedule(asked)) >= 2, running)
    for pid in (packing.pid, *running.pids):
        os.kill(pid, signal.SIGKILL)
    packing.wait()
    assert running.wait().code != 0
    known = schedule(asked)

    packing = packer(store, parts)
    running = ranks.start(2, as_arguments(replace(asked, resume=True)))
    until(lambda: len(schedule(asked)) > len(known), running)
    for pid in running.pids:
        os.kill(pid, signal.SIGTERM)
    assert running.wait().code == 0
    packing.kill()
    packing.wait()
    found = schedule(asked)
    assert found[: len(known)] == known
    assert found[0][1][0] >= 2, "training began before there were enough rows"
    end = json.loads((asked.output_dir / "status.json").read_bytes())["step"]

    whole = replace(asked, output_dir=tmp_path / "whole", max_steps=end, follow=False, wait_rows=None)
    done = ranks.run(2, as_arguments(replace(whole, follow_schedule=asked.output_dir)))
    assert done.code == 0, done.err
    assert schedule(whole) == found
    steps, expected = ([line for line in losses(run.output_dir) if line[1] != "null"] for run in (asked, whole))
    assert len(steps) == end
    assert steps == expected

    listed = call("loader", "seen", whole.output_dir, store, "--all", "--json")
    assert listed.code == 0, listed.err
    counts = [json.loads(line)["count"] for line in listed.out.splitlines()]
    assert sum(counts) == end * 4
    last = Store.open(store, found[-1][1][0])
    assert len(counts) == sum(bucket.num_rows for bucket in last.buckets("train"))
