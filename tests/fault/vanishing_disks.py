"""Disks of images that go away: before a run or in the middle of it, all of them or some, and come back afterwards.

A store that has the images is packed again while they are out of reach, with `--prune`, `--max-rejects` and `--check` as it
comes. It must end with a word of its own and have lost no sample; once the disk is back, the next run must find all as it was.
EIO on read runs under the disk shim.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tests.commands import call
from tests.fault.apart import Ended, apart
from tests.fault.ground import COMMAND_S, Ground, done, expect_ids, expect_sound, fair, ids_of
from tests.fault.record import Asked, Kind, Outcome, Record, expect
from tests.fault.shim import Operation, Shim, records_under_shim
from tests.models import write_images

NUM_IMAGES = 12
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
        write_images(scene.photos, NUM_IMAGES)
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


def tried(scene: Scene, options: tuple[str, ...], failing: AbstractContextManager[None], away: Sequence[Path]) -> Outcome:
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
                failing = gone_at(scene.photos, ground.draw.randrange(NUM_IMAGES + 1), DURING[fault])
            record.trial(" ".join(options), tried, scene, options, failing, away)
        yield record
    yield from records_under_shim("vanishing_disks:under_shim", asked, "disk of images: EIO on read")


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
            failing = partial(shim.failing, Operation.READ, errno.EIO, ground.draw.randrange(2 * NUM_IMAGES))
            record.trial(f"{' '.join(options)}, new: {is_new}", tried, scene, options, failing(), [])
    yield record
