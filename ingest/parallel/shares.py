"""The assignment of samples to ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


def rank_of(digest: bytes, world_size: int) -> int:
    """Return the rank that packs a sample. It depends only on the digest of the sample's id, not on other samples."""
    return int.from_bytes(digest[:8], "little") % world_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """The samples that one rank packs."""

    rank: int
    world_size: int

    def of(self, keys: NDArray[np.bytes_]) -> NDArray[np.bool_]:
        """Return for each sample, given `as_keys` of the digests, whether this rank packs it; agrees with `rank_of`."""
        mine: NDArray[np.bool_] = keys.view("<u8")[::2] % self.world_size == self.rank
        return mine
