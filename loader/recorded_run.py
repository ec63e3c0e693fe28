"""The record that a run leaves of its order: its state, its stores, and their plans, made again from them."""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bucketline.errors import StateError, UsageError
from bucketline.files.run_marker import CONFIG, STATUS
from bucketline.loader.config import LoaderConfig
from bucketline.loader.mixture import StoreArgument, WeightedStore, join, parse_stores
from bucketline.loader.plan.make_plan import make_plan
from bucketline.loader.service.sockets import UNIX
from bucketline.loader.state import parse_state
from bucketline.store import Store
from bucketline.store.remote.urls import is_url

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from bucketline.loader.history import PlanMark
    from bucketline.loader.plan.plan import Plan
    from bucketline.loader.state import LoaderState
    from bucketline.store.read.store import OpenShards
    from bucketline.store.remote.urls import RemoteOptions

CHECKPOINT_STATE = "state.json"
_CHECKPOINTS = "checkpoints/step-*[0-9]/digests.json"  # a checkpoint that is not complete has a suffix


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedPlan:
    """A plan that was made again, with the stores at the generations that it is of."""

    shares: tuple[WeightedStore, ...]
    rows: OpenShards
    config: LoaderConfig
    plan: Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRun:
    """The state of a run, and how it reached its stores."""

    place: Path
    state: LoaderState
    stores: tuple[StoreArgument, ...] = ()  # none: a loader's state does not name any
    storage: Mapping[str, Any] = field(default_factory=dict)  # the run's own options for object storage

    def mark_at(self, step: int) -> PlanMark:
        """Return what the plan of a step is made of; of a step that is still to come, the present one."""
        return next((one for one in self.state.consumed() if one.begin <= (step, 0) < one.end), self.state)

    def given(self, stores: Sequence[str], remote: RemoteOptions | None = None) -> dict[str, StoreArgument]:
        """Return the run's stores by store id: those that are named, which may have moved since, or those recorded.

        Raises:
            UsageError: if none is named, and the state does not name any.
            StoreError: if one cannot be opened.
        """
        named = parse_stores(stores) if stores else list(self.stores)
        if not named:
            raise UsageError(f"--run {self.place} does not say which stores were read; name all stores of the run")
        return {Store.open(one.path, remote=remote).manifest.store_id: one for one in named}

    def reached(self, remote: RemoteOptions) -> RemoteOptions:
        """Return options for object storage with the run's own where none is given."""
        endpoint, options = self.storage.get("endpoint"), self.storage.get("store_option")
        if remote.endpoint is None and isinstance(endpoint, str):
            remote = replace(remote, endpoint=endpoint)
        if not remote.options and isinstance(options, list | tuple):
            remote = replace(remote, options=tuple(map(str, options)))
        return remote


def started_in(place: Path, output_dir: object) -> Path | None:
    """Return the folder in which a run was started, to which the paths are relative that it has recorded; None: not known.

    `place`: the run's folder, or one within it. A run that has moved with what it reads is found by the end of `output_dir`.
    """
    run = Path(os.path.abspath(place))  # noqa: PTH100 - links are kept: they may be in `output_dir`
    run = next((one for one in (run, *run.parents[:2]) if (one / STATUS).exists()), run)
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
        start = Path(json.loads((run / CONFIG).read_bytes())["started_in"])
        if (start / str(output_dir)).resolve() == run.resolve():
            return start
    own = Path(str(output_dir)).parts
    return Path(*run.parts[: -len(own)]) if own and run.parts[-len(own) :] == own and len(run.parts) > len(own) else None


def from_start(word: str, start: Path | None) -> str:
    """Return a path or a store that a run has recorded, from the folder in which it was started, if it is there; else as it is.

    `word`: also `unix:PATH`.
    """
    before, path = (UNIX, word.removeprefix(UNIX)) if word.startswith(UNIX) else ("", word)
    if start is None or start == Path.cwd() or not path or is_url(path) or Path(path).is_absolute():
        return word
    with contextlib.suppress(OSError, ValueError, UsageError):  # of a text, which is not a path
        if Path(StoreArgument.parse(f"{start / path}").path).exists():
            return f"{before}{start / path}"
    return word


def read_run(path: Path, option: str = "") -> RecordedRun:
    """Return what is recorded in a run's folder (of its newest checkpoint), in a checkpoint, or in a loader's state as JSON.

    Raises:
        StateError: if the path has no such state; the message names `option`, if it is given.
    """
    if option:
        try:
            return read_run(path)
        except StateError as error:
            raise StateError(f"{option} {path}: {error}") from error
    file = path
    if path.is_dir():
        whole = sorted(path.glob(_CHECKPOINTS))
        file = (whole[-1].parent if whole else path) / CHECKPOINT_STATE
    try:
        document = json.loads(file.read_bytes())
    except OSError as error:
        raise StateError(
            f"{file} cannot be read: {error.strerror}; give a checkpoint's folder, a run's, or a loader's state as JSON"
        ) from error
    except (ValueError, RecursionError) as error:
        raise StateError(
            f"{file} is not JSON: {error!s:.200}; give a checkpoint's folder, or a loader's state as JSON"
        ) from error
    if not isinstance(document, dict):
        raise StateError(f"{file} is not a loader's state: expected a JSON object")
    saved, config = document.get("loader"), document.get("config")
    try:
        state = parse_state(saved if isinstance(saved, dict) else document)
    except StateError as error:
        raise StateError(f"{file}: {error}") from error
    if not isinstance(saved, dict):
        return RecordedRun(place=path, state=state)
    storage = config if isinstance(config, dict) else {}
    start = started_in(path, storage.get("output_dir"))
    return RecordedRun(place=path, state=state, stores=_stores(document.get("stores"), start), storage=storage)


def read_loader_state(path: Path) -> LoaderState:
    """Return a saved state: of a JSON file with it, of a checkpoint, or of the newest checkpoint in a run's folder.

    Raises:
        StateError: if the path has no such state.
    """
    return read_run(path).state


def _stores(recorded: object, start: Path | None) -> tuple[StoreArgument, ...]:
    """Return the stores that a checkpoint names; none if it names them in another way. `start`: where its run was started."""
    found = []
    for one in recorded if isinstance(recorded, list) else []:
        match one:
            case {"path": str(path), "repeats": int() | float() as repeats}:
                there = from_start(path, start)
                found.append(StoreArgument(path=there if is_url(there) else Path(there), repeats=repeats))
            case _:
                return ()
    return tuple(found)


def open_plan(mark: PlanMark, given: Mapping[str, StoreArgument], remote: RemoteOptions | None = None) -> RecordedPlan:
    """Open the stores of a plan at its generations, and make it again. `given`: the stores, by store id.

    Raises:
        StateError: if they are not all given, or another plan comes of them; if an earlier version planned otherwise.
        StoreError: if a generation was removed.
    """
    if not mark.batch:
        raise StateError("version 0.1.0 saved the state, which does not say how large a batch was; name stores and --batch")
    if (shuffle := mark.settings.get("shuffle")) is not None:
        raise StateError(f"an earlier version planned them, by a shuffle {shuffle} that this one does not have")
    shares = _shares(mark, given, remote)
    config = LoaderConfig(**mark.batch, **mark.settings, accumulation=mark.accumulation, epochs=mark.epochs)  # type: ignore[arg-type]
    rows = join(shares)
    plan = make_plan(rows, config, world_size=mark.world_size)
    if mark.plan in plan.earlier_digests:
        raise StateError("an earlier version planned them, whose windows had another order")
    if plan.digest != mark.plan:
        raise StateError(
            f"the plan of these stores has the digest {plan.digest}, the state's {mark.plan}; give all stores of the run, "
            "in its order and with its repeats"
        )
    return RecordedPlan(shares=shares, rows=rows, config=config, plan=plan)


def _shares(mark: PlanMark, by_id: Mapping[str, StoreArgument], remote: RemoteOptions | None) -> tuple[WeightedStore, ...]:
    marks = mark.stores.first
    given = list(by_id.values())
    if mark.stores.count == len(marks):
        missing = [one.store_id for one in marks if one.store_id not in by_id]
        if missing:
            raise StateError(f"the store {missing[0]} is not among those given; give all stores of the run")
        given = [by_id[one.store_id] for one in marks]
    if len(mark.generations) != mark.stores.count:
        raise StateError(f"the state is damaged: {mark.stores.count} stores have {len(mark.generations)} generations")
    if len(given) != mark.stores.count:
        raise StateError(f"{len(given)} stores are given, and the run had {mark.stores.count}; give all, in its order")
    repeats = [one.repeats for one in marks] + [one.repeats for one in given[len(marks) :]]
    return tuple(
        WeightedStore(store=Store.open(one.path, generation, remote=remote), repeats=times)
        for one, generation, times in zip(given, mark.generations, repeats, strict=True)
    )
