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
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bucketline import coming_from
from bucketline.errors import UsageError
from bucketline.files.run_marker import CONFIG
from bucketline.option_value import OptionValue
from bucketline.options import COMMAND_LINE_ONLY, options_of, sections_of, suggestion
from bucketline.typed_json import as_toml, encode

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from cyclopts import App
    from cyclopts.argument import ArgumentCollection

    from bucketline.options import Option
    from bucketline.typed_json import Json

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
FITTED = ("recompute", "ema", "base", "offload_blocks")
"""Options that a run may choose by its memory: a resumed one has them as they were given, and chooses again with another."""


def preset_names() -> list[str]:
    """Return the names of the presets that come with the package."""
    return sorted(path.stem for path in _PRESETS.glob(f"*{_SUFFIX}"))


def read_run_file(given: str, commands: Collection[str] = ()) -> str:
    """Return the text of a preset, given by its name, or of a run file, given by its path.

    `commands`: other words that may have been meant.
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


def values_of_file(options: type, given: str, commands: Collection[str] = ()) -> dict[str, Any]:
    """Return what a run file or a preset gives, by the names of the fields."""
    try:
        document = tomllib.loads(read_run_file(given, commands))
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise UsageError(f"{given} is not TOML: {error}") from error
    known = {one.field: one for one in options_of(options)}
    sections = [*filter(None, sections_of(options))]
    found: dict[str, Any] = {}
    for top, entries in document.items():
        if isinstance(entries, dict) and top not in sections:
            raise UsageError(
                f"{given} has the section [{top:.80}], which does not exist{suggestion(top, sections)}; expected "
                f"{', '.join(sections)}"
            )
        section = top if isinstance(entries, dict) else None
        for name, value in (entries if isinstance(entries, dict) else {top: entries}).items():
            place = given if section is None else f"{given}, [{section}]"
            option = _known_option(options, known, place, section, name)
            if option.field in found:
                raise UsageError(f"{place} has {option.field} twice")
            if isinstance(value, bool) is not option.is_flag and (value is not True or option.alone is None):
                expected = option.metavar or "true or false"
                raise UsageError(f"{place} has {option.field} = {value!r:.80}, expected {expected}")
            found[option.field] = option.alone if value is True and not option.is_flag else value
    return found


def _known_option(options: type, known: Mapping[str, Option], place: str, section: str | None, name: str) -> Option:
    """Return the option that a name in a file means."""
    if (option := known.get(name.replace("-", "_"))) is None:
        elsewhere = coming_from.answer("train", name, [name for one in known.values() for name in one.names])
        answer = f"; {elsewhere}" if elsewhere else suggestion(name, [*known])
        raise UsageError(f"{place} has {name!r:.80}, which is not an option{answer}")
    if section is not None and option.section != section:
        raise UsageError(f"{place} has {name}, which belongs to [{option.section}]")
    if _is_command_line_only(options, option.field):
        raise UsageError(f"{place} has {name}, which is for the command line only")
    return option


def _is_command_line_only(options: type, name: str) -> bool:
    return any(one.name == name and COMMAND_LINE_ONLY.items() <= one.metadata.items() for one in fields(options))


def values_of_run(options: type, folder: str) -> dict[str, Any]:
    """Return the options with which a run was started."""
    path = Path(folder) / CONFIG
    try:
        document = json.loads(path.read_bytes())
        values: dict[str, Json] = {**document["config"], **document.get("given", {})}
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UsageError(
            f"there is no run in {folder} to resume: {path} cannot be read ({reason}); name the folder of one, "
            "or leave out --resume to begin one there"
        ) from error
    known = {one.field: one for one in options_of(options) if not _is_command_line_only(options, one.field)}
    return {
        name: _NONE if value is None else value
        for name, value in from_its_start(values, Path(folder)).items()
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Files:
    """What gives cyclopts the options that a command line does not: the run that it resumes, and its files.

    `commands`: other words that may have been meant by one that is not a preset. `places` is filled in: where an option is set.
    """

    options: type
    run: str | None
    commands: Collection[str] = ()
    places: dict[str, str] = field(default_factory=dict)

    def __call__(self, app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
        """Set the arguments that have no value yet."""
        from cyclopts.config import Dict

        words = {one.field_info.name: [token.value for token in one.tokens] for one in arguments if one.tokens}
        sources = [(str(Path(self.run) / CONFIG), values_of_run(self.options, self.run))] if self.run is not None else []
        sources += [(given, values_of_file(self.options, given, self.commands)) for given in words.get("files", ())]
        if self.run is not None:
            if other := next((one for one in words.get("output_dir", ()) if Path(one) != Path(self.run)), None):
                raise UsageError(
                    f"--resume is {self.run} and --output-dir is {other}; a run continues in its folder: leave one of them out"
                )
            sources.append((f"--resume {self.run}", {"output_dir": self.run}))
        given = {*words}
        for place, values in reversed(sources):
            own = {name: value for name, value in values.items() if name not in given and _INSTEAD.get(name) not in given}
            given |= own.keys()
            sections = {one.field: one.section for one in options_of(self.options)}
            self.places.update({name: f"{place}, [{sections[name]}]" for name in own})
            Dict({name: value for name, value in own.items() if value != []}, source=place)(app, commands, arguments)


def with_places(error: UsageError, places: Mapping[str, str]) -> UsageError:
    """Return a refusal with the places of the options that it names, where files have given them."""
    named = [name for word in re.findall(r"--([a-z][a-z-]*)", str(error)) if (name := word.replace("-", "_")) in places]
    shown = [f"--{name.replace('_', '-')} is set in {places[name]}" for name in dict.fromkeys(named)]
    return UsageError(f"{error} ({'; '.join(shown)})") if shown else error


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
