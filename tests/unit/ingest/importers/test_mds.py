"""MDS as Streaming writes it: merged indexes, arrays by their dtype; and indexes that are damaged."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from bucketline.errors import SourceError
from bucketline.ingest.images.crop import RejectedError
from bucketline.ingest.importers.cache import ListRequest
from bucketline.ingest.importers.formats.mds import IMPORTER
from bucketline.ingest.importers.reading import listed
from bucketline.ingest.importers.rows import read_entry
from bucketline.store import Store
from tests.commands import call
from tests.models import SMALL, write_images
from tests.unit.ingest.importers.known import run_import
from tests.unit.ingest.importers.writers import mds_shard

SHAPE = (4, 32, 32)
ASKED = ("--vae", "sd", "--trust-scale", "--dtype", "F32", "--json")


def values(number: int, dtype: str = "<f2") -> NDArray[Any]:
    latent: NDArray[Any] = np.random.default_rng(number).standard_normal(SHAPE).astype(dtype)
    return latent


def written(folder: Path, latents: list[NDArray[Any]] | int = 3, kind: str = "bytes") -> Path:
    """Write a shard of these latents, or of so many."""
    given = [values(n) for n in range(latents)] if isinstance(latents, int) else latents
    rows = [{"latents_256": one.tobytes(), "key": f"{folder.name}-{n}".encode()} for n, one in enumerate(given)]
    mds_shard(folder, rows, {"latents_256": kind, "key": "str"})
    return folder


def stored(path: Path) -> dict[str, NDArray[Any]]:
    bucket = Store.open(path).bucket("train/256x256")
    rows = np.arange(bucket.num_rows)
    return dict(zip(bucket.sample_ids(rows), bucket.read(rows, "latent"), strict=True))


def assert_imported(source: Path, expected: list[NDArray[Any]]) -> None:
    run_import("mds", source, source.parent / "s.store", None, *ASKED).done()
    found = stored(source.parent / "s.store")
    assert len(found) == len(expected)
    for n, latent in enumerate(expected):
        assert np.array_equal(found[f"{source.name}-{n}"], (latent.astype("f4").astype("f8") / 0.18215).astype("f4"))


@pytest.mark.parametrize(("kind", "dtype"), [("bytes", "<f2"), ("bytes", "<f4"), ("ndarray:float16:4,32,32", "<f2")])
def test_latents_are_read_by_the_dtype_that_was_written(kind: str, dtype: str, tmp_path: Path) -> None:
    expected = [values(n, dtype) for n in range(3)]
    assert_imported(written(tmp_path / "cache", expected, kind), expected)


@pytest.mark.parametrize("kind", ["ndarray:uint16:4,32,32", "ndarray:uint16", "ndarray", "pkl"])
def test_what_may_be_the_bits_of_bf16_is_refused_by_its_column(kind: str, tmp_path: Path) -> None:
    bits = [(values(n, "<f4").view("<u4") >> 16).astype("<u2") for n in range(3)]
    run_import("mds", written(tmp_path / "cache", bits, kind), tmp_path / "s.store", None, *ASKED).fails(
        f"its column latents_256 is {kind}"
    )
    assert not (tmp_path / "s.store").exists()


def test_a_merged_index_is_imported_once(tmp_path: Path) -> None:
    """As `streaming.base.util.merge_index` writes it, next to the indexes of the folders."""
    source, shards = tmp_path / "cache", []
    for part in "ab":
        folder = written(source / part, 2)
        (shard,) = json.loads((folder / "index.json").read_text(encoding="utf-8"))["shards"]
        shard["raw_data"]["basename"] = f"{part}/{shard['raw_data']['basename']}"
        shards.append(shard)
    (source / "index.json").write_text(json.dumps({"version": 2, "shards": shards}), encoding="utf-8")
    run_import("mds", source, tmp_path / "s.store", None, *ASKED).done()
    assert sorted(stored(tmp_path / "s.store")) == ["a-0", "a-1", "b-0", "b-1"]
    shards[0]["samples"] = 1  # an index that is not current
    (source / "index.json").write_text(json.dumps({"version": 2, "shards": shards}), encoding="utf-8")
    ran = run_import("mds", source, tmp_path / "t.store", None, *ASKED)
    assert "is not the shard of 1 samples that its index lists" in ran.err


def test_a_shard_that_is_there_only_compressed_is_refused_by_name(tmp_path: Path) -> None:
    source = written(tmp_path / "cache", 1)
    (source / "shard.00000.mds").rename(source / "shard.00000.mds.zstd")
    index = json.loads((source / "index.json").read_text(encoding="utf-8"))
    run_import("mds", source, tmp_path / "s.store", None, *ASKED).fails("shard.00000.mds is missing", "restore it")
    index["shards"][0] |= {"compression": "zstd:7", "zip_data": {"basename": "shard.00000.mds.zstd", "bytes": 9, "hashes": {}}}
    (source / "index.json").write_text(json.dumps(index), encoding="utf-8")
    run_import("mds", source, tmp_path / "s.store", None, *ASKED).fails("shard.00000.mds is missing", "decompress it")


ODD: tuple[Any, ...] = (None, -1, 10**30, 1.5, "", "x", "\0", "../../x", "/etc/passwd", [], {}, True, "\ud800")


@pytest.mark.parametrize("field", ["samples", "column_names", "column_encodings", "column_sizes", "raw_data"])
def test_an_index_of_odd_values_is_an_error_or_a_reject(field: str, tmp_path: Path) -> None:
    source = written(tmp_path / "cache", 1)
    index = json.loads((source / "index.json").read_text(encoding="utf-8"))
    inner: tuple[Any, ...] = tuple({"basename": odd, "bytes": 10} for odd in ODD) + tuple([odd, odd] for odd in ODD)
    sizes = tuple({"basename": "shard.00000.mds", "bytes": odd} for odd in ODD)
    num_refused = 0
    for odd in (*ODD, *inner, *sizes):
        index["shards"][0][field] = odd
        (source / "index.json").write_text(json.dumps(index), encoding="utf-8")
        try:
            listing = listed(IMPORTER, ListRequest(source=source))
            for entry in listing.entries:
                read_entry(IMPORTER, source, entry, listing.variant)
        except (SourceError, RejectedError):
            num_refused += 1
    assert num_refused > len(ODD)


def test_a_samples_lengths_that_do_not_add_up_are_a_reject(tmp_path: Path) -> None:
    source = written(tmp_path / "cache", 2)
    path = source / "shard.00000.mds"
    data = bytearray(path.read_bytes())
    _, first = struct.unpack("<II", data[:8])
    data[first : first + 4] = struct.pack("<I", 0xFFFFFFF0)
    path.write_bytes(data)
    ran = run_import("mds", source, tmp_path / "s.store", None, *ASKED)
    assert (ran.json["imported"], ran.json["rejected"]) == (1, 1)


def test_an_export_has_the_mirrored_images_latents_and_they_come_back(model: Path, tmp_path: Path) -> None:
    write_images(tmp_path / "images", 3)
    packing = ("--model", model, *SMALL, "--flip", "--dtype", "F32")
    assert call("ingest", "pack", tmp_path / "images", tmp_path / "s", *packing).code == 0
    assert call("store", "export", tmp_path / "s", tmp_path / "out", "--format", "mds").code == 0
    run_import("mds", tmp_path / "out", tmp_path / "t", None, "--model", model, "--trust-scale", "--text", "none").done()
    before, after = Store.open(tmp_path / "s"), Store.open(tmp_path / "t")
    assert before.buckets()
    for bucket in before.buckets():
        other, rows = after.bucket(bucket.name), np.arange(bucket.num_rows)
        place = {sample_id: row for row, sample_id in enumerate(other.sample_ids(rows))}
        order = np.array([place[sample_id] for sample_id in bucket.sample_ids(rows)])
        for column in ("latent", "latent_flipped"):
            assert np.allclose(bucket.read(rows, column), other.read(order, column), rtol=2e-3, atol=2e-3)
