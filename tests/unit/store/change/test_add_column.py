"""A column added to rows that are there: bit for bit as given, in one generation, and nothing else is written again."""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from bucketline.errors import CorruptError, LockedError, StoreError, UsageError
from bucketline.files.atomic_write import FileLock, create_aside
from bucketline.loader import Loader, LoaderConfig
from bucketline.store import Store, add_column
from bucketline.store.change.commit import drop, restore
from bucketline.store.change.compact import collect, compact
from bucketline.store.change.merge import merge
from bucketline.store.change.repair import repair
from bucketline.store.format.block import bytes_digest
from bucketline.store.format.manifest import COPY_PREFIX, parse_manifest, read_manifest
from bucketline.store.read.samples import info, sample_file
from bucketline.store.remote.generations import newest_generation
from bucketline.store.remote.objects import ObjectFolder
from bucketline.store.remote.urls import RemoteOptions
from bucketline.store.shard.meta import column_files
from bucketline.store.shard.sidecar import encode_sidecar
from bucketline.store.sync.push_pull import pull, push
from bucketline.store.verify.verify import verify, verify_folder
from bucketline.store.write.column import ADDING_LOCK
from bucketline.store.write.publish import changing, lock_store
from bucketline.store.write.seal import rebuilt_meta
from tests.added_columns import bucket_of, expect_clean, expect_masks, mask_of
from tests.kit import (
    add_samples,
    faults,
    flip_bit,
    flip_row,
    make_store,
    parts_of,
    rewrite_manifest,
    samples_of,
    store_writer,
    tree,
    untouched,
)

if TYPE_CHECKING:
    from collections.abc import Callable

ROWS = {"train/64x64": 9, "train/64x96": 5, "val/64x96": 2}
IDS = [sample.id for prefix in ("a/", "b/") for sample in samples_of(ROWS, prefix)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    make_store(tmp_path / "s", samples_of(ROWS, "a/"), samples_of(ROWS, "b/"))
    return tmp_path / "s"


def never(sample_id: str) -> Any:
    raise AssertionError(f"{sample_id} was requested")


def shard_files(path: Path) -> dict[str, bytes]:
    return {name: data for name, data in tree(path).items() if name.startswith("shards/")}


@pytest.mark.parametrize("values", [mask_of, lambda one: torch.from_numpy(mask_of(one))], ids=["arrays", "tensors"])
def test_every_row_gets_its_value_and_no_file_is_written_again(values: Callable[[str], Any], path: Path) -> None:
    before, older = shard_files(path), read_manifest(path)
    added = add_column(path, "mask", values)
    assert (added.generation, added.rows, added.rows_without) == (older.generation + 1, len(IDS), 0)
    expect_masks(path, len(IDS))
    expect_clean(path)
    after = shard_files(path)
    assert {name: after[name] for name in before} == before
    assert len(after) == len(before) + 2 * len(older.shards)
    assert read_manifest(path, older.generation) == older


def test_the_same_call_again_changes_nothing_and_asks_for_nothing(path: Path) -> None:
    add_column(path, "mask", mask_of)
    with untouched(path):
        assert add_column(path, "mask", never).rows == 0


def test_rows_that_come_later_lack_it_until_the_same_call_fills_them(path: Path) -> None:
    add_column(path, "mask", mask_of)
    later = samples_of({"train/64x64": 3, "train/128x64": 2}, "c/")
    with store_writer(path) as writer:
        add_samples(writer, later)
    store = Store.open(path)
    with pytest.raises(StoreError, match=r"3 of 21 rows of train/64x64 .* no 'mask': they came after .*add_column"):
        store.bucket("train/64x64").read(np.arange(3), "mask")
    assert info(store)["added"] == {"mask": {"role": "mask", "rows": len(IDS)}}
    assert "mask" not in {column.name for column in store.bucket("train/128x64").columns}
    asked = []

    def value(sample_id: str) -> Any:
        asked.append(sample_id)
        return mask_of(sample_id)

    assert add_column(path, "mask", value).rows == len(later)
    assert sorted(asked) == sorted(sample.id for sample in later)
    expect_masks(path, len(IDS) + len(later))
    expect_clean(path)


def test_a_row_without_a_value_is_refused_by_name_and_the_shards_before_it_are_kept(path: Path) -> None:
    known = {one: mask_of(one) for one in IDS if one != "b/train/64x64/4.png"}
    before = tree(path)
    with pytest.raises(StoreError, match=r"sample 'b/train/64x64/4.png' has no value of 'mask'; nothing was added"):
        add_column(path, "mask", known.get)
    left = {name: data for name, data in tree(path).items() if not name.endswith("column.lock")}
    assert {name: left[name] for name in before} == before
    assert len(left) == len(before) + 2  # of the first shard, whose rows all have one
    add_column(path, "mask", {**known, "b/train/64x64/4.png": mask_of("b/train/64x64/4.png")}.get)
    expect_masks(path, len(IDS))
    expect_clean(path)


def given(value: Any = None) -> Callable[[str], Any]:
    return lambda one: mask_of(one) if value is None or one != IDS[3] else value


FLOATS = np.ones(3, dtype=np.float32)
ARRAYS = {  # what none is, and what is said of it
    "masked": (np.ma.masked_array(FLOATS, mask=[False, True, False]), "'mask' has masked values"),
    "sparse": (torch.eye(3).to_sparse(), "is a Tensor of dtype torch.float32, expected an array"),
    "meta": (torch.zeros(3, device="meta"), "is a Tensor of dtype torch.float32, expected an array"),
    "big-endian": (FLOATS.astype(">f4"), "is a ndarray of dtype >f4, expected an array of .* in this machine's order of bytes"),
    "ragged": ([[1.0], [1.0, 2.0]], "is a list, expected an array"),
}
REFUSED: dict[str, tuple[str, Any, dict[str, Any], str]] = {
    "another shape": ("mask", given(np.zeros((1, 8, 9), "u1")), {}, r"uint8 \[1, 8, 9\], the others of train/64x64 are"),
    "another dtype": ("mask", given(np.zeros((1, 8, 8), "f4")), {}, r"float32 \[1, 8, 8\], the others"),
    "no array": ("mask", given("mask.png"), {}, "give a numpy array or a tensor"),
    "not finite": ("features/f", lambda _: np.array([np.nan], dtype="f4"), {}, "is NaN or infinite"),
    "no function": ("mask", [mask_of(IDS[0])], {}, "a function of an id"),
    "a URL": ("mask", given(), {"store": "s3://bucket/a.store"}, "add the column to the store on a disk, and push it"),
    "no role": ("masks", given(), {}, "name is 'masks', expected mask, audio"),
    "a column of the rows": ("target", given(), {}, "has a column 'target' already, written with the rows of"),
    "a mirror image of nothing": ("mask/flipped", given(), {}, "mask/flipped"),
    **{
        name: ("mask", lambda _, own=own: own, {}, rf"sample '{IDS[0]}', column 'mask'.*{words}")
        for name, (own, words) in ARRAYS.items()
    },
}


@pytest.mark.parametrize(("role", "values", "options", "said"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_added_is_refused(role: str, values: Any, options: dict[str, Any], said: str, path: Path) -> None:
    before = (path / "manifest.json").read_bytes()
    with pytest.raises((UsageError, StoreError), match=said):
        add_column(options.get("store", path), role, values)
    assert (path / "manifest.json").read_bytes() == before


@pytest.mark.parametrize("shard_bytes", [1 << 24, 9_000])
def test_a_compaction_takes_the_column_along_and_gc_removes_its_old_files(shard_bytes: int, path: Path) -> None:
    add_column(path, "mask", mask_of)
    drop(path, IDS[1::4])
    left = len(IDS) - len(IDS[1::4])
    compact(path, shard_bytes=shard_bytes, gc_older_than_s=0)
    expect_masks(path, left)
    expect_clean(path)
    entries = read_manifest(path).shards
    assert column_files(path) == sorted(entry.column_shard("mask").name for entry in entries)
    assert read_manifest(path).dropped is None


def test_a_compaction_never_joins_rows_that_have_it_with_rows_that_lack_it(path: Path) -> None:
    add_column(path, "mask", mask_of)
    with store_writer(path) as writer:
        add_samples(writer, samples_of({"train/64x64": 3}, "c/"))
    compact(path, shard_bytes=1 << 24)
    assert [sorted(entry.added) for entry in read_manifest(path).shards] == [["mask"], []]
    assert compact(path, shard_bytes=1 << 24).rewritten == ()
    add_column(path, "mask", mask_of)
    assert len(compact(path, shard_bytes=1 << 24).written) == 1
    expect_masks(path, len(IDS) + 3)


def test_an_interrupted_rewriting_leaves_no_file_of_a_column(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add_column(path, "mask", mask_of)
    before = shard_files(path)
    monkeypatch.setattr("bucketline.store.change.compact._check_rows", lambda *_: never("a row"))
    with pytest.raises(AssertionError):
        compact(path, shard_bytes=1 << 24)
    assert shard_files(path) == before


def test_a_merge_has_the_columns_of_all_and_rows_that_lack_one_still_lack_it(path: Path, tmp_path: Path) -> None:
    add_column(path, "mask", mask_of)
    make_store(tmp_path / "other", samples_of(ROWS, "o/"))
    merge(tmp_path / "both", [tmp_path / "other", path])
    assert info(Store.open(tmp_path / "both"))["added"]["mask"]["rows"] == len(IDS)
    add_column(tmp_path / "both", "mask", mask_of)
    expect_masks(tmp_path / "both", len(IDS) + sum(ROWS.values()))
    expect_clean(tmp_path / "both")


def test_stores_with_the_column_in_two_forms_are_not_merged(path: Path, tmp_path: Path) -> None:
    add_column(path, "mask", mask_of)
    make_store(tmp_path / "other", samples_of(ROWS, "o/"))
    add_column(tmp_path / "other", "mask", lambda one: mask_of(one)[0])
    with pytest.raises(StoreError, match=r"added\.mask\.train/64x64\.shape"):
        merge(tmp_path / "both", [tmp_path / "other", path])


def test_an_earlier_generation_is_restored_without_it_and_again_with_it(path: Path) -> None:
    older = read_manifest(path).generation
    with_it = add_column(path, "mask", mask_of).generation
    restore(path, older)
    assert read_manifest(path).added == {}
    restore(path, with_it)
    expect_masks(path, len(IDS))
    expect_clean(path)


def damage(path: Path) -> str:
    located = Store.open(path).bucket("train/64x64").locate(np.array([4]), ["mask"]).added["mask"]
    assert located.spec is not None
    file = path / "shards" / f"{read_manifest(path).shards[0].column_shard('mask').name}.lmdb"
    flip_bit(file, 8 * int(located.offsets(located.spec, "mask")[0]) + 2)
    return file.name


def test_damage_is_named_by_sample_and_column(path: Path) -> None:
    add_column(path, "mask", mask_of)
    name = damage(path)
    (row,) = (fault for fault in faults(path) if fault.row is not None)
    assert (row.bucket, row.row, row.sample) == ("train/64x64", 4, "a/train/64x64/4.png")
    assert row.error == "the bytes of the row's mask do not match their checksum"
    assert any(name in fault.error for fault in faults(path))
    with pytest.raises(CorruptError, match=r"sample 'a/train/64x64/4.png'.* its mask do not match"):
        Store.open(path).bucket("train/64x64").read(np.arange(9), "mask", verify=True)
    store = Store.open(path)
    with pytest.raises(CorruptError, match=r"sample 'a/train/64x64/4.png': the bytes of its mask"):
        sample_file(store, 0, store.sample("a/train/64x64/4.png")[1])
    with pytest.raises(CorruptError, match=r"sample 'a/train/64x64/4.png', row 4 .*bytes of its mask"):
        compact(path, shard_bytes=1 << 24)


def test_values_of_another_shards_rows_are_found_by_their_ids(path: Path) -> None:
    add_column(path, "mask", mask_of)
    first, second = (entry.column_shard("mask") for entry in read_manifest(path).shards)
    for end in ("lmdb", "meta"):
        files = [path / "shards" / f"{entry.name}.{end}" for entry in (first, second)]
        files[0].write_bytes(files[1].read_bytes())
    errors = [fault.error for fault in faults(path)]
    assert any("the manifest says" in error for error in errors)
    with pytest.raises(CorruptError, match="is not the file that the manifest lists"):
        Store.open(path).bucket("train/64x64").read(np.arange(3), "mask")


def test_places_of_a_column_that_are_intact_but_wrong_are_named(path: Path) -> None:
    add_column(path, "mask", mask_of)
    first, *rest = read_manifest(path).shards
    meta = Store.open(path).shards[0].column_shard("mask").paths.meta
    tensors, metadata = parts_of(meta)
    data = encode_sidecar([(name, dtype, v + np.uint64(name == "first_row")) for name, dtype, v in tensors], metadata)
    meta.write_bytes(data)
    mask = replace(first.added["mask"], meta=replace(first.added["mask"].meta, digest=bytes_digest(data)))
    rewrite_manifest(path, shards=(replace(first, added={"mask": mask}), *rest))
    errors = [fault.error for fault in faults(path)]
    assert any(".meta is not what the shard's file gives" in error for error in errors)


def test_a_repair_takes_a_damaged_column_away_and_no_sample(path: Path) -> None:
    add_column(path, "mask", mask_of)
    damage(path)
    done = repair(path)
    assert done.shards[0].lost_columns == ("mask",)
    assert (done.samples, done.dropped, done.shards[0].is_replaced) == (len(IDS), 0, False)
    assert add_column(path, "mask", mask_of).rows == len(IDS) // 2
    expect_masks(path, len(IDS))


@pytest.mark.parametrize("suffix", [".meta"])
def test_a_repair_of_a_sidecar_keeps_the_column(path: Path, suffix: str) -> None:
    add_column(path, "mask", mask_of)
    with untouched(path / "shards"):
        sidecar = path / "shards" / f"{Store.open(path).shards[0].name}{suffix}"
        sidecar.unlink()
        done = repair(path)
        assert (done.shards[0].restored, done.shards[0].lost_columns, done.dropped) == ((sidecar.name,), (), 0)


def test_a_repair_of_the_rows_keeps_the_column_of_those_that_stay(path: Path) -> None:
    add_column(path, "mask", mask_of)
    flip_row(path, "train/64x64", 2)
    assert repair(path).dropped == 1
    expect_masks(path, len(IDS) - 1)


def test_a_sample_leaves_the_store_with_it(path: Path) -> None:
    from safetensors.numpy import load

    add_column(path, "mask", mask_of)
    store = Store.open(path)
    shard, record = store.sample(IDS[5])
    found = load(sample_file(store, store.shards.index(shard), record))
    assert np.array_equal(found["mask"], mask_of(IDS[5]))


@pytest.mark.usefixtures("no_wait")
def test_a_writer_at_the_same_time_is_named_and_the_values_are_kept_for_the_next_call(path: Path) -> None:
    lock = lock_store(path)
    with pytest.raises(LockedError, match=r"being written by another process .*the values are kept: the same call"):
        add_column(path, "mask", mask_of)
    lock.release()
    assert not read_manifest(path).added
    assert add_column(path, "mask", never).rows == len(IDS)
    expect_masks(path, len(IDS))
    expect_clean(path)


def test_a_pack_that_publishes_meanwhile_does_not_lose_its_rows(path: Path) -> None:
    later = samples_of({"train/64x64": 3}, "c/")

    def value(sample_id: str) -> Any:
        if sample_id == IDS[-1]:
            with store_writer(path) as writer:
                add_samples(writer, later)
        return mask_of(sample_id)

    last = Store.open(path).bucket("val/64x96").sample_ids(np.array([3]))
    assert bucket_of(last[0]) == "val/64x96"
    added = add_column(path, "mask", value)
    assert (added.rows, added.rows_without) == (len(IDS), 3)
    assert add_column(path, "mask", mask_of).rows == 3
    expect_masks(path, len(IDS) + 3)
    expect_clean(path)


@pytest.mark.parametrize("is_merged", [False, True])
def test_writers_that_start_meanwhile_leave_the_files_that_it_is_making(path: Path, tmp_path: Path, *, is_merged: bool) -> None:
    compact(path, shard_bytes=1 << 24)
    if is_merged:
        merge(tmp_path / "other", [path])
        path = tmp_path / "other"

    def value(sample_id: str) -> Any:
        for _ in range(2):
            with changing(path):
                pass
        return mask_of(sample_id)

    assert add_column(path, "mask", value).rows == len(IDS)
    expect_masks(path, len(IDS))
    expect_clean(path)


@pytest.mark.usefixtures("no_wait")
def test_a_call_meanwhile_leaves_the_files_that_a_compaction_is_making(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add_column(path, "mask", mask_of)
    begun: list[str] = []

    def rebuilt(making: Path, *arguments: Any) -> bytes:
        begun.append(making.name)
        with contextlib.suppress(LockedError):  # at its end: the compaction holds the store's lock
            if len(begun) == 1:
                add_column(path, "features/later", mask_of)
        return rebuilt_meta(making, *arguments)

    monkeypatch.setattr("bucketline.store.write.column.rebuilt_meta", rebuilt)
    compact(path, shard_bytes=1 << 24)
    assert begun[0].startswith(COPY_PREFIX)
    expect_masks(path, len(IDS))


@pytest.mark.parametrize("name", ["report.html", "shards/x.meta", "pending/x", "generations/9.json"])
def test_a_writer_removes_a_temporary_file_of_a_killed_process_and_none_of_a_running_one(name: str, path: Path) -> None:
    aside, fd = create_aside(path / name)
    with changing(path):
        assert aside.exists()
    os.close(fd)
    with changing(path):
        assert not aside.exists()


def test_two_calls_at_the_same_time_are_one_after_the_other(path: Path) -> None:
    with FileLock(path / "pending" / ADDING_LOCK), pytest.raises(LockedError, match="being written by another process"):
        add_column(path, "mask", never)


def test_what_a_failed_call_left_is_no_shard_and_gc_removes_it_once_no_call_is_under_way(path: Path) -> None:
    known = {one: mask_of(one) for one in IDS if one.startswith("a/")}
    with pytest.raises(StoreError):
        add_column(path, "mask", known.get)
    (left,) = column_files(path)
    assert any(left in stray.path for stray in verify(Store.open(path), lambda _: None).strays)
    with changing(path) as manifest:
        assert len(manifest.shards) == 2
    with FileLock(path / "pending" / ADDING_LOCK):
        compact(path, shard_bytes=1, gc_older_than_s=0)
    assert column_files(path) == [left]
    compact(path, shard_bytes=1, gc_older_than_s=0)
    assert column_files(path) == []


HOSTILE: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "no added column": (lambda d: d.update(added={}), "'mask'"),
    "a column of the rows": (lambda d: d["added"].update(latent=d["added"]["mask"]), "'latent' has the role 'mask'"),
    "a bucket": (lambda d: d["added"]["mask"]["buckets"].update({"train/8x8": {"dtype": "U8", "shape": []}}), "train/8x8"),
    "an unknown column": (lambda d: d["shards"][0]["added"].update(audio=d["shards"][0]["added"]["mask"]), "'audio'"),
    "fewer rows": (lambda d: d["shards"][0]["added"]["mask"]["groups"]["train/64x64"].__setitem__(0, 3), "3 rows of 'train"),
    "a bucket less": (lambda d: d["shards"][0]["added"]["mask"]["groups"].pop("train/64x64"), "lacks the rows of train/64x64"),
    "values that do not fit": (lambda d: d["added"]["mask"]["buckets"]["train/64x64"].update(shape=[1 << 30]), "cannot hold"),
    "a name that leads out": (lambda d: d["shards"][0]["added"]["mask"].update(shard_id="../../x"), "is not a shard id"),
}


@pytest.mark.parametrize(("edit", "said"), HOSTILE.values(), ids=HOSTILE)
def test_a_manifest_with_an_impossible_added_column_is_refused(edit: Callable[[Any], Any], said: str, path: Path) -> None:
    add_column(path, "mask", mask_of)
    document = json.loads((path / "manifest.json").read_text())
    edit(document)
    with pytest.raises(CorruptError, match=said):
        parse_manifest(json.dumps(document).encode(), "the manifest")


@pytest.mark.usefixtures("no_wait")
def test_rows_that_a_restore_brings_back_get_their_own_values_not_what_a_failed_call_left(path: Path) -> None:
    """They were dropped when that call wrote its files, which have zeros in their places."""
    whole = read_manifest(path).generation
    drop(path, [IDS[3]])
    with lock_store(path), pytest.raises(LockedError):
        add_column(path, "mask", mask_of)
    restore(path, whole)
    asked: list[str] = []

    def value(sample_id: str) -> Any:
        asked.append(sample_id)
        return mask_of(sample_id)

    add_column(path, "mask", value)
    assert asked == [one for one in IDS if one.startswith("a/")]  # the other shard's values are taken
    expect_masks(path, len(IDS))


def test_rows_that_are_restored_or_dropped_while_values_are_requested_never_get_zeros(path: Path) -> None:
    whole = read_manifest(path).generation
    drop(path, [IDS[3]])
    changes: list[Callable[[], object]] = [lambda: restore(path, whole), lambda: drop(path, [IDS[5]])]

    def value(sample_id: str) -> Any:
        if changes and sample_id.startswith(("b/", IDS[3])):
            changes.pop(0)()
        return mask_of(sample_id)

    assert add_column(path, "mask", value).rows_without == 15  # the shard that has a row again, and one less
    assert add_column(path, "mask", mask_of).rows_without == 0
    expect_masks(path, len(IDS) - 1)


# at a URL only the files of the column travel


@pytest.fixture
def remote(tmp_path: Path) -> RemoteOptions:
    return RemoteOptions(cache=tmp_path / "cache", cache_bytes=1 << 30)


@pytest.fixture
def pushed(path: Path, tmp_path: Path) -> ObjectFolder:
    """The store at a URL, its first copy pulled to `pulled`, then with masks."""
    folder = ObjectFolder.open((tmp_path / "bucket" / "a.store").as_uri())
    push(path, folder)
    pull(folder, tmp_path / "pulled")
    add_column(path, "mask", mask_of)
    assert push(path, folder).files == 2 * 2  # of each shard
    return folder


def test_a_column_is_pulled_alone_and_read_through_the_cache(
    pushed: ObjectFolder, remote: RemoteOptions, tmp_path: Path
) -> None:
    pulled = pull(pushed, tmp_path / "pulled")
    new = [file.num_bytes for file in pushed.names("shards") if file.name.count(".") == 2]
    assert (pulled.is_update, pulled.num_bytes) == (True, sum(new))
    expect_masks(tmp_path / "pulled", len(IDS))
    expect_clean(tmp_path / "pulled")
    expect_masks(pushed.url, len(IDS), remote)
    assert verify_folder(pushed, lambda _: None).corrupt == ()
    config = LoaderConfig(batch_size=5, epochs=1, columns=("target", "mask"), verify=True, window=4096)
    store = Store.open(pushed.url, remote=remote)
    with Loader(store, config) as loader:
        for batch in loader.forever():
            for digest, mask in zip(batch.ids.numpy(), batch.columns["mask"].numpy(), strict=True):
                found = store.find_digest(digest.tobytes())
                assert found is not None
                assert mask.tobytes() == mask_of(found[1].id).tobytes()


def test_a_restoration_a_drop_a_compaction_and_gc_at_the_url_keep_it(pushed: ObjectFolder, remote: RemoteOptions) -> None:
    with_masks = newest_generation(pushed).generation
    restore(pushed, with_masks - 1)
    assert newest_generation(pushed).added == {}
    restore(pushed, with_masks)
    expect_masks(pushed.url, len(IDS), remote)
    drop(pushed, ["a/train/64x64/3.png"])
    compact(pushed, shard_bytes=1 << 24)
    collect(pushed, 0)
    expect_masks(pushed.url, len(IDS) - 1, remote)
    assert verify_folder(pushed, lambda _: None).corrupt == ()
    assert len(list(pushed.names("shards"))) == 2 + 2
    with pytest.raises(StoreError):
        restore(pushed, with_masks)
