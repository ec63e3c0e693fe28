"""Disks of images that go away: before a run or in the middle of it, all of them or some, and come back afterwards.

A store that has the images is packed again while they are out of reach, with `--prune`, `--max-rejects` and `--check` as it
comes. It must end with a word of its own and have lost no sample; once the disk is back, the next run must find all as it was.
EIO on read runs under the disk shim.
"""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tests.commands import call
from tests.fault.apart import Ended, How, apart
from tests.fault.ground import COMMAND_S, Ground, ids_of, is_sound, judged
from tests.fault.record import Asked, Kind, Outcome, Record
from tests.fault.shim import Operation, Shim, records_under_shim
from tests.models import SMALL, write_images

NUM_IMAGES = 12
OPTIONS: tuple[tuple[str, ...], ...] = (
    (),
    ("--prune",),
    ("--max-rejects", "0"),
    ("--prune", "--max-rejects", "0.9"),
    ("--check", "content"),
    ("--check", "content", "--prune"),
)


@dataclass(frozen=True, slots=True)
class Scene:
    """Images, the store that has them, and random numbers."""

    photos: Path
    store: Path
    model: Path
    draw: random.Random

    @classmethod
    def prepare(cls, ground: Ground) -> Scene:
        """Pack some images; then touch one, change one's caption and add one, so that the next run has something to do."""
        folder = ground.fresh()
        scene = cls(photos=folder / "photos", store=folder / "s", model=ground.folder / "model", draw=ground.draw)
        write_images(scene.photos, NUM_IMAGES)
        ended = ground.packed(scene.photos, scene.store)
        if ended.how is not How.DONE or ended.gave["code"] != 0:
            raise AssertionError(f"the images cannot be packed: {ended}")
        os.utime(scene.photos / "a" / "000.png", ns=(1, 1))
        (scene.photos / "b" / "001.txt").write_text("a blue dog\n", encoding="ascii")
        shutil.copy(scene.photos / "a" / "002.png", scene.photos / "a" / "new.png")
        return scene

    def pack(self, *options: str) -> dict[str, Any]:
        """Pack again, in this process."""
        return asdict(call("ingest", "pack", self.photos, self.store, "--model", self.model, *SMALL, "--json", *options))


def _away(paths: Sequence[Path], leave: Callable[[Path], object]) -> Callable[[], None]:
    """Take paths away, and leave something in their place; return what puts them back."""
    for path in paths:
        path.rename(_aside(path))
        leave(path)
    return lambda: _back(*paths)


def _aside(path: Path) -> Path:
    return path.with_name(f".{path.name}.away")


def _back(*paths: Path) -> None:
    """Put back those that were taken away."""
    for path in paths:
        if _aside(path).exists():
            if path.is_symlink() or path.is_file():
                path.unlink()
            elif path.is_dir():
                path.rmdir()
            _aside(path).rename(path)


def _leave_nothing(_: Path) -> None:
    """Leave nothing: what was mounted is gone with its mount point."""


def _leave_link(path: Path) -> None:
    path.symlink_to("/nowhere/at/all")


def _some(scene: Scene, pattern: str) -> list[Path]:
    paths = sorted(scene.photos.rglob(pattern))
    return scene.draw.sample(paths, scene.draw.choice([1, len(paths) // 2, len(paths)]))


BEFORE: dict[str, Callable[[Scene], Callable[[], None]]] = {
    "images whose links lead nowhere": lambda scene: _away(_some(scene, "*.png"), _leave_link),
    "captions whose links lead nowhere": lambda scene: _away(_some(scene, "*.txt"), _leave_link),
    "an empty mount point in the source": lambda scene: _away([scene.photos / scene.draw.choice("ab")], Path.mkdir),
    "a source that is an empty mount point": lambda scene: _away([scene.photos], Path.mkdir),
    "a source that is not there": lambda scene: _away([scene.photos], _leave_nothing),
}
DURING: dict[str, Callable[[Path], object]] = {
    "a source that goes away while it is read": _leave_nothing,
    "a source that becomes an empty mount point while it is read": Path.mkdir,
    "a source that becomes a dangling link while it is read": _leave_link,
}


@contextmanager
def gone_at(scene: Scene, after: int, leave: Callable[[Path], object]) -> Iterator[None]:
    """Take the source away when the run has read so many images."""
    from bucketline.ingest.pipeline.image_reader import ImageReader

    read, left, once = ImageReader.read, iter(range(after)), threading.Lock()

    def reading(self: ImageReader, item: Any) -> Any:
        with once:  # several threads read
            if next(left, None) is None and not _aside(scene.photos).exists():
                _away([scene.photos], leave)
        return read(self, item)

    ImageReader.read = reading  # type: ignore[method-assign]
    yield  # in a process that is forked for it


def tried(
    scene: Scene, options: tuple[str, ...], failing: AbstractContextManager[None], back: Callable[[], None]
) -> tuple[Outcome, str]:
    """Pack while images are away, bring them back, pack again."""
    before = ids_of(scene.store)

    def work() -> dict[str, Any]:
        with failing:
            return scene.pack(*options)

    ended = apart(work, COMMAND_S)
    back()
    wrong = _wrong_with(ended, scene, before)
    if wrong is None:
        again = apart(scene.pack, COMMAND_S)
        wrong = _wrong_with(again, scene, before)
        if wrong is None and again.gave["code"] != 0:
            wrong = Outcome.DEFECT, f"with the disk back: {again}"
        elif wrong is None and ids_of(scene.store) != sorted({*before, "a/new.png"}):
            wrong = Outcome.LOST, f"with the disk back the store has {ids_of(scene.store)}"
    return (wrong[0], f"{' '.join(options)}: {wrong[1]}") if wrong else (Outcome.RECOVERED, "")


def _wrong_with(ended: Ended, scene: Scene, before: list[str]) -> tuple[Outcome, str] | None:
    outcome, said = judged(ended)
    if outcome not in (Outcome.COMPLETED, Outcome.CLEAN_ERROR):
        return outcome, said
    if lost := set(before) - set(ids_of(scene.store)):
        return Outcome.LOST, str(sorted(lost))
    if fault := is_sound(scene.store):
        return Outcome.WRONG, fault
    if '"found"' in ended.gave["out"]:
        report = json.loads(ended.gave["out"])
        if report["found"] != report["packed"] + report["unchanged"] + report["rejected"]:
            return Outcome.DEFECT, f"a wrong account: {report}"
        if report["pruned"] or report["dropped"]:
            return Outcome.LOST, f"the summary says that samples were dropped: {report}"
    return None


def vanishing_disks(asked: Asked) -> Iterator[Record]:
    """Try every way, or some of them; EIO on read in a process under the shim."""
    ground = Ground.prepare(asked)
    ground.most = 2 if asked.is_quick else None
    for fault, take in ground.some([*BEFORE.items()]):
        record = Record(fault=f"disk of images: {fault}", kind=Kind.DISK)
        for options in ground.draw.sample(OPTIONS, asked.of(1, len(OPTIONS))):
            scene = Scene.prepare(ground)
            record.add(*tried(scene, options, nullcontext(), take(scene)))
        yield record
    for fault, leave in ground.some([*DURING.items()]):
        record = Record(fault=f"disk of images: {fault}", kind=Kind.DISK)
        for options in ground.draw.sample(OPTIONS, asked.of(1, len(OPTIONS))):
            scene = Scene.prepare(ground)
            failing = gone_at(scene, ground.draw.randrange(NUM_IMAGES + 1), leave)
            record.add(*tried(scene, options, failing, partial(_back, scene.photos)))
        yield record
    yield from records_under_shim("vanishing_disks:under_shim", asked, "disk of images: EIO on read")


def under_shim(asked: Asked) -> Iterator[Record]:
    """Have reads of images and captions fail from a random one on, under the shim."""
    shim, ground = Shim(), Ground.prepare(asked)
    record = Record(fault="disk of images: EIO on read", kind=Kind.DISK)
    for options in ground.draw.sample(OPTIONS, asked.of(1, len(OPTIONS))):
        for _ in range(asked.of(1, 4)):
            scene = Scene.prepare(ground)
            shim.watch(scene.photos)
            after = ground.draw.randrange(2 * NUM_IMAGES)
            failing = shim.failing(Operation.READ, errno.EIO, after)
            record.add(*tried(scene, options, failing, lambda: None))
    yield record
