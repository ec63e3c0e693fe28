"""The reader gives back what was written, by row, by id and in a list, without LMDB; so do the map and batches out of it."""

from __future__ import annotations

import gc
import json
import os
import re
import resource
import shutil
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from bucketline.errors import CorruptError, StoreError
from bucketline.loader import Loader, LoaderConfig
from bucketline.loader.prefetch.ahead import ColdDetector
from bucketline.store import FileGather, Store
from bucketline.store.change.commit import drop
from bucketline.store.folder import LocalFolder
from bucketline.store.format.block import sample_digest
from bucketline.store.format.text import EMPTY_CAPTION_ROW
from bucketline.store.read.files import LostFile, lost_shards, refuse_lost_shards
from bucketline.store.read.samples import Selection, live_samples
from bucketline.store.shard.mapped import ZERO_BYTES, AddressRange
from bucketline.store.shard.sidecar import encode_sidecar
from tests.commands import call
from tests.fault.apart import apart
from tests.kit import (
    IMAGES,
    Sample,
    dropped_list,
    embedding,
    flip_caption,
    flip_row,
    index_of,
    make_sample,
    make_store,
    parts_of,
    replace_file,
    samples_of,
)
from tests.loading import check_batch, loaders_of

BUCKET = "train/64x64"


def test_every_row_of_every_bucket_is_what_was_written(store: Store, samples: list[list[Sample]]) -> None:
    written = [sample for shard in samples for sample in shard]
    IMAGES.expect(store, written)
    for bucket in store.buckets():
        own = [sample for sample in written if sample.bucket == bucket.name]
        rows = np.arange(bucket.num_rows)
        assert bucket.sample_ids(rows) == [sample.id for sample in own]
        assert bucket.read(rows, "original_size").tolist() == [list(sample.record.original_size) for sample in own]
        assert bucket.read(rows, "crop").tolist() == [list(sample.record.crop[:2]) for sample in own]
        assert [bytes(row) for row in bucket.read(rows, "id")] == [sample_digest(sample.id) for sample in own]


def test_rows_come_in_the_order_asked_for_as_often_as_asked_for(store: Store) -> None:
    bucket = store.bucket(BUCKET)
    ids = bucket.sample_ids(np.arange(bucket.num_rows))
    rows = np.random.default_rng(0).integers(0, bucket.num_rows, 100)
    assert bucket.sample_ids(rows) == [ids[row] for row in rows]
    assert len(bucket.read(np.array([], dtype=np.int64), "latent")) == 0


def test_every_shard_begins_its_captions_with_the_empty_one(store: Store) -> None:
    for ordinal in range(len(store.shards)):
        assert np.array_equal(store.read_caption(ordinal, EMPTY_CAPTION_ROW)["tokens"], embedding(""))


ODD_IDS = [
    *("a b/ü ß.png", "日本語/写真.jpg", "x" * 10_240 + ".png", "quote\"'`$(rm -rf ~).png", "new\nline.png"),
    *(os.fsdecode(b"latin-1 \xe9\xff.png"), " ", ".png", "a/../b.png", "\0.png", "%s{0}.png", "A.PNG", "a.png"),
]


def test_ids_of_any_kind_and_length_are_kept(tmp_path: Path) -> None:
    store = make_store(tmp_path, [make_sample(name, BUCKET, (f"caption of {name}",)) for name in ODD_IDS])
    bucket = store.bucket(BUCKET)
    assert bucket.sample_ids(np.arange(len(ODD_IDS))) == ODD_IDS
    for name in ODD_IDS:
        assert store.sample(name)[1].captions == (f"caption of {name}",)


def test_what_is_not_there_is_named_with_what_is(store: Store) -> None:
    with pytest.raises(StoreError, match=r"has no sample 'nothing.png'; ids are paths in the source"):
        store.sample("nothing.png")
    with pytest.raises(StoreError, match="has no bucket 'train/8x8'; it has train/64x128, train/64x64"):
        store.bucket("train/8x8")
    with pytest.raises(StoreError, match=r"train/64x64 has no column 'depth'; it has .*latent"):
        store.bucket(BUCKET).read(np.array([0]), "depth")
    assert [bucket.name for bucket in store.buckets("val")] == ["val/64x64"]
    assert store.buckets("test") == []
    for rows in ([-1], [35], [0, 35], [1 << 40]):
        with pytest.raises(StoreError, match="train/64x64 has the rows 0 to 34, requested"):
            store.bucket(BUCKET).locate(np.array(rows))


def test_opening_reads_the_manifest_and_nothing_else(store: Store, tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_bytes((store.path / "manifest.json").read_bytes())
    opened = Store.open(tmp_path)
    assert opened.bucket(BUCKET).num_rows == 35
    with pytest.raises(StoreError, match=r"g0.meta is missing, the manifest lists it; restore it"):
        opened.bucket(BUCKET).read(np.array([0]), "latent")


@pytest.mark.parametrize("suffix", ["lmdb", "meta"])
def test_a_file_that_is_missing_or_of_another_length_is_an_error_that_names_it(store: Store, copy: Path, suffix: str) -> None:
    path = copy / "shards" / f"g1.{suffix}"
    data = path.read_bytes()
    last = store.bucket(BUCKET).num_rows - 1
    path.write_bytes(data[:-1])
    with pytest.raises(CorruptError, match=rf"g1.{suffix} has \d+ bytes, the manifest says {len(data)}"):
        Store.open(copy).bucket(BUCKET).sample_ids(np.array([last]))
    path.unlink()
    with pytest.raises(StoreError, match=rf"g1.{suffix} is missing"):
        Store.open(copy).bucket(BUCKET).sample_ids(np.array([last]))
    assert Store.open(copy).bucket(BUCKET).sample_ids(np.array([0])) == [f"first/{BUCKET}/0.png"]


@pytest.mark.parametrize("plain_reads", [False, True])
@pytest.mark.parametrize("cold", [False, True])
def test_batches_hold_what_plain_reads_give_over_all_shards_with_captions_padded_by_zeros(
    store: Store, monkeypatch: pytest.MonkeyPatch, *, cold: bool, plain_reads: bool
) -> None:
    monkeypatch.setattr(ColdDetector, "is_cold", property(lambda _: cold))
    shards: set[int] = set()
    options = {"remainder": "carry", "rewind": False, "epochs": 4, "batch_size": 20, "plain_reads": plain_reads}
    for loader in loaders_of(store, pad_to=store.max_tokens + 2, **options):
        for batch in loader.forever():
            rows = loader.plan.at(batch.step).rows
            check_batch(store, rows, batch)
            shards.update(store.bucket(batch.bucket).locate(rows).shard.tolist())
    assert shards == {0, 1}


@pytest.mark.parametrize("plain_reads", [False, True])
def test_blocks_so_small_that_lmdb_keeps_them_inside_a_page_are_copied_too(tmp_path: Path, *, plain_reads: bool) -> None:
    """Such values are aligned to two bytes only, where a column's items may have eight."""
    store = make_store(tmp_path, [make_sample("a.png", "train/8x8")], [make_sample("bc.png", "train/8x8", ("x",))])
    assert any(int(store.bucket("train/8x8").locate(np.arange(2)).data[n]) % 8 for n in range(2))
    (loader,) = loaders_of(store, batch_size=2, plain_reads=plain_reads)
    (batch,) = loader
    check_batch(store, np.arange(2), batch)
    assert np.array_equal(batch.tokens[1].numpy(), embedding("x"))


def test_the_range_begins_with_zeros_and_has_every_shard_byte_for_byte(store: Store) -> None:
    whole = AddressRange([s.entry.lmdb.num_bytes for s in store.shards], lambda ordinal: store.shards[ordinal].opened())
    whole.map(np.arange(len(store.shards)))
    view = whole.bytes_view()
    assert not view[:ZERO_BYTES].any()
    for ordinal, shard in enumerate(store.shards):
        data = np.frombuffer(shard.paths.lmdb.read_bytes(), "u1")
        begin = int(whole.first_byte[ordinal])
        assert np.array_equal(view[begin : begin + len(data)], data)


def test_a_shard_is_mapped_when_it_is_first_needed_and_its_file_closed(store: Store) -> None:
    opened = Store.open(store.path)
    whole = AddressRange([s.entry.lmdb.num_bytes for s in opened.shards], lambda ordinal: opened.shards[ordinal].opened())
    before = len(list(Path("/proc/self/fd").iterdir()))
    whole.map(np.array([1]))
    assert whole.is_mapped.tolist() == [False, True]
    assert len(list(Path("/proc/self/fd").iterdir())) == before


@pytest.mark.parametrize("plain_reads", [False, True])
def test_impossible_starts_are_an_error_and_not_a_read_beyond_the_block(store: Store, copy: Path, *, plain_reads: bool) -> None:
    opened = Store.open(copy)
    located = opened.locate_entries(opened.text, np.array([0]), np.array([2]))
    path = opened.shards[0].paths.lmdb
    for value in (1 << 40, -5):
        data = bytearray(path.read_bytes())
        at = int(located.starts_offsets()[0]) + 8
        data[at : at + 8] = value.to_bytes(8, "little", signed=True)
        path.write_bytes(data)
        fresh = Store.open(copy)
        config = LoaderConfig(batch_size=5, epochs=9, plain_reads=plain_reads)  # one of them draws this caption or the next one
        with (
            Loader(fresh, config) as loader,
            pytest.raises(CorruptError, match=r"caption [23] has the `starts` .* run `store verify`"),
        ):
            list(loader.forever())
        with pytest.raises(CorruptError, match=r"caption 2 has the `starts`"):
            fresh.read_caption(0, 2)


def test_open_stores_do_not_use_up_the_open_files(store: Store) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    held = [Store.open(store.path) for _ in range(50)]
    for opened in held:
        opened.bucket(BUCKET).read(np.arange(35), "latent")
    assert len(list(Path("/proc/self/fd").iterdir())) <= before + 4


def test_maps_of_sidecars_are_given_back_when_the_store_is_gone(store: Store) -> None:
    def maps() -> int:  # of this store only: what another test's thread still holds may go at any time
        lines = Path("/proc/self/maps").read_text().splitlines()
        return sum(str(store.path) in line and "g0.meta" in line for line in lines)

    gc.collect()
    before = maps()
    opened = Store.open(store.path)
    rows = opened.shards[0].meta.column("rows")
    opened.bucket(BUCKET).read(np.arange(35), "latent")
    assert maps() == before + 1  # that in the range over all shards is the shard's own
    del opened
    gc.collect()
    assert rows.sum() > 0  # a view outlives its file object
    assert maps() == before + 1
    del rows
    gc.collect()
    assert maps() == before


# A shard that is gone or cut short is seen before any work: by pack, by `store info`, and when a loader opens the store.

PARTS = ("lmdb", "meta")


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("damage", [Path.unlink, cut])
def test_info_names_what_is_lost_and_ends_with_one(store: Store, copy: Path, part: str, damage: Callable[[Path], None]) -> None:
    path = copy / "shards" / f"g1.{part}"
    expected = path.stat().st_size
    damage(path)
    ran = call("store", "info", copy, "--json")
    assert ran.code == 1
    how = f"has {expected // 2} bytes instead of {expected}" if path.exists() else "is missing"
    lost = {"name": path.name, "reason": how}
    assert ran.json["lost_shards"] == [{"shard": "g1", "samples": 14, "files": [lost]}]
    assert ran.json["samples"] == 53
    ran = call("store", "info", copy)
    assert ran.code == 1
    assert "53 samples" in ran.out
    assert f"shard g1 (14 samples): {path.name} " in ran.err
    assert f"`store repair {copy}`" in ran.err


def test_a_lost_list_of_dropped_rows_is_seen(tmp_path: Path) -> None:
    samples = samples_of({BUCKET: 9})
    store = make_store(tmp_path, samples, samples[:3])
    path = dropped_list(tmp_path)
    path.unlink()
    (lost,) = lost_shards(LocalFolder(tmp_path), store.manifest.shards, store.manifest.dropped)
    assert (lost.shard, lost.samples, lost.files) == ("g0", 6, (LostFile(name=path.name, reason="is missing"),))


def test_many_lost_shards_are_counted_and_the_first_are_named(tmp_path: Path) -> None:
    store = make_store(tmp_path, *(samples_of({BUCKET: 2}, f"{n}/") for n in range(5)))
    for path in (tmp_path / "shards").glob("*.lmdb"):
        path.unlink()
    with pytest.raises(CorruptError, match=r"5 shards with 10 samples: .*g0.*; shard g1.*; shard g2.*, and 2 shards more; "):
        refuse_lost_shards(LocalFolder(tmp_path), store.manifest)


def test_a_file_that_may_not_be_looked_at_is_not_taken_for_a_lost_one(tmp_path: Path) -> None:
    store = make_store(tmp_path / "s", samples_of({BUCKET: 2}))
    (tmp_path / "s" / "shards").rename(tmp_path / "moved")
    (tmp_path / "s" / "shards").symlink_to("shards")
    with pytest.raises(StoreError, match=r"cannot look up .*: Too many levels of symbolic links"):
        lost_shards(LocalFolder(tmp_path / "s"), store.manifest.shards)
    with pytest.raises(StoreError, match=r"cannot be read: Too many levels of symbolic links; restore it"):
        Store.open(tmp_path / "s" / "shards")


@pytest.mark.parametrize("damage", [Path.unlink, cut])
def test_a_loader_refuses_a_store_that_lost_a_file(store: Store, copy: Path, damage: Callable[[Path], None]) -> None:
    damage(copy / "shards" / "g1.lmdb")
    with pytest.raises(CorruptError, match=r"has lost files of 1 shard with 14 samples: .*store repair"):
        Loader(copy, LoaderConfig(batch_size=2))
    assert call("loader", "plan", copy, "--batch-size", 2).code == 1


def test_an_older_generation_that_cannot_be_read_is_said_to_be_old(tmp_path: Path) -> None:
    make_store(tmp_path, samples_of({BUCKET: 2}, "a/"), samples_of({BUCKET: 2}, "b/"))
    (tmp_path / "shards" / "g0.lmdb").unlink()
    with pytest.raises(CorruptError, match="generation 1 cannot be read completely; restore the files, or open generation 2"):
        refuse_lost_shards(LocalFolder(tmp_path), Store.open(tmp_path, 1).manifest)


def test_a_buffer_of_another_size_is_refused_before_anything_is_read(store: Store) -> None:
    bucket = store.bucket(BUCKET)
    with pytest.raises(ValueError, match=r"the buffer has \d+ bytes, expected 2 rows of 256 bytes"):
        FileGather(store).rows(bucket.locate(np.array([0, 1])), bucket.spec.column("latent"), np.empty((3, 256), dtype="u1"))


def test_rows_are_read_into_the_buffer_that_is_given(store: Store) -> None:
    bucket, rows = store.bucket(BUCKET), np.array([3, 1, 30])
    out = np.zeros((3, 2, 8, 8), dtype="<f2")
    assert bucket.read(rows, "latent", out=out) is out
    assert np.array_equal(out, bucket.read(rows, "latent", verify=True))


def test_a_file_truncated_while_the_store_is_open_is_an_error_not_the_end_of_the_process(copy: Path) -> None:
    opened = Store.open(copy)
    bucket = opened.bucket(BUCKET)
    located = bucket.locate(np.arange(23))
    path = opened.shards[0].paths.lmdb
    gather = FileGather(opened)
    os.truncate(path, path.stat().st_size // 2 // 4096 * 4096)
    with pytest.raises(CorruptError, match=r"g0.lmdb has \d+ bytes, the manifest says \d+"):
        gather.rows(located, bucket.spec.column("latent"), np.empty((23, 2, 8, 8), dtype="<f2"))


def test_files_stay_open_between_reads_but_only_so_many_and_no_longer_than_their_reader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bucketline.store.read.files.KEPT_FILES", 3)
    make_store(tmp_path, *(samples_of({BUCKET: 1}, prefix=f"{n}-") for n in range(5)))
    bucket = (opened := Store.open(tmp_path)).bucket(BUCKET)
    rows = np.arange(bucket.num_rows)
    expected, located = bucket.read(rows, "latent"), bucket.locate(rows)
    before, gather = len(list(Path("/proc/self/fd").iterdir())), FileGather(opened, keep_open=True)
    for _ in range(2):
        out = np.empty_like(expected)
        gather.rows(located, bucket.spec.column("latent"), out)
        assert np.array_equal(out, expected)
        assert len(list(Path("/proc/self/fd").iterdir())) == before + 3
    del gather
    assert len(list(Path("/proc/self/fd").iterdir())) == before


@pytest.mark.parametrize("left", [0, 1])  # for the file, and for the copy of its descriptor that is kept
def test_a_process_without_free_descriptors_is_told_which_limit_to_raise(copy: Path, left: int) -> None:
    def read() -> str:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
        opened = Store.open(copy)
        located, gather = opened.bucket(BUCKET).locate(np.arange(23)), FileGather(opened, keep_open=True)
        taken = []
        with suppress(OSError):
            while True:
                taken.append(os.dup(0))
        for fd in taken[:left]:
            os.close(fd)
        try:
            gather.rows(located, opened.bucket(BUCKET).spec.column("latent"), np.empty((23, 2, 8, 8), dtype="<f2"))
        except StoreError as error:
            return str(error)
        finally:
            for fd in taken[left:]:
                os.close(fd)
        return ""

    ended = apart(read, 60)
    assert re.search(r"g0\.lmdb.*Too many open files; .*raise the limit \(ulimit -n\)", ended.gave), ended


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
    flip_row(store, BUCKET, 11, column)
    opened = Store.open(tmp_path).bucket(BUCKET)
    others = np.array([n for n in range(20) if n != 11])
    opened.read(others, "latent", verify=True)
    opened.read(np.arange(20), "latent")
    with pytest.raises(CorruptError, match=rf"sample '{samples[11].id}', row 11 of {BUCKET} in shard g0: its bytes"):
        opened.read(np.arange(20), "latent", verify=True)


def test_a_damaged_caption_is_named_when_it_is_read(tmp_path: Path) -> None:
    flip_caption(make_store(tmp_path, samples_of({BUCKET: 9})), 2)
    with pytest.raises(CorruptError, match=r"shard g0, caption 2: its bytes do not match their checksum"):
        Store.open(tmp_path).read_caption(0, 2)


# `store ls` and the iteration behind it: every live sample once, in the store's order, with the number that readers use.

ODD = ("two\nlines.png", "a\ttab.png", "back\\slash.png", "../../etc/passwd", "raw\udcff.png", "l" * 10_000, "é \u202e.png", "")


@pytest.fixture
def changed(tmp_path: Path) -> Store:
    """A store of two shards out of which rows were dropped, the first and the last of a bucket among them."""
    first, second = samples_of({"train/64x64": 20, "val/64x64": 5, "train/96x64": 3}), samples_of({"train/64x64": 9}, "b/")
    store = make_store(tmp_path / "s", first, second)
    gone = [f"train/64x64/{n}.png" for n in (0, 7, 8, 19)] + ["b/train/64x64/8.png"]
    drop(store.path, gone)
    return Store.open(store.path)


def test_every_live_sample_is_listed_once_under_the_row_that_a_bucket_gives_it(changed: Store) -> None:
    by_reader = {bucket.name: bucket.sample_ids(np.arange(bucket.num_rows)) for bucket in changed.buckets()}
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
    one_digit = [name for name in everything if "train/64x64" in name and len(name.rpartition("/")[2]) == len("1.png")]
    assert ids(Selection(split="train", match="*64x64/?.png")) == one_digit
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
    for rows, words in (
        ([0, 1, 2, 3, 4, 4], "does not list every row of train/64x64 once"),
        ([0, 1, 2, 3, 4, 6], "has row 6 of train/64x64, the shard has 6 rows"),
    ):
        tensors, metadata = parts_of(shard.paths.meta)
        index_of(tensors, metadata)["row"] = rows
        data = encode_sidecar(tensors, metadata)
        shutil.copytree(store.path, tmp_path / "bad", dirs_exist_ok=True)
        replace_file(tmp_path / "bad", "meta", data)
        bad = Store.open(tmp_path / "bad")
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
        fields = {"bucket", "shard", "captions", "cuts", "original_size", "source", "source_bytes"}
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


def test_a_pattern_that_nothing_fits_is_said_on_stderr_and_is_no_failure(changed: Store, tmp_path: Path) -> None:
    for more in ((), ("--json",)):
        ran = call("store", "ls", changed.path, "--split", "val", "--match", "*.gif", *more)
        assert (ran.code, ran.out) == (0, "")
        assert ran.err == "no sample matches --split 'val' --match '*.gif'\n"
    empty = make_store(tmp_path / "empty").path
    assert call("store", "ls", empty).err == f"{empty} has no sample\n"
