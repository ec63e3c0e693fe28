"""The samples that every peer gets: latents of several buckets, ragged caption tokens, sizes. Pure functions of a number.

Needs only numpy, because it runs in every peer's environment. Letters: C channels, h and w the latent's height and width, L
the caption's tokens, D token width.
"""

from __future__ import annotations

import hashlib
import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from bucketline.bench.fixtures.values import random_f16

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from numpy.typing import NDArray


DIGEST_BYTES = 16
SIZES = ((128, 128), (112, 144), (144, 112), (96, 160))  # h, w of the latents' buckets
_WORDS = 1 << 64
HEADER = np.dtype([("number", "<i8"), ("num_tokens", "<i8"), ("original_size", "<i4", (2,)), ("crop", "<i4", (2,))])


class Sample(NamedTuple):
    """One sample. `number` is its id in every format."""

    number: int
    latent: NDArray[np.float16]  # [C, h, w]
    tokens: NDArray[np.float16]  # [L, D]
    original_size: NDArray[np.int32]  # [2]
    crop: NDArray[np.int32]  # [2]


@dataclass(frozen=True, slots=True, kw_only=True)
class SetShape:
    """The shape of a set of samples. `buckets` are (h, w, rows); sample numbers run through them consecutively."""

    buckets: tuple[tuple[int, int, int], ...]
    batch_size: int = 32
    channels: int = 4
    tokens: tuple[int, int] = (20, 77)  # minimum, maximum per caption; sample 0 has the maximum
    token_width: int = 768

    def __post_init__(self) -> None:
        for height, width, rows in self.buckets:
            if rows % self.batch_size or rows < 1:
                raise ValueError(
                    f"bucket {height}x{width} has {rows} rows, expected a multiple of the batch size {self.batch_size}, so "
                    "that every loader can deliver each sample once in full batches"
                )
            if self.channels * height * width % 4 or self.token_width % 4:
                raise ValueError(f"rows of bucket {height}x{width} are not whole words of 8 bytes, which `touch` adds up")

    @classmethod
    def of_json(cls, value: Mapping[str, Any]) -> SetShape:
        """Return the shape from the result of `dataclasses.asdict`."""
        return cls(**{**value, "buckets": tuple(map(tuple, value["buckets"])), "tokens": tuple(value["tokens"])})

    @classmethod
    def of_batches(cls, batches: int, batch_size: int) -> SetShape:
        """Return the shape of a set with so many batches in each bucket of the benchmark."""
        return cls(buckets=tuple((height, width, batches * batch_size) for height, width in SIZES), batch_size=batch_size)

    @property
    def num_samples(self) -> int:
        return sum(rows for _, _, rows in self.buckets)

    @property
    def num_batches(self) -> int:
        return self.num_samples // self.batch_size

    @property
    def max_tokens(self) -> int:
        return self.tokens[1]

    @property
    def delivered_bytes(self) -> int:
        """Return the total bytes of all batches' tensors: latents, padded tokens, masks, sizes."""
        rest = self.max_tokens * (2 * self.token_width + 1) + 16
        return sum(rows * (2 * self.channels * h * w + rest) for h, w, rows in self.buckets)

    @property
    def payload_bytes(self) -> int:
        """Return the total bytes of the samples: latents, tokens without padding, sizes."""
        tokens = sum(len(sample(self, number).tokens) for number in range(self.num_samples))
        latents = sum(2 * self.channels * height * width * rows for height, width, rows in self.buckets)
        return latents + 2 * self.token_width * tokens + 16 * self.num_samples

    def bucket_of(self, number: int) -> tuple[int, int, int]:
        end = 0
        for at, (height, width, rows) in enumerate(self.buckets):
            end += rows
            if number < end:
                return at, height, width
        raise IndexError(f"sample {number} of {self.num_samples}")

    def numbers(self, bucket: int) -> range:
        ends = [0, *itertools.accumulate(rows for _, _, rows in self.buckets)]
        return range(ends[bucket], ends[bucket + 1])


def sample(shape: SetShape, number: int) -> Sample:
    """Return a sample; it depends only on the shape and its number."""
    _, height, width = shape.bucket_of(number)
    random = np.random.Generator(np.random.PCG64(number))
    first, most = shape.tokens
    num_tokens = most if number == 0 else int(random.integers(first, most + 1))
    return Sample(
        number=number,
        latent=random_f16(random, (shape.channels, height, width)),
        tokens=random_f16(random, (num_tokens, shape.token_width)),
        original_size=np.array([8 * height + number % 7, 8 * width + number % 5], dtype=np.int32),
        crop=np.array([number % 7, number % 5], dtype=np.int32),
    )


def pack(sample: Sample) -> bytes:
    """Return a sample as bytes, for formats that store bytes: a header of a fixed length, the latent, the tokens."""
    header = np.zeros((), dtype=HEADER)
    header["number"], header["num_tokens"] = sample.number, len(sample.tokens)
    header["original_size"], header["crop"] = sample.original_size, sample.crop
    return header.tobytes() + sample.latent.tobytes() + sample.tokens.tobytes()


def unpack(value: bytes | memoryview, shape: SetShape) -> Sample:
    """Return a sample whose arrays are views of `value`, without copying."""
    header = np.frombuffer(value, dtype=HEADER, count=1)[0]
    number, num_tokens = int(header["number"]), int(header["num_tokens"])
    _, height, width = shape.bucket_of(number)
    latent_shape = (shape.channels, height, width)
    count = shape.channels * height * width
    begin = HEADER.itemsize
    latent = np.frombuffer(value, dtype=np.float16, count=count, offset=begin)
    tokens = np.frombuffer(value, dtype=np.float16, count=num_tokens * shape.token_width, offset=begin + 2 * count)
    return Sample(
        number=number,
        latent=latent.reshape(latent_shape),
        tokens=tokens.reshape(num_tokens, shape.token_width),
        original_size=header["original_size"],
        crop=header["crop"],
    )


def digest(latent: NDArray[Any], tokens: NDArray[Any], original_size: NDArray[Any], crop: NDArray[Any]) -> str:
    """Return the digest of a sample's bytes, without padding of its tokens."""
    state = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for array in (latent, tokens, original_size, crop):
        state.update(np.ascontiguousarray(array).view(np.uint8).data)
    return state.hexdigest()


def words_sum(array: NDArray[Any]) -> int:
    """Return the sum of an array's 8-byte words, modulo 2^64. Reads every byte; zeros, such as padding, add nothing."""
    if not array.flags.c_contiguous:
        raise ValueError(f"a tensor of shape {array.shape} and strides {array.strides} is not contiguous")
    words: NDArray[np.uint64] = array.reshape(-1).view(np.uint64)
    return int(np.add.reduce(words))


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """The expected result of a pass over a set: each sample's digest, and the sum of all words."""

    digests: list[str]  # hexadecimal
    words: int


def expected(shape: SetShape) -> Expected:
    """Return the expected result of a pass, computed from the samples and independent of any format."""
    digests, total = [], 0
    for number in range(shape.num_samples):
        own = sample(shape, number)
        digests.append(digest(own.latent, own.tokens, own.original_size, own.crop))
        total += sum(words_sum(array) for array in (own.latent, own.tokens, own.original_size, own.crop))
        total += len(own.tokens) + number
    return Expected(digests=digests, words=total % _WORDS)


# ------------------------------------------------------------------------------------------------------------------------ gate
# A peer's batch, how it is touched, and the gate: every sample once, with the right bytes, in contiguous batches.
#
# Needs only numpy. Letters: B rows, C channels, h and w the latent's height and width, L tokens (padded), D token width.


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
