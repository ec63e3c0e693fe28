"""Presets: options of a training run in a TOML file, one of those in `presets/` or a user's own."""

from __future__ import annotations

import difflib
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

from bucketline.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

FOLDER = Path(__file__).parent / "presets"
SUFFIX = ".toml"
SIZES = frozenset({"batch_size", "batch_pixels", "batch_tokens"})  # only one of these may be set


def preset_names() -> list[str]:
    """Return the names of the presets that come with the package."""
    return sorted(path.stem for path in FOLDER.glob(f"*{SUFFIX}"))


def read_preset(given: str) -> str:
    """Return the text of a preset, given by its name or as the path of a TOML file.

    Raises:
        UsageError: if there is none; the message names those that exist, or the reason.
    """
    is_path = "/" in given or given.endswith(SUFFIX)
    if not is_path and given not in preset_names():
        raise UsageError(
            f"there is no preset {given!r:.80}{_nearest(given, preset_names())}; expected {', '.join(preset_names())}, "
            f"or the path of a {SUFFIX} file"
        )
    path = Path(given) if is_path else FOLDER / f"{given}{SUFFIX}"
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UsageError(f"the preset {path} cannot be read: {reason}") from error


def with_preset(arguments: Sequence[str], types: Mapping[str, str]) -> list[str]:
    """Return a command line with the options of its `--preset` in front, without those that it gives itself.

    `types`: the type of each option's field.

    Raises:
        UsageError: if there is no such preset, or it has an option that is unknown or of another type.
    """
    given = {_field(word) for word in arguments if word.startswith("--")}
    preset = _preset_of(arguments) if "preset" in given else "None"
    if preset == "None":
        return list(arguments)
    given |= {name.removeprefix("no_") for name in given}
    if given & SIZES:
        given |= SIZES
    return [*_options(preset, given, types), *arguments]


def _preset_of(arguments: Sequence[str]) -> str:
    """Return the last value of `--preset`, or an empty one."""
    found = ""
    for n, word in enumerate(arguments):
        if _field(word) == "preset":
            _, is_joined, value = word.partition("=")
            found = value if is_joined else "".join(arguments[n + 1 : n + 2])
    return found


def _options(preset: str, given: set[str], types: Mapping[str, str]) -> list[str]:
    try:
        values = tomllib.loads(read_preset(preset))
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"the preset {preset} is not TOML: {error}") from error
    options: list[str] = []
    for name, value in values.items():
        option, field = "--" + name.replace("_", "-"), name.replace("-", "_")
        if field not in types or field == "preset":
            spelt = [one.replace("_", "-") for one in types if one != "preset"]
            raise UsageError(f"the preset {preset} has {name!r:.80}, which is not an option{_nearest(name, spelt)}")
        many = value if isinstance(value, list) else [value]
        is_fine = isinstance(value, bool) == (types[field] == "bool") and isinstance(value, list) <= ("tuple" in types[field])
        if not is_fine or not all(isinstance(one, bool | int | float | str) for one in many):
            expected = {"bool": "true or false"}.get(types[field], "a value as on the command line")
            raise UsageError(f"the preset {preset} has {name} = {value!r:.80}, expected {expected}")
        if field in given:
            continue
        if isinstance(value, bool):
            options.append(option if value else f"--no-{option[2:]}")
        else:
            options += [f"{option}={one}" for one in many]
    return options


def _field(word: str) -> str:
    """Return the name of the field that an option sets.

    >>> _field("--batch-size=8")
    'batch_size'
    """
    return word.removeprefix("--").partition("=")[0].replace("-", "_") if word.startswith("--") else ""


def _nearest(name: str, known: Sequence[str]) -> str:
    found = difflib.get_close_matches(name.replace("_", "-"), known, n=1)
    return f"; did you mean {found[0]!r}?" if found else ""
