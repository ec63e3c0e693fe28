"""Disks that fail half-way, that are full, or that turn read-only, and a clock that is set back. Most run under the disk shim.

Writing: a run that adopts, writes, seals and publishes, and `ingest pack` in one process or in ranks, end with an error of ours
wherever the disk begins to fail; then, once it is fixed, nothing whose commit had returned is missing, and the next run comes
to its end. Another process packs on file systems in memory that are too small by less and less. A trainer whose checkpoint,
metrics or status cannot be written is resumed on the fixed disk, and its losses are those of a run on a sound one.
Reading: what plain reads, `verify`, and a loader of plain reads give is what was written, or an error of ours.
A store that was begun when the clock was years ahead continues after it was set back.

Disks of images that go away: before a run or in the middle of it, all of them or some, and come back afterwards.

A store that has the images is packed again while they are out of reach, with `--prune`, `--max-rejects` and `--check` as it
comes. It must end with a word of its own and have lost no sample; once the disk is back, the next run must find all as it was.
EIO on read runs under the disk shim.
"""

from __future__ import annotations

import errno
import importlib
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bucketline.loader import Loader, LoaderConfig
from bucketline.store import Store
from bucketline.store.format.block import bytes_digest
from bucketline.store.verify.verify import verify
from tests.commands import call
from tests.constrained import SmallDisk
from tests.fault import noted_pack, trainers
from tests.fault.apart import Ended, How, apart
from tests.fault.families import records_of
from tests.fault.ground import COMMAND_S, Ground, done, expect_ids, expect_sound, fair, ids_of
from tests.fault.noted_pack import commit_often, note_commits
from tests.fault.packs import expect_kept
from tests.fault.record import Asked, Kind, Outcome, Record, expect, tried
from tests.fault.same_store import noted_ids
from tests.fault.shim import FAILURES, NEVER, Failure, Operation, Shim, records_under_shim
from tests.kit import add_samples, make_store, samples_of, store_writer
from tests.models import write_images

SAMPLES = samples_of({"train/128x128": 40})
NUM_IMAGES = 24
LAST_PART = 0.25  # of what a run asks of its disk: the last shard, and what is published
ROOM_BYTES, DISK_BYTES = 1 << 26, 1 << 20  # of the small file system, after and before room is made
YEARS_S = 10 * 365 * 24 * 3600


def failing_disks(asked: Asked) -> Iterator[Record]:
    yield from records_under_shim("disks:stores_under_shim", asked, "a disk that fails")


def packs_on_failing_disks(asked: Asked) -> Iterator[Record]:
    yield from records_under_shim("disks:packs_under_shim", asked, "a disk that fails under ingest pack")
    small = replace(asked, folder=asked.folder / "small")
    small.folder.mkdir()
    yield from records_of("disks:small_disks", small, "a small disk under ingest pack", {})


def failing_runs(asked: Asked) -> Iterator[Record]:
    yield from records_under_shim("disks:runs_under_shim", asked, "a disk that fails under a run")


def write_all(store: Path, notes: Path) -> None:
    """Write like a real run: adopt, write what is not yet there, seal, publish; note the ids whose commit has returned."""
    with store_writer(store) as writer, notes.open("w", encoding="utf-8") as noted:
        left = [sample for sample in SAMPLES if sample.id not in writer]
        for at in range(0, len(left), 8):
            add_samples(writer, left[at : at + 8])
            writer.commit()
            noted.writelines(f"{sample.id}\n" for sample in left[at : at + 8])
            noted.flush()
        writer.seal()
        writer.publish()


def moments(asked: Asked, quick: int, full: int, count: int) -> list[tuple[str, int]]:
    trials = asked.of(quick, full)
    drawn = asked.draw.sample(range(count), trials) if trials <= count else asked.draw.choices(range(count), k=trials)
    return [(f"after {after} of {count}", after) for after in drawn]


def plain_reads(path: Path) -> list[str]:
    """Read all of a store without a map; give what stands for it."""
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
    config = LoaderConfig(batch_size=3, plain_reads=True, prefetch_bytes=1, threads=1, verify=True)
    with Loader(path, config) as loader:
        batches = loader.forever()
        return [bytes_digest(next(batches).latents.numpy().tobytes()) for _ in range(20)]


READERS: dict[str, Callable[[Path], list[str]]] = {
    "plain reads": plain_reads,
    "verify": verified,
    "a loader of plain reads": loaded,
}


def stores_under_shim(asked: Asked) -> Iterator[Record]:
    shim, disk = Shim(), asked.folder / "disk"
    shim.watch(disk)
    store, notes, path = disk / "s", asked.folder / "notes", disk / "read"  # a disk that fails does not hold the notes

    def write_trial(after: int, operation: Operation, error: int) -> Outcome:
        """Write onto a disk that fails, see what is left, fix the disk, continue."""
        shutil.rmtree(store, ignore_errors=True)
        notes.unlink(missing_ok=True)
        outcome = shim.under((operation, error, after), partial(write_all, store, notes)).fair()
        committed = notes.read_text(encoding="utf-8").splitlines() if notes.exists() else []
        store.mkdir(exist_ok=True)
        expect_kept(store, disk / "copy", dict.fromkeys(committed, -1))
        apart(partial(write_all, store, notes)).done()
        expect_ids(store, [sample.id for sample in SAMPLES])
        return Outcome.RECOVERED if outcome is Outcome.CLEAN_ERROR else outcome

    def read_trial(after: int, name: str, expected: list[str]) -> Outcome:
        ended = shim.under((Operation.READ, errno.EIO, after), partial(READERS[name], path))
        if ended.how is How.REFUSED:
            expect(any(word in ended.said for word in ("shards", "manifest", "shard g")), f"names no file: {ended.said}")
            return Outcome.CLEAN_ERROR
        found, counts = ended.done()
        if name == "verify" and counts[Operation.READ] > after:
            expect(found, "verify found nothing")
            return Outcome.CLEAN_ERROR
        expect(found == expected, "other rows than were written")
        return Outcome.COMPLETED

    for name, operation, error in FAILURES:
        shutil.rmtree(store, ignore_errors=True)
        _, counts = shim.under((operation, error, NEVER), partial(write_all, store, notes)).done()
        writes = [(*moment, operation, error) for moment in moments(asked, 4, 25, counts[operation])]
        yield from tried(f"{name}, while a store is written", Kind.DISK, write_trial, writes)
    make_store(path, samples_of({"train/64x64": 12, "train/8x8": 3}), samples_of({"train/64x64": 6}, "more/"))
    for name, reader in READERS.items():
        expected, counts = shim.under((Operation.READ, errno.EIO, NEVER), partial(reader, path)).done()
        reads = [(*moment, name, expected) for moment in moments(asked, 6, 40, counts[Operation.READ])]
        yield from tried(f"EIO on read, by {name}", Kind.DISK, read_trial, reads)


class Pack:
    """A store to be packed on a disk, and what it is packed of. The notes of what is committed are on another disk."""

    def __init__(self, asked: Asked, disk: Path) -> None:
        self.ground, self.photos, self.store = Ground(asked), asked.folder / "photos", disk / "s"
        self.notes = asked.folder / "s.committed"
        importlib.import_module("torch.distributed")
        write_images(self.photos, NUM_IMAGES)

    def begin_anew(self) -> None:
        shutil.rmtree(self.store, ignore_errors=True)
        for path in self.notes.parent.glob("s.committed.*"):
            path.unlink()

    def asked(self) -> list[str]:
        return [str(part) for part in self.ground.pack_command(self.photos, self.store, "--batch-size", 2)]

    def pack(self, *, commits_often: bool) -> dict[str, Any]:
        if commits_often:
            commit_often()
        note_commits(f"{self.notes}.0")
        return asdict(call("ingest", *self.asked()))

    def recovered(self) -> Outcome:
        """See, once the disk is fixed, that nothing is lost and that the next run comes to its end."""
        self.store.mkdir(exist_ok=True)
        committed = noted_ids(self.notes.with_suffix(""))
        expect_kept(self.store, self.ground.folder / "copy", dict.fromkeys(committed, -1))
        done(self.ground.packed(self.photos, self.store))
        expect_ids(self.store, [path.relative_to(self.photos).as_posix() for path in self.photos.glob("*/*.png")])
        return Outcome.RECOVERED

    def judged(self, ended: Ended) -> Outcome:
        outcome = fair(ended)
        recovered = self.recovered()
        return outcome if outcome is Outcome.COMPLETED else recovered


def packs_under_shim(asked: Asked) -> Iterator[Record]:
    """Pack on a disk that fails from a drawn moment on, as often as not in the last part of the run."""
    shim, draw, disk = Shim(), asked.draw, asked.folder / "disk"
    shim.watch(disk)
    pack, counts = Pack(asked, disk), dict[bool, list[int]]()

    def failing(failure: Failure, *, often: bool) -> Ended:
        pack.begin_anew()
        ended = shim.under(failure, partial(pack.pack, commits_often=often), COMMAND_S)
        gave, counts[often] = ended.done()
        return replace(ended, gave=gave)

    def trial(failure: Failure, often: bool) -> Outcome:  # noqa: FBT001 - committing after each image
        return pack.judged(failing(failure, often=often))

    for often in (True, False):
        done(failing((Operation.READ, 0, NEVER), often=often))
    whole = dict(counts)
    for name, operation, error in FAILURES:
        cases = []
        for _ in range(asked.of(1, 25)):
            often = draw.random() < 0.5
            most = whole[often][operation]
            after = draw.randrange(int(most * (1 - LAST_PART)) if draw.random() < 0.5 else 0, most)
            what = f"after {after} of {most}, commits {'after every image' if often else 'with the last shard'}"
            cases.append((what, (operation, error, after), often))
        yield from tried(f"{name}, under ingest pack", Kind.DISK, trial, cases)
    record = Record("a rank's disk that fails at its last shard", Kind.DISK)
    for _ in range(asked.of(1, 16)):
        rank, after, (name, operation, error) = draw.randrange(2), draw.randrange(12), draw.choice(FAILURES)
        noted_pack.FAILURES["shim"] = partial(shim.arm, operation, error, after)
        record.trial(f"rank {rank}, {name} after {after}", two_ranks, pack, f"{rank}:end:shim")
    yield record


def two_ranks(pack: Pack, failure: str) -> Outcome:
    """Pack with two ranks, of which one's disk fails once only its last shard is to be written and sealed."""
    pack.begin_anew()
    ran = noted_pack.run(2, failure, pack.asked(), str(pack.notes))
    for name_of in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):  # the next run is one process
        os.environ.pop(name_of, None)
    words = "".join(ran["err"])
    expect(None not in ran["codes"], f"had not ended: {ran['codes']}")
    expect("Traceback" not in words and set(ran["codes"]) <= {0, 1}, f"{ran['codes']}: {words[-300:]}")
    return pack.recovered()


def small_disks(asked: Asked) -> Iterator[Record]:
    """Pack onto a file system of 1 MiB that has less and less room, then make room."""
    folder = asked.folder / "disk"
    folder.mkdir()
    disk = SmallDisk(folder, ROOM_BYTES)  # before anything begins threads
    pack, draw, filler = Pack(asked, folder), asked.draw, folder / "filler"
    kind = "a file system of 1 MiB that is nearly full" if disk.is_disk else "files that must not grow beyond a length"
    pack.begin_anew()
    done(apart(lambda: pack.pack(commits_often=False), COMMAND_S))
    needed = sum(path.stat().st_blocks * 512 for path in pack.store.rglob("*") if path.is_file())
    least = 1.0 if disk.is_disk else 0.2  # of a disk a shard takes its length twice while it is sealed, of a file's limit once

    def trial(free: int) -> Outcome:
        pack.begin_anew()
        disk.resize(DISK_BYTES if disk.is_disk else free)
        if disk.is_disk:
            filler.write_bytes(bytes(DISK_BYTES - free))
        ended = apart(lambda: pack.pack(commits_often=bool(free % 2)), COMMAND_S)
        disk.resize(ROOM_BYTES)
        filler.unlink(missing_ok=True)
        is_said = any(word in ended.done()["err"] for word in ("full", "room", "No space left", "File too large"))
        expect(is_said or ended.gave["code"] == 0, f"the error says nothing of the disk: {ended.gave['err'][-300:]}")
        return pack.judged(ended)

    sizes = [int(needed * least * (1.6 if n == 0 else 1 + 1.2 * draw.random())) for n in range(asked.of(2, 25))]
    cases = [(f"{free >> 10} KiB free", free) for free in sizes]
    yield from tried(f"{kind}, under ingest pack, then room", Kind.DISK, trial, cases)


def runs_under_shim(asked: Asked) -> Iterator[Record]:
    os.environ.pop("LD_PRELOAD")  # of what this process starts
    shim, folder = Shim(), asked.folder / "runs"
    shim.watch(folder)
    store, notes, output = folder / "s", asked.folder / "notes", folder / "run"  # notes are not on the disk that fails

    def clock_trial(after: int) -> Outcome:
        """Begin a store years ahead, on a disk that is full after a while, and continue it years before."""
        shutil.rmtree(store, ignore_errors=True)

        def write(shift_s: int) -> None:
            shim.shift_clock(shift_s)
            write_all(store, notes)

        shim.under((Operation.WRITE, errno.ENOSPC, after), partial(write, YEARS_S)).fair()
        apart(partial(write, -YEARS_S)).done()
        expect_ids(store, [sample.id for sample in SAMPLES])
        return Outcome.RECOVERED

    def train(failure: Failure) -> Ended:
        shutil.rmtree(output, ignore_errors=True)
        return shim.under(failure, partial(trainers.train_in, folder, output, resume=False), COMMAND_S)

    def train_trial(after: int, operation: Operation, error: int, losses: object) -> Outcome:
        ended = train((operation, error, after))
        is_whole = ended.fair() is Outcome.COMPLETED
        found = ended.gave[0] if is_whole else trainers.begun(folder, output).ended(COMMAND_S).done()
        expect(found == losses, f"{ended.said}; the losses are {found}, expected {losses}", Outcome.WRONG)
        return Outcome.COMPLETED if is_whole else Outcome.RECOVERED

    drawn = [asked.draw.randrange(20, 60) for _ in range(asked.of(1, 20))]
    clocks = [(f"after {after}", after) for after in drawn]
    yield from tried("the clock set back twenty years between two runs", Kind.OTHER, clock_trial, clocks)
    trainers.prepare(folder)
    shim.watch(output)
    for name, operation, error in FAILURES:
        losses, counts = train((operation, error, NEVER)).done()
        cases = [(*moment, operation, error, losses) for moment in moments(asked, 1, 8, counts[operation])]
        yield from tried(f"{name}, under a trainer's run folder", Kind.DISK, train_trial, cases)


NUM_AWAY = 12
OPTIONS: tuple[tuple[str, ...], ...] = (
    (),
    ("--prune",),
    ("--max-rejects", "0"),
    ("--prune", "--max-rejects", "0.9"),
    ("--check", "content"),
    ("--check", "content", "--prune"),
)
Leave = Callable[[Path], object]  # in the place of what is away


def _nothing(_: Path) -> None:
    """Leave nothing: what was mounted is gone with its mount point."""


def _link(path: Path) -> None:
    path.symlink_to("/nowhere/at/all")


BEFORE: dict[str, tuple[str, Leave]] = {  # of what is away (some files, a folder, the source), and what is in its place
    "images whose links lead nowhere": ("*.png", _link),
    "captions whose links lead nowhere": ("*.txt", _link),
    "an empty mount point in the source": ("a", Path.mkdir),
    "a source that is an empty mount point": ("", Path.mkdir),
    "a source that is not there": ("", _nothing),
}
DURING: dict[str, Leave] = {
    "a source that goes away while it is read": _nothing,
    "a source that becomes an empty mount point while it is read": Path.mkdir,
    "a source that becomes a dangling link while it is read": _link,
}


class Scene:
    """Images, and the store that has them; some are touched, changed or new, so that the next run has something to do."""

    def __init__(self, ground: Ground) -> None:
        folder = ground.fresh()
        self.ground, self.photos, self.store = ground, folder / "photos", folder / "s"
        write_images(self.photos, NUM_AWAY)
        done(ground.packed(self.photos, self.store))
        os.utime(self.photos / "a" / "000.png", ns=(1, 1))
        (self.photos / "b" / "001.txt").write_text("a blue dog\n", encoding="ascii")
        shutil.copy(self.photos / "a" / "002.png", self.photos / "a" / "new.png")

    def chosen(self, pattern: str) -> list[Path]:
        if "*" not in pattern:
            return [self.photos / pattern]
        paths = sorted(self.photos.rglob(pattern))
        return self.ground.draw.sample(paths, self.ground.draw.choice([1, len(paths) // 2, len(paths)]))


def _aside(path: Path) -> Path:
    return path.with_name(f".{path.name}.away")


def _take_away(path: Path, leave: Leave) -> None:
    path.rename(_aside(path))
    leave(path)


def _put_back(path: Path) -> None:
    if _aside(path).exists():
        if path.is_symlink() or path.is_file():
            path.unlink()
        elif path.is_dir():
            path.rmdir()
        _aside(path).rename(path)


def take_away_after(photos: Path, after: int, leave: Leave) -> None:
    """Have the source go away when this process, a forked one, has read so many images."""
    from bucketline.ingest.pipeline.image_reader import ImageReader

    read, left, once = ImageReader.read, iter(range(after)), threading.Lock()

    def reading(self: ImageReader, item: Any) -> Any:
        with once:  # several threads read
            if next(left, None) is None and not _aside(photos).exists():
                _take_away(photos, leave)
        return read(self, item)

    ImageReader.read = reading  # type: ignore[method-assign]


def packed_while_away(scene: Scene, options: tuple[str, ...], begin: Callable[[], object], away: Sequence[Path]) -> Outcome:
    before = ids_of(scene.store) if scene.store.exists() else []

    def work() -> dict[str, Any]:
        begin()
        return asdict(call("ingest", *scene.ground.pack_command(scene.photos, scene.store, *options)))

    ended = apart(work, COMMAND_S)
    for path in away:
        _put_back(path)
    _expect_nothing_lost(ended, scene, before)
    again = scene.ground.packed(scene.photos, scene.store)
    _expect_nothing_lost(again, scene, before)
    done(again)
    expect_ids(scene.store, [path.relative_to(scene.photos).as_posix() for path in scene.photos.rglob("*.png")])
    return Outcome.RECOVERED


def _expect_nothing_lost(ended: Ended, scene: Scene, before: list[str]) -> None:
    fair(ended)
    expect_sound(scene.store)
    lost = set(before) - set(ids_of(scene.store)) if before else None
    expect(not lost, f"lost: {lost}")
    if '"found"' in ended.gave["out"]:
        report = json.loads(ended.gave["out"])
        is_whole = report["found"] == report["packed"] + report["unchanged"] + report["rejected"]
        expect(is_whole and not report["pruned"] and not report["dropped"], f"lost, or a wrong account: {report}")


def vanishing_disks(asked: Asked) -> Iterator[Record]:
    """Try every way, or some of them; EIO on read in a process under the shim."""
    ground = Ground(asked, most=1)

    def trial(fault: str, options: tuple[str, ...]) -> Outcome:
        scene = Scene(ground)
        if fault in DURING:
            begin = partial(take_away_after, scene.photos, ground.draw.randrange(NUM_AWAY + 1), DURING[fault])
            return packed_while_away(scene, options, begin, [scene.photos])
        pattern, leave = BEFORE[fault]
        away = scene.chosen(pattern)
        for path in away:
            _take_away(path, leave)
        return packed_while_away(scene, options, lambda: None, away)

    for fault in [*ground.some(list(BEFORE)), *ground.some(list(DURING))]:
        cases = [(" ".join(options), fault, options) for options in ground.draw.sample(OPTIONS, asked.of(1, len(OPTIONS)))]
        yield from tried(f"disk of images: {fault}", Kind.DISK, trial, cases)
    yield from records_under_shim("disks:reads_under_shim", asked, "disk of images: EIO on read")


def reads_under_shim(asked: Asked) -> Iterator[Record]:
    """Have reads of images and captions fail from a random one on, under the shim; also of a source that is packed anew."""
    shim, ground = Shim(), Ground(asked)

    def trial(options: tuple[str, ...], is_new: bool) -> Outcome:  # noqa: FBT001 - a case
        scene = Scene(ground)
        if is_new:
            shutil.rmtree(scene.store)
        shim.watch(scene.photos)
        begin = partial(shim.arm, Operation.READ, errno.EIO, ground.draw.randrange(2 * NUM_AWAY))
        return packed_while_away(scene, options, begin, [])

    cases = [
        (f"{' '.join(options)}, new: {is_new}", options, is_new)
        for options in ground.draw.sample(OPTIONS, asked.of(1, len(OPTIONS)))
        for is_new in (False, True, False, False, False)[: asked.of(1, 5)]
    ]
    yield from tried("disk of images: EIO on read", Kind.DISK, trial, cases)
