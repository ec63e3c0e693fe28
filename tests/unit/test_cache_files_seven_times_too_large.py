"""The failure: rows of an encoded batch saved as views, so that every file carried the whole batch.

Here rows are cloned out of the batch, and a block's length must be the sum of its rows and its header before it is written.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from bucketline.store import BlockSpec, Store
from bucketline.store.format.block import CHECKSUM, Column, Row, caption_digest, encode_block, fixed_columns, make_row
from bucketline.store.read.samples import info
from bucketline.store.write import shard_writer
from bucketline.store.write.publish import lock_store, publish
from bucketline.store.write.seal import seal
from tests.kit import MAX_CAPTIONS, empty_store, make_sample, open_writer, samples_of, spec_of

BUCKET = "train/64x64"


def values_of(latent: NDArray[Any]) -> dict[str, NDArray[Any]]:
    return {
        "latent": latent,
        "captions": np.zeros(MAX_CAPTIONS, "<i4"),
        "original_size": np.zeros(2, "<i4"),
        "crop": np.zeros(2, "<i4"),
        "id": np.zeros(2, "<u8"),
    }


def test_a_row_cloned_out_of_a_batch_has_its_own_bytes_alone() -> None:
    spec = spec_of(BUCKET)
    strided = np.arange(7 * 2 * 8 * 8, dtype="<f2").reshape(7, 8, 8, 2).transpose(0, 3, 1, 2)
    expected, batch = [one.tobytes() for one in strided], strided.copy()
    for given in (strided, batch):
        rows = [make_row(spec, values_of(given[n])) for n in range(7)]
        batch[:] = 0  # a row does not change with the batch that it was cloned from
        for row, own in zip(rows, expected, strict=True):
            assert row["latent"] == own
            assert sum(map(len, row.values())) == spec.row_bytes - spec.column(CHECKSUM).row_bytes
        batch[:] = strided
        assert len(encode_block(spec, rows, 0)) == spec.header_bytes + 7 * spec.row_bytes


def test_rows_that_carry_their_whole_batch_are_refused_before_the_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control: `make_row` keeps what a view is a view of, as `torch.save` of a view does."""

    def with_the_batch(spec: BlockSpec, values: Mapping[str, NDArray[Any]]) -> Row:
        row = make_row(spec, values)
        base = values["latent"].base
        return {**row, "latent": row["latent"] if base is None else base.tobytes()}

    monkeypatch.setattr(shard_writer, "make_row", with_the_batch)
    empty_store(tmp_path)
    writer = open_writer(tmp_path, "a")
    batch = np.zeros((7, 2, 8, 8), "<f2")
    for n in range(7):
        record = make_sample(f"{n}.png", BUCKET).record
        writer.add(spec=spec_of(BUCKET), latents={"latent": batch[n]}, record=record, captions=[caption_digest("")])
    with pytest.raises(AssertionError, match=r"a block of 7 rows of train/64x64 has \d+ bytes, expected"):
        writer.commit()
    writer.close()
    assert not seal(tmp_path, "a")  # nothing of it was written


def test_a_store_takes_little_more_on_the_disk_than_its_rows(tmp_path: Path) -> None:
    """Rows of 8 KiB, 1,000 of them: LMDB by itself would round each up to 12 KiB, the failure would make them 64."""
    spec = BlockSpec(bucket="train/256x256", columns=(*fixed_columns(8), Column(name="latent", dtype="F16", shape=(4, 32, 32))))
    manifest = empty_store(tmp_path)
    from dataclasses import replace

    manifest = replace(manifest, max_captions=8)
    writer = open_writer(tmp_path, "a")
    batch = np.random.default_rng(0).normal(size=(8, 4, 32, 32)).astype("<f2")
    for n in range(1000):
        record = make_sample(f"{n}.png", "train/256x256").record
        writer.add(spec=spec, latents={"latent": batch[n % 8]}, record=record, captions=[caption_digest("")])
    writer.commit()
    writer.close()
    seal(tmp_path, "a")
    with lock_store(tmp_path):
        publish(tmp_path, manifest, ["a"], [])
    report = info(Store.open(tmp_path))
    assert report["samples"] == 1000
    assert 8192 * 1000 < report["payload_bytes"] < 8192 * 1000 * 1.06
    assert report["disk_bytes"] < report["payload_bytes"] * 1.03


def test_payload_is_the_rows_the_captions_and_the_records_and_nothing_else(tmp_path: Path) -> None:
    from tests.kit import embedding, make_store

    samples = samples_of({BUCKET: 20})
    store = make_store(tmp_path, samples)
    texts = {text for sample in samples for text in sample.captions} | {""}
    shard = store.shards[0]
    records = int(shard.index["record_bytes"].sum())
    expected = 20 * spec_of(BUCKET).row_bytes + sum(embedding(text).nbytes for text in texts) + records
    assert store.manifest.payload_bytes == expected
