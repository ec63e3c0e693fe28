"""Small caches of other trainers as one file each: seeds of the importers' fuzzer, and what an importer makes of a changed one.

A cache is written as a line of JSON with names and lengths, then the content of its files. Where a change breaks the checksums
of a zip, they are made right again.
"""

from __future__ import annotations

import json
import shutil
import struct
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath

import numpy as np

from bucketline.errors import BucketlineError
from bucketline.ingest.held_out import HeldOut
from bucketline.ingest.images.rejects import RejectedError
from bucketline.ingest.importers.cache import Crops, ListRequest
from bucketline.ingest.importers.listing import listed
from bucketline.ingest.importers.registry import IMPORTERS
from bucketline.ingest.importers.rows import RowRules, read_entry, rejects_named, row_of
from bucketline.ingest.importers.vae import named_vae
from bucketline.store import SampleRecord
from tests.models import png
from tests.unit.ingest.importers.known import Known, Sample
from tests.unit.ingest.importers.writers import WRITERS

_VARIANTS = {"mds": "latents_256"}
_MAX_BYTES, _MAX_NAME = 1 << 20, 100
_ENTRY, _LOCAL = b"PK\x01\x02", b"PK\x03\x04"


def write_cache(kind: str, folder: Path) -> bytes:
    """Return a cache of two images."""
    known = _known(folder / "known", WRITERS[kind][1])
    source = WRITERS[kind][0](folder / "cache", known)
    found = {str(path.relative_to(source)): path.read_bytes() for path in sorted(source.rglob("*")) if path.is_file()}
    found = {name: data for name, data in found.items() if not name.endswith(".png")}
    return json.dumps([[name, len(data)] for name, data in found.items()]).encode() + b"\n" + b"".join(found.values())


def _known(folder: Path, family: str) -> Known:
    """Return two images with random latents and embeddings; of MDS, whose columns say it, of 256 px."""
    side, tokens_td = (32, (77, 4)) if "256" in family else (4, (3, 16))
    samples = []
    for n, name in enumerate(("cats/1.png", "dogs/0.png")):
        random = np.random.default_rng(n)
        path = folder / "images" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(png(8 * side, 8 * side, seed=n))
        path.with_suffix(".txt").write_text(f"image {n}\n", encoding="utf-8")
        size, box = (8 * side, 8 * side), (0, 0, 8 * side, 8 * side)
        record = SampleRecord(
            id=name,
            bucket=f"train/{size[0]}x{size[1]}",
            row=n,
            split="train",
            source=name,
            source_bytes=1,
            source_mtime_ns=1,
            content=bytes(16),
            original_size=size,
            resized=size,
            crop=box,
            crop_in_source=box,
            captions=(f"image {n}",),
            caption_rows=(),
        )
        latent = random.standard_normal((4, side, side)).astype("f4")
        tokens, pooled = random.standard_normal(tokens_td).astype("f4"), random.standard_normal(8).astype("f4")
        samples.append(Sample(id=name, caption=f"image {n}", latent=latent, record=record, tokens=tokens, pooled=pooled))
    return Known(
        family=family.partition(" ")[0], images=folder / "images", model=folder, samples=tuple(samples), scale=1.0, shift=0.0
    )


def read_cache(kind: str, data: bytes, folder: Path) -> int:
    """Import a cache as far as its rows, as a run does; return how many there are.

    Raises:
        Exception: if it is neither a reject nor an error of ours.
    """
    source = folder / f"cache-{kind}"
    shutil.rmtree(source, ignore_errors=True)
    source.mkdir(parents=True)
    for name, content in _files(data):
        path = source / name
        with suppress(IsADirectoryError, NotADirectoryError, FileExistsError):  # one name is that of another's folder
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
    importer, number = IMPORTERS[kind], 0
    try:
        listing = listed(importer, ListRequest(source=source, variant=_VARIANTS.get(kind)))
        rules = RowRules(
            vae=named_vae(None, "sd", "F16", listing.form.latents),
            scaling=listing.form.scaling,
            dtype="F16",
            crops=Crops.UNKNOWN,
            is_flipped=False,
            is_text_kept=False,
            max_captions=8,
            held_out=HeldOut(),
        )
        for entry in listing.entries:
            try:
                cached = read_entry(importer, source, entry, listing.variant)
                with rejects_named(entry):
                    row_of(source, entry, cached, rules)
                    number += 1
            except RejectedError:
                continue
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
