"""Which of a sample's captions a batch comes with: a draw keyed like all others."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from bucketline.loader.draws import Purpose, uniform_on_host

if TYPE_CHECKING:
    from numpy.typing import NDArray

EMPTY = -1


def choose_captions(num_captions: NDArray[np.int64], keys: NDArray[np.int64], dropout: float = 0.0) -> NDArray[np.int64]:
    """Draw a caption's number for each row, `[B]`; EMPTY where it is dropped, or where the sample has none.

    `num_captions`: `[B]`, those stored. `keys`: `[B]`, as `Batch.keys`. `dropout`: probability of the empty caption.
    """
    chosen = (uniform_on_host(keys, Purpose.CAPTION) * num_captions).astype(np.int64)
    dropped = uniform_on_host(keys, Purpose.CAPTION_DROPOUT) < dropout
    return np.where(dropped | (num_captions == 0), EMPTY, chosen)
