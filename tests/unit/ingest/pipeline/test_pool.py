"""Work done ahead: in order, within its room, and gone when it is no longer wanted."""

from __future__ import annotations

import itertools
import json
import signal
import subprocess
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lmdb
import pytest

from bucketline.errors import StoreError
from bucketline.ingest.images.crop import RejectedError
from bucketline.ingest.pipeline.image_reader import FOLDER, DecodeNotes
from bucketline.ingest.pipeline.pool import OrderedPool, WorkLimits
from bucketline.ingest.pipeline.slice_packer import BATCHES_WAITING, Rows, RowWriter
from bucketline.store.format.block import caption_digest, identity
from bucketline.store.write import shard_writer
from bucketline.store.write.publish import adopt, lock_store, publish
from bucketline.store.write.shard_writer import ShardWriter
from tests.commands import BIN, call, spawn
from tests.fault.apart import How, apart
from tests.fault.same_store import committed_ids
from tests.kit import empty_store, open_writer, samples_of, spec_of
from tests.models import SMALL, png, write_images


def results(items: Iterable[Any], work: Callable[[Any], Any], size: int = 1, /, **limits: Any) -> Iterator[tuple[Any, Any]]:
    room = WorkLimits(**{"num_threads": 2, "items": 8, "num_bytes": 100} | limits)
    with OrderedPool(items, work, lambda _: size, room) as ahead:
        for item, future in ahead.results(lambda: None):
            yield item, future.result()


def test_results_come_in_the_order_of_the_items_whoever_is_first_done() -> None:
    later = threading.Event()

    def work(n: int) -> int:
        if n == 0:
            assert later.wait(10)
        if n == 3:
            later.set()
        return n * n

    assert list(results(range(20), work)) == [(n, n * n) for n in range(20)]


@pytest.mark.parametrize("room", [{"items": 4, "num_bytes": 1000}, {"items": 99, "num_bytes": 40}])
def test_no_more_is_under_way_than_there_is_room_for(room: dict[str, int]) -> None:
    drawn, most = 0, 0

    def items() -> Iterator[int]:
        nonlocal drawn
        for n in range(50):
            drawn += 1
            yield n

    for taken, _ in enumerate(results(items(), lambda n: n, 10, num_threads=3, **room), start=1):
        most = max(most, drawn - taken)
    assert drawn == 50
    assert most <= 4 + 1  # one more is drawn, and waits


@pytest.mark.parametrize("num_items", [0, 1, 7, 8, 9, 50])
def test_in_bursts_nothing_runs_while_a_result_is_being_used(num_items: int) -> None:
    running: set[int] = set()

    def work(n: int) -> int:
        running.add(n)
        running.discard(n)
        return n

    done = []
    for found in results(iter(range(num_items)), work, num_threads=3, in_bursts=lambda: True):
        assert not running
        done.append(found)
    assert done == [(n, n) for n in range(num_items)]


def test_an_item_larger_than_all_the_room_goes_alone() -> None:
    assert list(results([1, 2, 3], str, 100, num_bytes=5)) == [(1, "1"), (2, "2"), (3, "3")]


def test_a_source_that_fails_is_heard_of_after_the_items_before_it() -> None:
    def items() -> Iterator[int]:
        yield from (1, 2)
        raise OSError("the cable was pulled")

    seen: list[tuple[int, str]] = []
    with pytest.raises(OSError, match="cable"):
        seen.extend(results(items(), str))
    assert seen == [(1, "1"), (2, "2")]


def test_an_interruption_is_noticed_while_nothing_comes_and_no_thread_is_left() -> None:
    before = set(threading.enumerate())
    release = threading.Event()

    def interrupted() -> None:
        release.set()
        raise KeyboardInterrupt

    def run() -> None:
        room = WorkLimits(num_threads=1, items=8, num_bytes=100)
        with OrderedPool([1], lambda _: release.wait(10), lambda _: 1, room) as ahead:
            next(ahead.results(interrupted))

    with pytest.raises(KeyboardInterrupt):
        run()
    assert set(threading.enumerate()) <= before


# An image whose decoder crashes ends one run; the next rejects it by name, and packs the others that were in flight.

# a decoder in C that crashes at some bytes, in every process that has this on its path
_CRASHING = """
import ctypes
from PIL import Image
_open = Image.open
def opened(file, *args, **kwargs):
    if b"CRASH" in file.getvalue():
        ctypes.string_at(0)
    return _open(file, *args, **kwargs)
Image.open = opened
"""


@pytest.mark.slow
def test_a_crashed_decoders_image_is_rejected_by_name_in_the_next_runs(model: Path, tmp_path: Path) -> None:
    write_images(tmp_path / "images", 5)
    (tmp_path / "images" / "crashes.png").write_bytes(png(20, 30) + b"CRASH")
    (tmp_path / "path").mkdir()
    (tmp_path / "path" / "sitecustomize.py").write_text(_CRASHING, encoding="ascii")
    asked = [BIN / "ingest", "pack", tmp_path / "images", tmp_path / "s", "--model", model, *SMALL, "--json"]
    path = str(tmp_path / "path")
    assert spawn(asked, PYTHONPATH=path).code == -signal.SIGSEGV
    for packed, unchanged in ((5, 0), (0, 5)):
        ran = spawn(asked, PYTHONPATH=path).done()
        assert (ran.json["packed"], ran.json["unchanged"], ran.json["rejected"]) == (packed, unchanged, 1)
        (reject,) = map(json.loads, (tmp_path / "s" / "rejects.jsonl").read_text(encoding="ascii").splitlines())
        assert reject["id"] == "crashes.png"
        assert "its decoder crashes" in reject["detail"]
    assert json.loads(call("store", "verify", tmp_path / "s", "--json").out)["strays"] == []
    (tmp_path / "images" / "crashes.png").write_bytes(png(20, 30))  # saved again
    assert spawn(asked, PYTHONPATH=path).json["packed"] == 1


def test_what_a_process_was_decoding_is_found_when_it_is_gone_and_no_sooner(tmp_path: Path) -> None:
    data = png(20, 30)
    one = DecodeNotes(tmp_path, 2)
    with one.of(identity(data), data):
        other = DecodeNotes(tmp_path, 2)
        assert not list((tmp_path / FOLDER).glob("suspect-*"))
        other.close()
        notes = next((tmp_path / FOLDER).glob("notes-*"))
        left = notes.read_bytes()
    one.close()
    assert not (tmp_path / FOLDER).exists()
    (tmp_path / FOLDER).mkdir()
    notes.write_bytes(left)  # as a process leaves it that is killed
    after = DecodeNotes(tmp_path, 2)
    assert [path.name for path in (tmp_path / FOLDER).glob("suspect-*")] == [f"suspect-{identity(data).hex()}"]
    with after.of(identity(data), data):  # tried in a process of its own, which ends well
        pass
    after.close()
    assert not (tmp_path / FOLDER).exists()


def test_an_image_that_is_marked_is_refused_as_long_as_its_bytes_are_the_same(tmp_path: Path) -> None:
    data, saved_again = png(20, 30), png(20, 30, 1)
    (tmp_path / FOLDER).mkdir()
    (tmp_path / FOLDER / f"crashes-{identity(data).hex()}").touch()
    notes = DecodeNotes(tmp_path, 1)
    with pytest.raises(RejectedError, match="its decoder crashes"), notes.of(identity(data), data):
        pass
    with notes.of(identity(saved_again), saved_again):
        pass
    notes.close()


def test_images_of_the_same_bytes_are_all_refused_by_one_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trials, data = list[bytes](), png(20, 30)

    def crashes(*_args: object, **_options: object) -> subprocess.CompletedProcess[bytes]:
        trials.append(data)
        return subprocess.CompletedProcess([], -signal.SIGSEGV)

    monkeypatch.setattr(subprocess, "run", crashes)
    (tmp_path / FOLDER).mkdir()
    (tmp_path / FOLDER / f"suspect-{identity(data).hex()}").touch()
    notes, both, decoded = DecodeNotes(tmp_path, 2), threading.Barrier(2), list[bool]()

    def decode() -> None:
        both.wait()
        with suppress(RejectedError), notes.of(identity(data), data):
            decoded.append(True)

    with ThreadPoolExecutor(2) as pool:
        for one in [pool.submit(decode) for _ in range(2)]:
            one.result()
    notes.close()
    assert (len(trials), decoded) == (1, [])


def test_notes_that_cannot_be_taken_over_do_not_stop_this_process_from_noting(tmp_path: Path) -> None:
    (tmp_path / FOLDER).mkdir()
    (tmp_path / FOLDER / "notes-1-gone").symlink_to(tmp_path / "nothing")
    (tmp_path / FOLDER / "notes-2-new").touch()  # of a process that is about to lock it
    notes = DecodeNotes(tmp_path, 1)
    assert len(list((tmp_path / FOLDER).glob("notes-*"))) == 3
    notes.close()


def test_without_a_folder_to_write_to_nothing_is_noted(tmp_path: Path) -> None:
    notes = DecodeNotes(tmp_path / "none", 1)
    with notes.of(b"x" * 16, b""):
        pass
    notes.close()
    assert not (tmp_path / "none").exists()


# The writing thread may end at any moment, by any error: nobody waits for it, the error is raised, and the locks are free.


BUCKET = "train/64x64"
ENOUGH = 3 * BATCHES_WAITING  # batches: more than the queue takes, whatever the thread has come to
SAMPLES = samples_of({BUCKET: ENOUGH})
HUNG_S = 60.0  # on a busy machine; it takes a fraction of a second


class Defect(BaseException):
    """An exception that no `except Exception` catches."""


def full_disk() -> None:
    raise StoreError("the disk is full")


def no_memory() -> None:
    raise MemoryError


def defect() -> None:
    raise Defect("of nobody's making")


def write(store: Path, *, batches: int, batches_a_shard: int, stop: BaseException | None = None) -> list[str]:
    """Write batches of one sample each, and give the names of the shards that were sealed."""
    numbers = itertools.count()
    writer = RowWriter(lambda: open_writer(store, f"a{next(numbers)}"))
    with writer:
        for n, sample in enumerate(SAMPLES[:batches]):
            rows: Rows = [(sample.record, {"latent": sample.latent}, [caption_digest("")], {})]
            writer.put(spec_of(BUCKET), [], rows, begins_shard=n > 0 and n % batches_a_shard == 0)
        if stop is not None:
            raise stop
    return writer.sealed


def outcome(work: Callable[[], object]) -> tuple[str, str]:
    try:
        work()
    except BaseException as error:  # noqa: BLE001 - it is what is requested
        return type(error).__name__, str(error)
    return "no error", ""


@dataclass(frozen=True, kw_only=True)
class Moment:
    """A call of a shard writer's method that fails, the `call`-th, and what is handed over until then."""

    method: str
    call: int = 0
    batches: int = 2
    batches_a_shard: int = ENOUGH
    stop: BaseException | None = None  # ends the thread that encodes, after the last batch

    def arrange(self, fail: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
        calls, method = itertools.count(), getattr(ShardWriter, self.method)

        def failing(*args: object, **named: object) -> object:
            if next(calls) == self.call:
                fail()
            return method(*args, **named)

        monkeypatch.setattr(ShardWriter, self.method, failing)


MOMENTS = {
    "sealing the last shard": Moment(method="seal"),
    "sealing one of several": Moment(method="seal", call=1, batches=ENOUGH, batches_a_shard=2),
    "committing after a stop": Moment(method="commit", stop=KeyboardInterrupt()),
    "writing, with more to come than the queue takes": Moment(method="add", call=1, batches=ENOUGH),
    "beginning a shard": Moment(method="__init__", batches=ENOUGH),
    "beginning a second shard": Moment(method="__init__", call=1, batches=ENOUGH, batches_a_shard=2),
    "giving a shard up": Moment(method="close"),
}


@pytest.mark.parametrize(
    ("fail", "expected"),
    [(full_disk, ("StoreError", "disk is full")), (no_memory, ("StoreError", "memory")), (defect, ("Defect", "making"))],
)
@pytest.mark.parametrize("name", MOMENTS)
def test_an_error_of_the_writing_thread_is_raised_at_any_moment_and_nobody_waits(
    name: str, fail: Callable[[], None], expected: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moment, manifest = MOMENTS[name], empty_store(tmp_path)
    monkeypatch.setattr(shard_writer, "COMMIT_BYTES", 1)  # a row is committed as soon as it is added
    monkeypatch.setattr(shard_writer, "FLUSH_AFTER_S", -1.0)
    moment.arrange(fail, monkeypatch)
    ended = apart(
        lambda: outcome(
            lambda: write(tmp_path, batches=moment.batches, batches_a_shard=moment.batches_a_shard, stop=moment.stop)
        ),
        HUNG_S,
    )
    assert ended.how is How.DONE, ended.said
    kind, words = ended.gave
    assert (kind, expected[1] in words) == (expected[0], True), (kind, words)

    monkeypatch.undo()
    committed = committed_ids(tmp_path)
    with lock_store(tmp_path):
        assert publish(tmp_path, manifest, adopt(tmp_path, manifest), ()).samples == len(committed)
    assert (len(committed) > 0) == (name != "beginning a shard")


def test_the_locks_are_free_as_soon_as_the_error_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    empty_store(tmp_path)

    def refuse(*_: object) -> None:
        raise lmdb.DiskError("mdb_env_sync: Input/output error")

    monkeypatch.setattr("bucketline.store.write.seal._put_in_order", refuse)

    def work() -> tuple[str, str, list[str]]:
        kind, words = outcome(lambda: write(tmp_path, batches=2, batches_a_shard=ENOUGH))
        return kind, words, [path.name for path in (tmp_path / "pending").glob("*.lock")]

    ended = apart(work, HUNG_S)
    assert ended.how is How.DONE, ended.said
    kind, words, locks = ended.gave
    assert kind == "StoreError"
    assert "a0.lmdb cannot be sealed: mdb_env_sync: Input/output error; " in words
    assert locks == []
    assert committed_ids(tmp_path) == {sample.id for sample in SAMPLES[:2]}
