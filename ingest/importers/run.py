"""`ingest import` from end to end: list the cache, check its latents' spread, import each rank's share, publish."""

from __future__ import annotations

import json
import secrets
import time
from collections import Counter
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from bucketline.command_line import counted
from bucketline.errors import AccountError, FingerprintError, SourceError, StoreError, UsageError
from bucketline.files.atomic_write import write_or_explain
from bucketline.files.paths import refuse_overlap
from bucketline.ingest.encoders.model_folder import open_model
from bucketline.ingest.images.rejects import Reason, RejectedError
from bucketline.ingest.importers.account import ImportAccount, ImportPlan, ImportResult, joined
from bucketline.ingest.importers.cache import Cached, Crops, Entry, Listing, ListRequest
from bucketline.ingest.importers.captions import SOURCE, CaptionSource, most_captions, text_plan
from bucketline.ingest.importers.registry import IMPORTERS, importer_of
from bucketline.ingest.importers.rows import RowRules, kept_captions, row_of
from bucketline.ingest.importers.vae import Spread, named_vae, refuse_wrong_scale
from bucketline.ingest.pack import pack_session
from bucketline.ingest.parallel.shares import rank_of
from bucketline.ingest.parallel.signals import Stopped, exit_code_of
from bucketline.ingest.pipeline.device import share_of_cores
from bucketline.ingest.pipeline.ordered_pool import OrderedPool, Room
from bucketline.ingest.pipeline.packed_index import PackedIndex
from bucketline.ingest.progress import counting_progress
from bucketline.ingest.rules import reject_limit
from bucketline.ingest.sources.local_files import file_stamp
from bucketline.ingest.summary import RunSummary, rejects_as_lines
from bucketline.store import LatentColumn, Store, StoreWriter
from bucketline.store.format.columns import FLIPPED
from bucketline.store.format.hashing import sample_digest
from bucketline.store.format.manifest import refuse_difference
from bucketline.store.format.sample_record import captions_checksum, storable_mtime_ns
from bucketline.store.read.info import disk_bytes
from bucketline.store.read.lost_files import refuse_lost_shards
from bucketline.store.write.newest import newest_manifest
from bucketline.store.write.part_writer import PartWriter
from bucketline.typed_json import Json, decode, encode

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from bucketline.ingest.importers.cache import Importer
    from bucketline.ingest.importers.config import ImportConfig
    from bucketline.ingest.importers.rows import Row
    from bucketline.ingest.importers.vae import NamedVae
    from bucketline.ingest.pack import PackSession

CHECKED = 32  # samples whose spread is compared with the VAE's before anything is written
AHEAD_BYTES = 256 << 20
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
    with pack_session(rank, world_size, local_rank, local_world_size) as session:
        return _Import(config, session).run()


class _Import:
    """One run of the command on one rank."""

    def __init__(self, config: ImportConfig, session: PackSession) -> None:
        self._config, self._session, self._ranks = config, session, session.ranks
        self._started = time.monotonic()
        self._model = None if config.model is None else open_model(config.model, config.model_config)
        self._listing: Listing | None = None
        self._changed: list[Entry] = []
        self._store: Store | None = None  # as it was before
        self._spread: Spread | None = None
        self._captions: CaptionSource | None = None
        self._max_captions = config.max_captions
        self._vae: NamedVae

    def run(self) -> ImportResult | None:
        plan = self._ranks.from_first(self._planned, encode, lambda value: decode(ImportPlan, value))
        self._set_vae(plan)
        if plan.shard_names == "":  # nothing new, or a dry run: only rank 0 has to do with it
            if self._ranks.is_first:
                account = ImportAccount()
                if self._config.dry_run:
                    self._read_all(plan, self._changed, account, account.count)
                self._ranks.gather(0, lambda value: value, lambda _: 0)
                return self._result(plan, account, self._store)
            self._ranks.gather(0, lambda value: value, lambda _: 0)
            return None
        captions = self._captions = self._captions or CaptionSource(
            self._config, self._model, plan.text, self._session.local_rank
        )
        writer = self._writer(plan, captions)
        with ExitStack() as held:
            names = plan.shard_names
            if self._ranks.is_first:
                names = self._begin(held, writer)
            names = self._ranks.from_first(lambda: names, lambda value: value, str)
            entries = self._dealt()
            account = self._import(plan, writer, names, entries)
            accounts = self._ranks.gather(account, encode, lambda value: decode(ImportAccount, value))
            if accounts is None:
                return None
            return self._finish(plan, writer, accounts)

    # -- before anything is written, on rank 0

    def _planned(self) -> ImportPlan:
        """List the cache, compare it with the store, and check the new samples."""
        config = self._config
        importer = importer_of(config.kind, config.source)
        for path in (config.source, config.captions):
            if path is not None:
                refuse_overlap(path, config.store)
        listing = self._listing = _unique(
            importer.listed(
                ListRequest(
                    source=config.source,
                    variant=config.variant,
                    captions=config.captions,
                )
            )
        )
        crops = Crops(config.crop or ("source" if listing.has_crops else "unknown"))
        if crops is Crops.SOURCE and not listing.has_crops:
            raise UsageError(f"--crop source: {importer.kind} does not record crops; say center or unknown")
        vae = self._vae = named_vae(self._model, config.vae, config.dtype, listing.latents)
        manifest = newest_manifest(config.store)
        if manifest is not None:
            refuse_lost_shards(config.store, manifest)  # by its index, every sample of one would be unchanged
            self._store = Store(config.store, manifest)
        text = text_plan(config, self._model, listing)
        self._max_captions = most_captions(config, text)
        if self._max_captions < max((len(entry.captions or ()) for entry in listing.entries), default=0):
            listing.notes.append(f"of a sample's captions at most {self._max_captions} can be stored, the first")
        self._changed = self._not_stored(listing.entries)
        plan = ImportPlan(
            kind=importer.kind,
            variant=listing.variant,
            scaling=listing.scaling,
            latents=listing.latents,
            family=listing.family,
            text=text,
            crops=crops,
            flip=False,
            rules={},
        )
        flip = self._check_sample(plan, importer) if self._changed else bool(manifest and FLIPPED in _columns_of(self._store))
        rules: dict[str, Json] = {
            "kind": importer.kind,
            "variant": listing.variant,
            "scaling_undone": listing.scaling.value,
            "vae": f"named by {'--model' if config.vae is None else f'--vae {config.vae}'}",
            "vae_of_the_cache": listing.vae,
            "captions": listing.captions_from,
            "text": plan.text,
            "crop": crops.value,
            "flip": flip,
            "split": {"val_fraction": float(config.val_fraction), "by": config.split_by.value},
        }
        plan = replace(plan, flip=flip, rules={"import": rules})
        self._refuse_other_options(plan, vae)
        if config.dry_run or (not self._changed and manifest is not None):
            return plan
        return replace(plan, shard_names="to be drawn")

    def _set_vae(self, plan: ImportPlan) -> None:
        if not self._ranks.is_first:
            self._vae = named_vae(self._model, self._config.vae, self._config.dtype, plan.latents)

    def _refuse_other_options(self, plan: ImportPlan, vae: NamedVae) -> None:
        """Compare what is known without encoders with the store."""
        if self._store is not None:
            manifest = self._store.manifest
            if "import" not in manifest.rules:
                raise FingerprintError(f"{self._config.store} was packed, not imported; import into a new store")
            before: Json = {"vae": manifest.encoders.get("vae"), "rules": manifest.rules, "max_captions": manifest.max_captions}
            refuse_difference(
                before, {"vae": dict(vae.provenance), "rules": plan.rules, "max_captions": self._config.max_captions}
            )

    def _not_stored(self, entries: Sequence[Entry]) -> list[Entry]:
        """Return the entries that the store does not have as they are now."""
        if self._store is None:
            return list(entries)
        index, changed = PackedIndex(self._store), []
        for entry, stored in zip(entries, index.find_all([entry.id for entry in entries]), strict=True):
            try:
                same = (
                    entry.problem is entry.caption_problem is None
                    and stored is not None
                    and (stored.source_bytes, stored.source_mtime_ns) == _stamp_of(self._config.source, entry)
                    and (
                        entry.captions is None
                        or stored.captions == captions_checksum(kept_captions(entry.captions, self._max_captions))
                    )
                )
            except RejectedError:
                same = False  # read again, and rejected with its reason
            if not same:
                changed.append(entry)
        return changed

    def _check_sample(self, plan: ImportPlan, importer: Importer) -> bool:
        """Compare the spread of some new latents with the VAE's; return whether they come with their mirror image's.

        Raises:
            SourceError: if none can be read, the spread is off by a factor of two, or the text is of other encoders.
        """
        step = max(1, len(self._changed) // CHECKED)
        latents, reasons, samples, flipped = [], [], [], None
        for entry in self._changed[::step][:CHECKED]:
            try:
                cached = _read(importer, self._config.source, entry, plan.variant)
                latents.append(self._vae.unscaled(cached.latent, plan.scaling))
                samples.append(cached)
                flipped = cached.flipped is not None if flipped is None else flipped
            except RejectedError as error:
                reasons.append((entry.id, error))
        if not latents:
            if self._store is not None:
                return FLIPPED in _columns_of(self._store)
            (first, reason), number = reasons[0], len(reasons)
            raise SourceError(
                f"{self._config.source}: not one of {counted(number, 'sample')} can be imported; {first}: {reason.reason}: "
                f"{reason.detail}"
            )
        if not self._config.trust_scale:
            self._spread = refuse_wrong_scale(latents, self._vae, plan.scaling, str(self._config.source))
        if plan.text == SOURCE:
            self._captions = CaptionSource(self._config, self._model, plan.text, self._session.local_rank)
            self._captions.refuse_other_encoders(samples)
        return bool(flipped)

    # -- writing

    def _writer(self, plan: ImportPlan, captions: CaptionSource) -> StoreWriter:
        config, vae = self._config, self._vae
        shape = {"channels": vae.channels, "downscale": vae.downscale}
        names = ("latent", FLIPPED) if plan.flip else ("latent",)
        encoders: dict[str, Json] = {"vae": dict(vae.provenance)}
        if captions.provenance is not None:
            encoders["text_encoder"] = dict(captions.provenance)
        return StoreWriter(
            config.store,
            columns=[  # that their values are finite has been checked
                replace(LatentColumn(**shape, dtype=config.dtype, name=name), allow_nonfinite=True) for name in names
            ],
            encoders=encoders,
            rules=plan.rules,
            text=captions.columns,
            empty_caption=captions.empty,
            max_captions=config.max_captions,
            shard_bytes=config.shard_size_mib << 20,
        )

    def _begin(self, held: ExitStack, writer: StoreWriter) -> str:
        """Open the store, adopt what a killed run had committed, and return how new shards are named. On rank 0."""
        held.enter_context(writer)
        self._store = Store(self._config.store, writer.manifest)
        self._changed = self._not_stored(self._changed)
        return f"g{writer.manifest.generation + 1:06d}-{secrets.token_hex(4)}"

    def _dealt(self) -> list[Entry]:
        if self._ranks.world_size == 1:
            return self._changed

        def parts() -> list[list[bytes]]:
            size = self._ranks.world_size
            own: list[list[Entry]] = [[] for _ in range(size)]
            for entry in self._changed:
                own[rank_of(sample_digest(entry.id), size)].append(entry)
            return [
                [_as_bytes(entries[at : at + PART_ENTRIES]) for at in range(0, len(entries), PART_ENTRIES)] for entries in own
            ]

        return [entry for part in self._ranks.deal(parts) for entry in _from_bytes(part)]

    def _import(self, plan: ImportPlan, writer: StoreWriter, names: str, entries: list[Entry]) -> ImportAccount:
        account, captions = ImportAccount(), self._captions
        assert captions is not None
        own = f"{names}-r{self._ranks.rank:04d}-{{:04d}}"
        part = PartWriter(self._config.store, writer._form, own, self._config.shard_size_mib << 20)
        with part:
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
        self, plan: ImportPlan, entries: list[Entry], account: ImportAccount, add: Callable[[Row, Cached], None]
    ) -> None:
        """Read entries ahead in threads, and add each as a row or count it as rejected."""
        config, importer = self._config, IMPORTERS[plan.kind]
        rules = RowRules(
            vae=self._vae,
            scaling=plan.scaling,
            crops=plan.crops,
            flip=plan.flip,
            dtype=config.dtype,
            max_captions=most_captions(config, plan.text),
            may_be_off=config.trust_scale,
        )

        def read(entry: Entry) -> tuple[Row, Cached] | RejectedError:
            try:
                cached = _read(importer, config.source, entry, plan.variant)
                return row_of(entry, cached, rules, config, _stamp_of(config.source, entry)), cached
            except RejectedError as error:
                return error

        def read_several(part: Sequence[Entry]) -> list[tuple[Row, Cached] | RejectedError]:
            return [read(entry) for entry in part]

        parts = [entries[at : at + TOGETHER] for at in range(0, len(entries), TOGETHER)]
        threads = config.threads or min(4, share_of_cores(self._session.local_world_size))
        room = Room(num_threads=threads, items=2 * threads + 1, num_bytes=AHEAD_BYTES)
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

    def _finish(self, plan: ImportPlan, writer: StoreWriter, accounts: list[ImportAccount]) -> ImportResult:
        """Check the account, and publish. Rank 0 only, under the store's lock."""
        whole = joined(accounts)
        if (total := whole.imported + len(whole.rejects)) != len(self._changed):
            raise AccountError(
                f"the account does not add up: {len(self._changed)} samples to import, {whole.imported} imported + "
                f"{len(whole.rejects)} rejected = {total}; nothing was published, please report this"
            )
        write_or_explain(self._config.store / "rejects.jsonl", rejects_as_lines(RunSummary(rejects=whole.rejects)))
        before = self._store
        manifest = writer.publish(whole.sealed)
        return self._result(plan, whole, before, Store(self._config.store, manifest))

    def _result(
        self, plan: ImportPlan, account: ImportAccount, before: Store | None, after: Store | None = None
    ) -> ImportResult:
        listing, config, now = self._listing, self._config, after or before
        assert listing is not None
        kept = gone = 0
        if before is not None:
            index = PackedIndex(before)
            kept = sum(one is not None for one in index.find_all([reject.id for reject in account.rejects]))
            listed = sum(one is not None for one in index.find_all([entry.id for entry in listing.entries]))
            gone = before.manifest.samples - listed
        return ImportResult(
            kind=plan.kind,
            variant=plan.variant,
            found=len(listing.entries),
            imported=account.imported,
            unchanged=len(listing.entries) - account.imported - len(account.rejects),
            rejected=len(account.rejects),
            rejected_by_reason=dict(Counter(reject.reason for reject in account.rejects).most_common()),
            rejects=account.rejects[:20],
            buckets=dict(sorted(account.buckets.items())),
            without_caption=account.without_caption,
            text=plan.text,
            crop=plan.crops.value,
            scaling_undone=plan.scaling.value,
            vae=self._vae.name,
            captions_from=listing.captions_from,
            spread=self._spread,
            left_out=account.left_out,
            kept=kept,
            not_in_source=gone,
            notes=listing.notes,
            too_many_rejects=not reject_limit(config.max_rejects).allows(len(account.rejects), of=len(listing.entries)),
            dry_run=config.dry_run,
            generation=0 if now is None else now.manifest.generation,
            disk_bytes=0 if now is None else disk_bytes(config.store),
            seconds=round(time.monotonic() - self._started, 3),
        )


def _read(importer: Importer, source: Path, entry: Entry, variant: str) -> Cached:
    if entry.problem is not None:
        raise RejectedError(Reason.CACHE, entry.problem)
    if entry.caption_problem is not None:
        raise RejectedError(Reason.CAPTION, entry.caption_problem)
    return importer.read(source, entry, variant)


def _stamp_of(source: Path, entry: Entry) -> tuple[int, int]:
    """Return the length and the mtime of a sample's values: of its files together, and of the newest of them."""
    if entry.stamp is not None:
        return entry.stamp[0], storable_mtime_ns(entry.stamp[1])
    stamps = [file_stamp(f"{source}/{path}", source) for path in (entry.path, entry.text_path) if path is not None]
    return sum(stamp.num_bytes for stamp in stamps), max(storable_mtime_ns(stamp.mtime_ns) for stamp in stamps)


def _unique(listing: Listing) -> Listing:
    """Return the listing; a second entry of an id is one that cannot be imported."""
    seen: dict[str, Entry] = {}
    entries = []
    for entry in listing.entries:
        if (other := seen.setdefault(entry.id, entry)) is not entry:
            problem = f"{entry.path} and {other.path} are caches of one image; keep one"
            entry = replace(entry, id=f"{entry.id} ({entry.path})", problem=problem)  # noqa: PLW2901 - its only form
        entries.append(entry)
    listing.entries = entries
    return listing


def _columns_of(store: Store | None) -> set[str]:
    return set() if store is None else {name for bucket in store.manifest.buckets for name in bucket.columns}


def _as_bytes(entries: Sequence[Entry]) -> bytes:
    return json.dumps([asdict(entry) for entry in entries], ensure_ascii=False).encode("utf-8", "surrogatepass")


def _from_bytes(part: bytes) -> list[Entry]:
    found = json.loads(part.decode("utf-8", "surrogatepass"))
    return [
        Entry(
            **{
                **fields,
                "at": tuple(fields["at"]),
                "captions": None if fields["captions"] is None else tuple(fields["captions"]),
                "stamp": None if fields["stamp"] is None else tuple(fields["stamp"]),
            }
        )
        for fields in found
    ]
