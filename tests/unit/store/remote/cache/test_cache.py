"""Lines are fetched once, compared, kept while they are held; a cache is never removed from where it is in use or not ours."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from bucketline.errors import StoreError
from bucketline.store.cli import main
from bucketline.store.folder import MissingObjectError
from bucketline.store.format.block import LINE_BYTES
from bucketline.store.remote.cache import cached_shard, fetch, folder
from bucketline.store.remote.cache.cached_shard import ABSENT, OLD_PINNED, PINNED, RING
from bucketline.store.remote.cache.folder import MARK, CacheFolder, is_cache
from bucketline.store.remote.cache.remote_source import store_key
from bucketline.store.remote.cache.room import Room
from bucketline.store.remote.objects import IN_TIME
from tests.fault.apart import Apart, How
from tests.leftovers import wait_until
from tests.unit.store.remote.cache.lines import NUM_BYTES, NUM_LINES, Objects, line_of, open_shard


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> int:
    """Let a cache pin two lines and hold one more; return its limit in bytes."""
    monkeypatch.setattr(folder.CacheFolder, "ring_bytes", property(lambda own: own.limit - 2 * LINE_BYTES))
    monkeypatch.setattr(folder, "LEAST_BYTES", LINE_BYTES)
    return 3 * LINE_BYTES + 100_000


class Pause:
    """Holds up each line, or those of some numbers, until it is over."""

    def __init__(self, *numbers: int) -> None:
        self.arrived, self.over, self._numbers = threading.Event(), threading.Event(), numbers

    def __call__(self, number: int) -> None:
        if number in self._numbers or not self._numbers:
            self.arrived.set()
            self.over.wait(60)


def test_a_line_is_fetched_once_and_is_there_for_the_next_process(tmp_path: Path) -> None:
    first = open_shard(tmp_path / "cache")
    first.read(0, 3)
    first.read(3, NUM_LINES - 1)
    assert first.states() == [PINNED, ABSENT, ABSENT, PINNED, PINNED]
    assert sorted(first.objects.requested) == [0, 3, NUM_LINES - 1]
    second = open_shard(tmp_path / "cache")
    second.read(0, 3, NUM_LINES - 1)
    assert second.objects.requested == []
    assert second.cache.room.used() == first.cache.room.used() >= NUM_BYTES - 2 * LINE_BYTES
    assert first.shard.path.stat().st_blocks * 512 < 4 * LINE_BYTES  # sparse


def test_two_processes_that_want_a_line_at_once_fetch_it_once(tmp_path: Path) -> None:
    pause = Pause()
    first, second = open_shard(tmp_path / "cache", Objects(fault=pause)), open_shard(tmp_path / "cache")
    held = first.fetcher.hold([(first.shard, 1)], 0)
    assert pause.arrived.wait(10)
    other = second.fetcher.hold([(second.shard, 1)], 0)
    assert not second.fetcher.are_ready(other)
    pause.over.set()
    assert first.fetcher.wait(held)
    assert second.fetcher.wait(other)
    assert second.objects.requested == []


def test_a_hole_is_never_taken_for_a_line(tmp_path: Path) -> None:
    """The file reads as zeros there; only the line's byte says whether it was written."""
    opened = open_shard(tmp_path / "cache")
    opened.read(2)
    opened.shard.present[2] = ABSENT
    opened.shard.punch(2)
    assert not any(opened.shard.read(2))
    opened.read(2)
    assert opened.objects.requested == [2, 2]


@pytest.mark.parametrize("data", [b"", line_of(1)[:-1], bytes(LINE_BYTES), line_of(2)], ids=["none", "short", "zeros", "other"])
def test_bytes_that_are_not_the_lines_are_requested_again(data: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "pause_after", lambda _: 0.0)
    left = [data or b"x", data or b"y"]
    opened = open_shard(tmp_path / "cache", Objects(fault=lambda _: left.pop() if left else None))
    opened.read(1)
    assert opened.objects.requested == [1, 1, 1]
    assert opened.fetcher.stats().retries == 2


def test_an_object_that_stays_wrong_is_an_error_that_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "pause_after", lambda _: 0.0)
    opened = open_shard(tmp_path / "cache", Objects(fault=lambda _: bytes(LINE_BYTES)))
    with pytest.raises(StoreError, match=r"s3://bucket/a.store/shards/g0.lmdb, line 1 .*do not match the line's checksum"):
        opened.read(1)
    assert opened.states() == [ABSENT] * NUM_LINES
    assert opened.cache.room.used() < LINE_BYTES
    opened.objects.fault = lambda _: None
    opened.read(1)


def test_a_missing_object_is_an_error_at_once(tmp_path: Path) -> None:
    def gone(_: int) -> None:
        raise MissingObjectError("it is not there")

    opened = open_shard(tmp_path / "cache", Objects(fault=gone))
    with pytest.raises(MissingObjectError, match=r"g0.lmdb, line 4 .*it is not there"):
        opened.read(4)


def test_a_silent_store_is_an_error_within_the_deadline_and_may_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pause = Pause()
    opened = open_shard(tmp_path / "cache", Objects(fault=pause), deadline_s=0.49)
    begun = time.monotonic()
    with pytest.raises(StoreError, match=r"a.store/shards/g0.lmdb, line 2 \(bytes .*not arrived within [01] s; iterate again"):
        opened.read(2)
    assert time.monotonic() - begun < 10.0
    monkeypatch.setattr(opened.fetcher, "_deadline_s", 20.0)  # a busy machine may be slower than the first one
    pause.over.set()
    opened.read(2)


def test_one_stalled_line_is_an_error_within_the_deadline_though_others_arrive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch, "FIRST_BYTES_S", 1 << 30)  # more than one at a time, within so short a deadline
    pause, deadline_s = Pause(2), 2.0
    opened = open_shard(tmp_path / "cache", Objects(fault=pause), deadline_s=deadline_s)
    begun, errors = time.monotonic(), []

    def read() -> None:
        with pytest.raises(StoreError, match=r"line 2 .*has not arrived"):
            opened.read(2)
        errors.append(time.monotonic() - begun)

    waiting = threading.Thread(target=read)
    waiting.start()
    for turn in range(100):  # others arrive for five deadlines, if nothing ends them
        if waiting.is_alive():
            time.sleep(deadline_s / 20)
            number = (0, 1, 3, 4)[turn % 4]
            opened.shard.present[number] = ABSENT
            opened.read(number)
    assert not waiting.is_alive()
    assert IN_TIME * deadline_s <= errors[0]
    monkeypatch.setattr(opened.fetcher, "_deadline_s", 20.0)  # a busy machine may be slower than the first one
    pause.over.set()
    opened.read(2)


def test_what_a_caller_waited_for_before_counts(tmp_path: Path) -> None:
    pause = Pause()
    opened = open_shard(tmp_path / "cache", Objects(fault=pause), deadline_s=20.0)
    held = opened.fetcher.hold([(opened.shard, 1)], 0)
    begun = time.monotonic()
    with pytest.raises(StoreError, match="has not arrived within 20 s"):
        opened.fetcher.wait(held, begun=begun - 19.8)
    assert time.monotonic() - begun < 10.0
    pause.over.set()
    opened.fetcher.release(held)


def test_a_line_that_is_being_written_stays_locked_when_the_store_is_closed(tmp_path: Path) -> None:
    opened, other = open_shard(tmp_path / "cache"), open_shard(tmp_path / "cache")
    number = opened.shard.lock_of(1)
    assert opened.folder.locks.try_exclusive(number)
    with opened.shard.writing(1) as write:
        opened.close()
        write(memoryview(b"not known to be right"))
        assert not other.folder.locks.try_exclusive(number)
    assert other.folder.locks.try_exclusive(number)
    other.folder.locks.unlock(number)
    other.read(1)


def test_a_wait_ends_when_the_iteration_does(tmp_path: Path) -> None:
    pause = Pause()
    opened = open_shard(tmp_path / "cache", Objects(fault=pause))
    held = opened.fetcher.hold([(opened.shard, 0)], 0)
    is_over = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(opened.fetcher.wait, held, is_over=is_over.is_set)
        is_over.set()
        opened.fetcher.wake()
        assert waiting.result(60) is False
        pause.over.set()
    opened.fetcher.release(held)


def test_a_store_closed_while_lines_arrive_leaves_nothing_reserved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failures: list[object] = []
    monkeypatch.setattr(threading, "excepthook", failures.append)
    pause, before = Pause(), set(threading.enumerate())
    opened = open_shard(tmp_path / "cache", Objects(fault=pause))
    held = opened.fetcher.hold([(opened.shard, number) for number in range(NUM_LINES)], 0)
    assert pause.arrived.wait(10)
    opened.fetcher.release(held)
    opened.close()
    pause.over.set()
    for thread in set(threading.enumerate()) - before:
        thread.join(10)
    assert opened.cache.room.used() < LINE_BYTES
    assert not failures


def test_lines_beyond_the_pinned_share_pass_through_the_ring(tmp_path: Path, small: int) -> None:
    opened = open_shard(tmp_path / "cache", limit=small)
    opened.read(0)
    opened.read(1)
    opened.read(2)
    assert opened.states() == [PINNED, PINNED, RING, ABSENT, ABSENT]
    opened.read(3)  # takes the place of 2
    assert opened.states() == [PINNED, PINNED, ABSENT, RING, ABSENT]
    assert not any(opened.shard.read(2))
    held = opened.fetcher.hold([(opened.shard, 3)], 0)
    other = opened.fetcher.hold([(opened.shard, 2)], 1)
    assert wait_until(lambda: opened.fetcher.lack_room(other))  # 3 is held
    assert opened.states()[3] == RING
    opened.fetcher.release(held)
    assert opened.fetcher.wait(other)
    assert opened.states() == [PINNED, PINNED, RING, ABSENT, ABSENT]
    assert opened.cache.room.used() <= opened.cache.limit


def test_a_line_that_has_just_waited_for_room_or_behind_one_that_did_is_missing_for_want_of_room(
    tmp_path: Path, small: int
) -> None:
    pause = Pause()
    opened = open_shard(tmp_path / "cache", limit=small, deadline_s=80.0)
    opened.read(0, 1)
    held = opened.fetcher.hold([(opened.shard, 3)], 0)
    assert opened.fetcher.wait(held)
    opened.objects.fault = pause
    other, behind = (opened.fetcher.hold([(opened.shard, number)], number) for number in (2, 4))
    assert wait_until(lambda: opened.fetcher.lack_room(other))
    long_ago = time.monotonic() - 100
    other[0].requested_at = behind[0].requested_at = long_ago
    with pytest.raises(StoreError, match="has no room for another line or file"):
        opened.fetcher.wait(behind, begun=long_ago)
    opened.fetcher.release(held)
    assert wait_until(lambda: 2 in opened.objects.requested)
    assert not opened.fetcher.lack_room(other)
    with pytest.raises(StoreError, match="has no room for another line or file"):
        opened.fetcher.wait(other, begun=long_ago)
    other[0].lacked_room_at = long_ago  # it has had room for long
    with pytest.raises(StoreError, match=r"line 2 .*has not arrived"):
        opened.fetcher.wait(other, begun=long_ago)
    pause.over.set()
    assert opened.fetcher.wait(other)
    opened.close()


def test_a_line_that_another_process_fetches_is_not_missing_for_want_of_room(tmp_path: Path, small: int) -> None:
    pause = Pause(3)
    first, second = (open_shard(tmp_path / "cache", Objects(fault=pause), limit=small, deadline_s=80.0) for _ in range(2))
    first.read(0, 1)
    fetched = first.fetcher.hold([(first.shard, 3)], 0)
    assert pause.arrived.wait(10)
    mine, ahead = (second.fetcher.hold([(second.shard, number)], priority) for number, priority in ((3, 0), (2, 9)))
    assert wait_until(lambda: second.fetcher.lack_room(ahead))
    mine[0].requested_at = long_ago = time.monotonic() - 100
    with pytest.raises(StoreError, match=r"line 3 .*has not arrived"):
        second.fetcher.wait(mine, begun=long_ago)
    pause.over.set()
    assert first.fetcher.wait(fetched)
    assert second.fetcher.wait(mine)
    first.close()
    second.close()


def test_a_line_that_is_tried_again_much_later_keeps_no_other_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "pause_after", lambda _: 60.0)

    def refused(number: int) -> None:
        if number in (0, 3):
            raise StoreError("the store is busy")

    pause = Pause()
    first, second = (open_shard(tmp_path / "cache", Objects(fault=fault)) for fault in (refused, pause))
    first.read(2, 4)  # by two threads, which are idle then
    fetched = second.fetcher.hold([(second.shard, 1)], 0)
    assert pause.arrived.wait(10)
    refusals = first.fetcher.hold([(first.shard, 0), (first.shard, 3)], 0)
    assert wait_until(lambda: first.fetcher.stats().retries == 2)
    other = first.fetcher.hold([(first.shard, 1)], 1)
    time.sleep(0.1)  # both threads have looked
    pause.over.set()
    assert second.fetcher.wait(fetched)
    assert first.fetcher.wait(other)
    for opened, lines in ((first, refusals), (first, other), (second, fetched)):
        opened.fetcher.release(lines)
        opened.close()


def test_a_smaller_limit_leaves_pinned_lines_to_the_ring_after_their_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = open_shard(tmp_path / "cache")
    first.read(0, 1, 2)
    monkeypatch.setattr(folder, "LEAST_BYTES", LINE_BYTES)
    limit = 2 * LINE_BYTES + LINE_BYTES // 2
    other = open_shard(tmp_path / "cache", limit=limit, deadline_s=1.5)
    assert other.states() == [PINNED, PINNED, PINNED, ABSENT, ABSENT]
    with pytest.raises(StoreError, match="has no room for another line or file"):
        other.read(3)
    first.close()
    other.close()
    second = open_shard(tmp_path / "cache", limit=limit)
    assert second.states() == [PINNED, RING, RING, ABSENT, ABSENT]
    second.read(3)
    assert second.states()[3] == RING
    assert second.cache.room.used() <= limit


def test_a_line_that_another_process_reads_is_not_freed(tmp_path: Path) -> None:
    first, second = open_shard(tmp_path / "cache"), open_shard(tmp_path / "cache")
    first.read(1)
    first.shard.present[1] = RING
    held = second.fetcher.hold([(second.shard, 1)], 0)
    assert not first.cache.evictor.free()
    second.fetcher.release(held)
    assert first.cache.evictor.free()
    assert second.states()[1] == ABSENT


def test_lines_of_before_a_restart_are_compared_before_they_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = open_shard(tmp_path / "cache")
    first.read(0, 1)
    with first.shard.path.open("r+b") as file:  # what the machine did not write in time
        file.seek(LINE_BYTES)
        file.write(bytes(4096))
    first.close()
    monkeypatch.setattr(cached_shard, "boot_id", lambda: bytes(16))
    second = open_shard(tmp_path / "cache")
    assert second.states()[:2] == [OLD_PINNED, OLD_PINNED]
    second.read(0, 1)
    assert second.objects.requested == [1]
    assert second.states()[:2] == [PINNED, PINNED]


def test_what_a_killed_process_wrote_without_setting_the_byte_is_freed(tmp_path: Path) -> None:
    first = open_shard(tmp_path / "cache")
    for number in (0, 1):
        with first.shard.writing(number) as write:
            write(memoryview(line_of(number)))
    first.cache.room.reserve(2 * LINE_BYTES, 1 << 40)
    first.close()
    first.cache.room._locks.close()  # as the end of the process does
    second = open_shard(tmp_path / "cache")
    assert second.shard.path.stat().st_blocks == 0
    assert second.cache.room.used() < LINE_BYTES


def test_a_full_disk_is_an_error_that_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = open_shard(tmp_path / "cache", deadline_s=1.5)
    opened.read(0)

    def full(*_: object) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(cached_shard.CachedShard, "writing", full)
    with pytest.raises(StoreError, match=r"has no room for another line or file: No space left.*make room on the disk"):
        opened.read(1)
    assert opened.states()[:2] == [PINNED, ABSENT]
    monkeypatch.undo()
    opened.read(0)


def test_a_forked_child_keeps_none_of_its_parents_locks(tmp_path: Path) -> None:
    opened, other = open_shard(tmp_path / "cache"), open_shard(tmp_path / "cache")
    number = opened.shard.lock_of(4)
    assert opened.folder.locks.try_exclusive(number)
    ready, end = os.pipe(), os.pipe()
    child = Apart(lambda: os.write(ready[1], b"1") and len(os.read(end[0], 1)))
    os.read(ready[0], 1)
    assert not other.folder.locks.try_exclusive(number)
    opened.close()  # the parent ends, the child lives
    assert other.folder.locks.try_exclusive(number)
    os.write(end[1], b"1")
    assert child.ended().how is How.DONE


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


def test_half_removed_stores_go_unless_the_folder_has_only_just_become_a_cache(tmp_path: Path) -> None:
    (tmp_path / "removed-0123abcd" / "shards").mkdir(parents=True)
    (tmp_path / "removed-0123abcd" / "locks").write_bytes(b"")
    CacheFolder(tmp_path, None)
    (tmp_path / "removed-photos").mkdir()
    assert (tmp_path / "removed-0123abcd").is_dir()
    CacheFolder(tmp_path, None)
    assert sorted(path.name for path in tmp_path.iterdir()) == [MARK, "removed-photos", "room"]


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


@pytest.mark.parametrize("store_id", ["../x", "", "a/b", ".", "a\0b", "\ud800"])
def test_an_id_leads_nowhere_but_into_a_folder_of_the_cache(store_id: str, tmp_path: Path) -> None:
    folder = CacheFolder(tmp_path / "cache", None).open_store(store_key("s3 b a.store", store_id), "s3://b/a.store")
    assert folder.path.resolve().parent == tmp_path / "cache"
    assert store_key("s3 b a.store", store_id) != store_key("s3 b c.store", store_id)


def test_a_cache_that_is_too_small_says_so(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"may hold 5 B, at least .* give more with --cache-bytes"):
        CacheFolder(tmp_path / "cache", 5)


def test_a_full_disk_leaves_its_room_to_the_lines_in_use_rather_than_to_pinned_ones(
    tmp_path: Path,
) -> None:
    cache, all_bytes = CacheFolder(tmp_path / "cache", 64 * LINE_BYTES), 40 * LINE_BYTES
    cache.reserve_ring(cache, {"plan": 24 * LINE_BYTES}, lambda limit: limit >= all_bytes)
    assert cache.ring_bytes == 32 * LINE_BYTES  # the usual
    assert cache.may_pin(LINE_BYTES)
    cache.shrink()  # to the space that is allocated for the ring, as if others had filled the disk
    assert cache.ring_bytes == cache.limit == 24 * LINE_BYTES
    assert not cache.may_pin(LINE_BYTES)
    cache.set_limit(all_bytes)
    assert cache.ring_bytes == 20 * LINE_BYTES


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
    assert "8.0 MiB kept, 0 B passing through, not in use" in shown
    assert main(["cache", "clear", *own]) == 0
    assert not (tmp_path / "cache" / ("a" * 32)).exists()
    assert opened.cache.room.used() < LINE_BYTES
