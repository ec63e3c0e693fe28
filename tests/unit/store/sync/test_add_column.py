"""A column added to a store at a URL: only its files travel, and writers at the same time lose nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from bucketline.errors import StoreError
from bucketline.loader import Loader, LoaderConfig
from bucketline.store import Store, add_column
from bucketline.store.change.compact import compact
from bucketline.store.change.drop import drop
from bucketline.store.change.garbage_collect import collect
from bucketline.store.change.restore import restore
from bucketline.store.remote.generations import newest_generation
from bucketline.store.remote.objects import ObjectFolder
from bucketline.store.remote.urls import RemoteOptions
from bucketline.store.sync.pull import pull
from bucketline.store.sync.push import push
from bucketline.store.verify.verify import verify_folder
from tests.added_columns import expect_clean, expect_masks, mask_of
from tests.kit import make_store, samples_of

if TYPE_CHECKING:
    from pathlib import Path

    from tests.object_storage import S3Bucket

ROWS = {"train/64x64": 9, "train/64x96": 5}
NUM = 2 * sum(ROWS.values())
PER_SHARD = 2  # files of an added column


@pytest.fixture
def own(tmp_path: Path) -> Path:
    return make_store(tmp_path / "own", samples_of(ROWS, "a/"), samples_of(ROWS, "b/")).path


@pytest.fixture
def remote(tmp_path: Path) -> RemoteOptions:
    return RemoteOptions(cache=tmp_path / "cache", cache_bytes=1 << 30)


@pytest.fixture
def objects(own: Path, tmp_path: Path) -> ObjectFolder:
    folder = ObjectFolder.open((tmp_path / "bucket" / "a.store").as_uri())
    push(own, folder)
    return folder


def never(sample_id: str) -> Any:
    raise AssertionError(f"{sample_id} was requested")


def is_clean(objects: ObjectFolder) -> bool:
    return verify_folder(objects, lambda _: None).corrupt == ()


def test_it_is_added_and_read_through_the_cache(objects: ObjectFolder, tmp_path: Path, remote: RemoteOptions) -> None:
    before = {entry.name: entry.modified_s for entry in objects.names("shards")}
    added = add_column(objects.url, "mask", mask_of, remote=remote, work=tmp_path / "work")
    assert (added.rows, added.rows_without) == (NUM, 0)
    after = {entry.name: entry.modified_s for entry in objects.names("shards")}
    assert len(after) == len(before) + 2 * PER_SHARD
    assert {name: after[name] for name in before} == before
    expect_masks(objects.url, NUM, remote)
    assert is_clean(objects)
    config = LoaderConfig(batch_size=5, epochs=1, columns=("target", "mask"), verify=True, window=4096)
    store = Store.open(objects.url, remote=remote)
    with Loader(store, config) as loader:
        for batch in loader.forever():
            for digest, mask in zip(batch.ids.numpy(), batch.columns["mask"].numpy(), strict=True):
                found = store.find_digest(digest.tobytes())
                assert found is not None
                assert mask.tobytes() == mask_of(found[1].id).tobytes()
    assert add_column(objects.url, "mask", never, remote=remote, work=tmp_path / "work").rows == 0


def test_it_is_added_in_a_bucket_of_s3(s3: S3Bucket, own: Path, tmp_path: Path) -> None:
    push(own, s3.folder("a.store"))
    options = s3.options
    pairs = [(sample.id, mask_of(sample.id)) for prefix in ("b/", "a/") for sample in samples_of(ROWS, prefix)]
    assert add_column(s3.url("a.store"), "mask", pairs, remote=options, work=tmp_path / "work").rows == NUM
    pull(s3.folder("a.store"), tmp_path / "pulled")
    expect_masks(tmp_path / "pulled", NUM)


def test_a_push_and_a_pull_send_only_the_new_files(own: Path, objects: ObjectFolder, tmp_path: Path) -> None:
    pull(objects, tmp_path / "pulled")
    add_column(own, "mask", mask_of)
    sent = push(own, objects).sent
    assert (sent.files, sent.files_there) == (2 * PER_SHARD, 6)
    pulled = pull(objects, tmp_path / "pulled")
    assert (pulled.is_update, pulled.num_bytes) == (True, sent.num_bytes)
    expect_masks(tmp_path / "pulled", NUM)
    expect_clean(tmp_path / "pulled")


def test_a_drop_a_compaction_and_gc_at_the_url_keep_it(objects: ObjectFolder, tmp_path: Path, remote: RemoteOptions) -> None:
    added = add_column(objects.url, "mask", mask_of, remote=remote, work=tmp_path / "work")
    drop(objects, ["a/train/64x64/3.png"])
    compact(objects, shard_bytes=1 << 24)
    collect(objects, 0)
    expect_masks(objects.url, NUM - 1, remote)
    assert is_clean(objects)
    assert len(list(objects.names("shards"))) == 3 + PER_SHARD
    with pytest.raises(StoreError):
        restore(objects, added.generation)


def test_an_earlier_generation_at_the_url_is_restored_with_and_without_it(
    objects: ObjectFolder, tmp_path: Path, remote: RemoteOptions
) -> None:
    older = newest_generation(objects).generation
    added = add_column(objects.url, "mask", mask_of, remote=remote, work=tmp_path / "work")
    restore(objects, older)
    assert newest_generation(objects).added == {}
    restore(objects, added.generation)
    expect_masks(objects.url, NUM, remote)


def test_the_loser_of_a_race_adds_it_to_the_winners_generation(
    objects: ObjectFolder, tmp_path: Path, remote: RemoteOptions
) -> None:
    dropped: list[str] = []

    def value(sample_id: str) -> Any:
        if not dropped:
            dropped.append("b/train/64x64/1.png")
            drop(objects, dropped)
        return mask_of(sample_id)

    assert add_column(objects.url, "mask", value, remote=remote, work=tmp_path / "work").rows == NUM
    expect_masks(objects.url, NUM - 1, remote)
    assert is_clean(objects)


def test_a_race_with_a_compaction_leaves_its_rows_for_the_next_call(
    objects: ObjectFolder, tmp_path: Path, remote: RemoteOptions
) -> None:
    compacted: list[object] = []

    def value(sample_id: str) -> Any:
        if not compacted:
            compacted.append(compact(objects, shard_bytes=1 << 24))
        return mask_of(sample_id)

    assert add_column(objects.url, "mask", value, remote=remote, work=tmp_path / "work").rows_without == NUM
    assert add_column(objects.url, "mask", mask_of, remote=remote, work=tmp_path / "work").rows == NUM
    expect_masks(objects.url, NUM, remote)


def test_what_a_call_had_made_before_it_failed_is_not_made_again(
    objects: ObjectFolder, tmp_path: Path, remote: RemoteOptions
) -> None:
    def half(sample_id: str) -> Any:
        if sample_id.startswith("b/"):
            raise ZeroDivisionError
        return mask_of(sample_id)

    with pytest.raises(ZeroDivisionError) as failed:
        add_column(objects.url, "mask", half, remote=remote, work=tmp_path / "work")
    assert failed.value.__notes__ == ["This was the value of 'mask' for sample 'b/train/64x64/0.png'."]
    assert newest_generation(objects).added == {}

    def rest(sample_id: str) -> Any:
        return never(sample_id) if sample_id.startswith("a/") else mask_of(sample_id)

    assert add_column(objects.url, "mask", rest, remote=remote, work=tmp_path / "work").rows == NUM
    expect_masks(objects.url, NUM, remote)
    assert not list((tmp_path / "work" / "shards").iterdir())


def test_errors_name_the_url(objects: ObjectFolder, tmp_path: Path, remote: RemoteOptions) -> None:
    with pytest.raises(StoreError, match=rf"28 of 28 rows of {objects.url} have no value of 'mask'"):
        add_column(objects.url, "mask", {}, remote=remote, work=tmp_path / "work")
