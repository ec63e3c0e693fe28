"""`ingest import` from end to end: plan on rank 0, import each rank's share, publish."""

from __future__ import annotations

import json
import secrets
import time
from collections import Counter
from contextlib import ExitStack, suppress
from dataclasses import asdict
from typing import TYPE_CHECKING

from bucketline.allocator import keep_freed_memory
from bucketline.errors import AccountError, StoreError, UsageError
from bucketline.files.atomic_write import write_or_explain
from bucketline.ingest.encoders.model_folder import open_model
from bucketline.ingest.images.rejects import RejectedError
from bucketline.ingest.importers.account import ImportAccount, ImportPlan, ImportResult, joined_imports
from bucketline.ingest.importers.cache import Cached, CacheEntry
from bucketline.ingest.importers.captions import CaptionSource, most_captions
from bucketline.ingest.importers.changes import cache_stamp, not_stored, read_entry, rejects_named
from bucketline.ingest.importers.destination import Destination
from bucketline.ingest.importers.planning import Planned, plan_import
from bucketline.ingest.importers.registry import IMPORTERS
from bucketline.ingest.importers.rows import RowRules, row_of
from bucketline.ingest.importers.vae.named_vae import named_vae
from bucketline.ingest.pack import pack_session
from bucketline.ingest.parallel.shares import rank_of
from bucketline.ingest.parallel.signals import Stopped, exit_code_of
from bucketline.ingest.pipeline.model.device import share_of_cores
from bucketline.ingest.pipeline.ordered_pool import OrderedPool, WorkLimits
from bucketline.ingest.pipeline.packed_index import PackedIndex
from bucketline.ingest.progress import counting_progress
from bucketline.ingest.rules import reject_limit
from bucketline.ingest.summary import RunSummary, rejects_as_lines
from bucketline.store import Store, StoreWriter
from bucketline.store.format.hashing import sample_digest
from bucketline.typed_json import Json, decode, encode

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from bucketline.ingest.importers.config import ImportConfig
    from bucketline.ingest.importers.rows import ImportedRow
    from bucketline.ingest.importers.vae.named_vae import NamedVae
    from bucketline.ingest.pack import PackSession
    from bucketline.store import Manifest

_AHEAD_BYTES = 256 << 20
TOGETHER = 8  # entries that a thread reads at a time; handing over each takes as long as reading a small one
PART_ENTRIES = 1000
"""Entries that are sent to a rank at a time."""


def import_cache(
    config: ImportConfig, *, rank: int = 0, world_size: int = 1, local_rank: int = 0, local_world_size: int = 1
) -> ImportResult | None:
    """Import a cache into a store; return the result on rank 0, None on the others.

    Raises:
        UsageError: if source and store overlap, or options contradict each other or lack the VAE.
        SourceError: if the cache cannot be listed, or its latents' spread is not the VAE's. Nothing is written then.
        ModelError, StoreError, FingerprintError, LockedError: as in `pack`.
        KeyboardInterrupt: after Ctrl-C or SIGTERM; what was imported is committed, and the next run continues.
    """
    if config.dry_run and rank:
        return None
    if config.dry_run:
        world_size = local_world_size = 1
    keep_freed_memory()  # values of a sample are allocated and freed in threads, each time as new mappings
    with pack_session(config, rank, world_size, local_rank, local_world_size) as session:
        return _Import(config, session).run()


class _Import:
    """One run of the command on one rank."""

    def __init__(self, config: ImportConfig, session: PackSession) -> None:
        """Read and write nothing yet."""
        self._config, self._session, self._ranks = config, session, session.ranks
        self._started = time.monotonic()
        self._model = None if config.model is None else open_model(config.model, config.model_config)
        self._planned: Planned | None = None  # on rank 0
        self._changed: list[CacheEntry] = []
        self._store: Store | None = None  # as it was before
        self._destination = Destination(config)
        self._vae: NamedVae

    def run(self) -> ImportResult | None:
        with ExitStack() as held:
            if not self._ranks.shares_disk:
                raise UsageError("ranks on several machines import through one folder: give --work on a disk that they share")
            plan = self._ranks.from_first(lambda: self._plan(held), encode, lambda value: decode(ImportPlan, value))
            planned, config = self._planned, self._config
            self._vae = named_vae(self._model, config.vae, config.dtype, plan.latents) if planned is None else planned.vae
            if plan.shard_names == "":  # nothing new, or a dry run: only rank 0 has to do with it
                account = ImportAccount()
                if planned is not None and config.dry_run:
                    self._read_all(plan, self._changed, account, account.count)
                self._ranks.gather(0, lambda value: value, lambda _: 0)
                return None if planned is None else self._result(planned, account, None)
            captions = None if planned is None else planned.captions
            captions = captions or CaptionSource(config, self._model, plan.text, self._session.local_rank)
            writer = self._writer(plan, captions)
            with ExitStack() as written:
                names = plan.shard_names
                if self._ranks.is_first:
                    names = self._begin(plan, written, writer)
                names = self._ranks.from_first(lambda: names, lambda value: value, str)
                entries = self._dealt()
                own = self._import(plan, writer, names, entries, captions)
                accounts = self._ranks.gather(own, encode, lambda value: decode(ImportAccount, value))
                if accounts is None or planned is None:
                    return None
                account = joined_imports(accounts)
                published = self._publish(writer, account)
            return self._result(planned, account, published)

    def _plan(self, held: ExitStack) -> ImportPlan:
        if not self._config.dry_run:
            held.enter_context(self._destination.held())
        planned = self._planned = plan_import(self._config, self._model, self._session.local_rank, self._destination.newest)
        self._changed, self._store = planned.changed, planned.store
        return planned.plan

    def _writer(self, plan: ImportPlan, captions: CaptionSource) -> StoreWriter:
        config, vae = self._config, self._vae
        encoders: dict[str, Json] = {"vae": dict(vae.provenance)}
        if captions.provenance is not None:
            encoders["text_encoder"] = dict(captions.provenance)
        return StoreWriter(
            config.store,
            columns=plan.columns.row_columns(vae, config.dtype),
            encoders=encoders,
            rules=plan.rules,
            text=captions.columns,
            empty_caption=captions.empty,
            max_captions=config.max_captions,
            shard_bytes=config.shard_size_mib << 20,
        )

    def _begin(self, plan: ImportPlan, held: ExitStack, writer: StoreWriter) -> str:
        """Open the store, adopt what a killed run had committed, and return how new shards are named. On rank 0."""
        held.enter_context(writer)
        self._destination.adopt(writer.manifest)
        self._store = Store(self._config.store, writer.manifest)
        at_most = most_captions(self._config, plan.text)
        self._changed = not_stored(self._changed, self._store, self._config.source, at_most)
        return f"g{writer.manifest.generation + 1:06d}-{secrets.token_hex(4)}"

    def _dealt(self) -> list[CacheEntry]:
        if self._ranks.world_size == 1:
            return self._changed

        def parts() -> list[list[bytes]]:
            size = self._ranks.world_size
            own: list[list[CacheEntry]] = [[] for _ in range(size)]
            for entry in self._changed:
                own[rank_of(sample_digest(entry.id), size)].append(entry)
            return [
                [_as_bytes(entries[at : at + PART_ENTRIES]) for at in range(0, len(entries), PART_ENTRIES)] for entries in own
            ]

        return [entry for part in self._ranks.deal(parts) for entry in _from_bytes(part)]

    def _import(
        self, plan: ImportPlan, writer: StoreWriter, names: str, entries: list[CacheEntry], captions: CaptionSource
    ) -> ImportAccount:
        account = ImportAccount()
        own, check = f"{names}-r{self._ranks.rank:04d}", self._ranks.check
        with self._destination.part(writer, own, is_first=self._ranks.is_first, check=check) as part:
            captions.write_to(part, account.count, account.reject)
            try:
                self._read_all(plan, entries, account, captions.add)
                captions.flush()
            except BaseException as error:
                with suppress(StoreError):
                    part.commit()  # for the next run to adopt
                if isinstance(error, KeyboardInterrupt):
                    raise Stopped(exit_code_of(error), account.imported) from error
                raise
        account.sealed = part.sealed
        return account

    def _read_all(
        self, plan: ImportPlan, entries: list[CacheEntry], account: ImportAccount, add: Callable[[ImportedRow, Cached], None]
    ) -> None:
        """Read entries ahead in threads, and add each as a row or count it as rejected."""
        config, importer = self._config, IMPORTERS[plan.kind]
        rules = RowRules(
            vae=self._vae,
            scaling=plan.scaling,
            crops=plan.crops,
            columns=plan.columns,
            dtype=config.dtype,
            max_captions=most_captions(config, plan.text),
            may_be_off=config.trust_scale,
        )

        def read(entry: CacheEntry) -> tuple[ImportedRow, Cached] | RejectedError:
            try:
                cached = read_entry(importer, config.source, entry, plan.variant)
                with rejects_named(entry):
                    return row_of(entry, cached, rules, config, cache_stamp(config.source, entry)), cached
            except RejectedError as error:
                return error

        def read_several(part: Sequence[CacheEntry]) -> list[tuple[ImportedRow, Cached] | RejectedError]:
            return [read(entry) for entry in part]

        parts = [entries[at : at + TOGETHER] for at in range(0, len(entries), TOGETHER)]
        threads = config.threads or min(4, share_of_cores(self._session.local_world_size))
        room = WorkLimits(num_threads=threads, items=2 * threads + 1, num_bytes=_AHEAD_BYTES)
        what = "import" if self._ranks.world_size == 1 else f"import (rank 0 of {self._ranks.world_size})"
        with ExitStack() as held:
            on_entry = held.enter_context(counting_progress(what, len(entries))) if self._ranks.is_first else lambda: None
            check = held.enter_context(self._session.interrupts.between_images(self._ranks.check))
            ahead = held.enter_context(OrderedPool(parts, read_several, lambda part: len(part) << 20, room))
            for part, future in ahead.results(check):
                for entry, found in zip(part, future.result(), strict=True):
                    try:
                        if isinstance(found, RejectedError):
                            raise found
                        add(*found)
                    except RejectedError as error:
                        account.reject(entry.id, error)
                    on_entry()

    def _publish(self, writer: StoreWriter, whole: ImportAccount) -> Manifest:
        """Check the account, and publish in the folder. Rank 0 only, under the store's lock."""
        if (total := whole.imported + len(whole.rejects)) != len(self._changed):
            raise AccountError(
                f"the account does not add up: {len(self._changed)} samples to import, {whole.imported} imported + "
                f"{len(whole.rejects)} rejected = {total}; nothing was published, please report this"
            )
        write_or_explain(self._config.store / "rejects.jsonl", rejects_as_lines(RunSummary(rejects=whole.rejects)))
        return writer.publish(whole.sealed)

    def _result(self, planned: Planned, account: ImportAccount, published: Manifest | None) -> ImportResult:
        """Commit what was published, None if nothing was, and sum up. Rank 0 only."""
        plan, listing, config, before = planned.plan, planned.listing, self._config, self._store
        now, num_bytes = None if before is None else before.manifest, 0
        if published is not None:
            now, num_bytes = self._destination.commit(published)
        elif now is not None and config.dry_run:
            num_bytes = self._destination.disk_bytes(now)
        elif now is not None:  # an interrupted run may have imported everything, and not committed it
            self._destination.adopt(now)
            now, num_bytes = self._destination.commit(now)
        kept = gone = replaced = 0
        if before is not None:
            index = PackedIndex(before)
            kept = sum(one is not None for one in index.find_all([reject.id for reject in account.rejects]))
            replaced = sum(one is not None for one in index.find_all([entry.id for entry in self._changed])) - kept
            listed = sum(one is not None for one in index.find_all([entry.id for entry in listing.entries]))
            gone = before.manifest.samples - listed
        return ImportResult(
            kind=plan.kind,
            variant=plan.variant,
            found=len(listing.entries),
            imported=account.imported,
            replaced=replaced,
            unchanged=len(listing.entries) - account.imported - len(account.rejects),
            rejected=len(account.rejects),
            rejected_by_reason=dict(Counter(reject.reason for reject in account.rejects).most_common()),
            rejects=account.rejects[:20],
            buckets=dict(sorted(account.buckets.items())),
            without_caption=account.without_caption,
            text=plan.text,
            crop=plan.crops.value,
            scaling_undone=plan.scaling.value,
            vae=planned.vae.name,
            captions_from=listing.captions_from,
            columns=list(plan.columns.roles),
            spread=planned.spread,
            round_trip=planned.round_trip,
            left_out=account.left_out,
            kept=kept,
            not_in_source=gone,
            notes=listing.notes,
            too_many_rejects=not reject_limit(config.max_rejects).allows(len(account.rejects), of=len(listing.entries)),
            dry_run=config.dry_run,
            generation=0 if now is None else now.generation,
            disk_bytes=num_bytes,
            seconds=round(time.monotonic() - self._started, 3),
        )


def _as_bytes(entries: Sequence[CacheEntry]) -> bytes:
    return json.dumps([asdict(entry) for entry in entries], ensure_ascii=False).encode("utf-8", "surrogatepass")


def _from_bytes(part: bytes) -> list[CacheEntry]:
    found = json.loads(part.decode("utf-8", "surrogatepass"))
    return [
        CacheEntry(
            **{
                **fields,
                "at": tuple(fields["at"]),
                "captions": None if fields["captions"] is None else tuple(fields["captions"]),
                "stamp": None if fields["stamp"] is None else tuple(fields["stamp"]),
            }
        )
        for fields in found
    ]
