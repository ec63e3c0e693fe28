"""The newest generation in object storage, and how the next one is committed."""

from __future__ import annotations

import dataclasses
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from bucketline.errors import CorruptError, StoreError
from bucketline.store import Store
from bucketline.store.folder import MissingObjectError
from bucketline.store.format.manifest import Manifest, dump_manifest, sealed
from bucketline.store.remote.generations import (
    commit,
    complete_first,
    find_newest,
    listed_generations,
    newest_generation,
    read_generation,
    refuse_without_put_if_absent,
)
from bucketline.store.remote.objects import ObjectFolder
from tests.object_storage import S3Bucket, in_memory


@pytest.fixture(params=["memory", "s3"])
def folder(request: pytest.FixtureRequest) -> ObjectFolder:
    if request.param == "memory":
        return in_memory()
    bucket: S3Bucket = request.getfixturevalue("s3")
    return bucket.folder("a.store")


def numbered(manifest: Manifest, generation: int) -> tuple[Manifest, bytes]:
    other = sealed(dataclasses.replace(manifest, generation=generation))
    return other, dump_manifest(other)


def test_readers_find_what_was_committed_whatever_the_hint_says(folder: ObjectFolder, store: Store) -> None:
    assert find_newest(folder) is None
    with pytest.raises(MissingObjectError, match=r"is not a store: it has no manifest\.json"):
        newest_generation(folder)
    third, data = numbered(store.manifest, 3)
    assert commit(folder, 3, data, is_first=True)
    assert not commit(folder, 3, numbered(store.manifest, 4)[1], is_first=True)
    fourth, after = numbered(store.manifest, 4)
    assert commit(folder, 4, after, is_first=False)
    fifth, last = numbered(store.manifest, 5)
    folder.create("generations/5.json", last)  # the writer died before it wrote the hint
    assert newest_generation(folder) == fifth
    folder.write("manifest.json", data)  # a slow writer's hint comes late
    assert newest_generation(folder) == fifth
    assert read_generation(folder, 4, fifth) == fourth
    assert read_generation(folder, 5, fifth) == fifth
    assert read_generation(folder, 3, fifth) == third
    with pytest.raises(StoreError, match="has no generation 2 any more"):
        read_generation(folder, 2, fifth)
    assert list(listed_generations(folder)) == [3, 4, 5]


def test_an_interrupted_first_commit_is_completed(store: Store) -> None:
    folder = in_memory()
    third, data = numbered(store.manifest, 3)
    folder.write("manifest.json", data)
    assert newest_generation(folder) == third
    complete_first(folder, newest_generation(folder))
    assert folder.read("generations/3.json") == data
    complete_first(folder, newest_generation(folder))
    folder.remove(["generations/3.json"])
    folder.write("generations/3.json", numbered(store.manifest, 2)[1])
    assert not commit(folder, 3, data, is_first=False)


def test_of_many_writers_one_commits_a_generation(folder: ObjectFolder, store: Store) -> None:
    assert commit(folder, 1, numbered(store.manifest, 1)[1], is_first=True)
    candidates = [dataclasses.replace(store.manifest, rules={"writer": number}) for number in range(5)]
    barrier, won = threading.Barrier(len(candidates)), []

    def run(number: int) -> None:
        data = numbered(candidates[number], 2)[1]
        barrier.wait()
        if commit(folder, 2, data, is_first=False):
            won.append(number)

    with ThreadPoolExecutor(len(candidates)) as pool:
        list(pool.map(run, range(len(candidates))))
    assert len(won) == 1
    assert newest_generation(folder).rules == {"writer": won[0]}


def test_a_foreign_generation_is_an_error(store: Store) -> None:
    folder = in_memory()
    assert commit(folder, 1, numbered(store.manifest, 1)[1], is_first=True)
    folder.write("generations/2.json", numbered(dataclasses.replace(store.manifest, store_id="0" * 32), 2)[1])
    with pytest.raises(CorruptError, match="belongs to another store or generation"):
        newest_generation(folder)
    folder.write("generations/2.json", b"{}")
    with pytest.raises(CorruptError, match=r"generations/2\.json is damaged"):
        newest_generation(folder)


def test_what_an_earlier_store_left_at_the_place_is_named(store: Store) -> None:
    folder = in_memory()
    folder.write("generations/1.json", numbered(dataclasses.replace(store.manifest, store_id="0" * 32), 1)[1])
    with pytest.raises(StoreError, match=r"generations/1\.json belongs to another store, or an earlier one at this place"):
        commit(folder, 1, numbered(store.manifest, 1)[1], is_first=True)
    assert folder.size("manifest.json") is None


def test_put_if_absent_is_probed(folder: ObjectFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_without_put_if_absent(folder)
    assert list(folder.names()) == []

    def overwrites(self: ObjectFolder, name: str, data: bytes) -> None:
        self.write(name, data)

    monkeypatch.setattr(ObjectFolder, "create", overwrites)
    with pytest.raises(StoreError, match="does not honour put-if-absent"):
        refuse_without_put_if_absent(folder)
    assert list(folder.names()) == []


def test_an_answer_that_is_damaged_once_is_read_again(
    folder: ObjectFolder, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest, data = numbered(store.manifest, 1)
    assert commit(folder, 1, data, is_first=True)
    read, bad = ObjectFolder.read, [data[:100], bytes(len(data))]

    def read_badly(own: ObjectFolder, name: str, *args: int) -> bytes:
        found = read(own, name, *args)
        return bad.pop() if bad else found

    monkeypatch.setattr(ObjectFolder, "read", read_badly)
    with pytest.raises(CorruptError, match=r"manifest\.json is damaged"):  # twice
        newest_generation(folder)
    bad.append(data[:100])
    assert newest_generation(folder) == manifest
    assert not bad
