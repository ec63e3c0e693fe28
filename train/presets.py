"""Presets: the values of a family, for all that the command line does not say."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bucketline.errors import UsageError
from bucketline.train.families import FAMILIES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from bucketline.train.families import Family

OPTION = "--preset"
SIZE_OF_BATCH = "--batch-"  # one way of giving it leaves no room for another

PRESETS: Mapping[str, tuple[type[Family], Mapping[str, object]]] = {
    family.name + end: (family, values) for family in FAMILIES for end, values in family.presets.items()
}
"""The family and its values, by name."""


def expand(arguments: Sequence[str]) -> list[str]:
    """Put those of a preset's options that are not given before those that are.

    Raises:
        UsageError: where there is no preset of that name.
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


def refuse_other_family(preset: str | None, family: Family) -> None:
    """Refuse the preset of another kind of model.

    Raises:
        UsageError: naming both.
    """
    if preset is not None and PRESETS[preset][0] is not type(family):
        raise UsageError(f"{OPTION} is {preset}, and the model is a {family.name}; expected {' or '.join(_of(family))}")


def _of(family: Family) -> list[str]:
    return [name for name, (kind, _) in PRESETS.items() if kind is type(family)]


def _named(arguments: Sequence[str]) -> str | None:
    found = None
    for n, argument in enumerate(arguments):
        if argument == OPTION and n + 1 < len(arguments):
            found = arguments[n + 1]
        elif argument.startswith(OPTION + "="):
            found = argument.removeprefix(OPTION + "=")
    return None if found == "None" else found
