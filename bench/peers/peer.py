"""What a peer is: a format that is written, and passes over it as the peer's documents say they should be made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from bucketline.bench.peers.batches import PeerBatch
    from bucketline.bench.peers.samples import SetShape

    Pass = Callable[[], Iterator[PeerBatch]]  # begins a pass over all samples, in an order of its own where there is one


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """How a peer is used."""

    workers: int = 0  # worker processes
    threads: int = 0  # 0: the peer's own default
    option: str = ""  # what else there is to choose, in the peer's own words


class Peer(Protocol):
    """A format and its loader."""

    def write(self, shape: SetShape, folder: Path) -> None:
        """Write all samples into an empty folder."""

    def open(self, shape: SetShape, folder: Path, way: Way) -> Pass:
        """Open what was written. What is kept between passes (workers, maps) is kept, where the peer can."""
