"""The driver: list the source, cut it into slices, have them packed by a pool of workers, and commit what they return."""

from __future__ import annotations

import math
import secrets
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
from bucketline.ingest.on_ray.worker import RunTask, attempt_name
from bucketline.ingest.packing.finish import Packed, finish
from bucketline.ingest.packing.prepare import opened_source, prepare
from bucketline.ingest.packing.target import PackTarget
from bucketline.ingest.parallel.item_parts import take_apart
from bucketline.ingest.pipeline.model.encoder_facts import EncoderFacts, facts_without_weights
from bucketline.ingest.pipeline.slice_worker import run_name
from bucketline.ingest.progress import counting_progress
from bucketline.ingest.sources.source import caption_rest
from bucketline.ingest.sources.source_json import source_as_json
from bucketline.ingest.sources.tar.tar_source import TarSource
from bucketline.ingest.summary import MAX_LONG_CAPTIONS, check_identity, joined_summaries
from bucketline.store.sync.parts import lists_of, take_sent
from bucketline.store.write.attempts import attempt_path, begin_attempts, remove_attempts, take_shards
from bucketline.store.write.newest import newest_manifest
from bucketline.typed_json import encode

if TYPE_CHECKING:
    from contextlib import ExitStack

    from bucketline.ingest.encoders.model_folder import ModelFolder
    from bucketline.ingest.on_ray.cluster import Workers
    from bucketline.ingest.on_ray.slices import Attempt
    from bucketline.ingest.on_ray.worker import PackedSlice
    from bucketline.ingest.packing.finish import PackResult
    from bucketline.ingest.parallel.item_parts import ItemParts, Outline
    from bucketline.ingest.parallel.signals import Interrupts
    from bucketline.ingest.summary import RunSummary
    from bucketline.store.format.manifest import Manifest
    from bucketline.store.transfer.sender import ShardSender


class RayRun:
    """The packing of one source."""

    def __init__(self, config: PackConfig, workers: Workers, interrupts: Interrupts) -> None:
        self._config, self._interrupts = config, interrupts
        self._workers = workers
        self._token = secrets.token_hex(4)
        self._accounts: dict[int, RunSummary] = {}  # by slice
        self._sealed: list[str] = []
        self._slices: list[ItemParts] = []
        self._num_listed = 0  # long captions
        self._target = PackTarget(config)
        self._manifest: Manifest | None = None  # of the generation that the run continues
        self._newest: Manifest | None = None  # published meanwhile, or the same
        self._num_meanwhile = self._num_listed_shards = 0  # published meanwhile: generations, and shards of `_sealed`
        self._sender: ShardSender | None = None  # of a store in object storage: keeps what workers have sent
        self.num_packed = 0  # images whose shards are in the store

    def pack(self, held: ExitStack) -> PackResult:
        """Pack the source; the store stays locked until `held` is closed. Raises what `ingest.pack.pack` does."""
        config, started, target = self._config, time.monotonic(), self._target
        held.enter_context(target.held())
        source = opened_source(config)
        listing = source.listing()
        caption_rest(listing, config.default_caption)
        count = num_slices(len(listing.items), self._workers.most)
        if isinstance(source, TarSource) and source.is_read_in_turn(listing.items):
            count = min(count, self._workers.most)  # each slice reads the tars from their beginnings
        outline, self._slices = take_apart(config.caption_rules.applied(listing), count)
        model = open_model(config.model, config.model_config)
        own = self._for_workers()
        pool = RayWorkers(own, self._workers, self._interrupts.check)
        try:
            manifest = prepare(config, model, self._facts(pool, model), outline, held, target, num_making=0)
            task = RunTask(
                config=own,
                source=source_as_json(source),
                manifest=encode(manifest),
                num_slices=count,
                token=self._token,
                lists=lists_of(config.store, manifest) if target.is_remote else {},
            )
            self._manifest = self._newest = manifest
            self._sender = target.sender(manifest, run_name(manifest, self._token, "driver"), is_first=True)
            with self._sender or nullcontext():
                self._pack_slices(pool, task, outline)
        finally:
            pool.close()
        remove_attempts(config.store)
        account = joined_summaries(self._accounts[number] for number in sorted(self._accounts))
        check_identity(outline.num_items, account)
        return finish(
            Packed(
                config=config,
                target=target,
                manifest=manifest,
                newest=self._newest,
                num_meanwhile=self._num_meanwhile,
                outline=outline,
                account=account,
                sealed=self._sealed,
                seconds=time.monotonic() - started,
            )
        )

    def _for_workers(self) -> PackConfig:
        """Return the configuration as a worker needs it, without the command's own class."""
        plain = PackConfig(**{field.name: getattr(self._config, field.name) for field in fields(PackConfig)})
        return replace(plain, decode_threads=plain.decode_threads or max(1, int(self._workers.cpus)))

    def _facts(self, pool: RayWorkers, model: ModelFolder) -> EncoderFacts:
        """Return the facts of the encoders; for a new store, a worker loads them."""
        if (existing := newest_manifest(self._config.store)) is not None:
            return facts_without_weights(self._config, model, existing)
        facts = pool.ask(lambda actor: actor.facts.remote())
        assert isinstance(facts, EncoderFacts)
        return facts

    def _pack_slices(self, pool: RayWorkers, task: RunTask, outline: Outline) -> None:
        begin_attempts(self._config.store, self._token)
        run, num_shown, every_s = ray.put(task), 0, self._config.publish_every_s
        publish_at = math.inf if every_s is None else time.monotonic() + every_s
        what = f"pack ({counted(self._workers.most, 'worker')})"
        with (
            counting_progress(what, outline.num_items, lambda: f"slowest: {pool.slowest}" * bool(pool.slowest)) as advance,
            self._interrupts.between_images(lambda: None) as check,
        ):

            def on_poll() -> None:
                nonlocal num_shown, publish_at
                num_done = sum(account.total for account in self._accounts.values()) + pool.num_done
                for _ in range(num_shown, num_done):
                    advance()
                num_shown = max(num_shown, num_done)
                check()
                if time.monotonic() >= publish_at:
                    publish_at = time.monotonic() + (every_s or 0)
                    self._publish()

            pool.check = on_poll
            try:
                pool.pack(
                    SliceTable([len(own) for own in self._slices]),
                    lambda actor, attempt: actor.pack.remote(run, attempt, self._slices[attempt.number].parts),
                    self._take,
                )
            except BaseException as error:
                with suppress(BucketlineError):
                    pool.stop(self._take)
                if isinstance(error, BucketlineError):
                    kept = f"with {counted(self.num_packed, 'image')} encoded and committed"
                    kept = kept if self.num_packed else "before anything was encoded"
                    raise type(error)(f"{error} (the other workers have stopped, {kept})") from error
                raise
            on_poll()

    def _publish(self) -> None:
        """Publish the shards that were taken since the last time, if there are any."""
        assert self._newest is not None
        if len(self._sealed) > self._num_listed_shards:
            self._newest = self._target.commit(self._target.publish(self._newest, self._sealed[self._num_listed_shards :]))
            self._num_listed_shards = len(self._sealed)
            self._num_meanwhile += 1

    def _take(self, attempt: Attempt, packed: PackedSlice) -> None:
        """Commit what a worker returned: its shards move into the store, and its images are counted."""
        store = self._config.store
        assert self._manifest is not None
        if self._sender is not None:
            take_sent(store, packed.sent)
            self._sender.keep(packed.sealed)
        else:
            name = attempt_name(self._manifest, self._token, attempt)
            take_shards(store, attempt_path(store, self._token, name), packed.sealed)
        self._sealed += packed.sealed
        listed = packed.account.long_captions
        del listed[max(0, self._workers.most * MAX_LONG_CAPTIONS - self._num_listed) :]  # as many as that many ranks would list
        self._num_listed += len(listed)
        self._accounts[attempt.number] = packed.account
        self._slices[attempt.number].parts.clear()  # memory
        self.num_packed += packed.account.packed
