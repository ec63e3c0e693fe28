"""One call writes a store by several processes: every item once, what failed by name, and nothing committed is lost."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bucketline.errors import RankError, SourceError, UsageError
from bucketline.store import RowColumn, Store, StoreWriter, write_store
from bucketline.store.format.manifest import Manifest
from bucketline.store.remote.objects import ObjectFolder
from bucketline.store.sync.push_pull import pull
from bucketline.store.sync.working import WorkingStore
from bucketline.store.transfer import ShardSender, send_shard
from bucketline.store.write.publish import newest_manifest
from tests.commands import ROOT, spawn
from tests.fault.apart import HANG_S, How, apart

COLUMNS = [RowColumn(role="target", dtype="F32", shape=("length",))]
NAMES = [f"sounds/{n:02d}.wav" for n in range(24)]


def array_of(name: str) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.full(3 + len(name) % 2, int(name.rpartition("/")[2].partition(".")[0]), dtype=np.float32)


def encode(name: str) -> dict[str, Any]:
    return {"sample_id": str(name), "split": "train", "columns": {"target": array_of(str(name))}}


@dataclass(frozen=True)
class Noting:
    """Encodes, and notes each name in a file; at some names it does something else first."""

    notes: Path
    at: str = ""
    what: str = ""
    parent: int = 0

    def __call__(self, name: str) -> dict[str, Any]:
        with self.notes.open("a", encoding="utf-8") as file:
            file.write(f"{name}\n")
        if name == self.at:
            match self.what:
                case "fail":
                    raise ValueError("no sound in it")
                case "misfit":
                    return {**encode(name), "columns": {"target": np.zeros((2, 2), dtype=np.float32)}}
                case "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                case "kill the parent":
                    os.kill(os.getppid(), signal.SIGKILL)
                case "interrupt":
                    os.kill(os.getppid(), signal.SIGINT)
        return encode(name)

    @property
    def names(self) -> list[str]:
        return self.notes.read_text(encoding="utf-8").splitlines()


def check(path: Path, names: Iterable[str]) -> None:
    found: dict[str, list[float]] = {}
    for bucket in Store.open(path).buckets():
        rows = np.arange(bucket.num_rows)
        found |= dict(zip(bucket.sample_ids(rows), bucket.read(rows, "latent", verify=True).tolist(), strict=True))
    assert found == {name: array_of(name).tolist() for name in names}


@pytest.mark.parametrize(("workers", "start"), [(0, "spawn"), (2, "spawn"), (3, "fork")])
def test_items_are_written_once_and_not_encoded_again(
    workers: int, start: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(ROOT)  # a spawned worker imports this file
    noting = Noting(tmp_path / "notes")
    written = write_store(tmp_path / "s", NAMES, noting, workers=workers, start=start, columns=COLUMNS)
    assert (written.num_written, written.num_unchanged, written.num_left_out) == (24, 0, 0)
    assert (written.manifest.generation <= max(workers, 1), written.manifest.samples) == (True, 24)  # a commit each
    assert str(written) == "WriteSummary(num_written=24, num_unchanged=0, num_left_out=0)"  # print() of it is one line
    check(tmp_path / "s", NAMES)
    assert sorted(noting.names) == NAMES
    again = write_store(tmp_path / "s", NAMES, noting, workers=0, columns=COLUMNS)
    assert (again.num_written, again.num_unchanged, again.manifest) == (0, 24, written.manifest)
    assert len(noting.names) == 24


def test_only_what_is_missing_is_encoded(tmp_path: Path) -> None:
    with StoreWriter(tmp_path / "s", columns=COLUMNS) as writer:
        for name in NAMES[:20]:
            writer.add(**encode(name))
    noting = Noting(tmp_path / "notes")
    written = write_store(tmp_path / "s", iter(NAMES), noting, workers=2, start="fork", columns=COLUMNS)
    assert (written.num_written, written.num_unchanged) == (4, 20)
    assert sorted(noting.names) == NAMES[20:]
    check(tmp_path / "s", NAMES)


def test_encode_makes_one_sample_or_several_or_none(tmp_path: Path) -> None:
    def several(number: int) -> Any:
        if number == 2:
            return None
        if number == 1:
            one = encode("1.wav")
            return (one["sample_id"], one["split"], one["columns"])
        return (encode(f"{number}/{part}.wav") for part in range(number))

    def ids(number: int) -> list[str]:
        return [f"{number}/{part}.wav" for part in range(number)] if number > 1 else [f"{number}.wav"]

    written = write_store(tmp_path / "s", range(4), several, ids=ids, workers=2, start="fork", columns=COLUMNS)
    assert (written.num_written, written.num_left_out) == (4, 2)
    check(tmp_path / "s", ["1.wav", "3/0.wav", "3/1.wav", "3/2.wav"])


def test_items_may_be_paths_or_a_mapping_by_id(tmp_path: Path) -> None:
    write_store(tmp_path / "s", [Path("a/1.wav")], lambda path: encode(str(path)), workers=0, columns=COLUMNS)
    items = {"b/2.wav": 2, "b/3.wav": 3}
    write_store(tmp_path / "s", items, lambda number: encode(f"b/{number}.wav"), workers=0, columns=COLUMNS)
    check(tmp_path / "s", ["a/1.wav", *items])


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    ("what", "error", "words"),
    [
        ("fail", SourceError, r"^item 'sounds/13.wav': encode raised ValueError: no sound in it; .* call write_store again"),
        ("misfit", UsageError, r"^sample 'sounds/13.wav': column 'target' has the shape \[2, 2\], expected \[length\]"),
    ],
)
def test_a_failing_item_is_named_and_others_kept(
    what: str, error: type[Exception], words: str, workers: int, tmp_path: Path
) -> None:
    noting = Noting(tmp_path / "notes", at=NAMES[13], what=what)
    with pytest.raises(error, match=words) as caught:
        write_store(tmp_path / "s", NAMES, noting, workers=workers, start="fork", columns=COLUMNS)
    assert "in __call__" in "".join(caught.value.__notes__) or what == "misfit"
    kept = set(noting.names) - {NAMES[13]}
    assert kept >= set(NAMES[:13]) if workers == 0 else kept  # another worker may be far behind
    check(tmp_path / "s", kept)
    written = write_store(tmp_path / "s", NAMES, encode, workers=0, columns=COLUMNS)
    assert written.num_unchanged == len(kept)
    check(tmp_path / "s", NAMES)


def test_a_killed_worker_is_told_with_its_item_and_the_next_call_continues(tmp_path: Path) -> None:
    noting = Noting(tmp_path / "notes", at=NAMES[13], what="kill")
    with pytest.raises(RankError, match=r"ended by SIGKILL while it encoded item 'sounds/13.wav', perhaps for lack of memory"):
        write_store(tmp_path / "s", NAMES, noting, workers=2, start="fork", columns=COLUMNS)
    write_store(tmp_path / "s", NAMES, encode, workers=0, columns=COLUMNS)
    check(tmp_path / "s", NAMES)


def test_after_a_kill_the_workers_commit_what_they_have_and_the_next_call_continues(tmp_path: Path) -> None:
    noting = Noting(tmp_path / "notes", at=NAMES[13], what="kill the parent")
    ended = apart(lambda: write_store(tmp_path / "s", NAMES, noting, workers=2, start="fork", columns=COLUMNS), 60)
    assert ended.how is How.DIED
    num_known = len(noting.names) - 2  # at most what the two have at hand is encoded again
    until = time.monotonic() + 60
    while (newest := newest_manifest(tmp_path / "s")) is None or newest.samples < num_known:
        assert time.monotonic() < until
        time.sleep(0.05)
    assert write_store(tmp_path / "s", NAMES, noting, workers=0, columns=COLUMNS).num_unchanged >= num_known
    check(tmp_path / "s", NAMES)


def test_ctrl_c_ends_after_the_items_at_hand_and_leaves_a_store_that_continues(tmp_path: Path) -> None:
    noting = Noting(tmp_path / "notes", at=NAMES[13], what="interrupt")

    def interrupted() -> str:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            write_store(tmp_path / "s", NAMES, noting, workers=2, start="fork", columns=COLUMNS)
        except KeyboardInterrupt:
            return "interrupted"
        return "written"

    ended = apart(interrupted, 60)
    assert (ended.how, ended.gave) == (How.DONE, "interrupted"), ended.said
    assert len(noting.names) < len(NAMES)
    check(tmp_path / "s", noting.names)
    written = write_store(tmp_path / "s", NAMES, encode, workers=0, columns=COLUMNS)
    assert written.num_unchanged == len(noting.names)
    check(tmp_path / "s", NAMES)


def test_a_store_at_a_url_is_written_and_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT)  # a spawned worker imports this file
    url = (tmp_path / "bucket" / "s").as_uri()
    (tmp_path / "bucket").mkdir()
    noting = Noting(tmp_path / "notes", at=NAMES[13], what="fail")
    with pytest.raises(SourceError, match=r"'sounds/13\.wav'"):
        write_store(url, NAMES, noting, workers=2, work=tmp_path / "w", columns=COLUMNS, shard_bytes=200)
    kept = set(noting.names) - {NAMES[13]}
    written = write_store(url, NAMES, encode, workers=2, work=tmp_path / "w2", columns=COLUMNS)
    assert written.num_unchanged == len(kept)
    assert written.manifest.samples == 24
    pull(ObjectFolder.open(url), tmp_path / "s")
    check(tmp_path / "s", NAMES)


def test_a_store_at_a_url_is_published_when_all_is_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    may_send, publish = threading.Event(), WorkingStore.publish

    def sent_when_awaited(*arguments: Any) -> None:
        assert may_send.wait(HANG_S)
        send_shard(*arguments)

    def waiting(own: ShardSender, *arguments: Any) -> None:
        may_send.set()
        finish(own, *arguments)

    def published(own: WorkingStore, manifest: Manifest, sealed: Iterable[str], *more: Any, **named: Any) -> Any:
        assert [name for name in sealed if not (own.path / "shards" / f"{name}.sent").exists()] == []
        return publish(own, manifest, sealed, *more, **named)

    finish = ShardSender.finish
    monkeypatch.setattr("bucketline.store.transfer.send_shard", sent_when_awaited)
    monkeypatch.setattr(ShardSender, "finish", waiting)
    monkeypatch.setattr(WorkingStore, "publish", published)
    (tmp_path / "bucket").mkdir()
    url = (tmp_path / "bucket" / "s").as_uri()
    write_store(url, NAMES, encode, workers=0, work=tmp_path / "w", columns=COLUMNS)
    pull(ObjectFolder.open(url), tmp_path / "s")
    check(tmp_path / "s", NAMES)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a str": ({"items": "a.wav"}, "items is 'a.wav' of type str, expected an iterable of items, or a mapping of them by id"),
    "numbers": ({"items": [1, 2]}, r"item 0 has the ids 1, expected a str, or several: .* Give ids=…"),
    "pairs": ({"items": [("a.wav", 1)]}, r"item 0 has the ids \('a.wav', 1\), expected a str"),
    "pairs of str": ({"items": [("a.wav", "b")]}, r"item 0 is of type tuple, expected a name \(str or Path\); give ids=…"),
    "the same id": ({"items": ["1.wav", "1.wav"]}, "two items give the id '1.wav'; ids must be unique: leave one out"),
    "workers": ({"workers": 2.0}, "workers is 2.0, expected a number of processes, 0 to 1024"),
    "a forked URL": ({"path": "s3://b/s", "workers": 1, "start": "fork"}, 'start="fork" is for a store in a folder'),
    "a lambda": ({"encode": lambda name: name, "workers": 1}, "cannot be sent to other processes .* top level of a module"),
    "another id": ({"encode": lambda _: encode("2.wav")}, r"'1.wav': encode made a sample of the id '2.wav', expected one of"),
    "no mapping": ({"encode": lambda _: 5}, r"'1.wav': encode returned a value of type int, expected a sample as .* or None"),
    "a name": ({"encode": lambda name: name}, "'1.wav': encode returned a value of type str, expected a sample"),
    "an array": ({"encode": lambda _: [np.zeros(3)]}, r"'1.wav': encode made a sample of type ndarray, expected dict\("),
    "no columns": ({"encode": lambda name: (name, "train")}, "'1.wav': encode made a sample that lacks 'columns', expected"),
    "unknown": ({"encode": lambda name: {**encode(name), "text": {}}}, "made a sample that has the unknown 'text', expected"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_wrong_is_refused_with_a_remedy(name: str, tmp_path: Path) -> None:
    changes, words = REFUSED[name]
    with pytest.raises(UsageError, match=words):
        write_store(
            **{"path": tmp_path / "s", "items": ["1.wav"], "encode": encode, "workers": 0, "columns": COLUMNS, **changes}
        )


def test_a_script_without_a_guard_is_told_to_have_one(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "from bucketline.store import RowColumn, write_store\n"
        "import numpy as np\n"
        "def encode(name):\n"
        "    return name, 'train', {'target': np.zeros(3, dtype='f4')}\n"
        f"write_store({str(tmp_path / 's')!r}, ['a'], encode, workers=1,"
        " columns=[RowColumn(role='target', dtype='F32', shape=('length',))])\n",
        encoding="utf-8",
    )
    spawn([sys.executable, script]).fails(
        'write_store is called again while a worker imports your script; call it under `if __name__ == "__main__":`',
        "RankError: a worker of write_store ended with exit code 1 before its first item",
    )
