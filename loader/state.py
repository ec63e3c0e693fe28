"""The loader's state: the next micro-batch, and every setting that must match for that number to mean the same."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bucketline.errors import StateError
from bucketline.loader.config import LEAST_WINDOW
from bucketline.loader.mixture import StoreId  # noqa: TC001 - `decode` reads the annotations at run time
from bucketline.typed_json import Json, TypedJsonError, decode, encode

if TYPE_CHECKING:
    from collections.abc import Iterator

    from bucketline.loader.plan.plan import Plan

STATE_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderState:
    """The content of `Loader.state_dict`. It counts what the caller has consumed, not what was prefetched."""

    version: int
    step: int  # optimizer step of the next micro-batch
    micro_step: int  # its index within the step
    epoch: int  # that the next micro-batch belongs to
    accumulation: int
    world_size: int
    batch: dict[str, Json]  # the options that size it
    global_batch: int | str  # of every bucket; if buckets differ, the smallest, the largest and a digest of all
    settings: dict[str, Json]  # as in `LoaderConfig.deciding`
    stores: tuple[StoreId, ...]
    plan: str  # digest
    epochs: int | None  # after which the plan ends; None: endless

    @property
    def generations(self) -> tuple[int, ...]:
        """Return the generation of each store."""
        return tuple(one.generation for one in self.stores)


# Between steps, the same global batch may be divided differently among the ranks.
_MAY_DIFFER = ("accumulation", "world_size")


def global_batch_of(plan: Plan) -> int | str:
    """Return the global batch of a plan's buckets in a short form that is equal only if all of them are."""
    sizes = [bucket.global_batch for bucket in plan.buckets]
    if len(set(sizes)) == 1:
        return sizes[0]
    largest, least = (extreme(plan.buckets, key=lambda bucket: bucket.global_batch) for extreme in (max, min))
    every = json.dumps([[bucket.name, bucket.global_batch] for bucket in plan.buckets])
    digest = hashlib.blake2b(every.encode(), digest_size=8).hexdigest()
    return f"{least.global_batch} ({least.name}) to {largest.global_batch} ({largest.name}), of {len(sizes)} buckets {digest}"


def parse_state(saved: Mapping[str, object]) -> LoaderState:
    """Return a saved state."""
    if not isinstance(saved, Mapping):
        raise StateError(
            f"the saved loader state is {saved!r:.100} of type {type(saved).__name__}, expected a dict: give what state_dict() "
            "returned"
        )
    version = saved.get("version")
    if type(version) is not int or version != STATE_VERSION:
        raise StateError(
            f"the saved loader state has version {version!r}, expected version {STATE_VERSION}; give the dict that "
            "state_dict() returned, whole"
        )
    try:
        return decode(LoaderState, dict(saved), "loader state")
    except TypedJsonError as error:
        raise StateError(f"the saved loader state is damaged: {error}") from error


def check_state(state: LoaderState, present: LoaderState) -> None:
    """Check that a loader in the state `present` can resume from a saved one."""
    for (name, before), (_, now) in zip(_deciding(state, present), _deciding(present, state), strict=True):
        if before != now or type(before) is not type(now):
            raise StateError(f"the loader's {name} was {before!r} when its state was saved and is {now!r} now; {_advice(name)}")
    if state.micro_step >= state.accumulation:
        raise StateError(f"micro_step is {state.micro_step}, a step has {state.accumulation}")
    for name in _MAY_DIFFER:
        before, now = getattr(state, name), getattr(present, name)
        if state.micro_step and before != now:
            raise StateError(
                f"the state was saved within a step (micro-batch {state.micro_step} of {state.accumulation}); {name} was "
                f"{before} and is {now} now, and may only change between steps"
            )


def saved_choices(saved: LoaderState, plan: Plan) -> dict[str, int | None]:
    """Return the lanes and the window of a saved state that a plan of these buckets can have; `check_state` judges the rest."""
    lanes, window = saved.settings.get("lanes"), saved.settings.get("window", 0)
    if window is None:
        return {"lanes": None, "window": None}
    if type(window) is not int or window < LEAST_WINDOW:
        return {}
    choices: dict[str, int | None] = {"window": window}
    if type(lanes) is int and lanes > 0 and all(bucket.global_batch % lanes == 0 for bucket in plan.buckets):
        choices["lanes"] = lanes
    return choices


def are_of(state: LoaderState, stores: tuple[StoreId, ...]) -> bool:
    """Return True if a state is of these stores, at whatever generations."""
    named = [[(one.store_id, one.repeats) for one in every] for every in (state.stores, stores)]
    return named[0] == named[1]


def _deciding(state: LoaderState, other: LoaderState) -> Iterator[tuple[str, Json]]:
    """Yield (name, value) of the fields that must match, in the same order for both states; None for one that is absent."""
    yield "stores.count", len(state.stores)
    for number, one in enumerate(state.stores[: len(other.stores)]):
        for name in ("store_id", "generation", "repeats", "digest"):
            yield name if len(state.stores) == 1 else f"stores[{number}].{name}", getattr(one, name)
    yield "global_batch", state.global_batch
    for name in sorted({*state.settings, *other.settings}, key=lambda name: (name != "window", name)):  # it decides on lanes
        yield name, state.settings.get(name)
    yield "plan", state.plan


_ADVICE = {
    "global_batch": "choose batch size x accumulation x ranks so that each bucket has the saved number",
    "lanes": "give the saved number, or none, with a global batch that it divides",
    "window": "give the saved number, or none (if that was None: with a cache that holds the stores)",
    **dict.fromkeys(
        ("store_id", "generation", "repeats", "digest", "plan"), "open the store and the generation that the run was planned on"
    ),
}


def _advice(name: str) -> str:
    if name.startswith("stores"):
        return (
            "open the stores that the run was planned on, each at its generation, in the same order and with the same repeats"
        )
    return _ADVICE.get(name, "use the saved value, or start over")


def state_as_json(state: LoaderState) -> dict[str, Any]:
    """Return a state as the JSON object of `Loader.state_dict`."""
    encoded = encode(state)
    assert isinstance(encoded, dict)
    return dict(encoded)
