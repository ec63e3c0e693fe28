"""Collect the facts of a store and write them as one page."""

from __future__ import annotations

import base64
import os
import stat
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from bucketline.command_line import human_bytes
from bucketline.extensions import Extensions
from bucketline.files.atomic_write import write_or_explain
from bucketline.files.redact import redacted
from bucketline.pages.page import Section, document, parts, refuse_page, worst_first
from bucketline.store.format.block import ID
from bucketline.store.read.info import info
from bucketline.store.report.facts import (
    MAX_CARDS,
    Shown,
    check_latents,
    collect_facts,
    collect_lists,
    read_latents,
    vae_of,
    with_latents,
    worst_buckets,
)
from bucketline.store.report.latent_rgb import latent_images, still
from bucketline.store.report.other_process import call_elsewhere
from bucketline.store.report.sections import Cards, findings, places_shown, template_values

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

    from numpy.typing import NDArray

    from bucketline.pages.page import Finding
    from bucketline.store.read.store import Store
    from bucketline.store.report.facts import Facts, ListFacts, RowPlace

PREVIEW_PX = 48  # longer side of a preview; the browser enlarges it smoothly
_KINDS = {  # of a store's files, by the end of the name
    ".lmdb": "shards",
    ".extents": "extents",
    ".index": "indexes",
    ".dropped": "lists of dropped rows",
    ".jsonl": "the packer's lists",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportOptions:
    """Options of a report."""

    samples: int = 480  # in the gallery, over all buckets
    latents: int = 20_000  # that are read for the checks
    batch_size: int = 16  # of the plan
    decoder: dict[str, str | None] | None = None  # the model whose VAE decodes latents: model, model_config, device
    source: str | None = None


SECTIONS: Extensions[Callable[[Store, ReportOptions], Section | None]] = Extensions(
    "a section of `store report` called",
    "bucketline.report_sections",
    {"plan": "bucketline.loader.plan_section:plan_section"},
    callable,
)


def write_report(store: Store, page: Path, options: ReportOptions) -> list[Finding]:
    """Write the report of a store and return its findings."""
    refuse_page(page, [("store", store.path)])
    num_buckets = max(1, len(store.buckets()))
    facts = collect_facts(store, min(MAX_CARDS, max(1, options.samples // num_buckets)))
    lists = collect_lists(store)
    latents = check_latents(store, options.latents)
    samples = {one.place: one for one in _kept(facts)}
    samples |= {place: _look_up(store, place) for place in places_shown(latents) if place not in samples}
    images, how = _images(store, samples, options)
    cards = Cards(samples=samples, images=images, sources=_sources(facts, lists, options))
    more = [section for name in SECTIONS if (section := _section(name, store, options)) is not None]
    found = findings(facts=facts, lists=lists, latents=latents, vae=vae_of(store))
    found = worst_first([*found, *(finding for section in more for finding in section.findings)])
    report = info(store)
    tiles = [
        (f"{facts.samples:,}", "samples"),
        (f"{facts.captions:,}", "captions"),
        (f"{len(store.buckets())}", "buckets"),
        (f"{lists.rejects.total():,}", "rejects"),
        (human_bytes(report["payload_bytes"]), "payload"),
        (str(store.manifest.generation), "generation"),
    ]
    name = str(store.place).rstrip("/").rpartition("/")[2]
    data = document(
        "store/report/report.html",
        title=redacted(name) or "store",
        subtitle=f"A report of the store {redacted(str(store.place))}",
        made_by="store report",
        findings=found,
        tiles=tiles,
        sections=more,
        how=how,
        disk={"Files": _files(store), "Payload": _payload(store)},
        **template_values(store, facts, lists, latents, cards, report),
    )
    write_or_explain(page, data)
    return found


def _section(name: str, store: Store, options: ReportOptions) -> Section | None:
    """Return a section that another package makes, or ours of another folder; an error in it is all that it says."""
    try:
        return SECTIONS[name](store, options)
    except Exception as error:  # noqa: BLE001 - of any kind, in code that is not ours: the rest of the page is right without it
        return Section(anchor=name, title=name.capitalize(), body=parts.dim(f"{type(error).__name__}: {error}"))


def _kept(facts: Facts) -> Iterable[Shown]:
    for bucket in facts.buckets.values():
        yield from (one for _, one in bucket.cards)
    for bucket in worst_buckets(facts):
        yield from (one for _, _, one in bucket.worst)


def _look_up(store: Store, place: RowPlace) -> Shown:
    """Return a sample by its row."""
    bucket, row = store.bucket(place.bucket), np.array([place.row])
    shard = int(bucket.locate(row).shard[0])
    return Shown(place=place, record=store.record_of(shard, bucket.read(row, ID)[0].tobytes()))


def _images(store: Store, known: Mapping[RowPlace, Shown], options: ReportOptions) -> tuple[dict[RowPlace, bytes], str]:
    """Return the images of samples, and how they were made."""
    found: dict[RowPlace, NDArray[np.float32]] = {}
    for bucket in with_latents(store):
        places = sorted((place for place in known if place.bucket == bucket.name), key=lambda place: place.row)
        if places:
            rows = read_latents(store, bucket, np.array([place.row for place in places]))
            found |= {place: still(latent) for place, latent in zip(places, rows, strict=True)}
    if not found:
        return {}, "are not shown"
    vae = vae_of(store)
    if options.decoder is not None:
        job = {"vae": vae, **options.decoder, "shapes": [latent.shape for latent in found.values()]}
        data = b"".join(np.nan_to_num(latent).astype("<f4").tobytes() for latent in found.values())
        shown = map(base64.b64decode, call_elsewhere("bucketline.ingest.sheet.decoded:thumbnails", job, data))
        return dict(zip(found, shown, strict=True)), f"decoded by the VAE of {options.decoder['model']}"
    made, how = latent_images(list(found.values()), vae, PREVIEW_PX)
    return dict(zip(found, made, strict=True)), how


def _sources(facts: Facts, lists: ListFacts, options: ReportOptions) -> dict[str, bytes | str]:
    """Return images from the source: of rejects, and of those that lose most to their crop."""
    if options.source is None:
        return {}
    boxes: dict[str, tuple[int, int, int, int] | None] = {
        name: None for examples in lists.reject_examples.values() for name, _ in examples
    }
    for bucket in worst_buckets(facts):
        boxes |= {one.record.id: one.record.crop_in_source for _, _, one in bucket.worst}
    job = {"source": options.source, "boxes": boxes}
    images = call_elsewhere("bucketline.ingest.sheet.source_images:source_images", job)
    return {name: base64.b64decode(jpeg) if jpeg else problem for name, (jpeg, problem) in images.items()}


def _files(store: Store) -> dict[str, int]:
    """Return the bytes on the disk by kind of file; of a store in object storage those of its shards."""
    found: dict[str, int] = {}
    if store.source is not None:
        for shard in store.manifest.shards:
            for kind, entry in (("shards", shard.lmdb), ("extents", shard.extents), ("indexes", shard.index)):
                found[kind] = found.get(kind, 0) + entry.num_bytes
            found["shards"] += shard.data_bytes - shard.lmdb.num_bytes
        return found
    for folder, _, names in os.walk(store.path):
        for name in names:
            try:
                status = os.lstat(f"{folder}/{name}")
            except FileNotFoundError:  # a concurrent pack has removed it
                continue
            if stat.S_ISREG(status.st_mode) and not name.endswith(".lock"):
                kind = next((kind for end, kind in _KINDS.items() if name.endswith(end)), "manifests and the rest")
                found[kind] = found.get(kind, 0) + status.st_blocks * 512
    return found


def _payload(store: Store) -> dict[str, int]:
    """Return the bytes of the live rows' columns, of the captions' embeddings and of the records."""
    manifest = store.manifest
    found: dict[str, int] = {
        "text embeddings": sum(shard.caption_bytes for shard in manifest.shards),
        "sample records": sum(shard.record_bytes for shard in manifest.shards),
        "ragged entries": sum(manifest.ragged_bytes(shard) for shard in manifest.shards),
    }
    for bucket in store.buckets():
        for column in bucket.columns:
            kind = f"column {column.name}" if column.row_bytes >= 64 else "small columns"
            found[kind] = found.get(kind, 0) + column.row_bytes * bucket.num_rows
    return found
