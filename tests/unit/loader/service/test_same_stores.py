"""A service keeps stores apart: a copy of one, equal or diverged, never stands in for it."""

from __future__ import annotations

import shutil
import socket
from pathlib import Path

import numpy as np
import pytest

from bucketline.errors import StoreError, UsageError
from bucketline.loader import Loader, LoaderConfig
from bucketline.loader.service import links
from bucketline.loader.service.server import Service
from bucketline.store import Store
from bucketline.store.change.drop import drop
from tests.kit import make_store, samples_of
from tests.serving import serving_here


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return make_store(tmp_path / "s.store", samples_of({"train/64x64": 6})).path


@pytest.mark.parametrize("is_diverged", [False, True])
def test_two_copies_of_a_store_are_refused_by_name(path: Path, tmp_path: Path, *, is_diverged: bool) -> None:
    copy = shutil.copytree(path, tmp_path / "copy.store")
    if is_diverged:
        for place, number in ((path, 0), (copy, 1)):
            drop(place, Store.open(place).bucket("train/64x64").sample_ids(np.array([number])))
    with pytest.raises(UsageError, match=rf"{path} and {copy} are copies of one store \(.*\); start a service for each"):
        Service([path, copy])


def test_a_store_that_was_replaced_under_a_service_is_refused_with_what_to_do(path: Path, tmp_path: Path) -> None:
    config = LoaderConfig(batch_size=1)
    with serving_here(tmp_path, path) as found, Loader(None, config, service=found.tcp) as before:
        batches = before.forever()
        first = next(batches)
        shutil.rmtree(path)
        make_store(path, samples_of({"train/64x64": 6}, "o/"))
        for where in (found.socket, found.tcp):
            with pytest.raises(StoreError, match="start it with that store, or again if the store at its path is another"):
                next(iter(Loader(path, config, service=where)))
            with pytest.raises(StoreError, match=rf"{path} was replaced by another store \(.*\); restart the service"):
                Loader(None, config, service=where)
        assert next(batches).step == first.step + 1


def test_a_store_that_is_given_twice_is_served_once(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link = tmp_path / "link.store"
    link.symlink_to(path)
    service = Service([path, link, f"{path}:2"])
    assert service.stats()["stores"] == [str(path)]
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    monkeypatch.setattr(links, "connected", lambda _: ours)
    with Loader(path, LoaderConfig(batch_size=2, epochs=1), service="/unused") as loader:
        service.take_in(theirs)
        assert sum(len(batch.ids) for batch in loader) == 6
    service.stop()
