"""A web server or a bucket whose answers are not what they should be is named, soon and once; it never ends its reader."""

from __future__ import annotations

import dataclasses
import shutil
import time
from typing import TYPE_CHECKING

import pytest

from bucketline.bench.fixtures.range_server import Fault, RangeServer, Schedule
from bucketline.errors import BucketlineError, CorruptError, StoreError
from bucketline.loader import Loader, LoaderConfig
from bucketline.store import Store
from bucketline.store.folder import MissingObjectError, NoRangesError
from bucketline.store.format.manifest import dump_manifest, sealed
from bucketline.store.remote import generations
from bucketline.store.remote.objects import ObjectFolder
from bucketline.store.remote.urls import RemoteOptions
from bucketline.store.sync.push_pull import push
from tests.commands import call
from tests.kit import flip_bit, make_store, samples_of
from tests.object_storage import CREDENTIALS

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

ROWS = {"train/64x64": 60}
SOON_S = 30.0  # and far less than the deadline


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a store of two shards and generations, `a.store`, and with its pushed form, `served/a`."""
    path = tmp_path_factory.mktemp("hostile")
    store = make_store(path / "a.store", samples_of(ROWS, "a/"), samples_of(ROWS, "b/"))
    (path / "served" / "a").mkdir(parents=True)
    push(store.path, ObjectFolder.open(f"file://{path / 'served' / 'a'}"))
    return path


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    return tmp_path / "served"


def read_all(url: str, tmp_path: Path, deadline_s: float = 60.0) -> tuple[BucketlineError, float]:
    """Return the error that reading a store ends with, and how long that took; leave no thread behind."""
    begun = time.monotonic()
    config = LoaderConfig(batch_size=2, epochs=1, cache=str(tmp_path / "cache"), deadline=deadline_s)
    with pytest.raises(BucketlineError) as raised, Loader(url, config) as loader:
        for _ in loader:
            pass
    return raised.value, time.monotonic() - begun


@pytest.mark.parametrize("change", ["flipped", "longer", "missing"])
def test_a_damaged_sidecar_is_the_first_batchs_error_and_is_not_asked_for_again(
    change: str, folder: Path, tmp_path: Path
) -> None:
    path = max((folder / "a" / "shards").glob("*.meta"))
    if change == "flipped":
        flip_bit(path, 4 * path.stat().st_size)
    elif change == "longer":
        path.write_bytes(path.read_bytes() + bytes(1 << 20))
    else:
        path.unlink()
    with RangeServer(folder) as server:
        error, seconds = read_all(f"{server.url}/a", tmp_path)
        sent = server.reset()
    assert seconds < SOON_S
    assert f"{server.url}/a/shards/{path.name}" in str(error)
    assert isinstance(error, MissingObjectError if change == "missing" else CorruptError)
    assert sent.gets[f"/a/shards/{path.name}"] + sent.refused <= 8


@pytest.mark.slow
def test_damaged_sidecars_of_many_shards_are_found_together_not_one_after_the_other(tmp_path: Path) -> None:
    store = make_store(tmp_path / "a.store", *(samples_of({"train/64x64": 4}, f"{number}/") for number in range(12)))
    (tmp_path / "served" / "a").mkdir(parents=True)
    push(store.path, ObjectFolder.open(f"file://{tmp_path / 'served' / 'a'}"))
    lies = Schedule([Fault.ZEROS] * 10_000, concerns=lambda path: path.endswith(".meta"))
    with RangeServer(tmp_path / "served", schedule=lies) as server:
        error, _ = read_all(f"{server.url}/a", tmp_path)
        sent = server.reset()
    assert isinstance(error, CorruptError)
    assert max(sent.gets[f"/a/shards/g{number}.meta"] for number in range(12)) <= 8


def test_a_sidecar_that_is_restored_is_read_by_the_next_iteration(folder: Path, tmp_path: Path) -> None:
    path = folder / "a" / "shards" / "g1.meta"
    data = path.read_bytes()
    flip_bit(path, 4 * len(data))
    config = LoaderConfig(batch_size=8, epochs=1, cache=str(tmp_path / "cache"))
    with RangeServer(folder) as server, Loader(f"{server.url}/a", config) as loader:
        with pytest.raises(CorruptError, match="is not the file that the manifest lists"):
            list(loader)
        path.write_bytes(data)
        assert sum(len(batch.ids) for batch in loader) == 120


def test_a_folder_is_read_that_was_copied_to_the_server_and_not_pushed(made: Path, tmp_path: Path) -> None:
    config = LoaderConfig(batch_size=8, epochs=1, cache=str(tmp_path / "cache"))
    with RangeServer(made / "a.store") as server, Loader(server.url, config) as loader:
        assert sum(len(batch.ids) for batch in loader) == 120


def test_a_web_server_without_ranges_is_called_so_at_once(folder: Path, tmp_path: Path) -> None:
    with RangeServer(folder) as server:
        server.outage = Fault.WHOLE
        error, seconds = read_all(f"{server.url}/a", tmp_path)
    assert seconds < SOON_S
    assert isinstance(error, NoRangesError)
    assert "is answered with all of it. A store is read by ranges" in str(error)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["manifest.json", ".meta"])
def test_a_length_of_a_tebibyte_is_refused_before_anything_is_allocated(name: str, folder: Path, tmp_path: Path) -> None:
    lies = Schedule([Fault.HUGE_LENGTH] * 100, concerns=lambda path: path.endswith(name))
    with RangeServer(folder, schedule=lies) as server:
        error, seconds = read_all(f"{server.url}/a", tmp_path)
        assert isinstance(error, CorruptError)
        assert "has 1099511" in str(error)
        assert seconds < SOON_S


@pytest.mark.parametrize("read", [ObjectFolder.read_range, lambda own, *asked: b"".join(map(bytes, own.pieces(*asked)))])
def test_no_more_of_a_range_is_taken_than_was_requested(read: Callable[..., bytes], folder: Path) -> None:
    with RangeServer(folder) as server:
        server.outage = Fault.MORE
        objects = ObjectFolder.open(f"{server.url}/a")
        with pytest.raises(CorruptError, match="more than the 100 bytes came that were requested"):
            read(objects, "shards/g0.lmdb", 5, 105)
        assert server.url in objects.url


def test_generations_without_end_are_refused(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generations, "MAX_AHEAD", 20)
    manifest = Store.open(tmp_path / "a.store").manifest

    def endless(path: str) -> bytes | None:
        number = path.removeprefix("/a/generations/").removesuffix(".json")
        if not number.isdecimal():
            return None
        return dump_manifest(sealed(dataclasses.replace(manifest, generation=int(number))))

    with RangeServer(folder, made=endless) as server:
        call("store", "info", f"{server.url}/a", "--cache", tmp_path / "cache").fails(
            "or more generations after that of manifest.json"
        )
        assert server.reset().gets.total() == 21


@pytest.mark.parametrize("fault", [Fault.CUT, Fault.RESET, Fault.LONG_LENGTH, Fault.INTERNAL, Fault.CLOSED])
def test_one_cut_answer_of_the_next_generation_does_not_end_an_opening(fault: Fault, folder: Path, tmp_path: Path) -> None:
    shutil.copyfile(tmp_path / "a.store" / "generations" / "1.json", folder / "a" / "manifest.json")
    once = Schedule([fault], concerns=lambda path: path.endswith("generations/2.json"))
    with RangeServer(folder, schedule=once) as server:
        store = Store.open(f"{server.url}/a", remote=RemoteOptions(cache=tmp_path / "cache", deadline_s=20.0))
        assert store.manifest.generation == 2
        assert once.given == 1


def test_generations_that_take_longer_than_the_deadline_are_refused(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = Store.open(made / "a.store").manifest
    asked: list[str] = []

    def endless(_: ObjectFolder, name: str, *__: object) -> bytes:
        asked.append(name)
        return dump_manifest(sealed(dataclasses.replace(manifest, generation=manifest.generation + len(asked))))

    monkeypatch.setattr(ObjectFolder, "read", endless)
    begun = time.monotonic()
    with pytest.raises(CorruptError, match="or more generations after that of manifest"):
        generations.newest_generation(ObjectFolder.open(f"file://{tmp_path}", RemoteOptions(deadline_s=0.2)))
    assert generations.FEW_AHEAD < len(asked) < generations.MAX_AHEAD
    assert time.monotonic() - begun < SOON_S


def test_a_list_without_end_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("bucketline.store.remote.objects.MAX_LISTED", 5)
    objects = ObjectFolder.open(f"file://{tmp_path}/a.store")
    for number in range(6):
        objects.write(f"generations/{number}.json", b"{}")
    with pytest.raises(StoreError, match="has more than 5 objects; no store has so many"):
        generations.listed_generations(objects)
    assert len(list(objects.names(is_bounded=False))) == 6


def test_a_list_that_begins_again_after_its_end_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    for number in range(60):
        (folder / "a" / "shards" / f"x{number:02d}").touch()
    with RangeServer(folder) as server:
        objects = ObjectFolder.open("s3://a/shards", RemoteOptions(endpoint=server.url, deadline_s=5.0))
        assert len(list(objects.names())) >= 60
        server.lists_have_an_end = False
        with pytest.raises(StoreError, match=r"the server lists \S+ again and again"):
            list(objects.names())
