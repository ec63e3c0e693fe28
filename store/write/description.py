"""Checks of what describes a new store, before anything is made of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bucketline.errors import UsageError
from bucketline.option_types import expect, unlike
from bucketline.store.format.block import IMAGE_AXES, Column
from bucketline.store.format.columns import FLIPPED_SUFFIX, TARGET
from bucketline.store.format.schema import ColumnRole
from bucketline.store.format.text_block import TextSpec
from bucketline.store.write.ragged_form import RaggedGroup
from bucketline.store.write.row_form import Axis, RowColumn
from bucketline.typed_json import encode

if TYPE_CHECKING:
    from collections.abc import Collection

    from bucketline.typed_json import Json

_COLUMN = "RowColumn(role='target', dtype='F16', shape=(128, 'length'))"


def check_description(
    path: object, columns: object, encoders: object, text: object, empty_caption: object, ragged: object
) -> None:
    """Check the arguments of a store's writer."""
    expect("a store's place", path, str | Path, "a path, as str or Path")
    _expect_all("columns", columns, RowColumn, f"a list of RowColumn, such as [{_COLUMN}]")
    if not columns:
        raise UsageError(f"columns is {columns!r}, expected one or more, such as [{_COLUMN}]")
    expect("encoders", encoders, Mapping, "a mapping, such as {'vae': {'scaling_factor': 0.18215}}")
    if not isinstance(text, TextSpec):
        _expect_all("text", text, Column, "a list of Column, such as [Column(name='tokens', dtype='F16', shape=(768,))]")
    expect(
        "empty_caption",
        empty_caption,
        Mapping | None,
        "a mapping from each text column to its array, such as {'tokens': tokens}",
    )
    expect("ragged", ragged, Mapping, "a mapping from names to RaggedGroup")
    for name, group in dict(ragged).items():  # type: ignore[call-overload]
        expect(f"ragged group {name!r:.80}", group, RaggedGroup, "a RaggedGroup: RaggedGroup(columns=[Column(…)])")


def _expect_all(item: str, values: object, kind: type, expected: str) -> None:
    if isinstance(values, str | bytes) or not isinstance(values, Sequence):
        raise unlike(item, values, expected)
    for value in values:
        expect(f"an item of {item}", value, kind, expected)


def description_as_json(item: str, values: Mapping[str, Any]) -> dict[str, Json]:
    """Return a mapping's values as JSON."""
    found = {}
    for name, value in values.items():
        try:
            found[name] = encode(value)
        except TypeError as error:
            raise UsageError(
                f"{item}[{name!r:.80}] is {value!r:.100}: {error}, expected numbers, texts, lists and mappings: give those "
                "that describe it"
            ) from error
    return found


def roles_of(columns: Sequence[RowColumn], encoders: Collection[str]) -> dict[str, ColumnRole]:
    """Return the manifest's entries of a store's columns; none if they are images' latents."""
    by_role = {column.role: column for column in columns}
    if len(by_role) != len(columns):
        raise UsageError(f"the columns' roles are {[column.role for column in columns]}; expected each of them once")
    if not any(column.axes for column in columns):
        raise UsageError("no column has an axis, by which rows are put into buckets; name one, as shape=(128, 'length')")
    for column in columns:
        if column.role.endswith(FLIPPED_SUFFIX):
            base = by_role.get(column.role.removesuffix(FLIPPED_SUFFIX))
            if base is None or replace(base, role=column.role, encoder=column.encoder) != column:
                raise UsageError(
                    f"column {column.role!r} has no counterpart that is like itself, but for the mirror image; add the column "
                    f"{column.role.removesuffix(FLIPPED_SUFFIX)!r} with its dtype and shape"
                )
    if all(_is_plain_latent(column, encoders) for column in columns) and TARGET in by_role:
        return {}
    return {column.name: ColumnRole(role=column.role, encoder=column.encoder, optional=column.optional) for column in columns}


def _is_plain_latent(column: RowColumn, encoders: Collection[str]) -> bool:
    """Return whether a column is an image's latent, or its mirror image's, which `columns` does not list."""
    dimensions = column.dimensions
    names = tuple(axis.name if isinstance(axis, Axis) else "" for axis in dimensions)
    return (
        column.role in (TARGET, TARGET + FLIPPED_SUFFIX)
        and names == ("", *IMAGE_AXES)
        and not column.optional
        and (column.encoder is None or (column.encoder == "vae" and "vae" in encoders))
        and not column.dtype.startswith(("F8", "C"))
    )
