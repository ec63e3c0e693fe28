"""Kills Ray workers and drivers of packing runs, `kill -9`, at random moments; the same command then continues.

One source is packed into one store with two workers of a cluster, again and again. At each moment a worker or the driver is
killed. With a worker, the run must continue by itself; with the driver, nothing that it committed may be lost, and the same
command is run again. At last the store must be that of one process that nobody interrupted: the same ids, each once, the
same buckets, latents and rejects, and every image counted once.
"""

from __future__ import annotations

import random
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from tests.commands import call
from tests.fault.record import Asked, Kind, Outcome, Record, expect, tried
from tests.fault.same_store import committed_ids, compare
from tests.models import SMALL, write_images, write_model
from tests.ray_ground import Cluster, RayGround, command_of, kill, packing_workers

NUM_IMAGES, NUM_BROKEN = 600, 5
DRIVERS = 0.4  # share of the kills
LONGEST_S = 240.0


class KilledRuns:
    """Runs of one source into one store after another; each store is compared once a run of it has ended by itself."""

    def __init__(self, ground: RayGround, folder: Path, draw: random.Random) -> None:
        self._ground, self._cluster, self._folder, self._draw = ground, Cluster(ground, 1, 1), folder, draw
        self._process: subprocess.Popen[str] | None = None
        self._num_stores, self._num_before = 0, 0  # images that the store had when the run began

    @property
    def _store(self) -> Path:
        return self._folder / f"store-{self._num_stores}"

    def kill_one(self) -> Outcome:
        """Kill a worker or the driver at a moment that is drawn; what ends before is compared, and another is begun."""
        is_driver, is_killed = self._draw.random() < DRIVERS, False
        while not is_killed:
            process = self._process = self._process or self._begin()
            if not self._wait(process):
                self.finish()
            elif is_driver:
                is_killed = self._kill_driver(process)
            else:
                workers = packing_workers(self._cluster.process)
                is_killed = bool(workers) and kill(self._draw.choice(workers))
        return Outcome.RECOVERED

    def finish(self) -> Outcome:
        """Let the run end by itself, and compare its store with that of one process; the next run makes another store."""
        ran, store, before = self._ground.ended(self._process or self._begin()), self._store, self._num_before
        self._process, self._num_stores, self._num_before = None, self._num_stores + 1, 0
        expect(ran.code == 0, f"a run ended with {ran.code}: {ran.err[-2000:]}")
        found, packed, unchanged, rejected = (ran.json[name] for name in ("found", "packed", "unchanged", "rejected"))
        counted, expected = [found, packed + unchanged, rejected], [NUM_IMAGES + NUM_BROKEN, NUM_IMAGES, NUM_BROKEN]
        expect(counted == expected, f"a run counted {counted}, expected {expected}: samples are lost, or packed twice")
        expect(unchanged >= before, f"{unchanged} images were unchanged, expected {before} or more: some were packed again")
        faults = compare(store, self._folder / "whole").faults
        expect(not faults, faults[:1])
        for name in ("rejects.jsonl", "without_caption.jsonl"):
            is_same = (store / name).read_bytes() == (self._folder / "whole" / name).read_bytes()
            expect(is_same, f"{name} differs from that of one process")
        left = {path.name for path in (store / "pending").iterdir()} - {"writer.lock"}
        expect(not left, f"left behind: {left}")
        return Outcome.COMPLETED

    def _begin(self) -> subprocess.Popen[str]:
        options = [
            "--engine",
            f"ray:{self._cluster.address}",
            "--workers",
            2,
            "--batch-size",
            2,
            "--publish-every",
            "0.2s",
            "--json",
        ]
        photos, model = self._folder / "photos", self._folder / "model"
        return self._ground.ingest("pack", photos, self._store, "--model", model, *SMALL, *options)

    def _wait(self, process: subprocess.Popen[str]) -> bool:
        """Wait for a random moment of the run; return False if it has ended before."""
        number = self._num_sealed() + self._draw.choice((0, 1, 1, 2, 4))
        until = time.monotonic() + LONGEST_S
        while process.poll() is None and self._num_sealed() < number and time.monotonic() < until:
            time.sleep(0.005)
        time.sleep(self._draw.random() * self._draw.choice((0.02, 0.5)))
        return process.poll() is None

    def _num_sealed(self) -> int:
        return len([*(self._store / "shards").glob("*.lmdb")])

    def _kill_driver(self, process: subprocess.Popen[str]) -> bool:
        before = committed_ids(self._store)
        driver = command_of(process)
        if driver is None or not kill(driver):
            return False
        ran = self._ground.ended(process)
        self._process = None
        after = committed_ids(self._store)
        self._num_before = len(after)
        expect(before <= after, f"{len(before - after)} committed samples are lost, {sorted(before - after)[:1]} among them")
        expect(ran.code == 128 + signal.SIGKILL, f"a driver that was killed ended with {ran.code}: {ran.err[-1000:]}")
        return True


def killed_on_ray(asked: Asked) -> Iterator[Record]:
    folder = asked.folder
    write_images(folder / "photos", NUM_IMAGES)
    for number in range(NUM_BROKEN):
        (folder / "photos" / f"broken-{number}.png").write_bytes(b"no image")
    write_model(folder / "model")
    call("ingest", "pack", folder / "photos", folder / "whole", "--model", folder / "model", *SMALL).done()
    with RayGround() as ground:
        runs = KilledRuns(ground, folder, asked.draw)
        trials = [*[("killed", runs.kill_one)] * asked.of(1, 30), ("finished", runs.finish)]
        yield from tried("a worker or the driver of a pack on Ray killed", Kind.KILL, lambda trial: trial(), trials)
