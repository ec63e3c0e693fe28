"""Stores that say the same of themselves share a cache, and each is read as it is: a cache is keyed by place and digests."""

from __future__ import annotations

import itertools
import mmap
import shutil
import uuid
from collections.abc import Sequence
from pathlib import Path

import pytest

from bucketline.loader import Loader, LoaderConfig
from bucketline.store import Store
from bucketline.store.format.manifest import read_manifest
from bucketline.store.remote.cache.cached_shard import CachedShard
from bucketline.store.remote.urls import RemoteOptions
from bucketline.store.write import publish, shard_writer
from tests.kit import Sample, add_samples, make_sample, make_store, store_writer
from tests.object_storage import pushed
from tests.unit.loader.test_remote import bits
from tests.unit.store.remote.cache.lines import NUM_BYTES, open_shard

ROWS = {"train/64x64": 12}


def samples(prefix: str, version: int = 0) -> list[Sample]:
    return [make_sample(f"{prefix}{number}.png", "train/64x64", version=version) for number in range(12)]


def batches_of(place: Path | str, cache: Path, config: LoaderConfig | None = None) -> list[dict[str, object]]:
    config = config or LoaderConfig(batch_size=4, epochs=1, verify=True, cache=str(cache))
    with Loader(place, config) as loader:
        return bits(list(loader))


def with_equal_ids(path: Path, version: int, monkeypatch: pytest.MonkeyPatch) -> Store:
    """Make a store whose id, shards' ids, names and lengths are those of every other one that this made."""
    numbers = itertools.count(1)
    with monkeypatch.context() as patch:
        for module in (publish, shard_writer):
            patch.setattr(module.uuid, "uuid4", lambda: uuid.UUID(int=next(numbers)))
        return make_store(path, samples("a/", version))


def test_stores_at_two_urls_that_have_the_same_ids_share_no_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = (with_equal_ids(tmp_path / f"{name}.store", name, monkeypatch) for name in (1, 2))
    assert one.manifest.store_id == two.manifest.store_id
    assert one.manifest.shards[0].shard_id == two.manifest.shards[0].shard_id
    first, second = pushed(one.path, "1"), pushed(two.path, "2")
    cache = tmp_path / "cache"
    expected = [batches_of(store.path, cache) for store in (one, two)]
    assert expected[0] != expected[1]
    assert [batches_of(first, cache), batches_of(second, cache), batches_of(first, cache)] == [*expected, expected[0]]


def test_a_store_that_takes_another_ones_place_at_a_url_is_read_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = (with_equal_ids(tmp_path / f"{name}.store", name, monkeypatch) for name in (1, 2))
    url, cache = pushed(one.path, "a"), tmp_path / "cache"
    assert batches_of(url, cache) == batches_of(one.path, cache)
    shutil.rmtree(url.removeprefix("file://"))
    pushed(two.path, "a")
    assert batches_of(url, cache) == batches_of(two.path, cache)


def diverged(tmp_path: Path) -> tuple[Path, Path]:
    """Make two copies of a store, each with a shard of its own of the same name."""
    one, two = tmp_path / "one.store", tmp_path / "two.store"
    make_store(one, samples("a/"))
    shutil.copytree(one, two)
    for path, more in ((one, samples("one/")), (two, [*samples("two/"), *samples("three/")])):
        with store_writer(path, shard_names="g{}") as writer:
            add_samples(writer, more)
    assert [shard.name for shard in read_manifest(one).shards] == [shard.name for shard in read_manifest(two).shards]
    return one, two


def test_diverged_copies_are_read_at_once_through_one_cache(tmp_path: Path) -> None:
    places = diverged(tmp_path)
    urls = [pushed(path, path.name) for path in places]
    cache = tmp_path / "cache"
    expected = [batches_of(path, cache) for path in places]
    config = LoaderConfig(batch_size=4, epochs=1, verify=True, cache=str(cache))
    loaders = [Loader(url, config) for url in urls]
    found: list[list[dict[str, object]]] = [[], []]
    for pair in itertools.zip_longest(*loaders):  # batch by batch, in turns
        for own, batch in zip(found, pair, strict=True):
            own.extend(bits([batch]) if batch is not None else [])
    for loader in loaders:
        loader.close()
    assert found == expected


def test_a_file_that_another_process_has_mapped_keeps_its_bytes(tmp_path: Path) -> None:
    opened = open_shard(tmp_path / "cache")
    opened.read(0, 1)
    with opened.shard.path.open("rb") as file:
        own = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        before = own[:100]
        opened.shard.path.with_suffix(".lines-present").unlink()  # as one that was damaged, or is another shard's
        other = CachedShard(opened.shard.path, NUM_BYTES // 2, "f" * 32, opened.folder.locks)
        assert Path(f"/proc/self/fd/{file.fileno()}").stat().st_size == NUM_BYTES
        assert own[:100] == before
    assert not other.present.any()
    assert other.path.stat().st_size == NUM_BYTES // 2


def opened_at(url: str, cache: Path) -> Store:
    return Store.open(url, remote=RemoteOptions(cache=cache))


def requests_of(url: str, cache: Path, expected: Sequence[dict[str, object]]) -> int:
    """Read a store once; return how many lines were requested for that."""
    store = opened_at(url, cache)
    assert store.source is not None
    before = store.source.stats().requests
    with Loader(store, LoaderConfig(batch_size=4, epochs=1, verify=True)) as loader:
        assert bits(list(loader)) == list(expected)
    return store.source.stats().requests - before


def test_the_lines_of_unchanged_shards_serve_the_next_generation(tmp_path: Path) -> None:
    store, cache = tmp_path / "a.store", tmp_path / "cache"
    make_store(store, samples("a/"))
    url = pushed(store, "a")
    assert requests_of(url, cache, batches_of(store, cache)) == 1
    with store_writer(store, shard_names="g{}") as writer:
        add_samples(writer, samples("b/"))
        add_samples(writer, samples("a/", version=1)[:2])  # so that g0 has dropped rows now
    pushed(store, "a")
    assert requests_of(url, cache, batches_of(store, cache)) == 1  # the new shard's line
    assert requests_of(f"{url}/", cache, batches_of(store, cache)) == 0  # a slash at the end is the same place
