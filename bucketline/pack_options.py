"""The rules that a store was packed by, as one JSON object by option of `ingest pack`, read from what its manifest records.

`store info` shows them, and `ingest pack` compares them with those of a run.
"""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from bucketline.dtype_names import dtype_name
from bucketline.typed_json import as_toml

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from bucketline.typed_json import Json

_VAE, _TEXT = "encoders.vae", "encoders.text_encoder"
_PARTS = tuple(f"{_TEXT}.parts.text_encoder{number}" for number in ("", "_2", "_3"))
_FRACTION, _SPLIT_BY = "rules.split.val_fraction", "rules.split.by"
_TRIGGER, _TEMPLATES = "rules.captions.trigger_word", "rules.captions.templates"
_TAGS = tuple(f"rules.captions.{name}" for name in ("shuffle_tags", "keep_tokens", "shuffle_seed"))
PLAIN_FAMILY = "transformers"
"""The family of captions that are stored as the last hidden state of a model's only text encoder."""
FIXED_LENGTH = frozenset({"class_labels", "ernie_image", "prx", "qwenimage21", "sd", "sdxl"})
"""The families without `--max-tokens`: none of their encoders has an open length."""
FIELDS: dict[str, tuple[str, ...]] = {
    "--grid": ("rules.grid",),
    "--crop": ("rules.crop",),
    "--max-upscale": ("rules.max_upscale",),
    "--max-crop": ("rules.max_crop",),
    "--min-size-px": ("rules.min_size_px",),
    "--background": ("rules.background",),
    "--jpeg-draft": ("rules.jpeg_draft",),
    "--flip": ("rules.flip",),
    "--val-fraction": (_FRACTION, _SPLIT_BY),
    "--latents": (f"{_VAE}.latents",),
    "--dtype": (f"{_VAE}.stored_dtype", f"{_TEXT}.stored_dtype"),
    "--text-dtype": (f"{_TEXT}.stored_dtype",),
    "--text": (f"{_TEXT}.family",),
    # the VAE's comes last, since some VAEs compute in F32 whatever the option says
    "--encode-dtype": (f"{_TEXT}.dtype", *(f"{part}.dtype" for part in _PARTS), f"{_VAE}.dtype"),
    "--max-tokens": (f"{_TEXT}.max_tokens", *(f"{part}.max_tokens" for part in _PARTS)),
    "--max-captions": ("max_captions",),
    "--caption-template": (_TRIGGER, _TEMPLATES),
    "--shuffle-tags": _TAGS,
}
"""Of each option, the fields of `encoders`, `rules` and `max_captions` that it sets; the first one recorded has its value."""
CAPTION_OPTIONS = frozenset(name for name, fields in FIELDS.items() if fields[0].startswith("rules.captions."))
IN_FILE_ONLY = frozenset({"--max-upscale", "--background", "--jpeg-draft", "--max-captions"})
"""Those that a data set file sets, and the command line does not."""


def pack_options(made: Mapping[str, Json]) -> dict[str, Json]:
    """Return the options that a store's `encoders`, `rules` and `max_captions` record: null if left out, true for a flag.

    Options that are not recorded are missing.

    >>> pack_options({"rules": {"grid": "sd15", "crop": "center", "max_upscale": None, "flip": True}})
    {'--grid': 'sd15', '--crop': 'center', '--max-upscale': None, '--max-crop': 1, '--flip': True}
    """
    recorded = dict(_leaves(dict(made), ""))
    if "rules.grid" in recorded and recorded.get("rules.max_crop") is None:
        recorded["rules.max_crop"] = 1  # any, which is recorded as null
    found = {
        name: recorded[field]
        for name, fields in FIELDS.items()
        if (field := next((field for field in fields if field in recorded), None)) is not None
    }
    family, length = recorded.get(f"{_TEXT}.family"), recorded.get(f"{_TEXT}.max_tokens")
    first = recorded.get(f"{_PARTS[0]}.max_tokens")
    if not isinstance(length, int) or family in FIXED_LENGTH:
        found.pop("--max-tokens", None)
    elif family == "sd3" and isinstance(first, int):
        found["--max-tokens"] = length - first  # the T5's tokens follow the CLIPs', even if zeros stand for the T5
    if family == "class_labels" or found.get("--text-dtype") == found.get("--dtype"):
        found.pop("--text-dtype", None)
    if recorded.get(_SPLIT_BY, "id") != "id" and "--val-fraction" in found:
        found["--val-fraction"] = f"{recorded[_FRACTION]}:{recorded[_SPLIT_BY]}"
    if "--caption-template" in found:
        trigger, templates = recorded.get(_TRIGGER), recorded.get(_TEMPLATES)
        words: list[Json] = [trigger.replace("{", "{{").replace("}", "}}")] if isinstance(trigger, str) else []
        found["--caption-template"] = [*words, *(templates if isinstance(templates, list) else [])]
    if "--shuffle-tags" in found:
        found["--shuffle-tags"] = joined_tags(*(number if isinstance(number := recorded.get(one), int) else 0 for one in _TAGS))
    if "--text" in found:
        found["--text"] = "plain" if family == PLAIN_FAMILY else None
    return {
        name: value or None if name in CAPTION_OPTIONS or isinstance(value, bool | list) else value
        for name, value in found.items()
    }


def as_arguments(options: Mapping[str, Json]) -> list[str]:
    """Return the arguments of a command with these options.

    >>> as_arguments({"--crop": "random", "--max-upscale": None, "--flip": True, "--caption-template": ["a {caption}"]})
    ['--crop', 'random', '--flip', '--caption-template', 'a {caption}']
    """
    found = []
    for name, value in options.items():
        if value is True:
            found.append(name)
        elif value is not None:
            words = map(str, value if isinstance(value, list) else [value])
            found += [word for one in words for word in (name, dtype_name(one) if name.endswith("dtype") else one)]
    return found


def joined_tags(orders: int, keep: int, seed: int) -> str | None:
    """Return what `--shuffle-tags` takes for these numbers; None for no orders.

    >>> joined_tags(4, 0, 0), joined_tags(4, 1, 0), joined_tags(4, 0, 7)
    ('4', '4:1', '4:0:7')
    """
    return None if not orders else ":".join(map(str, (orders, keep, seed) if seed else (orders, keep) if keep else (orders,)))


def by_field(options: Mapping[str, Json]) -> dict[str, Json]:
    """Return the options that are set, by the names of their fields.

    >>> by_field({"--crop": "random", "--max-upscale": None, "--flip": True})
    {'crop': 'random', 'flip': True}
    """
    return {name.removeprefix("--").replace("-", "_"): value for name, value in options.items() if value is not None}


def as_settings(options: Mapping[str, Json]) -> dict[str, str]:
    """Return the options that are set as a data set file has them: by name, each value as TOML.

    >>> as_settings({"--crop": "random", "--max-upscale": None, "--flip": True, "--caption-template": ["a {caption}"]})
    {'crop': '"random"', 'flip': 'true', 'caption_template': '["a {caption}"]'}
    """
    given = {
        name: dtype_name(value) if name.endswith("dtype") and isinstance(value, str) else value
        for name, value in by_field(options).items()
    }
    return {name: as_toml(value) for name, value in given.items()}


def shown_option(name: str, value: Json) -> str:
    """Return an option with its value as it is typed, or as a data set file has it.

    >>> shown_option("--crop", "random"), shown_option("--flip", None), shown_option("--background", "#ffffff")
    ('--crop random', 'no --flip', 'background = "#ffffff"')
    """
    if name not in IN_FILE_ONLY:
        return shlex.join(as_arguments({name: value})) or f"no {name}"
    field = name.removeprefix("--").replace("-", "_")
    return f"no {field}" if value is None else f"{field} = {as_settings({name: value})[field]}"


def _leaves(value: Json, at: str) -> Iterator[tuple[str, Json]]:
    """Yield each field below a JSON value that is not an object itself, with dots between keys."""
    if not isinstance(value, dict):
        yield at, value
        return
    for key, inner in value.items():
        yield from _leaves(inner, f"{at}.{key}" if at else key)
