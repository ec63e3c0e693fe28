"""One rank's slice of a source: decoded in threads, encoded by bucket, written to shards of its own.

An image's id travels with its pixels from the file to the row, so that one that fails shifts no other.
"""

from __future__ import annotations

import itertools
import os
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from bucketline.errors import ModelError, SourceError
from bucketline.ingest.account import Account
from bucketline.ingest.again import Check
from bucketline.ingest.crop_loss import note_crop_loss
from bucketline.ingest.decode import Decoded, decode
from bucketline.ingest.encoders.arrays import as_stored
from bucketline.ingest.encoders.halving import Halving
from bucketline.ingest.encoders.latents import LatentColumns
from bucketline.ingest.framing import framing_of
from bucketline.ingest.rejects import Reason, RejectedError
from bucketline.ingest.split import held_out
from bucketline.store.block import BlockSpec, fixed_columns
from bucketline.store.digests import caption_digest, identity, sample_digest
from bucketline.store.manifest import bucket_name
from bucketline.store.record import SampleRecord, captions_checksum
from bucketline.store.shard_writer import ShardWriter
from bucketline.store.text_block import Caption, make_caption

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from numpy.typing import NDArray

    from bucketline.ingest.config import PackConfig
    from bucketline.ingest.encoders.captions import CaptionEncoder, Embedding
    from bucketline.ingest.encoders.vae import VaeEncoder
    from bucketline.ingest.grids import Grid
    from bucketline.ingest.sources.source import Source, SourceItem, Stamp
    from bucketline.store import Store
    from bucketline.store.sealed_shard import IndexEntry

WAITING_BYTES = 512 << 20  # of decoded pixels that wait for their bucket's batch to fill


@dataclass(frozen=True, slots=True, kw_only=True)
class _Picture:
    """A decoded image on its way, with everything that belongs to it."""

    item: SourceItem
    decoded: Decoded
    split: str
    source_bytes: int
    source_mtime_ns: int
    content: bytes

    @property
    def bucket(self) -> str:
        size = self.decoded.placement.bucket
        return bucket_name(self.split, size.height_px, size.width_px)


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
    ) -> None:
        self._source, self._store, self._config = source, store, config
        self._framing = framing_of(config, grid)
        self._latents = LatentColumns(vae, flip=config.flip)
        self._captions = Halving(text.encode, "caption")
        self._names = (f"{shard_prefix}-{number:04d}" for number in itertools.count())
        self._writer: ShardWriter | None = None
        self._waiting: dict[str, list[_Picture]] = {}
        self._waiting_bytes = 0
        self.account = Account()
        self.sealed: list[str] = []

    def run(self, items: Iterable[SourceItem], on_image: Callable[[], None], check: Callable[[], None]) -> None:
        """Pack all images; every one ends in the account. `check` may raise KeyboardInterrupt.

        On an exception, what was committed stays pending, and the next run adopts it; Ctrl-C commits what was encoded.

        Raises:
            StoreError: where the disk is full.
            ModelError: where the VAE gives a latent of another shape than its configuration says.
        """
        try:
            for outcome in self._unless_interrupted(items, check):
                on_image()
                check()
                if outcome is not None:
                    self._wait_for_batch(outcome)
            for bucket in list(self._waiting):
                check()
                self._encode(bucket)
            self._seal()
        except BaseException as error:
            if self._writer is not None:
                try:
                    if isinstance(error, KeyboardInterrupt):
                        self._writer.commit()
                finally:
                    self._writer.close()
            raise

    def _unless_interrupted(self, items: Iterable[SourceItem], check: Callable[[], None]) -> Iterator[_Picture | None]:
        try:
            yield from self._decoded(items)
        except SourceError:
            check()  # Ctrl-C ends the command behind a stream as well, which then looks damaged
            raise

    def _decoded(self, items: Iterable[SourceItem]) -> Iterator[_Picture | None]:
        """Decode ahead in threads, in the order of the items; None for an image that is unchanged or rejected."""
        num_threads = self._config.decode_threads or min(4, os.cpu_count() or 1)
        running: deque[tuple[SourceItem, Future[_Picture | None]]] = deque()
        with ThreadPoolExecutor(num_threads, thread_name_prefix="decode") as pool:
            try:
                for item in self._source.in_turn(items):
                    running.append((item, pool.submit(self._read, item)))
                    if len(running) > 2 * num_threads:
                        yield self._outcome(*running.popleft())
                while running:
                    yield self._outcome(*running.popleft())
            finally:
                pool.shutdown(wait=True, cancel_futures=True)

    def _outcome(self, item: SourceItem, future: Future[_Picture | None]) -> _Picture | None:
        try:
            picture = future.result()
        except RejectedError as error:
            self._reject(item, error)
            return None
        if picture is None:
            self.account.unchanged += 1
        return picture

    def _reject(self, item: SourceItem, error: RejectedError) -> None:
        self.account.reject(item.id, error)
        digest = sample_digest(item.id)
        if any(shard.find(digest) for shard in self._store.shards):
            self.account.dropped.append(item.id)

    def _read(self, item: SourceItem) -> _Picture | None:
        """Read and decode one image, in a worker; None where the store has it as it is.

        Raises:
            RejectedError: where it cannot be used.
            SourceError: where the source changed under the run.
        """
        stored = self._stored(item) if item.caption_error is None else None
        if stored is not None and self._config.check is Check.SIZE_TIME and _is_stamp_of(stored, self._source.stamp(item)):
            return None
        found = self._source.read(item)
        if item.caption_error is not None:
            raise RejectedError(Reason.CAPTION, item.caption_error)
        content = identity(found.data)
        if stored is not None and self._config.check is Check.CONTENT and stored.content == content:
            return None
        decoded = decode(found.data, self._framing, item.id)
        is_held_out = held_out(item.id, self._config.val_fraction, self._config.split_by)
        return _Picture(
            item=replace(item, held=None),
            decoded=decoded,
            split="val" if is_held_out else "train",
            source_bytes=found.stamp.num_bytes,
            source_mtime_ns=found.stamp.mtime_ns,
            content=content,
        )

    def _stored(self, item: SourceItem) -> IndexEntry | None:
        """Give what the store knows of an item; None where it does not have it, or with other captions."""
        digest = sample_digest(item.id)
        found = next((entry for shard in self._store.shards if (entry := shard.find(digest))), None)
        return found if found is not None and found.captions == captions_checksum(item.captions) else None

    def _wait_for_batch(self, picture: _Picture) -> None:
        batch = self._waiting.setdefault(picture.bucket, [])
        batch.append(picture)
        self._waiting_bytes += picture.decoded.pixels.nbytes
        if len(batch) == self._config.batch_size:
            self._encode(picture.bucket)
        elif self._waiting_bytes > WAITING_BYTES:
            self._encode(max(self._waiting, key=lambda bucket: len(self._waiting[bucket])))

    def _encode(self, bucket: str) -> None:
        """Encode and write the pictures that wait in a bucket."""
        pictures = self._waiting.pop(bucket)
        self._waiting_bytes -= sum(picture.decoded.pixels.nbytes for picture in pictures)
        if self._writer is not None and self._writer.is_full:
            self._seal()
        writer = self._writer or self._open()
        latents = self._latents.encode([(picture.item.id, picture.decoded.pixels) for picture in pictures])
        spec = self._spec(bucket, pictures[0].decoded)
        bad_captions = self._add_captions(writer, pictures)
        for picture, row in zip(pictures, latents, strict=True):
            if row.problem is not None:
                self._reject(picture.item, RejectedError(Reason.LATENT, row.problem))
                continue
            digests = map(caption_digest, self._kept(picture.item))
            if error := next((bad_captions[digest] for digest in digests if digest in bad_captions), None):
                self._reject(picture.item, error)
                continue
            self._write(writer, spec, picture, row.columns)

    def _write(self, writer: ShardWriter, spec: BlockSpec, picture: _Picture, latents: Mapping[str, NDArray[Any]]) -> None:
        item, place = picture.item, picture.decoded.placement
        record = SampleRecord(
            id=item.id,
            bucket=spec.bucket,
            row=0,
            split=picture.split,
            source=item.id,
            source_bytes=picture.source_bytes,
            source_mtime_ns=picture.source_mtime_ns,
            content=picture.content,
            original_size=place.source,
            resized=place.resized,
            crop=place.crop,
            crop_in_source=place.crop_in_source,
            captions=item.captions,
            caption_rows=(),
        )
        digests = [caption_digest(text) for text in self._kept(item)] or [caption_digest("")]
        try:
            writer.add(spec=spec, latents=latents, record=record, captions=digests)
        except ValueError as error:
            raise ModelError(
                f"{item.id}: the VAE's latent does not fit its bucket: {error}; "
                "its config.json does not describe its weights, or it takes other sizes than the grid's"
            ) from error
        self.account.packed += 1
        self.account.without_caption += not item.captions
        self.account.enlarged += place.enlarged
        note_crop_loss(self.account.crop_losses, spec.bucket, place.cropped_away)
        if len(item.captions) > self._config.max_captions:
            self.account.captions_beyond.append(item.id)

    def _kept(self, item: SourceItem) -> tuple[str, ...]:
        return item.captions[: self._config.max_captions]

    def _spec(self, bucket: str, decoded: Decoded) -> BlockSpec:
        """Give the bucket's columns; they follow from its size alone, never from what an encoder happened to give."""
        size = decoded.placement.bucket
        latents = self._latents.columns(size.height_px, size.width_px)
        return BlockSpec(bucket=bucket, columns=(*fixed_columns(self._config.max_captions), *latents))

    def _add_captions(self, writer: ShardWriter, pictures: list[_Picture]) -> dict[bytes, RejectedError]:
        """Encode the captions that the shard does not have yet; give those that cannot be stored, by digest, and why."""
        wanted = {caption_digest(text): text for picture in pictures for text in self._kept(picture.item)}
        missing = {digest: text for digest, text in wanted.items() if not writer.has_caption(digest)}
        bad: dict[bytes, RejectedError] = {}
        texts = list(missing.items())
        for at in range(0, len(texts), self._config.batch_size):
            part = texts[at : at + self._config.batch_size]
            for (digest, text), embedding in zip(part, self._captions([text for _, text in part]), strict=True):
                self.account.captions_truncated += embedding.is_truncated
                if embedding.refusal is not None:
                    bad[digest] = RejectedError(Reason.CLASS, embedding.refusal)
                elif not embedding.is_finite:
                    bad[digest] = RejectedError(Reason.TOKENS, f"of the caption {text[:80]!r} as {self._config.dtype}")
                else:
                    writer.add_caption(self._caption(digest, embedding))
        return bad

    def _caption(self, digest: bytes, embedding: Embedding) -> Caption:
        spec = self._store.text
        fixed = {name: as_stored(value) for name, value in embedding.fixed.items()}
        return make_caption(spec, digest, {spec.tokens[0].name: as_stored(embedding.tokens)}, fixed)

    def _open(self) -> ShardWriter:
        empty = self._caption(caption_digest(""), self._captions([""])[0])
        max_bytes = self._config.shard_size_mib << 20
        self._writer = ShardWriter(self._store.path, next(self._names), self._store.text, empty, max_bytes)
        return self._writer

    def _seal(self) -> None:
        if self._writer is None:
            return
        writer, self._writer = self._writer, None
        if writer.seal():
            self.sealed.append(writer.name)


def _is_stamp_of(entry: IndexEntry, stamp: Stamp) -> bool:
    return (entry.source_bytes, entry.source_mtime_ns) == (stamp.num_bytes, stamp.mtime_ns)
