"""Who is compared: by name, with the environment it runs in and the ways it is used. Imports nothing of theirs."""

from __future__ import annotations

import importlib
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bucketline.bench.peers.peer import Way

if TYPE_CHECKING:
    from bucketline.bench.peers.peer import Peer

OWN = ""  # the environment of this project itself


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A peer."""

    name: str
    environment: str  # of `environments`; `OWN` for ourselves and the limits
    module: str  # of `bucketline.bench.peers`
    kind: str  # the class in it
    ways: dict[str, Way]  # by name; the first is the one that is measured where only one is
    cold_ways: dict[str, Way] | None = None  # cold, where others are
    is_hot: bool = True
    is_cold: bool = True

    def hot(self, num_ways: int) -> dict[str, Way]:
        """Give the first ways in which it is used hot; none where it is not."""
        return dict(list(self.ways.items())[:num_ways]) if self.is_hot else {}

    def cold(self, num_ways: int) -> dict[str, Way]:
        """Give the first ways in which it is used cold; none where it is not."""
        return dict(list((self.cold_ways or self.ways).items())[:num_ways]) if self.is_cold else {}

    def make(self) -> Peer:
        """Give the peer; its module is imported now."""
        peer: Peer = getattr(importlib.import_module(f"bucketline.bench.peers.{self.module}"), self.kind)()
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
        module="ours",
        kind="Ours",
        ways={"1 thread": Way(threads=1), "2 threads": Way(threads=2), "service": Way(threads=1, option="service")},
        cold_ways={"1 thread": Way(threads=1), "2 threads": Way(threads=2)},  # a private service's start is not its speed
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
    Entry(name="LitData", environment="litdata", module="lit_data", kind="LitData", ways=_WORKERS),
    Entry(name="MosaicML Streaming", environment="streaming", module="mosaic_streaming", kind="Mds", ways=_WORKERS),
    Entry(name="WebDataset", environment="webdataset", module="web_dataset", kind="WebDataset", ways=_WORKERS),
    Entry(name="ArrayRecord with Grain", environment="grain", module="array_record", kind="ArrayRecord", ways=_WORKERS),
    Entry(name="Hugging Face datasets", environment="datasets", module="hf_datasets", kind="HfDatasets", ways=_WORKERS),
)
OURS = "bucketline"
BEST_PEER = "LMDB in a DataLoader"
ONE_FILE_EACH = ("a .pt file each", "an .npz file each", "a .safetensors file each")
BY_NAME = {entry.name: entry for entry in ENTRIES}


def subject(name: str, way: str) -> str:
    """Name a subject: a peer and the way it is used."""
    return f"{name}, {way}"
