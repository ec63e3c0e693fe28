"""Loss masks: which parts of an image count, 0 to 255, on the grid of its latent."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import numpy as np

from bucketline.ingest.images.crop import Reason, RejectedError
from bucketline.ingest.images.decode import crop_box, decode_grey

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from PIL.Image import Image

    from bucketline.ingest.images.crop import Framing, Placement


def read_mask(data: bytes, framing: Framing, target: Placement, px_per_latent: int) -> NDArray[np.uint8]:
    """Return the mask of an image `[h, w]`; the file has one value per pixel of the upright image, and white counts in full."""
    image = decode_grey(data, framing)
    if (image.height, image.width) != target.source:
        found, expected = f"{image.height}x{image.width}", "x".join(map(str, target.source))
        raise RejectedError(Reason.PARTNER, f"it has {found} px, its image {expected}; save it at its image's size, upright")
    return mask_on_grid(image, target, px_per_latent)


def whole_mask(target: Placement, px_per_latent: int) -> NDArray[np.uint8]:
    """Return the mask of an image that counts in full, `[h, w]`."""
    return np.full(_grid(target, px_per_latent), 255, dtype=np.uint8)


def mask_on_grid(image: Image, target: Placement, px_per_latent: int) -> NDArray[np.uint8]:
    """Crop a mask, L, as its image, and average it over the area of each latent pixel, `[h, w]`; halves round to even."""
    left, top, right, bottom = crop_box(target, image)
    height, width = _grid(target, px_per_latent)
    rows = area_means(np.asarray(image, dtype=np.uint8), top, bottom, height)
    means = area_means(rows.T, left, right, width).T
    return np.rint(means).clip(0, 255).astype(np.uint8)


def area_means(values: NDArray[Any], begin: float, end: float, count: int) -> NDArray[np.float64]:
    """Return the means of `values` [N, …] over `count` equal parts of `begin` to `end` along the first axis, `[count, …]`.

    >>> area_means(np.array([[0.0], [1.0], [2.0]]), 0, 3, 2).tolist()
    [[0.3333333333333333], [1.6666666666666667]]
    """
    means = np.empty((count, *values.shape[1:]), dtype=np.float64)
    edges = begin + (end - begin) * np.arange(count + 1) / count
    for n, (low, high) in enumerate(itertools.pairwise(edges)):
        first, last = int(low), min(max(int(np.ceil(high)), int(low) + 1), len(values))
        weights = np.ones(last - first)
        weights[0] -= low - first
        weights[-1] -= last - high
        means[n] = weights @ values[first:last] / weights.sum()
    return means


def _grid(target: Placement, px_per_latent: int) -> tuple[int, int]:
    return target.bucket.height_px // px_per_latent, target.bucket.width_px // px_per_latent
