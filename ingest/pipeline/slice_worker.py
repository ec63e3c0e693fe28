"""Pack slices of one source in turn, with encoders that are loaded once: what ranks and workers of a Ray cluster share.

A slice is the unit of work: the items whose ids hash to it. A rank has one, as many slices as ranks; a worker of a cluster is
given one after another. The process that publishes makes the plan; a worker makes shards of a slice in a folder of its own, or
in the store's, and returns a `PackedSlice`, which counts once that process has taken it (`packing/run.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from bucketline.ingest.images.crop import latent_sizes, model_grid
from bucketline.ingest.parallel.exchange import Share
from bucketline.ingest.pipeline.model import share_of_cores
from bucketline.ingest.pipeline.pool import StageTimer
from bucketline.ingest.pipeline.slice_packer import SlicePacker
from bucketline.ingest.sources.dataset_file import source_from_json
from bucketline.ingest.summary import RunSummary  # noqa: TC001 - decoded by its annotation
from bucketline.store.format.manifest import Manifest  # noqa: TC001 - decoded by its annotation
from bucketline.store.sync.working import PartStore, SentShard
from bucketline.typed_json import Json  # noqa: TC001 - decoded by its annotation

if TYPE_CHECKING:
    from pathlib import Path

    from bucketline.ingest.config import PackConfig
    from bucketline.ingest.pipeline.model import Encoders
    from bucketline.store import Store
    from bucketline.store.transfer import ShardSender


@dataclass(frozen=True, slots=True, kw_only=True)
class PackPlan:
    """The settings that all slices of a source share, decided by the process that publishes."""

    source: Json
    manifest: Manifest  # of the generation that the run continues
    token: str  # in the names of the run's shards, never used before
    num_slices: int

    def name_of(self, part: str) -> str:
        """Return what the names of the shards begin with that a rank or an attempt makes."""
        return f"g{self.manifest.generation + 1:06d}-{self.token}-{part}"

    def parts(self, config: PackConfig) -> PartStore:
        """Return where a worker makes shards on a disk of its own, and sends them."""
        parent = config.store.with_name(f"{config.store.name}.workers")
        return PartStore(config.objects(config.place), parent, self.manifest)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedSlice:
    """The outcome of a slice, or of what was packed of it."""

    account: RunSummary
    sealed: list[str]  # names of its shards
    sent: list[SentShard]  # the same, if they were made on another disk


def slice_packer(
    config: PackConfig,
    plan: PackPlan,
    number: int,
    name: str,
    *,
    store: Store,
    place: tuple[Path, ShardSender | None],
    encoders: Encoders,
    workers_on_machine: int = 1,
) -> SlicePacker:
    """Return the packer of a plan's slice in this process. `name` was never used before; it begins its shards' names.

    `store` is the plan's generation; `place` the folder for the shards, and what sends them if the store is in object storage.
    """
    folder, sender = place
    return SlicePacker(
        source=source_from_json(plan.source),
        store=store,
        share=Share(rank=number, world_size=plan.num_slices),
        folder=folder,
        config=config,
        grid=model_grid(config.grid, encoders.model, latent_sizes(encoders.model)[1]),
        vae=lambda: encoders.vae(plan.manifest),
        text=lambda: encoders.text(plan.manifest),
        stages=StageTimer(on_shared_cores=lambda: encoders.on_shared_cores),
        decode_threads=config.decode_threads or share_of_cores(workers_on_machine),
        shard_prefix=name,
        sender=sender,
    )
