"""Values that no writer stores, under checksums that match: in columns that a row may lack, and in quantised captions.

Letters: K rows of a block.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from bucketline.store.format.columns import FLIPPED_SUFFIX, PRESENT_PREFIX, TOKENS, TOKENS_SCALE
from bucketline.store.format.text_codec import is_storable

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numpy.typing import NDArray

    from bucketline.store.format.text_block import TextBlock


def strange_rows(columns: Mapping[str, NDArray[Any]]) -> Iterator[tuple[int, str]]:
    """Yield rows of a block, `[K, …]` per column, that do not go with what they say is there, and what is wrong with each."""
    for name, present in columns.items():
        if not name.startswith(PRESENT_PREFIX):
            continue
        base = name.removeprefix(PRESENT_PREFIX)
        for k in np.flatnonzero(present > 1).tolist():
            yield k, f"the row's {name} is {int(present[k])}, expected 0 or 1"
        for k in np.flatnonzero(present == 0).tolist():
            if columns[base][k].tobytes().strip(b"\0"):
                yield k, f"the row's {name} is 0, and its {base} is not all zeros"
        if (mirror := columns.get(name + FLIPPED_SUFFIX)) is not None:
            for k in np.flatnonzero(present != mirror).tolist():
                yield k, f"the row's {name} is {int(present[k])}, and its {name}{FLIPPED_SUFFIX} {int(mirror[k])}"


def strange_captions(block: TextBlock) -> list[int]:
    """Return the captions of a block with quantised tokens whose tokens or scales are beyond what can be stored."""
    tokens = block.spec.tokens
    stored = {c.name: np.frombuffer(block.columns[c.name], dtype=c.numpy_dtype).reshape(-1, *c.shape) for c in tokens}
    wrong = np.flatnonzero(~is_storable(stored[TOKENS], stored[TOKENS_SCALE]))
    found: list[int] = np.unique(np.searchsorted(block.starts, wrong, side="right") - 1).tolist()
    return found
