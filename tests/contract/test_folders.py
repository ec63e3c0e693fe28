"""A store's folder behaves the same on a disk, in memory and in object storage, and `store verify` finds the same in it."""

from __future__ import annotations

import multiprocessing
import os
import stat
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from bucketline.errors import CorruptError, StoreError
from bucketline.files import atomic_write
from bucketline.store import Store
from bucketline.store.change.commit import drop
from bucketline.store.folder import ExistsError, Folder, LocalFolder, MissingObjectError, folder_time
from bucketline.store.remote.generations import find_newest, newest_generation
from bucketline.store.remote.objects import ObjectFolder
from bucketline.store.verify.verify import verify_folder
from tests.kit import make_store, samples_of
from tests.object_storage import S3Bucket, in_memory

CLOCK_S = 300.0  # two clocks that are the same, on a machine that may be busy; time zones are quarters of an hour apart
OUTSIDE = ("../secret", "shards/../../secret", "..", "/secret", "shards//a", "shards/./a")


@pytest.fixture(params=["disk", "relative", "memory", "file", "s3"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Folder:
    if request.param == "disk":
        (tmp_path / "a.store").mkdir()
        return LocalFolder(tmp_path / "a.store")
    if request.param == "relative":
        (tmp_path / "a.store").mkdir()
        request.getfixturevalue("monkeypatch").chdir(tmp_path)
        return LocalFolder(Path("a.store"))
    if request.param == "memory":
        return in_memory()
    if request.param == "file":
        return ObjectFolder.open(f"file://{tmp_path}/not%20yet/a.store")
    bucket: S3Bucket = request.getfixturevalue("s3")
    return bucket.folder("a.store")


@pytest.fixture
def disk(tmp_path: Path) -> LocalFolder:
    return LocalFolder(tmp_path)


def names(folder: Folder, prefix: str = "") -> list[str]:
    return sorted(file.name for file in folder.names(prefix))


def test_what_was_written_is_read_whole_or_by_range(folder: Folder) -> None:
    folder.write("shards/a.lmdb", b"0123456789")
    assert folder.read("shards/a.lmdb") == b"0123456789"
    assert bytes(folder.read_range("shards/a.lmdb", 2, 5)) == b"234"
    folder.write("shards/a.lmdb", b"another")
    assert folder.read("shards/a.lmdb", 7) == b"another"
    with pytest.raises(CorruptError, match=r"a\.lmdb has"):
        folder.read("shards/a.lmdb", 6)


def test_a_range_past_the_end_is_cut_and_one_beyond_it_is_an_error(folder: Folder) -> None:
    folder.write("shards/a.lmdb", b"0123456789")
    assert bytes(folder.read_range("shards/a.lmdb", 8, 50)) == b"89"
    for begin in (10, 40):
        with pytest.raises(StoreError, match=r"shards/a\.lmdb"):
            folder.read_range("shards/a.lmdb", begin, 50)


def test_of_many_that_create_one_name_one_succeeds(folder: Folder) -> None:
    barrier, created, refused = threading.Barrier(6), list[int](), list[int]()

    def create(number: int) -> None:
        barrier.wait()
        try:
            folder.create("generations/1.json", b"%d" % number)
        except ExistsError:
            refused.append(number)
        else:
            created.append(number)

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(create, range(6)))
    assert (len(created), len(refused)) == (1, 5)
    assert folder.read("generations/1.json") == b"%d" % created[0]
    assert names(folder) == ["generations/1.json"]


def test_what_exists_with_the_same_content_counts_as_created(folder: Folder) -> None:
    """A request may be repeated whose first answer was lost."""
    folder.create("generations/1.json", b"1")
    folder.create("generations/1.json", b"1")
    for other in (b"2", b"", b"11"):
        with pytest.raises(ExistsError, match=r"generations/1\.json exists and has other content"):
            folder.create("generations/1.json", other)
    assert folder.read("generations/1.json") == b"1"


def test_files_are_listed_by_folder_with_their_lengths(folder: Folder) -> None:
    before = folder_time(folder)
    for name in ("manifest.json", "shards/a.lmdb", "shards/deep/b", "shards2/c"):
        folder.write(name, name.encode())
    assert names(folder) == ["manifest.json", "shards/a.lmdb", "shards/deep/b", "shards2/c"]
    assert names(folder, "shards") == names(folder, "shards/") == ["shards/a.lmdb", "shards/deep/b"]
    assert names(folder, "none") == []
    for file in folder.names("shards"):
        assert file.num_bytes == len(file.name)
        assert abs(file.modified_s - before) < CLOCK_S
        found = folder.look_up(file.name)
        assert found is not None
        assert (found.name, found.num_bytes) == (file.name, file.num_bytes)
        assert found.modified_s == pytest.approx(file.modified_s, abs=1)  # in whole seconds in one of both answers


def test_what_is_missing_is_said_to_be_missing(folder: Folder) -> None:
    assert folder.look_up("shards/none") is None
    reads: list[Callable[[], bytes]] = [
        lambda: folder.read("shards/none"),
        lambda: folder.read_range("shards/none", 0, 1),
    ]
    for read in reads:
        with pytest.raises(MissingObjectError, match="shards/none is missing"):
            read()
    folder.remove(["shards/none"])


def test_files_are_removed(folder: Folder) -> None:
    for name in ("shards/a", "shards/b", "shards/c"):
        folder.write(name, b"1")
    folder.remove(["shards/c", "shards/none", "shards/a"])
    assert names(folder) == ["shards/b"]


@pytest.mark.parametrize("name", OUTSIDE)
def test_a_name_that_leaves_the_folder_is_refused(folder: Folder, tmp_path: Path, name: str) -> None:
    (tmp_path / "secret").write_bytes(b"precious")
    changes: tuple[Callable[[], object], ...] = (
        lambda: folder.read(name),
        lambda: folder.read_range(name, 0, 1),
        lambda: folder.look_up(name),
        lambda: folder.create(name, b"1"),
        lambda: folder.write(name, b"1"),
        lambda: folder.remove([name]),
    )
    for change in changes:
        with pytest.raises(StoreError, match="is not the name of a file in"):
            change()
    assert (tmp_path / "secret").read_bytes() == b"precious"
    assert names(folder) == []


def test_the_time_is_that_of_the_clock_that_dates_the_files_and_leaves_nothing(folder: Folder) -> None:
    assert abs(folder_time(folder) - time.time()) < CLOCK_S
    assert names(folder) == []


def _die_before(moment: str, path: Path) -> None:
    setattr(os, moment, lambda *_, **__: os._exit(9))
    LocalFolder(path).create("generations/1.json", bytes(1 << 20))


@pytest.mark.parametrize("moment", ["fsync", "link"])
def test_a_kill_in_the_middle_of_a_creation_leaves_nothing_visible(disk: LocalFolder, moment: str) -> None:
    child = multiprocessing.get_context("fork").Process(target=_die_before, args=(moment, disk.path))
    child.start()
    child.join()
    assert child.exitcode == 9
    assert [file for _, _, files in os.walk(disk.path) for file in files if not atomic_write.is_aside(file)] == []
    assert names(disk) == []
    disk.create("generations/1.json", b"1")
    assert disk.read("generations/1.json") == b"1"


def test_a_creation_is_synced_before_its_name_is_there_and_its_folder_after(
    disk: LocalFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, fsync = list[tuple[bool, bool]](), os.fsync

    def noted(fd: int) -> None:
        fsync(fd)
        seen.append((stat.S_ISDIR(os.fstat(fd).st_mode), (disk.path / "generations" / "1.json").exists()))

    monkeypatch.setattr(os, "fsync", noted)
    disk.create("generations/1.json", b"1")
    assert seen == [(False, False), (True, True)]


@pytest.mark.parametrize("taken", [False, True])
def test_a_disk_without_hard_links_creates_too(disk: LocalFolder, monkeypatch: pytest.MonkeyPatch, *, taken: bool) -> None:
    def unsupported(*_: object, **__: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", unsupported)
    if taken:
        disk.write("generations/1.json", b"another's")
        with pytest.raises(ExistsError):
            disk.create("generations/1.json", b"1")
    else:
        disk.create("generations/1.json", b"1")
    assert names(disk) == ["generations/1.json"]
    assert disk.read("generations/1.json") == (b"another's" if taken else b"1")


@pytest.mark.parametrize("change", ["create", "write", "remove"])
def test_a_disk_is_not_changed_through_links(tmp_path: Path, change: str) -> None:
    outside, disk = tmp_path / "outside", LocalFolder(tmp_path / "a.store")
    outside.mkdir()
    disk.write("manifest.json", b"1")
    (outside / "precious").write_bytes(b"mine")
    (disk.path / "shards").symlink_to(outside)
    changes: dict[str, Callable[[], object]] = {
        "create": lambda: disk.create("shards/new", b"1"),
        "write": lambda: disk.write("shards/precious", b"1"),
        "remove": lambda: disk.remove(["shards/precious"]),
    }
    with pytest.raises(StoreError, match="shards is a link; a store is changed only where its folders are its own"):
        changes[change]()
    assert [(path.name, path.read_bytes()) for path in outside.iterdir()] == [("precious", b"mine")]


def test_a_link_to_a_file_is_read_and_not_written_through(disk: LocalFolder, tmp_path_factory: pytest.TempPathFactory) -> None:
    target = tmp_path_factory.mktemp("outside") / "large"
    target.write_bytes(b"mine")
    for name in ("a", "b", "c"):
        disk.write(f"shards/{name}.lmdb", b"")
        (disk.path / "shards" / f"{name}.lmdb").unlink()
        (disk.path / "shards" / f"{name}.lmdb").symlink_to(target)
    assert {(file.name, file.num_bytes) for file in disk.names()} == {(f"shards/{name}.lmdb", 4) for name in ("a", "b", "c")}
    assert disk.read("shards/a.lmdb") == b"mine"
    disk.write("shards/a.lmdb", b"own")
    disk.remove(["shards/b.lmdb"])
    with pytest.raises(ExistsError):
        disk.create("shards/c.lmdb", b"mine")
    assert target.read_bytes() == b"mine"
    assert not (disk.path / "shards" / "a.lmdb").is_symlink()


def test_a_disk_that_fails_as_a_removal_is_synced_is_an_error_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = LocalFolder(tmp_path)
    folder.write("a/b.json", b"{}")

    def failing(_: Path) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("bucketline.store.folder.sync_folder", failing)
    with pytest.raises(StoreError, match=r"cannot remove .*a/b\.json: Input/output error"):
        folder.remove(["a/b.json"])


BUCKET = "train/64x64"


def flipped(folder: Folder, name: str) -> None:
    data = bytearray(folder.read(name))
    data[len(data) // 2] ^= 1
    folder.write(name, bytes(data))


@pytest.fixture
def places(tmp_path: Path) -> list[Folder]:
    """Folders with the same files: of a store that has lost a sample twice, and then another shard."""
    store = tmp_path / "a.store"
    samples = samples_of({BUCKET: 8})
    make_store(store, samples, samples_of({BUCKET: 4}, "second/"))
    for sample in samples[:2]:
        drop(store, [sample.id])
    return [LocalFolder(store), in_a_bucket(LocalFolder(store))]


def in_a_bucket(disk: LocalFolder) -> ObjectFolder:
    bucket = in_memory()
    for file in disk.names():
        if not file.name.startswith("pending/"):
            bucket.write(file.name, disk.read(file.name))
    return bucket


def older_list(folder: Folder) -> str:
    """Return the name of generation 3's list of dropped rows."""
    (name,) = (file.name for file in folder.names("generations") if file.name.startswith("generations/3-"))
    return name


DAMAGE: dict[str, tuple[Callable[[Folder], None], str, str]] = {
    "nothing": (lambda _: None, "", ""),
    "an older manifest": (lambda folder: flipped(folder, "generations/3.json"), "generations/3.json", "that no generation has"),
    "an older list": (lambda folder: flipped(folder, older_list(folder)), ".dropped has the digest", ""),
    "a missing older list": (lambda folder: folder.remove([older_list(folder)]), "", "missing; only generation 3"),
    "the newest document": (lambda folder: folder.remove(["generations/4.json"]), "copy manifest.json to", ""),
    "a document with other bytes": (
        lambda folder: folder.write("manifest.json", folder.read("manifest.json") + b"\n"),
        "differs in its bytes",
        "",
    ),
    "a file of somebody's": (lambda folder: folder.write("notes.txt", b"mine"), "", "not one of the store's files"),
    "a shard that nobody lists": (lambda folder: folder.write("shards/late.lmdb", b"late"), "", "no generation lists"),
    "a shard's file": (lambda folder: flipped(folder, "shards/g1.meta"), "g1.meta", ""),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_the_same_is_found_on_a_disk_and_in_a_bucket(damage: str, places: list[Folder]) -> None:
    change, error, what = DAMAGE[damage]
    said = []
    for folder in places:
        change(folder)
        result = verify_folder(folder, lambda _: None, 1)
        assert all(error in fault.error for fault in result.corrupt)
        assert bool(result.corrupt) == bool(error)
        assert [what in stray.what for stray in result.strays] == ([True] if what else [])
        faults = {(fault.shard, fault.bucket, fault.block, fault.row) for fault in result.corrupt}
        said.append((result.blocks, result.rows, faults, result.strays))
    assert said[0] == said[1]


SAMPLES = samples_of({"train/64x64": 8})


@pytest.fixture(params=["disk", "bucket"])
def damaged(request: pytest.FixtureRequest, tmp_path: Path) -> Folder:
    """The folder of a store of three generations after its first, that have lost a sample each."""
    store = tmp_path / "a.store"
    make_store(store, SAMPLES)
    for sample in SAMPLES[:3]:
        drop(store, [sample.id])
    return LocalFolder(store) if request.param == "disk" else in_a_bucket(LocalFolder(store))


def change(damaged: Folder) -> None:
    if isinstance(damaged, LocalFolder):
        drop(damaged.path, [SAMPLES[3].id])
    else:
        drop(damaged, [SAMPLES[3].id])  # type: ignore[arg-type]


def test_a_writer_continues_from_the_newest_generation_that_is_left(damaged: Folder) -> None:
    before = newest_generation(damaged)
    damaged.remove(["manifest.json"])
    found = find_newest(damaged, lists=True)
    assert found == before
    change(damaged)
    after = newest_generation(damaged)
    assert (after.generation, after.samples, after.store_id) == (before.generation + 1, 4, before.store_id)


def test_without_a_manifest_the_newest_whole_generation_counts(damaged: Folder) -> None:
    newest = newest_generation(damaged).generation
    damaged.remove(["manifest.json"])
    damaged.write(f"generations/{newest}.json", b"{}")
    found = find_newest(damaged, lists=True)
    assert found is not None
    assert found.generation == newest - 1


@pytest.mark.parametrize("is_damaged", [False, True])
def test_readers_and_writers_name_the_generation_to_copy(damaged: Folder, *, is_damaged: bool) -> None:
    newest = newest_generation(damaged).generation
    damaged.remove(["manifest.json"])
    if is_damaged:
        damaged.write("manifest.json", b"{}")
    expected = CorruptError if is_damaged else StoreError
    advice = rf"manifest\.json.*; copy .*generations/{newest}\.json to .*manifest\.json"
    with pytest.raises(expected, match=advice):
        Store.open(damaged.path) if isinstance(damaged, LocalFolder) else newest_generation(damaged)
    if is_damaged:
        with pytest.raises(CorruptError, match=advice):
            change(damaged)


def test_a_folder_without_generations_is_not_a_store(damaged: Folder) -> None:
    damaged.remove([file.name for file in damaged.names()])
    assert find_newest(damaged, lists=True) is None
    with pytest.raises(StoreError, match="is not a store"):
        newest_generation(damaged)
