"""Reading a store with `lmdb`, `safetensors`, `msgpack` and the page FORMAT.md, and nothing of Bucketline's.

What such a reader finds is held against what was written: every row, caption and record.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest

from bucketline.store import RowColumn
from tests.commands import call
from tests.independent_reader import index_of, metadata_of, open_block, read_store
from tests.kit import (
    Form,
    Sample,
    embedding,
    make_sample,
    make_store,
    quantised,
    samples_of,
    spec_of,
)
from tests.models import SMALL


def compare(store: Path, samples: list[Sample]) -> None:
    found = read_store(store)
    assert set(found) == {sample.id for sample in samples}
    for sample in samples:
        bucket, columns, record, tokens, _ = found[sample.id]
        assert bucket == sample.bucket
        assert np.array_equal(columns["latent"], sample.latent)
        assert columns["original_size"].tolist() == list(sample.record.original_size) == record["original_size"]
        assert columns["crop"].tolist() == list(sample.record.crop[:2]) == record["crop"][:2]
        digest = hashlib.blake2b(sample.id.encode("utf-8", "surrogateescape"), digest_size=16).digest()
        assert columns["id"].tobytes() == digest
        assert record["captions"] == list(sample.captions)
        assert record["content"] == sample.record.content
        assert record["crop_in_source"] == list(sample.record.crop_in_source)
        texts = sample.captions or ("",)
        assert [row for row in columns["captions"].tolist() if row >= 0] == record["caption_rows"][:3]
        assert len(tokens) == len(texts)
        for text, own in zip(texts, tokens, strict=True):
            assert np.array_equal(own["tokens"], embedding(text))


@pytest.mark.parametrize("dtype", ["I8", "F8_E4M3"])
def test_quantised_tokens_are_stored_times_scale_rounded_to_16_bits(tmp_path: Path, dtype: str) -> None:
    """As the page says it, and as the readers of Bucketline deliver them."""
    store = quantised(dtype).make_store(tmp_path, samples_of({"train/64x64": 24, "train/64x128": 7}))
    for sample_id, (_, _, record, captions, _) in read_store(tmp_path).items():
        shard, _ = store.sample(sample_id)
        for row, own in zip(record["caption_rows"], captions, strict=True):
            stored, scale = own["tokens"], own["tokens_scale"].astype(np.float32)
            if dtype == "I8":
                each = np.repeat(scale, 32, axis=1)[:, : stored.shape[1]]
                values = stored.astype(np.float32)
            else:
                each, bits = scale, stored.astype(np.int32)
                exponent, mantissa = (bits >> 3) & 15, bits & 7
                magnitude = np.where(exponent > 0, np.ldexp(8 + mantissa, exponent - 10), np.ldexp(mantissa, -9))
                values = np.where(bits >> 7, -magnitude, magnitude).astype(np.float32)
            expected = store.read_caption(store.shards.index(shard), row)["tokens"]
            assert (values * each).astype(np.float16).tobytes() == expected.tobytes()


@pytest.mark.parametrize("dtype", ["F16", "F32", "BF16"])
def test_every_row_caption_and_record_is_what_was_written(tmp_path: Path, dtype: str) -> None:
    rows = {"train/64x64": 40, "val/64x64": 3, "train/8x8": 2, "train/128x192": 5}
    samples = samples_of(rows, dtype=dtype)
    make_store(tmp_path, samples, dtype=dtype)
    compare(tmp_path, samples)


def test_superseded_rows_are_left_out_by_the_lists_of_dropped_rows(tmp_path: Path) -> None:
    first = samples_of({"train/64x64": 20, "train/96x64": 4})
    again = [make_sample(sample.id, sample.bucket, ("changed",), version=1) for sample in first[1:20:3]]
    more = [*samples_of({"train/64x64": 4}, "more/"), make_sample(first[0].id, "val/64x64", version=2)]
    make_store(tmp_path, first, again, more)
    newest = {sample.id: sample for sample in [*first, *again, *more]}
    compare(tmp_path, list(newest.values()))


@pytest.fixture(scope="module")
def shard(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Sample]]:
    path = tmp_path_factory.mktemp("one") / "s"
    samples = samples_of({"train/64x64": 40, "train/96x64": 9, "val/64x64": 3})
    make_store(path, samples)
    return path, samples


def opened(path: Path) -> tuple[bytes, dict[str, list[int]], Any]:
    sidecar = (path / "shards" / "g0.meta").read_bytes()
    return (path / "shards" / "g0.lmdb").read_bytes(), json.loads(metadata_of(sidecar)["entry"])["groups"], open_block(sidecar)


def test_a_rows_address_is_arithmetic(shard: tuple[Path, list[Sample]]) -> None:
    """`header_bytes + K p + k x row_bytes`, with only the manifest and the sidecar."""
    path, samples = shard
    manifest = json.loads((path / "manifest.json").read_text())
    bucket = next(entry for entry in manifest["buckets"] if entry["name"] == "train/64x64")
    items = {"F16": 2, "I32": 4, "U8": 1, "U64": 8}
    order = sorted(bucket["columns"], key=lambda name: (-items[bucket["columns"][name]["dtype"]], name))
    size = {name: items[c["dtype"]] * int(np.prod(c["shape"])) for name, c in bucket["columns"].items()}
    before = sum(size[name] for name in order[: order.index("latent")])
    data, groups, table = opened(path)
    _, blocks, first_block, _ = groups["train/64x64"]
    for n, sample in enumerate(sample for sample in samples if sample.bucket == "train/64x64"):
        own = table["first_row"][first_block : first_block + blocks]
        at = int(np.searchsorted(own, n, side="right")) - 1 + first_block
        count, k = int(table["rows"][at]), n - int(table["first_row"][at])
        begin = int(table["offset"][at]) + bucket["header_bytes"] + count * before + k * size["latent"]
        assert data[begin : begin + size["latent"]] == sample.latent.tobytes()
    assert spec_of("train/64x64").header_bytes == bucket["header_bytes"]


def read_id(path: Path) -> str:
    found: str = json.loads((path / "manifest.json").read_text())["shards"][0]["shard_id"]
    return found


def test_the_index_finds_every_sample_by_its_digest(shard: tuple[Path, list[Sample]]) -> None:
    path, samples = shard
    data, groups, table = opened(path)
    names, index = sorted(groups), index_of(table["index"], 0, read_id(path))
    digests = [row["digest"].tobytes() for row in index]
    assert digests == sorted(digests)
    for sample in samples:
        at = digests.index(hashlib.blake2b(sample.id.encode(), digest_size=16).digest())
        begin, length = int(index["record_offset"][at]), int(index["record_bytes"][at])
        record, own = msgpack.unpackb(data[begin : begin + length]), sample.record
        assert (record["id"], record["row"]) == (sample.id, int(index["row"][at]))
        found = [names[int(index["bucket"][at])], int(index["source_bytes"][at]), int(index["source_mtime_ns"][at])]
        assert found == [sample.bucket, own.source_bytes, own.source_mtime_ns]
        assert bytes(index["content"][at]) == own.content


def test_the_manifests_digest_can_be_computed_from_the_page_alone(tmp_path: Path) -> None:
    import xxhash

    make_store(tmp_path, samples_of({"train/64x64": 5}))
    document = json.loads((tmp_path / "manifest.json").read_text())
    text = json.dumps({**document, "digest": ""}, separators=(",", ":"), sort_keys=True) + "\n"
    assert xxhash.xxh3_128_hexdigest(text.encode()) == document["digest"]
    for shard in document["shards"]:
        for kind in ("lmdb", "meta"):
            data = (tmp_path / "shards" / f"{shard['name']}.{kind}").read_bytes()
            assert (len(data), xxhash.xxh3_128_hexdigest(data)) == (shard[kind]["num_bytes"], shard[kind]["digest"])


def test_a_packed_store_is_read_without_bucketline(source: Path, tmp_path: Path, model: Path) -> None:
    assert call("ingest", "pack", source, tmp_path / "s", "--model", model, *SMALL, "--val-fraction", "0.3").code == 0
    found = read_store(tmp_path / "s")
    assert sorted(found) == sorted(path.relative_to(source).as_posix() for path in source.rglob("*.png"))
    for sample_id, (bucket, columns, record, tokens, _) in found.items():
        text = (source / sample_id).with_suffix(".txt")
        assert record["captions"] == (text.read_text().split("\n")[:-1] if text.exists() else [])
        height, width = map(int, bucket.partition("/")[2].split("x"))
        assert columns["latent"].shape == (4, height // 2, width // 2)
        assert record["content"] == hashlib.blake2b((source / sample_id).read_bytes(), digest_size=16).digest()
        assert len(tokens) == max(1, len(record["captions"]))


def test_every_line_of_a_shards_file_has_a_checksum(tmp_path: Path) -> None:
    import xxhash

    form = Form(columns=[RowColumn(role="target", dtype="U8", shape=("length",))])
    form.make_store(tmp_path / "s", form.samples({f"train/{3 << 20}": 4}))
    (path,) = (tmp_path / "s" / "shards").glob("*.lmdb")
    data, sidecar = path.read_bytes(), path.with_suffix(".meta").read_bytes()
    lines = [data[at : at + (8 << 20)] for at in range(0, len(data), 8 << 20)]
    assert len(lines) == 2
    assert metadata_of(sidecar)["line_bytes"] == "8388608"
    assert open_block(sidecar)["line_checksum"].tolist() == [xxhash.xxh3_64_intdigest(line) for line in lines]
