"""Stores, shared folders and current folders that a stranger has prepared: links, pipes and devices, planted names, modules.

Whatever a command does then, nothing outside may change, nothing may hang, and no committed sample may be lost.
"""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from bucketline.files.atomic_folder import FILES, LOCK, staging_path
from bucketline.store import Store
from bucketline.store.format.hashing import bytes_digest
from tests.commands import BIN
from tests.fault.apart import Apart, How, apart
from tests.fault.ground import COMMAND_S, Ground, commanding, judged, one_batch
from tests.fault.record import Kind, Outcome, Record
from tests.kit import add, make_sample, make_store, open_writer, samples_of
from tests.models import write_images

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.fault.apart import Ended
    from tests.fault.record import Asked

BUCKET = "train/64x64"
SAMPLES = samples_of({BUCKET: 6, "val/8x8": 2})
ID = SAMPLES[1].id
BAIT = ("precious", "x.123.tmp", "x.0123abcd.tmp", "left.sealing", "copy-000001-aa.lmdb", "copy-000001-aa.index", "7.json")
USES = ("batch", "pack", "info", "verify", "get", "drop", "gc", "dry gc", "export", "merge")
URL_USES = ("gc", "drop", "restore", "push", "pull", "verify")
KINDS = ("link to a file", "link to a copy", "link to a folder", "link to nothing", "link to a device", "pipe", "folder")
PLANTED = ("link to a folder", "link to a file", "folder with links", "another user's folder")
MODULES = ("numpy", "lmdb", "msgpack", "xxhash", "safetensors", "rich", "cyclopts", "torch", "PIL", "diffusers", "transformers")
TRAP = "import os\nopen(os.environ['BUCKETLINE_CANARY'], 'w').close()\nos._exit(0)\n"
PRIVATE = """
import sys
from bucketline.loader import Loader, LoaderConfig
with Loader(sys.argv[1], LoaderConfig(batch_size=1), service="auto") as loader:
    next(loader.forever())
"""


def linked_stores(asked: Asked) -> Iterator[Record]:
    """Try them all."""
    ground = Ground.prepare(asked)
    ground.most = asked.of(24, 500)  # of two thousand, drawn
    yield links_in_stores(ground)
    ground.most = asked.of(8, 200)  # of a thousand, drawn
    yield links_at_urls(ground)
    ground.most = 3 if asked.is_quick else None
    yield shared_folders(ground)
    yield current_folders(ground)


def links_in_stores(ground: Ground) -> Record:
    """Each name in a store replaced by a link, a pipe or a folder, then each command."""
    record = Record(fault="links, pipes and devices under a store's names", kind=Kind.HOSTILE)
    sound, source = _sound_store(ground.fresh() / "sound"), ground.fresh()
    write_images(source, 2)
    names = [str(path.relative_to(sound)) for path in sorted(sound.rglob("*"))]
    names += [
        "odd",
        "rejects.jsonl",
        "pending/writer.lock",
        "pending/left.lock",
        "pending/left.sealing",
        "shards/new.lmdb",
    ]
    names += ["manifest.json.123.tmp", "generations/9.json", "shards/copy-000009-aa.lmdb", "pending/copy-000009-aa.lmdb"]
    cases = [(name, kind, use) for name in names for kind in KINDS for use in USES]
    for name, kind, use in ground.some(cases):
        folder = ground.fresh()
        store, outside = folder / "s", folder / "outside"
        shutil.copytree(sound, store, symlinks=True)
        _replace(store / name, outside, kind)
        before = _contents(outside)
        outcome, said = _judged(_begun(use, store, folder / "out", partial(ground.packing, source)).ended(COMMAND_S))
        if changed := sorted(n for n, data in _contents(outside).items() ^ before.items()):
            outcome, said = Outcome.OUTSIDE, str(changed[:2])
        record.add(outcome, f"{use} with {name} a {kind}: {said}")
        shutil.rmtree(folder)
    return record


def links_at_urls(ground: Ground) -> Record:
    """Each name in a store at `file://` replaced by a link, or a link added, then each command that takes a URL."""
    record = Record(fault="links under the names of a store at file://", kind=Kind.HOSTILE)
    sound, own = ground.fresh() / "sound", ground.fresh() / "own"
    make_store(own, SAMPLES)
    if apart(partial(_pushed_twice, own, sound), COMMAND_S).how is not How.DONE:
        record.add(Outcome.DEFECT, "the sound store could not be pushed")
        return record
    names = [str(path.relative_to(sound)) for path in sorted(sound.rglob("*"))]
    names += [f"{folder}/{name}" for folder in ("shards", "pending", "generations") for name in ("more", "g7.lmdb", "9.json")]
    names += ["pending", "more", "rejects.jsonl"]
    cases = [(name, kind, use) for name in names for kind in KINDS if kind.startswith("link") for use in URL_USES]
    for name, kind, use in ground.some(cases):
        folder = ground.fresh()
        store, outside = folder / "bucket" / "s", folder / "outside"
        shutil.copytree(sound, store)
        (store / name).parent.mkdir(exist_ok=True)
        _replace(store / name, outside, kind)
        for path in outside.rglob("*"):
            os.utime(path, (0, 0), follow_symlinks=False)
        before, url = _contents(outside), f"file://{store}"
        arguments: dict[str, tuple[object, ...]] = {
            "gc": ("compact", url, "--gc", "--older-than", "0s"),
            "drop": ("drop", url, ID),
            "restore": ("restore", url, 1),
            "push": ("push", own, url),
            "pull": ("pull", url, folder / "out"),
            "verify": ("verify", url),
        }
        outcome, said = _judged(commanding("store", *arguments[use]).ended(COMMAND_S))
        if changed := sorted(n for n, data in _contents(outside).items() ^ before.items()):
            outcome, said = Outcome.OUTSIDE, str(changed[:2])
        record.add(outcome, f"{use} with {name} a {kind}: {said}")
        shutil.rmtree(folder)
    return record


def _pushed_twice(own: Path, place: Path) -> None:
    """Push a store, drop a sample and push again; in a process of its own, since the client must not be used before a fork."""
    from bucketline.store.change.drop import drop
    from bucketline.store.remote.objects import ObjectFolder
    from bucketline.store.sync.push import push

    folder = ObjectFolder.open(f"file://{place}")
    push(own, folder)
    drop(own, [SAMPLES[0].id])
    push(own, folder)


def _sound_store(path: Path) -> Path:
    """Make a store with dropped rows and what a killed run leaves: a pending shard, a lock, a file written aside."""
    from bucketline.store.change.drop import drop

    make_store(path, SAMPLES, samples_of({BUCKET: 2}, "more/"))
    drop(path, [SAMPLES[0].id])
    writer = open_writer(path, "left")
    add(writer, make_sample("left.png", BUCKET))
    writer.commit()
    writer.close()
    return path


def _begun(use: str, store: Path, out: Path, packing: Callable[[Path], Apart]) -> Apart:
    """Begin one use of a store in a process of its own."""
    if use == "batch":
        return Apart(lambda: one_batch(store))
    if use == "pack":
        return packing(store)
    arguments: dict[str, tuple[object, ...]] = {
        "get": (store, ID, "-o", out),
        "drop": (store, ID),
        "gc": (store, "--gc", "--older-than", "0s"),
        "dry gc": (store, "--gc", "--older-than", "0s", "--dry-run"),
        "export": (store, out, "--format", "safetensors"),
        "merge": (out, store),
    }
    return commanding("store", "compact" if use.endswith("gc") else use, *arguments.get(use, (store,)))


def _judged(ended: Ended) -> tuple[Outcome, str]:
    """Judge a command, or a piece of work in this process's own Python."""
    if ended.how is How.DONE and isinstance(ended.gave, dict):
        is_verified = ended.gave["code"] == 1 and ended.gave["out"].startswith("corrupt: ")
        return (Outcome.CLEAN_ERROR, "") if is_verified else judged(ended)
    return ended.outcome, ended.said


def _replace(path: Path, outside: Path, kind: str) -> None:
    """Put something else in the place of a name in a store; what was there is outside, with bait next to it."""
    outside.mkdir()
    for name in BAIT:
        (outside / name).write_text("precious", encoding="ascii")
    is_there, is_folder = path.exists(), path.is_dir()
    if is_there:
        shutil.move(path, outside / "copy")
    if kind == "link to a folder" and is_folder:
        for name in BAIT:
            shutil.copy(outside / name, outside / "copy")
    target = {
        "link to a file": outside / "precious",
        "link to nothing": outside / "nothing",
        "link to a device": Path("/dev/zero"),
    }
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind in target:
        path.symlink_to(target[kind])
    else:
        path.symlink_to(outside / "copy" if is_there and (kind == "link to a copy") is not is_folder else outside)


def _contents(folder: Path) -> dict[str, tuple[int, str]]:
    """Return every path below a folder with its mode and its content's digest; nothing is followed or opened that waits."""
    found = {}
    for path in sorted(folder.rglob("*")):
        mode = path.lstat().st_mode
        data = path.read_bytes() if stat.S_ISREG(mode) else os.fsencode(path.readlink()) if stat.S_ISLNK(mode) else b""
        found[str(path.relative_to(folder))] = (mode, bytes_digest(data))
    return found


def shared_folders(ground: Ground) -> Record:
    """The names at which an export, a merge or a sample is prepared are planted before, as anyone may in a shared folder."""
    record = Record(fault="names planted in a shared folder", kind=Kind.HOSTILE)
    sound = _sound_store(ground.fresh() / "sound")
    for kind in ground.some(PLANTED):
        for command in ("export", "merge", "get"):
            folder = ground.fresh()
            shared, outside = folder / "shared", folder / "outside"
            (outside / "inner").mkdir(parents=True)
            (outside / "inner" / "precious").write_text("precious", encoding="ascii")
            (outside / "precious").write_text("precious", encoding="ascii")
            shared.mkdir(mode=0o777)
            out = shared / "out"
            for name in (staging_path(out), shared / ".out.merging"):
                _plant(name, kind, outside)
            for pid in range(os.getpid(), os.getpid() + 200):
                (shared / f"out.{pid}.tmp").symlink_to(outside / "precious")
            before = _contents(outside)
            arguments = {
                "export": ("export", sound, out, "--format", "safetensors"),
                "merge": ("merge", out, sound),
                "get": ("get", sound, ID, "-o", out),
            }
            outcome, said = judged(commanding("store", *arguments[command]).ended(COMMAND_S))
            if changed := sorted(name for name, _ in _contents(outside).items() ^ before.items()):
                outcome, said = Outcome.OUTSIDE, str(changed[:3])
            elif outcome is Outcome.CLEAN_ERROR and os.path.lexists(out):
                outcome, said = Outcome.DEFECT, "it was refused, and something has the name"
            record.add(outcome, f"{command} with a {kind}: {said}")
    return record


def _plant(path: Path, kind: str, outside: Path) -> None:
    if kind == "link to a folder":
        path.symlink_to(outside / "inner")
    elif kind == "link to a file":
        path.symlink_to(outside / "precious")
    else:
        path.mkdir()
        (path / FILES).symlink_to(outside / "inner")
        (path / LOCK).symlink_to(outside / "precious")
        if kind == "another user's folder" and os.geteuid() == 0:
            os.chown(path, 65534, 65534)


def current_folders(ground: Ground) -> Record:
    """The current folder has a module of every name that is imported: none is run, and nothing is lost."""
    record = Record(fault="a current folder with modules of standard names", kind=Kind.HOSTILE)
    here, canary, source = ground.fresh(), ground.folder / "ran", ground.fresh()
    write_images(source, 2)
    for name in {*sys.stdlib_module_names, *MODULES, "bucketline", "store", "ingest", "loader", "train"}:
        (here / f"{name}.py").write_text(TRAP, encoding="ascii")
    commands = {
        "drop": lambda store: [BIN / "store", "drop", store, ID],
        "compact": lambda store: [BIN / "store", "compact", store],
        "verify": lambda store: [BIN / "store", "verify", store],
        "a loader with a service": lambda store: [sys.executable, "-P", "-c", PRIVATE, store],
        "pack": lambda store: [BIN / "ingest", "pack", source, store, "--model", ground.folder / "model"],
    }
    for name in ground.some(sorted(commands)):
        store = _sound_store(ground.fresh() / "s")
        environment = {**os.environ, "BUCKETLINE_CANARY": str(canary), "OMP_NUM_THREADS": "1"}
        command = [str(word) for word in commands[name](store)]
        try:
            ran = subprocess.run(
                command,
                cwd=here,
                env=environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                check=False,
                timeout=2 * COMMAND_S,
            )
        except subprocess.TimeoutExpired:
            record.add(Outcome.HANG, name)
            continue
        if canary.exists():
            canary.unlink()
            record.add(Outcome.OUTSIDE, f"{name}: a module of the current folder was run")
        elif ran.returncode not in (0, 1) or "Traceback" in ran.stderr or (ran.returncode and name != "pack"):
            record.add(Outcome.DEFECT, f"{name} ended with {ran.returncode}: {ran.stderr[-300:]}")
        else:
            record.add(*_nothing_lost(store, name))
    return record


def _nothing_lost(store: Path, name: str) -> tuple[Outcome, str]:
    """Look for the sample that a killed run had committed: adopted, or still pending."""
    bucket = Store.open(store).bucket(BUCKET)
    is_there = "left.png" in bucket.sample_ids(np.arange(bucket.num_rows)) or (store / "pending" / "left.lmdb").exists()
    return (Outcome.COMPLETED, "") if is_there else (Outcome.LOST, f"{name}: left.png")
