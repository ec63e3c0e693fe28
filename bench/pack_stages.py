"""The single stages of packing, one by one: decoding, encoding, writing."""

from __future__ import annotations

import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from bucketline.errors import BucketlineError
from bucketline.ingest.config import PackConfig, framing_of
from bucketline.ingest.encoders.model_folder import open_model
from bucketline.ingest.encoders.vae import LatentColumns
from bucketline.ingest.images.crop import model_grid
from bucketline.ingest.images.decode import decode_image
from bucketline.ingest.pack import pack_images
from bucketline.ingest.pipeline.captions import as_caption
from bucketline.ingest.pipeline.model import chosen_device, load_text_encoder, load_vae_encoder
from bucketline.ingest.sources.dataset_file import open_source
from bucketline.store import new_record
from bucketline.store.format.block import BlockSpec, caption_digest, fixed_columns, identity
from bucketline.store.format.schema import bucket_name
from bucketline.store.format.text import TEXT_GROUP
from bucketline.store.write.publish import prepare_store
from bucketline.store.write.shard_writer import ShardWriter

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

    from bucketline.ingest.encoders.text_columns import CaptionEncoder, Embedding
    from bucketline.ingest.encoders.vae import VaeEncoder
    from bucketline.ingest.images.crop import Placement
    from bucketline.ingest.sources.source import SourceItem
    from bucketline.store.format.text import Caption

Placed: TypeAlias = "tuple[NDArray[np.uint8], Placement]"  # pixels of a decoded image, and where its crop is
Batch: TypeAlias = "tuple[str, list[tuple[SourceItem, Placed]]]"  # a bucket, and its images that are encoded together


class Stages:
    """Decodes, encodes, writes or packs the same source. Each measure returns images/s.

    Torch and the decoder each use as many threads as this process has cores, in a single stage and in the complete pack. So a
    single stage has every core.
    """

    def __init__(self, source: Path, model: Path, folder: Path, *, grid: str, batch_size: int) -> None:
        """Decode and encode everything once and keep it in memory. Stores are created and removed in `folder`."""
        self._folder, self._num_cores = folder, len(os.sched_getaffinity(0))
        self._config = PackConfig(
            source=str(source),
            place=folder / "never-made.store",
            model=str(model),
            grid=grid,
            batch_size=batch_size,
            decode_threads=self._num_cores,
        )
        torch.set_num_threads(self._num_cores)
        self._vae, self._text = self._load()
        self._latents = LatentColumns(self._vae, flip=False)
        chosen = model_grid(grid, open_model(str(model)), self._vae.downscale)
        self._framing = framing_of(self._config, chosen)
        self._source = open_source(str(source))
        self._items = self._source.listing().items
        self._batches = self._in_batches(self._decoded())
        self._encoded = [self._encode(batch) for batch in self._batches]
        self._empty = self._text.encode([""])[0]

    def decode_only(self, _: int) -> float:
        """Read and decode every file in threads."""
        begin = time.perf_counter()
        decoded = self._decoded()
        return len(decoded) / (time.perf_counter() - begin)

    def encode_only(self, _: int) -> float:
        """Encode pixels and captions from memory, batch by batch."""
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
        groups, empty = {TEXT_GROUP: self._text.columns}, {TEXT_GROUP: self._caption("", self._empty)}
        writer = ShardWriter(store, "written", groups, empty, self._config.shard_size.num_bytes)
        for batch, (latents, embeddings) in zip(self._batches, self._encoded, strict=True):
            self._write(writer, batch, latents, embeddings)
        writer.seal()
        seconds = time.perf_counter() - begin
        shutil.rmtree(store)
        return len(self._items) / seconds

    def whole(self, number: int) -> float:
        """Pack the source into a new store. The time of loading the model, measured just before, is subtracted."""
        torch.set_num_threads(self._num_cores)
        begin = time.perf_counter()
        self._load()
        load_s = time.perf_counter() - begin
        store = self._folder / f"packed-{number}.store"
        begin = time.perf_counter()
        summary = pack_images(replace(self._config, place=store), rank=0, world_size=1, local_rank=0)
        seconds = time.perf_counter() - begin - load_s
        if summary is None or summary.packed != len(self._items):
            raise BucketlineError(
                f"packing {self._config.source} returned {summary}, expected {len(self._items)} images packed"
            )
        shutil.rmtree(store)
        return len(self._items) / seconds

    def _load(self) -> tuple[VaeEncoder, CaptionEncoder]:
        config = self._config
        model, device = open_model(config.model), chosen_device(config.device, 0)
        return load_vae_encoder(config, model, device), load_text_encoder(config, model, device)

    def _decoded(self) -> list[Placed]:
        with ThreadPoolExecutor(self._num_cores) as pool:
            return list(pool.map(self._decode, self._items))

    def _decode(self, item: SourceItem) -> Placed:
        data = self._source.read(item)[0]
        identity(data)  # part of the stage, because the store records it
        return decode_image(data, self._framing, item.id)

    def _in_batches(self, decoded: list[Placed]) -> list[Batch]:
        by_bucket: dict[str, list[tuple[SourceItem, Placed]]] = {}
        for item, image in zip(self._items, decoded, strict=True):
            size = image[1].bucket
            by_bucket.setdefault(bucket_name("train", size.height_px, size.width_px), []).append((item, image))
        return [
            (bucket, own[at : at + self._config.batch_size])
            for bucket, own in by_bucket.items()
            for at in range(0, len(own), self._config.batch_size)
        ]

    def _encode(self, batch: Batch) -> tuple[list[Any], list[Embedding]]:
        latents = self._latents.encode([(item.id, image[0]) for item, image in batch[1]])
        return latents, self._text.encode([item.captions[0] for item, _ in batch[1]])

    def _caption(self, text: str, embedding: Embedding) -> Caption:
        return as_caption(self._text.columns, caption_digest(text), embedding)

    def _write(self, writer: ShardWriter, batch: Batch, latents: list[Any], embeddings: list[Embedding]) -> None:
        bucket, images = batch
        size = images[0][1][1].bucket
        columns = self._latents.columns(size.height_px, size.width_px)
        spec = BlockSpec(bucket=bucket, columns=(*fixed_columns(self._config.max_captions), *columns))
        for (item, image), row, embedding in zip(images, latents, embeddings, strict=True):
            place, words = image[1], item.captions[0]
            writer.add_caption({TEXT_GROUP: self._caption(words, embedding)})
            record = replace(
                new_record(item.id, bucket, item.captions),
                original_size=place.source,
                resized=place.resized,
                crop=place.crop,
                crop_in_source=place.crop_in_source,
            )
            writer.add(spec=spec, latents=row, record=record, captions=[caption_digest(words)])
