"""Presets: options of a training run in a TOML file, one of those in `presets/` or a user's own."""

from __future__ import annotations

import argparse
import tomllib
from enum import Enum
from itertools import chain
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, get_args, get_origin

from bucketline.dtype_names import choice_of
from bucketline.errors import UsageError
from bucketline.help_screen import suggestion
from bucketline.option_value import is_option_value
from bucketline.train.option_names import ELSEWHERE

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_FOLDER = Path(__file__).parent / "presets"
_SUFFIX = ".toml"
_INSTEAD = {"max_steps": ("--epochs",), "epochs": ("--max-steps",)}
"""Options on the command line that take the place of another one in a file."""


def preset_names() -> list[str]:
    """Return the names of the presets that come with the package."""
    return sorted(path.stem for path in _FOLDER.glob(f"*{_SUFFIX}"))


def read_preset(given: str) -> str:
    """Return the text of a preset, given by its name or as the path of a TOML file.

    Raises:
        UsageError: if there is none; the message names those that exist, or the reason.
    """
    is_path = "/" in given or given.endswith(_SUFFIX)
    if not is_path and given not in preset_names():
        raise UsageError(
            f"there is no preset {given!r:.80}{suggestion(given, preset_names())}; expected {', '.join(preset_names())}, "
            f"or the path of a {_SUFFIX} file"
        )
    path = Path(given) if is_path else _FOLDER / f"{given}{_SUFFIX}"
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UsageError(f"the preset {path} cannot be read: {reason}") from error


def preset_options(arguments: Sequence[str], types: Mapping[str, Any]) -> list[str]:
    """Return the options of a command line's `--preset`, without those that it gives itself.

    `types`: the type of each option's field, without annotations.

    Raises:
        UsageError: if there is no such preset, or it has an option that is unknown or of another type.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--preset", nargs="?", const="", default="None")
    if (preset := parser.parse_known_args(arguments)[0].preset) == "None":
        return []
    try:
        values = tomllib.loads(read_preset(preset))
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"the preset {preset} is not TOML: {error}") from error
    words = {word.partition("=")[0].replace("_", "-") for word in arguments}
    options: list[str] = []
    for name, value in values.items():
        option, field = "--" + name.replace("_", "-"), name.replace("-", "_")
        if field not in types or field == "preset":
            spelt = [one.replace("_", "-") for one in types if one != "preset"]
            answer = f"; {ELSEWHERE[option]}" if option in ELSEWHERE else suggestion(name, spelt)
            raise UsageError(f"the preset {preset} has {name!r:.80}, which is not an option{answer}")
        many = value if isinstance(value, list) else [value]
        is_one = get_origin(types[field]) is not tuple
        kinds = _alternatives(types[field] if is_one else get_args(types[field])[0])
        if (is_one and isinstance(value, list)) or not all(any(_fits(one, kind) for kind in kinds) for one in many):
            expected = " or ".join(filter(None, map(_in_words, kinds))) + ("" if is_one else ", or a list of such")
            raise UsageError(f"the preset {preset} has {name} = {value!r:.80}, expected {expected}")
        no = f"--no-{option[2:]}"
        if not words & {option, no, *_INSTEAD.get(field, ())}:
            options += [option if value else no] if isinstance(value, bool) else [f"{option}={one}" for one in many]
    return options


def _alternatives(kind: Any) -> tuple[Any, ...]:  # noqa: ANN401 - any type of a field
    """Return the types of a union, the values of an enumeration, or the type itself."""
    if isinstance(kind, type) and issubclass(kind, Enum):
        return tuple(str(one.value) for one in kind)
    found = get_args(kind) or (kind,)
    return found if found == (kind,) else tuple(chain.from_iterable(map(_alternatives, found)))


def _fits(value: object, kind: Any) -> bool:  # noqa: ANN401 - a type, or a value of an enumeration
    """Return whether the command line would take a value of TOML for one of this kind."""
    if is_option_value(kind):
        return isinstance(value, int | float | str)  # what it spells is checked with the others
    if isinstance(kind, str):
        return isinstance(value, str) and choice_of(value, (kind,)) is not None
    if kind is bool or isinstance(value, bool) or not isinstance(value, int | float | str):
        return kind is bool and isinstance(value, bool)
    if kind is NoneType:
        return value == "None"
    try:
        kind(str(value))
    except ValueError:
        return False
    return True


def _in_words(kind: Any) -> str:  # noqa: ANN401 - a type, or a value of an enumeration
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", Path: "a path", NoneType: '"None"'}
    return f'"{kind}"' if isinstance(kind, str) else words[kind]
