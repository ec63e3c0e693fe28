"""From an item of the source to a decoded picture, unless the store has it already as it is."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from bucketline.ingest.again import Check
from bucketline.ingest.decode import Decoded, decode
from bucketline.ingest.framing import framing_of
from bucketline.ingest.rejects import Reason, RejectedError
from bucketline.ingest.split import held_out
from bucketline.ingest.stored import StoredSample, StoredSamples
from bucketline.store.digests import identity
from bucketline.store.manifest import bucket_name
from bucketline.store.record import captions_checksum

if TYPE_CHECKING:
    from bucketline.ingest.config import PackConfig
    from bucketline.ingest.grids import Grid
    from bucketline.ingest.sources.source import Source, SourceItem, Stamp
    from bucketline.store import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """A decoded image on its way, with everything that belongs to it."""

    item: SourceItem
    decoded: Decoded
    split: str
    stamp: Stamp
    content: bytes  # digest of its file

    @property
    def bucket(self) -> str:
        size = self.decoded.placement.bucket
        return bucket_name(self.split, size.height_px, size.width_px)


class PictureReader:
    """Reads and decodes; safe to call from several threads."""

    def __init__(self, source: Source, store: Store, config: PackConfig, grid: Grid) -> None:
        self._source, self._samples, self._config = source, StoredSamples(store), config
        self._framing = framing_of(config, grid)

    def read(self, item: SourceItem) -> Picture | None:
        """Read and decode one image; None where the store has it as it is.

        Raises:
            RejectedError: where it cannot be used.
            SourceError: where the source changed under the run.
        """
        stored = self._stored(item) if item.caption_error is None else None
        if stored is not None and self._config.check is Check.SIZE_TIME and _is_stamp_of(stored, self._source.stamp(item)):
            return None
        found = self._source.read(item)
        if item.caption_error is not None:
            raise RejectedError(Reason.CAPTION, item.caption_error)
        content = identity(found.data)
        if stored is not None and self._config.check is Check.CONTENT and stored.content == content:
            return None
        decoded = decode(found.data, self._framing, item.id)
        is_held_out = held_out(item.id, self._config.val_fraction, self._config.split_by)
        return Picture(
            item=replace(item, held=None),
            decoded=decoded,
            split="val" if is_held_out else "train",
            stamp=found.stamp,
            content=content,
        )

    def _stored(self, item: SourceItem) -> StoredSample | None:
        """Give what the store knows of an item; None where it does not have it, or with other captions."""
        found = self._samples.find(item.id)
        return found if found is not None and found.captions == captions_checksum(item.captions) else None


def _is_stamp_of(sample: StoredSample, stamp: Stamp) -> bool:
    return (sample.source_bytes, sample.source_mtime_ns) == (stamp.num_bytes, stamp.mtime_ns)
