"""Stores of random latents and captions, written by the store's own writer."""

from __future__ import annotations

import math
import shutil
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from bucketline.errors import UsageError
from bucketline.store.block import BlockSpec, Column, fixed_columns
from bucketline.store.digests import caption_digest
from bucketline.store.manifest import TextEntry, column_entries, write_manifest
from bucketline.store.publish import Contents, new_manifest, prepare_store, publish
from bucketline.store.record import SampleRecord
from bucketline.store.seal import seal
from bucketline.store.shard_writer import ShardWriter
from bucketline.store.text_block import TEXT_GROUP, Caption, TextSpec, make_caption

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from bucketline.store import Store

MAX_CAPTIONS = 8
MAX_SHARD_BYTES = 1 << 34
_FINITE = np.uint16(0xBFFF)  # clears the exponent's highest bit: every pattern is then a number below 2


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreShape:
    """What a store is to hold: one bucket, rows of F16 latents, one caption a row."""

    num_shards: int
    rows_per_shard: int
    latent_shape: tuple[int, int, int]  # [C, h, w]
    tokens: tuple[int, int] | None = (20, 77)  # of a caption, from, to; None: every row has the empty caption
    token_width: int = 768  # F16 each

    @property
    def name(self) -> str:
        text = "no-text" if self.tokens is None else f"{self.tokens[0]}-{self.tokens[1]}x{self.token_width}"
        latent = "x".join(map(str, self.latent_shape))
        return f"{self.num_shards}x{self.rows_per_shard}-{latent}-{text}.store"

    @property
    def num_rows(self) -> int:
        return self.num_shards * self.rows_per_shard

    @property
    def latent_bytes(self) -> int:
        return 2 * math.prod(self.latent_shape)

    @property
    def text(self) -> TextSpec:
        return TextSpec(tokens=(Column(name="tokens", dtype="F16", shape=(self.token_width,)),))

    @property
    def spec(self) -> BlockSpec:
        _, height, width = self.latent_shape
        latent = Column(name="latent", dtype="F16", shape=self.latent_shape)
        return BlockSpec(bucket=f"train/{8 * height}x{8 * width}", columns=(*fixed_columns(MAX_CAPTIONS), latent))


def latent_shape(row_kib: int) -> tuple[int, int, int]:
    """Give the square latent of four channels that takes so many KiB.

    >>> latent_shape(128)
    (4, 128, 128)

    Raises:
        UsageError: where there is none.
    """
    side = math.isqrt(128 * row_kib)
    if side * side != 128 * row_kib:
        raise UsageError(
            f"a row of {row_kib} KiB is no square latent of 4 channels; expected 2, 8, 18, 32, 128, 512 or the like"
        )
    return 4, side, side


def kept_store(folder: Path, shape: StoreShape) -> Path:
    """Give the store of that shape in `folder`, made unless it is there already."""
    path, making = folder / shape.name, folder / f"{shape.name}.making"
    if not path.exists():
        shutil.rmtree(making, ignore_errors=True)
        print(f"making {path.name}", file=sys.stderr)
        make_store(making, shape)
        making.rename(path)
    return path


def make_store(path: Path, shape: StoreShape) -> None:
    """Write and publish a store's sealed shards. The first caption of each has the most tokens."""
    random = np.random.default_rng(0)
    entry = TextEntry(header_bytes=shape.text.header_bytes, tokens=column_entries(shape.text.tokens), fixed={})
    prepare_store(path)
    contents = Contents(encoders={"vae": {"made": "at random"}}, rules={}, max_captions=MAX_CAPTIONS, text=entry)
    manifest = write_manifest(path, new_manifest(contents))
    names = [f"s{number:04d}" for number in range(shape.num_shards)]
    for name in names:
        _write_shard(path, name, shape, random)
        seal(path, name)
    publish(path, manifest, names, ())


def all_captions(store: Store) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Give shard and caption row of every caption of a store but the empty ones."""
    counts = [shard.groups[TEXT_GROUP].rows for shard in store.manifest.shards]
    shards = [np.full(count - 1, ordinal, dtype=np.int64) for ordinal, count in enumerate(counts)]
    return np.concatenate(shards), np.concatenate([np.arange(1, count, dtype=np.int64) for count in counts])


def _write_shard(path: Path, name: str, shape: StoreShape, random: np.random.Generator) -> None:
    spec, text = shape.spec, shape.text
    writer = ShardWriter(
        path, name, text, _caption(shape, "", 1 if shape.tokens is None else min(shape.tokens), random), MAX_SHARD_BYTES
    )
    for row in range(shape.rows_per_shard):
        sample_id = f"{name}/{row:06d}.png"
        words = "" if shape.tokens is None else sample_id
        if shape.tokens is not None:
            first, most = shape.tokens
            num_tokens = most if row == 0 else int(random.integers(first, most + 1))
            writer.add_caption(_caption(shape, words, num_tokens, random))
        writer.add(
            spec=spec,
            latents={"latent": random_f16(random, shape.latent_shape)},
            record=_record(spec.bucket, sample_id, shape.latent_shape, words),
            captions=[caption_digest(words)],
        )
    writer.commit()
    writer.close()


def _caption(shape: StoreShape, words: str, num_tokens: int, random: np.random.Generator) -> Caption:
    return make_caption(shape.text, caption_digest(words), {"tokens": random_f16(random, (num_tokens, shape.token_width))}, {})


def _record(bucket: str, sample_id: str, shape: tuple[int, int, int], words: str) -> SampleRecord:
    size = (8 * shape[1], 8 * shape[2])
    return SampleRecord(
        id=sample_id,
        bucket=bucket,
        row=0,
        split="train",
        source=sample_id,
        source_bytes=1,
        source_mtime_ns=0,
        content=bytes(16),
        original_size=size,
        resized=size,
        crop=(0, 0, *size),
        crop_in_source=(0, 0, *size),
        captions=(words,),
        caption_rows=(),
    )


def random_f16(random: np.random.Generator, shape: tuple[int, ...]) -> NDArray[Any]:
    """Give random finite numbers, each bit but one an independent draw, so that nothing compresses them."""
    count = math.prod(shape)
    words = random.integers(0, 1 << 64, -(-count // 4), dtype=np.uint64)
    bits: NDArray[Any] = (words.view("<u2")[:count] & _FINITE).view("<f2").reshape(shape)
    return bits
