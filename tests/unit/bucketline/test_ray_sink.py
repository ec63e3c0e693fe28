"""`StoreSink` without a cluster: rows keep their dtypes, and tasks that are run twice double nothing."""

from __future__ import annotations

import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from bucketline.errors import UsageError
from bucketline.ray import StoreSink, batch_of, sample
from bucketline.store import Column, RaggedGroup, RowColumn, Store, StoreWriter
from bucketline.store.format.block import RAGGED_PREFIX
from bucketline.store.remote.generations import find_newest
from bucketline.store.remote.objects import ObjectFolder
from tests.kit import Held, everything
from tests.object_storage import pulled

CONTENTS: dict[str, Any] = {
    "columns": [
        RowColumn(role="target", dtype="F16", shape=(2, "length")),
        RowColumn(role="features/seen", dtype="F8_E4M3", shape=(3,)),
    ],
    "text": [Column(name="tokens", dtype="BF16", shape=(4,))],
    "empty_caption": {"tokens": torch.zeros(1, 4, dtype=torch.bfloat16)},
    "ragged": {"beats": RaggedGroup(columns=[Column(name="at_s", dtype="F32", shape=())], optional=True)},
}


def arguments(number: int) -> tuple[Any, ...]:
    draw = np.random.default_rng(number)
    columns = {
        "target": draw.standard_normal((2, 5 + number % 2)).astype(np.float16),
        "features/seen": torch.tensor([number, 1.0, 2.0]).to(torch.float8_e4m3fn),
    }
    texts = {f"caption {number % 3}": {"tokens": torch.full((1 + number % 3, 4), float(number % 3), dtype=torch.bfloat16)}}
    ragged = {"beats": np.arange(number % 4, dtype=np.float32)} if number % 2 else {}
    return f"{number}.wav", "val" if number % 5 == 0 else "train", columns, texts, ragged


def block(*numbers: int) -> pa.Table:
    return pa.table(batch_of(sample(*arguments(number)) for number in numbers))


def _of_rows(columns: dict[str, bytes]) -> dict[str, bytes]:
    """Return the columns that do not number a shard's entries."""
    return {name: value for name, value in columns.items() if not name.startswith(RAGGED_PREFIX)}


def copy_of(sink: StoreSink) -> StoreSink:
    copy = pickle.loads(pickle.dumps(sink))
    assert isinstance(copy, StoreSink)
    return copy


def run_tasks(sink: StoreSink, *blocks: pa.Table, twice: tuple[int, ...] = ()) -> None:
    """Make the calls that Ray makes, each task on a copy of the sink, and some of them twice."""
    sink.on_write_start(None)
    returns = []
    for number, own in enumerate(blocks):
        for _ in range(number in twice):
            copy_of(sink).write([own], SimpleNamespace(task_idx=number))
        returns.append(copy_of(sink).write([own], SimpleNamespace(task_idx=number)))
    sink.on_write_complete(SimpleNamespace(write_returns=returns))


def by_id(store: Store) -> dict[str, Held]:
    return {held.record.id: held for rows in everything(store).values() for held in rows}


def compare(store: Store, expected: Store) -> None:
    found, wanted = by_id(store), by_id(expected)
    assert found.keys() == wanted.keys()
    assert len(found) == store.manifest.samples
    for name, held in found.items():
        assert held.record.captions == wanted[name].record.captions
        assert _of_rows(held.columns) == _of_rows(wanted[name].columns)
        assert held.captions == wanted[name].captions


def written(path: Path, *numbers: int) -> Store:
    with StoreWriter(path, **CONTENTS) as writer:
        for number in numbers:
            writer.add(*arguments(number))
    return Store.open(path)


def test_rows_are_those_of_a_store_writer_and_a_task_that_ran_twice_doubles_none(tmp_path: Path) -> None:
    run_tasks(StoreSink(tmp_path / "s", **CONTENTS), block(*range(6)), block(*range(6, 12)), twice=(0,))
    compare(Store.open(tmp_path / "s"), written(tmp_path / "expected", *range(12)))
    assert [path.name for path in (tmp_path / "s" / "pending").iterdir()] == ["writer.lock"]


def test_a_row_replaces_the_published_one_of_its_id(tmp_path: Path) -> None:
    for _ in range(2):
        run_tasks(StoreSink(tmp_path / "s", **CONTENTS), block(1, 2))
    manifest = Store.open(tmp_path / "s").manifest
    assert (manifest.samples, manifest.generation) == (2, 2)


def test_each_task_commits_for_itself_and_what_a_failed_one_had_added_is_lost(tmp_path: Path) -> None:
    sink = StoreSink(tmp_path / "s", **CONTENTS)
    sink.on_write_start(None)
    assert copy_of(sink).write([block(2, 3)], SimpleNamespace(task_idx=0)) == 2
    with StoreWriter(tmp_path / "s", **CONTENTS) as other:  # meanwhile
        other.add(*arguments(1))
    with pytest.raises(UsageError, match="added before"):
        copy_of(sink).write([block(4, 4)], SimpleNamespace(task_idx=1))
    assert by_id(Store.open(tmp_path / "s")).keys() == {"1.wav", "2.wav", "3.wav"}


def test_a_row_that_was_not_made_by_sample_is_refused(tmp_path: Path) -> None:
    sink = StoreSink(tmp_path / "s", **CONTENTS)
    sink.on_write_start(None)
    with pytest.raises(UsageError, match=r"no 'columns', only \['id', 'split'\]; make rows with"):
        sink.write([pa.table({"id": ["a"], "split": ["train"]})], SimpleNamespace(task_idx=0))
    with pytest.raises(UsageError, match="a row has a value of type object, expected an array"):
        sample("a", "train", {"target": object()})


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ObjectFolder:
    monkeypatch.setenv("BUCKETLINE_CACHE", str(tmp_path / "cache"))
    return ObjectFolder.open(f"file://{tmp_path / 'bucket'}")


def sink_at(place: ObjectFolder, **more: Any) -> StoreSink:
    return StoreSink(place.url, **CONTENTS, **more)


def test_a_url_gets_what_a_folder_would_and_no_shard_stays_on_the_disk(place: ObjectFolder, tmp_path: Path) -> None:
    run_tasks(sink_at(place, shard_bytes=1), block(*range(3)), block(*range(3, 5)), twice=(0,))
    compare(pulled(place, tmp_path / "s"), written(tmp_path / "expected", *range(5)))
    (work,) = (path for path in (tmp_path / "cache-pack").iterdir() if path.suffix != ".workers")
    assert not list(work.with_name(f"{work.name}.workers").iterdir())
    assert not list((work / "shards").iterdir())
    assert not list(place.names("pending"))
    run_tasks(sink_at(place), block(1, 2, 20))
    newest = pulled(place, tmp_path / "again")
    assert (newest.manifest.generation, newest.manifest.samples) == (4, 6)


def test_a_task_that_ends_before_its_commit_leaves_a_url_as_it_was(
    place: ObjectFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(*_: object, **__: object) -> None:
        raise OSError("the plug was pulled")

    with monkeypatch.context() as patched:
        patched.setattr("bucketline.store.change.commit.commit", gone)
        with pytest.raises(OSError, match="pulled"):
            run_tasks(sink_at(place), block(3, 4))
    assert find_newest(place) is None
    run_tasks(sink_at(place), block(4, 5))
    assert by_id(pulled(place, tmp_path / "s")).keys() == {"4.wav", "5.wav"}


def test_a_store_writer_refuses_a_url() -> None:
    with pytest.raises(UsageError, match="s3://bucket/s is a URL, and StoreWriter writes to a folder"):
        StoreWriter("s3://bucket/s", **CONTENTS)
