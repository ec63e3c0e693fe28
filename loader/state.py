"""The loader's state: which micro-batch comes next, and everything that must agree for that number to mean the same."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from bucketline.errors import StateError
from bucketline.store.typed_json import TypedJsonError, decode

if TYPE_CHECKING:
    from collections.abc import Mapping

STATE_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderState:
    """What `Loader.state_dict` gives: counts what the caller has consumed, not what was prefetched."""

    version: int
    step: int  # optimizer step of the next micro-batch
    micro_step: int  # its number within the step
    accumulation: int
    batch_size: int
    global_batch: int
    seed: int
    split: str
    remainder: str
    caption_dropout: float
    flip: float
    store_id: str
    generation: int
    plan: str  # digest


# The same global batch may be shared out among other ranks in other shares, between steps.
_MAY_DIFFER = {"step", "micro_step", "accumulation", "batch_size"}


def check_state(saved: Mapping[str, object], present: LoaderState) -> LoaderState:
    """Read a saved state that is to go on in a loader whose own state is `present`.

    Raises:
        StateError: naming the field, the saved and the present value.
    """
    version = saved.get("version")
    if version != STATE_VERSION:
        raise StateError(f"the saved loader state has version {version!r}, this is version {STATE_VERSION}")
    try:
        state = decode(LoaderState, dict(saved), "loader state")
    except TypedJsonError as error:
        raise StateError(f"the saved loader state is damaged: {error}") from error
    before, now = asdict(state), asdict(present)
    for name in before:
        if name not in _MAY_DIFFER and before[name] != now[name]:
            raise StateError(
                f"the loader's {name} was {before[name]!r} when its state was saved and is {now[name]!r} now; {_advice(name)}"
            )
    if state.micro_step >= state.accumulation:
        raise StateError(f"micro_step is {state.micro_step}, a step has {state.accumulation}")
    for name in ("accumulation", "batch_size"):
        if state.micro_step and before[name] != now[name]:
            raise StateError(
                f"the state was saved within a step (micro-batch {state.micro_step} of {state.accumulation}); {name} was "
                f"{before[name]} and is {now[name]} now, and can change between steps only"
            )
    return state


def _advice(name: str) -> str:
    if name == "global_batch":
        return "choose batch size x accumulation x ranks to give the saved number"
    if name in ("store_id", "generation", "plan"):
        return "open the store, and the generation of it, that the run was planned on"
    return "use the saved value, or start anew"
