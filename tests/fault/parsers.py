"""Every parser that reads a file, as a function of bytes: it gives something, or an error of ours, and nothing else.

Where a format has checksums, they are made right first: a fuzzer does not find them, and what is behind them is what a
hostile file would reach.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np

from bucketline.errors import BucketlineError
from bucketline.ingest.importers.registry import IMPORTERS
from bucketline.ingest.sources.captions.caption_text import captions_of_json, captions_of_text
from bucketline.ingest.sources.tar.tar_reader import Tar
from bucketline.store.format.hashing import bytes_digest, checksum
from bucketline.store.format.manifest import parse_manifest
from bucketline.store.format.safetensors_header import LENGTH_BYTES, MAX_HEADER_BYTES, read_header
from bucketline.store.format.sample_record import decode_record
from bucketline.store.format.text_block import read_text_block
from bucketline.store.shard.reader import INDEX_FORMAT
from bucketline.store.shard.row_locator import DROPPED_FORMAT, EXTENTS_FORMAT
from bucketline.store.shard.sidecar import PAGE_BYTES, PAGE_CHECKSUM, PagedFile
from bucketline.train.checkpoint import RunState, damage, read_state
from bucketline.typed_json import decode
from tests.fault.corpus import read_cache
from tests.fault.fuzz import IMPORT
from tests.fault.hostile_files import dumped
from tests.kit import AUDIO, TEXT

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
        for kind in (EXTENTS_FORMAT, INDEX_FORMAT, DROPPED_FORMAT):
            with suppress(BucketlineError):
                file = PagedFile.over(Path("a sidecar"), memoryview(candidate), kind)
                for name in list(file._tensors):
                    if name != PAGE_CHECKSUM:
                        values = file.slice(name, 0, len(file.column(name)))
                        file.take(name, np.arange(len(values))[::-7])


def right_checksums(data: bytes) -> bytes:
    """Return a sidecar's bytes with the checksums of its header and pages made right; as they are where they have no room."""
    try:
        tensors, _, head = read_header(data[: LENGTH_BYTES + MAX_HEADER_BYTES], len(data), "a sidecar")
        first = tensors[0]
    except (BucketlineError, IndexError):
        return data
    body = data[head + first.end :]
    sums = [checksum(data[:head]), *(checksum(body[at : at + PAGE_BYTES]) for at in range(0, len(body), PAGE_BYTES))]
    raw = np.array(sums, dtype="<u8").tobytes()[: first.num_bytes].ljust(first.num_bytes, b"\0")
    return data[:head] + raw + body


def block(data: bytes, _folder: Path) -> None:
    """Read a block's header, a text block, and a block of a ragged group."""
    with suppress(BucketlineError):
        read_header(data, len(data), "a block")
    for spec in (TEXT, AUDIO.spec("audio")):
        with suppress(BucketlineError):
            read_text_block(spec, data, "a block").bad()


def record(data: bytes, _folder: Path) -> None:
    """Read a sample record."""
    with suppress(BucketlineError):
        decode_record(data, "a record")


def checkpoint(data: bytes, folder: Path) -> None:
    """Read a checkpoint's state, and its list of digests."""
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
    """Read captions of a text file and of a JSON file."""
    captions_of_text("a.txt", data)
    captions_of_json("a.json", data)


def tar(data: bytes, _folder: Path) -> None:
    """Go through a tar."""
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
