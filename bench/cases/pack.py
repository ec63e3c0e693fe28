"""Packing a folder compared with its single stages: decoding, encoding, writing."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from bucketline.bench.harness import Case, Mark, Result, Subject, alternate, run_case, summarise
from bucketline.errors import BucketlineError
from bucketline.ingest.config import PackConfig, framing_of
from bucketline.ingest.encoders.latents import LatentColumns, LatentRow
from bucketline.ingest.encoders.model_folder import open_model
from bucketline.ingest.images.crop import DEFAULT_MAX_CROP
from bucketline.ingest.images.decode import Decoded, decode_image
from bucketline.ingest.images.model_sizes import model_grid
from bucketline.ingest.pack import pack_images
from bucketline.ingest.pipeline.captions import as_caption
from bucketline.ingest.pipeline.model.device import chosen_device
from bucketline.ingest.pipeline.model.load_encoders import load_text_encoder, load_vae_encoder
from bucketline.ingest.sources.open_source import open_source
from bucketline.store.format.block import BlockSpec, fixed_columns
from bucketline.store.format.hashing import caption_digest, identity
from bucketline.store.format.sample_record import SampleRecord
from bucketline.store.format.schema import bucket_name
from bucketline.store.format.text_block import TEXT_GROUP
from bucketline.store.write.publish import prepare_store
from bucketline.store.write.shard_writer import ShardWriter

if TYPE_CHECKING:
    from bucketline.ingest.encoders.text_columns import CaptionEncoder, Embedding
    from bucketline.ingest.encoders.vae import VaeEncoder
    from bucketline.ingest.sources.source import SourceItem
    from bucketline.store.format.text_block import Caption

MARK = Mark(bound=0.9)
DECODE, ENCODE, WRITE, WHOLE = "decode only", "encode only", "write only", "whole pack"
SHARED, SLOWER, ALL_THREE = "limit on shared cores", "the slower stage, limit with a GPU", "limit of all three"


@dataclass(frozen=True, kw_only=True)
class IngestStages(Case):
    """Measure packing a folder of real photographs against its single stages, in images/s.

    `decode only` reads and decodes every file. `encode only` passes the same batches of pixels and captions from memory to the
    encoders. `write only` writes encoded rows to a shard and seals it. Decoding and torch each have as many threads as this
    process has cores, in a single stage and in the complete pack. So a single stage has the entire machine, and stages with D
    and E images/s reach 1/(1/D + 1/E) together on the same cores: the limit on a CPU. If the encoders run on a GPU, the two
    can run in parallel, and the limit is the slower one, min(D, E). `limit of all three` also counts the writing.

    `whole pack` goes from the listing to the published store, in this process. It excludes Python's start and the time of
    loading the model, which is measured just before and subtracted. The model has real classes, random weights, and a size at
    which encoding costs about as much as decoding. Limits are computed from the stages of the same round.

    Example: python -m bucketline.bench pack --images 1000 --json
    """

    images: int = 240
    """Images of the source."""
    sides_px: tuple[int, int] = (384, 1024)
    """Minimum and maximum side in px."""
    grid: str = "area:160:32"
    """Bucket grid."""
    batch_size: int = 8
    """Images encoded together."""
    vae_widths: tuple[int, ...] = (8, 8, 16, 16)
    """Channels of the VAE's levels; they set the cost of encoding."""

    def measure(self, folder: Path) -> list[Result]:
        import torch

        from bucketline.bench.cases.pack import Stages
        from bucketline.bench.fixtures.photographs import Pieces, kept_photographs
        from bucketline.bench.fixtures.random_model import ModelShape, kept_model

        source = kept_photographs(folder, Pieces(count=self.images, sides_px=self.sides_px))
        model = kept_model(folder, ModelShape(vae_widths=self.vae_widths))
        with tempfile.TemporaryDirectory(dir=folder, prefix="stores-") as stores:
            stages = Stages(source, model, Path(stores), grid=self.grid, batch_size=self.batch_size)
            return _measured(stages, self.repeats, has_gpu=torch.cuda.is_available())


def _measured(stages: Stages, repeats: int, *, has_gpu: bool) -> list[Result]:
    alone = [
        Subject(name=DECODE, measure=stages.decode_only),
        Subject(name=ENCODE, measure=stages.encode_only),
        Subject(name=WRITE, measure=stages.write_only),
    ]
    limit, other = (SLOWER, SHARED) if has_gpu else (SHARED, SLOWER)
    whole = Subject(name=WHOLE, measure=stages.whole, limit=limit, beside=(other, ALL_THREE), mark=MARK)
    figures = alternate([*alone, whole], repeats)
    rounds = list(zip(figures[DECODE], figures[ENCODE], figures[WRITE], strict=True))
    figures[SHARED] = [together(d, e) for d, e, _ in rounds]
    figures[SLOWER] = [min(d, e) for d, e, _ in rounds]
    figures[ALL_THREE] = [together(d, e, w) for d, e, w in rounds]
    limits = [Subject(name=name, measure=_computed) for name in (SHARED, SLOWER, ALL_THREE)]
    return summarise("pack", "images/s", [*alone, *limits, whole], figures)


def _computed(number: int) -> float:
    raise AssertionError(f"round {number}: a limit is computed from the stages' figures, never measured")


def together(*rates: float) -> float:
    """Return the combined rate of stages that share the same cores, from their single rates.

    >>> together(300.0, 600.0)
    200.0
    """
    return 1 / sum(1 / rate for rate in rates)


def main() -> int:
    """Make the source and the model, measure and print."""
    return run_case(IngestStages)


if __name__ == "__main__":
    sys.exit(main())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Batch:
    """Images of one bucket that are encoded together, as in packing."""

    bucket: str
    images: tuple[tuple[SourceItem, Decoded], ...]

    @property
    def captions(self) -> list[str]:
        return [item.captions[0] for item, _ in self.images]


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
        self._framing = framing_of(self._config, chosen, DEFAULT_MAX_CROP)
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
        writer = ShardWriter(store, "written", groups, empty, self._config.shard_size_mib << 20)
        for batch, (latents, embeddings) in zip(self._batches, self._encoded, strict=True):
            self._write(writer, batch, latents, embeddings)
        writer.seal()
        seconds = time.perf_counter() - begin
        shutil.rmtree(store)
        return len(self._items) / seconds

    def whole(self, number: int) -> float:
        """Pack the source into a new store. The time of loading the model, measured just before, is subtracted.

        Raises:
            BucketlineError: if not every image was packed.
        """
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

    def _decoded(self) -> list[Decoded]:
        with ThreadPoolExecutor(self._num_cores) as pool:
            return list(pool.map(self._decode, self._items))

    def _decode(self, item: SourceItem) -> Decoded:
        data = self._source.read(item).data
        identity(data)  # part of the stage, because the store records it
        return decode_image(data, self._framing, item.id)

    def _in_batches(self, decoded: list[Decoded]) -> list[_Batch]:
        by_bucket: dict[str, list[tuple[SourceItem, Decoded]]] = {}
        for item, image in zip(self._items, decoded, strict=True):
            size = image.placement.bucket
            by_bucket.setdefault(bucket_name("train", size.height_px, size.width_px), []).append((item, image))
        return [
            _Batch(bucket=bucket, images=tuple(own[at : at + self._config.batch_size]))
            for bucket, own in by_bucket.items()
            for at in range(0, len(own), self._config.batch_size)
        ]

    def _encode(self, batch: _Batch) -> tuple[list[LatentRow], list[Embedding]]:
        latents = self._latents.encode([(item.id, image.pixels) for item, image in batch.images])
        return latents, self._text.encode(batch.captions)

    def _caption(self, text: str, embedding: Embedding) -> Caption:
        return as_caption(self._text.columns, caption_digest(text), embedding)

    def _write(self, writer: ShardWriter, batch: _Batch, latents: list[LatentRow], embeddings: list[Embedding]) -> None:
        size = batch.images[0][1].placement.bucket
        columns = self._latents.columns(size.height_px, size.width_px)
        spec = BlockSpec(bucket=batch.bucket, columns=(*fixed_columns(self._config.max_captions), *columns))
        for (item, image), row, embedding in zip(batch.images, latents, embeddings, strict=True):
            writer.add_caption({TEXT_GROUP: self._caption(item.captions[0], embedding)})
            writer.add(
                spec=spec,
                latents=row.columns,
                record=_record(item, image, batch.bucket),
                captions=[caption_digest(item.captions[0])],
            )


def _record(item: SourceItem, image: Decoded, bucket: str) -> SampleRecord:
    place = image.placement
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
