"""Stores of random schemas: what is put in comes back bit for bit by every reader, also after every change."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bucketline.store import Column, RaggedGroup, RowColumn, Store
from bucketline.store.change.compact import compact
from bucketline.store.change.drop import drop
from bucketline.store.change.merge import merge
from bucketline.store.format.safetensors_header import DTYPES
from bucketline.store.verify.verify import verify
from tests.free_columns import make_item
from tests.ragged import Schema, expect_independently, expect_loaded, expect_read, make_ragged

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.free_columns import Item

dtypes = st.sampled_from(sorted(DTYPES))
shapes = st.lists(st.integers(1, 3), max_size=2).map(tuple)


@st.composite
def row_columns(draw: Callable[[Any], Any]) -> list[RowColumn]:
    """Draw one to six columns; at least one has the axis."""
    columns = []
    for n in range(draw(st.integers(1, 6))):
        shape = draw(shapes)
        if n == 0 or draw(st.booleans()):
            shape = (*shape, "length")
        role = draw(st.sampled_from(["target", f"features/f{n}"])) if n == 0 else f"features/f{n}"
        is_optional = n > 0 and draw(st.booleans())
        columns.append(RowColumn(role=role, dtype=draw(dtypes), shape=shape, optional=is_optional, allow_nonfinite=True))
    return columns


@st.composite
def ragged_groups(draw: Callable[[Any], Any], has_text: bool) -> dict[str, RaggedGroup]:  # noqa: FBT001 - of hypothesis
    groups = {}
    for name in draw(st.lists(st.sampled_from(["audio", "points", "x", "a_b"]), max_size=3, unique=True)):
        of_captions = has_text and draw(st.booleans())
        rule: dict[str, Any] = {"of": "captions"}
        if not of_captions:
            rule = {"of": "rows", "stored_once": draw(st.booleans()), "optional": draw(st.booleans())}
        tokens, fixed = draw(st.integers(1, 3)), draw(st.integers(0, 2))
        groups[name] = RaggedGroup(
            columns=[Column(name=f"t{n}", dtype=draw(dtypes), shape=draw(shapes)) for n in range(tokens)],
            fixed=[Column(name=f"f{n}", dtype=draw(dtypes), shape=draw(shapes)) for n in range(fixed)],
            allow_nonfinite=True,
            **rule,
        )
    return groups


@st.composite
def stores(draw: Callable[[Any], Any]) -> tuple[Schema, list[list[Item]]]:
    """Draw a schema, and the samples of two shards."""
    has_text = draw(st.booleans())
    schema = Schema(columns=draw(row_columns()), groups=draw(ragged_groups(has_text)), has_text=has_text)
    optional = [column.role for column in schema.columns if column.optional]
    shards, number = [], 0
    for _ in range(2):
        items = []
        for _ in range(draw(st.integers(1, 5))):
            number += 1
            bucket = f"{draw(st.sampled_from(['train', 'train', 'val']))}/{draw(st.integers(1, 3))}"
            without = draw(st.lists(st.sampled_from(optional), unique=True)) if optional else []
            texts = st.lists(st.sampled_from(["a", "a cat", "two cats by night"]), max_size=2, unique=True)
            captions = tuple(draw(texts)) if has_text else ()
            items.append(make_item(f"{number}", bucket, schema.columns, without=without, captions=captions))
        shards.append(items)
    return schema, shards


def check(path: Path, schema: Schema, items: list[Item]) -> None:
    store = Store.open(path)
    verified = verify(store, lambda _: None, 1)
    assert not verified.corrupt
    assert not verified.strays
    expect_independently(path, schema, items)
    expect_read(store, schema, items)


@pytest.mark.parametrize("examples", [3, pytest.param(20, marks=pytest.mark.slow)])
def test_what_is_put_in_comes_out_of_every_reader_and_every_change(examples: int) -> None:
    @settings(max_examples=examples)
    @given(stores(), st.booleans(), st.booleans())
    def every_reader(drawn: tuple[Schema, list[list[Item]]], verifies: bool, varies: bool) -> None:  # noqa: FBT001
        schema, shards = drawn
        items = [item for shard in shards for item in shard]
        in_train = sum(item.bucket.startswith("train/") for item in items)
        options: dict[str, Any] = {"verify": verifies, "pad_multiple": 2 if varies else None}
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "s"
            make_ragged(path, schema, *shards)
            check(path, schema, items)
            assert expect_loaded(path, schema, items, **options) == in_train
            assert expect_loaded(path, schema, items, plain_reads=True) == in_train
            left = items[1:]
            drop(path, [items[0].id])
            merge(Path(folder) / "m", [path])
            compact(path, shard_bytes=1 << 30, gc_older_than_s=0)
            for changed in (path, Path(folder) / "m"):
                check(changed, schema, left)
            expect_loaded(path, schema, left, **options)

    every_reader()
