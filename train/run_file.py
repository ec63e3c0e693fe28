"""Run files: the options of a training run in TOML, by the sections of the help; presets are such files.

A file's values are those of the command line. They come from the folder of a run to be resumed, from files and from the command
line; each of these overrides those before it. Relative paths are relative to the current folder, also in a file; those of a run
that is resumed, to the folder in which it was started.
"""

from __future__ import annotations

import json
import re
import textwrap
import tomllib
from dataclasses import MISSING, dataclass, fields
from enum import StrEnum
from itertools import chain
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin, get_type_hints

from bucketline import coming_from
from bucketline.dtype_names import choice_of
from bucketline.errors import UsageError
from bucketline.files.run_marker import CONFIG
from bucketline.help_screen import ALONE, options_of, sections_of, suggestion
from bucketline.option_types import COMMAND_LINE_ONLY
from bucketline.option_value import OptionValue, as_option, value_fields
from bucketline.typed_json import TypedJsonError, as_toml, decode, encode

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from bucketline.help_screen import Option
    from bucketline.typed_json import Json
    from bucketline.typed_line import TypedLine

_PRESETS = Path(__file__).parent / "presets"
_SUFFIX = ".toml"
_WIDTH = 110
_INSTEAD = {"max_steps": "epochs", "epochs": "max_steps"}
"""Options of which one takes the place of the other."""
_NONE = "None"  # TOML has no value for it
PLACES = (
    *("store", "model", "model_config", "lora_from", "image_prompts", "cache"),
    *("service", "service_token", "service_certificate"),
)
"""Options that name files; a run's relative ones are of the folder in which it was started."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """The value of an option in a file, as TOML has it, and the place for messages: the file and its section."""

    value: object
    place: str


def preset_names() -> list[str]:
    """Return the names of the presets that come with the package."""
    return sorted(path.stem for path in _PRESETS.glob(f"*{_SUFFIX}"))


def read_run_file(given: str, commands: Collection[str] = ()) -> str:
    """Return the text of a preset, given by its name, or of a run file, given by its path.

    `commands`: other words that may have been meant.

    Raises:
        UsageError: if there is none; the message names those that exist, or the reason.
    """
    is_path = "/" in given or given.endswith(_SUFFIX)
    if not is_path and given not in preset_names():
        raise UsageError(
            f"there is no preset {given!r:.80}{suggestion(given, [*preset_names(), *commands])}; expected "
            f"{', '.join(preset_names())}, or the path of a {_SUFFIX} file"
            + (f"; the commands are {', '.join(commands)}" if commands else "")
        )
    path = Path(given) if is_path else _PRESETS / f"{given}{_SUFFIX}"
    try:
        return path.read_text(encoding="utf-8-sig")  # editors of Windows begin a file with a mark
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UsageError(f"the run file {path} cannot be read: {reason}") from error


def resumed_run(line: TypedLine) -> str | None:
    """Return the folder of the run that a command line resumes by its name; None if it names none.

    Raises:
        UsageError: if it names another folder as the output.
    """
    run = next(filter(None, reversed(line.values("resume"))), None)
    for other in line.values("output_dir"):
        if run is not None and Path(other) != Path(run):
            raise UsageError(
                f"--resume is {run} and --output-dir is {other}; a run continues in its folder: leave one of them out"
            )
    return run


def values_of_file(options: type, given: str, commands: Collection[str] = ()) -> dict[str, Value]:
    """Return what a run file or a preset gives, by the names of the fields.

    Raises:
        UsageError: if it is not there or not TOML, or has an option or a section that is unknown, misplaced or of another type.
    """
    try:
        document = tomllib.loads(read_run_file(given, commands))
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise UsageError(f"{given} is not TOML: {error}") from error
    known = {one.field: one for one in options_of(options)}
    sections = [*filter(None, sections_of(options))]
    found: dict[str, Value] = {}
    for top, entries in document.items():
        if isinstance(entries, dict) and top not in sections:
            nearest = suggestion(top, sections)
            raise UsageError(
                f"{given} has the section [{top:.80}], which does not exist{nearest}; expected {', '.join(sections)}"
            )
        section = top if isinstance(entries, dict) else None
        for name, value in (entries if isinstance(entries, dict) else {top: entries}).items():
            option = _known_option(options, known, given, section, name)
            place = f"{given}, [{option.section}]"
            if option.field in found:
                raise UsageError(f"{place} has {option.field} twice")
            found[option.field] = Value(value=_checked(options, option.field, value, f"{place} {option.field}"), place=place)
    return found


def _known_option(options: type, known: Mapping[str, Option], given: str, section: str | None, name: str) -> Option:
    """Return the option that a name in a file means.

    Raises:
        UsageError: if there is none, or it belongs to another section, or is for the command line only.
    """
    place = given if section is None else f"{given}, [{section}]"
    if (option := known.get(name.replace("-", "_"))) is None:
        spelt = {one.replace("_", "-"): found for one, found in known.items()}
        nearest = suggestion(name, [*spelt])
        near = next((found for one, found in spelt.items() if f"'{one}'" in nearest), None)
        answer = f"; did you mean {near.field!r}, of [{near.section}]?" if near else ""
        elsewhere = coming_from.answer("train", name, [as_option(one) for one in known])
        answer = f"; {elsewhere}" if elsewhere else answer
        raise UsageError(f"{place} has {name!r:.80}, which is not an option{answer}")
    if section is not None and option.section != section:
        raise UsageError(f"{place} has {name}, which belongs to [{option.section}]")
    if _is_command_line_only(options, option.field):
        raise UsageError(f"{place} has {name}, which is for the command line only")
    return option


def _is_command_line_only(options: type, name: str) -> bool:
    return any(one.name == name and COMMAND_LINE_ONLY.items() <= one.metadata.items() for one in fields(options))


def _checked(options: type, name: str, value: object, item: str) -> object:
    """Return the value of an option in a file, whose type fits: of one that may be given several times, as a list.

    Raises:
        UsageError: if it does not fit.
    """
    hint: Any = get_type_hints(options)[name]
    if get_origin(hint) is tuple and not isinstance(value, list):
        value = [value]
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if value == _NONE and NoneType in get_args(hint):
        return value
    kinds = (hint, *get_args(hint))
    is_alone = value is True and any(one.name == name and ALONE in one.metadata for one in fields(options))
    if (own := value_fields(options).get(name)) is not None:  # it is spelt as on the command line, which checks it
        if not (is_alone or is_number or isinstance(value, str)):
            raise UsageError(f"{item} is {value!r:.80}, expected {own.expected()}")
        return value if is_alone else str(value)
    is_of_several = len({*get_args(hint)} - {NoneType}) > 1  # of which `decode` takes any value
    if is_of_several and isinstance(value, bool) and not is_alone:
        expected = ", ".join(chain.from_iterable(map(_choices, kinds)))
        raise UsageError(f"{item} is {value}, expected {expected or 'another value, or leave it out'}")
    if isinstance(value, str) and (found := choice_of(value, [*chain.from_iterable(map(_choices, kinds))])) is not None:
        return found
    try:
        decode(hint, value, item)
    except TypedJsonError as error:
        raise UsageError(str(error)) from error
    return value


def _choices(kind: Any) -> Sequence[str]:  # noqa: ANN401 - a type
    """Return the words that a type takes; none if it is not a choice."""
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        return [*kind]
    return get_args(kind) if get_origin(kind) is Literal else ()


def values_of_run(options: type, folder: str) -> dict[str, Value]:
    """Return the options with which a run was started.

    Raises:
        UsageError: if the folder is not a run's.
    """
    path = Path(folder) / CONFIG
    try:
        values: dict[str, Json] = {**json.loads(path.read_bytes())["config"]}
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UsageError(
            f"there is no run in {folder} to resume: {path} cannot be read ({reason}); name the folder of one, "
            "or leave out --resume to begin one there"
        ) from error
    values = from_its_start(values, Path(folder))
    known = {one.name: one for one in fields(options) if not _is_command_line_only(options, one.name)}
    return {
        name: Value(value=_NONE if value is None else value, place=str(path))
        for name, value in values.items()
        if name in known and (value is not None or known[name].default is not None) and name != "output_dir"
    }


def from_its_start(recorded: Mapping[str, Json], place: Path) -> dict[str, Json]:
    """Return the options that a run has recorded, with relative paths from the folder in which it was started.

    `place`: the run's folder, or one within it.
    """
    from bucketline.loader.recorded_run import from_start, started_in

    values, start = dict(recorded), started_in(place, recorded.get("output_dir"))
    for name in PLACES:
        match values.get(name):
            case str(word):
                values[name] = from_start(word, start)
            case list(words):
                values[name] = [from_start(str(word), start) for word in words]
    return values


def words_of_values(values: Mapping[str, Value]) -> list[str]:
    """Return options as a command line spells them.

    >>> words_of_values({"seed": Value(value=3, place=""), "verify": Value(value=False, place="")})
    ['--seed=3', '--no-verify']
    """
    words = []
    for name, one in values.items():
        spelt = name.replace("_", "-")
        if isinstance(one.value, bool):
            words.append(f"--{spelt}" if one.value else f"--no-{spelt}")
        else:
            words += [f"--{spelt}={each}" for each in (one.value if isinstance(one.value, list) else [one.value])]
    return words


def from_files(line: TypedLine, commands: Collection[str] = ()) -> dict[str, Value]:
    """Return what a resumed run and the files of a command line give, without what the command line itself gives.

    Raises:
        UsageError: if one cannot be read, or has an option that is unknown or of another type.
    """
    run = resumed_run(line)
    values = {} if run is None else values_of_run(line.command, run)
    for given in line.by_place:
        own = values_of_file(line.command, given, commands)
        values = _without(values, own) | own
    values |= {} if run is None else {"output_dir": Value(value=run, place=f"--resume {run}")}
    return _without(values, line.given)


def _without(values: Mapping[str, Value], later: Collection[str]) -> dict[str, Value]:
    """Return the values of options that those given later do not override."""
    replaced = {*later, *(_INSTEAD[name] for name in later if name in _INSTEAD)}
    return {name: value for name, value in values.items() if name not in replaced}


def with_places(error: UsageError, values: Mapping[str, Value]) -> UsageError:
    """Return a refusal with the places of the options that it names, where files have given them."""
    named = [name for word in re.findall(r"--([a-z][a-z-]*)", str(error)) if (name := word.replace("-", "_")) in values]
    places = [f"--{name.replace('_', '-')} is set in {values[name].place}" for name in dict.fromkeys(named)]
    return UsageError(f"{error} ({'; '.join(places)})") if places else error


def config_as_json(config: Any) -> dict[str, Json]:  # noqa: ANN401 - a TrainConfig, whose file imports this one
    """Return the configuration as JSON values, as `config.json` and checkpoints record it."""
    from bucketline.loader.mixture import redacted_store  # imports numpy, which a refused option does not wait for

    values = {field.name: getattr(config, field.name) for field in fields(config)}
    values["store"] = [redacted_store(str(path)) for path in config.store]
    return {name: str(value) if isinstance(value, Path | OptionValue) else encode(value) for name, value in values.items()}


def as_run_file(config: object, title: str, given: Collection[str] = (), derived: Mapping[str, str] | None = None) -> str:
    """Return a run file of these options: each with a line of explanation, those that have their default commented out.

    `given`: fields to set even so; `derived`: the reason for the value of a field that was not given.
    """
    options: type = type(config)
    defaults = {one.name: one.default for one in fields(config)}  # type: ignore[arg-type]
    lines = [f"# {title}", "# bucketline train FILE runs it; options on the command line override it."]
    for section, about in sections_of(options).items():
        own = [one for one in options_of(options) if one.section == section and not _is_command_line_only(options, one.field)]
        lines += ["", f"[{section}]  # {about}"] if own else []
        for one in own:
            value, default = getattr(config, one.field), defaults[one.field]
            is_set = value != default or one.field in given
            reason = (derived or {}).get(one.field)
            lines += [f"# {line}" for text in (one.text, reason) for line in textwrap.wrap(text or "", _WIDTH)]
            lines.append(f"{'' if is_set else '# '}{one.field} = {as_toml(value if is_set or default is MISSING else default)}")
    return "\n".join(lines) + "\n"
