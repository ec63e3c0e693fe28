"""The cache store: blocks of rows keyed by bucket, sealed in immutable LMDB files. No torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bucketline.store.format.block import BlockSpec, Column
from bucketline.store.format.manifest import Manifest, read_manifest
from bucketline.store.format.sample_record import SampleRecord
from bucketline.store.format.text_block import TextSpec, quantised_spec
from bucketline.store.read.preadv import FileGather
from bucketline.store.read.store import Bucket, OpenShards, Store

if TYPE_CHECKING:
    from bucketline.store.write.part_writer import PartWriter
    from bucketline.store.write.ragged_form import RaggedGroup
    from bucketline.store.write.row_form import Axis, LatentColumn, RowColumn, new_record
    from bucketline.store.write.store_writer import StoreWriter

__all__ = [
    "Axis",
    "BlockSpec",
    "Bucket",
    "Column",
    "FileGather",
    "LatentColumn",
    "Manifest",
    "OpenShards",
    "PartWriter",
    "RaggedGroup",
    "RowColumn",
    "SampleRecord",
    "Store",
    "StoreWriter",
    "TextSpec",
    "new_record",
    "quantised_spec",
    "read_manifest",
]

_WRITERS = {
    "Axis": "row_form",
    "LatentColumn": "row_form",
    "PartWriter": "part_writer",
    "RaggedGroup": "ragged_form",
    "RowColumn": "row_form",
    "StoreWriter": "store_writer",
    "new_record": "row_form",
}


def __getattr__(name: str) -> object:
    """Import what writes on first use: it would add a fifth to a reader's import."""
    if name not in _WRITERS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"{__name__}.write.{_WRITERS[name]}"), name)
