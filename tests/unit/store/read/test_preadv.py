"""Plain reads into given buffers: the bytes of the map, errors where the map would end the process, and `verify`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bucketline.errors import CorruptError, StoreError
from bucketline.store import FileGather, Store
from bucketline.store.format.hashing import sample_digest
from bucketline.store.read.iter_samples import Selection, live_samples
from bucketline.store.shard.address_range import AddressRange
from bucketline.store.shard.sidecar import encode_paged
from bucketline.store.write.publish import lock_store, publish
from tests.commands import BIN, call
from tests.kit import Sample, flip_bit, make_sample, make_store, samples_of

BUCKET = "train/64x64"


def mapped_bytes(store: Store) -> tuple[AddressRange, Any]:
    whole = AddressRange([s.entry.lmdb.num_bytes for s in store.shards], lambda ordinal: store.shards[ordinal].opened())
    whole.map(np.arange(len(store.shards)))
    return whole, whole.bytes_view()


def test_rows_of_every_column_are_those_under_the_map(store: Store) -> None:
    whole, view = mapped_bytes(store)
    gather = FileGather(store)
    for bucket in store.buckets():
        located = bucket.locate(np.random.default_rng(2).integers(0, bucket.num_rows, 50))
        for column in bucket.columns:
            out = np.full((50, column.row_bytes), 7, dtype="u1")
            gather.rows(located, column, out)
            begin = whole.first_byte[located.shard] + located.offsets(bucket.spec, column.name)
            assert all(out[n].tobytes() == view[at : at + column.row_bytes].tobytes() for n, at in enumerate(begin))


def test_ranges_of_any_length_are_padded_with_zeros(store: Store) -> None:
    located = store.locate_captions(np.array([0, 1, 1, 0]), np.array([0, 0, 2, 3]))
    whole, view = mapped_bytes(store)
    lengths = np.array([0, 7, 64, 33])
    out = np.full((4, 64), 9, dtype="u1")
    gather = FileGather(store)
    gather.read(located.shard, located.data, lengths, out)
    for n, begin in enumerate(whole.first_byte[located.shard] + located.data):
        assert out[n].tobytes() == view[begin : begin + lengths[n]].tobytes() + bytes(64 - lengths[n])


def test_a_buffer_of_another_size_is_refused_before_anything_is_read(store: Store) -> None:
    bucket = store.bucket(BUCKET)
    with pytest.raises(ValueError, match=r"the buffer has \d+ bytes, expected 2 rows of 256 bytes"):
        FileGather(store).rows(bucket.locate(np.array([0, 1])), bucket.spec.column("latent"), np.empty((3, 256), dtype="u1"))


def test_rows_are_read_into_the_buffer_that_is_given(store: Store) -> None:
    bucket, rows = store.bucket(BUCKET), np.array([3, 1, 30])
    out = np.zeros((3, 2, 8, 8), dtype="<f2")
    assert bucket.read(rows, "latent", out=out) is out
    assert np.array_equal(out, bucket.read(rows, "latent", verify=True))


def test_a_file_truncated_while_the_store_is_open_is_an_error_not_the_end_of_the_process(store: Store, tmp_path: Path) -> None:
    shutil.copytree(store.path, tmp_path / "s")
    opened = Store.open(tmp_path / "s")
    bucket = opened.bucket(BUCKET)
    located = bucket.locate(np.arange(23))
    path = opened.shards[0].paths.lmdb
    gather = FileGather(opened)
    os.truncate(path, path.stat().st_size // 2 // 4096 * 4096)
    with pytest.raises(CorruptError, match=r"g0.lmdb has \d+ bytes, the manifest says \d+"):
        gather.rows(located, bucket.spec.column("latent"), np.empty((23, 2, 8, 8), dtype="<f2"))


def test_a_failing_medium_is_an_error_that_says_where(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(fd: int, buffers: list[memoryview], offset: int) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("bucketline.store.shard.reader.os.preadv", failing)
    with pytest.raises(StoreError, match=r"g0.lmdb cannot be read at byte \d+: Input/output error; the medium may be failing"):
        store.bucket(BUCKET).read(np.array([0]), "latent")


@pytest.mark.parametrize("column", ["latent", "checksum", "captions", "crop", "original_size", "id"])
def test_verify_names_the_sample_of_a_bad_row_whichever_column_is_damaged(tmp_path: Path, column: str) -> None:
    samples = samples_of({BUCKET: 20})
    store = make_store(tmp_path, samples)
    bucket = store.bucket(BUCKET)
    at = int(bucket.locate(np.array([11])).offsets(bucket.spec, column)[0])
    flip_bit(store.shards[0].paths.lmdb, 8 * at + 3)
    opened = Store.open(tmp_path).bucket(BUCKET)
    others = np.array([n for n in range(20) if n != 11])
    opened.read(others, "latent", verify=True)
    opened.read(np.arange(20), "latent")
    with pytest.raises(
        CorruptError, match=rf"sample '{samples[11].id}', row 11 of {BUCKET} in shard g0: its bytes do not match"
    ):
        opened.read(np.arange(20), "latent", verify=True)


def test_a_damaged_caption_is_named_when_it_is_read(tmp_path: Path) -> None:
    store = make_store(tmp_path, samples_of({BUCKET: 9}))
    located = store.locate_captions(np.array([0]), np.array([2]))
    first = np.frombuffer(store.shards[0].read(int(located.starts_offsets()[0]), 8), "<i8")
    at = int(store.token_offsets(located, "tokens", first)[0])
    flip_bit(store.shards[0].paths.lmdb, 8 * at + 1)
    with pytest.raises(CorruptError, match=r"shard g0, caption 2: its bytes do not match their checksum"):
        Store.open(tmp_path).read_caption(0, 2)


# `store ls` and the iteration behind it: every live sample once, in the store's order, with the number that readers use.

ODD = (
    *("two\nlines.png", "a\ttab.png", "back\\slash.png", "../../etc/passwd", "raw\udcff.png", "l" * 10_000, "é \u202e.png", ""),
)


@pytest.fixture
def changed(tmp_path: Path) -> Store:
    """A store of two shards out of which rows were dropped, the first and the last of a bucket among them."""
    first, second = samples_of({"train/64x64": 20, "val/64x64": 5, "train/96x64": 3}), samples_of({"train/64x64": 9}, "b/")
    store = make_store(tmp_path / "s", first, second)
    gone = [f"train/64x64/{n}.png" for n in (0, 7, 8, 19)] + ["b/train/64x64/8.png"]
    with lock_store(store.path):
        publish(store.path, store.manifest, [], [sample_digest(sample_id) for sample_id in gone])
    return Store.open(store.path)


def ids_by_reader(store: Store) -> dict[str, list[str]]:
    return {bucket.name: bucket.sample_ids(np.arange(bucket.num_rows)) for bucket in store.buckets()}


def test_every_live_sample_is_listed_once_under_the_row_that_a_bucket_gives_it(changed: Store) -> None:
    by_reader = ids_by_reader(changed)
    listed = list(live_samples(changed, Selection()))
    assert len(listed) == changed.manifest.samples == 32
    assert len({(one.record.bucket, one.row) for one in listed}) == 32
    for one in listed:
        assert by_reader[one.record.bucket][one.row] == one.record.id
    order = [(one.shard, one.record.bucket, one.record.row) for one in listed]
    assert order == sorted(order)


def test_a_selection_takes_what_it_names(changed: Store) -> None:
    def ids(selection: Selection) -> list[str]:
        return [one.record.id for one in live_samples(changed, selection)]

    everything = ids(Selection())
    assert ids(Selection(split="val")) == [f"val/64x64/{n}.png" for n in range(5)]
    assert ids(Selection(bucket="train/96x64")) == [f"train/96x64/{n}.png" for n in range(3)]
    assert ids(Selection(split="val", bucket="train/96x64")) == []
    assert ids(Selection(match="b/*")) == [sample_id for sample_id in everything if sample_id.startswith("b/")]
    assert ids(Selection(match="*/1[12].png")) == ["train/64x64/11.png", "train/64x64/12.png"]
    assert ids(Selection(split="train", match="*64x64/?.png")) == [
        sample_id
        for sample_id in everything
        if "train/64x64" in sample_id and len(sample_id.rpartition("/")[2]) == len("1.png")
    ]
    with pytest.raises(StoreError, match="no bucket 'train/1x1'; it has train/64x64, train/96x64, val/64x64"):
        ids(Selection(bucket="train/1x1"))


@pytest.mark.slow
def test_memory_grows_by_a_few_bytes_a_row(tmp_path: Path) -> None:
    peaks = []
    for name, rows in (("warm", 40), ("small", 1200), ("large", 3200)):
        store = make_store(tmp_path / name, samples_of({"train/8x8": rows}))
        tracemalloc.start()
        assert sum(1 for _ in live_samples(store, Selection())) == rows
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[2] - peaks[1] < 2000 * 16  # bytes


def test_an_index_that_lists_a_row_twice_or_beyond_its_bucket_is_an_error(tmp_path: Path) -> None:
    store = make_store(tmp_path / "s", samples_of({"train/64x64": 6}))
    shard = store.shards[0]
    dtypes = {"record_offset": "U64", "source_bytes": "U64", "source_mtime_ns": "I64", "captions": "U64", "record_bytes": "U32"}
    for rows, words in (
        ([0, 1, 2, 3, 4, 4], "does not list every row of train/64x64 once"),
        ([0, 1, 2, 3, 4, 6], "has row 6 of train/64x64, the shard has 6 rows"),
    ):
        tensors = [(name, dtype, shard.index.column(name)) for name, dtype in dtypes.items()]
        tensors += [("row", "U32", np.array(rows)), ("caption_row", "U32", shard.index.column("caption_row"))]
        tensors += [("bucket", "U16", shard.index.column("bucket"))]
        tensors += [(name, "U8", shard.index.column(name)) for name in ("digest", "content", "caption_digest")]
        data = encode_paged(tensors, shard.index.metadata)
        shutil.copytree(store.path, tmp_path / "bad", dirs_exist_ok=True)
        bad = Store.open(tmp_path / "bad")
        bad.shards[0].paths.index.write_bytes(data)
        object.__setattr__(bad.shards[0].entry.index, "num_bytes", len(data))
        with pytest.raises(CorruptError, match=words):
            list(live_samples(bad, Selection()))


def test_ls_prints_a_line_a_sample(changed: Store) -> None:
    ran = call("store", "ls", changed.path).done()
    assert ran.out.splitlines() == [f"{one.record.id}\t{one.record.bucket}" for one in live_samples(changed, Selection())]
    assert ran.err == ""
    assert call("store", "ls", changed.path, "--split", "val", "--match", "*/3.png").out == "val/64x64/3.png\tval/64x64\n"


def test_ls_prints_an_object_a_sample(changed: Store, samples: list[list[Sample]]) -> None:
    lines = [json.loads(line) for line in call("store", "ls", changed.path, "--json").out.splitlines()]
    assert len(lines) == 32
    for line in lines:
        shard, record = changed.sample(line["id"])
        fields = {"bucket", "shard", "captions", "original_size", "source", "source_bytes"}
        assert set(line) == {"id", "row", *fields}
        assert changed.bucket(line["bucket"]).sample_ids(np.array([line["row"]])) == [line["id"]]
        assert line["shard"] == shard.name
        for name in fields - {"shard"}:
            assert line[name] == json.loads(json.dumps(getattr(record, name)))


def test_odd_ids_take_one_line_each_and_come_back_from_json_as_they_are(tmp_path: Path) -> None:
    store = make_store(tmp_path / "s", [make_sample(sample_id, "train/64x64") for sample_id in ODD])
    plain = call("store", "ls", store.path).out
    assert plain.count("\n") == len(ODD)
    for line, sample_id in zip(plain.splitlines(), ODD, strict=True):
        shown, bucket = line.split("\t")
        assert bucket == "train/64x64"
        assert shown.isprintable()
        if sample_id.isascii():
            assert shown.encode("ascii").decode("unicode_escape") == sample_id
    assert "raw\\udcff.png\t" in plain
    assert "é \\u202e.png\t" in plain
    listed = [json.loads(line)["id"] for line in call("store", "ls", store.path, "--json").out.splitlines()]
    assert listed == list(ODD)


def test_a_reader_that_stops_early_ends_ls_quietly(tmp_path: Path) -> None:
    store = make_store(tmp_path / "s", samples_of({"train/64x64": 600}))
    for wanted in (b"", b"train/64x64/0.png\ttrain/64x64\n"):
        with subprocess.Popen([BIN / "store", "ls", store.path], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            assert process.stdout.readline() == wanted if wanted else True
            process.stdout.close()
            assert process.stderr.read() == b""


def test_a_pattern_that_nothing_fits_is_said_on_stderr_and_is_no_failure(changed: Store, tmp_path: Path) -> None:
    for more in ((), ("--json",)):
        ran = call("store", "ls", changed.path, "--split", "val", "--match", "*.gif", *more)
        assert (ran.code, ran.out) == (0, "")
        assert ran.err == "no sample matches --split 'val' --match '*.gif'\n"
    empty = make_store(tmp_path / "empty").path
    assert call("store", "ls", empty).err == f"{empty} has no sample\n"


def test_bad_requests_to_ls_are_refused(changed: Store, tmp_path: Path) -> None:
    for asked, code, words in (
        ((changed.path, "--bucket", "train/1x1"), 1, "no bucket 'train/1x1'; it has train/64x64"),
        ((changed.path, "--split", "test"), 2, "--split"),
        ((tmp_path / "nowhere",), 1, "nowhere is not a store"),
        ((changed.path / "manifest.json",), 1, "is not a store"),
    ):
        ran = call("store", "ls", *asked)
        assert (ran.code, ran.out) == (code, "")
        assert words in ran.err
