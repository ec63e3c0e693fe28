"""One pass over a store's records: sizes, crops, captions, and the samples that a page shows, drawn by hash."""

from __future__ import annotations

import heapq
import json
import re
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from bucketline.store.format.crop_share import cropped_away
from bucketline.store.format.hashing import draw
from bucketline.store.read.iter_samples import Selection, live_samples
from bucketline.store.report.latents import RowPlace

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from bucketline.store.format.sample_record import SampleRecord
    from bucketline.store.read.store import Store

MAX_LINE_BYTES = 1 << 20  # of a list; a longer one is left out
MAX_REASONS, OTHER_REASONS = 200, "other reasons"  # a packer has some dozens
_MAX_POINTS = 1500  # of the scatter charts
WORST = 8  # crops that a bucket shows
CROP_BUCKETS = 12  # buckets that show them
EXAMPLES = 8  # rejects of one reason, and cut captions of one encoder
MAX_CARDS = 40  # of one bucket
MAX_WORDS = 1 << 20  # different words that are counted at a time; some 100 MB
_MAX_LIST_BYTES = 1 << 30
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
        is_whole = True  # whether what came before ended with its line
        while file.tell() < _MAX_LIST_BYTES and (line := file.readline(MAX_LINE_BYTES)):
            was_whole, is_whole = is_whole, line.endswith(b"\n")
            try:
                entry = json.loads(line) if was_whole else None
            except (ValueError, RecursionError):
                continue
            if isinstance(entry, dict):
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
    cuts: Counter[str] = field(default_factory=Counter)  # captions, by encoder
    cut_examples: list[tuple[str, str, int, int, str]] = field(default_factory=list)  # id, encoder, tokens, limit, what was cut


def collect_lists(store: Store) -> ListFacts:
    """Read `rejects.jsonl` and `long_captions.jsonl`; examples are the entries with the smallest hashes."""
    facts = ListFacts()
    heaps: dict[str, list[tuple[int, tuple[str, str]]]] = {}
    for entry in list_of(store, "rejects.jsonl"):
        reason, name = str(entry.get("reason")), str(entry.get("id"))
        if reason not in facts.rejects and len(facts.rejects) >= MAX_REASONS:
            reason = OTHER_REASONS
        facts.rejects[reason] += 1
        _keep(heaps.setdefault(reason, []), (-draw(name, "page"), (name, str(entry.get("detail")))), EXAMPLES)
    facts.reject_examples = {reason: [one for _, one in sorted(heap, reverse=True)] for reason, heap in heaps.items()}
    cut: list[tuple[int, tuple[str, str, int, int, str]]] = []
    for entry in list_of(store, "long_captions.jsonl"):
        encoder, name = str(entry.get("encoder")), str(entry.get("id"))
        if encoder not in facts.cuts and len(facts.cuts) >= MAX_REASONS:
            encoder = OTHER_REASONS
        facts.cuts[encoder] += 1
        numbers = (entry.get("tokens"), entry.get("limit"))
        tokens, limit = (value if isinstance(value, int) else 0 for value in numbers)
        _keep(cut, (-draw(name, "page", encoder), (name, encoder, tokens, limit, str(entry.get("cut")))), EXAMPLES)
    facts.cut_examples = [one for _, one in sorted(cut, reverse=True)]
    return facts
