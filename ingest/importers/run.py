"""`ingest import` from end to end: plan, read ahead in threads, write, publish. One process does it."""

from __future__ import annotations

import secrets
import sys
import time
from collections import Counter
from contextlib import ExitStack, closing, nullcontext, suppress
from dataclasses import asdict
from itertools import islice
from typing import TYPE_CHECKING, Any

from bucketline.command_line import counted, human_bytes, one_line, printable
from bucketline.errors import StoreError
from bucketline.files.atomic_write import write_or_explain
from bucketline.ingest.encoders.model_folder import open_model
from bucketline.ingest.images.crop import RejectedError
from bucketline.ingest.importers.planning import not_stored, plan_import
from bucketline.ingest.importers.rows import ImportedCaptions, row_of
from bucketline.ingest.packed_index import PackedIndex, withdrawn_ids
from bucketline.ingest.packing.run import target_of
from bucketline.ingest.parallel.signals import Interrupts
from bucketline.ingest.pipeline.model import share_of_cores
from bucketline.ingest.pipeline.pool import OrderedPool, WorkLimits
from bucketline.ingest.progress import counting_progress
from bucketline.ingest.rules import reject_limit
from bucketline.ingest.summary import (
    RunSummary,
    by_reason,
    check_identity,
    joined_summaries,
    plus_withdrawn,
    print_withdrawn,
    rejects_as_lines,
    took,
)
from bucketline.store import StoreWriter
from bucketline.store.commands.look import bar_of_bytes, shown
from bucketline.store.sync.working import sender_to
from bucketline.torch_setup import keep_freed_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from bucketline.ingest.encoders.model_folder import ModelFolder
    from bucketline.ingest.importers.cache import CacheEntry
    from bucketline.ingest.importers.config import ImportConfig
    from bucketline.ingest.importers.rows import ImportedRow, ImportPlan
    from bucketline.store import Manifest
    from bucketline.store.write.publish import StoreTarget
    from bucketline.typed_json import Json


TOGETHER = 8  # entries that a thread reads at a time; handing over each takes as long as reading a small one
_AHEAD_BYTES = 256 << 20


def import_cache(config: ImportConfig) -> dict[str, Any]:
    """Import a cache; return the summary, as `--json` prints it."""
    keep_freed_memory()  # values of a sample are allocated and freed in threads, each time as new mappings
    started, target = time.monotonic(), target_of(config)
    model = None if config.model is None else open_model(config.model, config.model_config)
    published, summary = None, RunSummary()
    with Interrupts() as interrupts, nullcontext() if config.dry_run else target.held():
        plan = plan_import(config, model)
        with interrupts.between_images() as check:
            if not config.dry_run and (plan.store is None or plan.changed):
                published = _write(plan, model, target, summary, check)
            else:
                with closing(_rows(plan, summary, check)) as rows:
                    for row in rows:
                        _count(row, summary)
                check_identity(len(plan.changed), summary)
    return _result(plan, target, joined_summaries([summary]), published, time.monotonic() - started)


def _write(
    plan: ImportPlan, model: ModelFolder | None, target: StoreTarget, summary: RunSummary, check: Callable[[], None]
) -> Manifest:
    """Write the rows of what is new, and publish them. After an error, what was read is committed for the next run."""
    config, captions = plan.config, ImportedCaptions(plan.config, model, plan.text)
    encoders: dict[str, Json] = {"vae": dict(plan.vae.provenance)}
    if captions.provenance is not None:
        encoders["text_encoder"] = dict(captions.provenance)
    writer = StoreWriter.to(
        target,
        columns=plan.columns(),
        encoders=encoders,
        rules={"import": plan.rules},
        text=captions.columns,
        empty_caption=captions.empty,
        max_captions=config.max_captions,
        shard_bytes=config.shard_size.num_bytes,
    )
    with writer, ExitStack() as held:
        writer.take_back(config.taken_back)
        plan.store = target.open(writer.manifest)  # with what a killed run had committed
        plan.changed = not_stored(plan.changed, plan.store, config)
        sender = sender_to(target, writer.manifest, f"import-{secrets.token_hex(4)}", is_first=True)
        held.enter_context(sender or nullcontext())
        num_sent = 0

        def send_sealed() -> None:
            nonlocal num_sent
            if sender is not None:
                for name in writer.sealed[num_sent:]:
                    sender.put(name)
                    sender.wait_for_room(check)
                num_sent = len(writer.sealed)

        try:
            with closing(_rows(plan, summary, check)) as rows:
                while part := [*islice(rows, config.batch_size)]:
                    for row, embeddings in zip(part, captions.of(part), strict=True):
                        if isinstance(embeddings, RejectedError):
                            summary.reject(row.record.id, embeddings)
                            continue
                        writer.add_record(row.record, row.columns, embeddings)
                        _count(row, summary)
                        send_sealed()
            writer.seal()
            send_sealed()
            if sender is not None:
                with bar_of_bytes("send", sender.bytes_left) if sender.bytes_left else nullcontext(lambda _: None) as on_bytes:
                    sender.finish(check, on_bytes)
        except BaseException:
            with suppress(StoreError):
                writer.commit()
            raise
        check_identity(len(plan.changed), summary)
        write_or_explain(config.store / "rejects.jsonl", rejects_as_lines(joined_summaries([summary])))
        manifest = writer.publish()
        target.send_lists()
        return manifest


def _rows(plan: ImportPlan, summary: RunSummary, check: Callable[[], None]) -> Generator[ImportedRow]:
    """Yield the rows of what is new in order, read ahead by threads; count the others. `check` may raise between them."""

    def row(entry: CacheEntry) -> ImportedRow | RejectedError:
        try:
            return row_of(entry, plan)
        except RejectedError as error:
            return error

    num_threads = plan.config.threads or min(4, share_of_cores(1))
    limits = WorkLimits(num_threads=num_threads, items=2 * num_threads + 1, num_bytes=_AHEAD_BYTES)
    parts = [plan.changed[at : at + TOGETHER] for at in range(0, len(plan.changed), TOGETHER)]
    shown = counting_progress("import", len(plan.changed)) if parts else nullcontext(lambda: None)
    with shown as on_entry, OrderedPool(parts, lambda part: [*map(row, part)], lambda part: len(part) << 20, limits) as ahead:
        for part, future in ahead.results(check):
            for entry, found in zip(part, future.result(), strict=True):
                if isinstance(found, RejectedError):
                    summary.reject(entry.id, found)
                else:
                    yield found
                on_entry()


def _count(row: ImportedRow, summary: RunSummary) -> None:
    summary.packed += 1
    summary.without_caption += not row.record.captions
    summary.buckets[row.record.bucket] = summary.buckets.get(row.record.bucket, 0) + 1
    summary.left_out = dict(Counter(summary.left_out) + Counter(row.left_out))


def _result(
    plan: ImportPlan, target: StoreTarget, summary: RunSummary, published: Manifest | None, seconds: float
) -> dict[str, Any]:
    """Sum up; `published` is None if nothing was."""
    config, listing, before = plan.config, plan.listing, plan.store
    now, num_rejected = published or (None if before is None else before.manifest), len(summary.rejects)
    kept = gone = replaced = withdrawn = 0
    if before is not None:
        index, ids = PackedIndex(before), [entry.id for entry in listing.entries]
        left_out = withdrawn_ids(before.manifest, config.taken_back, ids)
        withdrawn = sum(one in left_out for one in ids)
        kept, changed, listed = (
            sum(one is not None for one in index.find_all(own))
            for own in ([reject.id for reject in summary.rejects], [entry.id for entry in plan.changed], ids)
        )
        replaced, gone = changed - kept, before.manifest.samples - listed
    return {
        **plan.rules,
        "found": len(listing.entries),
        "imported": summary.packed,
        "replaced": replaced,  # of those, samples that the store had, with other values or captions
        "unchanged": len(listing.entries) - summary.packed - num_rejected - withdrawn,
        "rejected": num_rejected,
        "withdrawn": withdrawn,  # left out, since `store drop` withdrew their ids
        "rejected_by_reason": by_reason(summary),
        "rejects": [asdict(reject) for reject in summary.rejects[:20]],
        "buckets": dict(sorted(summary.buckets.items())),  # of what is imported
        "without_caption": summary.without_caption,
        "vae": plan.vae.name,
        "spread": plan.spread,
        "left_out": summary.left_out,  # what samples have that a store does not take
        "kept": kept,  # samples of the store whose cache is rejected now; their rows stay
        "not_in_source": gone,  # samples of the store that the cache no longer has; their rows stay
        "notes": listing.notes,
        "too_many_rejects": not reject_limit(config.max_rejects).allows(num_rejected, of=len(listing.entries)),
        "dry_run": config.dry_run,
        "generation": 0 if now is None else now.generation,
        "disk_bytes": 0 if now is None else target.disk_bytes(now),
        "seconds": round(seconds, 3),
    }


def print_import(result: dict[str, Any], config: ImportConfig) -> None:
    is_dry = config.dry_run
    print(
        f"{'dry run, nothing is written: ' if is_dry else ''}{counted(result['found'], 'sample')} found = {result['imported']} "
        f"{'to import' if is_dry else 'imported'} + {result['unchanged']} unchanged + {result['rejected']} rejected"
        f"{plus_withdrawn(result['withdrawn'])}, {took(result['imported'], result['seconds'], 'sample')}"
    )
    variant = f" of {one_line(result['variant'])}" if result["variant"] else ""
    print(f"  format {result['kind']}{variant}; VAE: {one_line(result['vae'])}; scaling undone: {result['scaling_undone']}")
    if result["spread"] is not None:
        print(f"  the latents' spread is {result['spread']:.3g} times the VAE's")
    print(f"  crops: {result['crop']}; captions from {one_line(result['captions'])}; text: {result['text']}")
    for bucket, count in result["buckets"].items():
        print(f"  {bucket}: {counted(count, 'sample')}")
    for what, count in (
        ("with new values or captions, replaced in the store", result["replaced"]),
        ("without a caption", result["without_caption"]),
        ("rejected now, but kept in the store", result["kept"]),
        ("no longer in the cache, but kept in the store", result["not_in_source"]),
        *((f"with {one_line(what)}, which is not imported", count) for what, count in result["left_out"].items()),
    ):
        if count:
            print(f"  {counted(count, 'sample')} {what}")
    for reason, count in result["rejected_by_reason"].items():
        print(f"  rejected: {count} {reason}")
    for reject in result["rejects"][:10]:
        print(f"    {one_line(reject['id'])}: {printable(reject['detail'])}")
    if result["rejected"] and not is_dry:
        print(f"  each with its reason in {shown(config.place)}/rejects.jsonl")
    print_withdrawn(result["withdrawn"])
    for note in result["notes"]:
        print(f"  note: {one_line(note)}")
    if not is_dry:
        print(f"{shown(config.place)}: generation {result['generation']}, {human_bytes(result['disk_bytes'])} on disk")


def exit_code(result: dict[str, Any], config: ImportConfig) -> int:
    """Return the exit code of an import; print on stderr why it is not a success."""
    is_nothing = not result["imported"] + result["unchanged"] + result["withdrawn"]
    if is_nothing:
        print(f"error: not one of {counted(result['found'], 'sample')} could be imported", file=sys.stderr)
    elif result["too_many_rejects"]:
        print(f"error: {result['rejected']} samples were rejected, --max-rejects allows {config.max_rejects}", file=sys.stderr)
    return int(is_nothing or result["too_many_rejects"])
