"""Input made to do harm: tars, images, pickles, links, ids."""

from __future__ import annotations

import gzip
import io
import os
import pickle
import socket
import struct
import tarfile
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bucketline.store import Store
from tests.fault.apart import apart
from tests.fault.ground import Ground, commanded, done, expect_same, expect_sound, fair, limit_memory, listed
from tests.fault.record import Asked, Kind, Outcome, Record, expect
from tests.fault.trainers import Canary
from tests.kit import make_sample, make_store
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
Make = Callable[[Path], "Path | None"]  # writes into a folder; returns the source, if it is not that folder


def hostile_input(asked: Asked) -> Iterator[Record]:
    """Try them all."""
    ground = Ground.prepare(asked, most=2)
    limit_memory(MEMORY_BYTES)
    for fault, cases in {
        "tar members with .., absolute or odd names": tar_names(),
        "tar members that are not files, or claim terabytes": tar_headers(),
        "pickles posing as tensors, images, captions": pickles(ground.folder / "canary"),
        "decompression bombs, and headers that claim terabytes": bombs(),
        "symbolic links out of the source, devices, pipes, sockets": links(ground.fresh()),
    }.items():
        record = Record(fault, Kind.HOSTILE)
        for what, make in ground.some(cases):
            record.trial(what, packed_and_taken_out, ground, make)
        yield record
    record = Record("ids that would break keys, paths or terminals", Kind.HOSTILE)
    for name in ground.some((*NAMES, *ODD_IDS)):
        record.trial(repr(name[:40]), stored_and_taken_out, ground, name)
    yield record


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
    """Make a tar's member."""
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


def as_tar(data: bytes) -> Make:
    """Return what has a tar in the place of the source."""

    def make(source: Path) -> Path:
        path = source / "t.tar"
        path.write_bytes(data)
        return path

    return make


def with_file(name: str, data: bytes) -> Make:
    """Return what adds a file to the source."""

    def make(source: Path) -> None:
        (source / name).write_bytes(data)

    return make


def tar_names() -> list[tuple[str, Make]]:
    """Members whose names lead out of a folder, are not names, or are the store's own."""
    return [(repr(name[:60]), as_tar(tar_of(member(name, png(20, 30))))) for name in NAMES]


def tar_headers() -> list[tuple[str, Make]]:
    """Members that are not files, and headers that claim terabytes or less than nothing."""

    def pax(headers: dict[str, str]) -> bytes:
        return member("pax.png", pax_headers=headers)[0].tobuf(tarfile.PAX_FORMAT)

    tars = {f"type {kind.decode()}": tar_of(member("odd.png", type=kind, linkname="/etc/passwd")) for kind in ODD_KINDS}
    for size in (LONG, LONG * LONG, 8 << 40, (1 << 33) + 1):
        tars[f"big {size}"] = member("big.png", size=size)[0].tobuf(tarfile.GNU_FORMAT) + bytes(10240)
        tars[f"pax {size}"] = pax({"size": str(size)}) + bytes(10240)
    tars |= {str(headers): pax(headers) + bytes(10240) for headers in ODD_HEADERS}
    return [(what, as_tar(data)) for what, data in tars.items()]


def pickles(canary: Path) -> list[tuple[str, Make]]:
    """Pickles that would make a folder, under the names of tensors, images, captions and tables."""
    buffer, array = io.BytesIO(), io.BytesIO()
    torch.save({"weights": Canary(canary)}, buffer)
    np.save(array, np.array([Canary(canary)], dtype=object), allow_pickle=True)
    posing = [(name, data) for data in (pickle.dumps(Canary(canary)), buffer.getvalue(), array.getvalue()) for name in POSING]
    in_tars: list[tuple[str, Make]] = [(f"{name} in a tar", as_tar(tar_of(member(name, data)))) for name, data in posing]
    return [*in_tars, *((name, with_file(name, data)) for name, data in posing)]


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
    in_tars: list[tuple[str, Make]] = [(f"{name} in a tar", as_tar(data)) for name, data in tars.items()]
    return [*in_tars, *((name, with_file(name, data)) for name, data in images.items())]


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
