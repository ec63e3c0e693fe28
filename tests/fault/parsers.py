"""Every parser that reads a file, as a function of bytes: it gives something, or an error of ours, and nothing else.

Where a format has checksums, they are made right first: a fuzzer does not find them, and what is behind them is what a
hostile file would reach. A cache of another trainer (`corpus/`) is one file: a line of JSON with names and lengths, then the
content of its files, without the images.
"""

from __future__ import annotations

import bz2
import gzip
import io
import json
import random
import shutil
import struct
import tarfile
import tempfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cache, partial
from pathlib import Path, PurePosixPath

import numpy as np

from bucketline.errors import BucketlineError
from bucketline.ingest.images.crop import RejectedError
from bucketline.ingest.importers.cache import IMPORTERS
from bucketline.ingest.importers.config import ImportConfig
from bucketline.ingest.importers.planning import listed
from bucketline.ingest.importers.rows import ImportPlan, named_vae, row_of
from bucketline.ingest.sources.captions.files import CaptionNames, captions_of_json
from bucketline.ingest.sources.tar import Tar
from bucketline.store.format.block import LENGTH_BYTES, MAX_HEADER_BYTES, bytes_digest, checksum, read_header
from bucketline.store.format.manifest import MANIFEST, parse_manifest
from bucketline.store.format.schema import decode_record, encode_record
from bucketline.store.format.text import TEXT_GROUP, read_text_block
from bucketline.store.shard.meta import META_FORMAT, decode_meta
from bucketline.store.shard.sidecar import Sidecar
from bucketline.train.checkpoint import VERSION, RunState, damage, read_state
from bucketline.typed_json import decode, encode
from tests.fault.damage import dumped
from tests.fault.fuzz import CORPUS, IMPORT
from tests.kit import ANY, AUDIO, LENGTH, LLAMA, TEXT, Form, make_sample, make_store

NOISE = b"\0\xff\x80\x7f\x01 \"'{}[],:.9-e\n"
_VARIANTS = {"mds": "latents_256"}
_MAX_BYTES, _MAX_NAME = 1 << 20, 100
_ENTRY, _LOCAL = b"PK\x01\x02", b"PK\x03\x04"


@cache
def inputs(parser: str) -> list[bytes]:
    if parser.startswith(IMPORT):
        return [(CORPUS / parser).read_bytes()]
    with tempfile.TemporaryDirectory() as folder:
        return list(_SEEDS[parser]() if parser in _SEEDS else _of_stores(Path(folder))[parser])


def mutated(parser: str, count: int, seed: int) -> Iterator[bytes]:
    """Yield the seeds, then so many inputs made of them by small changes: bytes replaced, taken out, doubled, put together."""
    draw, seeds = random.Random(seed), inputs(parser)
    yield from seeds
    for _ in range(count):
        data = bytearray(draw.choice(seeds))
        for _ in range(draw.choice([1, 1, 2, 5])):
            at, length = draw.randrange(len(data) + 1), draw.choice([1, 1, 2, 4, 8, 50])
            how = draw.randrange(4)
            if how == 0:
                data[at : at + length] = bytes(draw.choice(NOISE) for _ in range(length))
            elif how == 1:
                del data[at : at + length]
            elif how == 2:
                data[at:at] = data[at : at + length] * draw.choice([1, 3, 100])
            else:
                data[at:] = draw.choice(seeds)[at:]
        yield bytes(data)


def _of_stores(folder: Path) -> dict[str, list[bytes]]:
    """Return the files of three small stores, one with dropped rows, and some of their blocks."""
    samples = [make_sample(f"{n}.png", bucket, ("a red barn",)) for n, bucket in enumerate(("train/8x8", "val/8x16") * 3)]
    store = make_store(folder / "s", samples, samples[:1])
    free = ANY.make_store(folder / "free", ANY.samples({"train/8x8": 2, "val/8x16": 1}))
    form = Form(columns=LENGTH, groups={"audio": AUDIO, "llama": LLAMA})
    ragged = form.make_store(folder / "ragged", form.samples({"train/3": 4}))
    sidecars = [path for path in sorted((store.path / "shards").glob("g0.*")) if path.suffix != ".lmdb"]
    blocks = []
    for shard, group in ((ragged.shards[0], "ragged/audio"), (store.shards[0], TEXT_GROUP), (store.shards[0], "train/8x8")):
        place = shard.block_ranges(group, np.array([0]))
        blocks.append(bytes(shard.read(int(place.offset[0]), int(place.length[0]))))
    return {
        "manifest": [(one.path / MANIFEST).read_bytes() for one in (store, free, ragged)],
        "sidecar": [path.read_bytes() for path in (ragged.shards[0].paths.meta, *sidecars)],
        "block": blocks,
    }


def _tar() -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, data in (("a.png", b"no image"), ("a.txt", b"a caption"), ("ü" * 60 + "/b.jpg", b"")):
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
        link = tarfile.TarInfo("c.png")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
    return buffer.getvalue()


_STATE = RunState(version=VERSION, steps_done=3, loader={"step": 3}, config={"seed": 0})
_SEEDS: dict[str, Callable[[], Sequence[bytes]]] = {
    "record": lambda: [encode_record(make_sample("0.png", "train/8x8", ("a red barn",)).record)],
    "checkpoint": lambda: [json.dumps(encode(_STATE)).encode(), b'{"state.json": [1, "00"]}'],
    "captions": lambda: ["a red barn\r\n\n  snow \u2028 ü\n".encode(), b'{"text": ["a", "b"], "caption": "c"}'],
    "tar": lambda: [_tar(), gzip.compress(_tar(), mtime=0), bz2.compress(_tar())],
}


def read_cache(kind: str, data: bytes, folder: Path) -> int:
    """Import a cache as far as its rows, as a run does; return how many there are."""
    source, importer, number = folder / f"cache-{kind}", IMPORTERS[kind], 0
    shutil.rmtree(source, ignore_errors=True)
    source.mkdir(parents=True)
    for name, content in _files(data):
        path = source / name
        with suppress(IsADirectoryError, NotADirectoryError, FileExistsError):  # one name is that of another's folder
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
    config = ImportConfig(
        kind=kind, source=source, place=folder / "s.store", vae="sd", variant=_VARIANTS.get(kind), crop="unknown"
    )
    try:
        listing = listed(importer, config)
        plan = ImportPlan(
            config=config,
            importer=importer,
            listing=listing,
            vae=named_vae(None, "sd", "F16", listing.form.latents),
            crops="unknown",
            text="none",
            held_out=config.held_out,
            changed=[],
        )
        for entry in listing.entries:
            with suppress(RejectedError):
                row_of(entry, plan)
                number += 1
    except BucketlineError:
        return number
    return number


def _files(data: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield names and contents, names outside the folder left out."""
    head, _, rest = data.partition(b"\n")
    try:
        for name, length in json.loads(head):
            own, rest = rest[:length], rest[length:]
            path = PurePosixPath(name)
            is_name = path.parts and not path.is_absolute() and ".." not in path.parts and "\0" not in name
            if is_name and len(own) < _MAX_BYTES and max(map(len, path.parts)) < _MAX_NAME:
                yield name, right_crcs(own)
    except (ValueError, TypeError, UnicodeError, RecursionError):
        return


def right_crcs(data: bytes) -> bytes:
    """Return a zip with the checksums of stored members made right in its directory and before them; other data as it is."""
    if not data.startswith(_LOCAL):
        return data
    found, at = bytearray(data), data.find(_ENTRY)
    while at >= 0 and at + 46 <= len(data):
        size, names, extra, note, local = (
            *struct.unpack_from("<I", data, at + 20),
            *struct.unpack_from("<HHH", data, at + 28),
            *struct.unpack_from("<I", data, at + 42),
        )
        if data[local : local + 4] == _LOCAL and local + 30 <= len(data):
            begin = local + 30 + sum(struct.unpack_from("<HH", data, local + 26))
            crc = struct.pack("<I", zlib.crc32(data[begin : begin + size]))
            found[at + 16 : at + 20] = crc
            if any(found[local + 14 : local + 18]):
                found[local + 14 : local + 18] = crc
        at = data.find(_ENTRY, at + 46 + names + extra + note)
    return bytes(found)


MAX_BYTES = 1 << 16
_MEMBERS = 1000  # of a tar: a few bytes that decompress to a million headers take their time, which is not a defect


def manifest(data: bytes, _folder: Path) -> None:
    """Parse a manifest, as it is and with its digest made right."""
    candidates = [data]
    with suppress(ValueError, RecursionError, TypeError):
        document = json.loads(data)
        if isinstance(document, dict):
            document["digest"] = ""
            candidates.append(dumped({**document, "digest": bytes_digest(dumped(document))}))
    for candidate in candidates:
        with suppress(BucketlineError):
            parse_manifest(candidate, "a manifest")


def sidecar(data: bytes, _folder: Path) -> None:
    """Read a sidecar of each kind, all of it, as it is and with its checksums made right."""
    for candidate in (data, right_checksums(data)):
        with suppress(BucketlineError):
            decode_meta(candidate, "a sidecar", "g0")
        for kind in (META_FORMAT,):
            with suppress(BucketlineError):
                file = Sidecar("a sidecar", candidate, kind)
                for name in list(file._tensors):
                    assert len(file.column(name).tobytes()) <= len(candidate)


def right_checksums(data: bytes) -> bytes:
    """Return a sidecar's bytes with the checksums made right; as they are where they have no room."""
    try:
        tensors, _, head = read_header(data[: LENGTH_BYTES + MAX_HEADER_BYTES], len(data), "a sidecar")
        first = tensors[0]
    except (BucketlineError, IndexError):
        return data
    body = data[head + first.end :]
    sums = [checksum(data[:head]), checksum(body)]
    raw = np.array(sums, dtype="<u8").tobytes()[: first.num_bytes].ljust(first.num_bytes, b"\0")
    return data[:head] + raw + body


def block(data: bytes, _folder: Path) -> None:
    with suppress(BucketlineError):
        read_header(data, len(data), "a block")
    for spec in (TEXT, AUDIO.spec("audio")):
        with suppress(BucketlineError):
            read_text_block(spec, data, "a block").bad()


def record(data: bytes, _folder: Path) -> None:
    with suppress(BucketlineError):
        decode_record(data, "a record")


def checkpoint(data: bytes, folder: Path) -> None:
    for name in ("state.json", "digests.json"):
        (folder / name).write_bytes(data)
    with suppress(BucketlineError):
        read_state(folder)
    damage(folder)
    with suppress(ValueError, RecursionError):
        document = json.loads(data)
        with suppress(ValueError):
            decode(RunState, document)


def captions(data: bytes, _folder: Path) -> None:
    CaptionNames().read(".txt", "a.txt", data)
    captions_of_json("a.json", data)


def tar(data: bytes, _folder: Path) -> None:
    with suppress(BucketlineError):
        archive = Tar(io.BytesIO(data), "a.tar")
        for number, member in enumerate(archive):
            if member.is_file and member.num_bytes <= MAX_BYTES:
                archive.read(member)
            if number == _MEMBERS:
                break


PARSERS: dict[str, Callable[[bytes, Path], object]] = {
    "manifest": manifest,
    "sidecar": sidecar,
    "block": block,
    "record": record,
    "checkpoint": checkpoint,
    "captions": captions,
    "tar": tar,
    **{IMPORT + kind: partial(read_cache, kind) for kind in IMPORTERS},
}
