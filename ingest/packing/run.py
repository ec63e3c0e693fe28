"""A pack as seen by the process that publishes, rank 0 or the driver of a Ray cluster: list, plan, take what was packed."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from bucketline.ingest.packing.prepare import opened_source, prepare
from bucketline.ingest.packing.target import newest_whole
from bucketline.ingest.parallel.item_parts import take_apart
from bucketline.ingest.pipeline.slice_worker import PackPlan
from bucketline.ingest.sources.open_source import source_as_json
from bucketline.ingest.summary import MAX_LONG_CAPTIONS, check_identity, joined_summaries

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import ExitStack

    from bucketline.ingest.config import PackConfig
    from bucketline.ingest.encoders.model_folder import ModelFolder
    from bucketline.ingest.parallel.item_parts import ItemParts, Outline
    from bucketline.ingest.pipeline.model.encoder_facts import EncoderFacts
    from bucketline.ingest.pipeline.slice_worker import PackedSlice
    from bucketline.ingest.sources.source import Listing, Source
    from bucketline.ingest.summary import RunSummary
    from bucketline.store.format.manifest import Manifest
    from bucketline.store.write.publish import StoreTarget


@dataclass(slots=True, kw_only=True)
class PackRun:
    """One run: its source, its plan, and what was packed of it so far. Use it under the store's lock."""

    config: PackConfig
    target: StoreTarget
    source: Source
    outline: Outline
    slices: list[ItemParts]
    started: float
    num_listed: int  # long captions that the summary may list
    plan: PackPlan | None = None
    newest: Manifest | None = None  # published meanwhile, or that of the plan
    num_meanwhile: int = 0  # generations published meanwhile
    accounts: dict[int, RunSummary] = field(default_factory=dict)  # by slice
    sealed: list[str] = field(default_factory=list)  # names of the shards

    @classmethod
    def listed(
        cls,
        config: PackConfig,
        target: StoreTarget,
        held: ExitStack,
        num_slices: Callable[[Listing], int],
        num_workers: int,
    ) -> PackRun:
        """List the source, and cut it into slices; the store's folder is this process's until `held` is closed."""
        started = time.monotonic()
        held.enter_context(target.held())
        source = opened_source(config)
        newest_whole(target.folder)
        listing = config.listing_of(source)
        outline, slices = take_apart(listing, num_slices(listing))
        return cls(
            config=config,
            target=target,
            source=source,
            outline=outline,
            slices=slices,
            started=started,
            num_listed=num_workers * MAX_LONG_CAPTIONS,
        )

    def begin(self, model: ModelFolder, facts: EncoderFacts, held: ExitStack, *, num_making: int) -> PackPlan:
        """Open or create the store, and return the plan; see `prepare`."""
        manifest = prepare(self.config, model, facts, self.outline, held, self.target, num_making=num_making)
        self.newest = manifest
        self.plan = PackPlan(
            source=source_as_json(self.source),
            manifest=manifest,
            token=secrets.token_hex(4),
            num_slices=len(self.slices),
        )
        return self.plan

    def publish(self, sealed: Sequence[str]) -> None:
        """Publish a generation with shards that are sealed, and sent if that is needed, before the end of the run."""
        assert self.newest is not None
        self.newest = self.target.publish(self.newest, sealed)
        self.num_meanwhile += 1

    def take(self, number: int, packed: PackedSlice) -> None:
        """Count a slice, whose shards are in the store's folder."""
        listed = packed.account.long_captions
        del listed[max(0, self.num_listed) :]
        self.num_listed -= len(listed)
        self.sealed += packed.sealed
        self.accounts[number] = packed.account
        self.slices[number].parts.clear()  # memory

    @property
    def num_packed(self) -> int:
        """Return the number of images whose shards are in the store's folder."""
        return sum(account.packed for account in self.accounts.values())

    @property
    def account(self) -> RunSummary:
        """Return the summary of all slices."""
        whole = joined_summaries(self.accounts[number] for number in sorted(self.accounts))
        check_identity(self.outline.num_items, whole)
        return whole
