"""Kills what writes shards, `kill -9`, at random moments, and sees what is left each time.

A run writes shards as `ingest pack` does (adopt what is left, write and commit, seal, publish), on the store that the last
kill left, and tells through a pipe each commit that has returned; or it is `ingest pack` itself, encoders and all. After
each kill the store must open and verify clean; and, on a copy, so must it once the next run has adopted what is left: then
no committed sample may be missing, or other than it was.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from bucketline.store import Store
from bucketline.store.format.manifest import MANIFEST
from bucketline.store.write import shard_writer
from bucketline.store.write.change_base import newest_manifest
from bucketline.store.write.publish import LocalTarget
from tests.commands import ROOT, spawn
from tests.fault.ended_packs import KILLED, adopt_orphans, ended_again_and_again, wait_for_orphans
from tests.fault.ground import is_sound
from tests.fault.record import COLUMNS_TOO, Asked, Kind, Outcome, Record, recorded
from tests.fault.same_store import noted_ids
from tests.kit import COLUMNS, IMAGES, Form, Sample, by_id, make_sample
from tests.models import SMALL, write_images, write_model

BUCKETS = ("train/64x64", "train/8x8", "val/64x64")
KILLS_A_STORE = 8  # then a new one is begun
COMMITS_A_SHARD = 4
SAMPLES_A_COMMIT = 3
MANY = 1000  # shards: the run is killed long before
MOMENTS = ("commit:{}+", "commit:{}", "row:{}", "compact:1", "compact:1+", "sidecar:1", "move:1", "move:1+", "manifest:2")


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


def kill_one(store: Path, run: int, draw: random.Random, form: Form) -> tuple[int, int]:
    """Start a run and kill it; return its exit code, and how many of its samples were committed."""
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
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    wait_for_orphans()
    while part := os.read(reader, 4096):
        told += part
    os.close(reader)
    return code, max(int(line.split()[1]) for line in told.decode().splitlines())


def fault_of(store: Path, copy: Path, committed: dict[str, int], form: Form = IMAGES) -> str | None:
    """Describe what is wrong with what a kill left: as it is, and, on a copy, after the next run has adopted it.

    `committed`: by id the number of a sample, -1 if only the id is known.
    """
    try:
        if committed and not (store / MANIFEST).exists():  # else the run was killed before there was a store
            raise ValueError("there is no manifest, and samples are lost")
        shutil.rmtree(copy, ignore_errors=True)
        if store.exists():
            shutil.copytree(store, copy)
        with LocalTarget(copy).writing(newest_manifest(copy) or form.writer(copy)._schema):
            pass  # what a killed writer left is adopted
        for path in (store, copy):
            if wrong := is_sound(path):
                raise ValueError(wrong)
        if missing := _missing(copy, committed, form):
            raise ValueError(f"{len(missing)} committed samples are missing, {missing[0]} among them")
    except Exception as error:  # noqa: BLE001 - it is what is counted here
        where = traceback.extract_tb(error.__traceback__)[-1]
        return f"{store}: {error!r} {error} in {where.name}, {where.filename}:{where.lineno}"
    return None


def _missing(store: Path, committed: dict[str, int], form: Form) -> list[str]:
    """Return the samples that are not there, or not as they were written."""
    found = by_id(Store.open(store))
    return [
        name
        for name, number in committed.items()
        if name not in found or (number >= 0 and not form.is_sample(found[name], sample_of(name, number)))
    ]


def kill_writers(kills: int, draw: random.Random, folder: Path, form: Form) -> list[str | None]:
    """Kill runs that write through the store's own writer; return what was wrong after each."""
    committed: dict[str, int] = {}
    store, faults = folder / "s", list[str | None]()
    for run in range(kills):
        if run % KILLS_A_STORE == 0:
            shutil.rmtree(store, ignore_errors=True)
            committed = {}
        code, count = kill_one(store, run, draw, form)
        committed |= {name_of(run, number): number for number in range(count)}
        is_killed = code == -signal.SIGKILL
        faults.append(fault_of(store, folder / "copy", committed, form) if is_killed else f"a run ended by itself with {code}")
    return faults


def kill_packs(kills: int, draw: random.Random, folder: Path) -> list[str | None]:
    """Kill runs of `ingest pack`; return what was wrong after each."""
    write_images(folder / "photos", 30)
    moments = {f"p{n}": draw.choice(MOMENTS).format(draw.randrange(2, 30)) for n in range(kills)}
    asked = ["pack", folder / "photos", folder / "{}", "--model", write_model(folder / "model"), *SMALL, "--batch-size", 3]
    runs = [f"{name},1,0:{moment}:kill" for name, moment in moments.items()]
    ran = spawn([sys.executable, "-m", "tests.fault.ranks_at_moments", *runs, "--", *asked], PYTHONPATH=str(ROOT))
    if ran.code or any(run["codes"] != [-signal.SIGKILL] for run in json.loads(ran.out)):
        raise ValueError(f"not every pack was killed: {ran.out} {ran.err}")
    stores = [folder / name for name in moments]
    return [fault_of(store, folder / "copy", dict.fromkeys(noted_ids(store), -1)) for store in stores]


def killed_packs(asked: Asked) -> Iterator[Record]:
    """`kill -9` of what writes shards, and of `ingest pack`, once each and many times in a row."""
    adopt_orphans()
    draw = random.Random(asked.seed)
    for fault, kill, kills in (
        ("writer of shards killed", partial(kill_writers, form=IMAGES), asked.of(8, 400)),
        (f"writer of shards killed{COLUMNS_TOO}", partial(kill_writers, form=COLUMNS), asked.of(8, 200)),
        ("ingest pack killed", kill_packs, asked.of(2, 40)),
    ):
        faults = kill(kills, draw, asked.folder)
        yield recorded(fault, Kind.KILL, {Outcome.RECOVERED: faults.count(None)}, [one for one in faults if one is not None])
    yield from ended_again_and_again(KILLED, asked.of(4, 30), asked.folder / "row", draw)
