"""The samples that a run has seen, at which steps and how: its plans, recorded in `plans.jsonl`, are computed again.

The samples are not logged. A run's `plans.jsonl` says by which plans its steps were made; for each, the generation's rows are
found by id, and looked for in what the steps read. Draws are keyed by step and position, so captions and flips follow.

Letters: V sightings, N samples.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from bucketline.errors import BucketlineError, StateError, UsageError
from bucketline.files.atomic_write import write_durably
from bucketline.files.paths import CHECKPOINTS
from bucketline.loader.config import LoaderConfig
from bucketline.loader.iteration import LoaderState, parse_state, state_as_json
from bucketline.loader.mixture import WeightedStore, join, parse_stores
from bucketline.loader.plan.order import Purpose, keys_of_rows, uniform_on_host
from bucketline.loader.plan.plan import make_plan
from bucketline.store.format.block import CAPTIONS, CROP, ORIGINAL_SIZE, sample_digest
from bucketline.store.read.store import Store

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from bucketline.loader.loader import Loader
    from bucketline.loader.mixture import Mixture
    from bucketline.loader.plan.plan import Plan, PlannedStep
    from bucketline.store.format.schema import SampleRecord
    from bucketline.store.remote.urls import RemoteOptions


# ---------------------------------------------------------------------------------------------------------------- recorded run
# The record that a run leaves of its order: a line of `plans.jsonl` for each plan that it had; and their plans, made again.
#
# A plan tells what a step read, so a line needs only the loader's state where the plan begins, and the run's step there:
#
#     {"step": 0, "loader": {…}}
#     {"step": 1200, "loader": {…}}       on other ranks, by another generation of a store, or by a new plan

PLANS = "plans.jsonl"
_CHECKPOINT = re.compile(r"step-([0-9]+)")  # one that is not complete has a suffix


class PlanLine(NamedTuple):
    """A line of `plans.jsonl`: the steps of a run from one on, up to the next line's."""

    step: int  # of the run
    state: LoaderState  # at that step

    @property
    def shift(self) -> int:
        """Return what a step of the run has more than the plan's own number."""
        return self.step - self.state.step

    def is_planned_as(self, other: PlanLine) -> bool:
        """Return True if both have the same plan, on the same ranks."""
        mine, theirs = (replace(line.state, step=0, micro_step=0, epoch=0) for line in (self, other))
        return mine == theirs


def append_plan(path: Path, loader: Loader, step: int | None = None) -> None:
    """Record in `plans.jsonl` which plan a run's steps have from `step` on, unless they have it before that as well.

    Call it where a run begins or resumes, and where its loader's plan changes; lines of later steps are replaced.
    `step`: the run's number of the next step, if it is not the loader's own.
    """
    state = parse_state(loader.state_dict())
    new = PlanLine(state.step if step is None else step, state)
    lines = read_plans(path) if path.exists() else []
    kept = [line for line in lines if line.step < new.step]
    if not kept or not (kept[-1].is_planned_as(new) and kept[-1].shift == new.shift):
        kept.append(new)
    if kept != lines:
        text = "".join(json.dumps({"step": line.step, "loader": state_as_json(line.state)}) + "\n" for line in kept)
        write_durably(path, text.encode())


def read_plans(path: Path) -> list[PlanLine]:
    """Return the lines of a `plans.jsonl`; a StateError names the line that is damaged, and what to do."""
    lines = []
    for number, text in enumerate(path.read_bytes().splitlines(), 1):
        try:
            line = json.loads(text)
            lines.append(PlanLine(int(line["step"]), parse_state(line["loader"])))
        except (ValueError, LookupError, TypeError, RecursionError, StateError) as error:
            raise StateError(
                f"{path}, line {number}, is not the line of a plan: {error!s:.300}; restore it, or remove the file, and "
                "`loader seen` knows of the steps from the next resume on"
            ) from error
    return lines


class RecordedRun(NamedTuple):
    """The plans of a run."""

    lines: Sequence[PlanLine]  # at least one
    steps: int  # done at the checkpoint that is asked about

    def line_of(self, step: int) -> PlanLine:
        """Return the line of a step; of one that is still to come, the last one."""
        lines = [line for line in self.lines if line.step <= step]
        if not lines:
            raise StateError(f"nothing is recorded of step {step}; the plans begin at step {self.lines[0].step}")
        return lines[-1]

    def given(self, stores: Sequence[str], remote: RemoteOptions | None = None) -> dict[str, Path | str]:
        """Return the places of stores that have moved, by store id."""
        named = [argument.path for argument in parse_stores(stores)]
        moved = {Store.open(path, remote=remote).manifest.store_id: path for path in named}
        recorded = {store.store_id: store.path for line in self.lines for store in line.state.stores}
        if others := sorted(moved.keys() - recorded.keys()):
            read = ", ".join(f"{store_id} ({path})" for store_id, path in recorded.items())
            raise UsageError(f"{moved[others[0]]} is the store {others[0]}, and the run read {read}; name stores of the run")
        return moved


def read_run(path: Path, option: str = "the run") -> RecordedRun:
    """Return the plans of a run: up to its newest checkpoint, to the checkpoint that is given, or to a loader's state as JSON.

    A state without a `plans.jsonl` next to it has one plan.
    """
    try:
        return _run_of_folder(path) if path.is_dir() else _run_of_state(path)
    except StateError as error:
        raise StateError(f"{option} {path}: {error}") from error
    except (OSError, ValueError, RecursionError) as error:
        reason = (
            f"{error.filename} cannot be read: {error.strerror}" if isinstance(error, OSError) else f"not JSON: {error!s:.200}"
        )
        raise StateError(
            f"{option} {path}: {reason}; give a run's folder, a checkpoint in it, or a loader's state as JSON"
        ) from error


def _run_of_folder(folder: Path) -> RecordedRun:
    checkpoint = _CHECKPOINT.fullmatch(folder.resolve().name)
    run = folder.resolve().parents[1] if checkpoint else folder
    names = [checkpoint] if checkpoint else [_CHECKPOINT.fullmatch(path.name) for path in run.glob(f"{CHECKPOINTS}/*")]
    lines = read_plans(run / PLANS)
    if not lines:
        raise StateError(f"{run / PLANS} has no line")
    return RecordedRun(lines, max((int(name[1]) for name in names if name), default=0))


def _run_of_state(file: Path) -> RecordedRun:
    state, plans = parse_state(json.loads(file.read_bytes())), file.with_name(PLANS)
    sought = PlanLine(0, replace(state, step=0, micro_step=0))
    lines = (read_plans(plans) if plans.exists() else []) or [sought]
    # a state may be older than the last lines, whose plans may number steps otherwise
    planned = [line for line in lines if line.is_planned_as(sought) and line.state.step <= state.step]
    if not planned:
        raise StateError(f"no line of {plans} is of the plan that the state at step {state.step} has; name the run's own state")
    return RecordedRun(lines, planned[-1].shift + state.step)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedPlan:
    """A plan that was made again, with the stores at the generations that it is of."""

    line: PlanLine
    stores: tuple[WeightedStore, ...]
    rows: Store | Mixture
    config: LoaderConfig
    plan: Plan


def open_plan(line: PlanLine, moved: Mapping[str, Path | str], remote: RemoteOptions | None = None) -> RecordedPlan:
    """Open the stores of a plan at its generations, and make it again. `moved`: the places of stores, by store id."""
    state, stores = line.state, []
    for stored in state.stores:
        path = moved.get(stored.store_id, stored.path)
        store = Store.open(path, stored.generation, remote=remote)
        if store.manifest.store_id != stored.store_id:
            raise StateError(
                f"{path} is the store {store.manifest.store_id}, and the run read {stored.store_id}; name where that is now"
            )
        stores.append(WeightedStore(store=store, repeats=stored.repeats))
    config = LoaderConfig(**state.batch, **state.settings, accumulation=state.accumulation, epochs=state.epochs)  # type: ignore[arg-type]
    rows = join(stores)
    plan = make_plan(rows, config, world_size=state.world_size)
    if plan.digest != state.plan:
        raise StateError(f"the plan of these stores has the digest {plan.digest}, the recorded one {state.plan}")
    return RecordedPlan(line=line, stores=tuple(stores), rows=rows, config=config, plan=plan)


# ------------------------------------------------------------------------------------------------------------------------ seen

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
        ends = [min(following.step, run.steps) for following in run.lines[1:]]
        for line, end in zip(run.lines, [*ends, run.steps], strict=True):
            if line.step < end:
                try:
                    self.parts.append((open_plan(line, moved, remote), range(line.state.step, end - line.shift)))
                except BucketlineError as error:
                    self.unknown.append(f"steps {line.step} to {end - 1} cannot be told: {error}")

    def find(self, sample_ids: Sequence[str]) -> list[tuple[list[Sighting], list[str]]]:
        """Return each sample's sightings by step, and the buckets that it is in, also of splits that the run does not read."""
        sightings: list[list[Sighting]] = [[] for _ in sample_ids]
        buckets: list[dict[str, None]] = [{} for _ in sample_ids]
        for part, steps in self.parts:
            rows: dict[str, dict[int, tuple[int, WeightedStore, SampleRecord]]] = {b.name: {} for b in part.plan.buckets}
            for at, name in enumerate(sample_ids):
                for weighted, ordinal, record in _records(part, sample_digest(name)):
                    buckets[at][record.bucket] = None
                    if record.bucket in rows:
                        numbers = part.rows.bucket(record.bucket).numbers_of(ordinal, record.row)
                        rows[record.bucket] |= dict.fromkeys(numbers, (at, weighted, record))
            sought = {name: np.array(list(numbers), dtype=np.int64) for name, numbers in rows.items() if numbers}
            for name, values in _sightings(part, steps, sought) if sought else ():
                for row, condition in zip(values[0].tolist(), _conditions(part, name, *values), strict=True):
                    at, weighted, record = rows[name][row]
                    sightings[at].append(_sighting(part, weighted, record, condition))
        for of_sample in sightings:
            of_sample.sort(key=lambda sighting: (sighting.step, sighting.position))
        return list(zip(sightings, map(list, buckets), strict=True))

    def every_sample(self) -> Iterator[tuple[str, int, int, int]]:
        """Yield (id, count, first step, last step) of each sample in the splits that the run read; steps are -1 if never."""
        from bucketline.store.read.samples import Selection, live_samples

        parts = [pair for part, steps in self.parts for pair in _counts(part, steps)]
        if not parts:
            return
        keys, counted = np.concatenate([keys for keys, _ in parts]), np.concatenate([counts for _, counts in parts], axis=1)
        digests, which = np.unique(keys, return_inverse=True)
        total = _nothing_seen(len(digests))
        _add(total, which, *counted)
        total[1, total[0] == 0] = -1
        is_listed = np.zeros(len(digests), dtype=bool)  # a sample may be in several generations
        views = {
            (weighted.store.manifest.store_id, weighted.store.manifest.generation, part.config.split): weighted.store
            for part, _ in self.parts
            for weighted in part.stores
        }
        for (_, _, split), store in sorted(views.items(), key=lambda view: -view[0][1]):
            for listed in live_samples(store, Selection(split=split)):
                at = np.searchsorted(digests, np.frombuffer(sample_digest(listed.record.id), dtype="S16")[0])
                if not is_listed[at]:
                    is_listed[at] = True
                    count, first, last = total[:, at].tolist()
                    yield listed.record.id, count, first, last


def _sightings(
    part: RecordedPlan, steps: range, sought: Mapping[str, NDArray[np.int64] | None]
) -> Iterator[tuple[str, NDArray[np.int64]]]:
    """Yield (bucket, (row, step, epoch, position), `[4, V]`) of some rows of buckets, by the plan's steps; None: of all.

    Padding, with weight 0, is not counted.
    """
    chunk = max(1, min(_CHUNK_STEPS, _CHUNK_ROWS // max(bucket.global_batch for bucket in part.plan.buckets)))
    for at in range(steps.start, steps.stop, chunk):
        by_bucket: dict[str, list[PlannedStep]] = {}
        for planned in part.plan.draw([(step, 0) for step in range(at, min(at + chunk, steps.stop))]):
            if planned.bucket in sought:
                by_bucket.setdefault(planned.bucket, []).append(planned)
        for name, drawn in by_bucket.items():
            rows, numbers = sought[name], np.concatenate([planned.rows for planned in drawn])
            is_sighting = np.concatenate([planned.weight for planned in drawn]) > 0
            is_sighting &= np.isin(numbers, rows) if rows is not None else True
            which, position = np.divmod(np.flatnonzero(is_sighting), len(drawn[0].rows))
            step, epoch = np.array([(planned.step, planned.epoch) for planned in drawn], dtype=np.int64).T[:, which]
            yield name, np.stack([numbers[is_sighting], step, epoch, position])


def _records(part: RecordedPlan, digest: bytes) -> Iterator[tuple[WeightedStore, int, SampleRecord]]:
    """Yield (store, ordinal of the shard among all, record) of a sample, for each store that has it."""
    end = 0
    for weighted in part.stores:
        begin, end = end, end + len(weighted.store.shards)
        for ordinal in reversed(range(begin, end)):
            if (entry := part.rows.shards[ordinal].find(digest)) is not None:
                yield weighted, ordinal, part.rows.shards[ordinal].record(entry)
                break


def _conditions(part: RecordedPlan, name: str, *values: NDArray[np.int64]) -> Iterator[tuple[Any, ...]]:
    """Yield (step, epoch, position, caption, crop, flipped) of sightings in a bucket, `[V]`, as the loader draws them."""
    # imports torch, which counting does not wait for
    from bucketline.loader.collate.buffers import choose_captions, mirrored_left

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


def _sighting(part: RecordedPlan, weighted: WeightedStore, record: SampleRecord, condition: tuple[Any, ...]) -> Sighting:
    step, epoch, position, caption, crop, flipped = condition
    global_batch = next(bucket.global_batch for bucket in part.plan.buckets if bucket.name == record.bucket)
    rank, within = divmod(position, global_batch // part.line.state.world_size)
    has_text = caption >= 0 and bool(record.captions)  # a sample without captions has the empty one stored as its own
    return Sighting(
        step=step + part.line.shift,
        epoch=epoch,
        rank=rank,
        micro_step=within // (global_batch // part.line.state.world_size // part.config.accumulation),
        position=position,
        store=str(weighted.store.place),
        generation=weighted.store.manifest.generation,
        bucket=record.bucket,
        caption=caption if has_text else None,
        text=record.captions[caption] if has_text else None,
        crop=(crop[0], crop[1]),
        flipped=flipped,
    )


def _counts(part: RecordedPlan, steps: range) -> Iterator[tuple[NDArray[np.bytes_], NDArray[np.int64]]]:
    """Yield (digests `[N]`, (count, first step, last step) `[3, N]`) of each shard and bucket, by the run's steps."""
    from bucketline.store.read.samples import live_positions

    buckets = [part.rows.bucket(planned.name) for planned in part.plan.buckets]
    counted = {bucket.name: _nothing_seen(bucket.num_rows) for bucket in buckets}
    for name, (row, step, *_) in _sightings(part, steps, dict.fromkeys(counted)):
        _add(counted[name], row, 1, step + part.line.shift, step + part.line.shift)
    for bucket in buckets:
        for ordinal, shard in enumerate(part.rows.shards):
            if bucket.name in shard.entry.groups:
                positions = live_positions(shard, bucket.name).astype(np.int64)
                keys = shard.keys()[positions]
                for at in bucket.first_rows(ordinal):
                    yield keys, counted[bucket.name][:, at : at + len(keys)]


def _nothing_seen(num: int) -> NDArray[np.int64]:
    return np.repeat(np.array([[0], [np.iinfo(np.int64).max], [-1]], dtype=np.int64), num, axis=1)


def _add(total: NDArray[np.int64], which: NDArray[np.int64], *counted: NDArray[np.int64] | int) -> None:
    """Add counts, first and last steps to those `which`, `[3, N]`."""
    for ufunc, sums, values in zip((np.add, np.minimum, np.maximum), total, counted, strict=True):
        ufunc.at(sums, which, values)
