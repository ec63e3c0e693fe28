"""Read and decode images of the source, unless the store already has the unchanged image or its latents."""

from __future__ import annotations

import fcntl
import io
import mmap
import os
import queue
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import numpy as np

from bucketline.errors import SourceError, StoreError
from bucketline.ingest.config import framing_of
from bucketline.ingest.images.crop import Placement, Reason, RejectedError, Size
from bucketline.ingest.images.decode import Decoded, decode_image, placed_by_header
from bucketline.ingest.rules import Check, split_of
from bucketline.store.format.block import fixed_columns, identity, sample_digest
from bucketline.store.format.schema import SampleRecord, bucket_name, captions_checksum
from bucketline.store.read.samples import checked_row

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from bucketline.ingest.config import PackConfig
    from bucketline.ingest.encoders.text_columns import Cut
    from bucketline.ingest.images.crop import Grid
    from bucketline.ingest.packed_index import PackedIndex, PackedSample
    from bucketline.ingest.sources.source import Source, SourceBytes, SourceItem, Stamp
    from bucketline.store import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptLatents:
    """The latent columns of a stored row, with verified checksum, and the placement of its image."""

    placement: Placement
    latents: Mapping[str, NDArray[Any]]  # by column, [C, h, w]

    @property
    def num_bytes(self) -> int:
        return sum(latent.nbytes for latent in self.latents.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadImage:
    """A decoded image, or its latents from the store, with its item, split and file identity."""

    item: SourceItem
    image: Decoded | KeptLatents
    split: str
    stamp: Stamp
    content: bytes  # digest of its file
    is_moved: bool = False  # from the store's other split

    @property
    def bucket(self) -> str:
        size = self.image.placement.bucket
        return bucket_name(self.split, size.height_px, size.width_px)

    @property
    def num_bytes(self) -> int:
        return self.image.pixels.nbytes if isinstance(self.image, Decoded) else self.image.num_bytes


class Change(StrEnum):
    """How an image differs from its sample in the store."""

    NONE = "none"
    NEW = "new"  # the store has no live sample of it, or its captions cannot be read
    CONTENT = "content"
    TEXT = "text"  # only its captions or mtime: its latents can be kept
    SPLIT = "split"  # it moves to another split, hence to another bucket


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """An image next to its sample in the store."""

    split: str
    change: Change
    stored: PackedSample | None = None
    stamp: Stamp | None = None
    found: SourceBytes | None = None  # its file, if it had to be read


def record_of(
    item: SourceItem, placement: Placement, stamp: Stamp, split: str, content: bytes, cuts: Iterable[Cut]
) -> SampleRecord:
    """Return the record of an image, before its row is known."""
    return SampleRecord(
        id=item.id,
        bucket=bucket_name(split, placement.bucket.height_px, placement.bucket.width_px),
        row=0,
        split=split,
        source=item.id,
        source_bytes=stamp.num_bytes,
        source_mtime_ns=stamp.mtime_ns,
        content=content,
        original_size=placement.source,
        resized=placement.resized,
        crop=placement.crop,
        crop_in_source=placement.crop_in_source,
        captions=item.captions,
        caption_rows=(),
        cuts=tuple((cut.encoder, cut.tokens, cut.limit, cut.cut) for cut in cuts),
    )


class ImageReader:
    """Reads and decodes images; safe to call from several threads."""

    def __init__(self, source: Source, store: Store, samples: PackedIndex, config: PackConfig, grid: Grid) -> None:
        """Read from `source`; `samples` is the index of this rank's samples in the store."""
        self._source, self._samples, self._config = source, samples, config
        self._store, self._held_out = store, config.held_out
        self._fixed = {column.name for column in fixed_columns(store.manifest.max_captions)}
        self._lock = threading.Lock()  # sidecars are mapped on first use
        self._framing = framing_of(config, grid)
        self.notes: DecodeNotes | None = None  # of the images that are being decoded, while a pack runs

    def read(self, item: SourceItem) -> ReadImage | None:
        """Read and decode one image; None if it is unchanged. If only its captions or mtime changed, reuse its latents."""
        compared = self.compare(item)
        if compared.change is Change.NONE:
            return None
        if compared.change is Change.TEXT and (image := self._with_kept_latents(item, compared)) is not None:
            return image
        found = compared.found or self._source.read(item)
        if item.caption_error is not None:
            raise RejectedError(Reason.CAPTION, item.caption_error, is_passing=item.is_caption_out_of_reach)
        content = identity(found.data)
        with nullcontext() if self.notes is None else self.notes.of(content, found.data):
            decoded = decode_image(found.data, self._framing, item.id)
        return ReadImage(
            item=replace(item, held=None),
            image=decoded,
            split=compared.split,
            is_moved=compared.change is Change.SPLIT,
            stamp=found.stamp,
            content=content,
        )

    def compare(self, item: SourceItem) -> Compared:
        """Compare an image with its sample in the store. Read its file only if size or mtime differ, or for --check content."""
        stored = self._samples.find(item.id)
        split, change, stamp = self._by_stamp(item, stored)
        if change is not None:
            return Compared(split=split, change=change, stored=stored, stamp=stamp)
        found = self._source.read(item)
        assert stored is not None, item.id
        if stored.content != identity(found.data):
            change = Change.CONTENT
        else:
            has_captions = self._config.check is Check.CONTENT and stored.captions == captions_checksum(item.captions)
            change = Change.NONE if has_captions else Change.TEXT
        return Compared(split=split, change=change, stored=stored, stamp=found.stamp, found=found)

    def _by_stamp(self, item: SourceItem, stored: PackedSample | None) -> tuple[str, Change | None, Stamp | None]:
        """Return an image's split, how it differs, or None if only its file can tell, and its stamp if that tells."""
        split = split_of(item, self._held_out)
        if stored is None or item.caption_error is not None:
            return split, Change.NEW, None
        if stored.is_held_out != (split == "val"):
            return split, Change.SPLIT, None
        if self._config.check is not Check.SIZE_TIME:
            return split, None, None
        stamp = self._source.stamp(item)
        if (stored.source_bytes, stored.source_mtime_ns) != (stamp.num_bytes, stamp.mtime_ns):
            return split, None, None
        return split, Change.NONE if stored.captions == captions_checksum(item.captions) else Change.TEXT, stamp

    def will_pack(self, item: SourceItem) -> bool:
        """Return whether an image that `are_unchanged` does not leave out may be packed. Reads its file for --check content."""
        if self._config.check is Check.SIZE_TIME:
            return True
        try:
            return self.compare(item).change is not Change.NONE
        except RejectedError:
            return False  # `read` raises it again

    def will_read(self, item: SourceItem) -> bool:
        """Return whether `read` needs the file of an item that is not unchanged: not if only its captions differ."""
        try:
            return self._by_stamp(item, self._samples.find(item.id))[1] not in (Change.NONE, Change.TEXT)
        except (RejectedError, SourceError):
            return False  # `read` raises it again, in turn

    def placed(self, item: SourceItem, compared: Compared) -> Placement:
        """Return the placement of an image that would be decoded, by its header only."""
        with io.BytesIO(compared.found.data) if compared.found is not None else self._source.opened(item) as file:
            if item.caption_error is not None:
                raise RejectedError(Reason.CAPTION, item.caption_error, is_passing=item.is_caption_out_of_reach)
            return placed_by_header(file, self._framing, item.id)

    def are_unchanged(self, items: Sequence[SourceItem]) -> list[bool]:
        """Return for each item whether `read` would find it unchanged by its size and mtime, and so return None."""
        if self._config.check is not Check.SIZE_TIME:
            return [False] * len(items)
        samples = self._samples.find_all([item.id for item in items])
        return [self._is_unchanged(item, sample) for item, sample in zip(items, samples, strict=True)]

    def _is_unchanged(self, item: SourceItem, stored: PackedSample | None) -> bool:
        try:
            return self._by_stamp(item, stored)[1] is Change.NONE
        except RejectedError:
            return False  # `read` raises it again, in turn

    def has(self, sample_id: str) -> bool:
        """Return True if the store has a live row of a sample."""
        return self._samples.find(sample_id) is not None

    def _with_kept_latents(self, item: SourceItem, compared: Compared) -> ReadImage | None:
        """Return an unchanged image with its stored latents; None if its row is damaged or unreadable, so that it is encoded.

        A run has the rules and encoders of the store, so an image with the same content has the same latents. That includes
        sampled latents and random crops, which depend only on the id.
        """
        stored, stamp = compared.stored, compared.stamp
        if stored is None or stamp is None:
            return None
        try:
            with self._lock:
                record = self._store.record_of(stored.shard, sample_digest(item.id))
                row = checked_row(self._store, stored.shard, record)
        except StoreError:
            return None
        latents = {
            column.name: np.frombuffer(row[column.name], dtype=column.numpy_dtype).reshape(column.shape)
            for column in self._store.manifest.specs[record.bucket].columns
            if column.name not in self._fixed
        }
        top, left, height, width = record.crop
        bucket, source = Size(height, width), record.original_size
        placement = Placement(bucket=bucket, source=source, resized=record.resized, top=top, left=left)
        kept = KeptLatents(placement=placement, latents=latents)
        return ReadImage(item=replace(item, held=None), image=kept, split=record.split, stamp=stamp, content=stored.content)


# ---------------------------------------------------------------------------------------------------------------- decode notes
# `STORE/decoding/`: which images a process is decoding, so that one that crashes its decoder is found by the next run.
#
# A decoder in C can end the whole process. Each process keeps the digests of the images in flight in a small file that is
# mapped into memory: the kernel keeps it when the process dies, and noting an image is a copy of 32 bytes. The next run finds
# it without a lock on it, and tries each of its images in a process of its own before it decodes it. One that ends that
# process by a signal is rejected, then and later, as long as its bytes are the same.

FOLDER = "decoding"
SLOT_BYTES = 32
TRIAL_S = 600  # a decoder that takes longer is ended
_NOTES, _SUSPECT, _CRASHES = "notes-", "suspect-", "crashes-"
_TRIAL = "bucketline.ingest.pipeline.trial_decode"


class DecodeNotes:
    """The notes of one process, and what earlier ones left. Where nothing can be written or locked, nothing is noted."""

    def __init__(self, folder: Path, num_slots: int) -> None:
        """Take over what processes noted in the store's `folder` that have ended since; `num_slots`: threads that decode."""
        self._folder = folder / FOLDER
        self._map: mmap.mmap | None = None
        self._suspects: set[bytes] = set()
        self._crashing: set[bytes] = set()
        self._free: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._trial = threading.Lock()
        with suppress(OSError):
            self._folder.mkdir(exist_ok=True)
            self._take_over()
            self._path = self._folder / f"{_NOTES}{os.getpid()}-{os.urandom(4).hex()}"
            self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
            fcntl.flock(self._fd, fcntl.LOCK_EX)  # another process may be looking at it for a moment
            os.ftruncate(self._fd, num_slots * SLOT_BYTES)
            self._map = mmap.mmap(self._fd, num_slots * SLOT_BYTES)
        for slot in range(num_slots):
            self._free.put(slot)
        with suppress(OSError):
            self._suspects = self._marked(_SUSPECT)
            self._crashing = self._marked(_CRASHES)

    def _marked(self, kind: str) -> set[bytes]:
        names = [path.name.removeprefix(kind) for path in self._folder.glob(f"{kind}*")]
        return {bytes.fromhex(name) for name in names if set(name) <= set("0123456789abcdef") and len(name) % 2 == 0}

    def _take_over(self) -> None:
        """Mark the images that processes noted which are gone. What another process takes over meanwhile is left to it."""
        for path in self._folder.glob(f"{_NOTES}*"):
            with suppress(OSError):
                self._take_over_from(path)

    def _take_over_from(self, path: Path) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # an error if its process is running
            data = os.read(fd, 1 << 16)
            for at in range(0, len(data), SLOT_BYTES):
                content = data[at : at + SLOT_BYTES].rstrip(b"\0")
                if content:
                    (self._folder / f"{_SUSPECT}{content.hex()}").touch()
            if data:  # else its process is about to lock it
                path.unlink(missing_ok=True)
        finally:
            os.close(fd)

    @contextmanager
    def of(self, content: bytes, data: bytes) -> Iterator[None]:
        """Note an image, by the digest of its bytes, while it is decoded in this block."""
        self._refuse_crashing(content, data)
        if self._map is None:
            yield
            return
        slot = self._free.get()
        begin = slot * SLOT_BYTES
        self._map[begin : begin + SLOT_BYTES] = content[:SLOT_BYTES].ljust(SLOT_BYTES, b"\0")
        try:
            yield
        finally:
            self._map[begin : begin + SLOT_BYTES] = bytes(SLOT_BYTES)
            self._free.put(slot)

    def _refuse_crashing(self, content: bytes, data: bytes) -> None:
        key = content[:SLOT_BYTES].rstrip(b"\0")
        if key in self._crashing:
            raise RejectedError(Reason.DAMAGED, _CRASHED)
        if key not in self._suspects:
            return
        with self._trial:  # another thread may have an image of the same bytes
            if key in self._suspects:
                self._try(key, data)
                self._suspects.discard(key)
        if key in self._crashing:
            raise RejectedError(Reason.DAMAGED, _CRASHED)

    def _try(self, key: bytes, data: bytes) -> None:
        """Decode an image in a process of its own, and note how that ended."""
        mark = self._folder / f"{_SUSPECT}{key.hex()}"
        try:
            done = subprocess.run(
                [sys.executable, "-P", "-m", _TRIAL], input=data, capture_output=True, timeout=TRIAL_S, check=False
            )
            code = done.returncode
        except subprocess.TimeoutExpired:
            code = -signal.SIGKILL
        if code == -signal.SIGKILL:  # by the time, by hand, or because memory was short
            raise RejectedError(Reason.DAMAGED, _KILLED, is_passing=True)
        with suppress(OSError):
            if code >= 0:
                mark.unlink(missing_ok=True)
            else:
                mark.rename(self._folder / f"{_CRASHES}{key.hex()}")
        if code < 0:
            self._crashing.add(key)

    def close(self) -> None:
        """Remove the notes of this process; those about images that crash remain."""
        if self._map is None:
            return
        self._map.close()
        self._map = None
        with suppress(OSError):
            self._path.unlink(missing_ok=True)
            os.close(self._fd)
            self._folder.rmdir()


_KILLED = f"its decoder was killed, perhaps for its memory, or took more than {TRIAL_S} s; run again"
_CRASHED = "its decoder crashes (tried in a process of its own, after an earlier run had ended with it); save it again"
