"""New clients of a server get the newest generation, running ones keep theirs, and a state gets its own while that exists."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from bucketline.errors import StoreError
from bucketline.loader import Loader, LoaderConfig
from bucketline.store import Store
from bucketline.store.change.compact import compact
from bucketline.store.change.drop import drop
from bucketline.store.remote.objects import ObjectFolder
from bucketline.store.remote.urls import RemoteOptions
from bucketline.store.sync.push import push
from tests.kit import make_store, samples_of
from tests.serving import serving_here

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

CONFIG = LoaderConfig(batch_size=2, prefetch_bytes=1)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    found = tmp_path / "s.store"
    make_store(found, samples_of({"train/64x64": 24}, "a/"), samples_of({"train/64x64": 24}, "b/"))
    return found


@pytest.fixture
def address(path: Path, tmp_path: Path) -> Iterator[str]:
    with serving_here(tmp_path, path) as found:
        yield found.tcp


def drop_half(path: Path) -> None:
    bucket = Store.open(path).bucket("train/64x64")
    drop(path, bucket.sample_ids(np.arange(bucket.num_rows // 2)))


def supersede(path: Path) -> None:
    """Publish new generations, and remove the files that only the one before needs."""
    drop_half(path)
    compact(path, shard_bytes=1 << 20, gc_older_than_s=0.0)


def epoch_of(loader: Loader) -> list[list[object]]:
    return [batch.ids.tolist() for batch in loader]


def test_a_new_client_gets_the_newest_generation_though_what_was_served_before_was_collected(path: Path, address: str) -> None:
    for _ in range(2):
        supersede(path)
        with Loader(path, CONFIG) as local, Loader(None, CONFIG, service=address) as far:
            assert far.state_dict() == local.state_dict()
            assert epoch_of(far) == epoch_of(local) != []


def test_a_client_keeps_its_generation_and_a_state_gets_its_own_as_long_as_its_files_exist(path: Path, address: str) -> None:
    with Loader(path, CONFIG) as local, Loader(None, CONFIG, service=address) as far:
        assert epoch_of(far) == epoch_of(local)
        drop_half(path)
        assert epoch_of(far) == epoch_of(local)
        state = far.state_dict()
        with Loader(None, CONFIG, service=address) as newer:
            assert len(newer) < len(far)
            newer.load_state_dict(state)
            assert epoch_of(newer) == epoch_of(local)
            batches, expected = far.forever(), epoch_of(local)
            found = [next(batches).ids.tolist()]
            compact(path, shard_bytes=1 << 20, gc_older_than_s=0.0)
            found += [next(batches).ids.tolist() for _ in expected[1:]]
        with Loader(None, CONFIG, service=address) as newest, pytest.raises(StoreError, match="has no generation 2 any more"):
            newest.load_state_dict(state)
    assert len(found) == len(expected)


def test_a_new_client_of_a_url_gets_the_newest_generation(path: Path, tmp_path: Path) -> None:
    url, remote = f"file://{tmp_path}/pushed.store", RemoteOptions(cache=tmp_path / "cache", cache_bytes=1 << 30)
    push(path, ObjectFolder.open(url))
    with serving_here(tmp_path, url, remote=remote) as found:
        with Loader(None, CONFIG, service=found.tcp) as far:
            before = len(far)
        drop_half(path)
        push(path, ObjectFolder.open(url))
        with Loader(None, CONFIG, service=found.tcp) as far, Loader(path, CONFIG) as local:
            assert len(far) == len(local) < before
