"""The samples that a run has seen, at which steps and how: computed by planning its steps again.

The samples are not logged. A run's `plans.jsonl` says by which plans its steps were made; for each, the generation's rows are
found by id, and looked for in what the steps read. Draws are keyed by step and position, so captions and flips follow.

Letters: V sightings, n rows of a bucket.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np

from bucketline.errors import BucketlineError
from bucketline.loader.plan.rng import Purpose, keys_of_rows, uniform_on_host
from bucketline.loader.recorded_run import RecordedPlan, open_plan
from bucketline.store.format.block import CAPTIONS, CROP, ORIGINAL_SIZE
from bucketline.store.format.hashing import sample_digest

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from bucketline.loader.mixture import WeightedStore
    from bucketline.loader.plan.plan import PlannedStep
    from bucketline.loader.recorded_run import PlanLine, RecordedRun
    from bucketline.store import Bucket, Store
    from bucketline.store.remote.urls import RemoteOptions
    from bucketline.store.shard.reader import IndexEntry

_CHUNK_STEPS, _CHUNK_ROWS = 4096, 1 << 22  # planned at a time, at most


@dataclass(frozen=True, slots=True, kw_only=True)
class Unknown:
    """Steps of which nothing tells what was read."""

    begin: int
    end: int
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Sighting:
    """One sample in one batch."""

    step: int
    epoch: int
    rank: int
    micro_step: int
    position: int  # in the step's global batch
    store: str
    generation: int
    bucket: str
    caption: int | None  # number of the caption that was chosen; None: the empty one
    text: str | None
    crop: tuple[int, int]  # top and left, as delivered
    flipped: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """How often each sample of a run's generations was seen, sorted by digest."""

    digests: NDArray[np.bytes_]  # [N] S16
    count: NDArray[np.int64]  # [N]
    first: NDArray[np.int64]  # [N] step; -1 if it was not seen
    last: NDArray[np.int64]  # [N] step; -1 likewise

    def of(self, digest: bytes) -> tuple[int, int, int]:
        """Return a sample's count, first and last step."""
        at = int(np.searchsorted(self.digests, np.frombuffer(digest, dtype=self.digests.dtype)[0]))
        return int(self.count[at]), int(self.first[at]), int(self.last[at])


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPart(RecordedPlan):
    """Steps of a run and the plan that made them."""

    begin: int  # steps by the plan's own number
    end: int
    line: PlanLine

    def sightings(self, wanted: Mapping[str, NDArray[np.int64] | None]) -> Iterator[tuple[str, NDArray[np.int64]]]:
        """Yield (bucket, (row, step, epoch, position), `[4, V]`) of some rows of buckets; None: of all.

        Padding, with weight 0, is not counted.
        """
        chunk = max(1, min(_CHUNK_STEPS, _CHUNK_ROWS // max(bucket.global_batch for bucket in self.plan.buckets)))
        for at in range(self.begin, self.end, chunk):
            steps: dict[str, list[PlannedStep]] = {}
            for one in self.plan.draw([(step, 0) for step in range(at, min(at + chunk, self.end))]):
                if one.bucket in wanted:
                    steps.setdefault(one.bucket, []).append(one)
            for name, drawn in steps.items():
                rows, numbers = wanted[name], np.concatenate([one.rows for one in drawn])
                found = np.concatenate([one.weight for one in drawn]) > 0
                found &= np.isin(numbers, rows) if rows is not None else True
                which, position = np.divmod(np.flatnonzero(found), len(drawn[0].rows))
                step, epoch = np.array([(one.step, one.epoch) for one in drawn], dtype=np.int64).T[:, which]
                yield name, np.stack([numbers[found], step, epoch, position])

    def all_sightings(self, wanted: Mapping[str, NDArray[np.int64]]) -> dict[str, NDArray[np.int64]]:
        """Return all of `sightings` by bucket, `[4, V]` each, sorted by row; nothing of a bucket that has none."""
        found: dict[str, list[NDArray[np.int64]]] = {}
        for name, values in self.sightings(wanted) if wanted else ():
            found.setdefault(name, []).append(values)
        every = {name: np.concatenate(own, axis=1) for name, own in found.items()}
        return {name: own[:, np.argsort(own[0], kind="stable")] for name, own in every.items()}

    def entries(self, digest: bytes) -> Iterator[tuple[WeightedStore, int, IndexEntry]]:
        """Yield (store, ordinal of the shard among all, index entry) of a sample, for each store that has it."""
        end = 0
        for share in self.shares:
            begin, end = end, end + len(share.store.shards)
            for ordinal in reversed(range(begin, end)):
                if (entry := self.rows.shards[ordinal].find(digest)) is not None:
                    yield share, ordinal, entry
                    break


class Seen:
    """The samples that a run has seen."""

    def __init__(self, run: RecordedRun, stores: Sequence[str] = (), remote: RemoteOptions | None = None) -> None:
        """Open the generations that the run's steps were planned on; `unknown` has the steps of which that was not possible.

        `stores`: those of the run that have moved.
        """
        self.steps, moved = run.steps, run.given(stores, remote)
        self.parts: list[RunPart] = []
        self.unknown: list[Unknown] = []
        if begin := min(run.lines[0].step, run.steps):
            self.unknown.append(Unknown(begin=0, end=begin, why="no line tells of them"))
        ends = [min(one.step, run.steps) for one in run.lines[1:]]
        for line, end in zip(run.lines, [*ends, run.steps], strict=True):
            if line.step >= end:
                continue
            try:
                found = open_plan(run, line.state, moved, remote)
            except BucketlineError as error:
                self.unknown.append(Unknown(begin=line.step, end=end, why=str(error)))
                continue
            of_plan = {one.name: getattr(found, one.name) for one in fields(found)}
            self.parts.append(RunPart(**of_plan, line=line, begin=line.state.step, end=end - line.shift))

    def find(self, sample_ids: Sequence[str]) -> list[tuple[list[Sighting], list[str]]]:
        """Return each sample's sightings by step, and the buckets that it is in, also of splits that the run does not read."""
        found: list[list[Sighting]] = [[] for _ in sample_ids]
        buckets: list[dict[str, None]] = [{} for _ in sample_ids]
        for part in self.parts:
            entries = [(at, *one) for at, name in enumerate(sample_ids) for one in part.entries(sample_digest(name))]
            rows: dict[str, list[int]] = {bucket.name: [] for bucket in part.plan.buckets}
            for at, _, ordinal, entry in entries:
                buckets[at][entry.bucket] = None
                if entry.bucket in rows:
                    rows[entry.bucket] += part.rows.bucket(entry.bucket).numbers_of(ordinal, entry.row)
            seen = part.all_sightings({name: np.array(own, dtype=np.int64) for name, own in rows.items() if own})
            for at, share, ordinal, entry in entries:
                if (values := seen.get(entry.bucket)) is not None:
                    found[at] += _sightings_of(part, share, ordinal, entry, values)
        for one in found:
            one.sort(key=lambda sighting: (sighting.step, sighting.position))
        return list(zip(found, map(list, buckets), strict=True))

    def counts(self) -> Counts:
        """Count the sightings of all samples in the splits that the run read."""
        parts = [one for part in self.parts for one in _counts_of(part)]
        if not parts:
            empty = np.empty(0, dtype=np.int64)
            return Counts(digests=np.empty(0, dtype="S16"), count=empty, first=empty, last=empty)
        keys, count, first, last = (np.concatenate(values) for values in zip(*parts, strict=True))
        digests, which = np.unique(keys, return_inverse=True)
        total, least, most = np.zeros((3, len(digests)), dtype=np.int64)
        least += np.iinfo(np.int64).max
        most -= 1
        np.add.at(total, which, count)
        np.minimum.at(least, which, first)
        np.maximum.at(most, which, last)
        return Counts(digests=digests, count=total, first=np.where(total > 0, least, -1), last=most)

    def views(self) -> list[tuple[Store, str]]:
        """Return each generation that was read, with the split, the newest first."""
        found = {
            (share.store.manifest.store_id, share.store.manifest.generation, part.config.split): share.store
            for part in self.parts
            for share in part.shares
        }
        return [(store, split) for (_, _, split), store in sorted(found.items(), key=lambda one: -one[0][1])]


def _sightings_of(
    part: RunPart, share: WeightedStore, ordinal: int, entry: IndexEntry, values: NDArray[np.int64]
) -> Iterator[Sighting]:
    """Yield the sightings of a sample, of all `values` of its bucket that `RunPart.all_sightings` found."""
    bucket = part.rows.bucket(entry.bucket)
    rows = np.array(bucket.numbers_of(ordinal, entry.row), dtype=np.int64)
    own = [np.arange(*np.searchsorted(values[0], [row, row + 1])) for row in rows.tolist()]
    step, epoch, position = values[1:, np.concatenate(own)]
    if len(step) == 0:
        return
    from bucketline.loader.collate.columns import EMPTY, choose_captions  # imports torch, which counting does not wait for

    keys = keys_of_rows(part.config.seed, step, position)
    flipped = uniform_on_host(keys, Purpose.FLIP) < part.config.flip
    stored = bucket.read(rows[:1], CAPTIONS)
    num_captions = np.repeat((stored >= 0).sum(axis=1), len(keys))
    chosen = choose_captions(num_captions, keys, part.config.caption_dropout)
    crops = _crops(bucket, rows[:1], flipped)
    record = part.rows.shards[ordinal].record(entry)
    of_rank = next(one.global_batch for one in part.plan.buckets if one.name == entry.bucket) // part.line.state.world_size
    rank, within = np.divmod(position, of_rank)
    micro = within // (of_rank // part.config.accumulation)
    for n in range(len(step)):
        caption = int(chosen[n])
        has_text = caption != EMPTY and bool(record.captions)  # a sample without captions has the empty one stored as its own
        yield Sighting(
            step=int(step[n]) + part.line.shift,
            epoch=int(epoch[n]),
            rank=int(rank[n]),
            micro_step=int(micro[n]),
            position=int(position[n]),
            store=str(share.store.place),
            generation=share.store.manifest.generation,
            bucket=entry.bucket,
            caption=caption if has_text else None,
            text=record.captions[caption] if has_text else None,
            crop=(int(crops[n, 0]), int(crops[n, 1])),
            flipped=bool(flipped[n]),
        )


def _crops(bucket: Bucket, row: NDArray[np.int64], flipped: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return the top and left of a row's crop in each of its sightings, `[V, 2]`, mirrored where it was flipped."""
    from bucketline.loader.collate.columns import mirrored_left

    crop, source = (bucket.read(row, name).astype(np.int64) for name in (CROP, ORIGINAL_SIZE))
    crops = np.repeat(crop, len(flipped), axis=0)
    if flipped.any() and source[0, 0] > 0 and crop[0, 0] >= 0:
        target = np.array([[bucket.height_px, bucket.width_px]], dtype=np.int64)
        crops[flipped, 1] = mirrored_left(crop[:, 1], source, target)[0]
    return crops


def _counts_of(part: RunPart) -> Iterator[tuple[NDArray[Any], ...]]:
    """Yield (digests, count, first step, last step) of the rows of each shard and bucket, `[rows]` each."""
    from bucketline.store.read.iter_samples import live_positions

    buckets = [part.rows.bucket(planned.name) for planned in part.plan.buckets]
    counted = {one.name: np.zeros((3, one.num_rows), dtype=np.int64) for one in buckets}
    for values in counted.values():
        values[1:] = [[np.iinfo(np.int64).max], [-1]]
    for name, (row, step, *_) in part.sightings(dict.fromkeys(counted)):
        count, first, last = counted[name]
        count += np.bincount(row, minlength=len(count))
        np.minimum.at(first, row, step + part.line.shift)
        np.maximum.at(last, row, step + part.line.shift)
    for bucket in buckets:
        for ordinal, shard in enumerate(part.rows.shards):
            if bucket.name not in shard.entry.groups:
                continue
            positions = live_positions(shard, bucket.name).astype(np.int64)
            keys = np.ascontiguousarray(shard.index.take("digest", positions)).view("S16").reshape(-1)
            for at in bucket.first_rows(ordinal):
                yield keys, *counted[bucket.name][:, at : at + len(keys)]
