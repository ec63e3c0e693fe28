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
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from bucketline.errors import CorruptError, StoreError
from bucketline.loader import Loader, LoaderConfig
from bucketline.store import Store
from bucketline.store.change.commit import drop
from bucketline.store.change.merge import merge
from bucketline.store.format.block import bytes_digest
from bucketline.store.format.manifest import DroppedEntry, FileEntry, Manifest, dropped_path, read_manifest
from bucketline.store.shard import mapped as address_range
from bucketline.store.shard import mapped as map_budget
from bucketline.store.shard.meta import entry_checksums, index_dtype
from bucketline.store.shard.reader import RANGE_BYTES, as_keys, keys_of, search_index
from bucketline.store.shard.row_locator import BlockTable, _first_false
from bucketline.store.shard.sidecar import DroppedRows, Sidecar, encode_dropped, encode_sidecar
from tests.kit import dropped_list, flip_bit, ids_of, make_store, parts_of, replace_dropped, replace_file, samples_of

KIND = "bucketline.test/1"
LARGE = np.arange(3000, dtype="<u8") * 7
SMALL = np.arange(999 * 3, dtype="u1").reshape(999, 3)


def written(path: Path) -> Path:
    data = encode_sidecar([("large", "U64", LARGE), ("small", "U8", SMALL)], {"format": KIND, "groups": {"a": 1}})
    path.write_bytes(data)
    return path


def opened(path: Path) -> Sidecar:
    return Sidecar(path, path.read_bytes(), KIND)


def test_what_was_written_is_read(tmp_path: Path) -> None:
    file = opened(written(tmp_path / "x"))
    assert file.metadata == {"format": KIND, "groups": {"a": 1}}
    assert np.array_equal(file.column("large"), LARGE)
    assert np.array_equal(file.column("small"), SMALL)
    with pytest.raises(CorruptError, match=r"lacks the tensor 'middle'"):
        file.column("middle")
    with pytest.raises(CorruptError, match=r"is not a bucketline.index/1 file"):
        Sidecar("x", file._data, "bucketline.index/1")


def test_every_flipped_bit_is_noticed_by_the_files_own_checksums_and_by_the_manifests_digest(tmp_path: Path) -> None:
    data = written(tmp_path / "x").read_bytes()
    listed = FileEntry(num_bytes=len(data), digest=bytes_digest(data))
    Sidecar("x", data, KIND, listed)
    for bit in range(0, 8 * len(data), 8 * len(data) // 300 + 1):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CorruptError):
            Sidecar("x", bytes(changed), KIND)
        with pytest.raises(CorruptError, match="x is not the file that the manifest lists: its digest is"):
            Sidecar("x", bytes(changed), KIND, listed)
    with pytest.raises(CorruptError, match="is not the file"):
        Sidecar("x", data + b"\0", KIND, listed)


def test_each_entry_of_an_index_proves_itself_and_its_shard(store: Store) -> None:
    """By the end of the file alone: the entries are its last bytes, sorted, and seeded by the shard's id."""
    for shard in store.shards:
        data, form = shard.paths.meta.read_bytes(), index_dtype(0)
        entries = np.frombuffer(data[-shard.entry.samples * form.itemsize :], form)
        assert form.itemsize == 88
        assert np.array_equal(entries, shard.index)
        assert (np.diff(entries["digest"][:, 0].astype(int)) >= 0).all()
        assert np.array_equal(entry_checksums(entries, shard.entry.shard_id), entries["checksum"])
        assert not (entry_checksums(entries, "0" * 32) == entries["checksum"]).any()
        seed = int.from_bytes(bytes.fromhex(shard.entry.shard_id)[:8], "little")
        assert xxhash.xxh3_64_intdigest(entries[:1].tobytes()[:-8], seed) == entries["checksum"][0]


@given(data=st.data())
def test_a_search_in_the_index_finds_what_a_list_has(store: Store, data: st.DataObject) -> None:
    shard = store.shards[0]
    stored = [bytes(digest) for digest in shard.index["digest"]]
    wanted = data.draw(st.lists(st.sampled_from(stored) | st.binary(min_size=16, max_size=16), min_size=1, max_size=9))
    expected = [stored.index(key) if key in stored else -1 for key in wanted]
    assert shard.positions(as_keys(wanted)).tolist() == expected


@pytest.mark.parametrize("count", [1, 300, 50_000])
def test_an_index_is_searched_by_ranges_of_which_a_wrong_byte_is_refused(store: Store, count: int) -> None:
    entries = np.zeros(count, index_dtype(0))
    digests = np.sort(keys_of(np.random.default_rng(count).integers(0, 256, (count, 16), dtype="u1")))
    entries["digest"], entries["row"] = digests.view("u1").reshape(-1, 16), np.arange(count)
    listed = replace(store.shards[0].entry, samples=count, cut={}, meta=FileEntry(num_bytes=1000 + entries.nbytes, digest=""))
    entries["checksum"] = entry_checksums(entries, listed.shard_id)
    data, sizes = bytearray(1000) + entries.tobytes(), list[int]()

    def read(begin: int, end: int) -> bytes:
        sizes.append(end - begin)
        return bytes(data[begin:end])

    def rows_of(keys: NDArray[np.bytes_]) -> list[int]:
        sizes.clear()
        return sorted(search_index(read, "x", listed, np.sort(keys))["row"].tolist())

    absent = keys_of(np.random.default_rng(7).integers(0, 256, (9, 16), dtype="u1"))
    for row in {0, count // 3, count // 2, count - 1}:
        assert rows_of(digests[row : row + 1]) == [row]
        assert sum(sizes) <= RANGE_BYTES + RANGE_BYTES // 2, sizes
    few = np.unique(np.linspace(0, count - 1, 7).astype(int))
    assert rows_of(np.concatenate([digests[few], absent])) == few.tolist()
    assert rows_of(absent[:1]) == []
    data[1000 + 88 * (count // 3)] ^= 1  # in a digest: it would not be found
    with pytest.raises(CorruptError, match="do not match their checksums"):
        rows_of(digests[count // 3 :][:1])


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


def with_dropped(manifest: Manifest, path: Path, rows: list[list[int]]) -> Manifest:
    """Return the manifest as it would be without some rows of each shard, their list written."""
    if not any(rows):
        return manifest
    data = encode_dropped([np.array(own, "<u4") for own in rows if own])
    dropped = DroppedEntry(generation=7, num_bytes=len(data), digest=bytes_digest(data))
    dropped_path(path, dropped).write_bytes(data)
    shards = tuple(
        replace(entry, groups={**entry.groups, BUCKET: entry.groups[BUCKET]._replace(dropped=len(own))})
        for entry, own in zip(manifest.shards, rows, strict=True)
    )
    return replace(manifest, shards=shards, dropped=dropped)


@given(data=st.data())
def test_the_nth_live_row_is_the_one_that_counting_finds(store: Store, data: st.DataObject) -> None:
    totals = [shard.entry.groups[BUCKET].rows for shard in store.shards]
    gone = [sorted(data.draw(st.sets(st.integers(0, total - 1), max_size=total))) for total in totals]
    manifest = with_dropped(store.manifest, store.path, gone)
    rows = DroppedRows(store.path, manifest)
    table = BlockTable(manifest.shards, [shard.paths for shard in store.shards], dropped=[rows] * len(totals))
    for n, (total, own) in enumerate(zip(totals, gone, strict=True)):
        live = [row for row in range(total) if row not in own]
        ranks = np.arange(len(live))
        assert table.live_rows(BUCKET, np.full(len(live), n), ranks).tolist() == live
        assert rows.of(store.shards[n].name, BUCKET).tolist() == own
    for path in (store.path / "generations").glob("7-*.dropped"):
        path.unlink()


def test_rows_of_many_shards_are_found_as_they_are_one_by_one(store: Store) -> None:
    rows = np.random.default_rng(0).permutation(35)
    bucket = store.bucket(BUCKET)
    together = bucket.locate(rows)
    for n, row in enumerate(rows):
        alone = Store.open(store.path).bucket(BUCKET).locate(np.array([row]))
        for field in ("shard", "row", "data", "rows", "row_in_block"):
            assert getattr(together, field)[n] == getattr(alone, field)[0]
    part = together.where(slice(3, 9))
    assert part.row.tolist() == together.row[3:9].tolist()
    assert part.bucket == BUCKET


def test_damage_of_a_list_of_dropped_rows_is_noticed_when_it_is_used(tmp_path: Path) -> None:
    samples = samples_of({BUCKET: 30})
    make_store(tmp_path, samples)
    drop(tmp_path, [sample.id for sample in samples[5:9]])
    path = dropped_list(tmp_path)
    flip_bit(path, 8 * path.stat().st_size - 5)
    with pytest.raises(CorruptError, match=r"\.dropped is not the file that the manifest lists"):
        Store.open(tmp_path).bucket(BUCKET).locate(np.arange(3))


@pytest.mark.parametrize("kind", ["lmdb", "meta"])
def test_a_file_of_another_store_is_refused_by_name(tmp_path: Path, kind: str) -> None:
    for name in ("a", "b"):
        make_store(tmp_path / name, samples_of({BUCKET: 9}))
    theirs, ours = (tmp_path / name / "shards" / f"g0.{kind}" for name in ("b", "a"))
    assert theirs.stat().st_size == ours.stat().st_size
    ours.write_bytes(theirs.read_bytes())
    bucket = Store.open(tmp_path / "a").bucket(BUCKET)
    said = {"lmdb": "belongs to another shard: it has the id .*", "meta": "is not the file that the manifest lists.*"}[kind]
    with pytest.raises(CorruptError, match=rf"g0.{kind} {said} restore the file"):
        bucket.sample_ids(np.array([0]))


def test_a_sidecar_that_lists_fewer_blocks_than_the_manifest_are_refused_before_anything_is_read(tmp_path: Path) -> None:
    store = make_store(tmp_path, samples_of({BUCKET: 40}))
    shard = store.shards[0]
    tensors, metadata = parts_of(shard.paths.meta)
    blocks = {"offset", "length", "first_row", "rows"}
    short = [(name, dtype, values[:2] if name in blocks else values) for name, dtype, values in tensors]
    replace_file(tmp_path, "meta", encode_sidecar(short, {**metadata, "padding": "x" * 1000}))
    with pytest.raises(CorruptError, match=r"does not list the \d+ blocks that the manifest has"):
        Store.open(tmp_path).bucket(BUCKET).locate(np.array([0]))


IDS = [sample.id for sample in samples_of({BUCKET: 6})]


def test_the_list_of_another_copy_is_refused_before_a_dropped_sample_is_given_out(tmp_path: Path) -> None:
    one, other = make_store(tmp_path / "one", samples_of({BUCKET: 6})).path, tmp_path / "other"
    shutil.copytree(one, other)
    drop(one, [IDS[1]])
    drop(other, [IDS[4]])
    assert dropped_list(one).stat().st_size == dropped_list(other).stat().st_size
    shutil.copy(dropped_list(other), dropped_list(one))
    with Loader(one, LoaderConfig(batch_size=1, verify=True)) as loader, pytest.raises(CorruptError, match="dropped is not"):
        next(loader.forever())
    with pytest.raises(CorruptError, match=r"dropped is not the file that the manifest lists.*restore it from a copy"):
        ids_of(one)


@pytest.mark.parametrize("rows", [[2, 1], [1, 1], [1, 6], [1]])
def test_a_list_that_does_not_suit_the_manifest_is_refused_whatever_its_digest(tmp_path: Path, rows: list[int]) -> None:
    path = make_store(tmp_path / "s", samples_of({BUCKET: 6})).path
    drop(path, IDS[1:3])
    replace_dropped(path, encode_dropped([np.array([1, 5], "<u4")]))
    assert len(ids_of(path)) == 4
    with pytest.raises((CorruptError, StoreError), match=r"dropped: its rows are not in order|does not have the 2"):
        ids_of(replace_dropped(path, encode_dropped([np.array(rows, "<u4")])).parent.parent)


def test_a_generation_without_a_drop_lists_the_same_list_again(tmp_path: Path) -> None:
    path = make_store(tmp_path / "s", samples_of({BUCKET: 6})).path
    drop(path, [IDS[1]])
    before = read_manifest(path)
    make_store(path, samples_of({BUCKET: 3}, "more/"))
    after = read_manifest(path)
    assert (after.generation > before.generation, after.dropped) == (True, before.dropped)
    drop(path, [IDS[2]])
    assert [file.name for file in (path / "generations").glob("*.dropped")] != [dropped_list(path).name]
    assert len(ids_of(path)) == 7


def test_a_merged_store_has_the_list_of_all(tmp_path: Path) -> None:
    one = make_store(tmp_path / "one", samples_of({BUCKET: 6})).path
    other = make_store(tmp_path / "other", samples_of({BUCKET: 4}, "more/")).path
    drop(one, [IDS[1]])
    drop(other, [ids_of(other)[3]])
    merge(tmp_path / "merged", [one, other])
    assert sorted(ids_of(tmp_path / "merged")) == sorted([*ids_of(one), *ids_of(other)])


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
    [(10_000, ["lmdb", "meta"], False), (3 * NUM_SHARDS // 2, ["lmdb"], False), (NUM_SHARDS // 2, [], True)],
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
    assert (found, maps) == (expected, ["lmdb", "meta"])
    assert len(said) == 1
    assert "vm.max_map_count" in said[0]


def test_plain_reads_map_nothing_at_all_and_read_the_same(many: Path) -> None:
    expected, _, _ = read(many)
    with Loader(Store.open(many), LoaderConfig(batch_size=3, epochs=1, plain_reads=True)) as loader:
        assert [(batch.step, batch.ids.tolist(), batch.latents.tolist()) for batch in loader] == expected
        assert loader._builder._store.shards[0].name_of("train/64x64", 0) is not None
        assert maps_of(many) == []


@pytest.mark.parametrize("kind", ["meta", "dropped"])
def test_a_sidecar_under_plain_reads_that_is_truncated_or_cannot_be_read_is_an_error_that_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    from bucketline.store.change.commit import drop

    make_store(tmp_path / "s", samples_of({"train/64x64": 300}))
    drop(tmp_path / "s", [Store.open(tmp_path / "s").bucket("train/64x64").sample_ids(np.array([2]))[0]], dry_run=False)
    file = next((tmp_path / "s").glob(f"*/*.{kind}"))

    def read_all() -> None:
        store = Store.open(tmp_path / "s", plain_reads=True)
        store.bucket("train/64x64").read(np.arange(299), "latent")
        assert len(store.shards[0].index) == 300

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
