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
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bucketline.store import Store
from tests.fault.apart import How, apart
from tests.fault.ground import Ground, commanded, is_sound, judged, limit_memory, listed, strange
from tests.fault.record import Asked, Kind, Outcome, Record
from tests.fault.strangers import Canary, strangers
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
ODD_KINDS = (
    tarfile.SYMTYPE,
    tarfile.LNKTYPE,
    tarfile.CHRTYPE,
    tarfile.BLKTYPE,
    tarfile.FIFOTYPE,
    tarfile.DIRTYPE,
    tarfile.GNUTYPE_SPARSE,
)


def hostile_input(asked: Asked) -> Iterator[Record]:
    """Try them all."""
    ground = Ground.prepare(asked)
    limit_memory(MEMORY_BYTES)
    ground.most = 2 if asked.is_quick else None
    yield tar_names(ground)
    yield tar_headers(ground)
    yield pickles(ground)
    yield bombs(ground)
    yield links(ground)
    yield ids(ground)
    yield strangers(ground, asked.of(30, 400))


def packed_and_taken_out(ground: Ground, source: object, folder: Path) -> tuple[Outcome, str]:
    """Pack a source, verify, export; say what came of it, and whether anything but the folder was written."""
    before = listed(ground.folder, folder)
    outcome, said = judged(ground.packed(source, folder / "s"))
    steps = [
        ("verify", folder / "s"),
        ("export", folder / "s", folder / "files", "--format", "safetensors"),
        ("export", folder / "s", folder / "tars", "--format", "webdataset"),
    ]
    if outcome is Outcome.COMPLETED:
        for step in steps:
            outcome, said = judged(commanded("store", *step))
            if outcome is not Outcome.COMPLETED:
                return Outcome.DEFECT, f"{step[0]}: {said}"
    if wrong := is_sound(folder / "s"):
        return Outcome.WRONG, wrong
    if changed := strange(before, listed(ground.folder, folder)):
        return Outcome.OUTSIDE, f"{changed[:3]}"
    return outcome, said


def member(name: str, data: bytes = b"", **fields: Any) -> tuple[tarfile.TarInfo, bytes]:
    """Make a tar's member."""
    info = tarfile.TarInfo(name)
    info.size = len(data)
    for field, value in fields.items():
        setattr(info, field, value)
    return info, data


def write_tar(path: Path, *members: tuple[tarfile.TarInfo, bytes]) -> Path:
    """Write a tar."""
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT, errors="surrogateescape") as archive:
        for info, data in members:
            archive.addfile(info, io.BytesIO(data))
    return path


def tar_names(ground: Ground) -> Record:
    """Members whose names lead out of a folder, are not names, or are the store's own."""
    record = Record(fault="tar members with .., absolute or odd names", kind=Kind.HOSTILE)
    inputs = ground.fresh()
    for number, name in enumerate(ground.some(NAMES)):
        tar = write_tar(inputs / f"{number}.tar", member(name, png(20, 30)), member("good.png", png(20, 30)))
        outcome, said = packed_and_taken_out(ground, tar, ground.fresh())
        record.add(outcome, f"{name[:60]!r}: {said}")
    return record


def tar_headers(ground: Ground) -> Record:
    """Members that are not files, and headers that claim terabytes or less than nothing."""
    record = Record(fault="tar members that are not files, or claim terabytes", kind=Kind.HOSTILE)
    inputs, good = ground.fresh(), member("good.png", png(20, 30))
    tars = [
        write_tar(inputs / f"{kind.decode()}.tar", member("odd.png", type=kind, linkname="/etc/passwd"), good)
        for kind in ODD_KINDS
    ]
    for number, size in enumerate((LONG, LONG * LONG, 8 << 40, (1 << 33) + 1)):
        info, _ = member("big.png")
        info.size = size
        (inputs / f"big{number}.tar").write_bytes(info.tobuf(tarfile.GNU_FORMAT) + bytes(10240))
        (inputs / f"pax{number}.tar").write_bytes(_pax({"size": str(size)}) + bytes(10240))
        tars += [inputs / f"big{number}.tar", inputs / f"pax{number}.tar"]
    for number, headers in enumerate(
        ({"size": "-1"}, {"size": "x"}, {"path": "\0" * 9}, {"mtime": "1e400"}, {"GNU.sparse.size": "9" * 30})
    ):
        path = inputs / f"odd{number}.tar"
        path.write_bytes(_pax(headers) + bytes(10240))
        tars.append(path)
    for tar in ground.some(tars):
        outcome, said = packed_and_taken_out(ground, tar, ground.fresh())
        record.add(outcome, f"{tar.name}: {said}")
    return record


def _pax(headers: dict[str, str]) -> bytes:
    info = tarfile.TarInfo("pax.png")
    info.pax_headers = headers
    return info.tobuf(tarfile.PAX_FORMAT)


def pickles(ground: Ground) -> Record:
    """Pickles that would make a file, under the names of tensors, images, captions and tables."""
    record = Record(fault="pickles posing as tensors, images, captions", kind=Kind.HOSTILE)
    canary = ground.folder / "canary"
    plain = pickle.dumps(Canary(canary))
    buffer, array = io.BytesIO(), io.BytesIO()
    torch.save({"weights": Canary(canary)}, buffer)
    np.save(array, np.array([Canary(canary)], dtype=object), allow_pickle=True)
    names = ("a.png", "a.pt", "a.npy", "a.pth", "a.pkl", "a.txt", "a.json", "metadata.jsonl", "metadata.csv", "a.safetensors")
    posing = [(data, name) for data in (plain, buffer.getvalue(), array.getvalue()) for name in names]
    for data, name in ground.some(posing):
        source = ground.fresh()
        (source / "good.png").write_bytes(png(20, 30))
        (source / name).write_bytes(data)
        tar = write_tar(ground.fresh() / "t.tar", member(name, data), member("good.png", png(20, 30)))
        for what in (source, tar):
            outcome, said = packed_and_taken_out(ground, what, ground.fresh())
            if canary.exists():
                canary.rmdir()
                outcome, said = Outcome.OUTSIDE, "the pickle was loaded"
            record.add(outcome, f"{name} of {what}: {said}")
    return record


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


def bombs(ground: Ground) -> Record:
    """Small files that become very large, and images that say they are."""
    record = Record(fault="decompression bombs, and headers that claim terabytes", kind=Kind.HOSTILE)
    text = b"Comment\0\0" + zlib.compress(bytes(200 << 20), 9)
    profile = b"icc\0\0" + zlib.compress(bytes(200 << 20), 9)
    images = {
        "wide.png": _png_of(16_000, 16_000),
        "claims.png": _png_of((1 << 31) - 1, (1 << 31) - 1),
        "zero.png": _png_of(0, 0),
        "long.png": _png_of(16, (1 << 31) - 1),
        "text.png": _png_of(20, 30, (b"zTXt", text)),
        "profile.png": _png_of(20, 30, (b"iCCP", profile)),
        "huge.gif": b"GIF89a"
        + struct.pack("<HH", 65535, 65535)
        + b"\0\0\0,"
        + struct.pack("<HHHH", 0, 0, 65535, 65535)
        + b"\0\x02\0;",
        "huge.bmp": b"BM"
        + struct.pack("<IHHI", 54, 0, 0, 54)
        + struct.pack("<IiiHHIIiiII", 40, 1 << 30, 1 << 30, 1, 24, 0, 0, 0, 0, 0, 0),
        "huge.webp": b"RIFF" + struct.pack("<I", 1 << 31) + b"WEBPVP8L" + struct.pack("<I", 1 << 31) + b"\x2f" + b"\xff" * 8,
        "huge.jpg": b"\xff\xd8\xff\xc0\0\x11\x08\xff\xff\xff\xff\x03\x01\x22\0\x02\x11\x01\x03\x11\x01\xff\xd9",
        "huge.tiff": b"II*\0\x08\0\0\0" + struct.pack("<H", 9999) + b"\x00\x01\x04\0\xff\xff\xff\x7f\xff\xff\xff\x7f" * 50,
    }
    for name, data in ground.some(list(images.items())):
        source = ground.fresh()
        (source / name).write_bytes(data)
        (source / "good.png").write_bytes(png(20, 30))
        record.add(*_within(packed_and_taken_out(ground, source, ground.fresh()), name))
    packed: dict[str, Callable[[], bytes]] = {
        "zeros.tar": lambda: gzip.compress(bytes(1 << 30), 6),
        "twice.tar": lambda: gzip.compress(gzip.compress(bytes(1 << 28), 6), 6),
        "member.tar": lambda: gzip.compress(member("big.png", b"")[0].tobuf() + bytes(1 << 28), 6),
    }
    for name, make in ground.some(list(packed.items()))[: None if ground.most is None else 1]:
        path = ground.fresh() / name
        path.write_bytes(make())
        record.add(*_within(packed_and_taken_out(ground, path, ground.fresh()), name))
    return record


def _within(result: tuple[Outcome, str], name: str) -> tuple[Outcome, str]:
    return result[0], f"{name}: {result[1]}"


def links(ground: Ground) -> Record:
    """Links out of the source, to devices, to nothing, round in circles; pipes and sockets under an image's name."""
    record = Record(fault="symbolic links out of the source, devices, pipes, sockets", kind=Kind.HOSTILE)
    outside = ground.fresh()
    (outside / "secret.txt").write_text("secret", encoding="ascii")
    write_images(outside, 3)
    targets: tuple[str | Path, ...] = (
        "/dev/zero",
        "/dev/random",
        "/dev/tty",
        "/proc/self/mem",
        "/etc/passwd",
        "/",
        ".",
        "loop.png",
        "nothing",
        outside,
        outside / "secret.txt",
    )
    for target in ground.some(targets):
        source = ground.fresh()
        (source / "good.png").write_bytes(png(20, 30))
        (source / "loop.png").symlink_to(target)
        (source / "folder").symlink_to(target)
        (source / "good.txt").symlink_to(target)
        record.add(*_within(packed_and_taken_out(ground, source, ground.fresh()), str(target)))
    for name in ("pipe", "socket"):
        source = ground.fresh()
        (source / "good.png").write_bytes(png(20, 30))
        if name == "pipe":
            os.mkfifo(source / "odd.png")
            os.mkfifo(source / "good.txt")
            os.mkfifo(source / "metadata.jsonl")
        else:
            with socket.socket(socket.AF_UNIX) as sock:
                sock.bind(str(source / "odd.png"))
        record.add(*_within(packed_and_taken_out(ground, source, ground.fresh()), name))
    return record


def ids(ground: Ground) -> Record:
    """Ids that would break keys, paths or terminals, in a store that has them."""
    record = Record(fault="ids that would break keys, paths or terminals", kind=Kind.HOSTILE)
    odd = ("", "\0", "a\0b", "x" * 200_000, "\udc80", "'; drop table", "\x1b]0;title\x07", "train/8x8")
    for name in ground.some((*NAMES, *odd)):
        folder = ground.fresh()
        before = listed(ground.folder, folder)
        made = apart(_making(folder / "s", name))
        if made.how is not How.DONE:
            record.add(made.outcome, f"{name[:40]!r}: {made.said}")
            continue
        steps: list[tuple[object, ...]] = [
            ("verify", folder / "s"),
            ("ls", folder / "s"),
            ("export", folder / "s", folder / "files", "--format", "safetensors"),
            ("export", folder / "s", folder / "tars", "--format", "webdataset"),
        ]
        outcomes = [judged(commanded("store", *step)) for step in steps]
        bad = [one for one in outcomes if one[0] is not Outcome.COMPLETED]
        if changed := strange(before, listed(ground.folder, folder)):
            record.add(Outcome.OUTSIDE, f"{changed[:3]}")
        elif Store.open(folder / "s").sample(name)[1].id != name:
            record.add(Outcome.WRONG, f"{name[:40]!r} is another id")
        else:
            record.add(*(bad[0] if bad else (Outcome.COMPLETED, "")))
    return record


def _making(path: Path, sample_id: str) -> Callable[[], object]:
    return lambda: make_store(path, [make_sample(sample_id, "train/8x8")]).manifest.samples
