"""Packs onto disks that are too small by less and less, then makes room and continues."""

from __future__ import annotations

import gc
import shutil
from collections.abc import Iterator
from pathlib import Path

from bucketline.errors import BucketlineError
from bucketline.store import Store
from tests.constrained import SmallDisk
from tests.fault.ground import ids_of, is_sound
from tests.fault.record import Asked, Kind, Outcome, Record
from tests.kit import add_samples, samples_of, store_writer

ROOM_BYTES = 1 << 26
SAMPLES = samples_of({"train/128x128": 40})


def attempt(store: Path, committed: list[str], stage: list[str]) -> None:
    """Pack like a real run: adopt, write what is not yet there, seal, publish."""
    stage[0] = "begin"
    with store_writer(store) as writer:
        stage[0] = "write"
        taken: list[str] = []
        for sample in SAMPLES:
            if sample.id not in writer:
                add_samples(writer, [sample])
                taken.append(sample.id)
            if len(taken) == 8:
                writer.commit()
                committed += taken
                taken = []
        writer.commit()
        committed += taken
        stage[0] = "seal"
        writer.seal()
        stage[0] = "publish"
        writer.publish()
    stage[0] = "done"


def full_disks(asked: Asked) -> Iterator[Record]:
    """A disk too small, by less and less; then room is made."""
    disk, store = SmallDisk(asked.folder, ROOM_BYTES), asked.folder / "s"
    record = Record(fault="a full disk while a store is written, then room", kind=Kind.DISK)
    stage = ["lock"]
    for num_bytes in range(4096, 1 << 20, 12 << 10):
        committed, said = list[str](), ""
        disk.resize(num_bytes)
        try:
            attempt(store, committed, stage)
        except BucketlineError as error:
            said = str(error).replace("\n", " ")
        ended = stage[0]
        disk.resize(ROOM_BYTES)
        attempt(store, [], stage)
        what = f"{num_bytes} bytes, ended at {ended}, {len(committed)} committed, said {said!r}"
        is_said = any(words in said for words in ("is the disk full?", "rerun")) and (
            not disk.is_disk or "full" in said or "No space left" in said
        )
        if (wrong := is_sound(store)) or ids_of(store) != sorted(sample.id for sample in SAMPLES):
            record.add(Outcome.WRONG, f"{what}: {wrong or 'not every sample is there'}")
        elif lost := set(committed) - _written_first(store):
            record.add(Outcome.LOST, f"{what}: {sorted(lost)}")
        elif ended == "done":
            record.add(Outcome.COMPLETED)
            break
        else:
            record.add(Outcome.RECOVERED if is_said else Outcome.DEFECT, what)
        shutil.rmtree(store)
        gc.collect()  # what an error's traceback holds open takes room on the disk
    else:
        record.add(Outcome.DEFECT, "the disk was never large enough")
    yield record


def _written_first(store: Path) -> set[str]:
    """Return those samples that the second attempt found there: all shards but the last are the first one's."""
    first = Store.open(store).shards[0]
    return {first.record(first.index_entry(n)).id for n in range(first.entry.samples)}
