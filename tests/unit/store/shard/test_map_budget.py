"""A store of more files than the system lets a process map is read all the same, and the warning names the setting."""

from __future__ import annotations

import errno
import gc
import os
import sys
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from bucketline.errors import StoreError
from bucketline.loader import Loader, LoaderConfig
from bucketline.store import Store
from bucketline.store.shard import address_range, map_budget
from tests.kit import make_store, samples_of

CONFIG = LoaderConfig(batch_size=3, epochs=1)
NUM_SHARDS = 24


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of many shards."""
    path = tmp_path_factory.mktemp("many") / "many.store"
    make_store(path, *(samples_of({"train/64x64": 3}, f"{n}/") for n in range(NUM_SHARDS)))
    return path


def limit(monkeypatch: pytest.MonkeyPatch, room: int) -> None:
    """Leave room for so many maps more than there are; what other tests have mapped or promised may go at any time."""
    monkeypatch.setattr(map_budget, "_FEW", 0)
    monkeypatch.setattr(map_budget, "_ranges", weakref.WeakSet())
    monkeypatch.setattr(map_budget, "max_maps", lambda: map_budget._in_use() + map_budget.SPARE_MAPS + room)


def maps_of(path: Path) -> list[str]:
    gc.collect()
    lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    return sorted({line.rpartition(".")[2] for line in lines if str(path) in line})


def read(path: Path) -> tuple[list[object], list[str], list[str]]:
    """Return what a loader delivers, what is mapped meanwhile, and the warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with Loader(path, CONFIG) as loader:
            found: list[object] = [(batch.step, batch.ids.tolist(), batch.latents.tolist()) for batch in loader]
            return found, maps_of(path), [str(one.message) for one in caught]


@pytest.mark.parametrize(
    ("room", "mapped", "is_warned"),
    [(10_000, ["extents", "lmdb"], False), (3 * NUM_SHARDS // 2, ["lmdb"], False), (NUM_SHARDS // 2, [], True)],
)
def test_what_cannot_be_mapped_is_known_when_a_loader_is_made_and_is_read_plainly(
    many: Path, monkeypatch: pytest.MonkeyPatch, room: int, mapped: list[str], *, is_warned: bool
) -> None:
    expected, _, _ = read(many)
    limit(monkeypatch, room)
    found, maps, said = read(many)
    assert (found, maps) == (expected, mapped)
    assert [("vm.max_map_count" in one, "sysctl -w vm.max_map_count=" in one) for one in said] == [(True, True)] * is_warned


def test_a_map_that_is_refused_in_the_middle_of_an_epoch_is_read_plainly_from_there_on(
    many: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, _, _ = read(many)
    real, left = address_range._mmap, [NUM_SHARDS // 2]

    def refusing(address: int | None, num_bytes: int, prot: int, flags: int, fd: int) -> int:
        if "lmdb" in (str(Path(f"/proc/self/fd/{fd}").readlink()) if fd >= 0 else ""):
            left[0] -= 1
            if left[0] < 0:
                raise address_range.MapRefusedError(f"{num_bytes} bytes of addresses cannot be mapped: Cannot allocate memory")
        return real(address, num_bytes, prot, flags, fd)

    monkeypatch.setattr(address_range, "_mmap", refusing)
    found, maps, said = read(many)
    assert (found, maps) == (expected, ["extents", "lmdb"])
    assert len(said) == 1
    assert "vm.max_map_count" in said[0]


def test_indexes_beyond_the_share_of_files_by_themselves_are_read(many: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(map_budget, "_single", set())  # what other tests have mapped may go at any time
    monkeypatch.setattr(map_budget, "max_maps", lambda: map_budget._SINGLE_SHARE * 5)
    monkeypatch.setattr(map_budget, "_FEW", 1 << 30)
    store = Store.open(many)
    names = [store.shards[n].name_of("train/64x64", 0) for n in range(NUM_SHARDS)]
    assert names == [Store.open(many, plain_reads=True).shards[n].name_of("train/64x64", 0) for n in range(NUM_SHARDS)]
    lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    assert sum(str(many) in line and line.endswith(".index") for line in lines) == 5


def test_plain_reads_map_nothing_at_all_and_read_the_same(many: Path) -> None:
    expected, _, _ = read(many)
    with Loader(Store.open(many), LoaderConfig(batch_size=3, epochs=1, plain_reads=True)) as loader:
        assert [(batch.step, batch.ids.tolist(), batch.latents.tolist()) for batch in loader] == expected
        assert loader._builder._store.shards[0].name_of("train/64x64", 0) is not None
        assert maps_of(many) == []


@pytest.mark.parametrize("kind", ["extents", "dropped-2", "index"])
def test_a_sidecar_under_plain_reads_that_is_truncated_or_cannot_be_read_is_an_error_that_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    from bucketline.store.change.drop import drop

    make_store(tmp_path / "s", samples_of({"train/64x64": 300}))
    drop(tmp_path / "s", [Store.open(tmp_path / "s").bucket("train/64x64").sample_ids(np.array([2]))[0]], dry_run=False)
    file = next((tmp_path / "s" / "shards").glob(f"*.{kind}"))

    def read_all() -> None:
        store = Store.open(tmp_path / "s", plain_reads=True)
        store.bucket("train/64x64").read(np.arange(299), "latent")
        assert store.shards[0].index.metadata

    read_all()
    real = os.preadv

    def failing(fd: int, buffers: list[memoryview], offset: int) -> int:
        if Path(f"/proc/self/fd/{fd}").readlink() == file:
            raise OSError(errno.EIO, "Input/output error")
        return real(fd, buffers, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", failing)
        with pytest.raises(StoreError, match=rf"{file.name} cannot be read at byte 0: Input/output error; the medium"):
            read_all()

    def shrinking(fd: int, buffers: list[memoryview], offset: int) -> int:
        if Path(f"/proc/self/fd/{fd}").readlink() == file:
            os.truncate(file, 100)  # after its length was compared
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", shrinking)
    with pytest.raises(StoreError, match=rf"{file.name} ends at byte 100, expected"):
        read_all()


class _Files:
    num_unmapped = 1


def test_maps_are_counted_while_another_thread_opens_more_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """`store verify` opens shards in several threads."""
    monkeypatch.setattr(map_budget, "max_maps", lambda: 1 << 30)
    monkeypatch.setattr(map_budget, "_FEW", 1 << 30)
    held = [_Files() for _ in range(2000)]
    for files in held:
        map_budget.promise(files)

    def open_files() -> None:
        for _ in range(10_000):
            held.append(_Files())
            map_budget.promise(held[-1])

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(1) as pool:
            opening = pool.submit(open_files)
            while not opening.done():
                assert map_budget.fits(1)
            opening.result()
    finally:
        sys.setswitchinterval(interval)
    assert map_budget._num_promised() >= len(held)
