"""The peer interface: write a format, and read passes over it as the peer's documentation recommends."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from bucketline.bench.peers.gate import PeerBatch
    from bucketline.bench.peers.samples import SetShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One configuration of a peer."""

    workers: int = 0  # worker processes
    threads: int = 0  # 0: the peer's own default
    option: str = ""  # any other choice


@dataclass(frozen=True, slots=True, kw_only=True)
class Remote:
    """A peer's format on a server that speaks HTTP and as much of S3 as reading needs, and a folder to keep it in."""

    endpoint: str  # the server's URL
    bucket: str
    prefix: str  # of the peer's files in the bucket, without a slash at its end
    cache: str  # an empty folder
    cache_bytes: int  # that it may hold

    @property
    def http(self) -> str:
        """The URL of the peer's files."""
        return f"{self.endpoint}/{self.bucket}/{self.prefix}"

    @property
    def s3(self) -> str:
        """The same for S3 clients that know the endpoint."""
        return f"s3://{self.bucket}/{self.prefix}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """A peer with its data open. Workers and maps are kept between passes if possible."""

    begin: Callable[[], Iterator[PeerBatch]]  # a pass over all samples, in the peer's own order
    ready_bytes: Callable[[], int] = field(default=lambda: 0)  # of batches prefetched between passes
    warm_batches: int = 0  # untimed batches until its hot steady state; at least one pass is untimed


class Peer(Protocol):
    """A format and its loader."""

    def write(self, shape: SetShape, folder: Path) -> None:
        """Write all samples into an empty folder."""

    def open(self, shape: SetShape, folder: Path, way: Way) -> Opened:
        """Open what was written, for passes over it."""


class RemotePeer(Peer, Protocol):
    """A format that its loader can also read from a server."""

    def stream(self, shape: SetShape, remote: Remote, way: Way) -> Opened:
        """Open what was written, on a server, for passes over it."""
