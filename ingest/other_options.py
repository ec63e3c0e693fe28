"""Compare a run's options and encoders with those that a store was made with, and name all that differ."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bucketline.errors import FingerprintError
from bucketline.pack_options import CAPTION_OPTIONS, FIELDS, pack_options, shown_option
from bucketline.typed_json import differences

if TYPE_CHECKING:
    from bucketline.ingest.config import PackConfig
    from bucketline.store.format.manifest import Manifest
    from bucketline.store.format.schema import Schema


def refuse_other_options(config: PackConfig, stored: Manifest, contents: Schema, *, with_captions: bool = True) -> None:
    """Check that a run makes what it adds to a store as the store was made; `--recaption` allows other caption rules.

    `with_captions`: also compare the caption rules, of which `contents` has the store's.
    """
    if isinstance(imported := stored.rules.get("import"), dict):
        raise FingerprintError(
            f"{config.store} was imported from a cache of {imported.get('kind')!s:.40}, and how its images were resized and "
            "cropped is not known; pack into a new store"
        )
    before, now = recorded_options(stored), recorded_options(contents)
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


def recorded_options(made: Schema | Manifest) -> dict[str, Any]:
    """Return what a store records that `pack_options` reads."""
    return {"encoders": made.encoders, "rules": made.rules, "max_captions": made.max_captions}
