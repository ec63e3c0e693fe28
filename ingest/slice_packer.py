"""One rank's slice of a source: decoded in threads, encoded by bucket, written by a thread to shards of its own.

What is under way is bounded, whatever the source holds: pictures being decoded (AHEAD_BYTES), pictures that wait for their
bucket's batch to fill (WAITING_BYTES), encoded batches that wait for the disk. An image's id travels with its pixels from
the file to the row, so that one that fails shifts no other.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from bucketline.errors import SourceError
from bucketline.ingest.account import Account
from bucketline.ingest.ahead import Ahead, Room
from bucketline.ingest.crop_loss import note_crop_loss
from bucketline.ingest.encoders.arrays import as_stored
from bucketline.ingest.encoders.halving import Halving
from bucketline.ingest.encoders.latents import LatentColumns
from bucketline.ingest.picture_reader import Picture, PictureReader
from bucketline.ingest.rejects import Reason, RejectedError
from bucketline.ingest.row_writer import EncodedBatch, EncodedRow, RowWriter
from bucketline.ingest.stages import DECODE, ENCODE, WRITE
from bucketline.store.block import BlockSpec, fixed_columns
from bucketline.store.digests import caption_digest, sample_digest
from bucketline.store.record import SampleRecord
from bucketline.store.shard_writer import ShardWriter
from bucketline.store.text_block import Caption, make_caption

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from numpy.typing import NDArray

    from bucketline.ingest.config import PackConfig
    from bucketline.ingest.encoders.captions import CaptionEncoder, Embedding
    from bucketline.ingest.encoders.vae import VaeEncoder
    from bucketline.ingest.grids import Grid
    from bucketline.ingest.sources.source import Source, SourceItem
    from bucketline.ingest.stages import Stages
    from bucketline.store import Store

AHEAD_BYTES = 256 << 20  # of pictures that are being decoded or were, and of the bytes that a stream gave for them
AHEAD_ITEMS = 256
WAITING_BYTES = 512 << 20  # of decoded pixels that wait for their bucket's batch to fill


class SlicePacker:
    """Packs the images it is given into shards `PREFIX-0000`, `PREFIX-0001` and so on."""

    def __init__(
        self,
        *,
        source: Source,
        store: Store,
        config: PackConfig,
        grid: Grid,
        vae: VaeEncoder,
        text: CaptionEncoder,
        shard_prefix: str,
        decode_threads: int,
        stages: Stages,
    ) -> None:
        self._source, self._store, self._config = source, store, config
        self._reader = PictureReader(source, store, config, grid)
        self._largest_bytes = max(3 * size.height_px * size.width_px for size in grid.sizes)
        self._room = Room(
            num_threads=decode_threads, items=AHEAD_ITEMS, num_bytes=AHEAD_BYTES, in_bursts=stages.on_shared_cores
        )
        self._latents = LatentColumns(vae, flip=config.flip)
        self._captions = Halving(text.encode, "caption")
        self._names = (f"{shard_prefix}-{number:04d}" for number in itertools.count())
        self._writer = RowWriter(self._new_shard)
        self._shard = ShardFill()
        self._empty: Caption | None = None
        self._waiting: dict[str, list[Picture]] = {}
        self._waiting_bytes = 0
        self.account = Account()
        self.stages = stages

    @property
    def sealed(self) -> list[str]:
        """The shards that were sealed."""
        return self._writer.sealed

    def run(self, items: Iterable[SourceItem], on_image: Callable[[], None], check: Callable[[], None]) -> None:
        """Pack all images; every one ends in the account. `check` may raise; it is called between images and batches.

        On an exception, Ctrl-C among them, what was encoded is committed and stays pending; the next run adopts it.

        Raises:
            StoreError: where the disk is full.
            ModelError: where the VAE gives a latent of another shape than its configuration says.
        """
        with self._writer:
            for picture in self._decoded(items, check):
                if picture is None:
                    on_image()
                else:
                    self._wait_for_batch(picture, on_image)
            for bucket in list(self._waiting):
                check()
                self._encode(bucket, on_image)
        self.account.stage_seconds = self.stages.seconds

    def _decoded(self, items: Iterable[SourceItem], check: Callable[[], None]) -> Iterator[Picture | None]:
        """Decode ahead, in the order of the items; None for an image that is unchanged or rejected."""
        in_turn = self._source.in_turn(items)
        with Ahead(in_turn, self._reader.read, self._bytes_under_way, self._room) as ahead:
            results = ahead.results(check)
            while True:
                try:
                    with self.stages.spent(DECODE):
                        found = next(results, None)
                except SourceError:
                    check()  # Ctrl-C ends the command behind a stream as well, which then looks damaged
                    raise
                if found is None:
                    return
                item, future = found
                try:
                    picture = future.result()
                except RejectedError as error:
                    self._reject(item, error)
                    picture = None
                else:
                    self.account.unchanged += picture is None
                yield picture

    def _bytes_under_way(self, item: SourceItem) -> int:
        return self._largest_bytes + len(item.held or b"")

    def _reject(self, item: SourceItem, error: RejectedError) -> None:
        self.account.reject(item.id, error)
        digest = sample_digest(item.id)
        if any(shard.find(digest) for shard in self._store.shards):
            self.account.dropped.append(item.id)

    def _wait_for_batch(self, picture: Picture, on_image: Callable[[], None]) -> None:
        batch = self._waiting.setdefault(picture.bucket, [])
        batch.append(picture)
        self._waiting_bytes += picture.decoded.pixels.nbytes
        if len(batch) == self._config.batch_size:
            self._encode(picture.bucket, on_image)
        elif self._waiting_bytes > WAITING_BYTES:
            self._encode(max(self._waiting, key=lambda bucket: len(self._waiting[bucket])), on_image)

    def _encode(self, bucket: str, on_image: Callable[[], None]) -> None:
        """Encode the pictures that wait in a bucket, and hand them over to be written."""
        pictures = self._waiting.pop(bucket)
        self._waiting_bytes -= sum(picture.decoded.pixels.nbytes for picture in pictures)
        with self.stages.spent(ENCODE):
            batch = self._encoded(bucket, pictures)
        with self.stages.spent(WRITE):
            self._writer.put(batch)
        for _ in pictures:
            on_image()

    def _encoded(self, bucket: str, pictures: list[Picture]) -> EncodedBatch:
        if self._empty is None:
            self._empty = self._caption(caption_digest(""), self._captions([""])[0])
        begins_shard = self._shard.is_full(self._config.shard_size_mib << 20)
        if begins_shard:
            self._shard = ShardFill()
        latents = self._latents.encode([(picture.item.id, picture.decoded.pixels) for picture in pictures])
        batch = EncodedBatch(spec=self._spec(bucket, pictures[0]), begins_shard=begins_shard)
        batch.captions, bad_captions = self._new_captions(pictures)
        for picture, row in zip(pictures, latents, strict=True):
            if row.problem is not None:
                self._reject(picture.item, RejectedError(Reason.LATENT, row.problem))
                continue
            digests = [caption_digest(text) for text in self._kept(picture.item)] or [caption_digest("")]
            if error := next((bad_captions[digest] for digest in digests if digest in bad_captions), None):
                self._reject(picture.item, error)
                continue
            self._take(batch, picture, row.columns, digests)
        self._shard.num_rows += len(batch.rows)
        self._shard.num_bytes += len(batch.rows) * batch.spec.row_bytes
        return batch

    def _take(self, batch: EncodedBatch, picture: Picture, latents: Mapping[str, NDArray[Any]], digests: list[bytes]) -> None:
        """Add a picture's row to a batch, and to the account."""
        item, place = picture.item, picture.decoded.placement
        record = SampleRecord(
            id=item.id,
            bucket=batch.spec.bucket,
            row=0,
            split=picture.split,
            source=item.id,
            source_bytes=picture.stamp.num_bytes,
            source_mtime_ns=picture.stamp.mtime_ns,
            content=picture.content,
            original_size=place.source,
            resized=place.resized,
            crop=place.crop,
            crop_in_source=place.crop_in_source,
            captions=item.captions,
            caption_rows=(),
        )
        batch.rows.append(EncodedRow(record=record, latents=latents, captions=digests))
        self.account.packed += 1
        self.account.without_caption += not item.captions
        self.account.enlarged += place.enlarged
        note_crop_loss(self.account.crop_losses, batch.spec.bucket, place.cropped_away)
        if len(item.captions) > self._config.max_captions:
            self.account.captions_beyond.append(item.id)

    def _kept(self, item: SourceItem) -> tuple[str, ...]:
        return item.captions[: self._config.max_captions]

    def _spec(self, bucket: str, picture: Picture) -> BlockSpec:
        """Give the bucket's columns; they follow from its size alone, never from what an encoder happened to give."""
        size = picture.decoded.placement.bucket
        latents = self._latents.columns(size.height_px, size.width_px)
        return BlockSpec(bucket=bucket, columns=(*fixed_columns(self._config.max_captions), *latents))

    def _new_captions(self, pictures: list[Picture]) -> tuple[list[Caption], dict[bytes, RejectedError]]:
        """Encode the captions that the shard does not have yet; beside them those that cannot be stored, and why."""
        wanted = {caption_digest(text): text for picture in pictures for text in self._kept(picture.item)}
        texts = [(digest, text) for digest, text in wanted.items() if digest not in self._shard.captions]
        good: list[Caption] = []
        bad: dict[bytes, RejectedError] = {}
        for at in range(0, len(texts), self._config.batch_size):
            part = texts[at : at + self._config.batch_size]
            for (digest, text), embedding in zip(part, self._captions([text for _, text in part]), strict=True):
                self.account.captions_truncated += embedding.is_truncated
                if embedding.refusal is not None:
                    bad[digest] = RejectedError(Reason.CLASS, embedding.refusal)
                elif not embedding.is_finite:
                    bad[digest] = RejectedError(Reason.TOKENS, f"of the caption {text[:80]!r} as {self._config.dtype}")
                else:
                    good.append(self._caption(digest, embedding))
        self._shard.captions.update(caption.digest for caption in good)
        self._shard.num_bytes += sum(caption.num_bytes for caption in good)
        return good, bad

    def _caption(self, digest: bytes, embedding: Embedding) -> Caption:
        spec = self._store.text
        fixed = {name: as_stored(value) for name, value in embedding.fixed.items()}
        return make_caption(spec, digest, {spec.tokens[0].name: as_stored(embedding.tokens)}, fixed)

    def _new_shard(self) -> ShardWriter:
        """Begin a shard; called by the thread that writes."""
        if self._empty is None:
            raise AssertionError("a shard was begun before a batch was encoded")
        max_bytes = self._config.shard_size_mib << 20
        return ShardWriter(self._store.path, next(self._names), self._store.text, self._empty, max_bytes)


class ShardFill:
    """What was handed over for the shard that is being written."""

    def __init__(self) -> None:
        self.captions = {caption_digest("")}
        self.num_rows = 0
        self.num_bytes = 0  # of rows and captions

    def is_full(self, max_bytes: int) -> bool:
        return self.num_bytes >= max_bytes
