"""Collect the facts of a store and write them as one page: what is wrong at the top, then cards, charts and tables."""

from __future__ import annotations

import base64
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from bucketline.command_line import counted, human_bytes, human_number
from bucketline.extensions import Extensions
from bucketline.files.atomic_write import write_or_explain
from bucketline.files.paths import redacted
from bucketline.pages.page import (
    Card,
    Finding,
    Section,
    document,
    histogram,
    parts,
    percent,
    refuse_page,
    scatter,
    tinted,
    worst_first,
)
from bucketline.store.format.block import ID, LATENT, MASK
from bucketline.store.read.samples import info
from bucketline.store.report.facts import (
    ALIKE,
    CONSTANT,
    MAX_CARDS,
    Shown,
    check_latents,
    check_pairs,
    collect_facts,
    collect_lists,
    has_mask,
    read_latents,
    vae_of,
    with_latents,
    worst_buckets,
)
from bucketline.store.report.latent_rgb import PUBLISHED, TITLES, latent_images, number, still, vae_family_of
from bucketline.store.report.other_process import call_elsewhere

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from bucketline.store.read.store import Store
    from bucketline.store.report.facts import Facts, LatentFacts, ListFacts, PairFacts, RowPlace
    from bucketline.typed_json import Json

FEW_LATENTS = 100  # of which the spread says more of their images than of their VAE
SPREAD_WARNS = (0.8, 1.2)  # of latents as a model is fed, where 1 is expected
SPREAD_FAILS = (0.6, 1.7)
MUCH_CROPPED = 0.4  # mean share that crops remove in a bucket
MANY_REJECTS = 0.01  # of the images found
FEW_CAPTIONS = 0.05  # samples without one


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelSpread:
    """Latents as a model is fed, by channel and over all values, and how far they are from what the VAE's constants promise."""

    mean: NDArray[np.float64]  # [C]
    std: NDArray[np.float64]  # [C]
    rms: float  # around 0; 1 is expected


def spread_of(facts: LatentFacts, vae: Mapping[str, Json]) -> ChannelSpread:
    """Return the spread of latents after the VAE's own centring and scaling."""
    factor = number(vae, "scaling_factor", 1.0)
    mean, std = (
        np.array(found) if isinstance(found, list) else None for found in (vae.get("latents_mean"), vae.get("latents_std"))
    )
    shift = number(vae, "shift_factor", 0.0) if mean is None else mean
    scale = factor if std is None else factor / std
    fed_mean, fed_std = (facts.mean - shift) * scale, facts.std * scale
    rms = float(np.sqrt((np.square(fed_mean) + np.square(fed_std)).mean())) if len(facts.mean) else 0.0
    return ChannelSpread(mean=fed_mean, std=fed_std, rms=rms)


def findings(
    *, facts: Facts, lists: ListFacts, latents: LatentFacts, pairs: PairFacts, vae: Mapping[str, Json]
) -> list[Finding]:
    return [
        *_of_masks(pairs),
        *_of_latents(latents, vae),
        *_of_crops(facts),
        *_of_captions(facts),
        *_of_rejects(facts, lists),
    ]


def _of_masks(facts: PairFacts) -> Iterator[Finding]:
    if facts.empty:
        title = f"{counted(len(facts.empty), 'mask')} all zero"
        detail = f"Of {facts.read:,} read: with --mask-loss their samples teach nothing."
        yield Finding(level="warning", title=title, detail=detail, anchor="pairs")


def _of_latents(facts: LatentFacts, vae: Mapping[str, Json]) -> Iterator[Finding]:
    if not facts.read:
        return
    read = f"{counted(facts.read, 'latent')} read"
    if facts.read < facts.live:
        read += f" (drawn from {facts.live:,})"
    if facts.not_finite:
        title = f"{counted(len(facts.not_finite), 'latent')} with NaN or infinity"
        yield Finding(level="error", title=title, detail=f"Of {read}; training on them ends in NaN.", anchor="latents")
    else:
        yield Finding(level="good", title="No NaN", detail=f"All values of {read} are finite.")
    yield from _of_spread(facts, vae)
    if facts.constant:
        title = f"{counted(len(facts.constant), 'constant latent')}"
        detail = f"Of {read}: every position has the same value, as a blank image or a broken VAE makes them."
        yield Finding(level="warning", title=title, detail=detail, anchor="latents")
    if facts.clusters:
        title = f"{counted(facts.duplicates, 'near-duplicate')} in {counted(len(facts.clusters), 'cluster')}"
        detail = f"Of {read}: these are seen more often than others, and leak from train to val if a cluster has both."
        yield Finding(level="warning", title=title, detail=detail, anchor="duplicates")
    else:
        yield Finding(level="good", title="No near-duplicates", detail=f"Of {read}.")


def _of_spread(facts: LatentFacts, vae: Mapping[str, Json]) -> Iterator[Finding]:
    """Judge latents from elsewhere. What a pack encoded has its VAE's spread, whatever its images show."""
    if vae.get("dtype") is not None:  # in which the VAE computed: only who encodes records one
        return
    recorded = vae.get("scaling_factor")
    if not isinstance(recorded, int | float) or len(facts.mean) == 0:
        yield Finding(level="warning", title="The store records no scaling factor", detail="The spread cannot be judged.")
        return
    if facts.read < FEW_LATENTS:
        return
    rms = spread_of(facts, vae).rms
    said = f"with the recorded scaling factor {recorded:g} a model is fed latents of spread {human_number(rms)}; 1 is expected."
    if SPREAD_WARNS[0] <= rms <= SPREAD_WARNS[1]:
        yield Finding(level="good", title="The latents' spread fits their VAE", detail=said[0].upper() + said[1:])
        return
    is_error = not SPREAD_FAILS[0] <= rms <= SPREAD_FAILS[1]
    fitting = recorded / rms if rms else 0.0
    hint = f" A factor of {human_number(fitting)} would fit." if fitting else " The latents are all alike."
    if rms and abs(rms / recorded - 1.0) < 0.25:
        hint += " The latents look as if they had been scaled before they were stored, so they would be scaled twice."
    title = "Wrong scaling factor, or a broken VAE" if is_error else "The latents' spread is unusual for their VAE"
    yield Finding(
        level="error" if is_error else "warning", title=title, detail=said[0].upper() + said[1:] + hint, anchor="latents"
    )


def _of_crops(facts: Facts) -> Iterator[Finding]:
    known = [bucket for bucket in facts.buckets.values() if bucket.with_crop]
    for bucket in sorted(known, key=lambda one: -one.mean_loss):
        if bucket.mean_loss >= MUCH_CROPPED:
            yield Finding(
                level="warning",
                title=f"{bucket.name} loses {percent(bucket.mean_loss, 0)} of its images to cropping",
                detail=f"On average over {counted(bucket.with_crop, 'image')}; {percent(bucket.most, 0)} at most. "
                "A grid with a bucket of their shape, or --max-crop, would keep more.",
                anchor="crops",
            )
    if known and max(bucket.mean_loss for bucket in known) < MUCH_CROPPED:
        total = sum(bucket.loss for bucket in known) / sum(bucket.with_crop for bucket in known)
        yield Finding(level="good", title="Little is cropped away", detail=f"{percent(total)} of the pixels on average.")


def _of_captions(facts: Facts) -> Iterator[Finding]:
    if facts.samples and facts.without_caption > FEW_CAPTIONS * facts.samples:
        share = percent(facts.without_caption / facts.samples)
        title = f"{counted(facts.without_caption, 'sample')} without a caption"
        yield Finding(level="warning", title=title, detail=f"{share} of all; they train the empty caption.", anchor="captions")
    if total := facts.cuts.total():
        by = ", ".join(f"{name}: {count}" for name, count in facts.cuts.most_common())
        title = f"{counted(total, 'caption')} cut by a text encoder"
        yield Finding(level="warning", title=title, detail=f"{by}. What is beyond the limit is not learned.", anchor="captions")


def _of_rejects(facts: Facts, lists: ListFacts) -> Iterator[Finding]:
    total = lists.rejects.total()
    if not total:
        return
    share = total / (total + facts.samples)
    by = ", ".join(f"{count} {reason}" for reason, count in lists.rejects.most_common(3))
    level = "warning" if share > MANY_REJECTS else "good"
    detail = f"{percent(share)} of the images found: {by}."
    yield Finding(level=level, title=f"{counted(total, 'image')} rejected", detail=detail, anchor="rejects")


MAX_NAMED_BOXES = 14  # buckets whose names the scatter chart shows
MAX_CLUSTERS, MAX_MEMBERS = 24, 8  # near-duplicates that the page shows
MAX_BROKEN = 24  # latents that are not finite, or constant, and shown
WORD_BINS = 24
MOST_CAPTIONS = 0.95  # captions whose lengths are drawn if the longest is twice as long


@dataclass(frozen=True, slots=True, kw_only=True)
class Cards:
    """The cards of the page's images."""

    samples: Mapping[RowPlace, Shown]  # those that the page may show
    images: Mapping[RowPlace, Sequence[bytes]]  # of samples, from their latents: the target, then its references
    sources: Mapping[str, bytes | str]  # by id, from the source, or why there is none

    def sample(self, place: RowPlace, *notes: str) -> Card:
        record = self.samples[place].record
        return Card(
            images=self.images.get(place, []),
            title=record.id,
            notes=[*notes, *_size(record.original_size)],
            captions=record.captions,
            problem="no image latent",
        )

    def crop(self, one: Shown) -> Card:
        """Return the card of a sample with the share that its crop lost, if possible by its image in the source."""
        note = f"{percent(one.loss or 0.0)} lost"
        found = self.sources.get(one.record.id)
        if not isinstance(found, bytes):
            return self.sample(one.place, note)
        return Card(images=[found], title=one.record.id, notes=[note, *_size(one.record.original_size)])

    def reject(self, name: str, detail: str) -> Card:
        found = self.sources.get(name, "not requested (--source)")
        if isinstance(found, bytes):
            return Card(images=[found], title=name, notes=[detail])
        return Card(images=[], title=name, notes=[detail], problem=found)


def _size(size: tuple[int, int]) -> list[str]:
    return [f"{size[0]}x{size[1]} px"] if size[0] * size[1] else []


def template_values(
    store: Store, facts: Facts, lists: ListFacts, latents: LatentFacts, pairs: PairFacts, cards: Cards
) -> dict[str, object]:
    """Return what `report.html` is filled with, but for what only the command knows."""
    vae = vae_of(store)
    family = vae_family_of(vae)
    losing = sorted((b for b in facts.buckets.values() if b.with_crop), key=lambda one: (-one.mean_loss, one.name))
    galleries = [(name, sorted(bucket.cards, key=lambda one: -one[0])) for name, bucket in sorted(facts.buckets.items())]
    return {
        "store": store,
        "facts": facts,
        "lists": lists,
        "latents": latents,
        "pairs": pairs,
        "max_broken": MAX_BROKEN,
        "vae": vae,
        "cards": cards,
        "largest": sorted((b for b in store.buckets() if b.num_rows), key=lambda one: -one.num_rows),
        "size_charts": _size_charts(store, facts),
        "groups": [
            (name, f"{len(kept)} of {facts.buckets[name].rows:,}, drawn by hash", [cards.sample(one.place) for _, one in kept])
            for name, kept in galleries
            if kept
        ],
        "losing": losing,
        "worst": worst_buckets(facts),
        "much_cropped": MUCH_CROPPED,
        "lengths": _lengths(facts) if facts.captions else {},
        "family": TITLES.get(family or "", family),
        "published": ", ".join(PUBLISHED),
        "spread": spread_of(latents, vae),
        "channels": _channels(latents, vae),
        "constant": f"constant: within them, a spread below {percent(CONSTANT, 0)} of that of the store",
        "alike": ALIKE,
        "max_clusters": MAX_CLUSTERS,
        "max_members": MAX_MEMBERS,
        "provenance": _provenance(store),
        "rows_of": _rows_of,
    }


def places_shown(found: LatentFacts, pairs: PairFacts) -> Iterable[RowPlace]:
    """Yield the places of samples that are shown because of their latents or masks, which the records' pass has not kept."""
    for cluster in found.clusters[:MAX_CLUSTERS]:
        yield from cluster[:MAX_MEMBERS]
    yield from found.not_finite[:MAX_BROKEN]
    yield from found.constant[:MAX_BROKEN]
    yield from pairs.empty[:MAX_BROKEN]


def _size_charts(store: Store, facts: Facts) -> list[str]:
    """Return the sizes and the aspect ratios of the source images, with the buckets."""
    sizes = [(height, width) for _, height, width in facts.sizes]
    boxes = sorted({(bucket.height_px, bucket.width_px) for bucket in store.buckets() if bucket.num_rows and bucket.height_px})
    if not sizes or not boxes:
        return []
    names = [f"{h}x{w}" if len(boxes) <= MAX_NAMED_BOXES else "" for h, w in boxes]
    by_size = [(float(w), float(h), name) for (h, w), name in zip(boxes, names, strict=True)]
    by_aspect = [(w / h, math.sqrt(h * w), name) for (h, w), name in zip(boxes, names, strict=True)]
    return [
        scatter([(w, h) for h, w in sizes], by_size, ("width, px", "height, px")),
        scatter([(w / h, math.sqrt(h * w)) for h, w in sizes], by_aspect, ("width / height", "square root of the area, px")),
    ]


def _lengths(facts: Facts) -> dict[str, object]:
    longest, top = max(facts.lengths), _length_of_share(facts, MOST_CAPTIONS)
    drawn = longest if longest <= 2 * top else top  # a few very long captions would leave one bar for all others
    width = max(1, -(-(drawn + 1) // WORD_BINS))
    counts = [0] * (drawn // width + 1)
    for words, count in facts.lengths.items():
        if words <= drawn:
            counts[words // width] += count
    return {
        "median": _length_of_share(facts, 0.5),
        "longest": longest,
        "beyond": facts.captions - sum(counts),
        "chart": histogram([n * width for n in range(len(counts) + 1)], counts, "words"),
        "examples": [
            (name, words, text if len(text) <= 400 else f"{text[:400]} …")
            for words, _, name, text in sorted(facts.longest, reverse=True)
        ],
    }


def _length_of_share(facts: Facts, share: float) -> int:
    """Return the smallest number of words that a share of the captions does not exceed."""
    seen = 0
    for words in sorted(facts.lengths):
        seen += facts.lengths[words]
        if seen >= share * facts.captions:
            return words
    return max(facts.lengths)


def _channels(facts: LatentFacts, vae: Mapping[str, Json]) -> list[tuple[object, ...]]:
    """Return mean and standard deviation of each channel, each with what the VAE's constants promise."""
    factor, shift = vae.get("scaling_factor"), vae.get("shift_factor", 0.0)
    mean, std = vae.get("latents_mean"), vae.get("latents_std")
    rows: list[tuple[object, ...]] = []
    for n in range(len(facts.mean)):
        own_mean = mean[n] if isinstance(mean, list) else shift
        own_std = std[n] if isinstance(std, list) else (1.0 / factor if isinstance(factor, int | float) and factor else None)
        values = (facts.mean[n], own_mean, facts.std[n], own_std)
        rows.append((n, *(f"{v:.3f}" if isinstance(v, int | float | np.floating) else "" for v in values)))
    return rows


def _provenance(store: Store) -> list[tuple[str, object]]:
    manifest = store.manifest
    rows: list[tuple[str, object]] = [
        ("place", store.place),
        ("store id", manifest.store_id),
        ("generation", manifest.generation),
        ("digest of the manifest", manifest.digest),
        ("format version", manifest.format_version),
        ("shards", len(manifest.shards)),
        ("captions of a sample at most", manifest.max_captions),
    ]
    return rows + [(f"rule: {name}", _flat(value)) for name, value in sorted(manifest.rules.items())]


def _rows_of(encoder: object) -> list[tuple[str, str]]:
    own = encoder if isinstance(encoder, dict) else {"": encoder}
    return [(key, _flat(value)) for key, value in sorted(own.items())]


def _flat(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_flat(own)}" for key, own in value.items())
    if isinstance(value, list):
        return ", ".join(map(_flat, value))
    return "none" if value is None else str(value)


PREVIEW_PX = 48  # longer side of a preview; the browser enlarges it smoothly


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
    {"plan": "bucketline.loader.peek:plan_section"},
    callable,
)


def write_report(store: Store, page: Path, options: ReportOptions) -> list[Finding]:
    refuse_page(page, [("store", store.path)])
    num_buckets = max(1, len(store.buckets()))
    facts = collect_facts(store, min(MAX_CARDS, max(1, options.samples // num_buckets)))
    lists = collect_lists(store)
    latents = check_latents(store, options.latents)
    pairs = check_pairs(store, options.latents)
    samples = {one.place: one for one in _kept(facts)}
    samples |= {place: _look_up(store, place) for place in places_shown(latents, pairs) if place not in samples}
    images, how = _images(store, samples, options)
    cards = Cards(samples=samples, images=images, sources=_sources(facts, lists, options))
    more = [section for name in SECTIONS if (section := _section(name, store, options)) is not None]
    found = findings(facts=facts, lists=lists, latents=latents, pairs=pairs, vae=vae_of(store))
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
        **template_values(store, facts, lists, latents, pairs, cards),
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
    bucket, row = store.bucket(place.bucket), np.array([place.row])
    shard = int(bucket.locate(row).shard[0])
    return Shown(place=place, record=store.record_of(shard, bucket.read(row, ID)[0].tobytes()))


def _images(store: Store, known: Mapping[RowPlace, Shown], options: ReportOptions) -> tuple[dict[RowPlace, list[bytes]], str]:
    """Return of each sample its target, with its mask over it, and its references, and in words how they are shown."""
    found: list[tuple[RowPlace, NDArray[np.float32]]] = []
    masks: dict[RowPlace, NDArray[np.uint8]] = {}
    for bucket in with_latents(store):
        places = sorted((place for place in known if place.bucket == bucket.name), key=lambda place: place.row)
        if not places:
            continue
        rows = np.array([place.row for place in places])
        for name in (LATENT, *bucket.references):
            latents = map(still, read_latents(store, bucket, rows, name))
            found += zip(places, latents, strict=True)
        if has_mask(bucket):
            masks |= zip(places, bucket.read(rows, MASK), strict=True)
    if not found:
        return {}, "are not shown"
    made, how = _as_images([latent for _, latent in found], vae_of(store), options)
    images: dict[RowPlace, list[bytes]] = {}
    for (place, _), image in zip(found, made, strict=True):
        images.setdefault(place, []).append(image)
    for place, mask in masks.items():
        images[place][0] = tinted(images[place][0], mask)
    return images, how


def _as_images(
    latents: Sequence[NDArray[np.float32]], vae: Mapping[str, Json], options: ReportOptions
) -> tuple[Sequence[bytes], str]:
    if options.decoder is None:
        return latent_images(latents, vae, PREVIEW_PX)
    job = {"vae": vae, **options.decoder, "shapes": [latent.shape for latent in latents]}
    data = b"".join(np.nan_to_num(latent).astype("<f4").tobytes() for latent in latents)
    shown = call_elsewhere("bucketline.ingest.peek:thumbnails", job, data)
    return [base64.b64decode(one) for one in shown], f"decoded by the VAE of {options.decoder['model']}"


def _sources(facts: Facts, lists: ListFacts, options: ReportOptions) -> dict[str, bytes | str]:
    if options.source is None:
        return {}
    boxes: dict[str, tuple[int, int, int, int] | None] = {
        name: None for examples in lists.reject_examples.values() for name, _ in examples
    }
    for bucket in worst_buckets(facts):
        boxes |= {one.record.id: one.record.crop_in_source for _, _, one in bucket.worst}
    job = {"source": options.source, "boxes": boxes}
    images = call_elsewhere("bucketline.ingest.peek:source_images", job)
    return {name: base64.b64decode(jpeg) if jpeg else problem for name, (jpeg, problem) in images.items()}
