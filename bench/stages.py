"""The stages of packing, each alone, and the whole, for `ingest_stages`."""

from __future__ import annotations

import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from bucketline.errors import BucketlineError
from bucketline.ingest.config import PackConfig
from bucketline.ingest.decode import Decoded, decode
from bucketline.ingest.device import chosen_device
from bucketline.ingest.encoders.arrays import as_stored
from bucketline.ingest.encoders.latents import LatentColumns, LatentRow
from bucketline.ingest.encoders.model_folder import open_model
from bucketline.ingest.framing import framing_of
from bucketline.ingest.pack import Encoders, load_encoders, pack
from bucketline.ingest.sources.choose import open_source
from bucketline.store.block import BlockSpec, fixed_columns
from bucketline.store.digests import caption_digest, identity
from bucketline.store.manifest import bucket_name
from bucketline.store.publish import prepare_store
from bucketline.store.record import SampleRecord
from bucketline.store.shard_writer import ShardWriter
from bucketline.store.text_block import Caption, make_caption

if TYPE_CHECKING:
    from pathlib import Path

    from bucketline.ingest.encoders.captions import Embedding
    from bucketline.ingest.sources.source import SourceItem


@dataclass(frozen=True, slots=True, kw_only=True)
class _Batch:
    """Pictures of one bucket that are encoded together, as packing would have them."""

    bucket: str
    pictures: tuple[tuple[SourceItem, Decoded], ...]

    @property
    def captions(self) -> list[str]:
        return [item.captions[0] for item, _ in self.pictures]


class Stages:
    """Decodes, encodes, writes or packs one and the same source; each measure gives images/s.

    Torch computes with as many threads as this process has cores, and as many decode, alone as in the whole: alone, each
    stage has every core.
    """

    def __init__(self, source: Path, model: Path, folder: Path, *, grid: str, batch_size: int) -> None:
        """Decode and encode everything once, to be held in memory; stores are made and removed in `folder`."""
        self._folder, self._num_cores = folder, len(os.sched_getaffinity(0))
        self._config = PackConfig(
            source=str(source),
            store=folder / "never-made.store",
            model=str(model),
            grid=grid,
            batch_size=batch_size,
            decode_threads=self._num_cores,
        )
        torch.set_num_threads(self._num_cores)
        self._encoders = self._load()
        self._latents = LatentColumns(self._encoders.vae, flip=False)
        self._framing = framing_of(self._config, self._encoders.grid)
        self._source = open_source(str(source))
        self._items = self._source.listing().items
        self._batches = self._in_batches(self._decoded())
        self._encoded = [self._encode(batch) for batch in self._batches]
        self._empty = self._encoders.text.encode([""])[0]

    def decode_only(self, _: int) -> float:
        """Read and decode every file, in threads."""
        begin = time.perf_counter()
        decoded = self._decoded()
        return len(decoded) / (time.perf_counter() - begin)

    def encode_only(self, _: int) -> float:
        """Encode pixels that are in memory, and their captions, batch by batch."""
        torch.set_num_threads(self._num_cores)
        begin = time.perf_counter()
        for batch in self._batches:
            self._encode(batch)
        return len(self._items) / (time.perf_counter() - begin)

    def write_only(self, number: int) -> float:
        """Write encoded rows and captions to one shard and seal it."""
        store = self._folder / f"written-{number}.store"
        prepare_store(store)
        begin = time.perf_counter()
        writer = ShardWriter(
            store, "written", self._encoders.text.columns, self._caption("", self._empty), self._config.shard_size_mib << 20
        )
        for batch, (latents, embeddings) in zip(self._batches, self._encoded, strict=True):
            self._write(writer, batch, latents, embeddings)
        writer.seal()
        seconds = time.perf_counter() - begin
        shutil.rmtree(store)
        return len(self._items) / seconds

    def whole(self, number: int) -> float:
        """Pack the source into a new store. The time that loading the model takes, measured just before, is left out.

        Raises:
            BucketlineError: where not every image was packed.
        """
        torch.set_num_threads(self._num_cores)
        begin = time.perf_counter()
        self._load()
        load_s = time.perf_counter() - begin
        store = self._folder / f"packed-{number}.store"
        begin = time.perf_counter()
        summary = pack(replace(self._config, store=store), rank=0, world_size=1, local_rank=0)
        seconds = time.perf_counter() - begin - load_s
        if summary is None or summary.packed != len(self._items):
            raise BucketlineError(f"packing {self._config.source} gave {summary}, expected {len(self._items)} images packed")
        shutil.rmtree(store)
        return len(self._items) / seconds

    def _load(self) -> Encoders:
        config = self._config
        return load_encoders(config, open_model(config.model), chosen_device(config.device, 0))

    def _decoded(self) -> list[Decoded]:
        with ThreadPoolExecutor(self._num_cores) as pool:
            return list(pool.map(self._decode, self._items))

    def _decode(self, item: SourceItem) -> Decoded:
        data = self._source.read(item).data
        identity(data)  # a part of the stage: the store holds it
        return decode(data, self._framing, item.id)

    def _in_batches(self, decoded: list[Decoded]) -> list[_Batch]:
        by_bucket: dict[str, list[tuple[SourceItem, Decoded]]] = {}
        for item, picture in zip(self._items, decoded, strict=True):
            size = picture.placement.bucket
            by_bucket.setdefault(bucket_name("train", size.height_px, size.width_px), []).append((item, picture))
        return [
            _Batch(bucket=bucket, pictures=tuple(own[at : at + self._config.batch_size]))
            for bucket, own in by_bucket.items()
            for at in range(0, len(own), self._config.batch_size)
        ]

    def _encode(self, batch: _Batch) -> tuple[list[LatentRow], list[Embedding]]:
        latents = self._latents.encode([(item.id, picture.pixels) for item, picture in batch.pictures])
        return latents, self._encoders.text.encode(batch.captions)

    def _caption(self, text: str, embedding: Embedding) -> Caption:
        spec = self._encoders.text.columns
        return make_caption(spec, caption_digest(text), {spec.tokens[0].name: as_stored(embedding.tokens)}, {})

    def _write(self, writer: ShardWriter, batch: _Batch, latents: list[LatentRow], embeddings: list[Embedding]) -> None:
        size = batch.pictures[0][1].placement.bucket
        columns = self._latents.columns(size.height_px, size.width_px)
        spec = BlockSpec(bucket=batch.bucket, columns=(*fixed_columns(self._config.max_captions), *columns))
        for (item, picture), row, embedding in zip(batch.pictures, latents, embeddings, strict=True):
            writer.add_caption(self._caption(item.captions[0], embedding))
            writer.add(
                spec=spec,
                latents=row.columns,
                record=_record(item, picture, batch.bucket),
                captions=[caption_digest(item.captions[0])],
            )


def _record(item: SourceItem, picture: Decoded, bucket: str) -> SampleRecord:
    place = picture.placement
    return SampleRecord(
        id=item.id,
        bucket=bucket,
        row=0,
        split="train",
        source=item.id,
        source_bytes=1,
        source_mtime_ns=0,
        content=bytes(16),
        original_size=place.source,
        resized=place.resized,
        crop=place.crop,
        crop_in_source=place.crop_in_source,
        captions=item.captions,
        caption_rows=(),
    )
