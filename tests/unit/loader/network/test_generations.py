"""New clients of a server get the newest generation, running ones keep theirs, and a state gets its own while that exists."""

from __future__ import annotations

import gc
import weakref
from typing import TYPE_CHECKING

import numpy as np
import pytest

from bucketline.errors import StoreError
from bucketline.loader import Loader, LoaderConfig, RemoteLoader
from bucketline.loader.network import listener as listener_module
from bucketline.loader.network.listener import Security, listening
from bucketline.store import Store
from bucketline.store.change.compact import compact
from bucketline.store.change.drop import drop
from bucketline.store.remote.objects import ObjectFolder
from bucketline.store.remote.urls import RemoteOptions
from bucketline.store.sync.push import push
from tests.kit import make_store, samples_of
from tests.leftovers import wait_until

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
def port(path: Path) -> Iterator[int]:
    with listening("0", [path], Security()) as found:
        yield found.port


def drop_half(path: Path) -> None:
    bucket = Store.open(path).bucket("train/64x64")
    drop(path, bucket.sample_ids(np.arange(bucket.num_rows // 2)))


def supersede(path: Path) -> None:
    """Publish new generations, and remove the files that only the one before needs."""
    drop_half(path)
    compact(path, shard_bytes=1 << 20, gc_older_than_s=0.0)


def epoch_of(loader: Loader | RemoteLoader) -> list[list[object]]:
    return [batch.ids.tolist() for batch in loader]


def test_a_new_client_gets_the_newest_generation_though_what_was_served_before_was_collected(path: Path, port: int) -> None:
    for _ in range(2):
        supersede(path)
        with Loader(path, CONFIG) as local, RemoteLoader(str(port), CONFIG, deadline_s=5) as far:
            assert far.state_dict() == local.state_dict()
            assert epoch_of(far) == epoch_of(local) != []


def test_a_client_keeps_its_generation_and_a_state_gets_its_own_as_long_as_its_files_exist(path: Path, port: int) -> None:
    with Loader(path, CONFIG) as local, RemoteLoader(str(port), CONFIG, deadline_s=5) as far:
        assert epoch_of(far) == epoch_of(local)
        drop_half(path)
        assert epoch_of(far) == epoch_of(local)
        state = far.state_dict()
        with RemoteLoader(str(port), CONFIG, deadline_s=5) as newer:
            assert len(newer) < len(far)
            newer.load_state_dict(state)
            assert epoch_of(newer) == epoch_of(local)
            batches, expected = far.forever(), epoch_of(local)
            found = [next(batches).ids.tolist()]
            compact(path, shard_bytes=1 << 20, gc_older_than_s=0.0)
            found += [next(batches).ids.tolist() for _ in expected[1:]]
            with pytest.raises(StoreError, match=r"generation 2 cannot be read completely; .* open generation 4"):
                newer.load_state_dict(state)
    assert len(found) == len(expected)


def test_a_new_client_of_a_url_gets_the_newest_generation(path: Path, tmp_path: Path) -> None:
    url, remote = f"file://{tmp_path}/pushed.store", RemoteOptions(cache=tmp_path / "cache", cache_bytes=1 << 30)
    push(path, ObjectFolder.open(url))
    with listening("0", [url], Security(), remote) as found:
        with RemoteLoader(str(found.port), CONFIG, deadline_s=5) as far:
            before = len(far)
        drop_half(path)
        push(path, ObjectFolder.open(url))
        with RemoteLoader(str(found.port), CONFIG, deadline_s=5) as far, Loader(path, CONFIG) as local:
            assert len(far) == len(local) < before


def test_a_generation_that_was_superseded_is_let_go_once_nobody_reads_it(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener_module, "ALIVE_EVERY_S", 0.05)
    opened: list[weakref.ref[Store]] = []
    init = Store.__init__

    def noted(self: Store, *given: object, **named: object) -> None:
        opened.append(weakref.ref(self))
        init(self, *given, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(Store, "__init__", noted)
    with listening("0", [path], Security()) as found:
        (first,) = opened
        with RemoteLoader(str(found.port), CONFIG, deadline_s=5) as far:
            batches = far.forever()
            next(batches)
            drop_half(path)
            assert next(batches).step == 1
            assert first() is not None
            del batches
        assert wait_until(lambda: first() is None)
        gc.collect()
        assert any(one() is not None for one in opened)  # the newest
