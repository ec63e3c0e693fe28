"""Kills packing runs, `kill -9`, at random moments, and sees what is left each time.

`python -m tests.fault.killed_packs --kills 200 --seed 1` prints a table by the phase in which the run was. A run writes
shards as `ingest pack` does (adopt what is left, write and commit, seal, publish), on the store that the last kill left, and
tells through a pipe each commit that has returned. Of the kills, `--packs` are of `ingest pack` itself, encoders and all; of
the others, every second one is of a writer of a store of columns of any kind.
With `--in-a-row 20`, one `ingest pack` of one store is killed 20 times and then finishes; the store must be that of a run
that nobody interrupted, to the latents.
After each kill the store must open and verify clean; and, on a copy, so must it once the next run has adopted what is left:
then no committed sample may be missing, or other than it was.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from bucketline.store import Store
from bucketline.store.format.manifest import MANIFEST
from bucketline.store.verify.verify import verify
from bucketline.store.write import shard_writer
from bucketline.store.write.newest import newest_manifest
from bucketline.store.write.target import LocalTarget
from tests.building import Sample, make_sample
from tests.fault.packs_in_a_row import InARow, adopt_orphans, kill_in_a_row, wait_for_orphans
from tests.fault.same_store import TOLERANCE
from tests.reading import everything
from tests.store_forms import COLUMNS, IMAGES, Form

BUCKETS = ("train/64x64", "train/8x8", "val/64x64")
KILLS_A_STORE = 8  # then a new one is begun
COMMITS_A_SHARD = 4
SAMPLES_A_COMMIT = 3
MANY = 1000  # shards: the run is killed long before
MOMENTS = ("commit:{}+", "commit:{}", "row:{}", "compact:1", "compact:1+", "sidecar:1", "move:1", "move:1+", "manifest:2")


@dataclass(slots=True)
class Result:
    """The outcome of the kills."""

    phases: Counter[str] = field(default_factory=Counter)
    verified: int = 0
    adopted: int = 0
    committed: int = 0
    failures: list[str] = field(default_factory=list)


def name_of(run: int, number: int) -> str:
    return f"{run}/{number}.png"


def sample_of(name: str, number: int) -> Sample:
    return make_sample(name, BUCKETS[number % len(BUCKETS)], (f"caption {number % 5}",))


def write_shards(store: Path, run: int, pipe: int, shards: int, form: Form) -> None:
    """Be the run: adopt, then write, seal and publish shard after shard, telling every phase."""

    def tell(phase: str, count: int = 0) -> None:
        os.write(pipe, f"{phase} {count}\n".encode())

    shard_writer.COMMIT_BYTES = 1 << 30  # commits are those below
    tell("begin")
    with form.writer(store) as writer:
        count = 0
        for _ in range(shards):
            tell("write", count)
            for _ in range(COMMITS_A_SHARD):
                for _ in range(SAMPLES_A_COMMIT):
                    form.add(writer, [sample_of(name_of(run, count), count)])
                    count += 1
                writer.commit()
                tell("commit", count)
            tell("seal", count)
            writer.seal()
            tell("publish", count)
            writer.publish()


def kill_one(store: Path, run: int, draw: random.Random, form: Form) -> tuple[str, int]:
    """Start a run and kill it; give the phase it was in, and how many of its samples were committed."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)
        os.close(reader)
        try:
            write_shards(store, run, writer, MANY, form)
        except BaseException:  # noqa: BLE001 - said where it can be seen; a forked process must not continue from here
            traceback.print_exc()
        finally:
            os._exit(1)
    os.close(writer)
    told, wanted = b"", draw.choice([draw.randrange(1, 5), draw.randrange(3, 60)])
    while told.count(b"\n") < wanted and (part := os.read(reader, 1)):
        told += part
    time.sleep(draw.choice([0.0, draw.random() * 0.002, draw.random() * 0.03]))
    if draw.random() < 0.5:
        os.kill(child, signal.SIGKILL)
    else:  # with the process that seals what an earlier run left, if there is one; else that one comes to its end
        os.killpg(child, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    wait_for_orphans()
    while part := os.read(reader, 4096):
        told += part
    os.close(reader)
    lines = told.decode().splitlines()
    if status != -signal.SIGKILL:
        return f"ended by itself with {status}", 0
    return lines[-1].split()[0], max(int(line.split()[1]) for line in lines)


def check(store: Path, copy: Path, committed: dict[str, int], result: Result, form: Form = IMAGES) -> None:
    """See what a kill left: as it is, and, on a copy, after the next run has adopted it. `committed`: id → its number."""
    result.committed += len(committed)
    try:
        if (store / MANIFEST).exists():  # else the run was killed before there was a store
            _verify(store)
        elif committed:
            raise ValueError("there is no manifest")
        result.verified += 1
        shutil.rmtree(copy, ignore_errors=True)
        if store.exists():
            shutil.copytree(store, copy)
        with LocalTarget(copy).writing(newest_manifest(copy) or form.writer(copy)._schema):
            pass  # what a killed writer left is adopted
        _verify(copy)
        if missing := _missing(copy, committed, form):
            raise ValueError(f"{len(missing)} committed samples are missing, {missing[0]} among them")
        result.adopted += 1
    except Exception as error:  # noqa: BLE001 - it is what is counted here
        where = traceback.extract_tb(error.__traceback__)[-1]
        result.failures.append(f"{store}: {error!r} {error} in {where.name}, {where.filename}:{where.lineno}")


def _verify(store: Path) -> None:
    result = verify(Store.open(store), lambda _: None, 1)
    if result.corrupt:
        raise ValueError(f"{len(result.corrupt)} faults: {result.corrupt[0]}")


def _missing(store: Path, committed: dict[str, int], form: Form) -> list[str]:
    """Return the samples that are not there, or not as they were written; a number of -1 says that only the id is known."""
    found = {held.record.id: held for rows in everything(Store.open(store)).values() for held in rows}
    return [
        name
        for name, number in committed.items()
        if name not in found or (number >= 0 and not form.is_sample(found[name], sample_of(name, number)))
    ]


def kill_writers(kills: int, draw: random.Random, folder: Path, result: Result, form: Form) -> None:
    """Kill runs that write through the store's own writer."""
    committed: dict[str, int] = {}
    store = folder / "s"
    for run in range(kills):
        if run % KILLS_A_STORE == 0:
            shutil.rmtree(store, ignore_errors=True)
            committed = {}
        phase, count = kill_one(store, run, draw, form)
        result.phases[phase] += 1
        committed |= {name_of(run, number): number for number in range(count)}
        check(store, folder / "copy", committed, result, form)


def kill_packs(kills: int, draw: random.Random, folder: Path, result: Result) -> None:
    """Kill runs of `ingest pack`."""
    from tests.models import GRID, write_images, write_model

    write_images(folder / "photos", 30)
    model = write_model(folder / "model")
    stores = [(folder / f"p{n}", draw.choice(MOMENTS).format(draw.randrange(2, 30))) for n in range(kills)]
    pairs = [str(part) for pair in stores for part in pair]
    script = Path(__file__).parent / "packs_at_moments.py"
    command = [sys.executable, str(script), str(folder / "photos"), str(model), GRID, *pairs]
    statuses = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    if set(statuses) != {str(-signal.SIGKILL)}:
        raise ValueError(f"not every pack was killed: {' '.join(statuses)}")
    for store, moment in stores:
        note = Path(f"{store}.committed")
        result.phases[f"ingest pack, {moment.partition(':')[0]}"] += 1
        check(store, folder / "copy", dict.fromkeys(note.read_text(encoding="utf-8").splitlines(), -1), result)


def run(kills: int, packs: int, seed: int, folder: Path) -> Result:
    """Kill `kills` runs, `packs` of them of `ingest pack`."""
    draw, result = random.Random(seed), Result()
    of_columns = (kills - packs) // 2
    kill_writers(kills - packs - of_columns, draw, folder, result, IMAGES)
    kill_writers(of_columns, draw, folder, result, COLUMNS)
    if packs:
        kill_packs(packs, draw, folder, result)
    return result


def main() -> int:
    """Print the table; 1 where anything was lost."""
    adopt_orphans()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--packs", type=int, default=12)
    parser.add_argument("--in-a-row", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = run(asked.kills, min(asked.packs, asked.kills), asked.seed, Path(folder))
        in_a_row = kill_in_a_row(asked.in_a_row, random.Random(asked.seed), Path(folder) / "row") if asked.in_a_row else None
    if asked.kills:
        print_table(result)
    is_bad = bool(result.failures) or any(phase.startswith("ended") for phase in result.phases)
    return int(print_in_a_row(in_a_row) or is_bad) if in_a_row else int(is_bad)


def print_table(result: Result) -> None:
    """Print the kills by the phase in which the run was, and what was found."""
    for phase, count in sorted(result.phases.items()):
        print(f"killed in {phase:30}{count:6}")
    print(f"{'kills':40}{sum(result.phases.values()):6}")
    print(f"{'stores that opened and verified as left':40}{result.verified:6}")
    print(f"{'stores adopted, verified, nothing missing':40}{result.adopted:6}")
    print(f"{'committed samples looked for':40}{result.committed:6}")
    print(f"{'failures':40}{len(result.failures):6}")
    for failure in result.failures:
        print(failure)


def print_in_a_row(result: InARow) -> bool:
    """Print what came of one pack that was killed again and again; True where it is not what it should be."""
    print(f"one pack, killed {len(result.left)} times, had committed {' '.join(map(str, result.left))} images, and finished:")
    if result.compared is not None:
        print(f"{'samples compared with an unkilled pack':40}{result.compared.samples:6}")
        print(f"largest difference of a latent          {result.compared.largest_difference:.2e}, of at most {TOLERANCE}")
    print(f"{'faults':40}{len(result.faults):6}")
    for fault in result.faults:
        print(fault)
    return bool(result.faults)


if __name__ == "__main__":
    sys.exit(main())
