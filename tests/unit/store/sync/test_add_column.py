"""A column added to a store at a URL: only its files travel, and writers at the same time lose nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from bucketline.errors import StoreError
from bucketline.loader import Loader, LoaderConfig
from bucketline.store import Store, add_column
from bucketline.store.change.commit import restore
from bucketline.store.change.compact import compact
from bucketline.store.change.drop import drop
from bucketline.store.change.garbage_collect import collect
from bucketline.store.remote.generations import newest_generation
from bucketline.store.remote.objects import ObjectFolder
from bucketline.store.remote.urls import RemoteOptions
from bucketline.store.sync.push_pull import pull, push
from bucketline.store.verify.verify import verify_folder
from tests.added_columns import expect_clean, expect_masks, mask_of
from tests.kit import make_store, samples_of

if TYPE_CHECKING:
    from pathlib import Path


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


def is_clean(objects: ObjectFolder) -> bool:
    return verify_folder(objects, lambda _: None).corrupt == ()


@pytest.fixture
def with_masks(own: Path, objects: ObjectFolder) -> int:
    """Add masks to the store at the URL, and return its generation."""
    added = add_column(own, "mask", mask_of)
    push(own, objects)
    return added.generation


def test_it_is_read_through_the_cache(objects: ObjectFolder, remote: RemoteOptions, with_masks: int) -> None:
    assert newest_generation(objects).generation == with_masks
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


def test_a_push_and_a_pull_send_only_the_new_files(own: Path, objects: ObjectFolder, tmp_path: Path) -> None:
    pull(objects, tmp_path / "pulled")
    add_column(own, "mask", mask_of)
    sent = push(own, objects)
    assert sent.files == 2 * PER_SHARD
    pulled = pull(objects, tmp_path / "pulled")
    assert (pulled.is_update, pulled.num_bytes) == (True, sent.num_bytes)
    expect_masks(tmp_path / "pulled", NUM)
    expect_clean(tmp_path / "pulled")


def test_a_drop_a_compaction_and_gc_at_the_url_keep_it(objects: ObjectFolder, remote: RemoteOptions, with_masks: int) -> None:
    drop(objects, ["a/train/64x64/3.png"])
    compact(objects, shard_bytes=1 << 24)
    collect(objects, 0)
    expect_masks(objects.url, NUM - 1, remote)
    assert is_clean(objects)
    assert len(list(objects.names("shards"))) == 3 + PER_SHARD
    with pytest.raises(StoreError):
        restore(objects, with_masks)


def test_an_earlier_generation_at_the_url_is_restored_with_and_without_it(
    objects: ObjectFolder, remote: RemoteOptions, with_masks: int
) -> None:
    restore(objects, with_masks - 1)
    assert newest_generation(objects).added == {}
    restore(objects, with_masks)
    expect_masks(objects.url, NUM, remote)
