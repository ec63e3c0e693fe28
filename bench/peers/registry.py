"""The compared loaders by name: environment, class and configurations. Imports none of them."""

from __future__ import annotations

import importlib
import os
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from bucketline.bench.peers.samples import PeerBatch, SetShape


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
_STREAMED = {place: {"0 workers": Way()} for place in ("hot", "cold", "remote")}

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
    Entry(name="datasets over Parquet", peer="packages:HfParquet", environment="datasets", **_STREAMED),
    Entry(name="Lance", peer="packages:Lance", environment="lance", **_STREAMED),
)
OURS, OURS_REMOTE = "bucketline", "bucketline, pushed"
ONE_FILE_EACH = ("a .pt file each", "an .npz file each", "a .safetensors file each")
BY_NAME = {entry.name: entry for entry in ENTRIES}


# ---------------------------------------------------------------------------------------------------------------- capabilities
# Capabilities that each loader's documented interface has. Rows are questions, and answers have reasons.
#
# The answers apply to the versions in `requirements`. What the gate checks (bytes, one shape, once per pass) is repeated in
# each run.


class Can(StrEnum):
    """An answer."""

    YES = "yes"
    PARTLY = "partly"
    NO = "no"


@dataclass(frozen=True, slots=True, kw_only=True)
class Capability:
    """One loader's answer to one question."""

    question: str
    loader: str
    can: Can
    why: str


ONE_SHAPE = "batches of one bucket each"
SAME_BUCKET = "the same bucket on all ranks at each step"
EVERY_ONCE = "every sample once per pass, on any number of ranks"
SHUFFLED = "any sample may follow any other"
RESUME = "resumes mid-epoch with the very next batch"
ELASTIC = "resumes with another world size"
VERIFIED = "bytes verified against a checksum when read"
SHARED = "one reader for all ranks of a machine"
QUESTIONS = (ONE_SHAPE, SAME_BUCKET, EVERY_ONCE, SHUFFLED, RESUME, ELASTIC, VERIFIED, SHARED)

_ANSWERS: dict[str, tuple[tuple[Can, str], ...]] = {
    "bucketline": (
        (Can.YES, "the plan draws one bucket per step"),
        (Can.YES, "all ranks compute the same plan; nothing is sent"),
        (Can.YES, "a remainder is carried into the next pass"),
        (Can.YES, "a keyed permutation of each bucket's rows"),
        (Can.YES, "the state is a step number"),
        (Can.YES, "with the same global batch"),
        (Can.YES, "LoaderConfig(verify=True), by row; it is off by default, and in these timings"),
        (Can.YES, "loader serve; Loader(service=...)"),
    ),
    "torch DataLoader over files or LMDB": (
        (Can.YES, "with a custom batch sampler, as here"),
        (Can.NO, "DistributedSampler splits indices and knows no buckets; the batch sampler would have to be written for it"),
        (Can.NO, "DistributedSampler repeats samples to even out ranks, or drops them with drop_last"),
        (Can.YES, "RandomSampler; here by the batch sampler"),
        (Can.NO, "DataLoader has no state; torchdata's StatefulDataLoader, a separate package, has one"),
        (Can.NO, "there is no state"),
        (Can.PARTLY, "an .npz member's CRC-32 is checked; a .safetensors file and an LMDB value have none"),
        (Can.NO, "each rank has its own workers; only the page cache is shared"),
    ),
    "LitData": (
        (Can.YES, 'CombinedStreamingDataset(batching_method="per_stream"), a data set per bucket'),
        (Can.NO, "each rank and worker draws its data set independently of the others"),
        (Can.PARTLY, "drop_last evens out ranks by dropping; without it they may end at different steps"),
        (Can.NO, "chunks are shuffled, and samples within a chunk"),
        (Can.PARTLY, "StreamingDataLoader.state_dict: one data set resumes exactly, several without workers end in an error"),
        (Can.NO, "CombinedStreamingDataset, which batches of one bucket need, refuses it; only a StreamingDataset can"),
        (Can.NO, "no digest of a chunk is kept"),
        (Can.NO, "each rank's workers read"),
    ),
    "MosaicML Streaming": (
        (Can.YES, 'a stream per bucket, batching_method="per_stream"'),
        (Can.YES, "per_stream makes the global batch from one stream"),
        (Can.NO, "samples are repeated so that every rank has the same number"),
        (Can.PARTLY, "py1e shuffles within a range of shards; naive over all"),
        (Can.YES, "StreamingDataLoader.state_dict counts samples, in global batches"),
        (Can.YES, "with the same num_canonical_nodes"),
        (Can.PARTLY, "validate_hash checks a shard as it is downloaded or unpacked, not as it is read"),
        (Can.PARTLY, "ranks of a node share the cache folder and the state in shared memory; each reads"),
    ),
    "WebDataset": (
        (Can.PARTLY, "a pipeline per bucket, mixed at random, as here"),
        (Can.NO, "each rank mixes independently"),
        (Can.NO, "whole tar files go to ranks and workers; the documentation advises resampling and epochs of fixed length"),
        (Can.NO, "tar files are shuffled, and samples within a buffer"),
        (Can.NO, "there is no state; a pass starts over"),
        (Can.NO, "there is no state"),
        (Can.NO, "only tar's headers have a checksum"),
        (Can.NO, "each rank's workers read"),
    ),
    "ArrayRecord with Grain": (
        (Can.YES, "a MapDataset per bucket, batched before they are concatenated and shuffled, as here"),
        (Can.PARTLY, "if batches of the global size are made first and each rank slices them, by hand"),
        (Can.PARTLY, "a slice per rank; remainders are dropped or end some ranks earlier"),
        (Can.YES, "MapDataset.shuffle is a global permutation"),
        (Can.YES, "DatasetIterator.get_state and set_state"),
        (Can.PARTLY, "ElasticIterator batches and shards one data set of samples, not batches of several buckets"),
        (Can.YES, "Riegeli chunks, of which ArrayRecord files are made, carry hashes of their data"),
        (Can.NO, "each rank's process reads"),
    ),
    "Hugging Face datasets": (
        (Can.YES, "a data set per bucket and a custom batch sampler, as here"),
        (Can.NO, "split_dataset_by_node gives each rank its rows and knows no buckets"),
        (Can.PARTLY, "split_dataset_by_node loses none, and some ranks may have one sample more"),
        (Can.YES, "map-style: any sampler. IterableDataset: shards, and samples within a buffer"),
        (Can.PARTLY, "IterableDataset.state_dict, which skips what its shuffle buffer held; map-style has none"),
        (Can.NO, "a state belongs to one rank's shards"),
        (Can.NO, "Arrow files have no checksum that is verified"),
        (Can.NO, "ranks share the page cache through the map; each reads"),
    ),
}  # fmt: skip

CAPABILITIES = tuple(
    Capability(question=question, loader=loader, can=can, why=why)
    for loader, answers in _ANSWERS.items()
    for question, (can, why) in zip(QUESTIONS, answers, strict=True)
)


def as_json() -> list[dict[str, Any]]:
    """Return all answers, one JSON object each."""
    return [{"question": one.question, "loader": one.loader, "can": str(one.can), "why": one.why} for one in CAPABILITIES]
