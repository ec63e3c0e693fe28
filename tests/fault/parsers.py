"""Every parser that reads a file, as a function of bytes: it gives something, or an error of ours, and nothing else.

Where a format has checksums, they are made right first: a fuzzer does not find them, and what is behind them is what a
hostile file would reach.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

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
from tests.fault.fuzz import IMPORT
from tests.fault.small_caches import read_cache
from tests.kit import AUDIO, TEXT

MAX_BYTES = 1 << 16
_MEMBERS = 1000  # of a tar: a few bytes that decompress to a million headers take their time, which is not a defect


def manifest(data: bytes, _folder: Path) -> None:
    """Parse a manifest, as it is and with its digest made right."""
    with suppress(BucketlineError):
        parse_manifest(data, "a manifest")
    with suppress(ValueError, RecursionError, TypeError, BucketlineError):
        document = json.loads(data)
        if isinstance(document, dict):
            document["digest"] = ""
            document["digest"] = bytes_digest(_dumped(document))
            right = _dumped(document)
            with suppress(BucketlineError):
                _only_ours(lambda: parse_manifest(right, "a manifest"))


def _dumped(document: dict[str, Any]) -> bytes:
    return json.dumps(document, sort_keys=True, separators=(",", ":")).encode("ascii") + b"\n"


class NotOursError(Exception):
    """A parser raised what is not in our tree."""


def _only_ours(parse: Callable[[], object]) -> object:
    """Parse; an exception that is not ours is made one that nothing here passes over."""
    try:
        return parse()
    except BucketlineError:
        raise
    except Exception as error:
        raise NotOursError(repr(error)) from error


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
    with suppress(BucketlineError):
        read = read_text_block(TEXT, data, "a text block")
        read.bad()
    with suppress(BucketlineError):
        read = read_text_block(AUDIO.spec("audio"), data, "a block of audio")
        read.bad()


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


def importer(kind: str) -> Callable[[bytes, Path], None]:
    """Return what imports a small cache of another trainer, up to its rows."""

    def parse(data: bytes, folder: Path) -> None:
        read_cache(kind, data, folder)

    return parse


PARSERS: dict[str, Callable[[bytes, Path], None]] = {
    "manifest": manifest,
    "sidecar": sidecar,
    "block": block,
    "record": record,
    "checkpoint": checkpoint,
    "captions": captions,
    "tar": tar,
    **{IMPORT + kind: importer(kind) for kind in IMPORTERS},
}
