"""The compared loaders by name: environment, class and configurations. Imports none of them."""

from __future__ import annotations

import importlib
import os
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
    """A format and its loader, used as its documentation recommends. Making one imports all that it needs."""

    def write(self, shape: SetShape, folder: Path) -> None:
        """Write all samples into an empty folder."""

    def open(self, shape: SetShape, place: Path | Remote, way: Way) -> Opened:
        """Open what was written, in a folder or, if its entry has remote ways, on a server."""


class Importing:
    """A peer that needs modules of packages, which are imported when it is made."""

    needs: tuple[str, ...] = ()

    def __init__(self) -> None:
        """Import the modules."""
        for module in self.needs:
            importlib.import_module(module)


Ways = dict[str, Way]  # by name; if only some are measured, they are the first


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A peer and the configurations that are measured of it: hot, cold, and from a server."""

    name: str
    peer: str  # module of `bucketline.bench.peers.formats`, and class
    environment: str = ""  # of `requirements`; empty: that of this project, for Bucketline and the limits
    hot: Ways = field(default_factory=dict)
    cold: Ways = field(default_factory=dict)
    remote: Ways = field(default_factory=dict)

    def make(self) -> Peer:
        """Import the peer's module and return the peer."""
        module, _, name = self.peer.partition(":")
        peer: Peer = getattr(importlib.import_module(f"bucketline.bench.peers.formats.{module}"), name)()
        return peer


_ONE = {"1 thread": Way(threads=1)}
_OURS = {**_ONE, "2 threads": Way(threads=2)}
_WORKERS = {"0 workers": Way(), "2 workers": Way(workers=2)}
_LOCAL = {"hot": _WORKERS, "cold": _WORKERS}
_SHARDS = {**_LOCAL, "remote": _WORKERS}

ENTRIES: tuple[Entry, ...] = (
    Entry(name="resident batches", peer="limits:Resident", hot={"touched": Way()}),
    Entry(name="memcpy", peer="limits:Memcpy", hot={"1 thread": Way()}),
    Entry(name="O_DIRECT", peer="limits:Direct", cold={"16 threads": Way(threads=16), "32 threads": Way(threads=32)}),
    Entry(
        name="bucketline",
        peer="bucketline_store:Ours",
        hot={**_OURS, "service": Way(threads=1, option="service")},
        cold=_OURS,  # a private service's start would distort it
    ),
    Entry(name="bucketline, pushed", peer="bucketline_store:OursRemote", remote=_ONE),
    Entry(
        name="LMDB in a DataLoader",
        peer="torch_samples:Lmdb",
        environment="torch",
        hot={**_WORKERS, "0 workers, torch's own threads": Way(threads=os.cpu_count() or 1)},
        cold={**_WORKERS, "0 workers, no readahead": Way(option="no readahead")},
    ),
    Entry(name="a .pt file each", peer="torch_samples:Pt", environment="torch", **_LOCAL),
    Entry(name="an .npz file each", peer="torch_samples:Npz", environment="torch", **_LOCAL),
    Entry(name="a .safetensors file each", peer="torch_samples:Safetensors", environment="torch", **_LOCAL),
    Entry(name="LitData", peer="packages:LitData", environment="litdata", **_SHARDS),
    Entry(name="MosaicML Streaming", peer="packages:Mds", environment="streaming", **_SHARDS),
    Entry(name="WebDataset", peer="packages:WebDataset", environment="webdataset", **_SHARDS),
    Entry(name="ArrayRecord with Grain", peer="packages:ArrayRecord", environment="grain", **_LOCAL),
    Entry(name="Hugging Face datasets", peer="packages:HfDatasets", environment="datasets", **_LOCAL),
)
OURS, OURS_REMOTE = "bucketline", "bucketline, pushed"
ONE_FILE_EACH = ("a .pt file each", "an .npz file each", "a .safetensors file each")
BY_NAME = {entry.name: entry for entry in ENTRIES}
