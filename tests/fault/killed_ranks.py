"""Kills one rank of a packing run, `kill -9`, at random moments; sees how the others end, and what the next runs make of it.

`python -m tests.fault.killed_ranks --kills 12 --ranks 2,3,1 --seed 7` packs one source into one store, again and again,
under torchrun, with 2, 3, 1, 2, … ranks; each time a rank drawn at random is killed. torchrun must then end within seconds,
the others or torchrun must name the one that was killed, and nothing committed may be lost. At last the run is let finish, and
the store must be that of one process that nobody interrupted: the same ids, each once, the same buckets, latents, rejects.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from tests.commands import ROOT
from tests.fault.packs_in_a_row import adopt_orphans, wait_for_orphans
from tests.fault.same_store import TOLERANCE, Comparison, committed_ids, compare, noted_ids
from tests.models import SMALL, write_images, write_model

NUM_IMAGES = 360
NUM_BROKEN = 5
ENDS_WITHIN_S = 25.0  # torchrun kills what is left after 30 s; that would not be by itself
STARTS_WITHIN_S = 180.0


@dataclass(slots=True)
class Result:
    """The outcome of the kills."""

    lines: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    compared: Comparison | None = None


def asked(folder: Path, store: Path) -> list[str]:
    return ["pack", str(folder / "photos"), str(store), "--model", str(folder / "model"), *SMALL, "--batch-size", "3"]


def start(num_ranks: int, folder: Path, store: Path) -> subprocess.Popen[str]:
    """Start a run under torchrun, what it says in a pipe."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(num_ranks)]
    module = ["-m", "tests.fault.noted_pack", f"{store}.committed", "-"]
    kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return subprocess.Popen(
        [*launcher, *module, *asked(folder, store)],
        cwd=ROOT,
        env={**kept, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def process_of(launcher: subprocess.Popen[str], rank: int) -> int | None:
    """Find a rank among the launcher's children, by its environment."""
    try:
        children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text(encoding="ascii").split()
        for child in children:
            if f"RANK={rank}".encode() in Path(f"/proc/{child}/environ").read_bytes().split(b"\0"):
                return int(child)
    except (FileNotFoundError, ProcessLookupError):
        pass
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """The rank and the moment: once so many images are committed, and then so many seconds later."""

    num_ranks: int
    rank: int
    images: int
    seconds: float

    def __str__(self) -> str:
        when = f"at {self.images} images" if self.images else f"{self.seconds:.1f} s after it began"
        return f"rank {self.rank} of {self.num_ranks} killed {when}"


def wait_until(kill: Kill, launcher: subprocess.Popen[str], store: Path) -> int | None:
    """Wait for the moment; give the rank's process, None where there is none any more."""
    give_up = time.monotonic() + STARTS_WITHIN_S
    process = None
    while launcher.poll() is None and time.monotonic() < give_up:
        process = process or process_of(launcher, kill.rank)
        if process is not None and (kill.images == 0 or len(noted_ids(store)) >= kill.images):
            break
        os.sched_yield()
    time.sleep(kill.seconds)
    return None if process is None or process_of(launcher, kill.rank) != process else process


def kill_one(kill: Kill, folder: Path, store: Path, result: Result) -> None:
    """Start a run and kill one of its ranks; see how the others end."""
    launcher = start(kill.num_ranks, folder, store)
    process = wait_until(kill, launcher, store)
    if process is None:
        launcher.kill()
        result.faults.append(f"{kill}: the run had ended by itself: {launcher.communicate()[1][-2000:]}")
        return
    os.kill(process, signal.SIGKILL)
    killed = time.monotonic()
    try:
        said = launcher.communicate(timeout=ENDS_WITHIN_S)[1]
    except subprocess.TimeoutExpired:
        launcher.kill()
        result.faults.append(f"{kill}: torchrun had not ended {ENDS_WITHIN_S} s later")
        return
    took = time.monotonic() - killed
    wait_for_orphans()
    left, is_named = committed_ids(store), f"error: rank {kill.rank} (pid {process} on" in said
    # torchrun looks every 0.1 s and ends the others: that may be before they have met it
    is_told = is_named or f"local_rank: {kill.rank} (pid: {process})" in said
    how = "the others named it" if is_named else "torchrun named it" if is_told else "nobody named it"
    result.lines.append(
        f"{kill}: torchrun ended with {launcher.returncode} {took:.1f} s later, {how}, {len(left)} images committed"
    )
    if launcher.returncode != 1 or "Traceback" in said.partition("error: ")[0] * is_named:
        result.faults.append(f"{kill}: torchrun ended with {launcher.returncode} and said {said[-2000:]}")
    if not is_told:
        result.faults.append(f"{kill}: nobody named it: {said[-2000:]}")
    if lost := set(noted_ids(store)) - left:
        result.faults.append(f"{kill}: {len(lost)} committed samples are lost, {min(lost)} among them")


def finish(num_ranks: int, folder: Path, store: Path, whole: Path, result: Result) -> None:
    """Let the run finish, and pack another store in one process that nobody interrupts; compare."""
    launcher = start(num_ranks, folder, store)
    said = launcher.communicate()[1]
    if launcher.returncode != 0:
        result.faults.append(f"the last run, of {num_ranks} ranks, ended with {launcher.returncode}: {said[-2000:]}")
        return
    subprocess.run([sys.executable, "-m", "bucketline.ingest", *asked(folder, whole)], check=True, capture_output=True)
    result.compared = compare(store, whole)
    result.faults += result.compared.faults
    rejects = [(path / "rejects.jsonl").read_text(encoding="ascii") for path in (store, whole)]
    if rejects[0] != rejects[1] or len(rejects[0].splitlines()) != NUM_BROKEN:
        result.faults.append(f"the rejects are {rejects[0]}, expected {rejects[1]}")


def write_source(folder: Path) -> None:
    """Write the model, and the images that are packed, some of them broken."""
    write_model(folder / "model")
    write_images(folder / "photos", NUM_IMAGES)
    for number in range(NUM_BROKEN):
        (folder / "photos" / f"{number}.png").write_bytes(json.dumps({"no": "image"}).encode() * number)


def run(kills: int, ranks: list[int], seed: int, folder: Path) -> Result:
    """Kill `kills` runs of one store."""
    draw, result = random.Random(seed), Result()
    write_source(folder)
    store = folder / "killed"
    for number, goal in enumerate(sorted(draw.sample(range(1, NUM_IMAGES - 60), kills))):
        num_ranks = ranks[number % len(ranks)]
        is_early = draw.random() < 0.25  # while it loads, meets the others, adopts
        images, seconds = (0, draw.random() * 8.0) if is_early else (goal, draw.random() * 0.02)
        kill = Kill(num_ranks=num_ranks, rank=draw.randrange(num_ranks), images=images, seconds=seconds)
        kill_one(kill, folder, store, result)
        print(*result.lines[-1:], sep="\n", flush=True)
    finish(ranks[kills % len(ranks)], folder, store, folder / "whole", result)
    return result


def main() -> int:
    """Print what was tried and found; 1 where anything was lost."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=12)
    parser.add_argument("--ranks", default="2,3,1", help="numbers of ranks, taken in turn")
    parser.add_argument("--seed", type=int, default=0)
    told = parser.parse_args()
    adopt_orphans()
    ranks = [int(number) for number in told.ranks.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        result = run(told.kills, ranks, told.seed, Path(folder))
    print(f"finished with {ranks[told.kills % len(ranks)]} ranks")
    if result.compared is not None:
        print(f"{'samples compared with an unkilled pack':40}{result.compared.samples:6}")
        print(f"largest difference of a latent          {result.compared.largest_difference:.2e}, of at most {TOLERANCE}")
    print(f"{'faults':40}{len(result.faults):6}")
    for fault in result.faults:
        print(fault)
    return int(bool(result.faults))


if __name__ == "__main__":
    sys.exit(main())
