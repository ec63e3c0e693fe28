"""A column is added in a process that is killed at any shard, and by one next to a writer: nothing is lost or half there."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from bucketline.errors import LockedError
from bucketline.store import add_column, read_manifest
from bucketline.store.read.store import Store
from bucketline.store.verify.verify import verify
from tests.added_columns import expect_clean, expect_masks, mask_of
from tests.commands import ROOT, spawn
from tests.fault.apart import How, apart
from tests.kit import make_store, samples_of

if TYPE_CHECKING:
    from pathlib import Path

ROWS = {"train/64x64": 6, "val/64x96": 3}
SHARDS = ("a/", "b/", "c/", "d/")
NUM = len(SHARDS) * sum(ROWS.values())


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return make_store(tmp_path / "s", *(samples_of(ROWS, prefix) for prefix in SHARDS)).path


def killed_at(number: int) -> Any:
    """Return a function of an id that kills its process at the n-th call."""
    calls = []

    def value(sample_id: str) -> Any:
        calls.append(sample_id)
        if len(calls) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return mask_of(sample_id)

    return value


@pytest.mark.parametrize("number", [1, 11, NUM])
def test_a_call_killed_at_any_row_leaves_the_old_generation_and_is_continued(number: int, path: Path) -> None:
    before = read_manifest(path)
    ended = apart(lambda: add_column(path, "mask", killed_at(number)).rows)
    assert (ended.how, ended.signal) == (How.DIED, signal.SIGKILL)
    assert read_manifest(path) == before
    assert verify(Store.open(path), lambda _: None).corrupt == ()
    asked = []

    def value(sample_id: str) -> Any:
        asked.append(sample_id)
        return mask_of(sample_id)

    assert add_column(path, "mask", value).rows == NUM
    assert len(asked) == NUM - (number - 1) // sum(ROWS.values()) * sum(ROWS.values())  # whole shards are kept
    expect_masks(path, NUM)
    expect_clean(path)


def test_a_call_killed_between_its_files_and_its_generation_is_published_by_the_next(path: Path) -> None:
    def killed() -> int:
        publishing = "bucketline.store.change.commit.publish_shards"
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(publishing, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
            return add_column(path, "mask", mask_of).rows

    assert apart(killed).how is How.DIED
    assert not read_manifest(path).added
    assert add_column(path, "mask", lambda one: pytest.fail(f"{one} was requested")).rows == NUM
    expect_masks(path, NUM)
    expect_clean(path)


WRITER = """
import sys
from pathlib import Path
from tests.kit import add_samples, samples_of, store_writer

with store_writer(Path(sys.argv[1])) as writer:
    add_samples(writer, samples_of({"train/64x64": 4}, "w/"))
    print("writing", flush=True)
    sys.stdin.readline()
"""


@pytest.mark.usefixtures("no_wait")
def test_a_writer_in_another_process_is_named_and_both_get_their_rows(path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", WRITER, str(path)]
    writer = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    assert writer.stdin is not None
    assert writer.stdout is not None
    assert writer.stdout.readline() == "writing\n"
    with pytest.raises(LockedError, match=rf"another process .*pid: {writer.pid}.*the values are kept"):
        add_column(path, "mask", mask_of)
    writer.communicate("\n", timeout=60)
    assert writer.returncode == 0
    added = add_column(path, "mask", mask_of)
    assert (added.rows, added.rows_without) == (NUM + 4, 0)
    expect_masks(path, NUM + 4)
    expect_clean(path)


@pytest.mark.slow
def test_the_example_adds_masks_once(tmp_path: Path) -> None:
    place = tmp_path / "mine.store"

    def run(name: str) -> str:
        done = spawn([sys.executable, ROOT / "examples" / name, place]).done()
        return done.out

    assert run("write_store.py").startswith("64 samples added")
    assert run("add_column.py").startswith("64 rows have got a mask, 0 are without one in generation 2\n")
    again = run("add_column.py")
    assert again.startswith("0 rows have got a mask, 0 are without one in generation 2\n")
    assert "masks [4, 1, 8, " in again
    shown = spawn([sys.executable, "-m", "bucketline.store.cli", "info", place, "--json"])
    assert json.loads(shown.out)["added"] == {"mask": {"role": "mask", "rows": 64}}
