"""Splits of a dataset and their rows.

They are mapped to the store's: train stays train, validation becomes val, test is skipped unless requested.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from bucketline.command_line import counted
from bucketline.errors import SourceError
from bucketline.ingest.sources.captions.caption_text import as_texts, stripped, unusable
from bucketline.ingest.sources.source import Listing, SourceItem, note_place

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


class SplitRow(NamedTuple):
    """A row of a dataset, without its image."""

    name: str | None  # of its image, if the dataset has it
    number: str  # in the id, if the name is not unique
    column: str | None  # of its caption
    caption: object
    place: str  # in messages
    at: tuple[int, ...]  # as of `SourceItem`


def add_rows(listing: Listing, seen: dict[str, str], plan: SplitPlan, rows: Sequence[SplitRow]) -> None:
    """Add the rows of a split to a listing, and their ids with their places to `seen`.

    Raises:
        SourceError: if a caption is not text, or an id was seen before.
    """
    counts = Counter(row.name for row in rows)
    for row in rows:
        captions = as_texts(row.caption)
        if captions is None:
            kind = type(row.caption).__name__
            raise SourceError(f"{row.place}: {row.column} is a {kind}, expected a string or a list of strings")
        own = row.name if row.name and counts[row.name] == 1 else row.number
        sample_id = f"{plan.name}/{own}" if plan.name else own
        note_place(seen, sample_id, row.place)
        if kept := stripped(captions):
            listing.captions_from[f"column {row.column}"] += 1
        error = unusable(f"the column {row.column}", kept)
        is_held_out = plan.target == VAL
        listing.items.append(SourceItem(id=sample_id, captions=kept, caption_error=error, held_out=is_held_out, at=row.at))


def image_column(place: str, images: Sequence[str], there: Sequence[str]) -> str:
    """Return the column of the images: the only one of `images`, or the one that is called so; `there` are all columns.

    Raises:
        SourceError: if there is no such column.
    """
    if "image" in images or len(images) == 1:
        return "image" if "image" in images else images[0]
    raise SourceError(
        f"{place}: expected one column of images, or one named image; found {', '.join(images) or 'none'} among "
        f"{', '.join(there)}"
    )


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

    A test split requested without a target is held out, so that nobody trains on it by accident. A dataset without splits is
    one, with an empty name.

    Raises:
        SourceError: if a requested split does not exist, or no split is left.
    """
    if asked and not any(names):
        raise SourceError(f"{place} has no splits, but dataset_splits has {asked[0]!r}")
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
