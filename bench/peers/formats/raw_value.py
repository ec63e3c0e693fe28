"""A sample as one byte string, for formats that store bytes: a fixed-length header, the latent, the tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from bucketline.bench.peers.samples import Sample

if TYPE_CHECKING:
    from bucketline.bench.peers.samples import SetShape

HEADER = np.dtype([("number", "<i8"), ("num_tokens", "<i8"), ("original_size", "<i4", (2,)), ("crop", "<i4", (2,))])


def pack(sample: Sample) -> bytes:
    """Return a sample as bytes."""
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
