"""The plan: a pure function from (seed, step) to (bucket, rows). No part of it grows with the number of rows.

A bucket's rows are read in passes, each with its own keyed bijection. With `carry`, the passes form one endless stream, and
the bucket's global batch j takes the positions [jG, (j + 1)G): the rest of a pass starts the next batch. Epoch e has the
batches floor(e n / G) to floor((e + 1) n / G) of that bucket. If there is a last epoch, it ends with the bucket's next batch,
in which the positions of later epochs are padding: they have weight 0, and rows of the batch before.

`window` decides the rows at a pass's positions (`lanes` has those of a window of some rows) and the bucket of a step
(`epoch_steps`).

Letters: n rows of a bucket, G its global batch (ranks x batch size x accumulation), e epoch, j index of a bucket's batch.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from bucketline.command_line import counted, human_bytes, machines_of
from bucketline.errors import PlanError, UsageError
from bucketline.forks import cached_property
from bucketline.loader.config import LEAST_WINDOW, MOST_WINDOW_BYTES, SHARDS_AT_ONCE, USUAL_WINDOW, Remainder
from bucketline.loader.mixture import Mixture
from bucketline.loader.plan.epoch_steps import EpochSteps, Lanes, ShardRuns, Span
from bucketline.loader.plan.order import extend_key, key_of, permute, permute_all
from bucketline.option_value import expect
from bucketline.store.format.block import LINE_BYTES
from bucketline.store.format.text import is_bucket
from bucketline.store.read.store import Store
from bucketline.store.remote.cache.folder import USUAL_RING_BYTES, ring_share
from bucketline.store.shard.mapped import distinct

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from bucketline.loader.config import LoaderConfig
    from bucketline.loader.plan.epoch_steps import Epoch
    from bucketline.store.read.store import StoreRows
    from bucketline.store.remote.cache.remote_source import RemoteSource


PLAN_VERSION = 1
MAX_NAMED = 8  # buckets listed in a message
_NAMED_SMALL = 3  # buckets listed in a warning
_OF_SMALL = {
    Remainder.CARRY: "images repeat within them",
    Remainder.PARTIAL: "rows of weight 0 fill them",
    Remainder.DROP: "these images are never read",
}
_PASS, _STEPS = 1, 2  # purposes of keys
_ROUND = 3  # of those derived from a bucket's key


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanBucket:
    """A bucket as the plan sees it."""

    name: str
    num_rows: int  # that a pass reads
    global_batch: int
    parts: tuple[StoreRows, ...] = ()  # if a pass reads a fraction of some store's rows: the stores' own, in order

    def __post_init__(self) -> None:
        if self.num_rows < 1 or self.global_batch < 1:
            raise PlanError(
                f"{self.name} has {self.num_rows} rows and a global batch of {self.global_batch}; both must be 1 or more"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStep:
    """The rows that one optimizer step reads: over all ranks and micro-batches, or one equal part of them."""

    step: int
    epoch: int
    bucket: str
    first_position: int  # in the global batch, of the first row
    rows: NDArray[np.int64]  # [B] row numbers of the bucket, by position
    weight: NDArray[np.float32]  # [B] 1, or 0 for padding


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The order of buckets and rows, for any number of steps."""

    seed: int
    remainder: Remainder
    buckets: tuple[PlanBucket, ...]
    source: str  # each store's id, the digest of its generation, and its repeats
    window: int | None = None  # rows that each lane mixes at a time; None: all are shuffled; 0: the stored order
    lanes: int = 1  # used only by a window, as `runs`
    epochs: int | None = None  # the last one completes its batches with weight 0; None: endless. Decides no other step
    runs: tuple[ShardRuns, ...] = field(default=(), repr=False, compare=False)  # of each bucket

    def __post_init__(self) -> None:
        if not self.buckets:
            raise PlanError("the plan has no rows; the store has none in this split")
        if self.window:
            self._check_lanes()

    def _check_lanes(self) -> None:
        if [int(runs.num_rows.sum()) for runs in self.runs] != [bucket.num_rows for bucket in self.buckets]:
            raise PlanError("the rows of the shards are not those of the buckets")
        for bucket in self.buckets:
            if bucket.global_batch % self.lanes:
                fits = math.gcd(self.lanes, *(bucket.global_batch for bucket in self.buckets))
                raise PlanError(
                    f"{bucket.name} has a global batch of {bucket.global_batch}, which {self.lanes} lanes do not "
                    f"divide; make batch size x accumulation x ranks a multiple of {self.lanes} for every bucket (for a "
                    f"batch by pixels or tokens, by its batch multiple), or use {counted(fits, 'lane')}"
                )

    @cached_property
    def lane_order(self) -> Lanes:
        """Return the order of a window: which lane reads which rows, and when."""
        return Lanes(
            seed=self.seed,
            lanes=self.lanes,
            window_rows=self.window or 0,
            carries=self.remainder is Remainder.CARRY,
            sizes=[(bucket.num_rows, bucket.global_batch) for bucket in self.buckets],
            runs=self.runs,
        )

    def _rows_of(self, spans: Sequence[Span]) -> NDArray[np.int64]:
        """Return the rows at the spans' positions, one span after the other. Each position of a pass has a different row.

        If all are shuffled, by a keyed bijection on all of the bucket's rows; in stored order, position p has row p.
        """
        if self.window:
            numbers = self.lane_order.rows_of(spans)
        else:
            every = [(np.arange(span.first, span.first + span.count, dtype=np.int64), span.n, span.key) for span in spans]
            numbers = permute_all(every) if self.window is None else np.concatenate([index for index, _, _ in every])
        if any(self._pass_rows):
            at = 0
            for span in spans:
                if (pass_rows := self._pass_rows[span.bucket]) is not None:
                    numbers[at : at + span.count] = pass_rows.rows(numbers[at : at + span.count], span.number)
                at += span.count
        return numbers

    @cached_property
    def _pass_rows(self) -> list[PassRows | None]:
        """Return the rows of each bucket's passes; None if a pass reads all of them."""
        return [
            PassRows(bucket.parts, key, is_mixed=self.window is None) if bucket.parts else None
            for bucket, key in zip(self.buckets, self._pass_keys, strict=True)
        ]

    @cached_property
    def digest(self) -> str:
        """Digest of everything that decides the order, and of the stores' generations. 32 hexadecimal digits."""
        buckets = [[bucket.name, bucket.num_rows, bucket.global_batch] for bucket in self.buckets]
        lanes = [self.lanes, SHARDS_AT_ONCE] if self.window else []
        text = json.dumps([PLAN_VERSION, self.seed, self.remainder, self.window, self.source, buckets, *lanes])
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    @cached_property
    def epoch_steps(self) -> EpochSteps:
        """Return the number of steps in each epoch."""
        sizes = tuple((bucket.num_rows, bucket.global_batch) for bucket in self.buckets)
        return EpochSteps(sizes=sizes, remainder=self.remainder, epochs=self.epochs)

    @property
    def num_steps(self) -> int | None:
        """Return the number of steps in all epochs; None if they are endless."""
        return self.epoch_steps.num_steps

    def batches_before(self, bucket: PlanBucket, epoch: int) -> int:
        """Return the number of a bucket's batches in the epochs before `epoch`, without the padded one of the last."""
        return self.epoch_steps.batches_before(epoch)[self.buckets.index(bucket)]

    def steps_before(self, epoch: int) -> int:
        """Return the number of steps in the epochs before `epoch`, without the padded ones of the last."""
        return self.epoch_steps.steps_before(epoch)

    @property
    def has_steps(self) -> bool:
        """Return True if epochs have steps. With `drop`, they have none if every bucket is smaller than its global batch."""
        return self.epoch_steps.has_steps

    def at(self, step: int) -> PlannedStep:
        """Return the rows that a step reads, over all ranks."""
        return self.draw([(step, 0)])[0]

    def draw(self, parts: Sequence[tuple[int, int]], num_parts: int = 1) -> list[PlannedStep]:
        """Return the rows of micro-batches, each given as (step, part) of a global batch divided into `num_parts`.

        With R ranks and A micro-batches per step, rank r's micro-batch a is part r A + a of R A. Many micro-batches of
        consecutive steps cost hardly more than one. Each bucket's global batch must be divisible by `num_parts`.
        """
        placed = self._place([step for step, _ in parts])
        spans: list[Span] = []
        shapes = []
        for step, part in parts:
            _, bucket, number = placed[step]
            count = self.buckets[bucket].global_batch // num_parts
            shapes.append((part * count, count, self._add_spans(spans, bucket, number, part * count, count)))
        rows, at, drawn = self._rows_of(spans), 0, []
        weights = np.ones(len(rows), dtype=np.float32)
        for (step, _), (first, count, real) in zip(parts, shapes, strict=True):
            epoch, bucket, _ = placed[step]
            weight = weights[at : at + count]
            if real < count:
                weight[max(real, 0) :] = 0.0
            drawn.append(
                PlannedStep(
                    step=step,
                    epoch=epoch,
                    bucket=self.buckets[bucket].name,
                    first_position=first,
                    rows=rows[at : at + count],
                    weight=weight,
                )
            )
            at += count
        return drawn

    def _place(self, steps: Sequence[int]) -> dict[int, tuple[int, int, int]]:
        """Return for each step its epoch, the index of its bucket, and the index of the bucket's batch."""
        if not self.has_steps:
            raise PlanError(self.without_step())
        by_epoch: dict[int, tuple[Epoch, list[int]]] = {}
        epoch, own = None, list[int]()
        for step in dict.fromkeys(steps):
            if epoch is None or not epoch.first <= step < epoch.end:
                epoch = self.epoch_steps.at(step)
                own = by_epoch.setdefault(epoch.number, (epoch, []))[1]
            own.append(step)
        return {
            step: (epoch.number, bucket, number)
            for epoch, own in by_epoch.values()
            for step, (bucket, number) in zip(
                own, epoch.batches_at(own, self.window, key_of(self.seed, _STEPS, epoch.number)), strict=True
            )
        }

    def _add_spans(self, spans: list[Span], bucket: int, number: int, begin: int, count: int) -> int:
        """Append the spans of `count` positions, from `begin`, of a bucket's batch `number`; return how many have weight 1."""
        n, size = self.buckets[bucket].num_rows, self.buckets[bucket].global_batch
        carries, padding = self.remainder is Remainder.CARRY, 0
        if carries:  # n and number can be large; Python's integers keep the product exact
            number_of_pass, at = divmod(number * size + begin, n)
            real = count if self.epochs is None else min(count, self.epochs * n - number * size - begin)
            if real < count and n >= size and self.epochs is not None:
                # padded with rows of the batch before, which has been read, and on the same lanes
                read = max(real, 0)
                before = number * size + begin + read - size - (self.epochs - 1) * n
                if read:
                    self._add_spans(spans, bucket, number, begin, read)
                spans.append(self.span(bucket, self.epochs - 1, before, count - read))
                return real
        else:
            number_of_pass, within = divmod(number, self.epoch_steps.per_pass[bucket])
            at = within * size + begin
            real = max(0, n - at)
            # a partial batch is padded with rows of its own pass; of windows, with those that the same lanes began with
            if self.window and n >= size:
                padding = n % size
            at = padding + (at - n) % n if at >= n else at
        while count > 0:
            num_rows = min(count, n - at)
            spans.append(self.span(bucket, number_of_pass, at, num_rows))
            count, at = count - num_rows, padding
            number_of_pass += carries
        return real

    def span(self, bucket: int, number: int, first: int, count: int) -> Span:
        """Return consecutive positions in a pass of a bucket, which is given by its index."""
        key = extend_key(self._pass_keys[bucket], number)
        return Span(self.buckets[bucket].num_rows, key, first, count, bucket, number)

    @cached_property
    def _pass_keys(self) -> list[int]:
        names = (hashlib.blake2b(bucket.name.encode(), digest_size=8).digest() for bucket in self.buckets)
        return [key_of(self.seed, _PASS, int.from_bytes(name, "little")) for name in names]

    def batch(self, bucket: PlanBucket, number: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Return the rows and weights of a bucket's global batch `number`."""
        spans: list[Span] = []
        real = self._add_spans(spans, self.buckets.index(bucket), number, 0, bucket.global_batch)
        weight = (np.arange(bucket.global_batch) < real).astype(np.float32)
        return self._rows_of(spans), weight

    def small_buckets(self, *, can_drop: bool = True) -> str | None:
        """Return one line that names the buckets too small for their global batch, and the remedy; None if there is none.

        With `drop`, a bucket is too small if it has fewer rows than a batch: it is never read. Otherwise, if it has at most
        half as many: each row comes at least twice in a batch (`carry`), or at least half of the batch is padding (`partial`).
        `can_drop`: the caller has an option --split.
        """
        drops = self.remainder is Remainder.DROP
        small = [b for b in self.buckets if (b.num_rows < b.global_batch if drops else 2 * b.num_rows <= b.global_batch)]
        if not small:
            return None
        small.sort(key=lambda bucket: bucket.num_rows / bucket.global_batch)
        named = [f"{bucket.name} has {counted(bucket.num_rows, 'image')}" for bucket in small[:_NAMED_SMALL]]
        if len(small) > _NAMED_SMALL:
            named.append(counted(len(small) - _NAMED_SMALL, "more such bucket"))
        why = f"batches take {_sizes(small)}, so {_OF_SMALL[self.remainder]}"
        remedy = ", or leave such buckets out with --split train:drop" if can_drop and not drops else ""
        return f"{', '.join(named)}, and {why}; use a smaller batch or fewer GPUs, or pack with a coarser --grid{remedy}"

    def without_step(self) -> str:
        """Return a message that says why there is no step, with the numbers."""
        named = [f"{bucket.name} has {counted(bucket.num_rows, 'row')}" for bucket in self.buckets[:MAX_NAMED]]
        if len(self.buckets) > MAX_NAMED:
            named.append(f"and {counted(len(self.buckets) - MAX_NAMED, 'more bucket')}")
        is_carried = self.remainder is Remainder.CARRY  # to later epochs
        others = "more epochs" if is_carried else "a remainder of carry or partial"
        return (
            f"the plan has no step: {', '.join(named)}, and a global batch takes {_sizes(self.buckets)}; use a smaller "
            f"batch, fewer GPUs, or {others}"
        )


def _sizes(buckets: Sequence[PlanBucket]) -> str:
    sizes = sorted({bucket.global_batch for bucket in buckets})
    return f"{sizes[0]}" if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}, by bucket"


class PassRows:
    """The rows of a bucket's passes, if a pass reads a fraction of some store's.

    A pass of a bucket has `per_pass` places for such a store. The places of all passes, one after the other, go through all of
    the store's rows again and again, each time in another order: so every row comes once before any comes twice. A row's place
    is a pure function of the seed and the number of the round.
    """

    def __init__(self, parts: Sequence[StoreRows], key: int, *, is_mixed: bool) -> None:
        """`key` is the bucket's. `is_mixed`: rounds are; otherwise neighbouring rows stay together."""
        self._parts, self._key, self._is_mixed = tuple(parts), key, is_mixed
        self._ends = np.cumsum([part.per_pass for part in parts])

    def rows(self, numbers: NDArray[np.int64], pass_number: int) -> NDArray[np.int64]:
        """Return the bucket's row for each of the numbers 0 to N - 1 that the order deals with; N rows come in a pass."""
        part_of = np.searchsorted(self._ends, numbers, side="right")
        rows = np.empty_like(numbers)
        for at, part in enumerate(self._parts):
            of_part = np.flatnonzero(part_of == at)
            if not len(of_part):
                continue
            within = numbers[of_part] - (int(self._ends[at]) - part.per_pass)
            before, begin = divmod(pass_number * part.per_pass, part.num_rows)  # Python's integers: passes may be many
            rounds, places = np.divmod(within + begin, part.num_rows)
            for number in distinct(rounds).tolist() if self._is_mixed else ():
                of_round, key = rounds == number, extend_key(extend_key(extend_key(self._key, _ROUND), at), before + number)
                places[of_round] = permute(places[of_round], part.num_rows, key)
            rows[of_part] = part.first + places
        return rows


# ----------------------------------------------------------------------------------------------------------------- cache needs
# The needs of an order from a machine's cache: room for the lines that it reads at a time, next to those that the cache keeps.
#
# A window is read as a part of each shard of a group, and its rows are mixed. So all lines of these parts are needed from the
# window's first step to its last, while those of the next window arrive. They pass through the cache's ring, which must hold
# both: a line that it could not keep is fetched again, many times if the ring is too small, because the least recently used
# goes first.
#
# All is computed from the manifest and options that every rank has, so a window that is chosen by the size of the cache is the
# same on every machine.

RING_OF_USE = 2.0  # bytes of a ring by those of the lines in use at a time: others arrive meanwhile
LEAST_RING = 1.1  # likewise: with less the order is refused, since lines would be fetched again at nearly each use
_AT_ONCE = 2  # windows or batches
LINES_OF_RUN = 2.0  # of a run of rows beyond its bytes: it begins and ends within one, and captions follow their rows
KEPT_BY_RING = 1 / 32  # of a cache that does not hold its stores; a window that is chosen by the cache needs no more
_AT_CUTS = 8  # lines of a machine that others read too
_SMALLER = 0.75  # of a window that needs too much


class CacheNeeds:
    """The needs of each of some machines from its cache, to read a store by a plan."""

    def __init__(self, store: Store | Mixture, plan: Plan, machines: int) -> None:
        self._store, self._plan, self._machines = store, plan, machines
        self.num_bytes = sum(file.entry.lmdb.num_bytes for file in store.files)  # of shards and added columns
        self.kept_bytes = sum(file.entry.meta.num_bytes for file in store.files)  # next to the shards; held whole
        self.whole_bytes = self.num_bytes + self.kept_bytes
        self._lanes = -(-plan.lanes // machines)  # of a machine
        of_machine = self.num_bytes * self._lanes // plan.lanes + _AT_CUTS * LINE_BYTES if plan.window else self.num_bytes
        self.share_bytes = min(self.num_bytes, of_machine) + self.kept_bytes  # that one machine reads, shared lines included
        self._row_bytes = self.num_bytes / max(1, sum(shard.entry.live_samples for shard in store.shards))
        names = {bucket.name for bucket in plan.buckets}
        groups_read = [sum(name in names or not is_bucket(name) for name in shard.entry.groups) for shard in store.shards]
        self._regions = (sum(groups_read) + sum(len(shard.entry.added) for shard in store.shards)) / len(store.shards)
        self.most_window = max(LEAST_WINDOW, int(MOST_WINDOW_BYTES / max(1.0, self._row_bytes)))  # by its bytes

    def in_use(self, window: int | None) -> int:
        """Return the bytes of the lines that a machine has in use at a time: those of two windows of each lane, or two batches.

        Of a window, in each shard of a group a run of rows of each bucket, and of what belongs to rows, which begins and ends
        within a line. A batch of a bucket may take more rows than a window has of it. In stored order, one such run of a batch;
        if all rows are shuffled, a line or two of each row.
        """
        plan, rows = self._plan, sum(bucket.num_rows for bucket in self._plan.buckets)
        if not window:
            batch = -(-max(bucket.global_batch for bucket in plan.buckets) // self._machines)
            lines = (1 if window == 0 else batch) * LINES_OF_RUN + batch * self._row_bytes / LINE_BYTES
            return min(_AT_ONCE * math.ceil(lines) * LINE_BYTES, self.num_bytes)
        shards = max(1, plan.lane_order.num_units // plan.lanes)
        num_groups = max(1, min(shards // SHARDS_AT_ONCE, rows // plan.lanes // window))
        of_window = sum(max(window * bucket.num_rows / rows, bucket.global_batch / plan.lanes) for bucket in plan.buckets)
        # rows of a bucket of at most a batch are anywhere
        rare = max((b.global_batch for b in plan.buckets if b.num_rows <= b.global_batch), default=0) / plan.lanes
        lines = shards / num_groups * self._regions + LINES_OF_RUN * rare
        return int(self._lanes * (_AT_ONCE * of_window * self._row_bytes + lines * LINE_BYTES))

    @property
    def ring_bytes(self) -> int:
        """The bytes of a ring with which no line is fetched again while it is in use."""
        ring = RING_OF_USE if self._plan.window else LEAST_RING
        return min(int(ring * self.in_use(self._plan.window)), self.share_bytes - self.kept_bytes)

    def is_held(self, cache_bytes: int) -> bool:
        """Return whether a cache keeps all that a machine reads."""
        if self._plan.window and cache_bytes >= self.share_bytes:
            return True
        return cache_bytes - ring_share(cache_bytes) >= self.whole_bytes

    def window_for(self, cache_bytes: int) -> int | None:
        """Return the rows of a window if none are given: fewer than usual if a cache keeps more of the store then.

        None if it keeps all of the store, so that all rows may be shuffled. A window that has less than a line of each shard,
        or than a batch, hardly needs less room.
        """
        if cache_bytes - ring_share(cache_bytes) >= self.whole_bytes:
            return None
        most = min(USUAL_WINDOW, self.most_window)
        if cache_bytes >= self.share_bytes:
            return most
        buckets, lanes = self._plan.buckets, self._plan.lanes
        of_batch = sum(b.num_rows for b in buckets) / lanes * max(b.global_batch / b.num_rows for b in buckets)
        least = self.in_use(min(most, int(max(of_batch, SHARDS_AT_ONCE * LINE_BYTES / self._row_bytes, LEAST_WINDOW))))
        room = min(max(cache_bytes * KEPT_BY_RING, RING_OF_USE * least), cache_bytes - self.kept_bytes)
        window = most
        while window > LEAST_WINDOW and RING_OF_USE * self.in_use(window) > room:
            window = max(LEAST_WINDOW, int(window * _SMALLER))
        return window

    def why_too_small(self, cache_bytes: int) -> str | None:
        """Return why the store is not read in this order through a cache of this size, and what would do; None if it may be.

        If all rows are shuffled, hardly a line that was fetched for one row is still there for another, so the cache must hold
        all. In another order, it needs room for what is read at a time.
        """
        window = self._plan.window
        fits = window is not None and int(LEAST_RING * self.in_use(window)) <= cache_bytes - self.kept_bytes
        if fits or self.is_held(cache_bytes):
            return None
        order = {None: "with all rows shuffled", 0: "in stored order"}.get(window, f"in windows of {window} rows")
        needed = cache_for(self.whole_bytes) if window is None else self.ring_bytes + self.kept_bytes
        fewer = "mix fewer rows at a time (--window)" if window else "use smaller batches (--batch-size)"
        remedy = f"set a window (--window {USUAL_WINDOW})" if window is None else fewer
        return (
            f"the cache may hold {human_bytes(cache_bytes)}, and {self._store.where} has {human_bytes(self.num_bytes)}: "
            f"{order}, lines would be fetched again and again; have a cache of {-(-needed >> 20)}MiB (--cache-bytes), or "
            f"{remedy}"
        )


def reserve_ring(builder: object, store: Store | Mixture, plan: Plan, rank: int, world_size: int) -> None:
    """Let the caches of stores in object storage leave as much to lines that pass through as the order needs.

    It counts while `builder` exists. Ranks of a machine that share a cache need the same, and count once.
    """
    if (refused := refuse_small_caches(store, plan, world_size)) is None:
        return
    needs, sources = refused
    machines = machines_of(world_size)
    machine = rank * machines // world_size
    lanes = range(machine * plan.lanes // machines, -(-(machine + 1) * plan.lanes // machines))
    each = needs.ring_bytes // len(lanes)
    for source in sources:
        source.reserve_ring(builder, {(plan.digest, lane): each for lane in lanes}, needs.is_held)


def refuse_small_caches(store: Store | Mixture, plan: Plan, world_size: int) -> tuple[CacheNeeds, list[RemoteSource]] | None:
    """Return the plan's needs and the stores in object storage, if the least of their caches may be read through; else None."""
    if all(shard.source is None for shard in store.shards):
        return None
    from bucketline.store.remote.cache.remote_source import RemoteSource

    sources = {id(shard.source): shard.source for shard in store.shards if isinstance(shard.source, RemoteSource)}
    if not sources:
        return None
    limit = min(source.limit for source in sources.values())
    needs = CacheNeeds(store, plan, machines_of(world_size))
    if (reason := needs.why_too_small(limit)) is not None:
        raise UsageError(reason)
    return needs, list(sources.values())


def cache_for(num_bytes: int) -> int:
    """Return the size of a cache that pins so many bytes.

    >>> cache_for(700 << 30) == (700 << 30) + (768 << 20)
    True
    """
    return num_bytes + min(num_bytes, USUAL_RING_BYTES)


# ------------------------------------------------------------------------------------------------------------------- make plan
# Make the plan of a store and a configuration: the buckets' batches, the lanes, and the window that a cache allows.


def make_plan(store: Store | Mixture, config: LoaderConfig, *, world_size: int = 1, cache_bytes: int | None = None) -> Plan:
    """Make the plan over one split of a store's generation, or of several joined stores.

    If `config.window` is None, the window is chosen by `cache_bytes`, the size of each machine's cache: by default by the
    configuration's, if a store is read at a URL.

    Raises:
        PlanError: if the split has no rows.
        UsageError: if `store` is not an open one.
    """
    expect("store", store, Store | Mixture, "an open store: make_plan(Store.open('photos.store'), config)")
    of_split = store.buckets(config.split)
    if not of_split:
        splits = ", ".join(sorted({bucket.split for bucket in store.buckets()})) or "none"
        raise PlanError(
            f"the plan has no step: {store.where} has no rows in the split {config.split!r} (splits with rows: {splits}); pack "
            "into it, or name a split that has rows"
        )
    buckets = tuple(
        PlanBucket(
            name=bucket.name,
            num_rows=sum(part.per_pass for part in parts) if parts else bucket.num_rows,
            global_batch=config.rows_of(bucket) * config.accumulation * world_size,
            parts=parts,
        )
        for bucket in of_split
        for parts in [bucket.parts()]
    )
    plan = Plan(
        seed=config.seed,
        remainder=Remainder(config.remainder),
        buckets=buckets,
        source=store.generations,
        window=0 if config.window == 0 else None,
        epochs=config.num_epochs,
    )
    if cache_bytes is None and any(shard.source is not None for shard in store.shards):
        cache_bytes = config.remote().cache_bytes
    if config.window == 0 or (config.window is None and cache_bytes is None):
        return plan
    columns = [bucket.runs() for bucket in of_split]
    runs = [ShardRuns(shard=shard, repeat=repeat, num_rows=num_rows) for shard, repeat, num_rows in columns]
    machines = machines_of(world_size)
    mixed = replace(plan, window=config.window or USUAL_WINDOW, lanes=config.lanes or machines, runs=tuple(runs))
    needs = CacheNeeds(store, mixed, machines)
    window = config.window
    if window is None and cache_bytes is not None:
        window = needs.window_for(cache_bytes)
    return plan if window is None else replace(mixed, window=min(window, needs.most_window))


def asked_window(store: Store | Mixture, plan: Plan) -> int | None:
    """Return the window that a plan was made with: the usual one, if the plan has as much of it as there may be."""
    most = CacheNeeds(store, plan, 1).most_window
    return USUAL_WINDOW if plan.window == min(USUAL_WINDOW, most) else plan.window


def plan_of(store: Store | Mixture, config: LoaderConfig, world_size: int) -> Plan:
    """Make the plan of a loader with this configuration. It is the same on every rank and in a service."""
    plan = make_plan(store, config, world_size=world_size)
    if plan.num_steps == 0 or not plan.has_steps:
        raise PlanError(plan.without_step())
    return plan


def plan_counts(plan: Plan, epochs: int, split: str) -> dict[str, Any]:
    """Return the steps and rows of some epochs, and each bucket's batches, as `loader plan --json` prints them."""
    if (steps := plan.steps_before(epochs)) == 0:
        raise PlanError(plan.without_step())
    counts = [(bucket, plan.batches_before(bucket, epochs)) for bucket in plan.buckets]
    return {
        "steps": steps,
        "rows": sum(batches * bucket.global_batch for bucket, batches in counts),
        "plan": plan.digest,
        "buckets": [
            {
                "name": bucket.name,
                "split": split,
                "rows": bucket.num_rows,
                "global_batch": bucket.global_batch,
                "batches": batches,
                "carried": epochs * bucket.num_rows - batches * bucket.global_batch,
            }
            for bucket, batches in counts
        ],
    }
