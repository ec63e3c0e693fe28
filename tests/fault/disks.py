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
import random
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bucketline.loader import Loader, LoaderConfig
from bucketline.store import Store
from bucketline.store.format.hashing import bytes_digest
from bucketline.store.verify.verify import verify
from tests.commands import call
from tests.constrained import SmallDisk
from tests.fault import noted_pack, trainers
from tests.fault.families import records_of
from tests.fault.ground import COMMAND_S, Ended, Ground, How, apart, done, expect_ids, expect_sound, fair, ids_of
from tests.fault.noted_pack import commit_often, note_commits
from tests.fault.packs import expect_kept
from tests.fault.record import Asked, Kind, Outcome, Record, Wrong, expect
from tests.fault.same_store import noted_ids
from tests.fault.shim import FAILURES, NEVER, Operation, Shim, records_under_shim
from tests.kit import add_samples, make_store, samples_of, store_writer
from tests.models import write_images

Failure = tuple[Operation, int, int]  # the error, and after how many operations
SAMPLES = samples_of({"train/128x128": 40})
NUM_IMAGES = 24
LAST_PART = 0.25  # of what a run asks of its disk: the last shard, and what is published
ROOM_BYTES, DISK_BYTES = 1 << 26, 1 << 20  # of the small file system, after and before room is made
YEARS_S = 10 * 365 * 24 * 3600


def failing_disks(asked: Asked) -> Iterator[Record]:
    """Write a store, and read one."""
    yield from records_under_shim("disks:stores_under_shim", asked, "a disk that fails")


def packs_on_failing_disks(asked: Asked) -> Iterator[Record]:
    """Pack under the shim, and on a small disk."""
    yield from records_under_shim("disks:packs_under_shim", asked, "a disk that fails under ingest pack")
    small = replace(asked, folder=asked.folder / "small")
    small.folder.mkdir()
    yield from records_of("disks:small_disks", small, "a small disk under ingest pack", {})


def failing_runs(asked: Asked) -> Iterator[Record]:
    """Train, and set the clock back."""
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


def write_failing(shim: Shim, store: Path, failure: Failure) -> int:
    """Write on a disk that fails, in this process, a forked one; give how often the operation came."""
    with shim.failing(*failure):
        write_all(store, store.with_name("notes"))
    return shim.count(failure[0])


def write_trial(shim: Shim, folder: Path, failure: Failure) -> Outcome:
    """Write onto a disk that fails, see what is left, fix the disk, continue."""
    store, notes = folder / "s", folder / "notes"
    shutil.rmtree(store, ignore_errors=True)
    notes.unlink(missing_ok=True)
    outcome = apart(partial(write_failing, shim, store, failure)).fair()
    committed = notes.read_text(encoding="utf-8").splitlines() if notes.exists() else []
    store.mkdir(exist_ok=True)
    expect_kept(store, folder / "copy", dict.fromkeys(committed, -1))
    apart(partial(write_all, store, notes)).done()
    expect_ids(store, [sample.id for sample in SAMPLES])
    return Outcome.RECOVERED if outcome is Outcome.CLEAN_ERROR else outcome


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


def read_failing(shim: Shim, path: Path, name: str, after: int) -> Ended:
    """Read from a disk that gives errors after a while; it gives what was read, and how many reads there were."""

    def work() -> object:
        with shim.failing(Operation.READ, errno.EIO, after):
            return READERS[name](path), shim.count(Operation.READ)

    return apart(work)


def read_trial(shim: Shim, path: Path, name: str, after: int, expected: list[str]) -> Outcome:
    ended = read_failing(shim, path, name, after)
    if ended.how is How.REFUSED:
        expect(any(word in ended.said for word in ("shards", "manifest", "shard g")), f"names no file: {ended.said}")
        return Outcome.CLEAN_ERROR
    found, count = ended.done()
    if name == "verify" and count > after:
        expect(found, "verify found nothing")
        return Outcome.CLEAN_ERROR
    expect(found == expected, "other rows than were written")
    return Outcome.COMPLETED


def stores_under_shim(asked: Asked) -> Iterator[Record]:
    shim, draw, disk = Shim(), random.Random(asked.seed), asked.folder / "disk"
    disk.mkdir()
    shim.watch(disk)
    for name, operation, error in FAILURES:
        record = Record(f"{name}, while a store is written", Kind.DISK)
        shutil.rmtree(disk / "s", ignore_errors=True)
        count = apart(partial(write_failing, shim, disk / "s", (operation, error, NEVER))).done()
        for after in draw.sample(range(count), min(count, asked.of(4, 25))):
            record.trial(f"after {after} of {count}", write_trial, shim, disk, (operation, error, after))
        yield record
    path = disk / "read"
    make_store(path, samples_of({"train/64x64": 12, "train/8x8": 3}), samples_of({"train/64x64": 6}, "more/"))
    for name in READERS:
        record = Record(f"EIO on read, by {name}", Kind.DISK)
        expected, count = read_failing(shim, path, name, NEVER).done()
        for _ in range(asked.of(6, 40)):
            after = draw.randrange(count)
            record.trial(f"after {after} of {count}", read_trial, shim, path, name, after, expected)
        yield record


@dataclass(frozen=True, slots=True)
class Pack:
    """A store to be packed on a disk, and what it is packed of. The notes of what is committed are on another disk."""

    ground: Ground
    disk: Path

    @classmethod
    def prepare(cls, asked: Asked, disk: Path) -> Pack:
        ground = Ground.prepare(asked)
        importlib.import_module("torch.distributed")
        write_images(asked.folder / "photos", NUM_IMAGES)
        return cls(ground, disk)

    @property
    def photos(self) -> Path:
        return self.ground.folder / "photos"

    @property
    def store(self) -> Path:
        return self.disk / "s"

    @property
    def notes(self) -> Path:
        return self.ground.folder / "s.committed"

    def begin_anew(self) -> None:
        """Remove what the last trial left."""
        shutil.rmtree(self.store, ignore_errors=True)
        for path in self.notes.parent.glob("s.committed.*"):
            path.unlink()

    def asked(self) -> list[str]:
        return [str(part) for part in self.ground.pack_command(self.photos, self.store, "--batch-size", 2)]

    def pack(self, *, commits_often: bool) -> dict[str, Any]:
        """Pack in this process, a forked one; give what came of it."""
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
        """Judge how the run on the failing disk ended, and what came after it."""
        outcome = fair(ended)
        recovered = self.recovered()
        return outcome if outcome is Outcome.COMPLETED else recovered


def packs_under_shim(asked: Asked) -> Iterator[Record]:
    """Pack on a disk that fails from a drawn moment on, as often as not in the last part of the run."""
    shim, draw, disk = Shim(), random.Random(asked.seed), asked.folder / "disk"
    disk.mkdir()
    shim.watch(disk)
    pack = Pack.prepare(asked, disk)

    def failing(often: bool, operation: Operation, error: int, after: int) -> Ended:  # noqa: FBT001 - committing after each
        def work() -> object:
            with shim.failing(operation, error, after):
                ran = pack.pack(commits_often=often)
                return ran | {"counts": [shim.count(one) for one in Operation]}

        pack.begin_anew()
        return apart(work, COMMAND_S)

    def trial(*failure: Any) -> Outcome:
        return pack.judged(failing(*failure))

    counts = {}
    for often in (True, False):
        whole = failing(often, Operation.READ, 0, NEVER)
        done(whole)
        counts[often] = whole.gave["counts"]
    for name, operation, error in FAILURES:
        record = Record(f"{name}, under ingest pack", Kind.DISK)
        for _ in range(asked.of(1, 25)):
            often = draw.random() < 0.5
            most = counts[often][operation]
            after = draw.randrange(int(most * (1 - LAST_PART)) if draw.random() < 0.5 else 0, most)
            what = f"after {after} of {most}, commits {'after every image' if often else 'with the last shard'}"
            record.trial(what, trial, often, operation, error, after)
        yield record
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
    pack, draw, filler = Pack.prepare(asked, folder), random.Random(asked.seed), folder / "filler"
    kind = "a file system of 1 MiB that is nearly full" if disk.is_disk else "files that must not grow beyond a length"
    record = Record(f"{kind}, under ingest pack, then room", Kind.DISK)
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

    for n in range(asked.of(2, 25)):
        free = int(needed * least * (1.6 if n == 0 else 1 + 1.2 * draw.random()))
        record.trial(f"{free >> 10} KiB free", trial, free)
    yield record


def clock_trial(shim: Shim, folder: Path, after: int) -> Outcome:
    """Begin a store years ahead, on a disk that is full after a while, and continue it years before."""
    store = folder / "s"
    shutil.rmtree(store, ignore_errors=True)

    def ahead() -> object:
        shim.shift_clock(YEARS_S)
        return write_failing(shim, store, (Operation.WRITE, errno.ENOSPC, after))

    def behind() -> None:
        shim.shift_clock(-YEARS_S)
        write_all(store, folder / "notes")

    apart(ahead).fair()
    apart(behind).done()
    expect_ids(store, [sample.id for sample in SAMPLES])
    return Outcome.RECOVERED


def train_failing(shim: Shim, folder: Path, output: Path, failure: Failure) -> Ended:
    """Train on a disk that fails; it gives the losses, and how often the operation came."""

    def work() -> object:
        with shim.failing(*failure):
            return trainers.train_in(folder, output, resume=False), shim.count(failure[0])

    shutil.rmtree(output, ignore_errors=True)
    return apart(work, COMMAND_S)


def train_trial(shim: Shim, folder: Path, output: Path, failure: Failure, losses: object) -> Outcome:
    ended = train_failing(shim, folder, output, failure)
    outcome = ended.fair()
    found = ended.gave[0] if outcome is Outcome.COMPLETED else trainers.begun(folder, output).ended(COMMAND_S).done()
    if found != losses:
        raise Wrong(f"{ended.said}; the losses are {found}, expected {losses}", Outcome.WRONG)
    return outcome if outcome is Outcome.COMPLETED else Outcome.RECOVERED


def runs_under_shim(asked: Asked) -> Iterator[Record]:
    os.environ.pop("LD_PRELOAD")  # of what this process starts
    shim, draw, folder = Shim(), random.Random(asked.seed), asked.folder / "runs"
    folder.mkdir()
    shim.watch(folder)
    record = Record("the clock set back twenty years between two runs", Kind.OTHER)
    for _ in range(asked.of(2, 20)):
        after = draw.randrange(20, 60)
        record.trial(f"after {after}", clock_trial, shim, folder, after)
    yield record
    trainers.prepare(folder)
    output = folder / "run"
    for name, operation, error in FAILURES:
        record = Record(f"{name}, under a trainer's run folder", Kind.DISK)
        shim.watch(output)
        losses, count = train_failing(shim, folder, output, (operation, error, NEVER)).done()
        for _ in range(asked.of(2, 8)):
            after = draw.randrange(count)
            record.trial(f"after {after} of {count}", train_trial, shim, folder, output, (operation, error, after), losses)
        yield record


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


@dataclass(frozen=True, slots=True)
class Scene:
    """Images, and the store that has them."""

    ground: Ground
    photos: Path
    store: Path

    @classmethod
    def prepare(cls, ground: Ground) -> Scene:
        """Pack some images; then touch one, change one's caption and add one, so that the next run has something to do."""
        folder = ground.fresh()
        scene = cls(ground, folder / "photos", folder / "s")
        write_images(scene.photos, NUM_AWAY)
        done(ground.packed(scene.photos, scene.store))
        os.utime(scene.photos / "a" / "000.png", ns=(1, 1))
        (scene.photos / "b" / "001.txt").write_text("a blue dog\n", encoding="ascii")
        shutil.copy(scene.photos / "a" / "002.png", scene.photos / "a" / "new.png")
        return scene

    def chosen(self, pattern: str) -> list[Path]:
        if "*" not in pattern:
            return [self.photos / pattern]
        paths = sorted(self.photos.rglob(pattern))
        return self.ground.draw.sample(paths, self.ground.draw.choice([1, len(paths) // 2, len(paths)]))


def _aside(path: Path) -> Path:
    return path.with_name(f".{path.name}.away")


def _take_away(paths: Sequence[Path], leave: Leave) -> None:
    for path in paths:
        path.rename(_aside(path))
        leave(path)


def _put_back(paths: Sequence[Path]) -> None:
    for path in paths:
        if _aside(path).exists():
            if path.is_symlink() or path.is_file():
                path.unlink()
            elif path.is_dir():
                path.rmdir()
            _aside(path).rename(path)


@contextmanager
def gone_at(photos: Path, after: int, leave: Leave) -> Iterator[None]:
    """Take the source away when the run has read so many images."""
    from bucketline.ingest.pipeline.image_reader import ImageReader

    read, left, once = ImageReader.read, iter(range(after)), threading.Lock()

    def reading(self: ImageReader, item: Any) -> Any:
        with once:  # several threads read
            if next(left, None) is None and not _aside(photos).exists():
                _take_away([photos], leave)
        return read(self, item)

    ImageReader.read = reading  # type: ignore[method-assign]
    yield  # in a process that is forked for it


def packed_while_away(
    scene: Scene, options: tuple[str, ...], failing: AbstractContextManager[None], away: Sequence[Path]
) -> Outcome:
    """Pack while images are away, bring them back, pack again."""
    before = ids_of(scene.store) if scene.store.exists() else []

    def work() -> dict[str, Any]:
        with failing:
            return asdict(call("ingest", *scene.ground.pack_command(scene.photos, scene.store, *options)))

    ended = apart(work, COMMAND_S)
    _put_back(away)
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
    ground = Ground.prepare(asked, most=2)
    for fault in [*ground.some(list(BEFORE)), *ground.some(list(DURING))]:
        record = Record(f"disk of images: {fault}", Kind.DISK)
        for options in ground.draw.sample(OPTIONS, asked.of(1, len(OPTIONS))):
            scene = Scene.prepare(ground)
            away: list[Path] = [scene.photos]
            failing: AbstractContextManager[None] = nullcontext()
            if fault in BEFORE:
                pattern, leave = BEFORE[fault]
                away = scene.chosen(pattern)
                _take_away(away, leave)
            else:
                failing = gone_at(scene.photos, ground.draw.randrange(NUM_AWAY + 1), DURING[fault])
            record.trial(" ".join(options), packed_while_away, scene, options, failing, away)
        yield record
    yield from records_under_shim("disks:under_shim", asked, "disk of images: EIO on read")


def under_shim(asked: Asked) -> Iterator[Record]:
    """Have reads of images and captions fail from a random one on, under the shim; also of a source that is packed anew."""
    shim, ground = Shim(), Ground.prepare(asked)
    record = Record("disk of images: EIO on read", Kind.DISK)
    for options in ground.draw.sample(OPTIONS, asked.of(1, len(OPTIONS))):
        for is_new in (True, False, False, False, False)[: asked.of(2, 5)]:
            scene = Scene.prepare(ground)
            if is_new:
                shutil.rmtree(scene.store)
            shim.watch(scene.photos)
            failing = partial(shim.failing, Operation.READ, errno.EIO, ground.draw.randrange(2 * NUM_AWAY))
            record.trial(f"{' '.join(options)}, new: {is_new}", packed_while_away, scene, options, failing(), [])
    yield record
