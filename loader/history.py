"""The steps that a loader has consumed before its present state: their plans, generations and ranks.

The plan tells what a step read, so a state needs to keep only what the plan is made of, each time that it changes: ranks,
generations (of a store that is followed), or everything (a new plan). `loader seen` reads it.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

from bucketline.errors import StateError
from bucketline.typed_json import Json, TypedJsonError, decode, encode

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from bucketline.loader.mixture import WeightedStore


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreMark:
    """A store as it is recorded in a state."""

    store_id: str
    generation: int
    repeats: int | float


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreId:
    """A store and the generation that is read of it, as a checkpoint, `config.json` and the client of a service name it."""

    path: str  # as given, or its URL; the store may have moved since
    store_id: str
    generation: int
    digest: str  # of the generation's manifest
    repeats: int | float

    @classmethod
    def of(cls, share: WeightedStore, path: Path | str | None = None) -> StoreId:
        """Return the identity of an open store, under another path if one is given."""
        manifest = share.store.manifest
        return cls(
            path=str(share.store.place if path is None else path),
            store_id=manifest.store_id,
            generation=manifest.generation,
            digest=manifest.digest,
            repeats=share.repeats,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreMarks:
    """All stores of a loader, in order."""

    count: int
    first: tuple[StoreMark, ...]  # the first `SPELT_OUT`
    digest: str  # of all; empty in a history of which only the generations were kept, where the plan's digest tells as much

    def named(self) -> tuple[object, ...]:
        """Return what is the same at all generations."""
        return self.count, tuple((one.store_id, one.repeats) for one in self.first)

    def at(self, generations: Sequence[int]) -> StoreMarks:
        """Return the marks of the same stores at other generations."""
        first = [replace(mark, generation=number) for mark, number in zip(self.first, generations, strict=False)]
        return replace(self, first=tuple(first), digest="")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanMark:
    """The inputs of a plan besides the stores' rows, and the ranks that it is divided among."""

    accumulation: int
    world_size: int
    batch: dict[str, Json]  # the options that size it; empty in states of earlier versions
    settings: dict[str, Json]  # as in `LoaderConfig.deciding`
    stores: StoreMarks
    generations: tuple[int, ...]  # of all stores; empty in states of earlier versions, which name those of the first
    plan: str  # digest
    epochs: int | None  # after which the plan ends; None: endless, or not known (earlier versions), which reads the same steps


@dataclass(frozen=True, slots=True, kw_only=True)
class PastSteps(PlanMark):
    """Consecutive micro-batches that were consumed by one plan, on the same ranks."""

    begin: tuple[int, ...]  # step and micro step
    end: tuple[int, ...]  # of the first one that is not among them
    times: int = 1  # more if a loader with `epochs` was iterated again
    is_recorded: bool = True  # False: by a state of an earlier version, which does not say whether all steps had its plan

    def __post_init__(self) -> None:
        if len(self.begin) != 2 or len(self.end) != 2:
            raise ValueError("begin and end are a step and a micro step each")


def added(past: Sequence[PastSteps], more: PastSteps) -> tuple[PastSteps, ...]:
    """Return the past with more micro-batches, unless there are none; equal ones in a row are counted."""
    if more.begin >= more.end:
        return tuple(past)
    if past and replace(past[-1], times=1) == more:
        return (*past[:-1], replace(past[-1], times=past[-1].times + 1))
    if past and past[-1].times == 1 and replace(past[-1], begin=past[-1].end, end=more.end) == more:
        return (*past[:-1], replace(past[-1], end=more.end))
    return (*past, more)


_DEFAULTS: dict[str, Json] = {"times": 1, "is_recorded": True}


def short(past: Sequence[PastSteps], present: PlanMark) -> tuple[dict[str, Json], ...]:
    """Return the past as JSON objects of the fields that differ from the present state's."""
    usual = _usual(present)
    return tuple(
        {
            field.name: value
            for field in fields(one)
            for value in [encode(getattr(one, field.name))]
            if not (field.name in usual and usual[field.name] == value)
            and not (field.name == "stores" and one.generations and one.stores.named() == present.stores.named())
        }
        for one in past
    )


def _usual(present: PlanMark) -> dict[str, Json]:
    return {**_DEFAULTS, **{field.name: encode(getattr(present, field.name)) for field in fields(PlanMark)}}


def in_full(history: Sequence[dict[str, Json]], present: PlanMark) -> tuple[PastSteps, ...]:
    """Return the past that `short` shortened.

    Raises:
        StateError: if it is damaged.
    """
    usual = _usual(present)
    try:
        past = [decode(PastSteps, {**usual, **one}, f"loader state.history[{n}]") for n, one in enumerate(history)]
    except TypedJsonError as error:
        raise StateError(f"the saved loader state is damaged: {error}") from error
    return tuple(
        replace(one, stores=one.stores.at(one.generations)) if "stores" not in entry and "generations" in entry else one
        for one, entry in zip(past, history, strict=True)
    )
