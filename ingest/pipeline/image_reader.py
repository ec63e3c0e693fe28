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
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from bucketline.errors import SourceError, StoreError
from bucketline.families.references import AREA_PX
from bucketline.ingest.config import framing_of
from bucketline.ingest.images.crop import Placement, Reason, RejectedError, Size
from bucketline.ingest.images.decode import decode_placed, placed_by_header
from bucketline.ingest.partners.masks import mask_on_grid, read_mask, whole_mask
from bucketline.ingest.partners.partner import PartnerForm, SampleReader
from bucketline.ingest.partners.references import ReferenceReader
from bucketline.ingest.pipeline.pool import OrderedPool, read_ahead
from bucketline.ingest.rules import Check
from bucketline.ingest.sources.partner_names import MASK, REFERENCE, MaskForm
from bucketline.ingest.sources.source import split_of
from bucketline.store.format.block import identity, sample_digest
from bucketline.store.format.schema import SampleRecord, bucket_name, captions_checksum
from bucketline.store.read.samples import checked_row

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from numpy.typing import NDArray

    from bucketline.ingest.config import PackConfig, ScanConfig
    from bucketline.ingest.encoders.text_columns import Cut
    from bucketline.ingest.images.crop import Grid
    from bucketline.ingest.packed_index import PackedIndex, PackedSample
    from bucketline.ingest.partners.partner import SampleFiles
    from bucketline.ingest.partners.references import Reference
    from bucketline.ingest.pipeline.pool import WorkLimits
    from bucketline.ingest.sources.partner_names import Partner
    from bucketline.ingest.sources.source import Source, SourceItem, Stamp
    from bucketline.ingest.summary import RunSummary
    from bucketline.store import Store


NO_FORM = PartnerForm()


class Change(StrEnum):
    """How an image differs from its sample in the store."""

    NONE = "none"
    NEW = "new"  # the store has no live sample of it, or its captions cannot be read
    CONTENT = "content"
    TEXT = "text"  # only its captions or mtime: its latents can be kept
    SPLIT = "split"  # it moves to another split, hence to another bucket


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadImage:
    """An image of the walk: decoded, with its latents from the store, or, if only headers are read, with neither."""

    item: SourceItem
    change: Change
    split: str
    stamp: Stamp
    placement: Placement
    content: bytes = b""  # digest of its file
    pixels: NDArray[np.uint8] | None = None  # [height, width, 3] of the bucket, sRGB
    latents: Mapping[str, NDArray[Any]] = field(default_factory=dict)  # by column, [C, h, w]; checksum verified
    references: tuple[Reference, ...] = ()
    mask: NDArray[np.uint8] | None = None  # [h, w] of the latent
    num_pairs: int = 0  # references that have the target's place
    partner_sizes: tuple[int, ...] = ()  # in the bucket's name: height and width in px of each reference that the store has

    @property
    def bucket(self) -> str:
        size = self.placement.bucket
        return bucket_name(self.split, size.height_px, size.width_px, *self.partner_sizes)

    @property
    def reference_sizes(self) -> list[tuple[int, int]]:
        """Height and width in px of each reference."""
        return [size for size in zip(self.partner_sizes[::2], self.partner_sizes[1::2], strict=True) if any(size)]

    @property
    def num_references(self) -> int | None:
        """How many references it has; None if the store has no column of them."""
        return len(self.reference_sizes) if self.partner_sizes else None

    @property
    def is_masked_out(self) -> bool:
        """True if nothing counts: a mask of 0 and 1, instead of 0 and 255, included."""
        return self.mask is not None and int(self.mask.max()) <= 1

    @property
    def num_bytes(self) -> int:
        if self.pixels is None:
            return sum(latent.nbytes for latent in self.latents.values())
        return self.pixels.nbytes + sum(one.num_bytes for one in self.references)


def record_of(
    item: SourceItem, placement: Placement, stamp: Stamp, bucket: str, content: bytes, cuts: Iterable[Cut]
) -> SampleRecord:
    """Return the record of an image, before its row is known."""
    split = bucket.partition("/")[0]
    return SampleRecord(
        id=item.id,
        bucket=bucket,
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


_PART_ITEMS = 64  # compared by a thread at a time; fewer would cost more in passing them on than in comparing them
PARTS_PER_THREAD = 4  # in a window, so that threads rarely wait for the slowest


class ChangedItems:
    """Iterates over the items that are not unchanged, in order, and counts the others."""

    def __init__(
        self, items: Iterable[SourceItem], are_unchanged: Callable[[Sequence[SourceItem]], Sequence[bool]], num_threads: int
    ) -> None:
        """`are_unchanged` is called with at most _PART_ITEMS items, from several threads."""
        self._items, self._are_unchanged, self._num_threads = items, are_unchanged, num_threads
        self._num_unchanged = self._num_taken = 0

    def take_unchanged(self) -> int:
        """Return the number of unchanged items since the last call; another thread than that which iterates may call it."""
        before, self._num_taken = self._num_taken, self._num_unchanged
        return self._num_taken - before

    def __iter__(self) -> Iterator[SourceItem]:
        with ThreadPoolExecutor(self._num_threads, thread_name_prefix="compare") as pool:
            for window in self._windows():
                parts = [window[at : at + _PART_ITEMS] for at in range(0, len(window), _PART_ITEMS)]
                for part, flags in zip(parts, pool.map(self._are_unchanged, parts), strict=True):
                    for item, is_unchanged in zip(part, flags, strict=True):
                        if is_unchanged:
                            self._num_unchanged += 1
                        else:
                            yield item

    def _windows(self) -> Iterator[list[SourceItem]]:
        """Collect items; one that comes with its bytes waits for no other, since the next may be a gigabyte as well."""
        window: list[SourceItem] = []
        for item in self._items:
            window.append(item)
            if item.held is not None or len(window) == _PART_ITEMS * PARTS_PER_THREAD * self._num_threads:
                yield window
                window = []
        if window:
            yield window


class ImageReader:
    """Reads the images of a source: the walk of a pack, of its dry run and of a scan.

    `walk` goes through all of them; the other functions are about one, and safe to call from several threads.
    """

    def __init__(
        self,
        source: Source,
        store: Store | None,
        samples: PackedIndex | None,
        config: PackConfig | ScanConfig,
        grid: Grid,
        *,
        partners: PartnerForm = NO_FORM,
        px_per_latent: int = 8,
        reads_headers: bool = False,
    ) -> None:
        """Take the index of this rank's samples in the store, if there is one; with `reads_headers`, decode only masks.

        `partners`: what rows have of references and masks, these on the grid of a latent.
        """
        self._source, self._samples, self._check = source, samples, config.check
        self._store, self._held_out, self._reads_headers = store, config.held_out, reads_headers
        self._fixed = set() if store is None else {one.name for one in store.manifest.common_columns}
        self._files, self._partners, self._px_per_latent = SampleReader(source, config), partners, px_per_latent
        family = partners.family
        self._references = None if family is None else ReferenceReader(family=family, area_px=partners.area_px)
        self._reference_bytes = 0 if reads_headers else 6 * (partners.area_px or AREA_PX)  # for the VAE and the text encoder
        self._lock = threading.Lock()  # sidecars are mapped on first use
        self._framing = framing_of(config, grid)
        largest = max(3 * size.height_px * size.width_px for size in grid.sizes)
        self._decoded_bytes = 0 if reads_headers else largest  # at most, of an image
        self._partner_framing = replace(self._framing, min_size_px=1)
        self.too_cropped: list[tuple[str, Placement]] = []  # of a scan: ids of rejects, and where their crops would be
        self.notes: DecodeNotes | None = None  # of the images that are being decoded, while a pack runs

    def walk(
        self,
        items: Iterable[SourceItem],
        room: WorkLimits,
        account: RunSummary,
        on_image: Callable[[], None],
        check: Callable[[], None] = lambda: None,
    ) -> Iterator[ReadImage]:
        """Read ahead and yield the images in order, without those that are unchanged or rejected: these are counted.

        `on_image` is called for each of these; `check` is called while waiting and between images, and may raise.
        """
        changed = ChangedItems(self._source.in_turn(items), self.are_unchanged, room.num_threads)
        coming = changed if self._reads_headers else read_ahead(self._source, changed, self._will_read, self._files)
        with OrderedPool(coming, self.read, self._bytes_of, room) as ahead:
            for item, future in ahead.results(partial(_count_and_check, account, changed, on_image, check)):
                try:
                    image = future.result()
                except RejectedError as error:
                    self.reject(account, item, error)
                    image = None
                else:
                    account.unchanged += image is None
                if image is None:
                    on_image()
                else:
                    yield image
        _count_and_check(account, changed, on_image, check)

    def _bytes_of(self, item: SourceItem) -> int:
        """Return the memory that an image takes while it is read and decoded, with its partners."""
        held = sum(len(one.held or b"") for one in item.partners)
        return self._decoded_bytes + len(item.held or b"") + held + len(item.partners) * self._reference_bytes

    def reject(self, account: RunSummary, item: SourceItem, error: RejectedError) -> None:
        """Count a rejected image."""
        account.reject(item.id, error, is_stored=self._stored(item.id) is not None)
        if self._store is None and error.placement is not None:
            self.too_cropped.append((item.id, error.placement))

    def read(self, item: SourceItem) -> ReadImage | None:
        """Read one image; None if it is unchanged. If only its captions or mtime changed, reuse its latents."""
        split, change, stored, stamp, files = self._compared(item)
        if change is Change.NONE:
            return None
        if change is Change.TEXT and (image := self._with_kept_latents(item, split, stored, stamp)) is not None:
            return image
        if self._reads_headers:
            read = self._read_headers(item, files.data if files is not None else None)
            read |= {"stamp": stamp or self._files.stamp(item)}
        else:
            files = files or self._files.read(item)
            _refuse_bad_item(item)
            read = {"stamp": files.stamp, **self._decoded(item, files)}
        item = replace(item, held=None, partners=tuple(replace(one, held=None) for one in item.partners))
        return ReadImage(item=item, change=change, split=split, **read)

    def _read_headers(self, item: SourceItem, data: bytes | None) -> dict[str, Any]:
        """Return what headers tell of an image and its references, and its mask if that is a file: fields of `ReadImage`."""
        with self._source.opened(item) if data is None else io.BytesIO(data) as file:
            _refuse_bad_item(item)
            placement = placed_by_header(file, self._framing, item.id)
        if self._partners.is_empty:
            return {"placement": placement}
        references, masks = self._split_partners(item)
        sizes, num_pairs, mask = [], 0, None
        for partner in references:
            with self._files.naming(partner), self._files.opened(partner) as file:
                assert self._references is not None
                size, is_pair = self._references.size_in(file, self._partner_framing, placement)
                sizes.append(size)
                num_pairs += is_pair
        for partner in masks:
            with self._files.naming(partner), self._files.opened(partner) as file:
                mask = read_mask(file.read(), self._partner_framing, placement, self._px_per_latent)
        own_sizes = self._partners.bucket_sizes(sizes)
        return {"placement": placement, "partner_sizes": own_sizes, "num_pairs": num_pairs, "mask": mask}

    def _decoded(self, item: SourceItem, files: SampleFiles) -> dict[str, Any]:
        """Decode an image and its partners: fields of `ReadImage`."""
        content, has_alpha = files.content, self._partners.mask == MaskForm.ALPHA
        place = partial(self._framing.place, item.id)
        with self._noting(files.data, None if files.partners else content):
            image, placement, alpha = decode_placed(files.data, self._framing, place, keeps_alpha=has_alpha)
        assert placement is not None
        read: dict[str, Any] = {"placement": placement, "content": content, "pixels": np.asarray(image, dtype=np.uint8)}
        if self._partners.is_empty:
            return read
        references, masks, sizes = [], self._split_partners(item)[1], []
        for partner, data in zip(item.partners, files.partners, strict=True):
            with self._files.naming(partner), self._noting(data):
                if partner in masks:
                    read["mask"] = read_mask(data, self._partner_framing, placement, self._px_per_latent)
                else:
                    assert self._references is not None
                    references.append(self._references.read(data, self._partner_framing, placement))
                    sizes.append(references[-1].pixels.shape[:2])
        if has_alpha and alpha is not None:
            read["mask"] = mask_on_grid(alpha, placement, self._px_per_latent)
        elif self._partners.mask in (MaskForm.ALPHA, MaskForm.WHOLE):
            read["mask"] = whole_mask(placement, self._px_per_latent)
        return {
            **read,
            "references": tuple(references),
            "num_pairs": sum(one.is_pair for one in references),
            "partner_sizes": self._partners.bucket_sizes(sizes),
        }

    def _split_partners(self, item: SourceItem) -> tuple[list[Partner], list[Partner]]:
        """Return a sample's references and its masks; check how many references it has."""
        references = [one for one in item.partners if one.kind == REFERENCE]
        self._partners.refuse_number(len(references))
        return references, [one for one in item.partners if one.kind == MASK]

    def _noting(self, data: bytes, digest: bytes | None = None) -> AbstractContextManager[None]:
        return nullcontext() if self.notes is None else self.notes.of(digest or identity(data), data)

    def _compared(self, item: SourceItem) -> tuple[str, Change, PackedSample | None, Stamp | None, SampleFiles | None]:
        """Compare an image with its sample in the store. Read its files only if size or mtime differ, or for --check content.

        Return its split, how it differs, its sample, and of its files the stamp and the contents, if they are known.
        """
        stored = self._stored(item.id)
        split, change, stamp = self._by_stamp(item, stored)
        if change is not None:
            return split, change, stored, stamp, None
        files = self._files.read(item)
        assert stored is not None, item.id
        if stored.content != files.content:
            change = Change.CONTENT
        else:
            has_captions = self._check is Check.CONTENT and stored.captions == captions_checksum(item.captions)
            change = Change.NONE if has_captions else Change.TEXT
        return split, change, stored, files.stamp, files

    def _by_stamp(self, item: SourceItem, stored: PackedSample | None) -> tuple[str, Change | None, Stamp | None]:
        """Return an image's split, how it differs, or None if only its file can tell, and its stamp if that tells."""
        split = split_of(item, self._held_out)
        if stored is None or item.caption_error is not None or item.partner_error is not None:
            return split, Change.NEW, None
        if stored.is_held_out != (split == "val"):
            return split, Change.SPLIT, None
        if self._check is not Check.SIZE_TIME:
            return split, None, None
        stamp = self._files.stamp(item)
        if (stored.source_bytes, stored.source_mtime_ns) != (stamp.num_bytes, stamp.mtime_ns):
            return split, None, None
        return split, Change.NONE if stored.captions == captions_checksum(item.captions) else Change.TEXT, stamp

    def will_pack(self, item: SourceItem) -> bool:
        """Return whether an image that `are_unchanged` does not leave out may be packed. Reads its file for --check content."""
        if self._check is Check.SIZE_TIME:
            return True
        try:
            return self._compared(item)[1] is not Change.NONE
        except RejectedError:
            return False  # `read` raises it again

    def _will_read(self, item: SourceItem) -> bool:
        """Return whether `read` needs the file of an item that is not unchanged: not if only its captions differ."""
        try:
            return self._by_stamp(item, self._stored(item.id))[1] not in (Change.NONE, Change.TEXT)
        except (RejectedError, SourceError):
            return False  # `read` raises it again, in turn

    def are_unchanged(self, items: Sequence[SourceItem]) -> list[bool]:
        """Return for each item whether `read` would find it unchanged by its size and mtime, and so return None."""
        if self._samples is None or self._check is not Check.SIZE_TIME:
            return [False] * len(items)
        samples = self._samples.find_all([item.id for item in items])
        return [self._is_unchanged(item, sample) for item, sample in zip(items, samples, strict=True)]

    def _is_unchanged(self, item: SourceItem, stored: PackedSample | None) -> bool:
        try:
            return self._by_stamp(item, stored)[1] is Change.NONE
        except RejectedError:
            return False  # `read` raises it again, in turn

    def _stored(self, sample_id: str) -> PackedSample | None:
        return None if self._samples is None else self._samples.find(sample_id)

    def _with_kept_latents(
        self, item: SourceItem, split: str, stored: PackedSample | None, stamp: Stamp | None
    ) -> ReadImage | None:
        """Return an unchanged image with its stored latents; None if its row is damaged or unreadable, so that it is encoded.

        A run has the rules and encoders of the store, so an image with the same content has the same latents. That includes
        sampled latents and random crops, which depend only on the id.
        """
        if self._store is None or stored is None or stamp is None or self._store.manifest.sees_images:
            return None
        try:
            with self._lock:
                record = self._store.record_of(stored.shard, sample_digest(item.id))
                row = {} if self._reads_headers else checked_row(self._store, stored.shard, record)
        except StoreError:
            return None
        latents = {
            column.name: np.frombuffer(row[column.name], dtype=column.numpy_dtype).reshape(column.shape)
            for column in self._store.manifest.specs[record.bucket].columns
            if column.name in row and column.name not in self._fixed
        }
        top, left, height, width = record.crop
        bucket, source = Size(height, width), record.original_size
        placement = Placement(bucket=bucket, source=source, resized=record.resized, top=top, left=left)
        return ReadImage(
            item=replace(item, held=None),
            change=Change.TEXT,
            split=split,
            stamp=stamp,
            placement=placement,
            content=stored.content,
            latents=latents,
            partner_sizes=tuple(map(int, record.bucket.partition("/")[2].split("x")[2:])),
        )


def _count_and_check(
    account: RunSummary, changed: ChangedItems, on_image: Callable[[], None], check: Callable[[], None]
) -> None:
    """Count the images that were left out as unchanged since the last call."""
    for _ in range(changed.take_unchanged()):
        account.unchanged += 1
        on_image()
    check()


def _refuse_bad_item(item: SourceItem) -> None:
    if item.partner_error is not None:
        raise RejectedError(Reason.PARTNER, item.partner_error)
    if item.caption_error is not None:
        raise RejectedError(Reason.CAPTION, item.caption_error, is_passing=item.is_caption_out_of_reach)


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
_TRIAL = "bucketline.ingest.images.decode"


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
