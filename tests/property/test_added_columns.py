"""Columns of any dtype and shape, added in any order of changes: every reader finds what was given, bit for bit."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bucketline.store import Column, Store, add_column
from bucketline.store.change.commit import drop
from bucketline.store.change.compact import compact
from bucketline.store.format.block import DTYPES
from bucketline.torch_dtypes import TORCH_DTYPES
from tests.added_columns import expect_clean, masks_in
from tests.independent_reader import read_store
from tests.kit import LENGTH, Form, values
from tests.loading import loaders_of, rows_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

ROLE = "features/f"
FORM = Form(columns=LENGTH)
BUCKETS = {"train/3": 5, "train/40": 4, "val/3": 2}


@st.composite
def forms(draw: Callable[[Any], Any]) -> Callable[[str], Column]:
    """Draw a dtype, and a shape which may differ by bucket; complex numbers drawn from bits may not be finite."""
    dtype = draw(st.sampled_from(sorted(DTYPES.keys() - {"C64"})))
    shape = draw(st.lists(st.integers(0, 3), max_size=2).map(tuple))
    follows = draw(st.booleans())

    def form(bucket: str) -> Column:
        own = (*shape, int(bucket.rpartition("/")[2])) if follows else shape
        return Column(name=ROLE, dtype=dtype, shape=own)

    return form


def as_given(array: NDArray[Any], dtype: str) -> Any:
    """Return an array as a program has it: what numpy lacks as a tensor."""
    if dtype == "BF16" or dtype.startswith("F8"):
        flat = torch.from_numpy(np.ascontiguousarray(array).reshape(-1))
        return flat.view(TORCH_DTYPES[dtype]).reshape(array.shape)
    return array


@given(forms(), st.lists(st.sampled_from(["drop", "compact", "append", "add"]), max_size=4))
@settings(max_examples=8, deadline=None)
def test_every_reader_finds_what_was_added(form: Callable[[str], Column], changes: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path, buckets, appended = Path(folder) / "s", dict[str, str](), 0

        def expected(sample_id: str) -> NDArray[Any]:
            return values(sample_id, form(buckets[sample_id]))

        def append() -> None:
            nonlocal appended
            items = FORM.samples(BUCKETS, prefix=f"{appended}/")
            appended += 1
            buckets.update({item.id: item.bucket for item in items})
            with FORM.writer(path) as writer:
                FORM.add(writer, items, commit_every=3)

        def add() -> None:
            add_column(path, ROLE, lambda one: as_given(expected(one), form(buckets[one]).dtype))

        append()
        for change in (*changes, "add"):
            if change == "drop":
                gone = sorted(buckets)[:: max(2, len(buckets) // 3)]
                drop(path, gone)
                for one in gone:
                    del buckets[one]
            elif change == "compact":
                compact(path, shard_bytes=1 << 20, gc_older_than_s=0)
            else:
                append() if change == "append" else add()
        expect_clean(path)
        found, independent = masks_in(path, column=ROLE), read_store(path)
        assert found.keys() == independent.keys() == buckets.keys()
        for one in buckets:
            assert found[one].tobytes() == independent[one][1][ROLE].tobytes() == expected(one).tobytes()
        store = Store.open(path)
        for own in rows_of(loaders_of(store, columns=("target", ROLE), verify=True)).values():
            for digest, value in zip(own["ids"], own[f"columns.{ROLE}"], strict=True):
                sample = store.find_digest(digest.tobytes())
                assert sample is not None
                assert value.tobytes() == expected(sample[1].id).tobytes()
