"""A peer's batch, how it is touched, and the gate: every sample once, with the right bytes, in contiguous batches.

Needs only numpy. Letters: B rows, C channels, h and w the latent's height and width, L tokens (padded), D token width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from bucketline.bench.peers.samples import digest, words_sum

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from bucketline.bench.peers.samples import Expected, SetShape

_WORDS = 1 << 64


class GateError(Exception):
    """A peer did not deliver the samples that it was given."""


class PeerBatch(NamedTuple):
    """A batch as a trainer receives it."""

    number: NDArray[np.int64]  # [B]
    latent: NDArray[np.float16]  # [B, C, h, w]
    tokens: NDArray[np.float16]  # [B, L, D], zeros after a caption's own tokens
    mask: NDArray[np.bool_]  # [B, L]
    original_size: NDArray[np.int32]  # [B, 2]
    crop: NDArray[np.int32]  # [B, 2]

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all tensors except the ids."""
        return sum(array.nbytes for array in self[1:])


def touch(batch: PeerBatch) -> int:
    """Read every byte of a batch; return a number that adds up to `Expected.words` over a pass, modulo 2^64."""
    total = sum(words_sum(array) for array in (batch.latent, batch.tokens, batch.original_size, batch.crop))
    return total + int(np.count_nonzero(batch.mask)) + int(batch.number.sum())


@dataclass(frozen=True, slots=True, kw_only=True)
class Passed:
    """The gate's observations of a pass."""

    batches: int
    num_bytes: int
    buckets_in_a_row: int  # the longest run of batches of one bucket
    order: list[int]  # the samples' numbers in order of delivery


def check(batches: Iterable[PeerBatch], shape: SetShape, wanted: Expected) -> Passed:
    """Check the batches of a pass."""
    seen = np.zeros(shape.num_samples, dtype=np.int64)
    count = num_bytes = run = longest = 0
    last, order = -1, list[int]()
    for count, batch in enumerate(batches, 1):
        bucket = _check_batch(batch, shape, f"batch {count}")
        for row, number in enumerate(batch.number.tolist()):
            if not 0 <= number < shape.num_samples:
                raise GateError(f"batch {count} holds sample {number} of {shape.num_samples}")
            own = batch.tokens[row, : int(np.count_nonzero(batch.mask[row]))]
            found = digest(batch.latent[row], own, batch.original_size[row], batch.crop[row])
            if found != wanted.digests[number]:
                raise GateError(f"sample {number} has other bytes than were written (batch {count}, row {row})")
            seen[number] += 1
            order.append(number)
        run = run + 1 if bucket == last else 1
        last, longest = bucket, max(longest, run)
        num_bytes += batch.num_bytes
    missing, repeated = np.flatnonzero(seen == 0), np.flatnonzero(seen > 1)
    if len(missing) or len(repeated):
        some = [*missing[:3].tolist(), *repeated[:3].tolist()]
        raise GateError(
            f"of {shape.num_samples} samples {len(missing)} were missing and {len(repeated)} came more than once in a pass, "
            f"such as {some}"
        )
    return Passed(batches=count, num_bytes=num_bytes, buckets_in_a_row=longest, order=order)


def _check_batch(batch: PeerBatch, shape: SetShape, name: str) -> int:
    """Check a batch's shapes, dtypes and padding; return its bucket."""
    rows = len(batch.number)
    bucket, height, width = shape.bucket_of(int(batch.number[0]))
    wanted: dict[str, tuple[tuple[int, ...], type[Any]]] = {
        "latent": ((rows, shape.channels, height, width), np.float16),
        "tokens": ((rows, shape.max_tokens, shape.token_width), np.float16),
        "mask": ((rows, shape.max_tokens), np.bool_),
        "original_size": ((rows, 2), np.int32),
        "crop": ((rows, 2), np.int32),
    }
    for field, (dimensions, dtype) in wanted.items():
        array = getattr(batch, field)
        if array.shape != dimensions or array.dtype != dtype:
            raise GateError(f"{name}: {field} is {array.dtype} {array.shape}, expected {np.dtype(dtype)} {dimensions}")
        if not array.flags.c_contiguous:
            raise GateError(f"{name}: {field} is not contiguous, its strides are {array.strides}")
    lengths = np.count_nonzero(batch.mask, axis=1)
    if (batch.mask != (np.arange(shape.max_tokens) < lengths[:, None])).any():
        raise GateError(f"{name}: a mask is not the first tokens of a caption")
    if batch.tokens[~batch.mask].any():
        raise GateError(f"{name}: values after a caption's own tokens, expected zeros")
    return bucket


def sums_up(total: int, passes: int, wanted: Expected) -> bool:
    """Return True if the results of `touch` over some passes add up to the expected sum."""
    return total % _WORDS == wanted.words * passes % _WORDS
