"""Compare a run's options and encoders with those that a store was made with; name all that differ, and the way back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bucketline.errors import FingerprintError
from bucketline.pack_options import CAPTION_OPTIONS, FIELDS, IN_FILE_ONLY, pack_options, shown_option
from bucketline.typed_json import differences, is_given

if TYPE_CHECKING:
    from bucketline.ingest.config import PackConfig
    from bucketline.store.format.manifest import Manifest
    from bucketline.store.format.schema import Schema
    from bucketline.typed_json import Json

_CAPTIONS = "rules.captions"
_ENCODERS = {"encoders.vae": "VAE", "encoders.text_encoder": "text encoder"}


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
    found = [one for one in differences(before, now, "") if not one[0].startswith(_CAPTIONS)]
    for field, _, value in found:
        if field.startswith("rules.") and not is_given(before, field):
            raise FingerprintError(f"the store does not record its {field}, this run has {value!s:.200}; pack into a new store")
    old, new = pack_options(before), pack_options(now)
    changed = {name: old.get(name) for name in {**old, **new} if old.get(name) != new.get(name)}
    others = [one for one in found if not any(one[0] in FIELDS[name] for name in changed)]
    of_model = [one for one in others if one[0].startswith(tuple(f"{name}." for name in _ENCODERS))]
    if of_model and "model" in config.left_out and not changed:
        field, stored_value, value = of_model[0]
        raise FingerprintError(
            f"{config.model}, the model of the last pack into {config.store}, is not the one that it was made with "
            f"({field} = {stored_value!s:.200}, this run has {value!s:.200}); "
            "name that one by --model MODEL, or pack into a new store"
        )
    if changed or others:
        lines = [f"{config.store} was made with other options than this run has:"]
        lines += [
            f"  {shown_option(name, value)}, this run has {shown_option(name, new.get(name))}"
            for name, value in changed.items()
        ]
        lines += [f"  {field} = {stored_value!s:.200}, this run has {value!s:.200}" for field, stored_value, value in others]
        raise FingerprintError(*lines, *_way_back(changed, others, is_left_out=bool(config.left_out)))


def _recorded(made: Schema) -> dict[str, Any]:
    return {"encoders": made.encoders, "rules": made.rules, "max_captions": made.max_captions}


def _way_back(changed: dict[str, Json], others: list[tuple[str, Json, Json]], *, is_left_out: bool) -> list[str]:
    """Return the lines that say what to do. `is_left_out`: what the options leave out is the store's."""
    encoders = [what for prefix, what in _ENCODERS.items() if any(field.startswith(f"{prefix}.") for field, _, _ in others)]
    left_out = [name for name, value in changed.items() if value is None or is_left_out]
    why = ", so that the store's are taken" if is_left_out else ""
    others_of_store = {name: value for name, value in changed.items() if name not in left_out}
    added = [shown_option(name, value) for name, value in others_of_store.items()]
    steps = []
    if encoders:
        steps.append(f"name the model that the store was made with (no option changes the {' or the '.join(encoders)})")
    steps += [f"leave out {' '.join(map(_name, left_out))}{why}"] if left_out else []
    steps += ["add the options below"] if added else []
    if CAPTION_OPTIONS & changed.keys():
        steps.append("or add --recaption to encode the captions again (the stored latents are kept)")
    sentence = ", ".join([*steps, "or pack into a new store"])
    return [f"{sentence[0].upper()}{sentence[1:]}", *([f"  {' '.join(added)}"] if added else [])]


def _name(option: str) -> str:
    return option.removeprefix("--").replace("-", "_") if option in IN_FILE_ONLY else option
