"""The cache store: blocks of rows keyed by bucket, sealed in immutable LMDB files. No torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bucketline.store.change.add_column import ColumnAdded, add_column
    from bucketline.store.format.block import BlockSpec, Column
    from bucketline.store.format.manifest import Manifest, read_manifest
    from bucketline.store.format.schema import SampleRecord
    from bucketline.store.format.text import TextSpec, quantised_spec
    from bucketline.store.parallel import WriteSummary, write_store
    from bucketline.store.read.files import FileGather
    from bucketline.store.read.store import Bucket, Store
    from bucketline.store.write.row_form import (
        Axis,
        LatentColumn,
        MaskColumn,
        RaggedGroup,
        ReferenceColumn,
        RowColumn,
        new_record,
        with_flipped,
    )
    from bucketline.store.write.store_writer import PartWriter, StoreWriter

__all__ = [
    "Axis",
    "BlockSpec",
    "Bucket",
    "Column",
    "ColumnAdded",
    "FileGather",
    "LatentColumn",
    "Manifest",
    "MaskColumn",
    "PartWriter",
    "RaggedGroup",
    "ReferenceColumn",
    "RowColumn",
    "SampleRecord",
    "Store",
    "StoreWriter",
    "TextSpec",
    "WriteSummary",
    "add_column",
    "new_record",
    "quantised_spec",
    "read_manifest",
    "with_flipped",
    "write_store",
]

_PLACES = {
    "Axis": "write.row_form",
    "BlockSpec": "format.block",
    "Bucket": "read.store",
    "Column": "format.block",
    "ColumnAdded": "change.add_column",
    "FileGather": "read.files",
    "LatentColumn": "write.row_form",
    "Manifest": "format.manifest",
    "MaskColumn": "write.row_form",
    "PartWriter": "write.store_writer",
    "RaggedGroup": "write.row_form",
    "ReferenceColumn": "write.row_form",
    "RowColumn": "write.row_form",
    "SampleRecord": "format.schema",
    "Store": "read.store",
    "StoreWriter": "write.store_writer",
    "TextSpec": "format.text",
    "WriteSummary": "parallel",
    "add_column": "change.add_column",
    "new_record": "write.row_form",
    "quantised_spec": "format.text",
    "read_manifest": "format.manifest",
    "with_flipped": "write.row_form",
    "write_store": "parallel",
}


def __getattr__(name: str) -> object:
    """Import a public name on first use: options of commands import no numpy, and readers nothing that writes."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"{__name__}.{_PLACES[name]}"), name)


def __dir__() -> list[str]:
    """Return the module's names with all public ones, also those that were not used yet."""
    return sorted({*globals(), *__all__})
