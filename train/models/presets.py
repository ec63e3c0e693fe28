"""Presets: a family's default values for options that are not on the command line."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bucketline.errors import UsageError
from bucketline.train.models import FAMILIES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from bucketline.train.models import ModelFamily

OPTION = "--preset"
SIZE_OF_BATCH = "--batch-"  # prefix of the options that set it; setting one excludes the others

PRESETS: Mapping[str, tuple[type[ModelFamily], Mapping[str, object]]] = {
    family.name + end: (family, values) for family in FAMILIES for end, values in family.presets.items()
}
"""Family and values of each preset, by name."""


def expand(arguments: Sequence[str]) -> list[str]:
    """Return the arguments with the preset's values prepended for all options that are not given.

    Raises:
        UsageError: if the preset is unknown.
    """
    name = _named(arguments)
    if name is None:
        return list(arguments)
    if name not in PRESETS:
        raise UsageError(f"{OPTION} is {name!r:.80}, expected one of {', '.join(PRESETS)}")
    given = {argument.partition("=")[0].replace("_", "-") for argument in arguments}
    has_size = any(option.startswith(SIZE_OF_BATCH) for option in given)
    options: list[str] = []
    for field, value in PRESETS[name][1].items():
        option = "--" + field.replace("_", "-")
        if option not in given and not (has_size and option.startswith(SIZE_OF_BATCH)):
            options += [option, str(value)]
    return [*options, *arguments]


def refuse_other_family(preset: str | None, family: ModelFamily) -> None:
    """Reject a preset of another model family.

    Raises:
        UsageError: if they differ; the message names both.
    """
    if preset is not None and PRESETS[preset][0] is not type(family):
        raise UsageError(f"{OPTION} is {preset}, and the model is a {family.name}; expected {' or '.join(_of(family))}")


def _of(family: ModelFamily) -> list[str]:
    return [name for name, (kind, _) in PRESETS.items() if kind is type(family)]


def _named(arguments: Sequence[str]) -> str | None:
    found = None
    for n, argument in enumerate(arguments):
        if argument == OPTION and n + 1 < len(arguments):
            found = arguments[n + 1]
        elif argument.startswith(OPTION + "="):
            found = argument.removeprefix(OPTION + "=")
    return None if found == "None" else found
