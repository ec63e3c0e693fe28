"""Odd dates: images from before 1970 and from after 2262 in every kind of source, and tars whose headers say no time at all.

Each source is packed, verified and packed again: every image is there, and unchanged the second time.
"""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.fault.ground import Ground, is_sound, judged
from tests.fault.record import Asked, Kind, Outcome, Record
from tests.models import png, write_images

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
NUM_IMAGES = 4


def odd_dates(asked: Asked) -> Iterator[Record]:
    """Try them all."""
    ground = Ground.prepare(asked)
    yield dated_sources(ground, asked.of(1, 8))
    yield tar_times(ground, asked.of(1, 12))


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
    """Tars whose members' times are not numbers, or are out of every range; as PAX headers and in base 256."""
    record = Record(fault="tars with odd times in their headers", kind=Kind.INPUT)
    for _ in range(rounds):
        drawn = [f"{ground.draw.choice(['', '-'])}{ground.draw.random()}e{ground.draw.randrange(-20, 330)}" for _ in range(6)]
        tar = ground.fresh() / "a.tar"
        with tarfile.open(tar, "w", format=tarfile.PAX_FORMAT) as archive:
            for n, time in enumerate((*TIMES, *drawn)):
                info, data = tarfile.TarInfo(f"{n}.png"), png(20, 30, n)
                info.size, info.pax_headers = len(data), {"mtime": time}
                archive.addfile(info, io.BytesIO(data))
        outcome, said = packed_twice(ground, str(tar), len(TIMES) + len(drawn))
        record.add(outcome, f"{drawn}: {said}")
        old = ground.fresh() / "b.tar"
        times = [ground.draw.choice([-1, 1]) << ground.draw.randrange(88) for _ in range(NUM_IMAGES)]
        with tarfile.open(old, "w", format=tarfile.GNU_FORMAT) as archive:
            for n, seconds in enumerate(times):
                info, data = tarfile.TarInfo(f"{n}.png"), png(20, 30, n)
                info.size, info.mtime = len(data), seconds
                archive.addfile(info, io.BytesIO(data))
        outcome, said = packed_twice(ground, str(old), NUM_IMAGES)
        record.add(outcome, f"{times}: {said}")
    return record
