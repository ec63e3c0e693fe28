"""Mixtures: several stores read as one, each with its number of repeats.

A bucket's rows are numbered store after store, in the given order, and repeat after repeat within a store. With 10 rows of
`a` once and 4 of `b` twice, rows 0 to 9 are a's, 10 to 13 b's, and 14 to 17 the same four again. So a pass reads a store's
rows `repeats` times, and every other guarantee of the plan holds as for one store. A single store is not wrapped and has no
overhead.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import numpy as np

from bucketline.errors import BucketlineError, FingerprintError, UsageError
from bucketline.files.paths import redacted
from bucketline.option_value import FieldForm, OptionValue, expect
from bucketline.store.format.block import FLIPPED, IMAGE_AXES, LATENT, MASK, REFERENCE_AXIS, REFERENCE_PREFIX
from bucketline.store.format.manifest import generations, read_mixture
from bucketline.store.read.files import refuse_lost_shards
from bucketline.store.read.store import Bucket, OpenShards, Store, StoreRows
from bucketline.store.remote.urls import is_url, refuse_misspelt
from bucketline.store.shard.reader import SealedShard
from bucketline.typed_json import encode, first_difference

if TYPE_CHECKING:
    from typing import Self

    from numpy.typing import NDArray

    from bucketline.store import BlockSpec
    from bucketline.store.format.schema import BucketEntry
    from bucketline.store.remote.urls import RemoteOptions
    from bucketline.typed_json import Json

# Rules about which images are packed, into which bucket and split, with which captions. They do not affect how a row's values
# are computed from its image and its captions.
_FREE_RULES = (
    *("caption_template", "shuffle_tags", "caption_per", "grid", "max_crop", "max_upscale", "min_size_px", "val_fraction"),
    *("dtype", "text_dtype", "latents", "text", "encode_dtype", "max_tokens"),  # which `encoders` has as they came out
    *("references", "references_optional", "references_area", "mask"),  # which buckets' names and columns have
)
_REPEATS = "a number above 0: 3 to read its rows three times per pass, 0.5 to read half of them"
_MOST = 1 << 31
_NUMBER = re.compile(r"[0-9]{1,9}|[0-9]{0,9}\.[0-9]{1,18}")


@dataclass(frozen=True, slots=True, init=False)
class WeightedStore:
    """A store and the number of times that a pass reads its rows: `WeightedStore("photos.store", 0.3)`.

    A fraction such as 0.3 or 2.5 reads so much of them in every pass (an epoch), rounded to whole rows of each bucket, at
    least one: others in each pass until all have come.
    """

    store: Store  # open; a path or a URL until a loader opens it
    repeats: float  # an int, if it is a whole number

    def __init__(self, store: Store | Path | str, repeats: float = 1) -> None:
        """Take an open store, its path or its URL.

        Raises:
            UsageError: if it is none of these, or `repeats` is not a number above 0.
        """
        expect("a store", None if store == "" else store, Store | Path | str, "a path, a URL or an open Store")
        where = store.place if isinstance(store, Store) else store
        if not _is_above_0(repeats):
            raise UsageError(f"{where} has {repeats!r:.80} repeats, expected {_REPEATS}")
        object.__setattr__(self, "store", store)
        object.__setattr__(self, "repeats", int(repeats) if repeats % 1 == 0 else float(repeats))


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreId:
    """A store and the generation that is read of it, as states, `config.json` and clients of a service name it."""

    path: str  # as given, or its URL; the store may have moved since
    store_id: str
    generation: int
    digest: str  # of the generation's manifest
    repeats: int | float

    @classmethod
    def of(cls, weighted: WeightedStore, path: Path | str | None = None) -> StoreId:
        """Return the identity of an open store, under another path if one is given."""
        manifest = weighted.store.manifest
        return cls(
            path=str(weighted.store.place if path is None else path),
            store_id=manifest.store_id,
            generation=manifest.generation,
            digest=manifest.digest,
            repeats=weighted.repeats,
        )


def _is_above_0(value: Any) -> bool:  # noqa: ANN401 - what a caller may give
    return type(value) is not bool and isinstance(value, Real) and 0 < float(value) < _MOST


StoreLike: TypeAlias = "Store | WeightedStore | Path | str"
Stores: TypeAlias = "StoreLike | Sequence[StoreLike]"


@dataclass(frozen=True, kw_only=True)
class StoreArgument(OptionValue):
    """A store on the command line: `photos.store`, or `photos.store:3` to read its rows three times per pass; also `:0.5`.

    `photos.store:3@0.5` has half the weight in the loss, which only training takes.
    """

    FORMS = ("PATH[:REPEATS][@WEIGHT]",)

    path: Annotated[Path | str, FieldForm(".+", str, str)]  # a URL is text
    repeats: float = 1
    weight: float | None = None

    @classmethod
    def parse(cls, text: str, option: str = "the store") -> Self:
        """Return what a text spells. An existing path takes precedence over numbers at its end.

        >>> StoreArgument.parse("s3://me@host/photos.store:3@0.5")
        StoreArgument(path='s3://me@host/photos.store', repeats=3, weight=0.5)
        """
        location, repeats, weight = _ends(text)
        if not location:
            raise UsageError(f"{option} is '', expected a path or a URL")
        if not is_url(text):
            refuse_misspelt(location)
        if any(_cut(location, sign)[1] for sign in ":@"):
            expected = "its repeats once, and its weight once: photos.store:3@0.5"
            raise UsageError(f"{option} is {redacted_store(text)}, expected {expected}")
        if not float(repeats or 1):
            raise UsageError(f"{redacted(location)} has {repeats} repeats, expected {_REPEATS}")
        return cls(
            path=location if is_url(text) else Path(location),
            repeats=int(float(repeats or 1)) if float(repeats or 1) % 1 == 0 else float(repeats or 1),
            weight=float(weight) if weight else None,
        )


def _ends(text: str) -> tuple[str, str | None, str | None]:
    """Return a store's place, its repeats and its weight."""
    path, weight = _cut(text, "@")
    return (*_cut(path, ":"), weight)


def _cut(text: str, sign: str) -> tuple[str, str | None]:
    """Return a place, and the number after a sign at its end; an existing path takes precedence over a number."""
    path, _, number = text.rpartition(sign)
    is_path = "/" not in path.partition("://")[2] if is_url(text) else Path(text).exists()  # a port, a user
    return (text, None) if not path or is_path or not _NUMBER.fullmatch(number) else (path, number)


def redacted_store(text: str) -> str:
    """Return a store argument without the secrets of its URL.

    >>> redacted_store("photos.store:3@0.5"), redacted_store("https://me:secret@host/photos.store@2")
    ('photos.store:3@0.5', 'https://host/photos.store@2')
    """
    path, *_ = _ends(text)
    return redacted(path) + text[len(path) :]


def parse_stores(texts: Iterable[Path | str], option: str = "the store") -> list[StoreArgument]:
    """Parse store arguments; a folder that was packed from a data set file stands for its stores, each with its repeats."""
    arguments = []
    for store in (StoreArgument.parse(str(text), option) for text in texts):
        mixed = None if isinstance(store.path, str) else read_mixture(store.path)
        if mixed is None or isinstance(store.path, str):
            arguments.append(store)
        else:
            arguments += [replace(store, path=store.path / part.name, repeats=store.repeats * part.repeats) for part in mixed]
    return arguments


def open_weighted(stores: Stores, remote: RemoteOptions | None = None) -> tuple[WeightedStore, ...]:
    """Open each store that is not open yet, in the given order. Paths are as in `parse_stores`, `remote` is for URLs."""
    opened = tuple(weighted for store in _each(stores) for weighted in _open(store, remote))
    if not opened:
        raise UsageError("no store is given, expected one or more: Loader('photos.store', config)")
    seen: dict[str, WeightedStore] = {}
    for weighted in opened:
        if weighted.store.source is None:
            refuse_lost_shards(weighted.store.folder, weighted.store.manifest, sidecars=False)  # one stat per shard
        before = seen.setdefault(weighted.store.manifest.store_id, weighted)
        if before is not weighted:
            raise UsageError(
                f"{before.store.place} and {weighted.store.place} are the same store ({before.store.manifest.store_id}); "
                f"give it once, with repeats: {before.store.place}:{before.repeats + weighted.repeats}"
            )
    return opened


def are_open(stores: Stores) -> bool:
    """Return True if each store is open, so that its generation is chosen."""
    return all(isinstance(each.store if isinstance(each, WeightedStore) else each, Store) for each in _each(stores))


def _each(stores: Stores) -> Sequence[StoreLike]:
    return stores if isinstance(stores, Sequence) and not isinstance(stores, str) else [stores]


def _open(store: StoreLike, remote: RemoteOptions | None) -> list[WeightedStore]:
    if isinstance(store, WeightedStore):
        opened = _open(store.store, remote)  # several, if it is a folder of a data set file
        return [WeightedStore(each.store, each.repeats * store.repeats) for each in opened]
    if isinstance(store, Store):
        return [WeightedStore(store=store)]
    expect("a store", store if str(store) else None, str | Path, "a path, a URL, an open Store or a WeightedStore")
    arguments = parse_stores([store])
    if any(argument.weight is not None for argument in arguments):
        raise UsageError(f"{store} has a weight, which only training takes: leave it out; a program sets row_weights")
    return [WeightedStore(store=Store.open(a.path, remote=remote, reads_rows=True), repeats=a.repeats) for a in arguments]


def at_generations(stores: Sequence[WeightedStore], numbers: Sequence[int | None]) -> tuple[WeightedStore, ...]:
    """Return stores at other generations: the number of each, or the newest for None. Removed caches are made again."""

    def is_at(store: Store, generation: int | None) -> bool:
        return store.manifest.generation == generation and not (store.source is not None and store.source.is_removed)

    return tuple(
        weighted if is_at(weighted.store, generation) else WeightedStore(weighted.store.reopened(generation), weighted.repeats)
        for weighted, generation in zip(stores, numbers, strict=True)
    )


def newest_generations(stores: Sequence[WeightedStore]) -> tuple[WeightedStore, ...]:
    """Return the stores at their newest generations; as they are, if these cannot be read now."""
    numbers = [max(generations(each.store.path), default=None) if each.store.is_local else None for each in stores]
    try:
        return at_generations(stores, numbers)
    except BucketlineError:  # a server that does not answer now; what is read already stays readable
        return tuple(stores)


def join(stores: Sequence[WeightedStore], *, plain_reads: bool = False) -> Store | Mixture:
    """Return one view of all stores: the store itself if there is only one, without repeats.

    With `plain_reads`, the view maps nothing, whatever the given stores do.
    """
    first = stores[0]
    if len(stores) == 1 and first.repeats == 1:
        if plain_reads and not first.store.plain_reads:
            return first.store.with_plain_reads()
        return first.store
    for weighted in stores[1:]:
        _expect_alike(first.store, weighted.store)
    return Mixture(stores, plain_reads=plain_reads)


class Mixture(OpenShards):
    """Several stores as one: shards numbered consecutively, buckets joined by name."""

    def __init__(self, weighted_stores: Sequence[WeightedStore], *, plain_reads: bool = False) -> None:
        """Join stores that were packed with the same settings; `join` checks this."""
        self._weighted_stores = tuple(weighted_stores)
        stores = [weighted.store for weighted in weighted_stores]
        super().__init__(
            where=" and ".join(store.where for store in stores),
            generations=",".join(f"{weighted.store.generations}x{weighted.repeats}" for weighted in weighted_stores),
            # new objects, so that sidecars are mapped once: the stores' own shards use their stores' tables
            shards=[
                SealedShard(store.path, shard.entry, plain_reads=plain_reads, source=shard.source, dropped=shard.dropped)
                for store in stores
                for shard in store.shards
            ],
            buckets=_joined_buckets(stores),
            specs={name: spec for store in reversed(stores) for name, spec in store.specs.items()},
            text=stores[0].text,
            encoders=stores[0].encoders,
            ragged=stores[0].ragged,
            added=_joined_added(stores),
            plain_reads=plain_reads,
        )

    def store_of_shards(self) -> NDArray[np.int64]:
        return np.repeat(np.arange(len(self._weighted_stores)), [len(each.store.shards) for each in self._weighted_stores])

    def _open_bucket(self, entry: BucketEntry) -> Bucket:
        return _RepeatedBucket(self, entry, [(len(each.store.shards), each.repeats) for each in self._weighted_stores])


class _RepeatedBucket(Bucket):
    """A bucket of several stores. It first maps a row number to one without repeats, which is then located as usual."""

    def __init__(self, mixture: Mixture, entry: BucketEntry, stores: Sequence[tuple[int, float]]) -> None:
        """Take a bucket of a mixture. `stores`: the number of shards of each, and its repeats."""
        super().__init__(mixture, entry)
        num_shards = np.array([count for count, _ in stores], dtype=np.int64)
        self._times = [times for _, times in stores]
        repeats = np.array([times if isinstance(times, int) else 1 for times in self._times], dtype=np.int64)  # of row numbers
        ends: NDArray[np.int64] = np.concatenate([[0], self._ends]).astype(np.int64)[
            np.cumsum(num_shards)
        ]  # of each store's rows, without repeats
        self._num_shards: NDArray[np.int64] = num_shards
        self._repeats: NDArray[np.int64] = repeats
        self._own_rows: NDArray[np.int64] = np.diff(ends, prepend=0)
        self._own_starts = ends - self._own_rows
        self._repeated_ends: NDArray[np.int64] = np.cumsum(self._own_rows * repeats)
        self._repeated_starts = self._repeated_ends - self._own_rows * repeats

    @property
    def num_rows(self) -> int:
        """Numbered rows: the live rows of all shards, times the repeats of their store, or once if these are a fraction."""
        return int(self._repeated_ends[-1])

    def parts(self) -> tuple[StoreRows, ...]:
        if all(isinstance(times, int) for times in self._times):
            return ()
        each = zip(self._repeated_starts.tolist(), (self._own_rows * self._repeats).tolist(), self._times, strict=True)
        return tuple(
            StoreRows(
                first=first, num_rows=num_rows, per_pass=num_rows if isinstance(times, int) else rows_per_pass(num_rows, times)
            )
            for first, num_rows, times in each
            if num_rows
        )

    def runs(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        shard, _, live = super().runs()
        store = np.repeat(np.arange(len(self._num_shards)), self._num_shards)[shard]
        runs_by_store = []
        for number, times in enumerate(self._times):
            is_of_store, count = store == number, math.ceil(times)
            ends = np.cumsum(np.tile(live[is_of_store], count))
            rows = np.diff(np.minimum(ends, rows_per_pass(int(self._own_rows[number]), times)), prepend=0)
            of_store = np.stack([np.tile(shard[is_of_store], count), np.repeat(np.arange(count), is_of_store.sum()), rows])
            runs_by_store.append(of_store[:, rows > 0])
        shard, repeat, rows = np.concatenate(runs_by_store, axis=1)
        return shard, repeat, rows

    def first_rows(self, shard: int) -> list[int]:
        store = int(np.searchsorted(np.cumsum(self._num_shards), shard, side="right"))
        first = int(self._repeated_starts[store] + self._starts[shard] - self._own_starts[store])
        return [first + repeat * int(self._own_rows[store]) for repeat in range(int(self._repeats[store]))]

    def _live(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        store = np.searchsorted(self._repeated_ends, rows, side="right")
        within = (rows - self._repeated_starts[store]) % self._own_rows[store]
        live: NDArray[np.int64] = self._own_starts[store] + within
        return live


def rows_per_pass(num_rows: int, repeats: float) -> int:
    """Return how many of a store's rows in a bucket a pass reads; at least one, if it has any.

    >>> rows_per_pass(10, 0.25), rows_per_pass(3, 0.1), rows_per_pass(10, 2.5)
    (3, 1, 25)
    """
    return max(int(num_rows * repeats + 0.5), min(num_rows, 1))


def _expect_alike(first: Store, second: Store) -> None:
    """Raise an error if two stores cannot be mixed: different encoders, text columns or image processing."""
    are_alike = _kept_columns(first) == _kept_columns(second)
    settings, others = (
        {
            **store.manifest.settings(),
            **({"columns": None} if are_alike else {}),
            "rules": {name: rule for name, rule in store.manifest.rules.items() if name not in _FREE_RULES},
            "max_captions": None,  # which the columns of each bucket have
        }
        for store in (first, second)
    )
    if difference := first_difference(settings, others, ""):
        _refuse(first, second, *difference)


def _kept_columns(store: Store) -> Json:
    """Return the columns that stores must have alike: each bucket has references and a mask, or none, by itself."""
    found = {
        name: column
        for name, column in store.manifest.columns.items()
        if column.optional or not column.role.startswith((MASK, REFERENCE_PREFIX))
    }
    axes = {axis.name for bucket in store.manifest.buckets for axis in bucket.axes if not REFERENCE_AXIS.fullmatch(axis.name)}
    is_latent = all(column.encoder in (None, "vae") and not column.optional for column in found.values())
    return {} if is_latent and found.keys() <= {LATENT, FLIPPED} and axes <= {*IMAGE_AXES} else encode(found)


def _joined_buckets(stores: Sequence[Store]) -> list[BucketEntry]:
    """Return each bucket once, sorted by name, after comparing its columns in all stores that have it."""
    holders: dict[str, tuple[Store, BucketEntry]] = {}
    for store in stores:
        for entry in store.manifest.buckets:
            holder, first_entry = holders.setdefault(entry.name, (store, entry))
            first_form, form = (_form_of(bucket) for bucket in (first_entry, entry))
            if (MASK in first_entry.columns) != (MASK in entry.columns):
                _refuse_mask(*((holder, store) if MASK in entry.columns else (store, holder)), entry.name)
            if difference := first_difference(first_form, form, f"buckets.{entry.name}"):
                _refuse(holder, store, *difference)
    return [entry for _, (_, entry) in sorted(holders.items())]


def _joined_added(stores: Sequence[Store]) -> dict[str, dict[str, BlockSpec]]:
    """Return the columns that were added in any of the stores, by name and bucket, after comparing their forms."""
    joined: dict[str, dict[str, BlockSpec]] = {}
    holders: dict[tuple[str, str], Store] = {}
    for store in stores:
        for name, specs in store.manifest.added_specs.items():
            for bucket, spec in specs.items():
                first_spec = joined.setdefault(name, {}).setdefault(bucket, spec)
                holder = holders.setdefault((name, bucket), store)
                if first_spec.columns != spec.columns:
                    first_form, form = (encode(each.manifest.added[name].buckets[bucket]) for each in (holder, store))
                    _refuse(holder, store, f"added.{name}.buckets.{bucket}", first_form, form)
    return joined


def _form_of(bucket: BucketEntry) -> Json:
    return {"axes": encode(bucket.axes), "columns": encode(bucket.columns)}


def _refuse_mask(without: Store, having: Store, bucket: str) -> None:
    raise FingerprintError(
        f"{without.place} and {having.place} cannot be read together: rows of {bucket} have a mask only in the second; give "
        f'the first one\'s source `mask = "whole"`, so that all of each image counts, and pack it again, or train on one'
    )


def _refuse(first: Store, second: Store, field: str, first_value: object, second_value: object) -> None:
    raise FingerprintError(
        f"{first.place} and {second.place} cannot be read together: {field} is {first_value!s:.200} in the first and "
        f"{second_value!s:.200} in the second; pack one of them again with the other's settings, or train on one"
    )
