"""The driver: list the source, cut it into slices, have them packed by a pool of workers, and commit what they return."""

from __future__ import annotations

import math
import time
from contextlib import nullcontext, suppress
from dataclasses import fields, replace
from typing import TYPE_CHECKING

import ray

from bucketline.command_line import counted
from bucketline.errors import BucketlineError
from bucketline.ingest.config import PackConfig
from bucketline.ingest.encoders.model_folder import open_model
from bucketline.ingest.on_ray.pool import RayWorkers
from bucketline.ingest.on_ray.slices import SliceTable, num_slices
from bucketline.ingest.packing.finish import finish
from bucketline.ingest.packing.run import PackRun
from bucketline.ingest.packing.target import target_of
from bucketline.ingest.parallel.ranks import kept
from bucketline.ingest.pipeline.model.encoder_facts import EncoderFacts, facts_without_weights
from bucketline.ingest.progress import counting_progress
from bucketline.store.sync.parts import take_attempt
from bucketline.store.sync.working import sender_to
from bucketline.store.write.attempts import begin_attempts, remove_attempts
from bucketline.typed_json import encode

if TYPE_CHECKING:
    from contextlib import ExitStack

    from bucketline.ingest.encoders.model_folder import ModelFolder
    from bucketline.ingest.on_ray.cluster import Workers
    from bucketline.ingest.on_ray.slices import Attempt
    from bucketline.ingest.packing.finish import PackResult
    from bucketline.ingest.parallel.signals import Interrupts
    from bucketline.ingest.pipeline.slice_worker import PackedSlice, PackPlan
    from bucketline.store.transfer.sender import ShardSender


class RayRun:
    """The packing of one source."""

    def __init__(self, config: PackConfig, workers: Workers, interrupts: Interrupts) -> None:
        self._config, self._interrupts, self._workers = config, interrupts, workers
        self._target = target_of(config)
        self._run: PackRun | None = None
        self._num_published = 0  # shards of the run
        self._sender: ShardSender | None = None  # of a store in object storage: keeps what workers have sent

    @property
    def num_packed(self) -> int:
        """Number of images whose shards are in the store."""
        return 0 if self._run is None else self._run.num_packed

    def pack(self, held: ExitStack) -> PackResult:
        """Pack the source; the store stays locked until `held` is closed. Raises what `ingest.pack.pack` does."""
        config, target = self._config, self._target
        most = self._workers.most
        run = self._run = PackRun.listed(config, target, held, lambda listing: num_slices(len(listing.items), most), most)
        model = open_model(config.model, config.model_config)
        own = self._for_workers()
        pool = RayWorkers(own, self._workers, self._interrupts.check)
        try:
            plan = run.begin(model, self._facts(pool, model), held, num_making=0)
            self._sender = sender_to(target, plan.manifest, plan.name_of("driver"), is_first=True)
            with self._sender or nullcontext():
                self._pack_slices(pool, run, plan)
        finally:
            pool.close()
        remove_attempts(config.store)
        return finish(run)

    def _for_workers(self) -> PackConfig:
        """Return the configuration as a worker needs it, without the command's own class."""
        plain = PackConfig(**{field.name: getattr(self._config, field.name) for field in fields(PackConfig)})
        return replace(plain, decode_threads=plain.decode_threads or max(1, int(self._workers.cpus)))

    def _facts(self, pool: RayWorkers, model: ModelFolder) -> EncoderFacts:
        """Return the facts of the encoders; for a new store, a worker loads them."""
        if (existing := self._target.newest()) is not None:
            return facts_without_weights(self._config, model, existing)
        facts = pool.ask(lambda actor: actor.facts.remote())
        assert isinstance(facts, EncoderFacts)
        return facts

    def _pack_slices(self, pool: RayWorkers, run: PackRun, plan: PackPlan) -> None:
        begin_attempts(self._config.store, plan.token)
        told, num_shown, every = ray.put(encode(plan)), 0, self._config.publish_every
        every_s = every and every.seconds
        publish_at = math.inf if every_s is None else time.monotonic() + every_s
        what = f"pack ({counted(self._workers.most, 'worker')})"
        with (
            counting_progress(what, run.outline.num_items, lambda: f"slowest: {pool.slowest}" * bool(pool.slowest)) as advance,
            self._interrupts.between_images(lambda: None) as check,
        ):

            def on_poll() -> None:
                nonlocal num_shown, publish_at
                num_done = sum(account.total for account in run.accounts.values()) + pool.num_done
                for _ in range(num_shown, num_done):
                    advance()
                num_shown = max(num_shown, num_done)
                check()
                if time.monotonic() >= publish_at:
                    publish_at = time.monotonic() + (every_s or 0)
                    if len(run.sealed) > self._num_published:
                        run.publish(run.sealed[self._num_published :])
                        self._num_published = len(run.sealed)

            def take(attempt: Attempt, packed: PackedSlice) -> None:
                take_attempt(self._config.store, plan.token, plan.name_of(attempt.name), packed.sealed, packed.sent)
                if self._sender is not None:
                    self._sender.keep(packed.sealed)
                run.take(attempt.number, packed)

            pool.check = on_poll
            try:
                pool.pack(
                    SliceTable([len(own) for own in run.slices]),
                    lambda actor, attempt: actor.pack.remote(told, attempt, run.slices[attempt.number].parts),
                    take,
                )
            except BaseException as error:
                with suppress(BucketlineError):
                    pool.stop(take)
                if isinstance(error, BucketlineError):
                    raise type(error)(f"{error} (the other workers have stopped, {kept(run.num_packed)})") from error
                raise
            on_poll()
