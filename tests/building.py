"""The material of the tests: small stores of known rows, written through the store's own writer."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import safetensors

from bucketline.store import BlockSpec, Column, LatentColumn, Store, StoreWriter, TextSpec, new_record
from bucketline.store.format.block import fixed_columns
from bucketline.store.format.hashing import caption_digest, identity
from bucketline.store.format.manifest import Manifest, sealed, write_manifest
from bucketline.store.format.schema import Schema, text_entry
from bucketline.store.format.text_block import TEXT_GROUP, Caption, make_caption
from bucketline.store.write.publish import new_manifest, prepare_store
from bucketline.store.write.shard_writer import ShardWriter

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from bucketline.store import PartWriter, SampleRecord

MAX_CAPTIONS = 3
TOKEN_WIDTH = 5
TEXT = TextSpec(tokens=(Column(name="tokens", dtype="F16", shape=(TOKEN_WIDTH,)),))
CAPTIONS = ("a red barn", "snow", "two boats under a grey sky at noon", "")
FLOATS: dict[str, Any] = {"F16": "<f2", "F32": "<f4", "BF16": "<u2"}
ENCODERS: dict[str, Any] = {"vae": {"scaling_factor": 0.18215}, "text_encoder": {"width": TOKEN_WIDTH}}
RULES: dict[str, Any] = {"grid": "made by hand"}
SHARD_BYTES = 1 << 24


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A sample to be packed, with everything that must come back."""

    id: str
    bucket: str
    latent: NDArray[Any]  # [2, h, w]
    captions: tuple[str, ...]
    record: SampleRecord


def spec_of(bucket: str, dtype: str = "F16") -> BlockSpec:
    """Return a bucket's columns: two latent channels, an eighth of the size."""
    latent = LatentColumn(channels=2, dtype=dtype).in_bucket(bucket)
    return BlockSpec(bucket=bucket, columns=(*fixed_columns(MAX_CAPTIONS), latent))


def make_sample(sample_id: str, bucket: str, captions: tuple[str, ...] = (), dtype: str = "F16", version: int = 0) -> Sample:
    """Make a sample whose values depend only on its id and version."""
    seed = int.from_bytes(hashlib.sha256(f"{version}:{sample_id}".encode("utf-8", "surrogateescape")).digest()[:8], "little")
    random = np.random.default_rng(seed)
    shape = spec_of(bucket).column("latent").shape
    latent = (
        random.integers(0, 1 << 16, shape).astype("<u2") & 0xBFFF  # below 2, so never NaN
        if dtype == "BF16"
        else random.normal(size=shape).astype(FLOATS[dtype])
    )
    height, width = (int(side) for side in random.integers(64, 4000, 2))
    size = new_record(sample_id, bucket, captions)
    box_height, box_width = size.resized
    record = replace(
        size,
        source_bytes=int(random.integers(1, 1 << 30)),
        source_mtime_ns=int(random.integers(1, 1 << 60)),
        content=identity(f"{version}:{sample_id}".encode("utf-8", "surrogateescape")),
        original_size=(height, width),
        resized=(box_height + 4, box_width + 2),
        crop=(2, 1, box_height, box_width),
        crop_in_source=(0, 0, height, width),
    )
    return Sample(id=sample_id, bucket=bucket, latent=latent, captions=captions, record=record)


def samples_of(rows: Mapping[str, int], prefix: str = "", dtype: str = "F16") -> list[Sample]:
    """Make samples for each bucket, `{bucket: rows}`, with none to four captions each."""
    return [
        make_sample(f"{prefix}{bucket}/{n}.png", bucket, tuple(f"{CAPTIONS[k]} {n % 7}" for k in range(n % 5 % 4)), dtype)
        for bucket, count in rows.items()
        for n in range(count)
    ]


def embedding(caption: str) -> NDArray[np.float16]:
    """Return what stands for a caption's tokens, `[T, D]`: one per word, and one more."""
    seed = int.from_bytes(hashlib.sha256(caption.encode("utf-8", "surrogateescape")).digest()[:8], "little")
    return np.random.default_rng(seed).normal(size=(len(caption.split()) + 1, TOKEN_WIDTH)).astype("<f2")


def caption_of(text: str) -> Caption:
    return make_caption(TEXT, caption_digest(text), {"tokens": embedding(text)}, {})


def contents(encoders: Mapping[str, Any] | None = None) -> Schema:
    return Schema(encoders=dict(encoders or ENCODERS), rules=RULES, max_captions=MAX_CAPTIONS, text=text_entry(TEXT))


def store_writer(path: Path, *, dtype: str = "F16", encoders: Mapping[str, Any] = ENCODERS, **more: Any) -> StoreWriter:
    """Return a writer of the store, whose contents are those of `contents`."""
    return StoreWriter(
        path,
        encoders=encoders,
        rules=RULES,
        columns=[LatentColumn(channels=2, dtype=dtype)],
        text=TEXT,
        empty_caption={"tokens": embedding("")},
        max_captions=MAX_CAPTIONS,
        **{"shard_bytes": SHARD_BYTES, **more},
    )


def add_samples(writer: PartWriter, samples: Iterable[Sample], *, commit_every: int = 7) -> None:
    """Add samples and commit now and then; a commit makes a block, so that a bucket has several."""
    for n, sample in enumerate(samples, 1):
        captions = {text: {"tokens": embedding(text)} for text in sample.captions}
        writer.add_record(sample.record, {"latent": sample.latent}, captions)
        if n % commit_every == 0:
            writer.commit()


def open_writer(store: Path, name: str) -> ShardWriter:
    return ShardWriter(store, name, {TEXT_GROUP: TEXT}, {TEXT_GROUP: caption_of("")}, SHARD_BYTES)


def add(writer: ShardWriter, sample: Sample, dtype: str = "F16") -> None:
    """Put one sample into a shard that is being written."""
    for text in sample.captions:
        writer.add_caption({TEXT_GROUP: caption_of(text)})
    writer.add(
        spec=spec_of(sample.bucket, dtype),
        latents={"latent": sample.latent},
        record=sample.record,
        captions=[caption_digest(text) for text in sample.captions] or [caption_digest("")],
    )


def write_shard(store: Path, name: str, samples: Iterable[Sample], *, commit_every: int = 7, dtype: str = "F16") -> None:
    """Write and seal a shard of that name, which nobody publishes."""
    writer = open_writer(store, name)
    for n, sample in enumerate(samples, 1):
        add(writer, sample, dtype)
        if n % commit_every == 0:
            writer.commit()
    writer.seal()


def empty_store(path: Path) -> Manifest:
    prepare_store(path)
    return write_manifest(path, new_manifest(contents()))


def make_store(path: Path, *shards: Sequence[Sample], dtype: str = "F16") -> Store:
    """Make a store of the given shards, `g0`, `g1` and so on, each published as a generation of its own."""
    with store_writer(path, dtype=dtype, shard_names="g{}") as writer:
        for samples in shards:
            add_samples(writer, samples)
            writer.publish()
    return Store(path, writer.manifest)


def rewrite_manifest(store: Path, **changes: Any) -> None:
    """Write a manifest with other values and a right digest, as a program with a defect would."""
    from bucketline.store.format.manifest import read_manifest

    write_manifest(store, sealed(replace(read_manifest(store), **changes)))


def read_with_safetensors(data: bytes) -> dict[str, dict[str, Any]]:
    """Read a file's bytes with only the safetensors package: name → dtype, shape, data."""
    deserialize: Any = safetensors.deserialize
    return dict(deserialize(data))


def edit_json(path: Path, **changes: Any) -> None:
    """Edit a JSON file by hand, its digest left as it was."""
    document = json.loads(path.read_text(encoding="ascii"))
    document.update(changes)
    path.write_text(json.dumps(document), encoding="ascii")


def flip_bit(path: Path, bit: int) -> None:
    """Flip one bit of a file in place."""
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def tree(folder: Path) -> dict[str, bytes]:
    """Return every path under a folder with its content, to see that nothing was left behind; folders end in a slash."""
    return {
        str(path.relative_to(folder)) + ("/" if path.is_dir() else ""): b"" if path.is_dir() else path.read_bytes()
        for path in sorted(folder.rglob("*"))
    }
