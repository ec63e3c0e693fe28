"""The options that a store keeps: recorded as its manifest's `rules`, compared with a run's, and named as they are typed."""

from __future__ import annotations

import shlex
from dataclasses import fields
from typing import TYPE_CHECKING

from bucketline.dtype_names import dtype_name
from bucketline.errors import FingerprintError
from bucketline.files.paths import redacted
from bucketline.ingest.config import RulesOptions
from bucketline.ingest.images.crop import RESAMPLING, parse_background
from bucketline.options import ONLY_IN_FILE
from bucketline.typed_json import as_toml, differences, encode

if TYPE_CHECKING:
    from collections.abc import Mapping

    from bucketline.ingest.config import PackConfig
    from bucketline.store.format.manifest import Manifest
    from bucketline.typed_json import Json

CAPTION_OPTIONS = ("caption_template", "shuffle_tags", "caption_per")
STORED_OPTIONS = (*(one.name for one in fields(RulesOptions)), "encode_dtype", *CAPTION_OPTIONS)
"""The fields of the options that a store keeps: `max_captions` as the manifest's own field, the others in its `rules`."""
_IN_FILE_ONLY = {one.name for one in fields(RulesOptions) if one.metadata == ONLY_IN_FILE}


def recorded_rules(config: PackConfig, grid: str | None) -> dict[str, Json]:
    """Return the rules of a run as a manifest records them; `grid` is the name of its grid."""
    rules: dict[str, Json] = {name: encode(getattr(config, name)) for name in STORED_OPTIONS if name != "max_captions"}
    return {
        **rules,
        "grid": grid,
        "crop": config.crop.value,
        "resampling": RESAMPLING,
        "background": parse_background(config.background),
        "max_crop": float(config.max_crop),
        "max_upscale": None if config.max_upscale is None else float(config.max_upscale),
        "val_fraction": str(config.held_out),
        "text_dtype": None if config.text_dtype == config.dtype else config.text_dtype,
        **config.caption_rules.as_json(),
    }


def stored_options(manifest: Manifest) -> dict[str, Json]:
    return {**manifest.rules, "max_captions": manifest.max_captions}


def refuse_other_options(
    config: PackConfig, stored: Manifest, encoders: Mapping[str, Json], rules: Mapping[str, Json] | None = None
) -> None:
    """Check that a run adds to a store what the store is made of, by its encoders and `rules`; without these, by its encoders.

    `--recaption` allows other caption rules.
    """
    if isinstance(imported := stored.rules.get("import"), dict):
        raise FingerprintError(
            f"{config.store} was imported from a cache of {imported.get('kind')!s:.40}, and how its images were resized and "
            "cropped is not known; pack into a new store"
        )
    before = stored_options(stored)
    now = before if rules is None else {**rules, "max_captions": config.max_captions}
    allowed = CAPTION_OPTIONS if config.recaption else ()
    shown = {name: (shown_option(name, before.get(name)), shown_option(name, now.get(name))) for name in {**now, **before}}
    changed = {name: pair for name, pair in shown.items() if pair[0] != pair[1] and name not in allowed}
    others = [
        f"  {field} = {one!s:.200}, this run has {other!s:.200}"
        for field, one, other in differences(stored.encoders, dict(encoders), "encoders")
    ]
    steps = ["leave these options out, so that the store's are taken"] if changed else []
    steps += ["add --recaption to encode the captions again"] if {*CAPTION_OPTIONS} & {*changed} else []
    steps += [f"name the store's model in place of {redacted(config.model)}"] if others else []
    if steps:
        advice = f"{', '.join(steps)}, or pack into a new store"
        raise FingerprintError(
            f"{config.store} was made with other options than this run has:",
            *(f"  {one}, this run has {other}" for one, other in changed.values()),
            *others,
            advice[0].upper() + advice[1:],
        )


def shown_option(name: str, value: Json) -> str:
    """Return an option with its value as it is typed, or as a data set file has it.

    >>> shown_option("crop", "random"), shown_option("flip", False), shown_option("background", "#ffffff")
    ('--crop random', 'no --flip', 'background = "#ffffff"')
    """
    is_set = value is not None and value is not False and value != []
    if name in _IN_FILE_ONLY:
        return f"{name} = {as_toml(value)}" if is_set else f"no {name}"
    option = f"--{name.replace('_', '-')}"
    if value is True or not is_set:
        return option if is_set else f"no {option}"
    words = map(str, value if isinstance(value, list) else [value])
    return shlex.join(word for one in words for word in (option, dtype_name(one) if name.endswith("dtype") else one))
