"""The thread that writes: encoded rows go to shards while the next ones are decoded and encoded."""

from __future__ import annotations

import queue
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from bucketline.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import TracebackType

    from numpy.typing import NDArray

    from bucketline.store.block import BlockSpec
    from bucketline.store.record import SampleRecord
    from bucketline.store.shard_writer import ShardWriter
    from bucketline.store.text_block import Caption

BATCHES_WAITING = 4  # encoded, and not yet taken by the thread that writes


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedRow:
    """A sample's columns and record."""

    record: SampleRecord
    latents: Mapping[str, NDArray[Any]]  # by column, [C, h, w]
    captions: list[bytes]  # digests; the shard has them, or they come with the batch


@dataclass(slots=True, kw_only=True)
class EncodedBatch:
    """Rows of one bucket, and the captions among theirs that the shard does not have yet."""

    spec: BlockSpec
    begins_shard: bool
    captions: list[Caption] = field(default_factory=list)
    rows: list[EncodedRow] = field(default_factory=list)


class RowWriter:
    """Writes batches in their order. All that LMDB does happens in this thread, as its transactions want it."""

    def __init__(self, new_shard: Callable[[], ShardWriter]) -> None:
        self._new_shard = new_shard
        self._waiting: queue.Queue[EncodedBatch | None] = queue.Queue(BATCHES_WAITING)
        self._thread = threading.Thread(target=self._run, name="row-writer", daemon=True)
        self._failure: BaseException | None = None
        self._is_to_seal = True
        self.sealed: list[str] = []

    def put(self, batch: EncodedBatch) -> None:
        """Hand a batch over; waits where the disk is slower than the encoders.

        Raises:
            StoreError: where the disk is full or the store cannot be written, for this batch or an earlier one.
            ModelError: where a latent has another shape than the VAE's configuration says.
        """
        if self._thread.ident is None:
            self._thread.start()
        self._waiting.put(batch)
        self._raise_failure()

    def __enter__(self) -> RowWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Write all that was handed over, and seal the last shard; after an error it is committed and stays pending.

        Raises:
            StoreError: as `put`.
        """
        self._is_to_seal = error is None
        if self._thread.is_alive():
            self._waiting.put(None)
            self._thread.join()
        if self._failure is not error:
            self._raise_failure()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        shard: ShardWriter | None = None
        try:
            while (batch := self._waiting.get()) is not None:
                if batch.begins_shard:
                    self._seal(shard)
                    shard = None
                shard = shard or self._new_shard()
                _write(shard, batch)
            if self._is_to_seal:
                self._seal(shard)
            elif shard is not None:
                shard.commit()
        except BaseException as error:  # noqa: BLE001 - handed to the thread that encodes
            self._failure = error
        finally:
            if shard is not None:
                shard.close()
            if self._failure is not None:
                while self._waiting.get() is not None:  # whoever waits for room is let through, to meet the failure
                    pass

    def _seal(self, shard: ShardWriter | None) -> None:
        if shard is not None and shard.seal():
            self.sealed.append(shard.name)


def _write(shard: ShardWriter, batch: EncodedBatch) -> None:
    for caption in batch.captions:
        shard.add_caption(caption)
    for row in batch.rows:
        try:
            shard.add(spec=batch.spec, latents=row.latents, record=row.record, captions=row.captions)
        except ValueError as error:
            raise ModelError(
                f"{row.record.id}: the VAE's latent does not fit its bucket: {error}; "
                "its config.json does not describe its weights, or it takes other sizes than the grid's"
            ) from error
