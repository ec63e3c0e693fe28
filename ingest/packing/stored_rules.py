"""A pack into a store that exists takes the store's rules for the options that the command line left out."""

from __future__ import annotations

from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bucketline.errors import UsageError
from bucketline.ingest.images.bucket_grid import parse_grid
from bucketline.ingest.other_options import recorded_options
from bucketline.ingest.packing.target import newest_whole
from bucketline.pack_options import CAPTION_OPTIONS, pack_options
from bucketline.store.folder import LocalFolder

if TYPE_CHECKING:
    from bucketline.ingest.config import PackConfig
    from bucketline.typed_json import Json


def with_stored_rules(config: PackConfig) -> PackConfig:
    """Return the options with those of the store in place of what was `left_out`; as they are if there is no store.

    With `--recaption` the captions' options are as given: these are what it changes.
    """
    if not config.left_out:
        return config
    if isinstance(config.place, Path):
        manifest = newest_whole(LocalFolder(config.store))
    else:
        objects = config.objects(config.place)
        objects.refuse_read_only()
        manifest = newest_whole(objects)
    if manifest is None or "import" in manifest.rules:
        return config
    stored = {
        option.removeprefix("--").replace("-", "_"): value
        for option, value in pack_options(recorded_options(manifest)).items()
        if not (config.recaption and option in CAPTION_OPTIONS)
    }
    if not _is_grid(stored.get("grid")):  # of a store that another program wrote
        stored.pop("grid", None)
    return replace(
        config, **{name: _as(getattr(config, name), value) for name, value in stored.items() if name in config.left_out}
    )


def changed_rules(before: PackConfig, after: PackConfig) -> dict[str, Json]:
    """Return the options that `with_stored_rules` has changed, by name."""
    names = sorted(before.left_out)
    pairs = {name: (getattr(before, name), getattr(after, name)) for name in names}
    found = {name: _plain(new) for name, (old, new) in pairs.items() if old != new}
    return {f"--{name.replace('_', '-')}": None if value is False else value for name, value in found.items()}


def _is_grid(text: Json) -> bool:
    try:
        parse_grid(str(text), step_px=1, align_px=1, token_px=1)
    except UsageError:
        return False
    return True


def _as(default: Any, value: Json) -> Any:  # noqa: ANN401 - the value of any option
    """Return a recorded value as the option has it, whose default is given."""
    if isinstance(default, Enum):
        return type(default)(value)
    if isinstance(default, bool):
        return bool(value)
    if isinstance(default, tuple):
        return tuple(value) if isinstance(value, list) else ()
    if default is None or value is None:
        return value if default is None else type(default)()
    return type(default)(value)


def _plain(value: Any) -> Json:  # noqa: ANN401 - the value of any option
    return str(value) if isinstance(value, Enum) else list(value) if isinstance(value, tuple) else value
