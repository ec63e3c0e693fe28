"""A disk that fails half-way: EIO on read, write and fsync, a full disk, one that turns read-only. Run under the disk shim.

Writing: a run that adopts, writes, seals and publishes ends with an error of ours wherever the disk begins to fail; then, on
the disk as it is after it was fixed, nothing whose commit had returned is missing, and the next run continues.
Reading: what plain reads, `verify`, and a loader of plain reads give is what was written, or an error of ours.
"""

from __future__ import annotations

import errno
import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from bucketline.loader import Loader, LoaderConfig
from bucketline.store import Store
from bucketline.store.verify.verify import verify
from tests.fault.apart import Ended, How, apart
from tests.fault.full_disk import SAMPLES, attempt
from tests.fault.ground import ids_of, is_sound
from tests.fault.killed_packs import fault_of
from tests.fault.record import GOOD, Asked, Kind, Outcome, Record
from tests.fault.shim import FAILURES, NEVER, Operation, Shim, records_under_shim
from tests.kit import make_store, samples_of


def failing_disks(asked: Asked) -> Iterator[Record]:
    """Start the process that runs under the shim."""
    yield from records_under_shim("disk_faults:under_shim", asked, "a disk that fails")


def writing(shim: Shim, store: Path, failure: tuple[Operation, int, int]) -> Callable[[], object]:
    """Return what a writing run does, and gives: the ids whose commit had returned, and how often the operation came."""

    def work() -> object:
        committed, stage = list[str](), ["lock"]
        note = store.with_name("committed")
        try:
            with shim.failing(*failure):
                attempt(store, committed, stage)
        finally:
            note.write_text(json.dumps(committed))
        return shim.count(failure[0])

    return work


def write_trial(shim: Shim, folder: Path, failure: tuple[Operation, int, int], record: Record) -> None:
    """Write onto a disk that fails, see what is left, fix the disk, continue."""
    store = folder / "s"
    shutil.rmtree(store, ignore_errors=True)
    ended = apart(writing(shim, store, failure))
    said = f"{failure}: {ended.said}"
    if ended.outcome not in GOOD:
        record.add(ended.outcome, said)
        return
    committed = json.loads(store.with_name("committed").read_text())
    store.mkdir(exist_ok=True)
    if wrong := fault_of(store, folder / "copy", dict.fromkeys(committed, -1)):
        record.add(Outcome.LOST, f"{said}; then {wrong}")
        return
    again = apart(lambda: attempt(store, [], ["lock"]))
    if again.how is not How.DONE or ids_of(store) != sorted(sample.id for sample in SAMPLES) or is_sound(store):
        record.add(Outcome.DEFECT, f"{said}; the next run: {again.said}")
        return
    record.add(Outcome.COMPLETED if ended.how is How.DONE else Outcome.RECOVERED)


def plain_reads(path: Path) -> list[str]:
    """Read all of a store without a map; give what stands for it."""
    from bucketline.store.format.hashing import bytes_digest

    store, found = Store.open(path), []
    for bucket in store.buckets():
        rows = np.arange(bucket.num_rows)
        found += [bytes_digest(bucket.read(rows, column.name).tobytes()) for column in bucket.columns]
        for sample_id in bucket.sample_ids(rows):
            shard, sample = store.sample(sample_id)
            found += [sample.id, *sample.captions]
            found += [store.caption(store.shards.index(shard), row).digest.hex() for row in sample.caption_rows]
    return found


def verified(path: Path) -> list[str]:
    """Verify a store; give every fault, of which a disk that fails must have one."""
    return [str(fault) for fault in verify(Store.open(path), lambda _: None, 1).corrupt]


def loaded(path: Path) -> list[str]:
    """Load one pass by plain reads; give what stands for its batches."""
    from bucketline.store.format.hashing import bytes_digest

    config = LoaderConfig(batch_size=3, plain_reads=True, prefetch_bytes=1, threads=1, verify=True)
    with Loader(path, config) as loader:
        batches = loader.forever()
        return [bytes_digest(next(batches).latents.numpy().tobytes()) for _ in range(20)]


READERS: dict[str, Callable[[Path], list[str]]] = {
    "plain reads": plain_reads,
    "verify": verified,
    "a loader of plain reads": loaded,
}


def read_trial(shim: Shim, path: Path, name: str, after: int, record: Record, expected: list[str]) -> None:
    """Read from a disk that gives errors after a while."""
    read = READERS[name]

    def work() -> object:
        with shim.failing(Operation.READ, errno.EIO, after):
            found = read(path)
            return found, shim.count(Operation.READ) > after

    record.add(*_read_outcome(apart(work), name, expected))


def _read_outcome(ended: Ended, name: str, expected: list[str]) -> tuple[Outcome, str]:
    if ended.how is How.REFUSED:
        is_named = any(word in ended.said for word in ("shards", "manifest", "shard g"))
        return (Outcome.CLEAN_ERROR, "") if is_named else (Outcome.DEFECT, f"names no file: {ended.said}")
    if ended.how is not How.DONE:
        return ended.outcome, ended.said
    found, has_failed = ended.gave
    if name == "verify" and has_failed:
        return (Outcome.CLEAN_ERROR, "") if found else (Outcome.WRONG, "verify found nothing")
    return (Outcome.COMPLETED, "") if found == expected else (Outcome.WRONG, "other rows than were written")


def under_shim(asked: Asked) -> Iterator[Record]:
    """Try everything under the shim."""
    shim, draw = Shim(), random.Random(asked.seed)
    shim.watch(asked.folder / "disk")
    (asked.folder / "disk").mkdir()
    for name, operation, error in FAILURES:
        record = Record(fault=f"{name}, while a store is written", kind=Kind.DISK)
        store = asked.folder / "disk" / "s"
        shutil.rmtree(store, ignore_errors=True)
        counted = apart(writing(shim, store, (operation, error, NEVER)))
        if counted.how is not How.DONE:
            record.add(Outcome.DEFECT, f"nothing failed: {counted.said}")
        else:
            for after in draw.sample(range(int(counted.gave)), min(int(counted.gave), asked.of(4, 25))):
                write_trial(shim, asked.folder / "disk", (operation, error, after), record)
        yield record
    path = asked.folder / "disk" / "read"
    make_store(path, samples_of({"train/64x64": 12, "train/8x8": 3}), samples_of({"train/64x64": 6}, "more/"))
    for name, read in READERS.items():
        record = Record(fault=f"EIO on read, by {name}", kind=Kind.DISK)

        def whole(read: Callable[[Path], list[str]] = read) -> object:
            with shim.failing(Operation.READ, errno.EIO, NEVER):
                return read(path), shim.count(Operation.READ)

        counted = apart(whole)
        if counted.how is not How.DONE:
            record.add(Outcome.DEFECT, f"nothing failed: {counted.said}")
            yield record
            continue
        expected, reads = counted.gave
        for _ in range(asked.of(6, 40)):
            read_trial(shim, path, name, draw.randrange(reads), record, expected)
        yield record
