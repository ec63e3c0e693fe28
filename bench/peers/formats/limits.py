"""The limits, in the same form as the peers: batches resident in memory, `memcpy` of them, and O_DIRECT reads of samples."""

from __future__ import annotations

import mmap
import os
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np

from bucketline.bench.harness import memcpy
from bucketline.bench.peers.registry import Opened
from bucketline.bench.peers.samples import HEADER, PeerBatch, pack, sample, unpack

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray

    from bucketline.bench.peers.registry import Remote, Way
    from bucketline.bench.peers.samples import SetShape

SLABS = 2  # buffers per bucket that batches are copied into in turn; in total as much as the loader fills ahead
SECTOR_BYTES = 4096
READING_THREADS = 16


def empty_batch(shape: SetShape, bucket: int) -> PeerBatch:
    """Return a zero-filled batch of a bucket; all of its pages are allocated."""
    height, width, _ = shape.buckets[bucket]
    rows, length = shape.batch_size, shape.max_tokens
    return PeerBatch(
        number=np.full(rows, 0, dtype=np.int64),
        latent=np.full((rows, shape.channels, height, width), 0, dtype=np.float16),
        tokens=np.full((rows, length, shape.token_width), 0, dtype=np.float16),
        mask=np.full((rows, length), 0, dtype=np.bool_),
        original_size=np.full((rows, 2), 0, dtype=np.int32),
        crop=np.full((rows, 2), 0, dtype=np.int32),
    )


def put(batch: PeerBatch, row: int, own: Any) -> None:  # noqa: ANN401 - a Sample
    """Write a sample into a row of a batch, including the padding."""
    batch.number[row] = own.number
    batch.latent[row], batch.original_size[row], batch.crop[row] = own.latent, own.original_size, own.crop
    length = len(own.tokens)
    batch.tokens[row, :length], batch.tokens[row, length:] = own.tokens, 0
    batch.mask[row, :length], batch.mask[row, length:] = True, False


class Resident:
    """Batches resident in memory: the cost of touching only. Nothing is written."""

    def write(self, shape: SetShape, folder: Path) -> None:
        """Write nothing: the batches are made when opened."""

    def open(self, shape: SetShape, place: Path | Remote, way: Way) -> Opened:
        del place, way
        batches = [_resident(shape, bucket, at) for bucket, at in _places(shape)]
        return Opened(begin=lambda: iter(batches))


class Memcpy(Resident):
    """`memcpy` of batches in memory into buffers in turn, with one call per tensor."""

    def open(self, shape: SetShape, place: Path | Remote, way: Way) -> Opened:
        del place, way
        source = [(bucket, _resident(shape, bucket, at)) for bucket, at in _places(shape)]
        slabs = [[empty_batch(shape, bucket) for bucket in range(len(shape.buckets))] for _ in range(SLABS)]

        def copies() -> Iterator[PeerBatch]:
            for turn, (bucket, batch) in enumerate(source):
                slab = slabs[turn % SLABS][bucket]
                pairs: list[tuple[NDArray[Any], NDArray[Any]]] = list(zip(slab, batch, strict=True))
                for to, own in pairs:
                    memcpy(to.ctypes.data, own.ctypes.data, own.nbytes)
                yield slab

        return Opened(begin=copies)


def _places(shape: SetShape) -> list[tuple[int, int]]:
    """Return (bucket, first number) of every batch, in random order."""
    size = shape.batch_size
    places = [(bucket, at) for bucket in range(len(shape.buckets)) for at in shape.numbers(bucket)[::size]]
    return [places[at] for at in np.random.default_rng(0).permutation(len(places)).tolist()]


def _resident(shape: SetShape, bucket: int, first: int) -> PeerBatch:
    batch = empty_batch(shape, bucket)
    for row in range(shape.batch_size):
        put(batch, row, sample(shape, first + row))
    return batch


class Direct:
    """Random O_DIRECT reads, in threads, of samples stored consecutively in a file; stacked and padded."""

    def write(self, shape: SetShape, folder: Path) -> None:
        begins = [0]
        with (folder / "samples.raw").open("wb") as file:
            for number in range(shape.num_samples):
                value = pack(sample(shape, number))
                file.write(value + bytes(-len(value) % SECTOR_BYTES))
                begins.append(file.tell())
        np.save(folder / "begins.npy", np.array(begins, dtype=np.int64))

    def open(self, shape: SetShape, place: Path | Remote, way: Way) -> Opened:
        begins: NDArray[np.int64] = np.load(f"{place}/begins.npy")
        fd = os.open(f"{place}/samples.raw", os.O_RDONLY | os.O_DIRECT)
        random = np.random.default_rng(0)
        longest = int(np.diff(begins).max())
        buffers = [[memoryview(mmap.mmap(-1, longest)) for _ in range(shape.batch_size)] for _ in range(2)]
        slabs = [[empty_batch(shape, bucket) for bucket in range(len(shape.buckets))] for _ in range(2)]
        pool = ThreadPoolExecutor(way.threads or READING_THREADS)

        def read(slab: PeerBatch, row: int, number: int, buffer: memoryview) -> None:
            begin, end = int(begins[number]), int(begins[number + 1])
            if os.preadv(fd, [buffer[: end - begin]], begin) < HEADER.itemsize:
                raise OSError(f"samples.raw ends before sample {number}")
            put(slab, row, unpack(buffer, shape))

        def reads() -> Iterator[PeerBatch]:
            pending = []
            batches = [
                (bucket, random.permutation(np.array(shape.numbers(bucket))).reshape(-1, shape.batch_size))
                for bucket in range(len(shape.buckets))
            ]
            for turn, (bucket, rows) in enumerate((bucket, rows) for bucket, every in batches for rows in every):
                slab, own = slabs[turn % 2][bucket], buffers[turn % 2]
                pending.append((slab, [pool.submit(read, slab, n, number, own[n]) for n, number in enumerate(rows.tolist())]))
                if len(pending) == 2:
                    yield _done(*pending.pop(0))
            for one in pending:
                yield _done(*one)

        return Opened(begin=reads)


def _done(slab: PeerBatch, parts: list[Any]) -> PeerBatch:
    for part in parts:
        part.result()
    return slab
