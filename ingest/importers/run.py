"""`ingest import` from end to end: plan on rank 0, import each rank's share, publish."""

from __future__ import annotations

import json
import secrets
import time
from contextlib import ExitStack, suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from bucketline.allocator import keep_freed_memory
from bucketline.errors import StoreError, UsageError
from bucketline.files.atomic_write import write_or_explain
from bucketline.ingest.encoders.model_folder import open_model
from bucketline.ingest.images.rejects import RejectedError
from bucketline.ingest.importers.cache import CacheEntry
from bucketline.ingest.importers.captions import CaptionSource
from bucketline.ingest.importers.planning import Planned, not_stored, plan_import
from bucketline.ingest.importers.registry import IMPORTERS
from bucketline.ingest.importers.rows import ImportPlan, read_entry, rejects_named, row_of
from bucketline.ingest.importers.summary import ImportResult
from bucketline.ingest.importers.vae import named_vae
from bucketline.ingest.pack import pack_session, run_slice
from bucketline.ingest.packing.meanwhile import Meanwhile
from bucketline.ingest.packing.target import target_of
from bucketline.ingest.parallel.shares import rank_of
from bucketline.ingest.pipeline.model.device import share_of_cores
from bucketline.ingest.pipeline.ordered_pool import OrderedPool, WorkLimits
from bucketline.ingest.pipeline.packed_index import PackedIndex
from bucketline.ingest.pipeline.slice_worker import PackedSlice, PackPlan, SliceRun
from bucketline.ingest.progress import packing_progress
from bucketline.ingest.rules import reject_limit
from bucketline.ingest.summary import RunSummary, by_reason, check_identity, joined_summaries, rejects_as_lines
from bucketline.store import StoreWriter
from bucketline.store.format.hashing import sample_digest
from bucketline.store.sync.working import sender_to
from bucketline.store.write.part_writer import PartWriter

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from bucketline.ingest.importers.captions import CaptionedRow
    from bucketline.ingest.importers.config import ImportConfig
    from bucketline.ingest.importers.rows import ImportedRow
    from bucketline.ingest.importers.vae import NamedVae
    from bucketline.ingest.pack import PackSession
    from bucketline.store import Manifest
    from bucketline.store.transfer.sender import ShardSender
    from bucketline.store.write.row_form import RowForm
    from bucketline.typed_json import Json

PART_ENTRIES = 1000  # that are sent to a rank at a time
TOGETHER = 8  # entries that a thread reads at a time; handing over each takes as long as reading a small one
_AHEAD_BYTES = 256 << 20


def import_cache(
    config: ImportConfig, *, rank: int = 0, world_size: int = 1, local_rank: int = 0, local_world_size: int = 1
) -> ImportResult | None:
    """Import a cache into a store; return the result on rank 0, None on the others."""
    if config.dry_run and rank:
        return None
    keep_freed_memory()  # values of a sample are allocated and freed in threads, each time as new mappings
    if config.dry_run:
        world_size = local_world_size = 1
    with pack_session(config, rank, world_size, local_rank, local_world_size) as session:
        return _Import(config, session).run()


class _Import:
    """One run of the command on one rank."""

    def __init__(self, config: ImportConfig, session: PackSession) -> None:
        """Read and write nothing yet."""
        self._config, self._session, self._ranks, self._target = config, session, session.ranks, target_of(config)
        self._started = time.monotonic()
        self._model = None if config.model is None else open_model(config.model, config.model_config)
        self._planned: Planned | None = None  # on rank 0
        self._writer: StoreWriter | None = None  # if there is something to write

    def run(self) -> ImportResult | None:
        ranks, config = self._ranks, self._config
        if not ranks.shares_disk:
            raise UsageError("ranks on several machines import through one folder: give --work on a disk that they share")
        with ExitStack() as held:
            plan = ranks.from_first(lambda: self._plan(held), ImportPlan)
            planned = self._planned
            vae = named_vae(self._model, config.vae, config.dtype, plan.latents) if planned is None else planned.vae
            threads = config.threads or min(4, share_of_cores(self._session.local_world_size))
            writing = held.enter_context(ExitStack())
            output = self._output(plan, vae, writing) if plan.is_written else None
            entries = self._dealt() if output is not None else planned.changed if planned is not None else []
            packer = _CachePacker(config, plan, vae, threads, output)
            sealed, sender = ([], None) if output is None else (output[1].sealed, output[1].sender)
            mine = SliceRun(packer.account, sealed, self._target.path, sender)

            def work(check: Callable[[], None]) -> None:
                if entries:
                    with packing_progress(len(entries), ranks, "import") as on_entry:
                        packer.run(entries, on_entry, check)

            def end(found: list[PackedSlice]) -> ImportResult:
                assert planned is not None
                account = joined_summaries(one.account for one in found)
                check_identity(len(planned.changed), account)
                published = None
                if self._writer is not None:
                    write_or_explain(config.store / "rejects.jsonl", rejects_as_lines(account))
                    published = self._writer.publish(name for one in found for name in one.sealed)
                    self._target.send_lists()
                writing.close()
                return self._result(planned, account, published)

            return run_slice(self._session, mine, Meanwhile(None, ranks, None, lambda _: []), work, end)

    def _plan(self, held: ExitStack) -> ImportPlan:
        if not self._config.dry_run:
            held.enter_context(self._target.held())
        self._planned = plan_import(self._config, self._model, self._session.local_rank)
        return self._planned.plan

    def _output(self, plan: ImportPlan, vae: NamedVae, writing: ExitStack) -> tuple[CaptionSource, _SentPart]:
        """Return what captions rows, and what writes this rank's shards; rank 0 locks the store until `writing` is closed."""
        config, ranks, target, planned = self._config, self._ranks, self._target, self._planned
        captions = None if planned is None else planned.captions
        captions = captions or CaptionSource(config, self._model, plan.text, self._session.local_rank)
        encoders: dict[str, Json] = {"vae": dict(vae.provenance)}
        if captions.provenance is not None:
            encoders["text_encoder"] = dict(captions.provenance)
        shard_bytes = config.shard_size.num_bytes
        self._writer = writer = StoreWriter.to(
            target,
            columns=plan.columns.row_columns(vae, config.dtype),
            encoders=encoders,
            rules=plan.rules,
            text=captions.columns,
            empty_caption=captions.empty,
            max_captions=config.max_captions,
            shard_bytes=shard_bytes,
        )
        if planned is not None:
            writing.enter_context(writer)
        rows = ranks.from_first(lambda: self._begin(plan, writer), PackPlan)
        name = rows.name_of(f"r{ranks.rank:04d}")
        sender = sender_to(target, rows.manifest, name, is_first=ranks.is_first)
        return captions, _SentPart(target.path, writer._form, f"{name}-{{:04d}}", shard_bytes, sender, ranks.check)

    def _begin(self, plan: ImportPlan, writer: StoreWriter) -> PackPlan:
        """Adopt what a killed run had committed, and return the generation to continue. On rank 0."""
        planned, manifest = self._planned, writer.manifest
        assert planned is not None
        planned.store = self._target.open(manifest)
        at_most = self._config.most_captions(plan.text)
        planned.changed = not_stored(planned.changed, planned.store, self._config.source, at_most)
        return PackPlan(source=None, manifest=manifest, token=secrets.token_hex(4), num_slices=self._ranks.world_size)

    def _dealt(self) -> list[CacheEntry]:
        """Return the entries that this rank imports."""
        size, planned = self._ranks.world_size, self._planned

        def parts() -> list[list[bytes]]:
            own: list[list[CacheEntry]] = [[] for _ in range(size)]
            for entry in planned.changed if planned is not None else ():
                own[rank_of(sample_digest(entry.id), size)].append(entry)
            return [
                [_as_bytes(entries[at : at + PART_ENTRIES]) for at in range(0, len(entries), PART_ENTRIES)] for entries in own
            ]

        if size == 1 and planned is not None:
            return planned.changed
        return [entry for part in self._ranks.deal(parts) for entry in _from_bytes(part)]

    def _result(self, planned: Planned, account: RunSummary, published: Manifest | None) -> ImportResult:
        """Sum up; `published` is None if nothing was. Rank 0 only."""
        plan, listing, config, before, target = planned.plan, planned.listing, self._config, planned.store, self._target
        now = published or (None if before is None else before.manifest)
        kept = gone = replaced = 0
        if before is not None:
            index = PackedIndex(before)
            kept = sum(one is not None for one in index.find_all([reject.id for reject in account.rejects]))
            replaced = sum(one is not None for one in index.find_all([entry.id for entry in planned.changed])) - kept
            listed = sum(one is not None for one in index.find_all([entry.id for entry in listing.entries]))
            gone = before.manifest.samples - listed
        return ImportResult(
            kind=plan.kind,
            variant=plan.variant,
            found=len(listing.entries),
            imported=account.packed,
            replaced=replaced,
            unchanged=len(listing.entries) - account.packed - len(account.rejects),
            rejected=len(account.rejects),
            rejected_by_reason=by_reason(account),
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
            left_out=account.left_out,
            kept=kept,
            not_in_source=gone,
            notes=listing.notes,
            too_many_rejects=not reject_limit(config.max_rejects).allows(len(account.rejects), of=len(listing.entries)),
            dry_run=config.dry_run,
            generation=0 if now is None else now.generation,
            disk_bytes=0 if now is None else target.disk_bytes(now),
            seconds=round(time.monotonic() - self._started, 3),
        )


def _as_bytes(entries: Sequence[CacheEntry]) -> bytes:
    return json.dumps([asdict(entry) for entry in entries], ensure_ascii=False).encode("utf-8", "surrogatepass")


def _from_bytes(part: bytes) -> list[CacheEntry]:
    found: list[dict[str, Any]] = json.loads(part.decode("utf-8", "surrogatepass"))
    for fields in found:
        fields |= {name: tuple(value) for name, value in fields.items() if isinstance(value, list)}
    return [CacheEntry(**fields) for fields in found]


class _CachePacker:
    """Reads entries, and counts each in the summary as a row or a reject; writes the rows if there is an `output`."""

    def __init__(
        self,
        config: ImportConfig,
        plan: ImportPlan,
        vae: NamedVae,
        num_threads: int,
        output: tuple[CaptionSource, PartWriter] | None = None,
    ) -> None:
        self._config, self._plan, self._vae, self._num_threads, self._output = config, plan, vae, num_threads, output
        self.account = RunSummary()

    def run(self, entries: Sequence[CacheEntry], on_entry: Callable[[], None], check: Callable[[], None]) -> None:
        """Import entries. `check` is called between them, and may raise."""
        if self._output is None:
            self._read(entries, self._count, on_entry, check)
            return
        captions, part = self._output
        with part:
            try:
                self._read(entries, lambda row: self._write(part, captions.add(row)), on_entry, check)
                self._write(part, captions.flush())
            except BaseException:
                with suppress(StoreError):
                    part.commit()
                raise

    def _write(self, part: PartWriter, rows: Sequence[CaptionedRow]) -> None:
        for row, captions in rows:
            if isinstance(captions, RejectedError):
                self.account.reject(row.record.id, captions)
                continue
            part.add_record(row.record, row.columns, captions)
            self._count(row)

    def _read(
        self,
        entries: Sequence[CacheEntry],
        add: Callable[[ImportedRow], None],
        on_entry: Callable[[], None],
        check: Callable[[], None],
    ) -> None:
        parts = [entries[at : at + TOGETHER] for at in range(0, len(entries), TOGETHER)]
        room = WorkLimits(num_threads=self._num_threads, items=2 * self._num_threads + 1, num_bytes=_AHEAD_BYTES)
        with OrderedPool(parts, lambda part: [*map(self._row_of, part)], lambda part: len(part) << 20, room) as ahead:
            for part, future in ahead.results(check):
                for entry, found in zip(part, future.result(), strict=True):
                    try:
                        if isinstance(found, RejectedError):
                            raise found
                        add(found)
                    except RejectedError as error:
                        self.account.reject(entry.id, error)
                    on_entry()

    def _row_of(self, entry: CacheEntry) -> ImportedRow | RejectedError:
        config = self._config
        try:
            cached = read_entry(IMPORTERS[self._plan.kind], config.source, entry, self._plan.variant)
            with rejects_named(entry):
                return row_of(entry, cached, self._vae, self._plan, config)
        except RejectedError as error:
            return error

    def _count(self, row: ImportedRow) -> None:
        account, bucket = self.account, row.record.bucket
        account.packed += 1
        account.without_caption += not row.record.captions
        account.buckets[bucket] = account.buckets.get(bucket, 0) + 1
        for what in row.left_out:
            account.left_out[what] = account.left_out.get(what, 0) + 1


class _SentPart(PartWriter):
    """Has each shard sent once it is sealed, and begins another only when few wait."""

    def __init__(
        self, path: Path, form: RowForm, names: str, shard_bytes: int, sender: ShardSender | None, check: Callable[[], None]
    ) -> None:
        super().__init__(path, form, names, shard_bytes)
        self.sender, self._check = sender, check

    def seal(self) -> None:
        num_sealed = len(self.sealed)
        super().seal()
        if self.sender is not None:
            for name in self.sealed[num_sealed:]:
                self.sender.put(name)
                self.sender.wait_for_room(self._check)
