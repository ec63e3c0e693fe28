"""How wide the resized picture was that a row's crop lies in: what the mirrored crop of a flipped row needs.

A store keeps that size in its samples' records alone. It follows from the source's size and the bucket's, because a picture is
resized to cover its bucket (`store/FORMAT.md`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


def resized_width(source: NDArray[np.int64], bucket: NDArray[np.int64]) -> NDArray[np.int64]:
    """Give the widths of the resized pictures, `[B]`, from source and bucket sizes, `[B, 2]` each, height first.

    >>> resized_width(np.array([[300, 500], [500, 300]]), np.array([[192, 256], [192, 256]])).tolist()
    [320, 256]
    """
    height, width = source.T
    bucket_height, bucket_width = bucket.T
    scaled = (2 * width * bucket_height + height) // (2 * height)  # rounded half up
    wide: NDArray[np.int64] = np.where(bucket_height * width >= bucket_width * height, scaled, bucket_width)
    return wide


def mirrored_left(left: NDArray[np.int64], source: NDArray[np.int64], bucket: NDArray[np.int64]) -> NDArray[np.int64]:
    """Give where the same crops begin in the mirrored pictures, `[B]`; below 0 where no such picture is that wide."""
    return resized_width(source, bucket) - left - bucket[:, 1]
