"""Latents reused from the store, for unchanged images whose captions or mtime changed."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from bucketline.errors import StoreError
from bucketline.ingest.images.bucket_grid import Size
from bucketline.ingest.images.geometry import Placement
from bucketline.store.format.block import fixed_columns
from bucketline.store.format.hashing import sample_digest
from bucketline.store.read.verified_sample import checked_row

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from bucketline.ingest.pipeline.packed_index import PackedSample
    from bucketline.store import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptLatents:
    """The latent columns of a stored row, with verified checksum, and the placement of its image."""

    placement: Placement
    split: str
    latents: Mapping[str, NDArray[Any]]  # by column, [C, h, w]

    @property
    def num_bytes(self) -> int:
        return sum(latent.nbytes for latent in self.latents.values())


class KeptRows:
    """Reads rows back from a store; safe to use from several threads.

    A run has the rules and encoders of the store (its fingerprint), so an image with the same content has the same latents.
    That includes sampled latents and random crops, which depend only on the id.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._names = {column.name for column in fixed_columns(store.manifest.max_captions)}
        self._lock = threading.Lock()  # sidecars are mapped on first use

    def read(self, sample_id: str, stored: PackedSample) -> KeptLatents | None:
        """Return a sample's latents; None if its row is damaged or unreadable, so that the image must be encoded."""
        try:
            with self._lock:
                record = self._store.record_of(stored.shard, sample_digest(sample_id))
                row = checked_row(self._store, stored.shard, record)
        except StoreError:
            return None
        spec = self._store.manifest.specs[record.bucket]
        latents = {
            column.name: np.frombuffer(row[column.name], dtype=column.numpy_dtype).reshape(column.shape)
            for column in spec.columns
            if column.name not in self._names
        }
        top, left, height, width = record.crop
        placement = Placement(
            bucket=Size(height, width), source=record.original_size, resized=record.resized, top=top, left=left
        )
        return KeptLatents(placement=placement, split=record.split, latents=latents)
