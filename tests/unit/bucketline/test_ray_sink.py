"""`StoreSink` without a cluster: rows keep their dtypes, and tasks that are run twice double nothing."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from bucketline.errors import LockedError, UsageError
from bucketline.ray import StoreSink, batch_of, sample
from bucketline.store import Column, RaggedGroup, RowColumn, Store, StoreWriter
from bucketline.store.format.columns import RAGGED_PREFIX
from tests.reading import everything

if TYPE_CHECKING:
    from pathlib import Path

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
    """Return what `StoreWriter.add` is given of a sample."""
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
    """Return the sink as a task gets it."""
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


def test_rows_are_those_of_a_store_writer_and_a_task_that_ran_twice_doubles_none(tmp_path: Path) -> None:
    run_tasks(StoreSink(tmp_path / "s", **CONTENTS), block(*range(6)), block(*range(6, 12)), twice=(0,))
    with StoreWriter(tmp_path / "expected", **CONTENTS) as writer:
        for number in range(12):
            writer.add(*arguments(number))
    found, expected = (
        {held.record.id: held for rows in everything(Store.open(tmp_path / name)).values() for held in rows}
        for name in ("s", "expected")
    )
    assert found.keys() == expected.keys()
    assert len(found) == Store.open(tmp_path / "s").manifest.samples == 12
    for name, held in found.items():
        assert held.record.captions == expected[name].record.captions
        assert _of_rows(held.columns) == _of_rows(expected[name].columns)
        assert held.captions == expected[name].captions
    assert not (tmp_path / "s" / "pending" / "attempts").exists()


def test_a_row_replaces_the_published_one_of_its_id(tmp_path: Path) -> None:
    for _ in range(2):
        run_tasks(StoreSink(tmp_path / "s", **CONTENTS), block(1, 2))
    manifest = Store.open(tmp_path / "s").manifest
    assert (manifest.samples, manifest.generation) == (2, 2)


def test_the_store_is_locked_during_the_job_and_as_before_if_it_fails(tmp_path: Path) -> None:
    run_tasks(StoreSink(tmp_path / "s", **CONTENTS), block(1))
    before = Store.open(tmp_path / "s").manifest
    sink = StoreSink(tmp_path / "s", **CONTENTS)
    sink.on_write_start(None)
    sink.write([block(2, 3)], SimpleNamespace(task_idx=0))
    with pytest.raises(LockedError, match="being written by another process"), StoreWriter(tmp_path / "s", **CONTENTS):
        pass
    sink.on_write_failed(ValueError("a task failed"))
    assert Store.open(tmp_path / "s").manifest == before
    with StoreWriter(tmp_path / "s", **CONTENTS) as writer:
        assert writer.manifest == before


def test_a_row_that_was_not_made_by_sample_is_refused(tmp_path: Path) -> None:
    sink = StoreSink(tmp_path / "s", **CONTENTS)
    sink.on_write_start(None)
    with pytest.raises(UsageError, match=r"no 'columns', only \['id', 'split'\]; make rows with"):
        sink.write([pa.table({"id": ["a"], "split": ["train"]})], SimpleNamespace(task_idx=0))
    with pytest.raises(UsageError, match="a row has a value of type object, expected an array"):
        sample("a", "train", {"target": object()})
    sink.on_write_failed(ValueError())
