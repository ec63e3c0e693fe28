"""The sections of `store report`, from the facts that were collected."""

from __future__ import annotations

import math
import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from bucketline.command_line import counted, human_bytes, human_number
from bucketline.pages.charts import histogram, scatter
from bucketline.pages.page import Bar, Card, Section, columns, escaped, parts, percent
from bucketline.store.report.collect import worst_buckets
from bucketline.store.report.findings import MUCH_CROPPED, spread_of
from bucketline.store.report.latents import ALIKE, CONSTANT
from bucketline.store.report.published_vaes import PUBLISHED, TITLES, vae_family_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from bucketline.store.read.store import Store
    from bucketline.store.report.collect import Facts, ListFacts, Shown
    from bucketline.store.report.latents import LatentFacts, RowPlace
    from bucketline.store.report.other_commands import PlanFacts
    from bucketline.typed_json import Json

MAX_NAMED_BOXES = 14  # buckets whose names the scatter chart shows
_MAX_BARS = 40
MAX_CLUSTERS, MAX_MEMBERS = 24, 8  # near-duplicates that the page shows
MAX_BROKEN = 24  # latents that are not finite, or constant, and shown
_MAX_WORDS = 60
WORD_BINS = 24
MOST_CAPTIONS = 0.95  # captions whose lengths are drawn if the longest is twice as long


@dataclass(frozen=True, slots=True, kw_only=True)
class Images:
    """The images of the page."""

    shown: Mapping[RowPlace, bytes]  # of samples, from their latents
    samples: Mapping[RowPlace, Shown]  # those that the page may show
    sources: Mapping[str, bytes | str]  # by id, from the source, or why there is none
    how: str  # how the latents were made visible


def card_of(images: Images, place: RowPlace, *notes: str) -> Card:
    """Return the card of a sample."""
    record = images.samples[place].record
    height, width = record.original_size
    size = [f"{height}x{width} px"] if height * width else []
    return Card(
        images=[images.shown[place]] if place in images.shown else [],
        title=record.id,
        notes=[*notes, *size],
        captions=record.captions,
        problem="no image latent",
    )


def buckets(store: Store, facts: Facts) -> Section:
    """Return the buckets as bars, and the sizes of the source images as charts."""
    found = [bucket for bucket in store.buckets() if bucket.num_rows]
    largest = sorted(found, key=lambda bucket: -bucket.num_rows)[:_MAX_BARS]
    total = max(1, facts.samples)
    rows = [Bar(label=b.name, value=b.num_rows, note=f"{b.num_rows:,}  ({percent(b.num_rows / total)})") for b in largest]
    body = f"<h3>Samples by bucket</h3>{parts.bars(rows)}"
    if len(found) > len(largest):
        body += f'<p class="dim">and {len(found) - len(largest)} smaller buckets</p>'
    sizes = [(height, width) for _, height, width in facts.sizes]
    boxes = {(bucket.height_px, bucket.width_px) for bucket in found if bucket.height_px}
    if sizes and boxes:
        has_names = len(boxes) <= MAX_NAMED_BOXES
        by_size = [(float(w), float(h), f"{h}x{w}" if has_names else "") for h, w in sorted(boxes)]
        by_aspect = [(w / h, math.sqrt(h * w), f"{h}x{w}" if has_names else "") for h, w in sorted(boxes)]
        body += (
            f"<h3>Sizes and aspect ratios of the source images <small>{counted(len(sizes), 'image')} drawn by hash; "
            "the squares are the buckets, height x width</small></h3>"
        )
        aspects = [(w / h, math.sqrt(h * w)) for h, w in sizes]
        body += columns(
            (
                scatter([(w, h) for h, w in sizes], by_size, ("width, px", "height, px")),
                scatter(aspects, by_aspect, ("width / height", "square root of the area, px")),
            )
        )
    return Section(anchor="buckets", title="Buckets", body=body)


def crops(facts: Facts, images: Images) -> Section:
    """Return what cropping removes by bucket, with the images that lose most."""
    known = sorted((b for b in facts.buckets.values() if b.with_crop), key=lambda one: (-one.mean_loss, one.name))
    if not known:
        return Section(
            anchor="crops", title="Crop loss", body='<p class="dim">The crops of these samples are not recorded.</p>'
        )
    rows = [
        Bar(
            label=b.name,
            value=b.mean_loss,
            note=f"{percent(b.mean_loss)} on average, {percent(b.most)} at most",
            warns=b.mean_loss >= MUCH_CROPPED,
        )
        for b in known[:_MAX_BARS]
    ]
    pieces = [parts.bars(rows, most=max(1e-9, min(1.0, max(b.mean_loss for b in known) * 1.25)))]
    for bucket in worst_buckets(facts):
        cards = [_crop_card(images, one) for _, _, one in sorted(bucket.worst, key=lambda entry: (-entry[0], entry[1]))]
        pieces.append(f"<h3>{escaped(bucket.name)} <small>largest losses first</small></h3>{parts.sheet(cards, 'small')}")
    note = "The share of a source image that is not in its latent."
    if images.sources:
        note += " The orange line is the crop; what is grey and hatched is lost."
    return Section(anchor="crops", title="Crop loss", note=note, body="".join(pieces))


def _crop_card(images: Images, one: Shown) -> Card:
    note = f"{percent(one.loss or 0.0)} lost"
    found = images.sources.get(one.record.id)
    if not isinstance(found, bytes):
        return card_of(images, one.place, note)
    height, width = one.record.original_size
    return Card(images=[found], title=one.record.id, notes=[note, f"{height}x{width} px"])


def captions(facts: Facts, lists: ListFacts) -> Section:
    """Return lengths, words and cuts of the captions."""
    if not facts.captions:
        return Section(anchor="captions", title="Captions", body='<p class="dim">The samples have no captions.</p>')
    longest, median = max(facts.lengths), _length_of_share(facts, 0.5)
    top = _length_of_share(facts, MOST_CAPTIONS)
    drawn = longest if longest <= 2 * top else top  # a few very long captions would leave one bar for all others
    width = max(1, -(-(drawn + 1) // WORD_BINS))
    counts = [0] * (drawn // width + 1)
    for words, count in facts.lengths.items():
        if words <= drawn:
            counts[words // width] += count
    edges = [n * width for n in range(len(counts) + 1)]
    beyond = sum(count for words, count in facts.lengths.items() if words > drawn)
    not_drawn = f" <small>{counted(beyond, 'longer one')} not drawn</small>" if beyond else ""
    frequent = "".join(f"<span>{escaped(word)}<em>{count:,}</em></span>" for word, count in facts.words.most_common(_MAX_WORDS))
    about = (
        f"{counted(facts.captions, 'caption')} of {counted(facts.samples, 'sample')}, {facts.without_caption} without one; "
        f"{median} words in the median, {longest} at most."
    )
    lengths = f"<h3>Words in a caption{not_drawn}</h3>{histogram(edges, counts, 'words')}"
    body = (
        columns((lengths, f'<h3>Most frequent words</h3><div class="words">{frequent}</div>'))
        + f"<h3>Longest</h3>{parts.table(('sample', 'words', 'caption'), _longest(facts), texts=3)}"
    )
    if lists.cuts:
        rows = [(name, encoder, tokens, limit, cut) for name, encoder, tokens, limit, cut in lists.cut_examples]
        body += (
            f"<h3>Cut by a text encoder <small>{counted(lists.cuts.total(), 'caption')}; examples drawn by hash</small></h3>"
        )
        body += parts.table(("sample", "encoder", "tokens", "limit", "what was cut"), rows, texts=5)
    return Section(anchor="captions", title="Captions", note=about, body=body)


def _length_of_share(facts: Facts, share: float) -> int:
    """Return the smallest number of words that a share of the captions does not exceed."""
    seen = 0
    for words in sorted(facts.lengths):
        seen += facts.lengths[words]
        if seen >= share * facts.captions:
            return words
    return max(facts.lengths)


def _longest(facts: Facts) -> list[tuple[str, int, str]]:
    ordered = sorted(facts.longest, reverse=True)
    return [(name, words, text if len(text) <= 400 else f"{text[:400]} …") for words, _, name, text in ordered]


def rejects(lists: ListFacts, images: Images) -> Section:
    """Return the rejected images by reason."""
    if not lists.rejects:
        return Section(anchor="rejects", title="Rejects", body='<p class="dim">No image of the last pack was rejected.</p>')
    rows = [Bar(label=reason, value=count, note=f"{count:,}") for reason, count in lists.rejects.most_common()]
    pieces = [parts.bars(rows)]
    for reason, _ in lists.rejects.most_common():
        cards = [_reject_card(images, name, detail) for name, detail in lists.reject_examples[reason]]
        pieces.append(f"<h3>{escaped(reason)}</h3>{parts.sheet(cards, 'small')}")
    note = "Of the last pack, from the store's rejects.jsonl."
    if not images.sources:
        note += " With <code>--source</code> the page shows the images themselves."
    return Section(anchor="rejects", title="Rejects", note=note, body="".join(pieces))


def _reject_card(images: Images, name: str, detail: str) -> Card:
    found = images.sources.get(name, "not requested (--source)")
    if isinstance(found, bytes):
        return Card(images=[found], title=name, notes=[detail])
    return Card(images=[], title=name, notes=[detail], problem=found)


def latents(facts: LatentFacts, vae: Mapping[str, Json], images: Images) -> Section:
    """Return the latents' statistics next to those of their VAE, and the latents that are broken."""
    if not facts.read:
        return Section(anchor="latents", title="Latents", body='<p class="dim">The store has no latents of numbers.</p>')
    spread = spread_of(facts, vae)
    factor, shift = vae.get("scaling_factor"), vae.get("shift_factor", 0.0)
    mean, std = vae.get("latents_mean"), vae.get("latents_std")
    rows = []
    for n in range(len(facts.mean)):
        own_mean = mean[n] if isinstance(mean, list) else shift
        own_std = std[n] if isinstance(std, list) else (1.0 / factor if isinstance(factor, int | float) and factor else None)
        rows.append((n, *map(_three, (facts.mean[n], own_mean, facts.std[n], own_std))))
    head = ("channel", "mean", "expected", "standard deviation", "expected")
    family = vae_family_of(vae)
    title = TITLES.get(family or "", family)
    about = f"{facts.read:,} of {counted(facts.live, 'latent')} read."
    if family:
        about += f" Their VAE's constants are those of {escaped(title)}."
    elif vae:
        about += f" Their VAE's constants are not those of a published one that is known here ({', '.join(PUBLISHED)})."
    if factor is None:
        about += " The store records no scaling factor."
    else:
        about += (
            " A scaling factor is published as 1 over the standard deviation of the VAE's latents: as fed to a model, they "
            f"should have a spread of about 1; here it is <b>{human_number(spread.rms)}</b>."
        )
    most = max(1.0, *spread.std) if len(spread.std) else 1.0
    chart = [Bar(label=f"channel {n}", value=float(value), note=f"{value:.2f}") for n, value in enumerate(spread.std)]
    deviations = f"<h3>Standard deviation as fed to a model</h3>{parts.bars(chart, most=float(most))}"
    body = columns((f"<h3>By channel</h3>{parts.table(head, rows, texts=0)}", deviations))
    for places, what in (
        (facts.not_finite, "with NaN or infinity"),
        (facts.constant, f"constant: within them, a spread below {percent(CONSTANT, 0)} of that of the store"),
    ):
        known = [place for place in places if place in images.samples]
        if places:
            more = f", {len(known)} shown" if len(known) < len(places) else ""
            body += f"<h3>{counted(len(places), 'latent')} {what}{more}</h3>"
            body += parts.sheet((card_of(images, place, place.bucket) for place in known), "small")
    return Section(anchor="latents", title="Latents", note=about, body=body)


def duplicates(facts: LatentFacts, images: Images) -> Section:
    """Return the clusters of near-duplicates."""
    pieces = []
    for cluster in facts.clusters[:MAX_CLUSTERS]:
        members = [place for place in cluster if place in images.samples][:MAX_MEMBERS]
        splits = {place.bucket.partition("/")[0] for place in cluster}
        about = f"{len(cluster)} samples" + (" in train and val" if len(splits) > 1 else "")
        more = f", {len(members)} shown" if len(members) < len(cluster) else ""
        cards = parts.sheet((card_of(images, place, place.bucket) for place in members), "small")
        pieces.append(f'<div class="cluster">{about}{more}{cards}</div>')
    if len(facts.clusters) > MAX_CLUSTERS:
        pieces.append(f'<p class="dim">and {len(facts.clusters) - MAX_CLUSTERS} smaller clusters</p>')
    return Section(
        anchor="duplicates",
        title="Near-duplicates",
        note=f"Samples whose pooled latents have a cosine of {ALIKE:g} or more, of {facts.read:,} read.",
        body="".join(pieces) or '<p class="dim">None found.</p>',
    )


def samples(facts: Facts, images: Images) -> Section:
    """Return a gallery of every bucket's samples."""
    groups = []
    for name, bucket in sorted(facts.buckets.items()):
        cards = [card_of(images, one.place) for _, one in sorted(bucket.cards, key=lambda entry: -entry[0])]
        if cards:
            groups.append((name, f"{len(cards)} of {bucket.rows:,}, drawn by hash", cards))
    return Section(
        anchor="samples",
        title="Samples",
        note=f"Latents {images.how}.",
        body=parts.gallery(groups, "Search ids and captions"),
    )


def disk(entries: Mapping[str, int], payload: Mapping[str, int]) -> Section:
    """Return what takes up the disk by kind of file, and the payload by kind of value."""
    sides = []
    for title, found in (("Files", entries), ("Payload", payload)):
        rows = sorted(((name, size) for name, size in found.items() if size), key=lambda one: -one[1])
        total = sum(found.values())
        chart = parts.bars([Bar(label=name, value=size, note=human_bytes(size)) for name, size in rows])
        sides.append(f"<h3>{title} <small>{human_bytes(total)}</small></h3>{chart}")
    return Section(anchor="disk", title="Disk", body=columns(sides))


def plan(facts: PlanFacts, batch_size: int) -> Section:
    """Return what `loader plan` says."""
    note = f"One epoch of the split <code>train</code> by <code>loader plan --batch-size {batch_size}</code>."
    if facts.problem:
        return Section(anchor="plan", title="Plan", note=note, body=f'<p class="dim">{escaped(facts.problem)}</p>')
    head = ("bucket", "rows", "global batch", "batches", "carried to the next epoch", "repeats")
    rows = [
        tuple(bucket[name] for name in ("name", "rows", "global_batch", "batches", "carried", "repeats"))
        for bucket in facts.report["buckets"]
    ]
    steps = f"<p>{counted(facts.report['steps'], 'step')}, {counted(facts.report['rows'], 'row')} delivered.</p>"
    return Section(anchor="plan", title="Plan", note=note, body=steps + parts.table(head, rows))


def provenance(store: Store, info: Mapping[str, Any]) -> Section:
    """Return what made the store."""
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
    if info["pack_options"]:
        rows.append(("options of ingest pack", shlex.join(info["pack_options"])))
    rows += [(f"rule: {name}", _flat(value)) for name, value in sorted(manifest.rules.items())]
    body = parts.table(("", ""), rows, texts=2)
    for name, encoder in manifest.encoders.items():
        own = encoder if isinstance(encoder, dict) else {"": encoder}
        body += f"<h3>{escaped(name)}</h3>" + parts.table(
            ("", ""), ((key, _flat(value)) for key, value in sorted(own.items())), texts=2
        )
    return Section(anchor="provenance", title="Provenance", body=body)


def _flat(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_flat(own)}" for key, own in value.items())
    if isinstance(value, list):
        return ", ".join(map(_flat, value))
    return "none" if value is None else str(value)


def _three(value: object) -> str:
    return f"{float(value):.3f}" if isinstance(value, int | float | np.floating) else ""


def places_shown(found: LatentFacts) -> Iterable[RowPlace]:
    """Yield the places of samples that are shown because of their latents, which the records' pass has not kept."""
    for cluster in found.clusters[:MAX_CLUSTERS]:
        yield from cluster[:MAX_MEMBERS]
    yield from found.not_finite[:MAX_BROKEN]
    yield from found.constant[:MAX_BROKEN]
