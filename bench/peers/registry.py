"""The registry of compared loaders: name, environment and configurations. Imports none of them."""

from __future__ import annotations

import importlib
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bucketline.bench.peers.peer import Way

if TYPE_CHECKING:
    from bucketline.bench.peers.peer import Peer

OWN = ""  # the environment of this project


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A peer and its configurations."""

    name: str
    environment: str  # of `environments`; `OWN` for Bucketline and the limits
    module: str  # of `bucketline.bench.peers.formats`
    kind: str  # class in the module
    ways: dict[str, Way]  # by name; if only one is measured, it is the first
    cold_ways: dict[str, Way] | None = None  # when cold, if different
    is_hot: bool = True
    is_cold: bool = True
    remote_ways: dict[str, Way] | None = None  # from a server; None: it has no such way, or not for its format here

    def hot(self, num_ways: int) -> dict[str, Way]:
        """Return the first configurations to measure hot; none if the peer is not measured hot."""
        return dict(list(self.ways.items())[:num_ways]) if self.is_hot else {}

    def cold(self, num_ways: int) -> dict[str, Way]:
        """Return the first configurations to measure cold; none if the peer is not measured cold."""
        return dict(list((self.cold_ways or self.ways).items())[:num_ways]) if self.is_cold else {}

    def remote(self, num_ways: int) -> dict[str, Way]:
        """Return the first configurations to measure from a server; none if the peer cannot read from one."""
        return dict(list((self.remote_ways or {}).items())[:num_ways])

    def make(self) -> Peer:
        """Import the peer's module and return the peer."""
        peer: Peer = getattr(importlib.import_module(f"bucketline.bench.peers.formats.{self.module}"), self.kind)()
        return peer


_WORKERS = {"0 workers": Way(), "2 workers": Way(workers=2)}

ENTRIES: tuple[Entry, ...] = (
    Entry(
        name="resident batches",
        environment=OWN,
        module="limits",
        kind="Resident",
        ways={"touched": Way()},
        is_cold=False,
    ),
    Entry(name="memcpy", environment=OWN, module="limits", kind="Memcpy", ways={"1 thread": Way()}, is_cold=False),
    Entry(
        name="O_DIRECT",
        environment=OWN,
        module="limits",
        kind="Direct",
        ways={"16 threads": Way(threads=16), "32 threads": Way(threads=32)},
        is_hot=False,
    ),
    Entry(
        name="bucketline",
        environment=OWN,
        module="bucketline_store",
        kind="Ours",
        ways={"1 thread": Way(threads=1), "2 threads": Way(threads=2), "service": Way(threads=1, option="service")},
        cold_ways={"1 thread": Way(threads=1), "2 threads": Way(threads=2)},  # a private service's start would distort it
    ),
    Entry(
        name="bucketline, pushed",
        environment=OWN,
        module="bucketline_store",
        kind="OursRemote",
        ways={"1 thread": Way(threads=1)},
        is_hot=False,
        is_cold=False,
        remote_ways={"1 thread": Way(threads=1)},
    ),
    Entry(
        name="LMDB in a DataLoader",
        environment="torch",
        module="torch_lmdb",
        kind="Lmdb",
        ways={**_WORKERS, "0 workers, torch's own threads": Way(threads=os.cpu_count() or 1)},
        cold_ways={**_WORKERS, "0 workers, no readahead": Way(option="no readahead")},
    ),
    Entry(name="a .pt file each", environment="torch", module="torch_files", kind="Pt", ways=_WORKERS),
    Entry(name="an .npz file each", environment="torch", module="torch_files", kind="Npz", ways=_WORKERS),
    Entry(name="a .safetensors file each", environment="torch", module="torch_files", kind="Safetensors", ways=_WORKERS),
    Entry(
        name="LitData",
        environment="litdata",
        module="litdata",
        kind="LitData",
        ways=_WORKERS,
        remote_ways=_WORKERS,
    ),
    Entry(
        name="MosaicML Streaming",
        environment="streaming",
        module="mosaic_streaming",
        kind="Mds",
        ways=_WORKERS,
        remote_ways=_WORKERS,
    ),
    Entry(
        name="WebDataset",
        environment="webdataset",
        module="webdataset",
        kind="WebDataset",
        ways=_WORKERS,
        remote_ways=_WORKERS,
    ),
    Entry(name="ArrayRecord with Grain", environment="grain", module="array_record", kind="ArrayRecord", ways=_WORKERS),
    Entry(name="Hugging Face datasets", environment="datasets", module="hf_datasets", kind="HfDatasets", ways=_WORKERS),
)
OURS = "bucketline"
OURS_REMOTE = "bucketline, pushed"
BEST_PEER = "LMDB in a DataLoader"
ONE_FILE_EACH = ("a .pt file each", "an .npz file each", "a .safetensors file each")
BY_NAME = {entry.name: entry for entry in ENTRIES}


def subject(name: str, way: str) -> str:
    """Return the name of a subject: a peer and its configuration."""
    return f"{name}, {way}"
