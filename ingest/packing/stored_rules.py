"""A pack into a store that exists: it takes the store's rules for what the command line left out, and is refused by others."""

from __future__ import annotations

from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bucketline.errors import FingerprintError, UsageError
from bucketline.ingest.images.bucket_grid import parse_grid
from bucketline.ingest.packing.target import newest_whole
from bucketline.pack_options import CAPTION_OPTIONS, FIELDS, pack_options, shown_option
from bucketline.store.folder import LocalFolder
from bucketline.typed_json import differences

if TYPE_CHECKING:
    from bucketline.ingest.config import PackConfig
    from bucketline.store.format.manifest import Manifest
    from bucketline.store.format.schema import Schema
    from bucketline.typed_json import Json


def refuse_other_options(config: PackConfig, stored: Manifest, contents: Schema, *, with_captions: bool = True) -> None:
    """Check that a run makes what it adds to a store as the store was made; `--recaption` allows other caption rules.

    `with_captions`: also compare the caption rules, of which `contents` has the store's.
    """
    if isinstance(imported := stored.rules.get("import"), dict):
        raise FingerprintError(
            f"{config.store} was imported from a cache of {imported.get('kind')!s:.40}, and how its images were resized and "
            "cropped is not known; pack into a new store"
        )
    before, now = _recorded(stored), _recorded(contents)
    for made in () if not with_captions else (before, now) if config.recaption else (now,):
        made["rules"] = config.caption_rules.recorded(made["rules"])
    old, new = pack_options(before), pack_options(now)
    changed = {name: old.get(name) for name in {**old, **new} if old.get(name) != new.get(name)}
    named = {field for name in changed for field in FIELDS[name]}
    others = [
        f"  {field} = {one!s:.200}, this run has {other!s:.200}"
        for field, one, other in differences(before, now, "")
        if field not in named and not field.startswith("rules.captions")
    ]
    if changed or others:
        recaption = ", add --recaption to encode the captions again" if CAPTION_OPTIONS & changed.keys() else ""
        raise FingerprintError(
            f"{config.store} was made with other options than this run has:",
            *(
                f"  {shown_option(one, value)}, this run has {shown_option(one, new.get(one))}"
                for one, value in changed.items()
            ),
            *others,
            f"Leave these options out, so that the store's are taken, name its model{recaption}, or pack into a new store",
        )


def _recorded(made: Schema | Manifest) -> dict[str, Any]:
    return {"encoders": made.encoders, "rules": made.rules, "max_captions": made.max_captions}


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
        for option, value in pack_options(_recorded(manifest)).items()
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
