"""Sidecars and maps of shards: damage is seen when a value is used, another shard's file is refused, maps have a budget."""

from __future__ import annotations

import errno
import gc
import os
import shutil
import sys
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bucketline.errors import CorruptError, StoreError
from bucketline.loader import Loader, LoaderConfig
from bucketline.store import Store
from bucketline.store.change.commit import drop
from bucketline.store.change.merge import merge
from bucketline.store.format.block import bytes_digest
from bucketline.store.format.manifest import DroppedEntry, ShardEntry, read_manifest, shard_paths
from bucketline.store.shard import mapped as address_range
from bucketline.store.shard import mapped as map_budget
from bucketline.store.shard.row_locator import DROPPED_FORMAT, BlockTable, _first_false
from bucketline.store.shard.sidecar import PAGE_BYTES, PagedFile, encode_paged
from tests.kit import flip_bit, ids_of, make_store, replace_file, samples_of

KIND = "bucketline.test/1"
LARGE = np.arange(3000, dtype="<u8") * 7
SMALL = np.arange(999 * 3, dtype="u1").reshape(999, 3)


def written(path: Path) -> Path:
    data = encode_paged([("large", "U64", LARGE), ("small", "U8", SMALL)], {"format": KIND, "groups": {"a": 1}})
    path.write_bytes(data)
    return path


def opened(path: Path) -> PagedFile:
    return PagedFile(path, path.stat().st_size, KIND)


def body_bytes() -> int:
    return LARGE.nbytes + SMALL.nbytes


def test_what_was_written_is_read_entry_by_entry_and_in_ranges(tmp_path: Path) -> None:
    file = opened(written(tmp_path / "x"))
    assert file.metadata == {"format": KIND, "groups": {"a": 1}}
    at = np.array([2999, 0, 511, 512, 512, 1500])
    assert np.array_equal(file.take("large", at), LARGE[at])
    assert np.array_equal(file.take("small", at % 999), SMALL[at % 999])
    assert np.array_equal(file.slice("small", 900, 999), SMALL[900:])
    assert len(file.take("large", np.array([], dtype=np.int64))) == 0
    assert len(file.slice("large", 5, 5)) == 0


@pytest.mark.parametrize("page", range(-(-body_bytes() // PAGE_BYTES)))
def test_a_damaged_page_is_noticed_at_its_first_touch_and_no_other_page_is_blamed(tmp_path: Path, page: int) -> None:
    path = written(tmp_path / "x")
    flip_bit(path, 8 * (path.stat().st_size - (body_bytes() - page * PAGE_BYTES - 5)))
    file = opened(path)
    for at in range(0, 3000, 50):
        touched = at * 8 // PAGE_BYTES
        if touched == page:
            with pytest.raises(CorruptError, match=rf"x: page {page} does not match its checksum; run `store verify`"):
                file.take("large", np.array([at]))
        else:
            assert file.take("large", np.array([at]))[0] == LARGE[at]


def test_an_entry_that_lies_across_two_pages_has_both_compared(tmp_path: Path) -> None:
    values = np.arange(4096, dtype="u1").repeat(3).reshape(4096, 3)  # entry 1365 spans bytes 4095 to 4097
    path = tmp_path / "x"
    path.write_bytes(encode_paged([("values", "U8", values)], {"format": KIND}))
    flip_bit(path, 8 * (path.stat().st_size - (values.nbytes - PAGE_BYTES - 9)))
    with pytest.raises(CorruptError, match=r"page 1"):
        opened(path).take("values", np.array([1365]))


def test_a_damaged_page_checksum_is_noticed_too(tmp_path: Path) -> None:
    path = written(tmp_path / "x")
    flip_bit(path, 8 * (path.stat().st_size - (body_bytes() + 1)))
    last = len(LARGE) - 1
    assert opened(path).take("large", np.array([0]))[0] == 0
    assert opened(path).take("large", np.array([last]))[0] == LARGE[last]
    with pytest.raises(CorruptError, match=r"does not match its checksum"):
        opened(path).slice("small", 0, 999)


def test_opening_compares_no_page_but_the_length(tmp_path: Path) -> None:
    path = written(tmp_path / "x")
    flip_bit(path, 8 * (path.stat().st_size - 1))
    assert opened(path).metadata["groups"] == {"a": 1}
    with pytest.raises(CorruptError, match=r"has \d+ bytes, the manifest says 17"):
        PagedFile(path, 17, KIND)
    with pytest.raises(StoreError, match=r"nothing is missing, the manifest lists it; restore it"):
        PagedFile(tmp_path / "nothing", 1, KIND)
    with pytest.raises(CorruptError, match=r"is not a bucketline.index/1 file"):
        PagedFile(path, path.stat().st_size, "bucketline.index/1")
    with pytest.raises(CorruptError, match=r"lacks the tensor 'middle'"):
        opened(path).take("middle", np.array([0]))


@pytest.mark.parametrize("content", [b"", b"x", b"\x02\0\0\0\0\0\0\0{}", bytes(1000)])
def test_a_file_that_is_none_of_ours_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x"
    path.write_bytes(content)
    with pytest.raises(CorruptError):
        opened(path)


BUCKET = "train/64x64"


@given(lists=st.lists(st.lists(st.integers(-5, 5), max_size=40), min_size=1, max_size=5), wanted=st.integers(-6, 6))
def test_the_search_finds_in_each_sequence_what_counting_finds(lists: list[list[int]], wanted: int) -> None:
    ordered = [sorted(values) for values in lists]
    padded = np.array([values + [99] * (41 - len(values)) for values in ordered])
    count = np.array([len(values) for values in ordered])
    found = _first_false(lambda at: padded[np.arange(len(padded)), at] <= wanted, count)
    assert found.tolist() == [sum(value <= wanted for value in values) for values in ordered]


def with_dropped(store: Store, generation: int, rows: list[int]) -> ShardEntry:
    """Return the first shard's entry as it would be without some rows, their list written next to it."""
    entry = store.shards[0].entry
    listed = {BUCKET: {"first": 0, "count": len(rows)}}
    about = {"format": DROPPED_FORMAT, "groups": listed, "shard_id": entry.shard_id}
    data = encode_paged([("rows", "U32", np.array(rows, "<u4"))], about)
    shard_paths(store.path, entry.name).dropped(generation).write_bytes(data)
    groups = {**entry.groups, BUCKET: entry.groups[BUCKET]._replace(dropped=len(rows))}
    dropped = DroppedEntry(generation=generation, num_bytes=len(data), digest=bytes_digest(data))
    return replace(entry, groups=groups, dropped=dropped)


@given(data=st.data())
def test_the_nth_live_row_is_the_one_that_counting_finds(store: Store, data: st.DataObject) -> None:
    total = store.shards[0].entry.groups[BUCKET].rows
    dropped = sorted(data.draw(st.sets(st.integers(0, total - 1), max_size=total)))
    live = [row for row in range(total) if row not in dropped]
    entry = with_dropped(store, 7, dropped) if dropped else store.shards[0].entry
    table = BlockTable([entry, entry], [store.shards[0].paths] * 2)
    ranks = np.arange(len(live))
    assert table.live_rows(BUCKET, ranks % 2, ranks).tolist() == live
    store.shards[0].paths.dropped(7).unlink(missing_ok=True)


def test_rows_of_many_shards_are_found_as_they_are_one_by_one(store: Store) -> None:
    rows = np.random.default_rng(0).permutation(35)
    bucket = store.bucket(BUCKET)
    together = bucket.locate(rows)
    for n, row in enumerate(rows):
        alone = Store.open(store.path).bucket(BUCKET).locate(np.array([row]))
        for field in ("shard", "row", "data", "rows", "row_in_block"):
            assert getattr(together, field)[n] == getattr(alone, field)[0]
    part = together.part(3, 9)
    assert part.row.tolist() == together.row[3:9].tolist()
    assert part.bucket == BUCKET


def test_damage_of_a_list_of_dropped_rows_is_noticed_when_it_is_used(tmp_path: Path) -> None:
    samples = samples_of({BUCKET: 30})
    store = make_store(tmp_path, samples)
    done = drop(tmp_path, [sample.id for sample in samples[5:9]])
    path = store.shards[0].paths.dropped(done.generation)
    flip_bit(path, 8 * path.stat().st_size - 5)
    with pytest.raises(CorruptError, match=r"dropped-2 is not the file that the manifest lists"):
        Store.open(tmp_path).bucket(BUCKET).locate(np.arange(3))


@pytest.mark.parametrize("kind", ["lmdb", "index", "extents"])
def test_a_file_of_another_store_is_refused_by_name(tmp_path: Path, kind: str) -> None:
    for name in ("a", "b"):
        make_store(tmp_path / name, samples_of({BUCKET: 9}))
    theirs, ours = (tmp_path / name / "shards" / f"g0.{kind}" for name in ("b", "a"))
    assert theirs.stat().st_size == ours.stat().st_size
    ours.write_bytes(theirs.read_bytes())
    bucket = Store.open(tmp_path / "a").bucket(BUCKET)
    with pytest.raises(CorruptError, match=rf"g0.{kind} belongs to another shard: it has the id .* restore the file"):
        bucket.sample_ids(np.array([0]))


def test_extents_that_list_fewer_blocks_than_the_manifest_are_refused_before_anything_is_read(tmp_path: Path) -> None:
    store = make_store(tmp_path, samples_of({BUCKET: 40}))
    shard = store.shards[0]
    tensors = [(name, "U64", shard.extents.column(name)[:2]) for name in ("offset", "length", "first_row", "rows")]
    short = encode_paged(tensors, {**shard.extents.metadata, "padding": "x" * 1000})
    num_bytes = shard.entry.extents.num_bytes
    shard.paths.extents.write_bytes(short[:num_bytes].ljust(num_bytes, b"\0"))
    with pytest.raises((CorruptError, StoreError)):
        Store.open(tmp_path).bucket(BUCKET).locate(np.array([0]))


IDS = [sample.id for sample in samples_of({BUCKET: 6})]


def list_of(store: Path) -> Path:
    (path,) = (store / "shards").glob("*.dropped-*")
    return path


def metadata_of(store: Path) -> dict[str, object]:
    path = list_of(store)
    return PagedFile(path, path.stat().st_size, DROPPED_FORMAT).metadata


def test_the_list_of_another_copy_is_refused_before_a_dropped_sample_is_given_out(tmp_path: Path) -> None:
    one, other = make_store(tmp_path / "one", samples_of({BUCKET: 6})).path, tmp_path / "other"
    shutil.copytree(one, other)
    drop(one, [IDS[1]])
    drop(other, [IDS[4]])
    assert list_of(one).stat().st_size == list_of(other).stat().st_size
    shutil.copy(list_of(other), list_of(one))
    with Loader(one, LoaderConfig(batch_size=1, verify=True)) as loader, pytest.raises(CorruptError, match="dropped-2 is not"):
        next(loader.forever())
    with pytest.raises(CorruptError, match=r"dropped-2 is not the file that the manifest lists.*restore the file"):
        ids_of(one)


def test_a_list_names_its_shard_and_another_shards_is_refused_whatever_the_manifest_says(tmp_path: Path) -> None:
    one = make_store(tmp_path / "one", samples_of({BUCKET: 6})).path
    drop(one, [IDS[1]])
    assert metadata_of(one)["shard_id"] == read_manifest(one).shards[0].shard_id
    other = make_store(tmp_path / "other", samples_of({BUCKET: 6})).path
    drop(other, [IDS[4]])
    replace_file(one, "dropped", list_of(other).read_bytes())
    with pytest.raises(CorruptError, match="belongs to another shard"):
        ids_of(one)


def test_a_merged_stores_list_names_its_shard(tmp_path: Path) -> None:
    store = make_store(tmp_path / "s", samples_of({BUCKET: 6})).path
    drop(store, [IDS[1]])
    merge(tmp_path / "merged", [store])
    assert metadata_of(tmp_path / "merged")["shard_id"] == read_manifest(store).shards[0].shard_id
    assert ids_of(tmp_path / "merged") == ids_of(store)


CONFIG = LoaderConfig(batch_size=3, epochs=1)
NUM_SHARDS = 24


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("many") / "many.store"
    make_store(path, *(samples_of({"train/64x64": 3}, f"{n}/") for n in range(NUM_SHARDS)))
    return path


def limit_maps(monkeypatch: pytest.MonkeyPatch, room: int) -> None:
    """Leave room for so many maps more than there are; what other tests have mapped or promised may go at any time."""
    monkeypatch.setattr(map_budget, "_FEW", 0)
    monkeypatch.setattr(map_budget, "_ranges", weakref.WeakSet())
    monkeypatch.setattr(map_budget, "max_maps", lambda: map_budget._in_use() + map_budget.SPARE_MAPS + room)


def maps_of(path: Path) -> list[str]:
    gc.collect()
    lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    return sorted({line.rpartition(".")[2] for line in lines if str(path) in line})


def read(path: Path) -> tuple[list[object], list[str], list[str]]:
    """Return what a loader delivers, what is mapped meanwhile, and the warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with Loader(path, CONFIG) as loader:
            found: list[object] = [(batch.step, batch.ids.tolist(), batch.latents.tolist()) for batch in loader]
            return found, maps_of(path), [str(one.message) for one in caught]


@pytest.mark.parametrize(
    ("room", "mapped", "is_warned"),
    [(10_000, ["extents", "lmdb"], False), (3 * NUM_SHARDS // 2, ["lmdb"], False), (NUM_SHARDS // 2, [], True)],
)
def test_what_cannot_be_mapped_is_known_when_a_loader_is_made_and_is_read_plainly(
    many: Path, monkeypatch: pytest.MonkeyPatch, room: int, mapped: list[str], *, is_warned: bool
) -> None:
    expected, _, _ = read(many)
    limit_maps(monkeypatch, room)
    found, maps, said = read(many)
    assert (found, maps) == (expected, mapped)
    assert [("vm.max_map_count" in one, "sysctl -w vm.max_map_count=" in one) for one in said] == [(True, True)] * is_warned


def test_after_a_map_is_refused_within_an_epoch_files_are_read_plainly(many: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, _, _ = read(many)
    real, left = address_range._mmap, [NUM_SHARDS // 2]

    def refusing(address: int | None, num_bytes: int, prot: int, flags: int, fd: int) -> int:
        if "lmdb" in (str(Path(f"/proc/self/fd/{fd}").readlink()) if fd >= 0 else ""):
            left[0] -= 1
            if left[0] < 0:
                raise address_range.MapRefusedError(f"{num_bytes} bytes of addresses cannot be mapped: Cannot allocate memory")
        return real(address, num_bytes, prot, flags, fd)

    monkeypatch.setattr(address_range, "_mmap", refusing)
    found, maps, said = read(many)
    assert (found, maps) == (expected, ["extents", "lmdb"])
    assert len(said) == 1
    assert "vm.max_map_count" in said[0]


def test_indexes_beyond_the_share_of_files_by_themselves_are_read(many: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(map_budget, "_single", set())  # what other tests have mapped may go at any time
    monkeypatch.setattr(map_budget, "max_maps", lambda: map_budget._SINGLE_SHARE * 5)
    monkeypatch.setattr(map_budget, "_FEW", 1 << 30)
    store = Store.open(many)
    names = [store.shards[n].name_of("train/64x64", 0) for n in range(NUM_SHARDS)]
    assert names == [Store.open(many, plain_reads=True).shards[n].name_of("train/64x64", 0) for n in range(NUM_SHARDS)]
    lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    assert sum(str(many) in line and line.endswith(".index") for line in lines) == 5


def test_plain_reads_map_nothing_at_all_and_read_the_same(many: Path) -> None:
    expected, _, _ = read(many)
    with Loader(Store.open(many), LoaderConfig(batch_size=3, epochs=1, plain_reads=True)) as loader:
        assert [(batch.step, batch.ids.tolist(), batch.latents.tolist()) for batch in loader] == expected
        assert loader._builder._store.shards[0].name_of("train/64x64", 0) is not None
        assert maps_of(many) == []


@pytest.mark.parametrize("kind", ["extents", "dropped-2", "index"])
def test_a_sidecar_under_plain_reads_that_is_truncated_or_cannot_be_read_is_an_error_that_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    from bucketline.store.change.commit import drop

    make_store(tmp_path / "s", samples_of({"train/64x64": 300}))
    drop(tmp_path / "s", [Store.open(tmp_path / "s").bucket("train/64x64").sample_ids(np.array([2]))[0]], dry_run=False)
    file = next((tmp_path / "s" / "shards").glob(f"*.{kind}"))

    def read_all() -> None:
        store = Store.open(tmp_path / "s", plain_reads=True)
        store.bucket("train/64x64").read(np.arange(299), "latent")
        assert store.shards[0].index.metadata

    read_all()
    real = os.preadv

    def failing(fd: int, buffers: list[memoryview], offset: int) -> int:
        if Path(f"/proc/self/fd/{fd}").readlink() == file:
            raise OSError(errno.EIO, "Input/output error")
        return real(fd, buffers, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", failing)
        with pytest.raises(StoreError, match=rf"{file.name} cannot be read at byte 0: Input/output error; the medium"):
            read_all()

    def shrinking(fd: int, buffers: list[memoryview], offset: int) -> int:
        if Path(f"/proc/self/fd/{fd}").readlink() == file:
            os.truncate(file, 100)  # after its length was compared
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", shrinking)
    with pytest.raises(StoreError, match=rf"{file.name} ends at byte 100, expected"):
        read_all()


class _Files:
    num_unmapped = 1


def test_maps_are_counted_while_another_thread_opens_more_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """`store verify` opens shards in several threads."""
    monkeypatch.setattr(map_budget, "max_maps", lambda: 1 << 30)
    monkeypatch.setattr(map_budget, "_FEW", 1 << 30)
    held = [_Files() for _ in range(2000)]
    for files in held:
        map_budget.promise(files)

    def open_files() -> None:
        for _ in range(10_000):
            held.append(_Files())
            map_budget.promise(held[-1])

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(1) as pool:
            opening = pool.submit(open_files)
            while not opening.done():
                assert map_budget.fits(1)
            opening.result()
    finally:
        sys.setswitchinterval(interval)
    assert map_budget._num_promised() >= len(held)
