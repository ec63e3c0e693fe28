"""The loader's state: the next micro-batch, and every setting that must match for that number to mean the same."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from bucketline.errors import StateError
from bucketline.loader.config import LEAST_WINDOW
from bucketline.loader.history import PastSteps, PlanMark, StoreMark, StoreMarks, added, in_full, short
from bucketline.typed_json import Json, TypedJsonError, decode, encode

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from bucketline.loader.mixture import WeightedStore
    from bucketline.loader.plan.plan import Plan

STATE_VERSION = 4
LAST_RELEASED = 2  # of the states of version 0.1.0, which have neither an epoch nor a history
_NEW_PLAN = (
    "continue at its step in the order of this version: --new-plan of the trainer, Loader.start_anew(state), or resume with "
    "the version that saved it"
)
SPELT_OUT = 3  # stores listed in full; the rest only enter a digest, which keeps a state below 1 KB


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderState(PlanMark):
    """The content of `Loader.state_dict`. It counts what the caller has consumed, not what was prefetched."""

    version: int
    step: int  # optimizer step of the next micro-batch
    micro_step: int  # its index within the step
    epoch: int | None  # that the next micro-batch belongs to; None in states of earlier versions: the one that has the step
    global_batch: int | str  # of every bucket; if buckets differ, the smallest, the largest and a digest of all
    since: tuple[int, ...]  # step and micro step at which the present plan and ranks began
    history: tuple[dict[str, Json], ...]  # what was consumed before that, as `history.short` returns it

    def past(self) -> tuple[PastSteps, ...]:
        """Return what was consumed before this plan and these ranks began.

        Raises:
            StateError: if the history is damaged.
        """
        return in_full(self.history, self)

    def consumed(self) -> tuple[PastSteps, ...]:
        """Return all that was consumed, in order.

        Raises:
            StateError: if the history is damaged.
        """
        own = {field.name: getattr(self, field.name) for field in fields(PlanMark)}
        return added(self.past(), PastSteps(**own, begin=self.since, end=(self.step, self.micro_step)))


# Between steps, the same global batch may be divided differently among the ranks.
_MAY_DIFFER = ("accumulation", "world_size")


def name_stores(shares: Sequence[WeightedStore]) -> StoreMarks:
    """Return the marks of a loader's stores and of the generations that it reads."""
    manifests = [share.store.manifest for share in shares]
    marks = tuple(
        StoreMark(store_id=manifest.store_id, generation=manifest.generation, repeats=share.repeats)
        for manifest, share in zip(manifests, shares, strict=True)
    )
    every: list[object] = [[share.store.generations, share.repeats] for share in shares]
    return StoreMarks(count=len(marks), first=marks[:SPELT_OUT], digest=_short_digest(every))


def global_batch_of(plan: Plan) -> int | str:
    """Return the global batch of a plan's buckets in a short form that is equal only if all of them are."""
    sizes = [bucket.global_batch for bucket in plan.buckets]
    if len(set(sizes)) == 1:
        return sizes[0]
    largest, least = (extreme(plan.buckets, key=lambda bucket: bucket.global_batch) for extreme in (max, min))
    return (
        f"{least.global_batch} ({least.name}) to {largest.global_batch} ({largest.name}), of {len(sizes)} buckets "
        f"{_short_digest([[bucket.name, bucket.global_batch] for bucket in plan.buckets])}"
    )


def _short_digest(value: object) -> str:
    return hashlib.blake2b(json.dumps(value).encode(), digest_size=8).hexdigest()


def _expect_mapping(saved: object) -> None:
    if not isinstance(saved, Mapping):
        raise StateError(
            f"the saved loader state is {saved!r:.100} of type {type(saved).__name__}, expected a dict: give what state_dict() "
            "returned"
        )


def parse_state(saved: Mapping[str, object]) -> LoaderState:
    """Return a saved state, also of the last release, which recorded neither epoch nor history.

    Raises:
        StateError: if it is of another version, or damaged.
    """
    _expect_mapping(saved)
    version = saved.get("version")
    if type(version) is not int or version not in (LAST_RELEASED, STATE_VERSION):
        raise StateError(
            f"the saved loader state has version {version!r}, expected version {LAST_RELEASED} or {STATE_VERSION}; "
            + (_NEW_PLAN if _is_older(version) else "give the dict that state_dict() returned, whole")
        )
    entries = dict(saved)
    if version == LAST_RELEASED:
        entries |= {"epoch": None, "epochs": None, "batch": {}, "generations": [], "since": [0, 0], "history": []}
    entries = _by_window(entries)
    if isinstance(past := entries.get("history"), list | tuple):
        entries["history"] = [_by_window(one) if isinstance(one, dict) else one for one in past]
    try:
        state = decode(LoaderState, entries, "loader state")
    except TypedJsonError as error:
        raise StateError(f"the saved loader state is damaged: {error}") from error
    if len(state.since) != 2:
        raise StateError(f"the saved loader state is damaged: since is {state.since}, expected a step and a micro step")
    if version == LAST_RELEASED:
        past = tuple(replace(one, is_recorded=False) for one in state.consumed())
        state = replace(state, since=(state.step, state.micro_step), history=short(past, state))
    state.past()
    return state


def _by_window(entries: dict[str, Any]) -> dict[str, Any]:
    """Return a state's or its history's entries with the order of the settings as `window`; `blocks`, which is gone, stays."""
    settings = entries.get("settings")
    if not isinstance(settings, dict) or settings.get("shuffle") not in ("full", "lines", "none"):
        return entries
    own = {name: value for name, value in settings.items() if name not in ("shuffle", "shuffle_window")}
    window = {"full": None, "none": 0}.get(settings["shuffle"], settings.get("shuffle_window"))
    return {**entries, "settings": {**own, "window": window}}


def _is_older(version: object) -> bool:
    return type(version) is int and 0 < version < STATE_VERSION and version != LAST_RELEASED


def state_for_new_plan(saved: Mapping[str, object], present: LoaderState) -> LoaderState:
    """Return a saved state from which another plan continues; of an older version, whose history is not read, only the place.

    Raises:
        StateError: if it is damaged.
    """
    _expect_mapping(saved)
    if not _is_older(saved.get("version")):
        return parse_state(saved)
    place = [saved.get("step"), saved.get("micro_step")]
    names = ("step", "micro_step", "accumulation")
    read = {name: saved.get(name) for name in names}
    return parse_state({**state_as_json(present), **read, "epoch": None, "since": place, "history": []})


def check_state(saved: Mapping[str, object], present: LoaderState, earlier_plans: Collection[str] = ()) -> LoaderState:
    """Parse a saved state and check that a loader in the state `present` can resume from it.

    `earlier_plans`: the digests that earlier versions gave the present plan, if it had another order by them.

    Raises:
        StateError: if it cannot; the message names the field, its saved and its current value.
    """
    state = parse_state(saved)
    if (shuffle := state.settings.get("shuffle")) is not None:
        raise StateError(
            f"the state is of an earlier version, with a shuffle {shuffle!r:.80} that this one does not have (window mixes "
            f"rows of a few shards at a time); {_NEW_PLAN}"
        )
    if state.plan in earlier_plans:
        raise StateError(
            f"the state is of an earlier version, whose windows had another order, that was nearly the same in every epoch; "
            f"{_NEW_PLAN}"
        )
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
    return state


def schedule_of(state: LoaderState) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """Return the generations that a run has read, each with the step from which it read them.

    Raises:
        StateError: if the state does not tell.
    """
    spans = [*((one.begin[0], one.generations) for one in state.past()), (state.since[0], state.generations)]
    if not all(generations for _, generations in spans):
        raise StateError("the state is of a version that did not record the generations; it has no schedule")
    return tuple(span for n, span in enumerate(spans) if n == 0 or span[1] != spans[n - 1][1])


def saved_choices(saved: Mapping[str, object], plan: Plan) -> dict[str, int | None]:
    """Return the lanes and the window of a saved state that a plan of these buckets can have; `check_state` judges the rest."""
    _expect_mapping(saved)
    settings = _by_window(dict(saved)).get("settings")
    found = settings if isinstance(settings, dict) else {}
    lanes, window = found.get("lanes"), found.get("window", 0)
    if window is None:
        return {"lanes": None, "window": None}
    if type(window) is not int or window < LEAST_WINDOW:
        return {}
    choices: dict[str, int | None] = {"window": window}
    if type(lanes) is int and lanes > 0 and all(bucket.global_batch % lanes == 0 for bucket in plan.buckets):
        choices["lanes"] = lanes
    return choices


def _deciding(state: LoaderState, other: LoaderState) -> Iterator[tuple[str, Json]]:
    """Yield (name, value) of the fields that must match, in the same order for both states; None for one that is absent."""
    yield "stores.count", state.stores.count
    for number in range(max(len(state.stores.first), len(other.stores.first))):
        own = state.stores.first[number] if number < len(state.stores.first) else None
        for field in fields(StoreMark):
            name = field.name if state.stores.count == 1 else f"stores.first[{number}].{field.name}"
            yield name, None if own is None else getattr(own, field.name)
    yield "stores.digest", state.stores.digest
    yield "global_batch", state.global_batch
    for name in sorted({*state.settings, *other.settings}, key=lambda name: (name != "window", name)):  # it decides on lanes
        yield name, state.settings.get(name)
    yield "plan", state.plan


def _advice(name: str) -> str:
    if name == "global_batch":
        return "choose batch size x accumulation x ranks so that each bucket has the saved number"
    if name == "lanes":
        return "give the saved number, or none, with a global batch that it divides"
    if name == "window":
        return "give the saved number, or none (if that was None: with a cache that holds the stores)"
    if name in ("store_id", "generation", "repeats", "plan"):
        return "open the store and the generation that the run was planned on"
    if name.startswith("stores."):
        return (
            "open the stores that the run was planned on, each at its generation, in the same order and with the same repeats"
        )
    return "use the saved value, or start over"


def state_as_json(state: LoaderState) -> dict[str, object]:
    """Return a state as the JSON object of `Loader.state_dict`: at most 1 KB, and its history."""
    encoded = encode(state)
    assert isinstance(encoded, dict)
    return dict(encoded)
