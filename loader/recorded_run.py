"""The record that a run leaves of its order: a line of `plans.jsonl` for each plan that it had; and their plans, made again.

A plan tells what a step read, so a line needs only the loader's state where the plan begins, and the run's step there:

    {"step": 0, "loader": {…}}
    {"step": 1200, "loader": {…}}       on other ranks, by another generation of a store, or by a new plan
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from bucketline.errors import StateError, UsageError
from bucketline.files.atomic_write import write_durably
from bucketline.files.run_marker import CHECKPOINTS
from bucketline.loader.config import LoaderConfig
from bucketline.loader.mixture import WeightedStore, join, parse_stores
from bucketline.loader.plan.make_plan import make_plan
from bucketline.loader.state import LoaderState, parse_state, state_as_json
from bucketline.store import Store

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from bucketline.loader.loader import Loader
    from bucketline.loader.plan.plan import Plan
    from bucketline.store.read.store import OpenShards
    from bucketline.store.remote.urls import RemoteOptions

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
        one, two = (replace(line.state, step=0, micro_step=0, epoch=0) for line in (self, other))
        return one == two


def append_plan(path: Path, loader: Loader, step: int | None = None) -> None:
    """Record in `plans.jsonl` which plan a run's steps have from `step` on, unless they have it before that as well.

    Call it where a run begins or resumes, and where its loader's plan changes; lines of later steps are replaced.
    `step`: the run's number of the next step, if it is not the loader's own.
    """
    state = parse_state(loader.state_dict())
    new = PlanLine(state.step if step is None else step, state)
    lines = read_plans(path) if path.exists() else []
    kept = [one for one in lines if one.step < new.step]
    if not kept or not (kept[-1].is_planned_as(new) and kept[-1].shift == new.shift):
        kept.append(new)
    if kept != lines:
        text = "".join(json.dumps({"step": one.step, "loader": state_as_json(one.state)}) + "\n" for one in kept)
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
        found = [one for one in self.lines if one.step <= step]
        if not found:
            raise StateError(f"nothing is recorded of step {step}; the plans begin at step {self.lines[0].step}")
        return found[-1]

    def given(self, stores: Sequence[str], remote: RemoteOptions | None = None) -> dict[str, Path | str]:
        """Return the places of stores that have moved, by store id."""
        named = [one.path for one in parse_stores(stores)]
        moved = {Store.open(path, remote=remote).manifest.store_id: path for path in named}
        recorded = {one.store_id: one.path for line in self.lines for one in line.state.stores}
        if others := sorted(moved.keys() - recorded.keys()):
            known = ", ".join(f"{store_id} ({path})" for store_id, path in recorded.items())
            raise UsageError(f"{moved[others[0]]} is the store {others[0]}, and the run read {known}; name stores of the run")
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
    found = _CHECKPOINT.fullmatch(folder.resolve().name)
    run = folder.resolve().parents[1] if found else folder
    names = [found] if found else [_CHECKPOINT.fullmatch(one.name) for one in run.glob(f"{CHECKPOINTS}/*")]
    lines = read_plans(run / PLANS)
    if not lines:
        raise StateError(f"{run / PLANS} has no line")
    return RecordedRun(lines, max((int(one[1]) for one in names if one), default=0))


def _run_of_state(file: Path) -> RecordedRun:
    state, plans = parse_state(json.loads(file.read_bytes())), file.with_name(PLANS)
    own = PlanLine(0, replace(state, step=0, micro_step=0))
    lines = (read_plans(plans) if plans.exists() else []) or [own]
    # a state may be older than the last lines, whose plans may number steps otherwise
    planned = [one for one in lines if one.is_planned_as(own) and one.state.step <= state.step]
    if not planned:
        raise StateError(f"no line of {plans} is of the plan that the state at step {state.step} has; name the run's own state")
    return RecordedRun(lines, planned[-1].shift + state.step)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedPlan:
    """A plan that was made again, with the stores at the generations that it is of."""

    line: PlanLine
    shares: tuple[WeightedStore, ...]
    rows: OpenShards
    config: LoaderConfig
    plan: Plan


def open_plan(line: PlanLine, moved: Mapping[str, Path | str], remote: RemoteOptions | None = None) -> RecordedPlan:
    """Open the stores of a plan at its generations, and make it again. `moved`: the places of stores, by store id."""
    state, shares = line.state, []
    for one in state.stores:
        path = moved.get(one.store_id, one.path)
        store = Store.open(path, one.generation, remote=remote)
        if store.manifest.store_id != one.store_id:
            raise StateError(
                f"{path} is the store {store.manifest.store_id}, and the run read {one.store_id}; name where that is now"
            )
        shares.append(WeightedStore(store=store, repeats=one.repeats))
    config = LoaderConfig(**state.batch, **state.settings, accumulation=state.accumulation, epochs=state.epochs)  # type: ignore[arg-type]
    rows = join(shares)
    plan = make_plan(rows, config, world_size=state.world_size)
    if plan.digest != state.plan:
        raise StateError(f"the plan of these stores has the digest {plan.digest}, the recorded one {state.plan}")
    return RecordedPlan(line=line, shares=tuple(shares), rows=rows, config=config, plan=plan)
