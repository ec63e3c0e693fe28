"""A service lets go of a generation that was superseded when its last client has gone: what `store compact --gc` removes is
freed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bucketline.loader import Loader, LoaderConfig
from bucketline.loader.service.client import ServiceBackend
from bucketline.loader.service.links import ChildLink
from bucketline.store import Store
from bucketline.store.change.compact import compact
from bucketline.store.change.drop import drop
from tests.kit import make_store, samples_of
from tests.leftovers import wait_until
from tests.serving import serving

CONFIG = LoaderConfig(batch_size=2, epochs=3, prefetch_bytes=1)


def mapped(pid: int, path: Path, *, deleted: bool) -> int:
    """Count a process's maps of a store's files, of those that are deleted or of the others."""
    lines = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8").splitlines()
    return sum(str(path) in line and line.endswith("(deleted)") == deleted for line in lines)


def supersede(path: Path) -> None:
    """Publish new generations, and remove the files that only the one before needs."""
    store = Store.open(path)
    drop(path, store.bucket("train/64x64").sample_ids(np.arange(store.bucket("train/64x64").num_rows // 2)))
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
            child = backend.link._child if isinstance(backend.link, ChildLink) else None
            pid = process.pid if child is None else child._process.pid
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
