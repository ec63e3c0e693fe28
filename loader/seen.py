"""The samples that a run has seen, at which steps and how: computed by planning its steps again.

The samples are not logged. A run's `plans.jsonl` says by which plans its steps were made; for each, the generation's rows are
found by id, and looked for in what the steps read. Draws are keyed by step and position, so captions and flips follow.

Letters: V sightings, N samples.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from bucketline.errors import BucketlineError
from bucketline.loader.plan.rng import Purpose, keys_of_rows, uniform_on_host
from bucketline.loader.recorded_run import open_plan
from bucketline.store.format.block import CAPTIONS, CROP, ORIGINAL_SIZE
from bucketline.store.format.hashing import sample_digest

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from bucketline.loader.mixture import WeightedStore
    from bucketline.loader.plan.plan import PlannedStep
    from bucketline.loader.recorded_run import RecordedPlan, RecordedRun
    from bucketline.store.format.sample_record import SampleRecord
    from bucketline.store.remote.urls import RemoteOptions

_CHUNK_STEPS, _CHUNK_ROWS = 4096, 1 << 22  # planned at a time, at most


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


class Seen:
    """The samples that a run has seen."""

    def __init__(self, run: RecordedRun, stores: Sequence[str] = (), remote: RemoteOptions | None = None) -> None:
        """Open the generations that the run's steps were planned on; `unknown` says of which steps that was not possible.

        `stores`: those of the run that have moved.
        """
        moved = run.given(stores, remote)
        self.parts: list[tuple[RecordedPlan, range]] = []  # each plan, and its own numbers of the run's steps
        first = min(run.lines[0].step, run.steps)
        self.unknown = [f"steps 0 to {first - 1} cannot be told: no line tells of them"] if first else []
        ends = [min(one.step, run.steps) for one in run.lines[1:]]
        for line, end in zip(run.lines, [*ends, run.steps], strict=True):
            if line.step < end:
                try:
                    self.parts.append((open_plan(line, moved, remote), range(line.state.step, end - line.shift)))
                except BucketlineError as error:
                    self.unknown.append(f"steps {line.step} to {end - 1} cannot be told: {error}")

    def find(self, sample_ids: Sequence[str]) -> list[tuple[list[Sighting], list[str]]]:
        """Return each sample's sightings by step, and the buckets that it is in, also of splits that the run does not read."""
        found: list[list[Sighting]] = [[] for _ in sample_ids]
        buckets: list[dict[str, None]] = [{} for _ in sample_ids]
        for part, steps in self.parts:
            rows: dict[str, dict[int, tuple[int, WeightedStore, SampleRecord]]] = {one.name: {} for one in part.plan.buckets}
            for at, name in enumerate(sample_ids):
                for share, ordinal, record in _records(part, sample_digest(name)):
                    buckets[at][record.bucket] = None
                    if record.bucket in rows:
                        numbers = part.rows.bucket(record.bucket).numbers_of(ordinal, record.row)
                        rows[record.bucket] |= dict.fromkeys(numbers, (at, share, record))
            wanted = {name: np.array(list(own), dtype=np.int64) for name, own in rows.items() if own}
            for name, values in _sightings(part, steps, wanted) if wanted else ():
                for row, how in zip(values[0].tolist(), _conditions(part, name, *values), strict=True):
                    at, share, record = rows[name][row]
                    found[at].append(_sighting(part, share, record, how))
        for one in found:
            one.sort(key=lambda sighting: (sighting.step, sighting.position))
        return list(zip(found, map(list, buckets), strict=True))

    def every_sample(self) -> Iterator[tuple[str, int, int, int]]:
        """Yield (id, count, first step, last step) of each sample in the splits that the run read; steps are -1 if never."""
        from bucketline.store.read.iter_samples import Selection, live_samples

        parts = [one for part, steps in self.parts for one in _counts(part, steps)]
        if not parts:
            return
        keys, counted = np.concatenate([keys for keys, _ in parts]), np.concatenate([own for _, own in parts], axis=1)
        digests, which = np.unique(keys, return_inverse=True)
        total = _nothing_seen(len(digests))
        _add(total, which, *counted)
        total[1, total[0] == 0] = -1
        is_listed = np.zeros(len(digests), dtype=bool)  # a sample may be in several generations
        views = {
            (share.store.manifest.store_id, share.store.manifest.generation, part.config.split): share.store
            for part, _ in self.parts
            for share in part.shares
        }
        for (_, _, split), store in sorted(views.items(), key=lambda view: -view[0][1]):
            for listed in live_samples(store, Selection(split=split)):
                at = np.searchsorted(digests, np.frombuffer(sample_digest(listed.record.id), dtype="S16")[0])
                if not is_listed[at]:
                    is_listed[at] = True
                    count, first, last = total[:, at].tolist()
                    yield listed.record.id, count, first, last


def _sightings(
    part: RecordedPlan, steps: range, wanted: Mapping[str, NDArray[np.int64] | None]
) -> Iterator[tuple[str, NDArray[np.int64]]]:
    """Yield (bucket, (row, step, epoch, position), `[4, V]`) of some rows of buckets, by the plan's steps; None: of all.

    Padding, with weight 0, is not counted.
    """
    chunk = max(1, min(_CHUNK_STEPS, _CHUNK_ROWS // max(bucket.global_batch for bucket in part.plan.buckets)))
    for at in range(steps.start, steps.stop, chunk):
        by_bucket: dict[str, list[PlannedStep]] = {}
        for one in part.plan.draw([(step, 0) for step in range(at, min(at + chunk, steps.stop))]):
            if one.bucket in wanted:
                by_bucket.setdefault(one.bucket, []).append(one)
        for name, drawn in by_bucket.items():
            rows, numbers = wanted[name], np.concatenate([one.rows for one in drawn])
            found = np.concatenate([one.weight for one in drawn]) > 0
            found &= np.isin(numbers, rows) if rows is not None else True
            which, position = np.divmod(np.flatnonzero(found), len(drawn[0].rows))
            step, epoch = np.array([(one.step, one.epoch) for one in drawn], dtype=np.int64).T[:, which]
            yield name, np.stack([numbers[found], step, epoch, position])


def _records(part: RecordedPlan, digest: bytes) -> Iterator[tuple[WeightedStore, int, SampleRecord]]:
    """Yield (store, ordinal of the shard among all, record) of a sample, for each store that has it."""
    end = 0
    for share in part.shares:
        begin, end = end, end + len(share.store.shards)
        for ordinal in reversed(range(begin, end)):
            if (entry := part.rows.shards[ordinal].find(digest)) is not None:
                yield share, ordinal, part.rows.shards[ordinal].record(entry)
                break


def _conditions(part: RecordedPlan, name: str, *values: NDArray[np.int64]) -> Iterator[tuple[Any, ...]]:
    """Yield (step, epoch, position, caption, crop, flipped) of sightings in a bucket, `[V]`, as the loader draws them."""
    # imports torch, which counting does not wait for
    from bucketline.loader.collate.columns import choose_captions, mirrored_left

    row, step, epoch, position = values
    bucket, keys = part.rows.bucket(name), keys_of_rows(part.config.seed, step, position)
    num_captions = (bucket.read(row, CAPTIONS) >= 0).sum(axis=1)
    caption = choose_captions(num_captions, keys, part.config.caption_dropout)
    flipped = uniform_on_host(keys, Purpose.FLIP) < part.config.flip
    crop, source = (bucket.read(row, column).astype(np.int64) for column in (CROP, ORIGINAL_SIZE))
    target = np.tile(np.array([bucket.height_px, bucket.width_px], dtype=np.int64), (len(row), 1))
    has_crop = flipped & (source[:, 0] > 0) & (crop[:, 0] >= 0)
    crop[has_crop, 1] = mirrored_left(crop[has_crop, 1], source[has_crop], target[has_crop])
    yield from zip(*(each.tolist() for each in (step, epoch, position, caption, crop, flipped)), strict=True)


def _sighting(part: RecordedPlan, share: WeightedStore, record: SampleRecord, how: tuple[Any, ...]) -> Sighting:
    step, epoch, position, caption, crop, flipped = how
    global_batch = next(one.global_batch for one in part.plan.buckets if one.name == record.bucket)
    rank, within = divmod(position, global_batch // part.line.state.world_size)
    has_text = caption >= 0 and bool(record.captions)  # a sample without captions has the empty one stored as its own
    return Sighting(
        step=step + part.line.shift,
        epoch=epoch,
        rank=rank,
        micro_step=within // (global_batch // part.line.state.world_size // part.config.accumulation),
        position=position,
        store=str(share.store.place),
        generation=share.store.manifest.generation,
        bucket=record.bucket,
        caption=caption if has_text else None,
        text=record.captions[caption] if has_text else None,
        crop=(crop[0], crop[1]),
        flipped=flipped,
    )


def _counts(part: RecordedPlan, steps: range) -> Iterator[tuple[NDArray[np.bytes_], NDArray[np.int64]]]:
    """Yield (digests `[N]`, (count, first step, last step) `[3, N]`) of each shard and bucket, by the run's steps."""
    from bucketline.store.read.iter_samples import live_positions

    buckets = [part.rows.bucket(planned.name) for planned in part.plan.buckets]
    counted = {one.name: _nothing_seen(one.num_rows) for one in buckets}
    for name, (row, step, *_) in _sightings(part, steps, dict.fromkeys(counted)):
        _add(counted[name], row, 1, step + part.line.shift, step + part.line.shift)
    for bucket in buckets:
        for ordinal, shard in enumerate(part.rows.shards):
            if bucket.name in shard.entry.groups:
                positions = live_positions(shard, bucket.name).astype(np.int64)
                keys = np.ascontiguousarray(shard.index.take("digest", positions)).view("S16").reshape(-1)
                for at in bucket.first_rows(ordinal):
                    yield keys, counted[bucket.name][:, at : at + len(keys)]


def _nothing_seen(num: int) -> NDArray[np.int64]:
    return np.repeat(np.array([[0], [np.iinfo(np.int64).max], [-1]], dtype=np.int64), num, axis=1)


def _add(total: NDArray[np.int64], which: NDArray[np.int64], *counted: NDArray[np.int64] | int) -> None:
    """Add counts, first and last steps to those `which`, `[3, N]`."""
    for ufunc, own, values in zip((np.add, np.minimum, np.maximum), total, counted, strict=True):
        ufunc.at(own, which, values)
