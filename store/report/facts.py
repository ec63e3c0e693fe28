"""What a report says of a store: one pass over its records, then its latents are read and checked.

Letters: N samples, C latent channels, D numbers of a pooled latent.
"""

from __future__ import annotations

import heapq
import json
import re
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from bucketline.store.format.block import LATENT, MASK, LatentKind, draw
from bucketline.store.format.schema import cropped_away
from bucketline.store.read.samples import Selection, live_samples

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from numpy.typing import NDArray

    from bucketline.store.format.schema import SampleRecord
    from bucketline.store.read.store import Bucket, Store
    from bucketline.typed_json import Json

_CHUNK_BYTES = 32 << 20  # of latents that are read at a time
GRID = 8  # cells along each side of a pooled latent
CONSTANT = 0.02  # spread within a latent over that of the store, below which it counts as constant
ALIKE = 0.99  # cosine from which two samples are near-duplicates: photographs of the demo reach 0.984, their re-encodings 0.998
COMPARED_ROWS = 512  # rows of the cosine matrix at a time
FLOATS = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True, slots=True, kw_only=True)
class RowPlace:
    """A row of a bucket."""

    bucket: str
    row: int

    @property
    def split(self) -> str:
        return self.bucket.partition("/")[0]


@dataclass(slots=True, kw_only=True)
class LatentFacts:
    """The result of reading latents."""

    read: int = 0  # latents
    live: int = 0  # samples with latents in the store
    mean: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))  # [C] of the finite values
    std: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))  # [C]
    not_finite: list[RowPlace] = field(default_factory=list)
    constant: list[RowPlace] = field(default_factory=list)
    clusters: list[list[RowPlace]] = field(default_factory=list)  # near-duplicates, largest first

    @property
    def duplicates(self) -> int:
        return sum(map(len, self.clusters))


def with_latents(store: Store) -> list[Bucket]:
    """Return the buckets whose rows have a latent of numbers, `[C, …]`."""
    return [
        bucket
        for bucket in store.buckets()
        if any(c.name == LATENT and c.dtype in FLOATS and len(c.shape) > 1 for c in bucket.columns)
    ]


def read_latents(store: Store, bucket: Bucket, rows: NDArray[np.int64], name: str = LATENT) -> NDArray[np.float32]:
    """Return the latents of rows as stored, `[N, C, …]`; of stored moments the means. `name`: that of a reference's column."""
    column = bucket.spec.column(name)
    stored = bucket.read(rows, name)
    values: NDArray[np.float32] = (
        (stored.astype(np.uint32) << 16).view(np.float32) if column.dtype == "BF16" else stored.astype(np.float32)
    )
    vae = vae_of(store)
    return values[:, : values.shape[1] // 2] if name == LATENT and vae.get("latents") == LatentKind.MOMENTS.value else values


def has_mask(bucket: Bucket) -> bool:
    return any(column.name == MASK for column in bucket.columns)


@dataclass(slots=True, kw_only=True)
class PairFacts:
    """References and masks."""

    by_number: Counter[int] = field(default_factory=Counter)  # samples by how many references they have
    masks: int = 0  # samples with a mask
    read: int = 0  # masks
    area: float = 0.0  # sum of what counts, each mask's as a share of its image
    full: int = 0  # masks that leave nothing out
    empty: list[RowPlace] = field(default_factory=list)  # masks that leave out all

    @property
    def are_there(self) -> bool:
        return self.masks > 0 or any(self.by_number.keys() - {0})

    @property
    def mean_area(self) -> float:
        return self.area / self.read if self.read else 0.0


def check_pairs(store: Store, most: int) -> PairFacts:
    """Count samples by their references, and read the masks of at most `most`, drawn as latents are."""
    facts = PairFacts()
    with_masks = [bucket for bucket in store.buckets() if has_mask(bucket)]
    facts.masks = sum(bucket.num_rows for bucket in with_masks)
    for bucket in store.buckets():
        facts.by_number[len(bucket.references)] += bucket.num_rows
    for bucket in with_masks:
        share = bucket.num_rows if facts.masks <= most else max(1, round(most * bucket.num_rows / facts.masks))
        rows = drawn_rows(store, bucket, share)
        size = max(1, _CHUNK_BYTES // max(1, bucket.spec.column(MASK).row_bytes))
        for part in (rows[first : first + size] for first in range(0, len(rows), size)):
            areas = bucket.read(part, MASK).mean(axis=(1, 2)) / 255.0
            facts.read += len(areas)
            facts.area += float(areas.sum())
            facts.full += int((areas == 1.0).sum())
            facts.empty += [RowPlace(bucket=bucket.name, row=int(row)) for row in part[areas == 0.0]]
    return facts


def vae_of(store: Store) -> Mapping[str, Json]:
    """Return what the store records of its VAE; an empty mapping if it records none."""
    vae = store.encoders.get("vae")
    return vae if isinstance(vae, dict) else {}


def drawn_rows(store: Store, bucket: Bucket, count: int) -> NDArray[np.int64]:
    """Return at most `count` rows of a bucket in ascending order, drawn by the hash of the store's digest and the bucket."""
    if bucket.num_rows <= count:
        return np.arange(bucket.num_rows, dtype=np.int64)
    generator = np.random.default_rng(draw(bucket.name, "page", store.manifest.digest))
    return np.sort(generator.choice(bucket.num_rows, size=count, replace=False)).astype(np.int64)


def check_latents(store: Store, most: int) -> LatentFacts:
    """Read the latents of at most `most` samples, drawn by hash in proportion to the buckets, and return what they show."""
    buckets = with_latents(store)
    facts = LatentFacts(live=sum(bucket.num_rows for bucket in buckets))
    places: list[RowPlace] = []
    spreads: list[NDArray[np.float64]] = []  # of each latent, over its positions, the root mean over channels
    pooled: list[NDArray[np.float32]] = []
    sums: list[tuple[int, NDArray[np.float64], NDArray[np.float64]]] = []  # count, sum and sum of squares by channel
    for bucket in buckets:
        share = bucket.num_rows if facts.live <= most else max(1, round(most * bucket.num_rows / facts.live))
        for rows, latents in _chunks(store, bucket, drawn_rows(store, bucket, share)):
            flat = latents.reshape(len(latents), latents.shape[1], -1).astype(np.float64)
            finite = np.isfinite(flat).all(axis=(1, 2))
            places += [RowPlace(bucket=bucket.name, row=int(row)) for row in rows]
            facts.not_finite += [RowPlace(bucket=bucket.name, row=int(row)) for row in rows[~finite]]
            if finite.any():
                kept = flat[finite]
                sums.append((kept.shape[0] * kept.shape[2], kept.sum(axis=(0, 2)), np.square(kept).sum(axis=(0, 2))))
            flat[~finite] = 0.0
            spreads.append(np.where(finite, np.sqrt(flat.var(axis=2).mean(axis=1)), np.nan))
            pooled.append(_pooled(np.where(finite.reshape(-1, *(1,) * (latents.ndim - 1)), latents, 0.0)))
    facts.read = len(places)
    if not places:
        return facts
    sums = [own for own in sums if len(own[1]) == len(sums[0][1])]  # buckets may differ in size, not in channels
    if sums:
        count = sum(own[0] for own in sums)
        facts.mean = np.sum([own[1] for own in sums], axis=0) / count
        facts.std = np.sqrt(np.maximum(np.sum([own[2] for own in sums], axis=0) / count - np.square(facts.mean), 0.0))
    spread = np.concatenate(spreads)
    typical = float(np.sqrt(np.square(facts.std).mean())) if len(facts.std) else 0.0
    is_constant = np.isfinite(spread) & (spread <= CONSTANT * typical)
    facts.constant = [places[n] for n in np.flatnonzero(is_constant)]
    usable = np.flatnonzero(np.isfinite(spread) & ~is_constant)
    vectors = np.concatenate(pooled)[usable] if len({p.shape[1] for p in pooled}) == 1 else np.zeros((0, 1), np.float32)
    facts.clusters = [[places[usable[n]] for n in cluster] for cluster in near_duplicates(vectors)]
    return facts


def _chunks(store: Store, bucket: Bucket, rows: NDArray[np.int64]) -> Iterator[tuple[NDArray[np.int64], NDArray[np.float32]]]:
    size = max(1, _CHUNK_BYTES // max(1, bucket.spec.column(LATENT).row_bytes * 4))
    for first in range(0, len(rows), size):
        part = rows[first : first + size]
        yield part, read_latents(store, bucket, part)


def _pooled(latents: NDArray[Any]) -> NDArray[np.float32]:
    """Return the means over a grid of cells, `[N, D]`, so that latents of different sizes can be compared."""
    while latents.ndim > 4:  # such as the frames of a video
        latents = latents.mean(axis=2)
    if latents.ndim == 3:
        latents = latents[:, :, None]
    means = latents
    for axis in (2, 3):
        length = means.shape[axis]
        starts = np.minimum(np.arange(GRID) * length // GRID, length - 1)
        ends = np.maximum(starts + 1, (np.arange(GRID) + 1) * length // GRID)
        cells = [means.take(range(a, b), axis=axis).mean(axis=axis) for a, b in zip(starts, ends, strict=True)]
        means = np.stack(cells, axis=axis)
    pooled: NDArray[np.float32] = means.reshape(len(means), -1).astype(np.float32)
    return pooled


def near_duplicates(pooled: NDArray[np.float32]) -> list[list[int]]:
    """Return clusters of pooled latents, `[N, D]`, whose cosine to another member is at least ALIKE; largest cluster first.

    The mean latent is subtracted first, since all latents share much of it.
    """
    if len(pooled) < 2:
        return []
    centred = pooled - pooled.mean(axis=0)
    lengths = np.linalg.norm(centred, axis=1, keepdims=True)
    units = centred / np.maximum(lengths, 1e-12)
    labels = np.arange(len(units))  # of a cluster, the same; a row at a time, since a large cluster has very many pairs
    for first in range(0, len(units), COMPARED_ROWS):
        alike = units[first : first + COMPARED_ROWS] @ units[first:].T >= ALIKE
        for row in np.flatnonzero(alike.sum(axis=1) > 1):
            joined = np.unique(labels[first:][alike[row]])
            if len(joined) > 1:
                labels[np.isin(labels, joined)] = joined[0]
    clusters: dict[int, list[int]] = {}
    for n, label in enumerate(labels.tolist()):
        clusters.setdefault(label, []).append(n)
    found = [cluster for cluster in clusters.values() if len(cluster) > 1]
    return sorted(found, key=lambda cluster: (-len(cluster), cluster[0]))


MAX_LINE_BYTES = 1 << 20  # of a list
_MAX_POINTS = 1500  # of the scatter charts
WORST = 8  # crops that a bucket shows
CROP_BUCKETS = 12  # buckets that show them
EXAMPLES = 8  # rejects of one reason, and cut captions of one encoder
MAX_CARDS = 40  # of one bucket
MAX_WORDS = 1 << 20  # different words that are counted at a time; some 100 MB
_WORD = re.compile(r"[^\W\d_][\w'-]*")
_STOP = (
    "a an and are as at be by for from has have he her his in into is it its of off on or over she some that the their there "
    "they this to two under up was were which while who with"
)
STOP_WORDS = frozenset(_STOP.split())


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """A sample that the page may show."""

    place: RowPlace
    record: SampleRecord

    @property
    def loss(self) -> float | None:
        """Share of the source image that the crop removed; None if it is unknown."""
        return cropped_away(self.record)


@dataclass(slots=True, kw_only=True)
class BucketFacts:
    """A bucket's samples."""

    name: str
    rows: int = 0
    with_crop: int = 0  # samples whose crop is known
    loss: float = 0.0  # sum over them
    most: float = 0.0
    worst: list[tuple[float, int, Shown]] = field(default_factory=list)  # a heap of the largest losses
    cards: list[tuple[int, Shown]] = field(default_factory=list)  # a heap of the smallest hashes, negated

    @property
    def mean_loss(self) -> float:
        return self.loss / self.with_crop if self.with_crop else 0.0


@dataclass(slots=True, kw_only=True)
class Facts:
    """The facts that a store's records hold."""

    buckets: dict[str, BucketFacts] = field(default_factory=dict)
    samples: int = 0
    sizes: list[tuple[int, int, int]] = field(default_factory=list)  # a heap: negated hash, height, width of source images
    captions: int = 0
    without_caption: int = 0
    words: Counter[str] = field(default_factory=Counter)  # STOP_WORDS left out
    lengths: Counter[int] = field(default_factory=Counter)  # words of a caption
    longest: list[tuple[int, int, str, str]] = field(default_factory=list)  # a heap: words, order, id, caption
    cuts: Counter[str] = field(default_factory=Counter)  # captions that a text encoder cut, by encoder
    cut: list[tuple[int, tuple[str, str, int, int, str]]] = field(default_factory=list)  # a heap, by hash: see `cut_examples`

    @property
    def cut_examples(self) -> list[tuple[str, str, int, int, str]]:
        """Return some of these captions: id, encoder, tokens, limit, what was cut."""
        return [one for _, one in sorted(self.cut, reverse=True)]


def collect_facts(store: Store, cards_of_each: int) -> Facts:
    """Read every record of a store once; memory does not depend on the number of samples."""
    facts = Facts(buckets={bucket.name: BucketFacts(name=bucket.name) for bucket in store.buckets()})
    for listed in live_samples(store, Selection()):
        record = listed.record
        bucket = facts.buckets[record.bucket]
        shown = Shown(place=RowPlace(bucket=record.bucket, row=listed.row), record=record)
        key = draw(record.id, "page")
        facts.samples += 1
        bucket.rows += 1
        _keep(bucket.cards, (-key, shown), cards_of_each)
        if (loss := shown.loss) is not None:
            bucket.with_crop += 1
            bucket.loss += loss
            bucket.most = max(bucket.most, loss)
            if loss > 0.0:
                _keep(bucket.worst, (loss, key, shown), WORST)
        if min(record.original_size) > 0:
            _keep(facts.sizes, (-key, *record.original_size), _MAX_POINTS)
        _note_captions(facts, record)
    return facts


def _keep(heap: list[Any], entry: tuple[Any, ...], most: int) -> None:
    """Add an entry to a heap that keeps the largest ones; no two entries have the same hash of an id."""
    if len(heap) < most:
        heapq.heappush(heap, entry)
    elif most and entry[:-1] > heap[0][:-1]:
        heapq.heapreplace(heap, entry)


def _note_captions(facts: Facts, record: SampleRecord) -> None:
    texts = [text for text in record.captions if text]
    facts.captions += len(texts)
    facts.without_caption += not texts
    for cut in record.cuts:
        facts.cuts[cut[0]] += 1
        _keep(facts.cut, (-draw(record.id, "page", cut[0]), (record.id, *cut)), EXAMPLES)
    for n, text in enumerate(texts):
        words = _WORD.findall(text.lower())
        facts.lengths[len(words)] += 1
        facts.words.update(word for word in words if word not in STOP_WORDS)
        if len(facts.words) > MAX_WORDS:  # rare ones make room, and begin again at 0
            facts.words = Counter(dict(facts.words.most_common(MAX_WORDS // 4)))
        _keep(facts.longest, (len(words), -(facts.captions * 64 + n), record.id, text), 3)


def list_of(store: Store, name: str) -> Iterator[Mapping[str, Any]]:
    """Yield the entries of one of the packer's lists (`rejects.jsonl`, …); none if the store does not have it."""
    path: Path = store.path / name
    if store.source is not None or not path.is_file():
        return
    with path.open("rb") as file:
        while line := file.readline(MAX_LINE_BYTES):  # the parts of a longer one are no objects
            with suppress(ValueError, RecursionError):
                if isinstance(entry := json.loads(line), dict):
                    yield entry


def worst_buckets(facts: Facts) -> list[BucketFacts]:
    """Return the buckets whose crops are shown: at most CROP_BUCKETS, largest mean loss first."""
    losing = [bucket for bucket in facts.buckets.values() if bucket.worst]
    return sorted(losing, key=lambda one: (-one.mean_loss, one.name))[:CROP_BUCKETS]


@dataclass(slots=True, kw_only=True)
class ListFacts:
    """The packer's lists."""

    rejects: Counter[str] = field(default_factory=Counter)  # by reason
    reject_examples: dict[str, list[tuple[str, str]]] = field(default_factory=dict)  # by reason: id, detail


def collect_lists(store: Store) -> ListFacts:
    """Read `rejects.jsonl`; examples are the entries with the smallest hashes."""
    facts = ListFacts()
    heaps: dict[str, list[tuple[int, tuple[str, str]]]] = {}
    for entry in list_of(store, "rejects.jsonl"):
        reason, name = str(entry.get("reason")), str(entry.get("id"))
        facts.rejects[reason] += 1
        _keep(heaps.setdefault(reason, []), (-draw(name, "page"), (name, str(entry.get("detail")))), EXAMPLES)
    facts.reject_examples = {reason: [one for _, one in sorted(heap, reverse=True)] for reason, heap in heaps.items()}
    return facts
