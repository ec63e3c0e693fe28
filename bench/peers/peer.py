"""What a peer is: a format that is written, and passes over it as the peer's documents say they should be made."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from bucketline.bench.peers.batches import PeerBatch
    from bucketline.bench.peers.samples import SetShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """How a peer is used."""

    workers: int = 0  # worker processes
    threads: int = 0  # 0: the peer's own default
    option: str = ""  # what else there is to choose


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """A peer that has opened what it wrote. What can be kept between passes (workers, maps) is kept."""

    begin: Callable[[], Iterator[PeerBatch]]  # a pass over all samples, in an order of its own
    ready_bytes: Callable[[], int] = field(default=lambda: 0)  # of batches filled before they are asked for, between passes
    warm_batches: int = 0  # it takes to come to its steady state, hot; a pass at the least is not timed


class Peer(Protocol):
    """A format and its loader."""

    def write(self, shape: SetShape, folder: Path) -> None:
        """Write all samples into an empty folder."""

    def open(self, shape: SetShape, folder: Path, way: Way) -> Opened:
        """Open what was written; the passes' batches are read from it."""
