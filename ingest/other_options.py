"""Compare a run's options and encoders with those that a store was made with; name all that differ, and the way back."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from bucketline.errors import FingerprintError
from bucketline.store.format.pack_options import CAPTION_OPTIONS, as_arguments, fields_of, pack_options
from bucketline.typed_json import differences, is_given

if TYPE_CHECKING:
    from bucketline.ingest.config import PackConfig
    from bucketline.store.format.manifest import Manifest
    from bucketline.store.format.pack_options import Values
    from bucketline.store.write.publish import Contents
    from bucketline.typed_json import Json

_CAPTIONS = "rules.captions"
_ENCODERS = {"encoders.vae": "VAE", "encoders.text_encoder": "text encoder"}


def refuse_other_options(config: PackConfig, stored: Manifest, contents: Contents) -> None:
    """Check that a run makes what it adds to a store as the store was made; `--recaption` allows other caption rules.

    Raises:
        FingerprintError: if anything differs; the message has all that does, and the options that the store was made with.
    """
    if isinstance(imported := stored.rules.get("import"), dict):
        raise FingerprintError(
            f"{config.store} was imported from a cache of {imported.get('kind')!s:.40}, and how its images were resized and "
            "cropped is not known; pack into a new store"
        )
    rules = config.caption_rules.recorded(stored.rules) if config.recaption else stored.rules
    before: dict[str, Json] = {"encoders": stored.encoders, "rules": rules, "max_captions": stored.max_captions}
    rules = config.caption_rules.recorded(contents.rules)
    now: dict[str, Json] = {"encoders": contents.encoders, "rules": rules, "max_captions": contents.max_captions}
    found = [one for one in differences(before, now, "") if not one[0].startswith(_CAPTIONS)]
    for field, _, value in found:
        if field.startswith("rules.") and not is_given(before, field):
            raise FingerprintError(
                f"the store does not record its {field}, this run has {value!s:.200}: it was made by an earlier version of "
                "bucketline, which packed differently; pack into a new store"
            )
    old, new = pack_options(before), pack_options(now)
    changed = [name for name in {**old, **new} if old.get(name, ()) != new.get(name, ())]
    told = {field for name in changed for field in fields_of(name)}
    others = [one for one in found if one[0] not in told]
    if changed or others:
        lines = [f"{config.store} was made with other options than this run has:"]
        lines += [f"  {_shown(name, old)}, this run has {_shown(name, new)}" for name in changed]
        lines += [f"  {field} = {stored_value!s:.200}, this run has {value!s:.200}" for field, stored_value, value in others]
        raise FingerprintError(*lines, *_way_back({name: old.get(name, ()) for name in changed}, others))


def _shown(name: str, options: dict[str, Values]) -> str:
    arguments = as_arguments({name: options.get(name, ())})
    return shlex.join(arguments) if arguments else f"no {name}"


def _way_back(changed: dict[str, Values], others: list[tuple[str, Json, Json]]) -> list[str]:
    """Return the lines that say what to do."""
    encoders = [what for prefix, what in _ENCODERS.items() if any(field.startswith(f"{prefix}.") for field, _, _ in others)]
    left_out, added = [name for name, values in changed.items() if not values], as_arguments(changed)
    steps = []
    if encoders:
        steps.append(f"name the model that the store was made with (no option changes the {' or the '.join(encoders)})")
    steps += [f"leave out {' '.join(left_out)}"] if left_out else []
    steps += ["add the options below"] if added else []
    if CAPTION_OPTIONS & changed.keys():
        steps.append("or add --recaption to encode the captions again (the stored latents are kept)")
    sentence = ", ".join([*steps, "or pack into a new store"])
    return [f"{sentence[0].upper()}{sentence[1:]}", *([f"  {shlex.join(added)}"] if added else [])]
