"""The cache's folder: marked, limited over all of its stores, and never removed from where it is not ours or in use."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from bucketline.errors import StoreError
from bucketline.store.cli import main
from bucketline.store.format.hashing import LINE_BYTES
from bucketline.store.remote.cache.folder import MARK, CacheFolder, is_cache
from bucketline.store.remote.cache.remote_source import store_key
from bucketline.store.remote.cache.room import Room
from tests.unit.store.remote.cache.lines import open_shard


def test_a_folder_with_other_files_is_not_made_a_cache(tmp_path: Path) -> None:
    (tmp_path / "photo.png").write_bytes(b"mine")
    with pytest.raises(StoreError, match=r"is not a cache and not empty: it has 'photo.png'"):
        CacheFolder(tmp_path, None)
    assert [path.name for path in tmp_path.iterdir()] == ["photo.png"]
    assert main(["cache", "clear", "--cache", str(tmp_path)]) == 0
    assert (tmp_path / "photo.png").exists()


def test_a_cache_that_another_process_begins_meanwhile_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = Path.iterdir

    def begun_before(path: Path) -> Iterator[Path]:
        monkeypatch.setattr(Path, "iterdir", listed)
        CacheFolder(path, None).open_store("a" * 32, "s3://b/a.store")  # as another process
        return listed(path)

    monkeypatch.setattr(Path, "iterdir", begun_before)
    assert [store.folder for store in CacheFolder(tmp_path / "cache", None).stores()] == ["a" * 32]


def test_a_cache_whose_mark_alone_was_removed_is_one(tmp_path: Path) -> None:
    cache = CacheFolder(tmp_path / "cache", None)
    cache.open_store("a" * 32, "s3://b/a.store")
    (tmp_path / "cache" / MARK).unlink()
    assert [store.folder for store in CacheFolder(tmp_path / "cache", None).stores()] == ["a" * 32]
    (tmp_path / "cache" / MARK).unlink()
    (tmp_path / "cache" / ("a" * 32) / "locks").unlink()  # a removal was under way
    listed = tmp_path / "cache" / ("a" * 32) / "digest" / "shard.lines-present"
    listed.parent.mkdir()
    listed.write_bytes(b"")
    assert CacheFolder(tmp_path / "cache", None).room.used() == 0


@pytest.mark.parametrize("name", ["b" * 32, f"{'b' * 32}/x.png", "removed-0123abcd/x.png", "room", "room/x.png"])
def test_what_somebody_else_named_like_a_part_of_a_cache_stays(name: str, tmp_path: Path) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_bytes(b"mine")
    with pytest.raises(StoreError, match=f"not empty: it has '{Path(name).parts[0]}'"):
        CacheFolder(tmp_path, None)
    assert (tmp_path / name).read_bytes() == b"mine"


def test_removed_stores_stay_in_a_folder_that_has_only_just_become_a_cache(tmp_path: Path) -> None:
    (tmp_path / "removed-0123abcd").mkdir()
    (tmp_path / "removed-0123abcd" / "locks").write_bytes(b"")
    CacheFolder(tmp_path, None)
    assert (tmp_path / "removed-0123abcd").is_dir()
    CacheFolder(tmp_path, None)
    assert not (tmp_path / "removed-0123abcd").is_dir()


def test_a_store_that_no_process_has_open_is_removed_for_room_and_others_stay(tmp_path: Path) -> None:
    cache = CacheFolder(tmp_path / "cache", None)
    assert is_cache(tmp_path / "cache")
    stores = [cache.open_store(letter * 32, f"s3://b/{letter}.store") for letter in "abc"]
    other = CacheFolder(tmp_path / "cache", None)  # as another process
    assert not other.remove_oldest()
    stores[1].close()
    other._nothing_until = 0.0
    assert other.remove_oldest()
    assert sorted(store.folder[0] for store in other.stores()) == ["a", "c"]
    assert [store.is_open for store in other.stores()] == [True, True]
    again = other.open_store("b" * 32, "s3://b/b.store")
    assert again.path.is_dir()


def test_a_mark_that_a_killed_process_left_half_removed_is_cleaned(tmp_path: Path) -> None:
    CacheFolder(tmp_path, None)
    (tmp_path / "removed-0123abcd" / "shards").mkdir(parents=True)
    (tmp_path / "removed-photos").mkdir()
    CacheFolder(tmp_path, None)
    assert sorted(path.name for path in tmp_path.iterdir()) == [MARK, "removed-photos", "room"]


@pytest.mark.parametrize("store_id", ["../x", "", "a/b", ".", "a\0b", "\ud800"])
def test_an_id_leads_nowhere_but_into_a_folder_of_the_cache(store_id: str, tmp_path: Path) -> None:
    folder = CacheFolder(tmp_path / "cache", None).open_store(store_key("s3 b a.store", store_id), "s3://b/a.store")
    assert folder.path.resolve().parent == tmp_path / "cache"
    assert store_key("s3 b a.store", store_id) != store_key("s3 b c.store", store_id)


def test_a_cache_that_is_too_small_says_so(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"may hold 5 B, at least .* give more with --cache-bytes"):
        CacheFolder(tmp_path / "cache", 5)


def test_reserved_bytes_count_until_their_process_is_gone(tmp_path: Path) -> None:
    cache, other = CacheFolder(tmp_path / "cache", None), CacheFolder(tmp_path / "cache", None)
    assert cache.room.reserve(100, limit=150)
    assert not other.room.reserve(100, limit=150)
    other.recount()
    assert other.room.used() == 100
    cache.room._locks.close()
    other.recount()
    assert other.room.used() == 0


def test_a_process_more_than_there_are_slots_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bucketline.store.remote.cache.room._SLOTS", 1)
    monkeypatch.setattr("bucketline.store.remote.cache.room.NUM_BYTES", (tmp_path / "room").write_bytes(bytes(8 * 9)))
    first = Room(tmp_path / "room")
    with pytest.raises(StoreError, match="is used by 1 processes"):
        Room(tmp_path / "room")
    first.close()


def test_what_the_cache_holds_is_shown_and_cleared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    opened = open_shard(tmp_path / "cache")
    opened.read(0, 4)
    own = ["--cache", str(tmp_path / "cache")]
    assert main(["cache", "clear", *own, "--json"]) == 0
    kept = json.loads(capsys.readouterr().out)
    assert kept["removed"] == []
    assert kept["stores"][0]["is_open"]
    opened.close()
    assert main(["cache", "info", *own]) == 0
    shown = capsys.readouterr().out
    assert "s3://bucket/a.store" in shown
    assert "8.0 MiB pinned, 0 B in the ring, not open" in shown
    assert main(["cache", "clear", *own]) == 0
    assert not (tmp_path / "cache" / ("a" * 32)).exists()
    assert opened.cache.room.used() < LINE_BYTES
