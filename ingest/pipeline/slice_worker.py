"""Pack slices of one source in turn, with encoders that are loaded once.

A slice is the unit of work: the items whose ids hash to it. A rank has one, as many slices as ranks; a worker of a cluster is
given one after another.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from bucketline.ingest.images.model_sizes import latent_sizes, model_grid
from bucketline.ingest.pipeline.model.device import share_of_cores
from bucketline.ingest.pipeline.slice_packer import SlicePacker
from bucketline.ingest.pipeline.stage_timer import StageTimer

if TYPE_CHECKING:
    from pathlib import Path

    from bucketline.ingest.config import PackConfig
    from bucketline.ingest.parallel.shares import Share
    from bucketline.ingest.pipeline.model.encoders import Encoders
    from bucketline.ingest.sources.source import Source
    from bucketline.store import Store
    from bucketline.store.format.manifest import Manifest
    from bucketline.store.transfer.sender import ShardSender


def run_name(manifest: Manifest, token: str, part: str) -> str:
    """Return what the names of the shards begin with that a rank or an attempt makes; a drawn token makes it unique."""
    return f"g{manifest.generation + 1:06d}-{token}-{part}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceWorker:
    """The settings that all slices of a process share."""

    config: PackConfig
    source: Source
    store: Store  # the generation that the run continues
    encoders: Encoders
    workers_on_machine: int = 1

    def packer(self, share: Share, name: str, folder: Path | None = None, sender: ShardSender | None = None) -> SlicePacker:
        """Return the packer of one slice. `name`, never used before, begins its shards' names; see `SlicePacker`."""
        manifest, model = self.store.manifest, self.encoders.model
        return SlicePacker(
            source=self.source,
            store=self.store,
            share=share,
            folder=folder or self.store.path,
            config=self.config,
            grid=model_grid(self.config.grid, model, latent_sizes(model)[1]),
            vae=lambda: self.encoders.vae_for(manifest),
            text=lambda: self.encoders.text_for(manifest),
            stages=StageTimer(on_shared_cores=lambda: self.encoders.on_shared_cores),
            decode_threads=self.config.decode_threads or share_of_cores(self.workers_on_machine),
            shard_prefix=name,
            sender=sender,
        )
