"""A pack into a store that exists takes the store's rules for the options that the command line left out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from bucketline.errors import UsageError
from bucketline.ingest.other_options import CAPTION_OPTIONS, recorded_rules, shown_option, stored_options
from bucketline.ingest.packing.target import newest_whole
from bucketline.store.folder import LocalFolder
from bucketline.typed_json import TypedJsonError, decode_field

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
    names = config.left_out - {*(CAPTION_OPTIONS if config.recaption else ())}
    stored = {name: value for name, value in stored_options(manifest).items() if name in names}
    try:
        return replace(config, **{name: decode_field(type(config), name, value, name) for name, value in stored.items()})
    except (TypedJsonError, UsageError):
        return config  # of a store that another program wrote: `refuse_other_options` names what differs


def changed_rules(before: PackConfig, after: PackConfig) -> list[str]:
    """Return the options that `with_stored_rules` has changed, as they are typed."""
    old, new = (_options(config) for config in (before, after))
    return [shown_option(name, value) for name, value in new.items() if old[name] != value]


def _options(config: PackConfig) -> dict[str, Json]:
    return {**recorded_rules(config, config.grid), "max_captions": config.max_captions}
