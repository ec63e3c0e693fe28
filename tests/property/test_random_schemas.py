"""Stores of random schemas: what is put in comes back bit for bit by every reader, also after every change."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bucketline.store import Axis, Column, RaggedGroup, ReferenceColumn, RowColumn, Store, with_flipped
from bucketline.store.change.commit import drop
from bucketline.store.change.compact import compact
from bucketline.store.change.merge import merge
from bucketline.store.format.block import DTYPES, reference_axes
from bucketline.store.verify.verify import verify
from tests.kit import SEEN, TEXT, Form, Sample, after_images, expect_independently
from tests.loading import expect_loaded

dtypes = st.sampled_from(sorted(DTYPES))
shapes = st.lists(st.integers(1, 3), max_size=2).map(tuple)
axes = st.one_of(
    st.sampled_from(["length", "height_px"]),
    st.builds(Axis, name=st.sampled_from(["length", "height_px"]), step=st.sampled_from([2, 3])),
)
shapes_with_axes = st.lists(st.one_of(st.integers(0, 3), axes), max_size=3).map(tuple)
ROLES = ("target", "mask", "audio", "control/a", "control/b", "reference/r", "features/x", "features/y")


@st.composite
def row_columns(draw: Callable[[Any], Any]) -> list[RowColumn]:
    """Draw columns of any roles, dtypes and shapes, some with their mirror images; the first has all axes."""
    columns: list[RowColumn] = []
    for role in draw(st.lists(st.sampled_from(ROLES), max_size=5, unique=True)):
        is_optional = role != "target" and draw(st.booleans())
        shape = draw(shapes_with_axes)
        own = RowColumn(role=role, dtype=draw(dtypes), shape=shape, optional=is_optional, allow_nonfinite=True)
        columns += [own, replace(own, role=f"{role}/flipped")] if draw(st.booleans()) else [own]
    names = dict.fromkeys(axis.name for column in columns for axis in column.axes)
    pairs = [ReferenceColumn(n, channels=2, downscale=3, encoder=None) for n in range(draw(st.integers(0, 2)))]
    more = with_flipped(pairs) if draw(st.booleans()) else pairs
    return [RowColumn(role="features/first", dtype="U8", shape=tuple(names) or ("length",)), *columns, *more]


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
def stores(draw: Callable[[Any], Any]) -> tuple[Form, list[list[Sample]]]:
    """Draw a schema, and the samples of two shards."""
    has_text = draw(st.booleans())
    schema = Form(columns=draw(row_columns()), groups=draw(ragged_groups(has_text)), text=TEXT if has_text else None)
    if has_text and draw(st.booleans()):
        schema = replace(schema, groups={**schema.groups, **SEEN}, embed=after_images)
    optional = [column.role for column in schema.columns if column.optional and column.role in schema.roles]
    shards, number = [], 0
    for _ in range(2):
        items = []
        for _ in range(draw(st.integers(1, 5))):
            number += 1
            lacking = draw(st.sampled_from([(), reference_axes(1), reference_axes(0) + reference_axes(1)]))
            sizes = "x".join("0" if axis in lacking else str(draw(st.sampled_from([6, 12]))) for axis in schema.axes)
            bucket = f"{draw(st.sampled_from(['train', 'train', 'val']))}/{sizes}"
            without = draw(st.lists(st.sampled_from(optional), unique=True)) if optional else []
            texts = st.lists(st.sampled_from(["a", "a cat", "two cats by night"]), max_size=2, unique=True)
            captions = tuple(draw(texts)) if has_text else ()
            items.append(schema.sample(f"{number}", bucket, without=without, captions=captions))
        shards.append(items)
    return schema, shards


def check(path: Path, schema: Form, items: list[Sample]) -> None:
    store = Store.open(path)
    verified = verify(store, lambda _: None, 1)
    assert not verified.corrupt
    assert not verified.strays
    expect_independently(path, schema, items)
    schema.expect(store, items)


@pytest.mark.parametrize("examples", [3, pytest.param(20, marks=pytest.mark.slow)])
def test_what_is_put_in_comes_out_of_every_reader_and_every_change(examples: int) -> None:
    @settings(max_examples=examples)
    @given(stores(), st.booleans(), st.booleans())
    def every_reader(drawn: tuple[Form, list[list[Sample]]], verifies: bool, varies: bool) -> None:  # noqa: FBT001
        schema, shards = drawn
        items = [item for shard in shards for item in shard]
        in_train = sum(item.bucket.startswith("train/") for item in items)
        options: dict[str, Any] = {"verify": verifies, "pad_multiple": 2 if varies else None}
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "s"
            schema.make_store(path, *shards)
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
