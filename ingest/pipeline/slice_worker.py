"""Pack slices of one source in turn, with encoders that are loaded once: what ranks and workers of a Ray cluster share.

A slice is the unit of work: the items whose ids hash to it. A rank has one, as many slices as ranks; a worker of a cluster is
given one after another. The process that publishes makes the plan; a worker makes shards of a slice in a folder of its own, or
in the store's, and returns a `PackedSlice`, which counts once that process has taken it (`packing/run.py`).
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bucketline.ingest.images.model_sizes import latent_sizes, model_grid
from bucketline.ingest.parallel.shares import Share
from bucketline.ingest.pipeline.model.device import share_of_cores
from bucketline.ingest.pipeline.slice_packer import SlicePacker
from bucketline.ingest.pipeline.stage_timer import StageTimer
from bucketline.ingest.sources.open_source import source_from_json
from bucketline.ingest.summary import RunSummary  # noqa: TC001 - decoded by its annotation
from bucketline.store.format.manifest import Manifest  # noqa: TC001 - decoded by its annotation
from bucketline.store.sync.parts import PartStore, SentShard
from bucketline.store.write.attempts import seal_rest
from bucketline.typed_json import Json  # noqa: TC001 - decoded by its annotation

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from bucketline.ingest.config import PackConfig
    from bucketline.ingest.pipeline.model.encoders import Encoders
    from bucketline.store import Store
    from bucketline.store.transfer.sender import ShardSender


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


class SliceWorker:
    """Packs slices of a plan in this process."""

    def __init__(
        self,
        config: PackConfig,
        plan: PackPlan,
        store: Store,
        begin: Callable[[str], tuple[Path, ShardSender | None]],
        encoders: Encoders,
        workers_on_machine: int = 1,
    ) -> None:
        """`store` is the plan's generation. `begin` returns the folder for a slice's shards, given its name, and a sender."""
        self.config, self.plan, self.encoders = config, plan, encoders
        self._source = source_from_json(plan.source)
        self._store, self._begin = store, begin
        self._decode_threads = config.decode_threads or share_of_cores(workers_on_machine)

    def slice(self, number: int, name: str) -> tuple[SlicePacker, SliceRun]:
        """Return the packer of one slice, and its run. `name` was never used before; it begins its shards' names."""
        folder, sender = self._begin(name)
        model = self.encoders.model
        packer = SlicePacker(
            source=self._source,
            store=self._store,
            share=Share(rank=number, world_size=self.plan.num_slices),
            folder=folder,
            config=self.config,
            grid=model_grid(self.config.grid, model, latent_sizes(model)[1]),
            vae=lambda: self.encoders.vae(self.plan.manifest),
            text=lambda: self.encoders.text(self.plan.manifest),
            stages=StageTimer(on_shared_cores=lambda: self.encoders.on_shared_cores),
            decode_threads=self._decode_threads,
            shard_prefix=name,
            sender=sender,
        )
        return packer, SliceRun(packer.account, packer.sealed, folder, sender)


class SliceRun:
    """The making of one slice. What is made is sent in the block of `sending`, if the store is in object storage."""

    def __init__(self, account: RunSummary, sealed: list[str], folder: Path, sender: ShardSender | None) -> None:
        """Take what its packer counts, and the names of the shards that it has sealed; both grow."""
        self.account, self.folder, self.sender = account, folder, sender
        self._sealed = sealed
        self._rest: list[str] = []

    @property
    def ready(self) -> Sequence[str]:
        """Names of the shards that are sealed, and sent if that is needed; they become more."""
        return self._sealed if self.sender is None else self.sender.sent

    def sending(self) -> AbstractContextManager[object]:
        return self.sender or nullcontext()

    def seal_rest(self) -> None:
        """After the packer was stopped: seal what it had committed, and have that sent."""
        self._rest = seal_rest(self.folder)
        if self.sender is not None:
            for name in self._rest:
                self.sender.put(name)

    def send(self, check: Callable[[], None] = lambda: None, on_bytes: Callable[[int], None] = lambda _: None) -> None:
        """Wait until all is sent; otherwise as `ShardSender.finish`."""
        if self.sender is not None:
            self.sender.finish(check, on_bytes)

    @property
    def sealed(self) -> list[str]:
        """Names of the shards."""
        return [*self._sealed, *self._rest]
