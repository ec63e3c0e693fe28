"""Writer thread: writes encoded rows to shards while the next ones are decoded and encoded."""

from __future__ import annotations

import queue
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from bucketline.errors import ModelError, StoreError
from bucketline.joinable_thread import JoinableThread
from bucketline.store.format.text_block import TEXT_GROUP

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import TracebackType

    from numpy.typing import NDArray

    from bucketline.store.format.block import BlockSpec
    from bucketline.store.format.sample_record import SampleRecord
    from bucketline.store.format.text_block import Caption
    from bucketline.store.write.shard_writer import ShardWriter

BATCHES_WAITING = 4  # encoded batches in the queue
_POLL_S = 0.2  # how soon the end of the thread is noticed while the queue is full


@dataclass(slots=True, kw_only=True)
class EncodedBatch:
    """Rows of one bucket, and those of their captions that the shard does not have yet."""

    spec: BlockSpec
    begins_shard: bool
    captions: list[Caption] = field(default_factory=list)
    # of each sample its record, its latents by column, [C, h, w], and the digests of its captions
    rows: list[tuple[SampleRecord, Mapping[str, NDArray[Any]], list[bytes]]] = field(default_factory=list)


class _EndShard:
    """In the queue: seal the shard, and begin another with the next batch."""


class RowWriter:
    """Writes batches in order. All LMDB calls are made in this thread, since a transaction belongs to one thread.

    The thread ends at its first error and takes nothing more from the queue. Every wait therefore ends when the thread has
    either taken the batch or ended, and the call that waited raises the error.
    """

    def __init__(self, new_shard: Callable[[], ShardWriter], on_sealed: Callable[[str], None] = lambda _: None) -> None:
        """Take what begins a shard, and what is told the name of each that is sealed; the thread calls both."""
        self._new_shard, self._on_sealed = new_shard, on_sealed
        self._waiting: queue.Queue[EncodedBatch | _EndShard | None] = queue.Queue(BATCHES_WAITING)
        self._thread = JoinableThread(self._run, name="row-writer")
        self._failure: BaseException | None = None
        self._is_to_seal = True
        self.sealed: list[str] = []

    def put(self, batch: EncodedBatch) -> None:
        """Queue a batch; blocks while the disk is slower than the encoders."""
        if self._thread.ident is None:
            self._thread.start()
        self._hand_over(batch)
        self._raise_failure()

    def end_shard(self) -> None:
        """Have the current shard sealed, if there is one. Raises what `put` does."""
        self._hand_over(_EndShard())
        self._raise_failure()

    def __enter__(self) -> RowWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Write all queued batches and seal the last shard; after an error, commit it and leave it pending."""
        self._is_to_seal = error is None
        self._hand_over(None)
        self._thread.join()
        if self._failure is not error:
            self._raise_failure()

    def _hand_over(self, batch: EncodedBatch | _EndShard | None) -> None:
        """Put a batch, or None to end, into the queue; return at once if the thread has ended."""
        while self._thread.is_alive():
            with suppress(queue.Full):
                self._waiting.put(batch, timeout=_POLL_S)
                return

    def _raise_failure(self) -> None:
        if isinstance(self._failure, MemoryError):
            explained = StoreError(
                "not enough memory to write what was encoded; what was committed is kept: "
                "free memory, or choose a smaller --batch-size, and rerun the command"
            )
            explained.__cause__, self._failure = self._failure, explained
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        try:
            self._write_shards()
        except BaseException as error:  # noqa: BLE001 - raised in the encoding thread
            self._failure = error

    def _write_shards(self) -> None:
        """Write batches until None arrives, then seal or commit the last shard."""
        shard: ShardWriter | None = None
        try:
            while (batch := self._waiting.get()) is not None:
                if isinstance(batch, _EndShard) or batch.begins_shard:
                    self._seal(shard)
                    shard = None
                if not isinstance(batch, _EndShard):
                    shard = shard or self._new_shard()
                    _write(shard, batch)
            if self._is_to_seal:
                self._seal(shard)
            elif shard is not None:
                shard.commit()
        finally:
            if shard is not None:
                shard.close()

    def _seal(self, shard: ShardWriter | None) -> None:
        if shard is not None and shard.seal():
            self.sealed.append(shard.name)
            self._on_sealed(shard.name)


def _write(shard: ShardWriter, batch: EncodedBatch) -> None:
    for caption in batch.captions:
        shard.add_caption({TEXT_GROUP: caption})
    for record, latents, captions in batch.rows:
        try:
            shard.add(spec=batch.spec, latents=latents, record=record, captions=captions)
        except ValueError as error:
            raise ModelError(
                f"{record.id}: the VAE's latent does not fit its bucket: {error}; "
                "its config.json does not describe its weights, or it takes other sizes than the grid's"
            ) from error
