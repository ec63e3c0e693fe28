"""Odd dates: images from before 1970 and from after 2262 in every kind of source, and tars whose headers say no time at all.

Each source is packed, verified and packed again: every image is there, and unchanged the second time. Shards that an earlier
version left pending with a date that no index holds are adopted.
"""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

import lmdb
import msgpack

from bucketline.store.format.manifest import Manifest
from bucketline.store.write.publish import adopt, lock_store, publish
from tests.fault.apart import How, apart
from tests.fault.ground import Ground, ids_of, is_sound, judged
from tests.fault.record import Asked, Kind, Outcome, Record
from tests.kit import add, empty_store, open_writer, samples_of
from tests.models import png, write_images
from tests.streamed import streamed

YEAR_NS = 31_556_952 * 10**9
TIMES = (
    "nan",
    "-nan",
    "inf",
    "-inf",
    "1e400",
    "-1e400",
    "1e300",
    "9" * 300,
    "-" + "9" * 30,
    "0x10",
    "soon",
    "",
    "1e-400",
    "-0.0",
)
FIRST_UNSEALABLE, LAST_PACKABLE = 1 << 63, (1 << 64) - 1  # ns: beyond the index's I64, and the last that msgpack takes
NUM_IMAGES = 4


def odd_dates(asked: Asked) -> Iterator[Record]:
    """Try them all."""
    ground = Ground.prepare(asked)
    yield dated_sources(ground, asked.of(1, 8))
    yield tar_times(ground, asked.of(1, 12))
    yield poisoned_shards(ground, asked.of(4, 60))


def draw_ns(ground: Ground) -> int:
    """Draw a date between the years 1000 and 30000; a file system that cannot hold it holds the nearest that it can."""
    return ground.draw.choice([ground.draw.randrange(-970, 0), ground.draw.randrange(292, 28_000), 292]) * YEAR_NS


def packed_twice(ground: Ground, source: object, count: int) -> tuple[Outcome, str]:
    """Pack a source, and again: the second time every image must be unchanged."""
    store = ground.fresh() / "s"
    for what in ("packed", "unchanged"):
        ended = ground.packed(source, store)
        outcome, said = judged(ended)
        if outcome is not Outcome.COMPLETED:
            return (
                Outcome.DEFECT if outcome is Outcome.CLEAN_ERROR else outcome
            ), f"{what}: {said or ended.gave['err'][-300:]}"
        if f'"{what}": {count},' not in ended.gave["out"]:
            return Outcome.LOST, f"not all are {what}: {ended.gave['out'][:200]}"
    wrong = is_sound(store)
    return (Outcome.WRONG, wrong) if wrong else (Outcome.COMPLETED, "")


def folder_of(ground: Ground) -> tuple[Path, list[str]]:
    source = ground.fresh()
    return source, write_images(source, NUM_IMAGES)


def a_folder(ground: Ground, mtime_ns: int) -> tuple[Path, int]:
    source, ids = folder_of(ground)
    for path in source.rglob("*"):
        os.utime(path, ns=(0, mtime_ns))
    return source, len(ids)


def a_table(ground: Ground, mtime_ns: int) -> tuple[object, int]:
    source, count = a_folder(ground, mtime_ns)
    names = sorted(path.relative_to(source).as_posix() for path in source.rglob("*.png"))
    (source / "t.csv").write_text("file_name,text\n" + "".join(f"{name},a cat\n" for name in names), encoding="ascii")
    return source / "t.csv", count


def a_tar(ground: Ground, mtime_ns: int) -> tuple[object, int]:
    source, ids = folder_of(ground)
    path = ground.fresh() / "a.tar"
    with tarfile.open(path, "w") as archive:
        for name in ids:
            archive.add(source / name, name.replace("/", "-"))
    os.utime(path, ns=(0, mtime_ns))
    return path, len(ids)


def a_saved_dataset(ground: Ground, mtime_ns: int) -> tuple[object, int]:
    import datasets

    path = ground.fresh() / "d"
    rows = {"image": [{"bytes": png(20, 30, n), "path": None} for n in range(NUM_IMAGES)], "text": ["a cat"] * NUM_IMAGES}
    datasets.disable_progress_bars()
    datasets.Dataset.from_dict(rows).cast_column("image", datasets.Image()).save_to_disk(path)
    for file in path.iterdir():
        os.utime(file, ns=(0, mtime_ns))
    return path, NUM_IMAGES


SOURCES: tuple[Callable[[Ground, int], tuple[object, int]], ...] = (a_folder, a_table, a_tar, a_saved_dataset)


def dated_sources(ground: Ground, rounds: int) -> Record:
    """Files of every kind of source dated long ago, or far ahead."""
    record = Record(fault="images dated before 1970 or after 2262", kind=Kind.INPUT)
    for _ in range(rounds):
        for make in SOURCES:
            mtime_ns = draw_ns(ground)
            outcome, said = packed_twice(ground, *make(ground, mtime_ns))
            record.add(outcome, f"{make.__name__}, {mtime_ns} ns: {said}")
    return record


def tar_times(ground: Ground, rounds: int) -> Record:
    """Streamed tars whose members' times are not numbers, or are out of every range; as PAX headers and in base 256."""
    record = Record(fault="tars with odd times in their headers", kind=Kind.INPUT)
    for _ in range(rounds):
        drawn = [f"{ground.draw.choice(['', '-'])}{ground.draw.random()}e{ground.draw.randrange(-20, 330)}" for _ in range(6)]
        tar = ground.fresh() / "a.tar"
        with tarfile.open(tar, "w", format=tarfile.PAX_FORMAT) as archive:
            for n, time in enumerate((*TIMES, *drawn)):
                info, data = tarfile.TarInfo(f"{n}.png"), png(20, 30, n)
                info.size, info.pax_headers = len(data), {"mtime": time}
                archive.addfile(info, io.BytesIO(data))
        outcome, said = packed_twice(ground, streamed(tar), len(TIMES) + len(drawn))
        record.add(outcome, f"{drawn}: {said}")
        old = ground.fresh() / "b.tar"
        times = [ground.draw.choice([-1, 1]) << ground.draw.randrange(88) for _ in range(NUM_IMAGES)]
        with tarfile.open(old, "w", format=tarfile.GNU_FORMAT) as archive:
            for n, seconds in enumerate(times):
                info, data = tarfile.TarInfo(f"{n}.png"), png(20, 30, n)
                info.size, info.mtime = len(data), seconds
                archive.addfile(info, io.BytesIO(data))
        outcome, said = packed_twice(ground, streamed(old), NUM_IMAGES)
        record.add(outcome, f"{times}: {said}")
    return record


def poisoned_shards(ground: Ground, trials: int) -> Record:
    """Shards that were left pending with a date that fits a record and no index."""
    record = Record(fault="a pending shard with a date that no index holds", kind=Kind.INPUT)
    for _ in range(trials):
        store, mtime_ns = ground.fresh() / "s", ground.draw.randint(FIRST_UNSEALABLE, LAST_PACKABLE)
        manifest = empty_store(store)
        samples = samples_of({"train/8x8": ground.draw.randrange(1, 30)})
        writer = open_writer(store, "left")
        for sample in samples:
            add(writer, sample)
        writer.commit()
        writer.close()
        poison(writer.path, ground.draw.randrange(len(samples)), mtime_ns)

        def adopted(store: Path = store, manifest: Manifest = manifest) -> None:
            with lock_store(store):
                publish(store, manifest, adopt(store, manifest), ())

        ended = apart(adopted)
        if ended.how is not How.DONE:
            record.add(Outcome.LOST if ended.how is How.REFUSED else ended.outcome, f"{mtime_ns}: {ended.said}")
        elif ids_of(store) != sorted(sample.id for sample in samples) or is_sound(store):
            record.add(Outcome.LOST, f"{mtime_ns}: {len(ids_of(store))} of {len(samples)} samples, {is_sound(store)}")
        else:
            record.add(Outcome.RECOVERED)
    return record


def poison(pending: Path, number: int, mtime_ns: int) -> None:
    """Return one of a pending shard's records a date, as an earlier writer would have written it."""
    with lmdb.open(str(pending), subdir=False, lock=False, map_size=1 << 24) as env, env.begin(write=True) as txn:
        records = [(bytes(key), bytes(value)) for key, value in txn.cursor() if key.startswith(b"sample/")]
        key, value = records[number]
        txn.put(key, msgpack.packb({**msgpack.unpackb(value), "source_mtime_ns": mtime_ns}))
