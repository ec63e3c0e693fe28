"""Use and misuse of a store: two runs at once, moving and copying it, odd names and dates, many files, a changing source."""

from __future__ import annotations

import io
import json
import os
import shutil
import tarfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path

from bucketline.loader import Loader, LoaderConfig
from bucketline.store import Store
from bucketline.store.format.block import bytes_digest, identity
from tests.fault.apart import apart
from tests.fault.ground import (
    COMMAND_S,
    Ground,
    commanded,
    done,
    expect_ids,
    expect_same,
    expect_sound,
    fair,
    ids_of,
    is_sound,
    listed,
)
from tests.fault.record import Asked, Kind, Outcome, Record, expect, tried
from tests.models import png, write_images

LONG_S = 900.0  # for 100,000 files
NAMES = (
    "plain", "with space", " before", "two\nlines", "tab\there", "carriage\rreturn", "quote'\"`",
    "back\\slash", "-dash", "--json", "%s%n{}$HOME", "~", "a;b&c|d", "*?[x]", "…", "ünïcödé",
    "u\u0308 combining", "Ελληνικά", "Русский", "עברית", "العربية", "हिन्दी", "ไทย", "日本語", "中文",
    "한국어", "ქართული", "አማርኛ", "😀👩\u200d👩\u200d👧", "\u202eright to left", "\u2028line separator",
    "\x7f\x01control", "CON", "a" * 251, "é" * 125, "😀" * 62, "dots.in.name", "Ünïcödé" * 20, "0", "null",
)  # fmt: skip
YEAR_NS = 31_556_952 * 10**9
TIMES = (
    *("nan", "-nan", "inf", "-inf", "1e400", "-1e400", "1e300", "9" * 300, "-" + "9" * 30),
    *("0x10", "soon", "", "1e-400", "-0.0"),
)
NUM_DATED = 4


def people(asked: Asked) -> Iterator[Record]:
    ground = Ground(asked, most=3)
    for fault, trial in TRIALS.items():
        yield from tried(fault, Kind.OTHER, trial, [("", ground)] * asked.of(1, 12))
    yield from moved_while_read(ground, asked.of(2, 12))
    yield from odd_names(ground)
    yield from wrong_paths(ground)
    count = asked.of(200, 100_000)
    yield from tried(f"{count} files in one folder", Kind.OTHER, many_files, [("", ground, count)])


def two_at_once(ground: Ground) -> Outcome:
    """Two packs of one store, the second begun while the first is at work: one waits for nobody, none does harm."""
    source, store = ground.fresh(), ground.fresh() / "s"
    ids = write_images(source, 24)
    runs = [ground.packing(source, store)]
    time.sleep(ground.draw.random() * 0.5)
    runs.append(ground.packing(source, store))
    outcomes = [fair(run.ended(COMMAND_S)) for run in runs]
    expect(Outcome.COMPLETED in outcomes, "neither went through")
    expect_ids(store, ids)
    return min(outcomes)  # a clean error, if one of them was refused


def copied_while_packed(ground: Ground) -> Outcome:
    """A store is copied while it is packed: the copy is sound, or is refused by name."""
    source, store, copy = ground.fresh(), ground.fresh() / "s", ground.fresh() / "copy"
    write_images(source, 40)
    if ground.draw.random() < 0.5:  # there is a store already
        ground.packed(source, store)
        write_images(source, 50)
    run = ground.packing(source, store)
    time.sleep(ground.draw.random() * 1.0)
    with suppress(shutil.Error, FileNotFoundError):  # of files that went meanwhile; the copy is what it is
        shutil.copytree(store, copy)
    done(run.ended(COMMAND_S))
    expect_sound(store)
    return Outcome.CLEAN_ERROR if is_sound(copy) else Outcome.COMPLETED


def source_that_changes(ground: Ground) -> Outcome:
    """Files are rewritten, cut, replaced and removed while they are packed; the next run has each as it then is."""
    source, store = ground.fresh(), ground.fresh() / "s"
    ids = write_images(source, 60)
    run = ground.packing(source, store)
    for name in ground.draw.choices(ids, k=100):
        _change(ground, source / name)
        time.sleep(ground.draw.random() * 0.02)
    fair(run.ended(COMMAND_S))
    report = json.loads(done(ground.packed(source, store)))
    expect(report["found"] == report["packed"] + report["unchanged"] + report["rejected"], f"lost: {report}")
    expect_sound(store)
    rejects = (store / "rejects.jsonl").read_text(encoding="ascii") if (store / "rejects.jsonl").exists() else ""
    opened = Store.open(store)
    for name in ids_of(store):
        path = source / name
        if path.exists() and json.dumps(name) not in rejects:
            expect(opened.sample(name)[1].content == identity(path.read_bytes()), f"differs: {name} from its file")
    return Outcome.RECOVERED


def _change(ground: Ground, path: Path) -> None:
    how, image = ground.draw.choice([0, 0, 0, 1, 1, 2, 2, 2, 3]), png(30, 34, seed=ground.draw.randrange(1000))
    with suppress(FileNotFoundError):
        if how == 0:
            path.write_bytes(image)
        elif how == 1:
            os.truncate(path, path.stat().st_size // 2)
        elif how == 2:
            path.with_suffix(".new").write_bytes(image)
            path.with_suffix(".new").replace(path)
        else:
            path.unlink()


TRIALS: dict[str, Callable[[Ground], Outcome]] = {
    "two packs of one store at once": two_at_once,
    "a store copied while it is packed": copied_while_packed,
    "a source that changes while it is packed": source_that_changes,
}


def moved_while_read(ground: Ground, trials: int) -> Iterator[Record]:
    """A store is renamed in the middle of a pass: the batches continue to be right, or an error says so."""
    source, store = ground.fresh(), ground.fresh() / "s"
    away = store.with_name("away")
    write_images(source, 30)
    ground.packed(source, store)

    def batches(move_at: int, *, plain: bool) -> list[str]:
        found = []
        with Loader(store, LoaderConfig(batch_size=2, plain_reads=plain, prefetch_bytes=1, threads=1)) as loader:
            for number, batch in enumerate(islice(loader.forever(), 20), 1):
                found.append(bytes_digest(batch.latents.numpy().tobytes()))
                if number == move_at:
                    store.rename(away)
        return found

    def trial(number: int) -> Outcome:
        ended = apart(partial(batches, ground.draw.randrange(1, 15), plain=bool(number % 2)))
        if away.exists():
            away.rename(store)
        expect(ended.gave in (None, expected), "differs: the batches")
        return ended.fair()

    expected = apart(partial(batches, -1, plain=False), COMMAND_S).done()
    yield from tried("a store moved while it is read", Kind.OTHER, trial, [(number, number) for number in range(trials)])


def odd_names(ground: Ground) -> Iterator[Record]:
    """Files whose names are in every script, with spaces and newlines, up to 255 bytes: packed, found, and taken out again."""
    record = Record("odd file names", Kind.OTHER)
    source, folder = ground.fresh(), ground.fresh()
    store, raw = folder / "s", b"not \xff\xfe UTF-8.png"
    for number, name in enumerate(NAMES):
        (source / f"{name}.png").write_bytes(png(20, 30, seed=number))
        (source / f"{name}.txt").write_text("a red cat", encoding="utf-8")
    Path(os.fsdecode(os.fsencode(source) + b"/" + raw)).write_bytes(png(20, 30, seed=99))

    def whole() -> Outcome:
        before = listed(ground.folder, folder)
        done(ground.packed(source, store))
        done(commanded("store", "verify", store))
        done(commanded("store", "export", store, folder / "tars", "--format", "webdataset"))
        done(commanded("store", "export", store, folder / "files", "--format", "safetensors"))
        done(ground.packed(source, store))
        expect_same(before, listed(ground.folder, folder))
        return Outcome.COMPLETED

    def trial(name: str) -> Outcome:
        is_right = found.count(name) == 1 and opened.sample(name)[1].id == name
        is_captioned = "UTF-8" in name or opened.sample(name)[1].captions == ("a red cat",)
        expect(is_right and is_captioned, "lost, or without its caption")
        return Outcome.COMPLETED

    record.trial("all", whole)
    opened, found = Store.open(store), ids_of(store)
    for name in (*(f"{name}.png" for name in NAMES), os.fsdecode(raw)):
        record.trial(repr(name), trial, name)
    yield record


def wrong_paths(ground: Ground) -> Iterator[Record]:
    """Paths that are not there, are something else, or are one inside the other: an error in words, and nothing is written."""
    folder = ground.fresh()
    source, store, new = folder / "photos", folder / "s", folder / "new"
    model = ("--model", ground.folder / "model")
    write_images(source, 6)
    ground.packed(source, store)
    file, empty, loop = folder / "file", folder / "empty", folder / "loop"
    file.write_text("precious", encoding="ascii")
    empty.mkdir()
    loop.symlink_to(loop)
    nowhere = [folder / "no" / "such", file, empty, loop, "", "\n", folder / ("x" * 300)]
    commands: list[tuple[object, ...]] = [
        *(("ingest", "pack", path, new, *model) for path in nowhere),
        *(("ingest", "pack", source, path, *model) for path in (file, source, source / "s", folder, loop)),
        *(("ingest", "pack", source, new, "--model", path) for path in (*nowhere[:4], source)),
        *(("store", verb, path) for verb in ("info", "verify", "ls", "compact") for path in (*nowhere, source)),
        *(
            ("store", "export", store, path, "--format", "safetensors")
            for path in (file, store, store / "x", folder / "a" / "b")
        ),
        ("loader", "serve", folder / "no", "--at", folder / "sock"),
    ]

    def trial(*command: object) -> Outcome:
        before = listed(ground.folder)
        outcome = fair(commanded(str(command[0]), *command[1:]), 2)
        expect_same(before, listed(ground.folder))
        expect(outcome is not Outcome.COMPLETED, "it went through")
        return outcome

    yield from tried("wrong paths", Kind.OTHER, trial, [(command, *command) for command in ground.some(commands)])


def many_files(ground: Ground, count: int) -> Outcome:
    source, store = ground.fresh(), ground.fresh() / "s"
    write_images(source, 50)
    images = sorted(source.rglob("*.png"))
    for number in range(count - len(images)):
        os.link(images[number % len(images)], source / f"{number:06d}.png")
    out = done(ground.packing(source, store, "--batch-size", "256").ended(LONG_S))
    expect(json.loads(out)["packed"] == count, f"lost: {out[:300]}")
    return Outcome.COMPLETED


def odd_dates(asked: Asked) -> Iterator[Record]:
    """Images from before 1970 and after 2262 in every kind of source, and tars whose headers say no time at all."""
    ground = Ground(asked)
    for fault, makers, rounds in (
        ("images dated before 1970 or after 2262", SOURCES, asked.of(1, 8)),
        ("tars with odd times in their headers", (pax_tar, old_tar), asked.of(1, 12)),
    ):
        cases = []
        for make in rounds * makers:
            # a file system that cannot hold a date holds the nearest that it can
            years = ground.draw.choice([ground.draw.randrange(-970, 0), ground.draw.randrange(292, 28_000), 292])
            cases.append((f"{make.__name__}, {years} years", ground, make, years * YEAR_NS))
        yield from tried(fault, Kind.INPUT, packed_twice, cases)


def packed_twice(ground: Ground, make: Callable[[Ground, int], tuple[object, int]], mtime_ns: int) -> Outcome:
    """Pack a source, verify, and pack it again: every image is there, and unchanged the second time."""
    store, (source, count) = ground.fresh() / "s", make(ground, mtime_ns)
    for what in ("packed", "unchanged"):
        out = done(ground.packed(source, store))
        expect(f'"{what}": {count},' in out, f"lost: not all are {what}: {out[:200]}")
    expect_sound(store)
    return Outcome.COMPLETED


def a_folder(ground: Ground, mtime_ns: int) -> tuple[Path, int]:
    source = ground.fresh()
    write_images(source, NUM_DATED)
    for path in source.rglob("*"):
        os.utime(path, ns=(0, mtime_ns))
    return source, NUM_DATED


def a_table(ground: Ground, mtime_ns: int) -> tuple[object, int]:
    source, count = a_folder(ground, mtime_ns)
    names = sorted(path.relative_to(source).as_posix() for path in source.rglob("*.png"))
    (source / "t.csv").write_text("file_name,text\n" + "".join(f"{name},a cat\n" for name in names), encoding="ascii")
    return source / "t.csv", count


def a_tar(ground: Ground, mtime_ns: int) -> tuple[object, int]:
    source, count = a_folder(ground, mtime_ns)
    path = ground.fresh() / "a.tar"
    with tarfile.open(path, "w") as archive:
        for file in source.rglob("*.png"):
            archive.add(file, file.relative_to(source).as_posix().replace("/", "-"))
    os.utime(path, ns=(0, mtime_ns))
    return path, count


def a_saved_dataset(ground: Ground, mtime_ns: int) -> tuple[object, int]:
    import datasets

    path = ground.fresh() / "d"
    rows = {"image": [{"bytes": png(20, 30, n), "path": None} for n in range(NUM_DATED)], "text": ["a cat"] * NUM_DATED}
    datasets.disable_progress_bars()
    datasets.Dataset.from_dict(rows).cast_column("image", datasets.Image()).save_to_disk(path)
    for file in path.iterdir():
        os.utime(file, ns=(0, mtime_ns))
    return path, NUM_DATED


def pax_tar(ground: Ground, _: int) -> tuple[object, int]:
    """A tar whose members' times are not numbers, or are out of every range."""
    drawn = [f"{ground.draw.choice(['', '-'])}{ground.draw.random()}e{ground.draw.randrange(-20, 330)}" for _ in range(6)]
    return _tar_of(ground, tarfile.PAX_FORMAT, [(0, {"mtime": time}) for time in (*TIMES, *drawn)])


def old_tar(ground: Ground, _: int) -> tuple[object, int]:
    """The same with numbers in base 256."""
    times = [ground.draw.choice([-1, 1]) << ground.draw.randrange(88) for _ in range(NUM_DATED)]
    return _tar_of(ground, tarfile.GNU_FORMAT, [(time, {}) for time in times])


def _tar_of(ground: Ground, form: int, times: list[tuple[int, dict[str, str]]]) -> tuple[object, int]:
    tar = ground.fresh() / "a.tar"
    with tarfile.open(tar, "w", format=form) as archive:
        for n, (seconds, headers) in enumerate(times):
            info, data = tarfile.TarInfo(f"{n}.png"), png(20, 30, n)
            info.size, info.mtime, info.pax_headers = len(data), seconds, headers
            archive.addfile(info, io.BytesIO(data))
    return str(tar), len(times)


SOURCES = (a_folder, a_table, a_tar, a_saved_dataset)
