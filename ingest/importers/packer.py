"""Import one rank's share of a cache: read entries ahead in threads, and write them as rows, or only count them."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from bucketline.errors import StoreError
from bucketline.ingest.images.rejects import RejectedError
from bucketline.ingest.importers.changes import cache_stamp, read_entry, rejects_named
from bucketline.ingest.importers.registry import IMPORTERS
from bucketline.ingest.importers.rows import row_of
from bucketline.ingest.pipeline.ordered_pool import OrderedPool, WorkLimits
from bucketline.ingest.summary import RunSummary
from bucketline.store.write.part_writer import PartWriter

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from bucketline.ingest.importers.cache import CacheEntry
    from bucketline.ingest.importers.captions import CaptionedRow, CaptionSource
    from bucketline.ingest.importers.config import ImportConfig
    from bucketline.ingest.importers.rows import ImportedRow, ImportPlan
    from bucketline.ingest.importers.vae.named_vae import NamedVae
    from bucketline.store.transfer.sender import ShardSender
    from bucketline.store.write.row_form import RowForm

_AHEAD_BYTES = 256 << 20
TOGETHER = 8  # entries that a thread reads at a time; handing over each takes as long as reading a small one


class CachePacker:
    """Reads entries, and counts each in the summary as a row or a reject; writes the rows if there is an `output`."""

    def __init__(
        self,
        config: ImportConfig,
        plan: ImportPlan,
        vae: NamedVae,
        num_threads: int,
        output: tuple[CaptionSource, PartWriter] | None = None,
    ) -> None:
        self._config, self._plan, self._vae, self._num_threads, self._output = config, plan, vae, num_threads, output
        self.account = RunSummary()

    def run(self, entries: Sequence[CacheEntry], on_entry: Callable[[], None], check: Callable[[], None]) -> None:
        """Import entries. `check` is called between them, and may raise.

        Raises:
            StoreError: if the disk is full. On any error, what was added is committed, for the next run to adopt.
        """
        if self._output is None:
            self._read(entries, self._count, on_entry, check)
            return
        captions, part = self._output
        with part:
            try:
                self._read(entries, lambda row: self._write(part, captions.add(row)), on_entry, check)
                self._write(part, captions.flush())
            except BaseException:
                with suppress(StoreError):
                    part.commit()
                raise

    def _write(self, part: PartWriter, rows: Sequence[CaptionedRow]) -> None:
        for row, captions in rows:
            if isinstance(captions, RejectedError):
                self.account.reject(row.record.id, captions)
                continue
            # the same caption, embedded by another program, may differ in its last bits
            part.add_record(row.record, row.columns, captions, is_repeat_checked=False)
            self._count(row)

    def _read(
        self,
        entries: Sequence[CacheEntry],
        add: Callable[[ImportedRow], None],
        on_entry: Callable[[], None],
        check: Callable[[], None],
    ) -> None:
        parts = [entries[at : at + TOGETHER] for at in range(0, len(entries), TOGETHER)]
        room = WorkLimits(num_threads=self._num_threads, items=2 * self._num_threads + 1, num_bytes=_AHEAD_BYTES)
        with OrderedPool(parts, self._rows_of, lambda part: len(part) << 20, room) as ahead:
            for part, future in ahead.results(check):
                for entry, found in zip(part, future.result(), strict=True):
                    try:
                        if isinstance(found, RejectedError):
                            raise found
                        add(found)
                    except RejectedError as error:
                        self.account.reject(entry.id, error)
                    on_entry()

    def _rows_of(self, entries: Sequence[CacheEntry]) -> list[ImportedRow | RejectedError]:
        return [self._row_of(entry) for entry in entries]

    def _row_of(self, entry: CacheEntry) -> ImportedRow | RejectedError:
        config = self._config
        try:
            cached = read_entry(IMPORTERS[self._plan.kind], config.source, entry, self._plan.variant)
            with rejects_named(entry):
                stamp = cache_stamp(config.source, entry)
                return row_of(entry, cached, self._vae, self._plan, config, stamp)
        except RejectedError as error:
            return error

    def _count(self, row: ImportedRow) -> None:
        account, bucket = self.account, row.record.bucket
        account.packed += 1
        account.without_caption += not row.record.captions
        account.buckets[bucket] = account.buckets.get(bucket, 0) + 1
        for what in row.left_out:
            account.left_out[what] = account.left_out.get(what, 0) + 1


class SentPart(PartWriter):
    """Has each shard sent once it is sealed, and begins another only when few wait."""

    def __init__(
        self, path: Path, form: RowForm, names: str, shard_bytes: int, sender: ShardSender | None, check: Callable[[], None]
    ) -> None:
        super().__init__(path, form, names, shard_bytes)
        self.sender, self._check = sender, check

    def seal(self) -> None:
        num_sealed = len(self.sealed)
        super().seal()
        if self.sender is not None:
            for name in self.sealed[num_sealed:]:
                self.sender.put(name)
                self.sender.wait_for_room(self._check)
