"""New clients of a service get the newest generation, running ones keep theirs, and a state gets its own while that exists.

A generation that was superseded is let go when its last client has gone, so what `store compact --gc` removes is freed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from bucketline.errors import StoreError
from bucketline.loader import Loader, LoaderConfig
from bucketline.loader.service.client import ServiceBackend
from bucketline.loader.service.links import ChildLink
from bucketline.store import Store
from bucketline.store.change.compact import compact
from bucketline.store.change.drop import drop
from bucketline.store.remote.objects import ObjectFolder
from bucketline.store.remote.urls import RemoteOptions
from bucketline.store.sync.push_pull import push
from tests.kit import make_store, samples_of
from tests.leftovers import wait_until
from tests.serving import serving, serving_here

CONFIG = LoaderConfig(batch_size=2, epochs=3, prefetch_bytes=1)
FEW = LoaderConfig(batch_size=2, prefetch_bytes=1)


def mapped(pid: int, path: Path, *, deleted: bool) -> int:
    """Count a process's maps of a store's files, of those that are deleted or of the others."""
    lines = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8").splitlines()
    return sum(str(path) in line and line.endswith("(deleted)") == deleted for line in lines)


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


@pytest.mark.parametrize("how", ["loader serve", "a private service"])
@pytest.mark.slow
def test_what_was_collected_is_unmapped_once_its_last_client_has_gone(tmp_path: Path, how: str) -> None:
    path = tmp_path / "s.store"
    make_store(path, samples_of({"train/64x64": 40}, "a/"), samples_of({"train/64x64": 40}, "b/"))
    with serving(tmp_path / "sock", path) as process:
        service = tmp_path / "sock" if how == "loader serve" else "auto"
        with Loader(path, CONFIG, service=service) as loader, Loader(path, CONFIG, service=tmp_path / "sock") as other:
            iterators = [iter(one) for one in (loader, other)]  # held: one that is dropped is ended
            assert [next(batches).step for batches in iterators] == [0, 0]
            backend = loader._backend
            assert isinstance(backend, ServiceBackend)
            pid = backend.link._process.pid if isinstance(backend.link, ChildLink) else process.pid
            supersede(path)
            assert mapped(pid, path, deleted=True) > 0
            loader._end_stream()
            other.close()
            assert wait_until(lambda: mapped(pid, path, deleted=True) == 0)
            with Loader(path, CONFIG, service=tmp_path / "sock") as fresh:
                assert next(iter(fresh)).step == 0


@pytest.mark.slow
def test_a_generation_that_is_superseded_while_nobody_reads_it_is_let_go_too_and_the_newest_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "s.store"
    make_store(path, samples_of({"train/64x64": 40}, "a/"))
    with serving(tmp_path / "sock", path) as process:
        for _ in range(2):
            with Loader(path, CONFIG, service=tmp_path / "sock") as loader:
                assert next(loader.forever()).step == 0
            assert wait_until(lambda: mapped(process.pid, path, deleted=False) > 0)
        supersede(path)
        assert wait_until(lambda: mapped(process.pid, path, deleted=True) == mapped(process.pid, path, deleted=False) == 0)


def epoch_of(loader: Loader) -> list[list[object]]:
    return [batch.ids.tolist() for batch in loader]


def test_a_new_client_gets_the_newest_generation_though_what_was_served_before_was_collected(path: Path, address: str) -> None:
    for _ in range(2):
        supersede(path)
        with Loader(path, FEW) as local, Loader(None, FEW, service=address) as far:
            assert far.state_dict() == local.state_dict()
            assert epoch_of(far) == epoch_of(local) != []


def test_a_client_keeps_its_generation_and_a_state_gets_its_own_as_long_as_its_files_exist(path: Path, address: str) -> None:
    with Loader(path, FEW) as local, Loader(None, FEW, service=address) as far:
        assert epoch_of(far) == epoch_of(local)
        drop_half(path)
        assert epoch_of(far) == epoch_of(local)
        state = far.state_dict()
        with Loader(None, FEW, service=address) as newer:
            assert len(newer) < len(far)
            newer.load_state_dict(state)
            assert epoch_of(newer) == epoch_of(local)
            batches, expected = far.forever(), epoch_of(local)
            found = [next(batches).ids.tolist()]
            compact(path, shard_bytes=1 << 20, gc_older_than_s=0.0)
            found += [next(batches).ids.tolist() for _ in expected[1:]]
        with Loader(None, FEW, service=address) as newest, pytest.raises(StoreError, match="has no generation 2 any more"):
            newest.load_state_dict(state)
    assert len(found) == len(expected)


def test_a_new_client_of_a_url_gets_the_newest_generation(path: Path, tmp_path: Path) -> None:
    url, remote = f"file://{tmp_path}/pushed.store", RemoteOptions(cache=tmp_path / "cache", cache_bytes=1 << 30)
    push(path, ObjectFolder.open(url))
    with serving_here(tmp_path, url, remote=remote) as found:
        with Loader(None, FEW, service=found.tcp) as far:
            before = len(far)
        drop_half(path)
        push(path, ObjectFolder.open(url))
        with Loader(None, FEW, service=found.tcp) as far, Loader(path, FEW) as local:
            assert len(far) == len(local) < before
