"""Packs onto disks that are too small by less and less, then makes room and continues. Run in a process of its own.

Argument: an empty folder. Prints, for each size in bytes, where the first attempt ended, and what it said.
"""

from __future__ import annotations

import gc
import shutil
import sys
from pathlib import Path

import numpy as np

from bucketline.errors import BucketlineError
from bucketline.store import Store
from bucketline.store.verify.verify import verify
from tests.building import add_samples, samples_of, store_writer
from tests.constrained import SmallDisk

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


def _ids(store: Path) -> set[str]:
    opened = Store.open(store)
    return {name for bucket in opened.buckets() for name in bucket.sample_ids(np.arange(bucket.num_rows))}


def main() -> int:
    """Try every size."""
    folder = Path(sys.argv[1])
    disk = SmallDisk(folder, ROOM_BYTES)
    print("disk" if disk.is_disk else "limit")
    for num_bytes in range(4096, 1 << 20, 12 << 10):
        store, committed, stage = folder / "s", list[str](), ["lock"]
        disk.resize(num_bytes)
        said = ""
        try:
            attempt(store, committed, stage)
        except BucketlineError as error:
            said = str(error).replace("\n", " ")
        print(f"{num_bytes}\t{stage[0]}\t{len(committed)}\t{said}")
        disk.resize(ROOM_BYTES)
        if stage[0] == "done":
            return 0
        before = set(committed)
        attempt(store, [], stage)
        result = verify(Store.open(store), lambda _: None, 1)
        if result.corrupt or _ids(store) != {sample.id for sample in SAMPLES}:
            print(f"after room was made: {result.corrupt}")
            return 1
        if lost := before - _written_first(store, before):
            print(f"lost: {sorted(lost)}")
            return 1
        shutil.rmtree(store)
        gc.collect()  # what an error's traceback holds open takes room on the disk
    return 1


def _written_first(store: Path, committed: set[str]) -> set[str]:
    """Return those samples that the second attempt found there: all shards but the last are the first one's."""
    opened = Store.open(store)
    if not committed:
        return set()
    first = opened.shards[0]
    return {first.record(first.index_entry(n)).id for n in range(first.entry.samples)} & committed


if __name__ == "__main__":
    sys.exit(main())
