"""A cache that somebody removes below a process: later loaders make it again, and one that runs says so and then continues."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from bucketline.errors import StoreError
from bucketline.loader import Loader, LoaderConfig
from bucketline.store import Store
from tests.kit import make_store, samples_of
from tests.serving import serving_here
from tests.unit.loader.test_copies_in_one_cache import batches_of
from tests.unit.loader.test_remote import bits, pushed
from tests.unit.loader.test_shared_cache import small_lines

pytestmark = pytest.mark.slow

WORDS = "was removed while it was in use; iterate or open the store again, which makes the cache again"


@pytest.fixture
def local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    small_lines(monkeypatch.setattr)
    return make_store(tmp_path / "s", *(samples_of({"train/64x64": 500}, f"{part}/") for part in "abcd"))


@pytest.mark.parametrize("removed", ["*", "*/*", "*/*/*", "*/*/*/*"])
def test_later_loaders_make_it_again(removed: str, local: Store, tmp_path: Path) -> None:
    url, cache = pushed(local), tmp_path / "around" / "cache"
    config = LoaderConfig(batch_size=20, epochs=1, cache=str(cache))
    expected = batches_of(local.path, cache, config)
    with Loader(url, config) as held:
        assert bits([*held]) == expected
        for path in cache.parent.glob(removed):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        assert batches_of(url, cache, config) == expected
    assert batches_of(url, cache, config) == expected


def test_a_loader_that_needs_more_of_it_says_so_and_iterates_again(local: Store, tmp_path: Path) -> None:
    url, cache = pushed(local), tmp_path / "cache"
    config = LoaderConfig(batch_size=20, epochs=1, window=16, cache=str(cache), cache_bytes="1MiB")
    expected = batches_of(local.path, cache, config)
    found, said = list[object](), list[str]()
    with Loader(url, config) as loader:
        while len(found) < len(expected):
            try:
                for batch in loader:
                    found += bits([batch])
                    if len(found) in (5, 20):
                        shutil.rmtree(cache)
            except StoreError as error:
                said.append(str(error))
    assert found == expected
    assert said
    assert all(WORDS in one for one in said)


def test_a_service_opens_its_stores_again(local: Store, tmp_path: Path) -> None:
    url, config = pushed(local), LoaderConfig(batch_size=20, epochs=1, cache=str(tmp_path / "cache"))
    expected = batches_of(local.path, tmp_path / "cache", config)
    with serving_here(tmp_path, url, remote=config.remote()) as found:
        for _ in range(2):
            with Loader(None, LoaderConfig(batch_size=20, epochs=1), service=found.socket) as loader:
                assert bits([*loader]) == expected
            shutil.rmtree(tmp_path / "cache")
