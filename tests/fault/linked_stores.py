"""Stores, shared folders and current folders that a stranger has prepared: links, pipes and devices, planted names, modules.

Whatever a command does then, nothing outside may change, nothing may hang, and no committed sample may be lost.
"""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from bucketline.files.atomic_folder import FILES, LOCK, staging_path
from bucketline.store.change.drop import drop
from bucketline.store.format.hashing import bytes_digest
from tests.commands import BIN
from tests.fault.apart import Ended, apart
from tests.fault.ground import COMMAND_S, Ground, commanded, fair, ids_of, one_batch
from tests.fault.record import Asked, Kind, Outcome, Record, Wrong, expect
from tests.kit import add, make_sample, make_store, open_writer, samples_of
from tests.models import write_images

BUCKET = "train/64x64"
SAMPLES = samples_of({BUCKET: 6, "val/8x8": 2})
ID = SAMPLES[1].id
BAIT = ("precious", "x.123.tmp", "x.0123abcd.tmp", "left.sealing", "copy-000001-aa.lmdb", "copy-000001-aa.index", "7.json")
USES = ("batch", "pack", "info", "verify", "get", "drop", "gc", "dry gc", "export", "merge")
URL_USES = ("gc", "drop", "restore", "push", "pull", "verify")
KINDS = ("link to a file", "link to a copy", "link to a folder", "link to nothing", "link to a device", "pipe", "folder")
STRAYS = (
    *("odd", "rejects.jsonl", "pending/writer.lock", "pending/left.lock", "pending/left.sealing", "shards/new.lmdb"),
    *("manifest.json.123.tmp", "generations/9.json", "shards/copy-000009-aa.lmdb", "pending/copy-000009-aa.lmdb"),
)
URL_STRAYS = (
    *(f"{folder}/{name}" for folder in ("shards", "pending", "generations") for name in ("more", "g7.lmdb", "9.json")),
    *("pending", "more", "rejects.jsonl"),
)
PLANTED = ("link to a folder", "link to a file", "folder with links", "another user's folder")
MODULES = ("numpy", "lmdb", "msgpack", "xxhash", "safetensors", "rich", "cyclopts", "torch", "PIL", "diffusers", "transformers")
TRAP = "import os\nopen(os.environ['BUCKETLINE_CANARY'], 'w').close()\nos._exit(0)\n"
Begin = Callable[[str, Path, Path], Ended]  # one use of a store, and where it may write
PRIVATE = """
import sys
from bucketline.loader import Loader, LoaderConfig
with Loader(sys.argv[1], LoaderConfig(batch_size=1), service="auto") as loader:
    next(loader.forever())
"""


def linked_stores(asked: Asked) -> Iterator[Record]:
    """Try some of the thousands of links, drawn, and all else."""
    ground = Ground.prepare(asked)
    images, own, pushed = ground.fresh(), ground.fresh() / "own", ground.fresh() / "pushed"
    write_images(images, 2)
    sound = sound_store(ground.fresh() / "sound")
    make_store(own, SAMPLES)
    apart(lambda: _pushed_twice(own, pushed), COMMAND_S).done()

    def local(use: str, store: Path, out: Path) -> Ended:
        if use == "batch":
            return apart(lambda: one_batch(store), COMMAND_S)
        if use == "pack":
            return ground.packed(images, store)
        arguments: dict[str, tuple[object, ...]] = {
            "get": (store, ID, "-o", out),
            "drop": (store, ID),
            "gc": (store, "--gc", "--older-than", "0s"),
            "dry gc": (store, "--gc", "--older-than", "0s", "--dry-run"),
            "export": (store, out, "--format", "safetensors"),
            "merge": (out, store),
        }
        return commanded("store", "compact" if use.endswith("gc") else use, *arguments.get(use, (store,)))

    def far(use: str, store: Path, out: Path) -> Ended:
        url = f"file://{store}"
        arguments: dict[str, tuple[object, ...]] = {
            "gc": ("compact", url, "--gc", "--older-than", "0s"),
            "drop": ("drop", url, ID),
            "restore": ("restore", url, 1),
            "push": ("push", own, url),
            "pull": ("pull", url, out),
            "verify": ("verify", url),
        }
        return commanded("store", *arguments[use])

    def trial(whole: Path, begin: Begin, use: str, name: str, kind: str) -> Outcome:
        folder = ground.fresh()
        store, outside = folder / "bucket" / "s", folder / "outside"
        shutil.copytree(whole, store, symlinks=True)
        (store / name).parent.mkdir(exist_ok=True)
        _replace(store / name, outside, kind)
        for path in outside.rglob("*"):
            os.utime(path, (0, 0), follow_symlinks=False)
        before = contents(outside)
        ended = begin(use, store, folder / "out")
        expect_nothing_changed(outside, before)
        shutil.rmtree(folder)
        if use == "batch":
            return ended.fair()
        is_verified = ended.done()["code"] == 1 and ended.gave["out"].startswith("corrupt: ")
        return Outcome.CLEAN_ERROR if is_verified else fair(ended)

    for fault, whole, begin, strays, kinds, uses, most in (
        ("links, pipes and devices under a store's names", sound, local, STRAYS, KINDS, USES, asked.of(24, 500)),
        ("links under the names of a store at file://", pushed, far, URL_STRAYS, KINDS[:5], URL_USES, asked.of(8, 200)),
    ):
        record, ground.most = Record(fault, Kind.HOSTILE), most
        names = [*(str(path.relative_to(whole)) for path in sorted(whole.rglob("*"))), *strays]
        for name, kind, use in ground.some([(name, kind, use) for name in names for kind in kinds for use in uses]):
            record.trial(f"{use} with {name} a {kind}", trial, whole, begin, use, name, kind)
        yield record
    ground.most = 3 if asked.is_quick else None
    yield shared_folders(ground, sound)
    yield current_folders(ground, images)


def _pushed_twice(own: Path, place: Path) -> None:
    """Push a store, drop a sample and push again; in a process of its own, since the client must not be used before a fork."""
    from bucketline.store.remote.objects import ObjectFolder
    from bucketline.store.sync.push_pull import push

    folder = ObjectFolder.open(f"file://{place}")
    push(own, folder)
    drop(own, [SAMPLES[0].id])
    push(own, folder)


def sound_store(path: Path) -> Path:
    """Make a store with dropped rows and what a killed run leaves: a pending shard, a lock, a file written aside."""
    make_store(path, SAMPLES, samples_of({BUCKET: 2}, "more/"))
    drop(path, [SAMPLES[0].id])
    writer = open_writer(path, "left")
    add(writer, make_sample("left.png", BUCKET))
    writer.commit()
    writer.close()
    return path


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
    device = Path("/dev/zero")
    targets = {"link to a file": outside / "precious", "link to nothing": outside / "nothing", "link to a device": device}
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind in targets:
        path.symlink_to(targets[kind])
    else:
        path.symlink_to(outside / "copy" if is_there and (kind == "link to a copy") is not is_folder else outside)


def contents(folder: Path) -> dict[str, tuple[int, str]]:
    """Return every path below a folder with its mode and its content's digest; nothing is followed or opened that waits."""
    found = {}
    for path in sorted(folder.rglob("*")):
        mode = path.lstat().st_mode
        data = path.read_bytes() if stat.S_ISREG(mode) else os.fsencode(path.readlink()) if stat.S_ISLNK(mode) else b""
        found[str(path.relative_to(folder))] = (mode, bytes_digest(data))
    return found


def expect_nothing_changed(outside: Path, before: dict[str, tuple[int, str]]) -> None:
    changed = sorted(name for name, _ in contents(outside).items() ^ before.items())
    expect(not changed, changed[:3], Outcome.OUTSIDE)


def shared_folders(ground: Ground, sound: Path) -> Record:
    """The names at which an export, a merge or a sample is prepared are planted before, as anyone may in a shared folder."""

    def trial(kind: str, command: str) -> Outcome:
        folder = ground.fresh()
        shared, outside = folder / "shared", folder / "outside"
        (outside / "inner").mkdir(parents=True)
        for place in (outside, outside / "inner"):
            (place / "precious").write_text("precious", encoding="ascii")
        shared.mkdir(mode=0o777)
        out = shared / "out"
        for name in (staging_path(out), shared / ".out.merging"):
            if kind.startswith("link"):
                name.symlink_to(outside / ("inner" if kind == "link to a folder" else "precious"))
                continue
            name.mkdir()
            (name / FILES).symlink_to(outside / "inner")
            (name / LOCK).symlink_to(outside / "precious")
            if kind == "another user's folder" and os.geteuid() == 0:
                os.chown(name, 65534, 65534)
        for pid in range(os.getpid(), os.getpid() + 200):
            (shared / f"out.{pid}.tmp").symlink_to(outside / "precious")
        before = contents(outside)
        more = {"export": (sound, out, "--format", "safetensors"), "merge": (out, sound), "get": (sound, ID, "-o", out)}
        outcome = fair(commanded("store", command, *more[command]))
        expect_nothing_changed(outside, before)
        expect(outcome is Outcome.COMPLETED or not os.path.lexists(out), "it was refused, and something has the name")
        return outcome

    record = Record("names planted in a shared folder", Kind.HOSTILE)
    for kind in ground.some(PLANTED):
        for command in ("export", "merge", "get"):
            record.trial(f"{command} with a {kind}", trial, kind, command)
    return record


def current_folders(ground: Ground, source: Path) -> Record:
    """The current folder has a module of every name that is imported: none is run, and nothing is lost."""
    here, canary = ground.fresh(), ground.folder / "ran"
    for name in {*sys.stdlib_module_names, *MODULES, "bucketline", "store", "ingest", "loader", "train"}:
        (here / f"{name}.py").write_text(TRAP, encoding="ascii")

    def trial(name: str) -> Outcome:
        store = sound_store(ground.fresh() / "s")
        commands: dict[str, list[object]] = {
            "drop": [BIN / "store", "drop", store, ID],
            "compact": [BIN / "store", "compact", store],
            "verify": [BIN / "store", "verify", store],
            "a loader with a service": [sys.executable, "-P", "-c", PRIVATE, store],
            "pack": [BIN / "ingest", "pack", source, store, "--model", ground.folder / "model"],
        }
        environment = {**os.environ, "BUCKETLINE_CANARY": str(canary), "OMP_NUM_THREADS": "1"}
        command, null = [str(word) for word in commands[name]], subprocess.DEVNULL
        try:
            ran = subprocess.run(
                command, cwd=here, env=environment, stdin=null, capture_output=True, check=False, timeout=2 * COMMAND_S
            )
        except subprocess.TimeoutExpired as error:
            raise Wrong("it had not ended") from error
        expect(not canary.exists(), "a module of the current folder was run", Outcome.OUTSIDE)
        is_right = ran.returncode in ((0, 1) if name == "pack" else (0,)) and b"Traceback" not in ran.stderr
        expect(is_right, f"it ended with {ran.returncode}: {ran.stderr[-300:]!r}")
        is_there = "left.png" in ids_of(store) or (store / "pending" / "left.lmdb").exists()  # what a killed run had committed
        expect(is_there, "lost: left.png")
        return Outcome.COMPLETED

    record = Record("a current folder with modules of standard names", Kind.HOSTILE)
    for name in ground.some(["drop", "compact", "verify", "a loader with a service", "pack"]):
        record.trial(name, trial, name)
    return record
