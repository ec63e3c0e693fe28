"""Batches of a store in object storage are those of the store on the disk, however it is read, and whatever the cache holds."""

from __future__ import annotations

import importlib
import pickle
import sys
import time
from dataclasses import fields, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from bucketline.errors import StateError, StoreError, UsageError
from bucketline.loader import Loader, LoaderConfig, WeightedStore
from bucketline.loader.collate.batch_builder import BatchBuilder
from bucketline.store import Store
from bucketline.store.format.text import TEXT_GROUP
from bucketline.store.remote.cache import folder as folder_module
from bucketline.store.remote.cache.cached_shard import ABSENT
from bucketline.store.remote.urls import RemoteOptions
from tests import object_storage
from tests.commands import spawn
from tests.kit import ANY, make_store, samples_of
from tests.leftovers import in_child
from tests.serving import serving_here

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bucketline.loader import Batch

ROWS = {"train/64x64": 60, "train/96x64": 21}
LINE_BYTES = 1 << 12  # in these tests, so that a small store has many
WITH_LINES = (
    "store.format.block",
    *(f"store.remote.cache.{name}" for name in ("cached_shard", "batch_lines", "remote_source", "folder")),
    "loader.plan.plan",
)
for _name in (*WITH_LINES, "store.remote.cache.fetch"):  # or what a test imports first would keep its short lines
    importlib.import_module(f"bucketline.{_name}")


@pytest.fixture(autouse=True)
def small_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in WITH_LINES:
        monkeypatch.setattr(f"bucketline.{name}.LINE_BYTES", LINE_BYTES)
    monkeypatch.setattr(folder_module, "LEAST_BYTES", 4 * LINE_BYTES)


@pytest.fixture(params=[1, 3])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == 1:
        return make_store(tmp_path / "a.store", samples_of(ROWS, "a/"), samples_of(ROWS, "b/"))
    return ANY.make_store(tmp_path / "a.store", ANY.samples(ROWS, prefix="a/"), ANY.samples(ROWS, prefix="b/"))


def pushed(store: Store) -> str:
    return object_storage.pushed(store.path, store.path.name)


def opened(url: str, cache: Path, **options: Any) -> Store:
    return Store.open(url, remote=RemoteOptions(cache=cache, **options))


def bits(batches: Sequence[Batch]) -> list[dict[str, object]]:
    def own(value: object) -> object:
        if isinstance(value, torch.Tensor):
            return value.dtype, value.shape, value.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        return {name: own(one) for name, one in value.items()} if isinstance(value, dict) else value

    return [{field.name: own(getattr(batch, field.name)) for field in fields(batch)} for batch in batches]


def batches_of(store: object, count: int | None = None, **options: Any) -> list[dict[str, object]]:
    config = LoaderConfig(**{"batch_size": 4, "epochs": 1, **options})
    with Loader(store, config) as loader:  # type: ignore[arg-type]
        return [own for batch in islice(loader.forever(), count) for own in bits([batch])]


def roles(store: Store) -> tuple[str, ...]:
    return (
        ("target",)
        if not store.manifest.columns
        else tuple(sorted(c.role for c in store.manifest.columns.values() if "/flipped" not in c.role))
    )


@pytest.mark.parametrize("options", [{}, {"verify": True}, {"plain_reads": True}, {"threads": 2, "window": 16}], ids=str)
def test_batches_are_those_of_the_local_store(options: dict[str, Any], store: Store, tmp_path: Path) -> None:
    url, columns = pushed(store), roles(store)
    expected = batches_of(store, columns=columns, **options)
    first = opened(url, tmp_path / "cache")
    assert batches_of(first, columns=columns, **options) == expected
    assert first.source is not None
    fetched = first.source.stats()
    assert fetched.requests == fetched.misses > 10
    assert batches_of(url, columns=columns, cache=str(tmp_path / "cache"), **options) == expected
    assert first.source.stats().requests == fetched.requests  # the second loader found everything in the cache


def test_captions_that_are_in_one_block_are_requested_with_the_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A round trip less until the first batch: the rows need not be read to know which block it is."""
    requested: list[int] = []  # when captions are
    hold_captions = BatchBuilder.hold_captions

    def captions_held(own: BatchBuilder, *more: Any) -> None:
        before = source.stats().misses
        hold_captions(own, *more)
        requested.append(source.stats().misses - before)

    monkeypatch.setattr(BatchBuilder, "hold_captions", captions_held)
    remote = opened(pushed(make_store(tmp_path / "a.store", samples_of({"train/512x512": 4}, "a/"))), tmp_path / "cache")
    assert remote.source is not None
    assert [shard.entry.groups[TEXT_GROUP].blocks for shard in remote.shards] == [1]
    source = remote.source
    batches_of(remote, 1)
    assert requested[0] == 0


@pytest.mark.slow
@pytest.mark.parametrize("window", [16, 0])
def test_a_cache_smaller_than_the_store_gives_the_same_batches(
    window: int, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder_module.CacheFolder, "ring_bytes", property(lambda own: own.limit // 2))
    size = sum(shard.entry.lmdb.num_bytes for shard in store.shards)
    options: dict[str, Any] = {"epochs": 2, "remainder": "drop", "window": window, "batch_size": 2, "columns": roles(store)}
    small = opened(pushed(store), tmp_path / "cache", cache_bytes=size // 2)
    assert batches_of(small, **options) == batches_of(store, **options)
    assert small.source is not None
    assert small.source.stats().bytes_fetched > size // 2
    assert small.source._cache.room.used() <= size // 2
    on_disk = sum(path.stat().st_blocks * 512 - 4096 for path in (tmp_path / "cache").rglob("*.lmdb"))
    assert on_disk <= size // 2  # but for a block of the file system's own for each file that is in many pieces


def test_a_window_is_chosen_if_the_cache_does_not_hold_the_store(store: Store, tmp_path: Path) -> None:
    size = sum(shard.entry.lmdb.num_bytes for shard in store.shards)
    url, config = pushed(store), LoaderConfig(batch_size=2, cache=str(tmp_path / "cache"), cache_bytes=str(size // 2))
    with Loader(url, config) as chosen, Loader(store, config) as local:
        assert chosen.plan.window == chosen.config.window
        assert local.plan.window is local.config.window is None  # a local store has no cache
        state = chosen.state_dict()
        with pytest.raises(StateError, match=r"window was None .* and is \d+ now; .* with a cache that holds the stores"):
            chosen.load_state_dict(local.state_dict())
    with Loader(store, LoaderConfig(batch_size=2)) as resumed:
        resumed.load_state_dict(state)
        assert resumed.plan.digest == state["plan"]


def test_a_service_reads_by_the_window_of_its_client_and_chooses_none_by_its_own_cache(store: Store, tmp_path: Path) -> None:
    size = sum(shard.entry.lmdb.num_bytes for shard in store.shards)
    url, config = pushed(store), LoaderConfig(batch_size=2, epochs=1)
    small = replace(config, cache=str(tmp_path / "own"), cache_bytes=str(size // 2))
    with Loader(store, config) as own, Loader(url, small) as chosen:
        assert own.plan.window is None is not chosen.plan.window
        cases = [(store, config, own), (None, config, own), (url, small, chosen)]
        expected = {id(one): bits(list(one)) for one in (own, chosen)}
    remote = RemoteOptions(cache=tmp_path / "cache", cache_bytes=size // 2)
    with serving_here(tmp_path, url, remote=remote) as at_url, serving_here(tmp_path, store.path) as at_disk:
        for where in (at_url.socket, at_url.tcp, at_disk.socket, at_disk.tcp):
            for given, asked, alike in cases:
                with Loader(given, asked, service=where) as served:
                    assert (served.plan.digest, served.config.window) == (alike.plan.digest, alike.config.window)
                    if alike is own and where in (at_url.socket, at_url.tcp):
                        with pytest.raises(UsageError, match=r"the cache may hold .* set a window"):
                            next(iter(served))
                    else:
                        assert bits(list(served)) == expected[id(alike)]


def test_all_rows_are_not_shuffled_through_a_cache_that_does_not_hold_the_store(store: Store, tmp_path: Path) -> None:
    size = sum(shard.entry.lmdb.num_bytes for shard in store.shards)
    small = opened(pushed(store), tmp_path / "cache", cache_bytes=size // 2)
    with pytest.raises(UsageError, match=r"with all rows shuffled, lines .* have a cache of .* set a window"):
        Loader(small, LoaderConfig(batch_size=2))
    Loader(small, LoaderConfig(batch_size=2, window=16)).close()


def test_no_hole_is_read_as_data(store: Store, tmp_path: Path) -> None:
    """With its byte removed, and its bytes too, a line is fetched again: zeros would have been delivered otherwise."""
    remote, expected = opened(pushed(store), tmp_path / "cache"), batches_of(store)
    assert batches_of(remote) == expected
    source = remote.source
    assert source is not None
    for shard in remote.shards:
        cached = source.cached(shard.entry)
        for line in range(cached.num_lines):
            cached.present[line] = ABSENT
            cached.punch(line)
    before = source.stats().requests
    assert batches_of(opened(remote.place, tmp_path / "cache")) == expected  # type: ignore[arg-type]
    assert source.stats().requests > before


def test_a_state_resumes_on_the_other_copy(store: Store, tmp_path: Path) -> None:
    config = LoaderConfig(batch_size=4, epochs=2, cache=str(tmp_path / "cache"))
    local, remote = Loader(store, config), Loader(pushed(store), config)
    expected = bits(list(islice(local.forever(), 9)))
    local.load_state_dict(Loader(store, config).state_dict())
    assert bits(list(islice(remote.forever(), 3))) == expected[:3]
    local.load_state_dict(remote.state_dict())
    assert bits(list(islice(local.forever(), 3))) == expected[3:6]
    remote.load_state_dict(local.state_dict())
    assert bits(list(islice(pickle.loads(pickle.dumps(remote)), 3))) == expected[6:9]
    local.close()
    remote.close()


def test_a_local_store_and_one_in_object_storage_are_mixed(tmp_path: Path) -> None:
    one = make_store(tmp_path / "a.store", samples_of(ROWS, "a/"))
    two = make_store(tmp_path / "b.store", samples_of(ROWS, "b/"))
    remote = opened(pushed(two), tmp_path / "cache")
    mixed = [WeightedStore(store=one, repeats=2), WeightedStore(store=remote)]
    expected = [WeightedStore(store=one, repeats=2), WeightedStore(store=two)]
    assert batches_of(mixed, columns=("target",)) == batches_of(expected, columns=("target",))


@pytest.mark.slow
def test_a_service_fetches_for_its_clients_and_a_forked_process_reads_through_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()  # the service's process has lines of the usual length
    store = make_store(tmp_path / "a.store", samples_of(ROWS, "a/"))
    expected, url = batches_of(store, columns=("target",)), pushed(store)
    config = LoaderConfig(batch_size=4, epochs=1, cache=str(tmp_path / "cache"))
    with Loader(url, config, service="auto") as loader:
        assert bits(list(loader.forever())) == expected
        assert loader.stats().fetched[0].requests == 0
    with Loader(url, config) as loader:
        assert bits(list(islice(loader.forever(), 2))) == expected[:2]

        def rest_is_same() -> bool:
            rest = bits(list(loader.forever()))
            loader.close()
            return rest == expected[2:]

        assert in_child(rest_is_same) == 0
        assert bits(list(loader.forever())) == expected[2:]


def test_a_store_that_is_gone_is_an_error_at_next_and_the_iteration_goes_on_when_it_is_back(
    store: Store, tmp_path: Path
) -> None:
    url = pushed(store)
    expected = batches_of(store)
    objects = Path(url.removeprefix("file://")) / "shards"
    config = LoaderConfig(batch_size=4, epochs=1, cache=str(tmp_path / "cache"), deadline=3.0)
    with Loader(url, config) as loader:
        objects.rename(objects.with_name("away"))
        begun = time.monotonic()
        with pytest.raises(StoreError, match=r"shards/"):
            next(loader.forever())
        assert time.monotonic() - begun < 30.0
        objects.with_name("away").rename(objects)
        time.sleep(0.1)
        assert bits(list(loader.forever())) == expected


@pytest.mark.slow
def test_a_local_store_imports_no_client_of_object_storage_and_no_masked_arrays(tmp_path: Path) -> None:
    store = make_store(tmp_path / "a.store", samples_of({"train/64x64": 4}))
    code = (
        "import sys; from bucketline.loader import Loader, LoaderConfig; "
        f"list(Loader({str(store.path)!r}, LoaderConfig(batch_size=2, epochs=1, window=16))); "
        "print({'obstore', 'numpy.ma'} & set(sys.modules))"
    )
    assert spawn([sys.executable, "-c", code]).out == "set()\n"
