"""A store's files and folders can be written by those whom the umask allows: with 002, by the whole group."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from bucketline.files.locks import FileLock
from bucketline.store.change.compact import compact
from bucketline.store.change.drop import drop
from bucketline.store.change.merge import merge
from bucketline.store.write.publish import adopt, lock_store, publish
from tests.fault.apart import How, apart
from tests.kit import add, make_store, open_writer, samples_of

BUCKET = "train/64x64"


@pytest.mark.parametrize("umask", [0o002, 0o022, 0o077])
def test_every_file_and_folder_of_a_store_has_what_the_umask_leaves(umask: int, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        store = make_store(tmp_path / "s", samples_of({BUCKET: 5}), samples_of({BUCKET: 5}, "more/"))
        drop(store.path, [f"{BUCKET}/0.png"])
        writer = open_writer(store.path, "left")
        for sample in samples_of({BUCKET: 3}, "left/"):
            add(writer, sample)
        writer.commit()
        assert_modes(store.path, umask)  # of a pending shard and its lock, too
        writer.close()
        with lock_store(store.path):
            publish(store.path, store.manifest, adopt(store.path, store.manifest), ())
        compact(store.path, shard_bytes=1 << 24)
        merge(tmp_path / "merged", [store.path])
    finally:
        os.umask(before)
    assert_modes(store.path, umask)
    assert_modes(tmp_path / "merged", umask)


def assert_modes(store: Path, umask: int) -> None:
    modes = {str(path.relative_to(store)): path.stat().st_mode for path in (store, *store.rglob("*"))}
    expected = {name: (0o777 if stat.S_ISDIR(mode) else 0o666) & ~umask for name, mode in modes.items()}
    assert {name: oct(stat.S_IMODE(mode)) for name, mode in modes.items()} == {n: oct(m) for n, m in expected.items()}


def test_a_lock_that_a_colleague_made_for_himself_alone_is_taken_all_the_same(tmp_path: Path) -> None:
    path = tmp_path / "a.lock"
    path.touch()
    path.chmod(0o444)
    tmp_path.chmod(0o777)

    def take() -> bool:
        os.chdir(tmp_path)  # the folders above it are closed to others
        if os.geteuid() == 0:  # whom no mode stops
            os.setgid(65534)
            os.setuid(65534)
        with FileLock(Path(path.name)) as lock:
            return not lock.is_released

    ended = apart(take)
    assert (ended.how, ended.gave) == (How.DONE, True), ended.said
