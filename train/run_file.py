"""Run files: the options of a training run in TOML; presets are such files.

A file's values are those of the command line. They come from the folder of a run to be resumed, from files and from the command
line; each of these overrides those before it. Sections are only for the reader.
"""

from __future__ import annotations

import tomllib
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bucketline import coming_from
from bucketline.errors import UsageError
from bucketline.files.paths import RUN_FILE, can_be_reached
from bucketline.option_value import OptionValue
from bucketline.options import COMMAND_LINE_ONLY, options_of, sections_of, suggestion
from bucketline.typed_json import as_toml, encode

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from cyclopts import App
    from cyclopts.argument import ArgumentCollection

    from bucketline.ingest.packing.packed_model import PackedModel
    from bucketline.typed_json import Json

_PRESETS = Path(__file__).parent / "presets"
_SUFFIX = ".toml"
_INSTEAD = {"max_steps": "epochs", "epochs": "max_steps"}
"""Options of which one takes the place of the other."""


def preset_names() -> list[str]:
    return sorted(path.stem for path in _PRESETS.glob(f"*{_SUFFIX}"))


def read_run_file(given: str, commands: Collection[str] = ()) -> str:
    """Return the text of a preset, by its name, or of a run file, by its path; `commands`: other words that may be meant."""
    is_path = "/" in given or given.endswith(_SUFFIX)
    if not is_path and given not in preset_names():
        if answer := coming_from.answer("train", given):
            raise UsageError(f"there is no preset {given!r:.80}: {answer}")
        raise UsageError(
            f"there is no preset {given!r:.80}{suggestion(given, [*preset_names(), *commands])}; expected "
            f"{', '.join(preset_names())}, or the path of a {_SUFFIX} file"
            + (f"; the commands are {', '.join(commands)}" if commands else "")
        )
    path = Path(given) if is_path else _PRESETS / f"{given}{_SUFFIX}"
    try:
        return path.read_text(encoding="utf-8-sig")  # editors of Windows begin a file with a mark
    except (OSError, ValueError) as error:
        raise UsageError(f"the run file {path} cannot be read: {error}") from error


def values_of_file(options: type, given: str, commands: Collection[str] = ()) -> dict[str, Any]:
    """Return what a run file or a preset gives, by the names of the fields."""
    try:
        document = tomllib.loads(read_run_file(given, commands))
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise UsageError(f"{given} is not TOML: {error}") from error
    known = {one.field for one in options_of(options)} - _command_line_only(options)
    found: dict[str, Any] = {}
    for top, entries in document.items():
        for name, value in (entries if isinstance(entries, dict) else {top: entries}).items():
            field = name.replace("-", "_")
            if field not in known:
                answer = coming_from.answer("train", name, [f"--{one.replace('_', '-')}" for one in known]) or ""
                if answer.startswith("here it is --"):  # as a file has it
                    answer = answer.replace("--", "", 1).replace("-", "_")
                raise UsageError(
                    f"{given} has {name!r:.80}, which is not an option of a file"
                    + (f"; {answer}" if answer else suggestion(name, sorted(known)))
                )
            if field in found:
                raise UsageError(f"{given} has {field} twice")
            found[field] = value
    return found


def _command_line_only(options: type) -> set[str]:
    return {one.name for one in fields(options) if COMMAND_LINE_ONLY.items() <= one.metadata.items()}


def files_of(options: type, run: str | None, commands: Collection[str] = ()) -> Callable[..., None]:
    """Return what gives cyclopts the options that a command line lacks: of the `run` to resume, of files, of the store."""

    def fill(app: App, names: tuple[str, ...], arguments: ArgumentCollection) -> None:
        from cyclopts.config import Dict

        words = {one.field_info.name: [token.value for token in one.tokens] for one in arguments if one.tokens}
        sources = [(one, values_of_file(options, one, commands)) for one in words.get("files", ())]
        if run is not None:
            path = Path(run) / RUN_FILE
            if not path.is_file():
                raise UsageError(f"there is no run in {run} to resume: it has no {RUN_FILE}; name the folder of a run")
            if other := next((one for one in words.get("output_dir", ()) if Path(one) != Path(run)), None):
                raise UsageError(
                    f"--resume is {run} and --output-dir is {other}; a run continues in its folder: leave one of them out"
                )
            sources = [(str(path), values_of_file(options, str(path))), *sources, ("--resume", {"output_dir": run})]
        if "model" not in {*words, *(name for _, values in sources for name in values)}:
            stores = words.get("store") or next((values["store"] for _, values in sources[::-1] if "store" in values), [])
            sources.insert(0, ("the store", _model_of_options([stores] if isinstance(stores, str) else stores)))
        given = {*words}
        for place, values in reversed(sources):
            own = {name: value for name, value in values.items() if name not in given and _INSTEAD.get(name) not in given}
            given |= own.keys()
            Dict({name: value for name, value in own.items() if value != []}, source=place)(app, names, arguments)

    return fill


def models_of(stores: Iterable[object]) -> dict[str, PackedModel]:
    """Return the models that stores were last packed with on this machine, by the stores that have noted it."""
    from bucketline.ingest.packing.packed_model import packed_model

    return {str(one): noted for one in stores if (noted := packed_model(Path(str(one)))) is not None}


def _model_of_options(stores: Sequence[str]) -> dict[str, Any]:
    """Return the options of the model that stores were packed with, for those that are not given."""
    from bucketline.loader.mixture import parse_stores  # imports numpy
    from bucketline.store.format.manifest import read_manifest

    places = [one.path for one in parse_stores(tuple(stores), "--store")]
    found = models_of(places)
    if not found:
        for place in places:
            if isinstance(place, Path):
                read_manifest(place)  # what is not a store is said before the model is asked for
        return {}
    store, noted = next(iter(found.items()))
    if other := next((name for name, one in found.items() if one != noted), None):
        packed = f"{store} was packed with {noted.model}, {other} with {found[other].model}"
        raise UsageError(f"{packed}; give --model MODEL")
    if not can_be_reached(noted.model):
        raise UsageError(f"{store} was packed with {noted.model}, which is no folder or file here; give --model MODEL")
    return {"model": noted.model} | ({"model_config": noted.model_config} if noted.model_config else {})


def config_as_json(config: Any) -> dict[str, Json]:  # noqa: ANN401 - a TrainConfig, whose file imports this one
    """Return the configuration as JSON values, as `config.json` and checkpoints record it."""
    from bucketline.loader.mixture import redacted_store  # imports numpy, which a refused option does not wait for

    values = {field.name: getattr(config, field.name) for field in fields(config)}
    values["store"] = [redacted_store(str(path)) for path in config.store]
    return {name: str(value) if isinstance(value, Path | OptionValue) else encode(value) for name, value in values.items()}


def as_run_file(config: object, title: str) -> str:
    """Return a run file of the options that do not have their default."""
    options: type = type(config)
    defaults = {one.name: one.default for one in fields(config)}  # type: ignore[arg-type]
    lines = [f"# {title}", "# bucketline train FILE runs it; options on the command line override it."]
    for section in sections_of(options):
        names = [one.field for one in options_of(options) if one.section == section]
        given = {name: getattr(config, name) for name in names if name not in _command_line_only(options)}
        own = [f"{name} = {as_toml(value)}" for name, value in given.items() if value != defaults[name]]
        lines += ["", f"[{section}]", *own] if own else []
    return "\n".join(lines) + "\n"
