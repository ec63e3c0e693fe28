"""Map a saved dataset's splits to the store's: train stays train, validation becomes val, test is skipped unless requested."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bucketline.command_line import counted
from bucketline.errors import SourceError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

TRAIN, VAL = "train", "val"
_VAL = re.compile(r"(validation|valid|val|dev|eval|evaluation)([^a-z].*)?", re.IGNORECASE)
_TEST = re.compile(r"test(ing)?([^a-z].*)?", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitPlan:
    """How one split of a dataset is packed."""

    name: str  # in the dataset
    target: str | None  # train or val in the store; None if it is left out


def splits_in_words(plans: Sequence[SplitPlan], num_images: Mapping[str, int]) -> list[str]:
    """Describe how each split is packed, and what in a data set file would pack one that is left out."""
    taken = [f"{plan.name}={plan.target}" for plan in plans if plan.target is not None]
    words = []
    for plan in plans:
        what = f"split {plan.name} ({counted(num_images[plan.name], 'image')})"
        if plan.target is not None:
            words.append(f"{what} becomes {plan.target}")
        else:
            words.append(f"{what} is left out; to include it: {_in_file([*taken, f'{plan.name}={VAL}'])} (or ={TRAIN})")
    return words if [plan.name for plan in plans] != [""] else []


def _in_file(splits: Sequence[str]) -> str:
    return f"dataset_splits = {json.dumps(splits)} under [source] of a data set file"


def plan_splits(place: str, names: Sequence[str], asked: Sequence[str]) -> list[SplitPlan]:
    """Map each split to the store: the requested ones (`NAME`, `NAME=train`, `NAME=val`), else all but test.

    A test split requested without a target is held out, so that nobody trains on it by accident.

    Raises:
        SourceError: if a requested split does not exist, or no split is left.
    """
    wanted = {name: target for name, _, target in (one.partition("=") for one in asked)}
    if unknown := next((name for name in wanted if name not in names), None):
        raise SourceError(f"{place} has no split {unknown!r} (dataset_splits); it has {', '.join(names)}")
    plans = [SplitPlan(name=name, target=_target(name, wanted)) for name in names]
    if all(plan.target is None for plan in plans):
        raise SourceError(
            f"{place} has only the split {', '.join(names)}, which is left out by default: "
            f"pack it by {_in_file([f'{names[0]}={VAL}'])} (or ={TRAIN})"
        )
    return plans


def _target(name: str, wanted: dict[str, str]) -> str | None:
    usual = VAL if _VAL.fullmatch(name) or _TEST.fullmatch(name) else TRAIN
    if wanted:
        return wanted[name] or usual if name in wanted else None
    return None if _TEST.fullmatch(name) else usual
