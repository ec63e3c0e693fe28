"""Pack a slice: read, encode, and write rows in a thread of their own.

Memory is bounded for any source: images being decoded (_AHEAD_BYTES), images that wait for their bucket's batch to fill
(WAITING_BYTES), and encoded batches that wait for the disk. An image's id travels with its pixels from the file to the
row, so a rejected image cannot shift the others.
"""

from __future__ import annotations

import itertools
import queue
from contextlib import ExitStack, closing, suppress
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np

from bucketline.errors import ModelError, StoreError
from bucketline.forks import JoinableThread
from bucketline.ingest.images.crop import Reason, RejectedError
from bucketline.ingest.packed_index import PackedIndex
from bucketline.ingest.partners.partner import axes_of
from bucketline.ingest.pipeline.captions import FreshCaptions, KeptCaptions, SeenCaptions
from bucketline.ingest.pipeline.image_reader import NO_FORM, Change, ChangedItems, DecodeNotes, ImageReader, record_of
from bucketline.ingest.pipeline.pool import DECODE, ENCODE, WRITE, WorkLimits
from bucketline.ingest.rules import Check
from bucketline.ingest.summary import RunSummary
from bucketline.store.format.block import DTYPES, BlockSpec, caption_digest, sample_digest
from bucketline.store.format.text import TEXT_GROUP
from bucketline.store.write.row_form import sizes_of
from bucketline.store.write.seal import seal
from bucketline.store.write.shard_writer import ShardWriter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path
    from types import TracebackType

    from numpy.typing import NDArray

    from bucketline.ingest.config import PackConfig
    from bucketline.ingest.encoders.text_columns import CaptionEncoder, Cut, SeeingEncoder
    from bucketline.ingest.encoders.vae import LatentColumns, VaeEncoder
    from bucketline.ingest.images.crop import Grid
    from bucketline.ingest.parallel.items import Share
    from bucketline.ingest.partners.partner import PartnerForm
    from bucketline.ingest.pipeline.captions import CaptionWriter
    from bucketline.ingest.pipeline.image_reader import ReadImage
    from bucketline.ingest.pipeline.pool import StageTimer
    from bucketline.ingest.sources.source import Source, SourceItem
    from bucketline.store import Store
    from bucketline.store.format.schema import SampleRecord
    from bucketline.store.format.text import Caption, Entry
    from bucketline.store.transfer import ShardSender


# ------------------------------------------------------------------------------------------------------------------ row writer

BATCHES_WAITING = 4  # encoded batches in the queue
_POLL_S = 0.2  # how soon the end of the thread is noticed while the queue is full


# of each sample its record, its values by column, the digests of its captions, and its entries by ragged group
Rows: TypeAlias = "list[tuple[SampleRecord, Mapping[str, NDArray[Any]], list[bytes], Mapping[str, Entry]]]"
# the columns of a bucket, captions that the shard does not have yet, rows, and whether they begin a shard
_Batch: TypeAlias = "tuple[BlockSpec, Sequence[Caption], Rows, bool]"


class _EndShard:
    """In the queue: seal the shard, and begin another with the next batch."""


class RowWriter:
    """Writes batches in order. All LMDB calls are made in this thread, since a transaction belongs to one thread.

    The thread ends at its first error and takes nothing more from the queue. Every wait therefore ends when the thread has
    either taken the batch or ended, and the call that waited raises the error.
    """

    def __init__(self, new_shard: Callable[[], ShardWriter], on_sealed: Callable[[str], None] = lambda _: None) -> None:
        """Take what begins a shard, and what is told the name of each that is sealed; the thread calls both."""
        self._new_shard, self._on_sealed = new_shard, on_sealed
        self._waiting: queue.Queue[_Batch | _EndShard | None] = queue.Queue(BATCHES_WAITING)
        self._thread = JoinableThread(self._run, name="row-writer")
        self._failure: BaseException | None = None
        self._is_to_seal = True
        self.sealed: list[str] = []

    def put(self, spec: BlockSpec, captions: Sequence[Caption], rows: Rows, *, begins_shard: bool) -> None:
        """Queue rows of one bucket, and captions that the shard lacks; blocks while the disk is slower than the encoders."""
        if self._thread.ident is None:
            self._thread.start()
        self._hand_over((spec, captions, rows, begins_shard))
        self._raise_failure()

    def end_shard(self) -> None:
        """Have the current shard sealed, if there is one. Raises what `put` does."""
        self._hand_over(_EndShard())
        self._raise_failure()

    def __enter__(self) -> RowWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Write all queued batches and seal the last shard; after an error, commit it and leave it pending."""
        self._is_to_seal = error is None
        self._hand_over(None)
        self._thread.join()
        if self._failure is not error:
            self._raise_failure()

    def _hand_over(self, batch: _Batch | _EndShard | None) -> None:
        """Put a batch, or None to end, into the queue; return at once if the thread has ended."""
        while self._thread.is_alive():
            with suppress(queue.Full):
                self._waiting.put(batch, timeout=_POLL_S)
                return

    def _raise_failure(self) -> None:
        if isinstance(self._failure, MemoryError):
            explained = StoreError(
                "not enough memory to write what was encoded; what was committed is kept: "
                "free memory, or choose a smaller --batch-size, and rerun the command"
            )
            explained.__cause__, self._failure = self._failure, explained
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        try:
            self._write_shards()
        except BaseException as error:  # noqa: BLE001 - raised in the encoding thread
            self._failure = error

    def _write_shards(self) -> None:
        shard: ShardWriter | None = None
        try:
            while (batch := self._waiting.get()) is not None:
                if isinstance(batch, _EndShard) or batch[-1]:
                    self._seal(shard)
                    shard = None
                if not isinstance(batch, _EndShard):
                    shard = shard or self._new_shard()
                    _write(shard, *batch[:-1])
            if self._is_to_seal:
                self._seal(shard)
            elif shard is not None:
                shard.commit()
        finally:
            if shard is not None:
                shard.close()

    def _seal(self, shard: ShardWriter | None) -> None:
        if shard is not None and shard.seal():
            self.sealed.append(shard.name)
            self._on_sealed(shard.name)


def _write(shard: ShardWriter, spec: BlockSpec, captions: Sequence[Caption], rows: Rows) -> None:
    for caption in captions:
        shard.add_caption({TEXT_GROUP: caption})
    for record, latents, digests, entries in rows:
        try:
            shard.add(spec=spec, latents=latents, record=record, captions=digests, entries=entries)
        except ValueError as error:
            raise ModelError(
                f"{record.id}: the VAE's latent does not fit its bucket: {error}; "
                "its config.json does not describe its weights, or it takes other sizes than the grid's"
            ) from error


# ---------------------------------------------------------------------------------------------------------------- slice packer

_AHEAD_BYTES = 256 << 20  # of decoded images in flight, and of their file contents if these come with the items
AHEAD_ITEMS = 256
CAPTIONS_TOGETHER = 64  # encoded and committed together, if they are encoded first
WAITING_BYTES = 512 << 20  # of decoded pixels that wait for their bucket's batch to fill


class SlicePacker:
    """Packs images into shards `PREFIX-0000`, `PREFIX-0001` and so on."""

    def __init__(
        self,
        *,
        source: Source,
        store: Store,
        share: Share,
        config: PackConfig,
        grid: Grid,
        vae: Callable[[], VaeEncoder],
        text: Callable[[], CaptionEncoder],
        folder: Path,
        shard_prefix: str,
        decode_threads: int,
        stages: StageTimer,
        sender: ShardSender | None = None,
        partners: PartnerForm = NO_FORM,
    ) -> None:
        """Take `vae` and `text` to load the encoders: each is called when there is something to encode, and never before.

        Shards are made in `folder`, the store's own or one that is laid out as it. `sender` gets each shard that is sealed, and
        says when there is room for another.
        """
        self._source, self._store, self._config, self.folder = source, store, config, folder
        self._partners, self._schema = partners, store.manifest
        px_per_latent = partners.px_per_latent_in(store.manifest)
        index = PackedIndex(store, share)
        self._reader = ImageReader(source, store, index, config, grid, partners=partners, px_per_latent=px_per_latent)
        self._room = WorkLimits(
            num_threads=decode_threads, items=AHEAD_ITEMS, num_bytes=_AHEAD_BYTES, in_bursts=stages.on_shared_cores
        )
        self._share, self._load_vae, self._load_text = share, vae, text
        self._encoder: LatentColumns | None = None
        self._captions: FreshCaptions | KeptCaptions | SeenCaptions | None = None
        self._names = (f"{shard_prefix}-{number:04d}" for number in itertools.count())
        self.sender = sender
        self._writer = RowWriter(self._new_shard, sender.put if sender is not None else lambda _: None)
        self._check: Callable[[], None] = lambda: None
        self._shard = ShardFill()
        self._waiting: dict[str, list[ReadImage]] = {}
        self._waiting_bytes = 0
        self.account = RunSummary()
        self.stages = stages

    @property
    def sealed(self) -> list[str]:
        return self._writer.sealed

    @property
    def ready(self) -> Sequence[str]:
        """Names of the shards that are sealed, and sent if that is needed; they become more."""
        return self.sealed if self.sender is None else self.sender.sent

    def end_shard(self) -> None:
        """Have the current shard sealed with what is encoded so far; the next batch begins another. Raises what `run` does."""
        self._shard = ShardFill()
        self._writer.end_shard()

    def run(self, items: Iterable[SourceItem], on_image: Callable[[], None], check: Callable[[], None]) -> None:
        """Pack all images and count each in the summary. `check` is called between images and batches, and may raise.

        On an exception, including Ctrl-C, the encoded rows are committed and stay pending; the next run adopts them.
        """
        self._check = check
        notes = self._reader.notes = DecodeNotes(self._config.store, self._room.num_threads)
        with closing(notes), self._writer:
            images = self._reader.walk(items, self._room, self.account, on_image, check)
            for image in self.stages.each(DECODE, images):
                self._wait_for_batch(image, on_image)
            for bucket in list(self._waiting):
                check()
                self._encode(bucket, on_image)
        if isinstance(self._captions, KeptCaptions):
            self._captions.close()
        self.account.stage_seconds = self.stages.seconds
        self.account.on_shared_cores = self.stages.on_shared_cores()

    def seal_rest(self) -> None:
        """After `run` was stopped: seal what it had committed in a folder of its own, and have that sent."""
        for path in sorted((self.folder / "pending").glob("*.lmdb")):
            if seal(self.folder, path.stem):
                self.sealed.append(path.stem)
                if self.sender is not None:
                    self.sender.put(path.stem)

    def encode_captions(
        self, items: Iterable[SourceItem], on_image: Callable[[], None], check: Callable[[], None], is_due: Callable[[], bool]
    ) -> None:
        """Encode the captions of all images that `run` will pack, and keep them on the disk until then, if that `is_due`.

        `is_due` is called once there is an image to pack. On an exception, what was committed is kept for the next run.
        """
        kept: KeptCaptions | None = None
        with ExitStack() as held:
            fresh: FreshCaptions | None = None
            writer: CaptionWriter | None = None
            for texts in self._captions_to_pack(items, on_image, check):
                if kept is None:
                    if not is_due():
                        return
                    kept = KeptCaptions(self.folder, self._store.manifest, self._share)
                missing = [text for text in kept.missing(texts) if writer is None or not writer.has_caption(text)]
                if missing and (fresh is None or writer is None):
                    made = self._fresh_captions()
                    assert isinstance(made, FreshCaptions)  # those that depend on images are not encoded first
                    fresh = made
                    writer = kept.writer(held, fresh.empty, self._config.shard_size.num_bytes)
                if fresh is None or writer is None:
                    continue
                for text, found in zip(missing, fresh.of(missing), strict=True):
                    if isinstance(found, RejectedError):
                        kept.refuse(text, found)
                    else:
                        writer.add_caption(text, found)
                writer.commit()
                check()
        if kept is not None:
            kept.reopen()
            self._captions = kept

    def _captions_to_pack(
        self, items: Iterable[SourceItem], on_image: Callable[[], None], check: Callable[[], None]
    ) -> Iterator[list[str]]:
        """Yield the captions of the images that are not unchanged, some at a time, each time with the empty one."""
        texts: list[str] = []
        in_turn = items if self._config.check is Check.SIZE_TIME else self._source.in_turn(items)
        for item in ChangedItems(in_turn, self._reader.are_unchanged, self._room.num_threads):
            if item.caption_error is None and self._reader.will_pack(item):
                texts += self._kept(item) or ("",)
            if len(texts) >= CAPTIONS_TOGETHER:
                yield ["", *texts]
                texts = []
            on_image()
            check()
        if texts:
            yield ["", *texts]

    def _wait_for_batch(self, image: ReadImage, on_image: Callable[[], None]) -> None:
        batch = self._waiting.setdefault(image.bucket, [])
        batch.append(image)
        self._waiting_bytes += image.num_bytes
        if len(batch) == self._config.batch_size:
            self._encode(image.bucket, on_image)
        elif self._waiting_bytes > WAITING_BYTES:
            self._encode(max(self._waiting, key=lambda bucket: len(self._waiting[bucket])), on_image)

    def _encode(self, bucket: str, on_image: Callable[[], None]) -> None:
        images = self._waiting.pop(bucket)
        self._waiting_bytes -= sum(image.num_bytes for image in images)
        captions = self._captions = self._captions or self._fresh_captions()
        encoder = self._encoder = self._encoder or self._loaded()
        begins_shard = self._shard.is_full(self._config.shard_size.num_bytes)
        if begins_shard:
            self._shard = ShardFill()
            if self.sender is not None:
                with self.stages.spent(WRITE):
                    self.sender.wait_for_room(self._check)
        with self.stages.spent(ENCODE):
            spec = self._spec(encoder, bucket, images[0])
            entries: dict[str, Mapping[str, Entry]] = {}
            if isinstance(captions, SeenCaptions):
                new_captions, bad_captions = self._seen_captions(captions, images, entries)
            else:
                new_captions, bad_captions = self._new_captions(captions, images)
            rows = self._rows(encoder, bucket, images, bad_captions, entries)
            self._shard.num_rows += len(rows)
            self._shard.num_bytes += len(rows) * spec.row_bytes
        with self.stages.spent(WRITE):
            self._writer.put(spec, new_captions, rows, begins_shard=begins_shard)
        for _ in images:
            on_image()

    def _loaded(self) -> LatentColumns:
        from bucketline.ingest.encoders.vae import LatentColumns  # imports torch

        self.account.has_encoded = True
        return LatentColumns(self._load_vae(), flip=self._config.flip)

    def _fresh_captions(self) -> FreshCaptions | SeenCaptions:
        self.account.has_encoded = True
        encoder = self._load_text()
        if self._schema.sees_images:
            return SeenCaptions(cast("SeeingEncoder", encoder), self._schema)
        return FreshCaptions(encoder, self._store.text, self._config.batch_size)

    def _rows(
        self,
        encoder: LatentColumns,
        bucket: str,
        images: list[ReadImage],
        bad_captions: Mapping[bytes, RejectedError],
        entries: Mapping[str, Mapping[str, Entry]],
    ) -> Rows:
        """Encode images and return their rows, without those that are rejected."""
        decoded = [(image.item.id, image.pixels) for image in images if image.pixels is not None]
        encoded = iter(encoder.encode(decoded) if decoded else ())
        rows: Rows = []
        partners = [{}] * len(images) if self._partners.is_empty else self._partner_values(encoder, images)
        for image, own in zip(images, partners, strict=True):
            item, place = image.item, image.placement
            latents = image.latents if image.pixels is None else next(encoded)
            if isinstance(latents, str) or isinstance(own, str):
                found = latents if isinstance(latents, str) else str(own)
                self._reader.reject(self.account, item, RejectedError(Reason.LATENT, found))
                continue
            digests = self._digests(item)
            whole = (*digests, sample_digest(item.id))
            if error := next((bad_captions[digest] for digest in whole if digest in bad_captions), None):
                self._reader.reject(self.account, item, error)
                continue
            cuts = tuple(cut for digest in digests for cut in self._shard.cuts.get(digest, ()))
            record = record_of(item, place, image.stamp, bucket, image.content, cuts)
            rows.append((record, {**latents, **own}, digests, entries.get(item.id, {})))
            self._shard.num_bytes += record.text_bytes
            self.account.count_packed(item.id, item.captions, place, bucket, self._config.max_captions)
            self.account.count_partners(item.id, image.num_references, image.num_pairs, is_masked_out=image.is_masked_out)
            self.account.moved += image.change is Change.SPLIT
            self.account.latents_kept += image.pixels is None
        return rows

    def _partner_values(self, encoder: LatentColumns, images: list[ReadImage]) -> list[dict[str, NDArray[Any]] | str]:
        """Encode references, those of one size together; return each image's values by column, or why they cannot be stored."""
        by_size: dict[tuple[int, ...], list[tuple[int, int]]] = {}
        for n, image in enumerate(images):
            for number, one in enumerate(image.references):
                by_size.setdefault(one.pixels.shape, []).append((n, number))
        latents: dict[tuple[int, int], tuple[NDArray[Any], ...] | str] = {}
        for own in by_size.values():
            for at in range(0, len(own), self._config.batch_size):
                part = own[at : at + self._config.batch_size]
                pixels = [images[n].references[number].pixels for n, number in part]
                latents.update(zip(part, encoder.encode_references(pixels), strict=True))
        absent = np.empty((encoder.vae.latent_channels, 0, 0), dtype=DTYPES[encoder.vae.stored_dtype])
        return [
            {} if image.pixels is None else self._partners.values(n, image.mask, latents, absent, flip=self._config.flip)
            for n, image in enumerate(images)
        ]

    def _digests(self, item: SourceItem) -> list[bytes]:
        """Return the digests of a sample's captions, by which a shard has them; without captions, that of the empty one."""
        sample = sample_digest(item.id) if self._schema.sees_images else b""
        return [self._schema.caption_digest(text, sample) for text in self._kept(item)] or [caption_digest("")]

    def _seen_captions(
        self, captions: SeenCaptions, images: list[ReadImage], entries: dict[str, Mapping[str, Entry]]
    ) -> tuple[list[Caption], dict[bytes, RejectedError]]:
        """Encode the captions of each image with its references; as `_new_captions`. Adds the entries of rows by id.

        What is wrong with a sample's images is returned by the digest of its id: the empty caption's is that of all samples.
        """
        good: list[Caption] = []
        bad: dict[bytes, RejectedError] = {}
        for image in images:
            item, texts = image.item, self._kept(image.item)
            digests = self._digests(item)
            found = captions.of(texts, [one.seen for one in image.references if one.seen is not None])
            if isinstance(found, RejectedError):
                bad[sample_digest(item.id)] = found
                continue
            entries[item.id] = found.entries
            self._shard.num_bytes += sum(entry.num_bytes for entry in found.entries.values())
            for text, digest, embedding in zip(texts, digests, found.captions, strict=False):
                stored = captions.stored(text, digest, embedding)
                if isinstance(stored, RejectedError):
                    bad[digest] = stored
                    continue
                if stored.cuts:
                    self._shard.cuts[digest] = stored.cuts
                good.append(stored.caption)
        self._shard.num_bytes += sum(caption.num_bytes for caption in good)
        return good, bad

    def _kept(self, item: SourceItem) -> tuple[str, ...]:
        return item.captions[: self._config.max_captions]

    def _spec(self, encoder: LatentColumns, bucket: str, image: ReadImage) -> BlockSpec:
        """Return the bucket's columns; they depend only on its size, never on the output of an encoder."""
        size, common = image.placement.bucket, self._schema.common_columns
        if self._partners.is_empty:
            return BlockSpec(bucket=bucket, columns=(*common, *encoder.columns(size.height_px, size.width_px)))
        vae = encoder.vae
        columns = self._partners.row_columns(
            channels=vae.latent_channels,
            stored_channels=vae.stored_channels,
            px_per_latent=vae.downscale,
            dtype=vae.stored_dtype,
            flip=self._config.flip,
        )
        axes = axes_of(columns)
        sizes = sizes_of(bucket, axes)
        return BlockSpec(bucket=bucket, columns=(*common, *(one.in_sizes(bucket, sizes) for one in columns)), axes=axes)

    def _new_captions(
        self, captions: FreshCaptions | KeptCaptions, images: list[ReadImage]
    ) -> tuple[list[Caption], dict[bytes, RejectedError]]:
        """Encode the captions that the shard does not have yet; also return those that cannot be stored, with the reason."""
        wanted = {caption_digest(text): text for image in images for text in self._kept(image.item)}
        texts = [(digest, text) for digest, text in wanted.items() if digest not in self._shard.captions]
        good: list[Caption] = []
        bad: dict[bytes, RejectedError] = {}
        for at in range(0, len(texts), self._config.batch_size):
            part = texts[at : at + self._config.batch_size]
            for (digest, _), found in zip(part, captions.of([text for _, text in part]), strict=True):
                if isinstance(found, RejectedError):
                    bad[digest] = found
                    continue
                if found.cuts:
                    self._shard.cuts[digest] = found.cuts
                good.append(found.caption)
        self._shard.captions.update(caption.digest for caption in good)
        self._shard.num_bytes += sum(caption.num_bytes for caption in good)
        return good, bad

    def _new_shard(self) -> ShardWriter:
        if self._captions is None:
            raise AssertionError("a shard was begun before a batch was encoded")
        max_bytes = self._config.shard_size.num_bytes
        store, empty = self._store, self._captions.empty
        return ShardWriter(self.folder, next(self._names), store.groups, {TEXT_GROUP: empty}, max_bytes)


class ShardFill:
    """The content queued for the current shard."""

    def __init__(self) -> None:
        self.captions = {caption_digest("")}
        self.cuts: dict[bytes, tuple[Cut, ...]] = {}  # of those captions that an encoder did not see to their end
        self.num_rows = 0
        self.num_bytes = 0  # of rows, captions and the text in records

    def is_full(self, max_bytes: int) -> bool:
        return self.num_bytes >= max_bytes
