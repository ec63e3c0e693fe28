"""The share of one rank: pack it, and commit it. A rank is a process of `ingest pack`, or a worker of a Ray cluster."""

from __future__ import annotations

import time
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING

from bucketline.errors import BucketlineError
from bucketline.ingest.images.crop import latent_sizes, model_grid
from bucketline.ingest.parallel.items import Share
from bucketline.ingest.partners.partner import stored_form
from bucketline.ingest.pipeline.model import share_of_cores
from bucketline.ingest.pipeline.pool import StageTimer
from bucketline.ingest.pipeline.slice_packer import SlicePacker
from bucketline.ingest.progress import caption_progress, packing_progress
from bucketline.store.commands.look import bar_of_bytes
from bucketline.store.sync.working import own_working_store, sender_to

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from bucketline.ingest.config import PackConfig
    from bucketline.ingest.packing.run import PackPlan
    from bucketline.ingest.parallel.items import ItemParts
    from bucketline.ingest.parallel.signals import Interrupts
    from bucketline.ingest.pipeline.model import Encoders
    from bucketline.ingest.sources.source import Source
    from bucketline.store.format.manifest import Manifest
    from bucketline.store.sync.working import WorkingStore
    from bucketline.store.write.publish import StoreTarget


def own_folder(config: PackConfig) -> AbstractContextManager[WorkingStore]:
    """Return the store at a URL, with a folder of its own on a disk that this process does not share with rank 0."""
    return own_working_store(config.objects(config.place), config.store.with_name(f"{config.store.name}.workers"))


SEALING = 0.1  # of a period of `--publish-every`, in which the shard that was ended with it is sealed


class SharePacker:
    """Packs and commits the share of one rank."""

    def __init__(
        self,
        config: PackConfig,
        plan: PackPlan,
        source: Source,
        rank: int,
        target: StoreTarget,
        encoders: Encoders,
        *,
        name: str,
        ranks_on_machine: int = 1,
        is_first: bool = False,
    ) -> None:
        """Touch nothing yet. `target`: where the rank makes its shards. `name`, never used before, begins their names."""
        self.newest: Manifest = plan.manifest  # of the plan, or of this rank's last commit
        self._config, self._plan, self._target, self._encoders = config, plan, target, encoders
        self._rules = {**plan.manifest.rules, **config.caption_rules.as_json()}
        self.packer = SlicePacker(
            source=source,
            store=target.open(plan.manifest),
            share=Share(rank=rank, world_size=plan.num_ranks),
            folder=target.path,
            config=config,
            grid=model_grid(config.grid, encoders.model, latent_sizes(encoders.model)[1]),
            vae=lambda: encoders.vae(plan.manifest),
            text=lambda: encoders.text(plan.manifest),
            stages=StageTimer(on_shared_cores=lambda: encoders.on_shared_cores),
            decode_threads=config.decode_threads or share_of_cores(ranks_on_machine),
            shard_prefix=name,
            sender=sender_to(target, plan.manifest, name, is_first=is_first),
            partners=stored_form(config, encoders.model, plan.manifest),
        )
        self._every_s = config.publish_every and config.publish_every.seconds
        self._end_at = time.monotonic() + (self._every_s or 0.0)
        self._publish_at = self._end_at + SEALING * (self._every_s or 0.0)
        self._num_committed = 0  # of the packer's shards

    def pack(
        self, items: ItemParts, interrupts: Interrupts, check_ranks: Callable[[], None], what: str | None, *, is_kept: bool
    ) -> None:
        """Pack all items; raises what `check_ranks` does. `what` is shown with the progress, None shows nothing.

        `is_kept`: the next run finds what is committed to shards that are not sealed; otherwise it is sealed and committed
        after an error, too.
        """
        packer = self.packer
        with interrupts.between_images(check_ranks, self._check) as check, packer.sender or nullcontext():
            try:
                if self._encoders.may_be_two_phases:
                    with caption_progress(len(items), what, lambda: self._encoders.phases) as (on_item, is_due):
                        packer.encode_captions(items, on_item, check, is_due)
                with packing_progress(len(items), what, lambda: f"bottleneck: {packer.stages.slowest}") as on_image:
                    packer.run(items, on_image, check)
                self._send_rest(check, is_shown=what is not None)
            except BaseException:
                if not is_kept:
                    with suppress(BucketlineError):
                        packer.seal_rest()
                        self._send_rest(lambda: None, is_shown=False)
                        self.commit()
                raise

    def _send_rest(self, check: Callable[[], None], *, is_shown: bool) -> None:
        if (sender := self.packer.sender) is not None:
            shown = bar_of_bytes("send", sender.bytes_left) if is_shown and sender.bytes_left else nullcontext(lambda _: None)
            with shown as on_bytes:
                sender.finish(check, on_bytes)

    def _check(self) -> None:
        """End the shard if a period is over, and commit those that are ready."""
        if self._every_s is not None and time.monotonic() >= self._end_at:
            self._end_at = time.monotonic() + self._every_s
            self.packer.end_shard()
        self.publish_due()

    def publish_due(self) -> None:
        """Commit what is ready if `--publish-every` is over."""
        if self._every_s is not None and time.monotonic() >= self._publish_at and self.ready():
            self._publish_at = time.monotonic() + self._every_s
            self.commit()

    def commit(self) -> None:
        """Commit all shards that are ready, sealed and sent if that is needed, and not committed yet."""
        if ready := self.ready():
            self.newest = self._target.publish(self._plan.manifest, ready, rules=self._rules)
            self._num_committed += len(ready)

    def ready(self) -> list[str]:
        """Return the shards that are ready and not committed yet."""
        return list(self.packer.ready[self._num_committed :])
