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
from tests.fault.record import Asked, Kind, Outcome, Record, recorded
from tests.fault.same_store import committed_ids, compare
from tests.models import SMALL, write_images, write_model
from tests.ray_ground import Cluster, RayGround, command_of, kill, packing_workers

NUM_IMAGES = 600
NUM_BROKEN = 5
DRIVERS = 0.4  # share of the kills
LONGEST_S = 240.0


class KilledRuns:
    """Runs of one source into one store after another; each store is compared once a run of it has ended by itself."""

    def __init__(self, ground: RayGround, cluster: Cluster, folder: Path, draw: random.Random) -> None:
        self._ground, self._cluster, self._folder, self._draw = ground, cluster, folder, draw
        self._process: subprocess.Popen[str] | None = None
        self._num_stores, self._num_before = 0, 0  # images that the store had when the run began
        self.faults: list[str] = []

    @property
    def _store(self) -> Path:
        return self._folder / f"store-{self._num_stores}"

    def kill_one(self) -> None:
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

    def finish(self) -> None:
        """Let the run end by itself, and compare its store with that of one process; the next run makes another store."""
        ran = self._ground.ended(self._process or self._begin())
        self._process = None
        if ran.code:
            self.faults.append(f"a run ended with {ran.code}: {ran.err[-2000:]}")
        else:
            counted = {name: ran.json[name] for name in ("found", "packed", "unchanged", "rejected")}
            expected = {"found": NUM_IMAGES + NUM_BROKEN, "rejected": NUM_BROKEN, "unchanged": self._num_before}
            expected["packed"] = NUM_IMAGES - self._num_before
            if counted != expected:
                self.faults.append(f"a run counted {counted}, expected {expected}: samples are lost, or packed twice")
            self.faults += compare(self._store, self._folder / "whole").faults
            for name in ("rejects.jsonl", "without_caption.jsonl"):
                if (self._store / name).read_bytes() != (self._folder / "whole" / name).read_bytes():
                    self.faults.append(f"{name} differs from that of one process")
            if left := list((self._store / "pending").glob("attempts/*")):
                self.faults.append(f"{left[0]} was left behind")
        self._num_stores, self._num_before = self._num_stores + 1, 0

    def _begin(self) -> subprocess.Popen[str]:
        options = ["--engine", f"ray:{self._cluster.address}", "--workers", "1:2", "--batch-size", 2, "--json"]
        photos, model = self._folder / "photos", self._folder / "model"
        return self._ground.ingest("pack", photos, self._store, "--model", model, *SMALL, *options)

    def _wait(self, process: subprocess.Popen[str]) -> bool:
        """Wait for a random moment of the run; return False if it has ended before."""
        number = len(_sealed(self._store)) + self._draw.choice((0, 1, 1, 2, 4))
        until = time.monotonic() + LONGEST_S
        while process.poll() is None and len(_sealed(self._store)) < number and time.monotonic() < until:
            time.sleep(0.005)
        time.sleep(self._draw.random() * self._draw.choice((0.02, 0.5)))
        return process.poll() is None

    def _kill_driver(self, process: subprocess.Popen[str]) -> bool:
        before = committed_ids(self._store) if self._store.exists() else set[str]()
        driver = command_of(process)
        if driver is None or not kill(driver):
            return False
        ran = self._ground.ended(process)
        self._process = None
        after = committed_ids(self._store) if self._store.exists() else set[str]()
        self._num_before = len(after)
        if lost := before - after:
            self.faults.append(f"{len(lost)} committed samples are lost, {min(lost)} among them")
        if ran.code != 128 + signal.SIGKILL:
            self.faults.append(f"a driver that was killed ended with {ran.code}: {ran.err[-1000:]}")
        return True


def _sealed(store: Path) -> list[Path]:
    return list((store / "shards").glob("*.lmdb"))


def killed_on_ray(asked: Asked) -> Iterator[Record]:
    """`kill -9` of the workers and drivers of packs on a Ray cluster."""
    folder, kills = asked.folder, asked.of(3, 30)
    write_images(folder / "photos", NUM_IMAGES)
    for number in range(NUM_BROKEN):
        (folder / "photos" / f"broken-{number}.png").write_bytes(b"no image")
    write_model(folder / "model")
    whole = call("ingest", "pack", folder / "photos", folder / "whole", "--model", folder / "model", *SMALL)
    if whole.code:
        raise ValueError(f"the run of one process ended with {whole.code}: {whole.err}")
    with RayGround() as ground:
        runs = KilledRuns(ground, Cluster(ground, 1, 1), folder, random.Random(asked.seed))
        for _ in range(kills):
            runs.kill_one()
        runs.finish()
    fault, good = "a worker or the driver of a pack on Ray killed", {Outcome.RECOVERED: kills - len(runs.faults)}
    yield recorded(fault, Kind.KILL, good, runs.faults)
