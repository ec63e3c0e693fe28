"""Input made to do harm: tars, images, pickles, links, ids.

Stores, shared folders and current folders that a stranger has prepared: links, pipes and devices, planted names, modules.

Whatever a command does then, nothing outside may change, nothing may hang, and no committed sample may be lost.
"""

from __future__ import annotations

import gzip
import io
import os
import pickle
import shutil
import socket
import struct
import subprocess
import sys
import tarfile
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bucketline.files.atomic_write import FILES, LOCK, staging_path
from bucketline.store import Store
from bucketline.store.change.commit import drop
from tests.commands import BIN
from tests.fault.apart import Ended, apart
from tests.fault.ground import (
    COMMAND_S,
    Ground,
    commanded,
    done,
    expect_same,
    expect_sound,
    fair,
    ids_of,
    limit_memory,
    listed,
    one_batch,
)
from tests.fault.record import Asked, Kind, Outcome, Record, Wrong, expect, tried
from tests.fault.trainers import Canary
from tests.kit import add, make_sample, make_store, open_writer, samples_of
from tests.models import png, write_images

MEMORY_BYTES = 3 << 30  # that a command may take beyond what it has at its beginning
LONG = 1 << 40
NAMES = (
    "../up.png", "../../../../../../tmp/up.png", "/absolute.png", "//twice.png", "a/../../up.png", "./here.png", "a//b.png",
    "..png", ".png", "...png", "a/.png", "../.png", "C:\\windows.png", "..\\up.png", "new\nline.png", "\x1b[31mred.png",
    "x" * 5000 + ".png", "/".join("d" * 300) + ".png", "nul\x01.png", "~/home.png", "-rf.png", "$(id).png", "\udcff\udcfe.png",
    "train/8x8/00000000.png", "sample/x.png", "meta.png", "manifest.json.png", "text/00000000.png",
)  # fmt: skip
ODD_IDS = ("", "\0", "a\0b", "x" * 200_000, "\udc80", "'; drop table", "\x1b]0;title\x07", "train/8x8")
ODD_KINDS = (
    *(tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE, tarfile.DIRTYPE),
    tarfile.GNUTYPE_SPARSE,
)
ODD_HEADERS = ({"size": "-1"}, {"size": "x"}, {"path": "\0" * 9}, {"mtime": "1e400"}, {"GNU.sparse.size": "9" * 30})
POSING = ("a.png", "a.pt", "a.npy", "a.pth", "a.pkl", "a.txt", "a.json", "metadata.jsonl", "metadata.csv", "a.safetensors")
TAR = "t.tar"
Make = Callable[[Path], "Path | None"]  # writes into a folder; returns the source, if it is not that folder


def hostile_input(asked: Asked) -> Iterator[Record]:
    ground = Ground(asked, most=1)
    limit_memory(MEMORY_BYTES)
    for fault, sources in {
        "tar members with .., absolute or odd names": tar_names(),
        "tar members that are not files, or claim terabytes": tar_headers(),
        "pickles posing as tensors, images, captions": pickles(ground.folder / "canary"),
        "decompression bombs, and headers that claim terabytes": bombs(),
        "symbolic links out of the source, devices, pipes, sockets": links(ground.fresh()),
    }.items():
        cases = [(what, ground, make) for what, make in ground.some(sources)]
        yield from tried(fault, Kind.HOSTILE, packed_and_taken_out, cases)
    names = [(repr(name[:40]), ground, name) for name in ground.some((*NAMES, *ODD_IDS))]
    yield from tried("ids that would break keys, paths or terminals", Kind.HOSTILE, stored_and_taken_out, names)


def packed_and_taken_out(ground: Ground, make: Make) -> Outcome:
    """Pack a source in which there is a good image too, verify, export; nothing but the folder may be written."""
    source, folder = ground.fresh(), ground.fresh()
    (source / "good.png").write_bytes(png(20, 30))
    source = make(source) or source
    before = listed(ground.folder, folder)
    outcome = fair(ground.packed(source, folder / "s"))
    if outcome is Outcome.COMPLETED:
        _take_out(folder)
    expect_sound(folder / "s")
    expect(not (ground.folder / "canary").exists(), "the pickle was loaded", Outcome.OUTSIDE)
    expect_same(before, listed(ground.folder, folder))
    return outcome


def _take_out(folder: Path) -> None:
    done(commanded("store", "verify", folder / "s"))
    done(commanded("store", "export", folder / "s", folder / "files", "--format", "safetensors"))
    done(commanded("store", "export", folder / "s", folder / "tars", "--format", "webdataset"))


def stored_and_taken_out(ground: Ground, name: str) -> Outcome:
    folder = ground.fresh()
    before = listed(ground.folder, folder)
    made = apart(lambda: make_store(folder / "s", [make_sample(name, "train/8x8")]).manifest.samples)
    if made.fair() is Outcome.CLEAN_ERROR:
        return Outcome.CLEAN_ERROR
    _take_out(folder)
    done(commanded("store", "ls", folder / "s"))
    expect_same(before, listed(ground.folder, folder))
    expect(Store.open(folder / "s").sample(name)[1].id == name, "it is another id", Outcome.WRONG)
    return Outcome.COMPLETED


def member(name: str, data: bytes = b"", **fields: Any) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    for field, value in fields.items():
        setattr(info, field, value)
    return info, data


def tar_of(*members: tuple[tarfile.TarInfo, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT, errors="surrogateescape") as archive:
        for info, data in (*members, member("good.png", png(20, 30))):
            archive.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def put(source: Path, name: str, data: bytes) -> Path | None:
    """Write a file into the source; a tar takes its place."""
    (source / name).write_bytes(data)
    return source / name if name == TAR else None


def tar_names() -> list[tuple[str, Make]]:
    """Members whose names lead out of a folder, are not names, or are the store's own."""
    return [(repr(name[:60]), partial(put, name=TAR, data=tar_of(member(name, png(20, 30))))) for name in NAMES]


def tar_headers() -> list[tuple[str, Make]]:
    """Members that are not files, and headers that claim terabytes or less than nothing."""

    def pax(headers: dict[str, str]) -> bytes:
        return member("pax.png", pax_headers=headers)[0].tobuf(tarfile.PAX_FORMAT)

    tars = {f"type {kind.decode()}": tar_of(member("odd.png", type=kind, linkname="/etc/passwd")) for kind in ODD_KINDS}
    for size in (LONG, LONG * LONG, 8 << 40, (1 << 33) + 1):
        tars[f"big {size}"] = member("big.png", size=size)[0].tobuf(tarfile.GNU_FORMAT) + bytes(10240)
        tars[f"pax {size}"] = pax({"size": str(size)}) + bytes(10240)
    tars |= {str(headers): pax(headers) + bytes(10240) for headers in ODD_HEADERS}
    return [(what, partial(put, name=TAR, data=data)) for what, data in tars.items()]


def pickles(canary: Path) -> list[tuple[str, Make]]:
    """Pickles that would make a folder, under the names of tensors, images, captions and tables."""
    buffer, array = io.BytesIO(), io.BytesIO()
    torch.save({"weights": Canary(canary)}, buffer)
    np.save(array, np.array([Canary(canary)], dtype=object), allow_pickle=True)
    posing = [(name, data) for data in (pickle.dumps(Canary(canary)), buffer.getvalue(), array.getvalue()) for name in POSING]
    in_tars: list[tuple[str, Make]] = [
        (f"{name} in a tar", partial(put, name=TAR, data=tar_of(member(name, data)))) for name, data in posing
    ]
    return [*in_tars, *((name, partial(put, name=name, data=data)) for name, data in posing)]


def _png_of(height: int, width: int, *more: tuple[bytes, bytes]) -> bytes:
    """Make a PNG that claims a size, black where that is small enough to be written, with other chunks."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    packer = zlib.compressobj(9)
    rows = min(height, 40_000)
    pixels = b"".join(packer.compress(bytes(1 + min(width, 40_000))) for _ in range(rows)) + packer.flush()
    head = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    chunks = [(b"IHDR", head), *more, (b"IDAT", pixels), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*one) for one in chunks)


def bombs() -> list[tuple[str, Make]]:
    """Small files that become very large, and images that say they are."""
    packed = zlib.compress(bytes(200 << 20), 9)
    corners = struct.pack("<HH", 65535, 65535)
    images = {
        "wide.png": _png_of(16_000, 16_000),
        "claims.png": _png_of((1 << 31) - 1, (1 << 31) - 1),
        "zero.png": _png_of(0, 0),
        "long.png": _png_of(16, (1 << 31) - 1),
        "text.png": _png_of(20, 30, (b"zTXt", b"Comment\0\0" + packed)),
        "profile.png": _png_of(20, 30, (b"iCCP", b"icc\0\0" + packed)),
        "huge.gif": b"GIF89a" + corners + b"\0\0\0,\0\0\0\0" + corners + b"\0\x02\0;",
        "huge.bmp": b"BM"
        + struct.pack("<IHHI", 54, 0, 0, 54)
        + struct.pack("<IiiHHIIiiII", 40, 1 << 30, 1 << 30, 1, 24, 0, 0, 0, 0, 0, 0),
        "huge.webp": b"RIFF" + struct.pack("<I", 1 << 31) + b"WEBPVP8L" + struct.pack("<I", 1 << 31) + b"\x2f" + b"\xff" * 8,
        "huge.jpg": b"\xff\xd8\xff\xc0\0\x11\x08\xff\xff\xff\xff\x03\x01\x22\0\x02\x11\x01\x03\x11\x01\xff\xd9",
        "huge.tiff": b"II*\0\x08\0\0\0" + struct.pack("<H", 9999) + b"\x00\x01\x04\0\xff\xff\xff\x7f\xff\xff\xff\x7f" * 50,
    }
    tars = {
        "zeros": gzip.compress(bytes(1 << 30), 6),
        "twice": gzip.compress(gzip.compress(bytes(1 << 28), 6), 6),
        "member": gzip.compress(member("big.png")[0].tobuf() + bytes(1 << 28), 6),
    }
    in_tars: list[tuple[str, Make]] = [(f"{name} in a tar", partial(put, name=TAR, data=data)) for name, data in tars.items()]
    return [*in_tars, *((name, partial(put, name=name, data=data)) for name, data in images.items())]


def links(outside: Path) -> list[tuple[str, Make]]:
    """Links out of the source, to devices, to nothing, round in circles; pipes and sockets under an image's name."""
    (outside / "secret.txt").write_text("secret", encoding="ascii")
    write_images(outside, 3)
    targets = ("/dev/zero", "/dev/random", "/dev/tty", "/proc/self/mem", "/etc/passwd", "/", ".", "loop.png", "nothing")

    def linked(source: Path, target: str | Path) -> None:
        for name in ("loop.png", "folder", "good.txt"):
            (source / name).symlink_to(target)

    def pipes(source: Path) -> None:
        for name in ("odd.png", "good.txt", "metadata.jsonl"):
            os.mkfifo(source / name)

    def socket_in(source: Path) -> None:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.bind(str(source / "odd.png"))

    cases: list[tuple[str, Make]] = [("pipes", pipes), ("a socket", socket_in)]
    return [*cases, *((str(to), partial(linked, target=to)) for to in (*targets, outside, outside / "secret.txt"))]


BUCKET = "train/64x64"
SAMPLES = samples_of({BUCKET: 6, "val/8x8": 2})
ID = SAMPLES[1].id
BAIT = ("precious", "x.123.tmp", "x.0123abcd.tmp", "left.records", "copy-000001-aa.lmdb", "copy-000001-aa.meta", "7.json")
USES = ("batch", "pack", "info", "verify", "get", "drop", "gc", "dry gc", "export", "merge")
URL_USES = (
    "url gc",
    "url drop",
    "url restore",
    "url push",
    "url pull",
    "url verify",
)
KINDS = ("link to a file", "link to a copy", "link to a folder", "link to nothing", "link to a device", "pipe", "folder")
STRAYS = (
    *("odd", "rejects.jsonl", "pending/writer.lock", "pending/left.lock", "pending/left.records", "shards/new.lmdb"),
    *("manifest.json.123.tmp", "generations/9.json", "shards/copy-000009-aa.lmdb", "pending/copy-000009-aa.lmdb"),
)
URL_STRAYS = (
    *(f"{folder}/{name}" for folder in ("shards", "pending", "generations") for name in ("more", "g7.lmdb", "9.json")),
    *("pending", "more", "rejects.jsonl"),
)
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
    ground = Ground(asked)
    images, own, pushed = ground.fresh(), ground.fresh() / "own", ground.fresh() / "pushed"
    write_images(images, 2)
    sound = sound_store(ground.fresh() / "sound")
    make_store(own, SAMPLES)
    apart(lambda: _pushed_twice(own, pushed), COMMAND_S).done()

    def begin(use: str, store: Path, out: Path) -> Ended:
        url = f"file://{store}"
        collecting = ("--gc", "--older-than", "0s")
        commands: dict[str, tuple[object, ...]] = {
            "get": ("get", store, ID, "-o", out),
            "drop": ("drop", store, ID),
            "gc": ("compact", store, *collecting),
            "dry gc": ("compact", store, *collecting, "--dry-run"),
            "export": ("export", store, out, "--format", "safetensors"),
            "merge": ("merge", out, store),
            "url gc": ("compact", url, *collecting),
            "url drop": ("drop", url, ID),
            "url restore": ("restore", url, 1),
            "url push": ("push", own, url),
            "url pull": ("pull", url, out),
            "url verify": ("verify", url),
        }
        if use == "batch":
            return apart(lambda: one_batch(store), COMMAND_S)
        return ground.packed(images, store) if use == "pack" else commanded("store", *commands.get(use, (use, store)))

    def trial(whole: Path, use: str, name: str, kind: str) -> Outcome:
        folder = ground.fresh()
        store, outside = folder / "bucket" / "s", folder / "outside"
        shutil.copytree(whole, store, symlinks=True)
        (store / name).parent.mkdir(exist_ok=True)
        _replace(store / name, outside, kind)
        for path in outside.rglob("*"):
            os.utime(path, (0, 0), follow_symlinks=False)
        before = listed(outside)
        ended = begin(use, store, folder / "out")
        expect_same(before, listed(outside))
        shutil.rmtree(folder)
        if use == "batch":
            return ended.fair()
        is_verified = ended.done()["code"] == 1 and ended.gave["out"].startswith("corrupt: ")
        return Outcome.CLEAN_ERROR if is_verified else fair(ended)

    for fault, whole, strays, kinds, uses, most in (
        ("links, pipes and devices under a store's names", sound, STRAYS, KINDS, USES, asked.of(12, 500)),
        ("links under the names of a store at file://", pushed, URL_STRAYS, KINDS[:5], URL_USES, asked.of(4, 200)),
    ):
        ground.most, names = most, [*(str(path.relative_to(whole)) for path in sorted(whole.rglob("*"))), *strays]
        cases = ground.some([(whole, use, name, kind) for name in names for kind in kinds for use in uses])
        named = [(f"{use} with {name} a {kind}", whole, use, name, kind) for whole, use, name, kind in cases]
        yield from tried(fault, Kind.HOSTILE, trial, named)
    ground.most = 2 if asked.is_quick else None
    yield from shared_folders(ground, sound)
    yield from current_folders(ground, images)


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


def shared_folders(ground: Ground, sound: Path) -> Iterator[Record]:
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
        before = listed(outside)
        more = {"export": (sound, out, "--format", "safetensors"), "merge": (out, sound), "get": (sound, ID, "-o", out)}
        outcome = fair(commanded("store", command, *more[command]))
        expect_same(before, listed(outside))
        expect(outcome is Outcome.COMPLETED or not os.path.lexists(out), "it was refused, and something has the name")
        return outcome

    uses = [(kind, command) for kind in ground.some(PLANTED) for command in ("export", "merge", "get")]
    cases = [(f"{command} with a {kind}", kind, command) for kind, command in uses]
    yield from tried("names planted in a shared folder", Kind.HOSTILE, trial, cases)


def current_folders(ground: Ground, source: Path) -> Iterator[Record]:
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

    names = ground.some(["drop", "compact", "verify", "a loader with a service", "pack"])
    yield from tried("a current folder with modules of standard names", Kind.HOSTILE, trial, [(name, name) for name in names])
