"""The rules that a store was packed by, as one JSON object by option of `ingest pack`, read from what its manifest records.

`store info` shows them as arguments, and `ingest pack` compares them with those of a run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from bucketline.typed_json import Json

_VAE, _TEXT = "encoders.vae", "encoders.text_encoder"
_PARTS = tuple(f"{_TEXT}.parts.text_encoder{number}" for number in ("", "_2", "_3"))
PLAIN_FAMILY = "transformers"
"""The family of captions that are stored as the last hidden state of a model's only text encoder."""
_FIXED_LENGTH = ("sd", "sdxl", "class_labels")  # families without `--max-tokens`
FIELDS: dict[str, tuple[str, ...]] = {
    "--grid": ("rules.grid",),
    "--crop": ("rules.crop",),
    "--max-upscale": ("rules.max_upscale",),
    "--max-crop": ("rules.max_crop",),
    "--min-size-px": ("rules.min_size_px",),
    "--background": ("rules.background",),
    "--jpeg-draft": ("rules.jpeg_draft",),
    "--flip": ("rules.flip",),
    "--val-fraction": ("rules.split.val_fraction",),
    "--split-by": ("rules.split.by",),
    "--latents": (f"{_VAE}.latents",),
    "--dtype": (f"{_VAE}.stored_dtype", f"{_TEXT}.stored_dtype"),
    "--text-dtype": (f"{_TEXT}.stored_dtype",),
    "--text": (f"{_TEXT}.family",),
    # the VAE's comes last, since some VAEs compute in F32 whatever the option says
    "--encode-dtype": (f"{_TEXT}.dtype", *(f"{part}.dtype" for part in _PARTS), f"{_VAE}.dtype"),
    "--max-tokens": (f"{_TEXT}.max_tokens", *(f"{part}.max_tokens" for part in _PARTS)),
    "--max-captions": ("max_captions",),
    "--trigger-word": ("rules.captions.trigger_word",),
    "--caption-template": ("rules.captions.templates",),
    "--shuffle-tags": ("rules.captions.shuffle_tags",),
    "--keep-tokens": ("rules.captions.keep_tokens",),
    "--shuffle-seed": ("rules.captions.shuffle_seed",),
}
"""Of each option, the fields of `encoders`, `rules` and `max_captions` that it sets; the first one recorded has its value."""
CAPTION_OPTIONS = frozenset(name for name, fields in FIELDS.items() if fields[0].startswith("rules.captions."))


def pack_options(made: Mapping[str, Json]) -> dict[str, Json]:
    """Return the options that a store's `encoders`, `rules` and `max_captions` record: null if left out, true for a flag.

    Options that are not recorded are missing.

    >>> pack_options({"rules": {"grid": "sd15", "crop": "center", "max_upscale": None, "flip": True}})
    {'--grid': 'sd15', '--crop': 'center', '--max-upscale': None, '--max-crop': 1, '--flip': True}
    """
    recorded = dict(_leaves(dict(made), ""))
    if "rules.grid" in recorded and recorded.get("rules.max_crop") is None:
        recorded["rules.max_crop"] = 1  # any; stores that were made before there was a limit do not record it
    found = {
        name: recorded[field]
        for name, fields in FIELDS.items()
        if (field := next((field for field in fields if field in recorded), None)) is not None
    }
    family, length = recorded.get(f"{_TEXT}.family"), recorded.get(f"{_TEXT}.max_tokens")
    first = recorded.get(f"{_PARTS[0]}.max_tokens")
    if not isinstance(length, int) or family in _FIXED_LENGTH:
        found.pop("--max-tokens", None)
    elif family == "sd3" and isinstance(first, int):
        found["--max-tokens"] = length - first  # the T5's tokens follow the CLIPs', even if zeros stand for the T5
    if family == "class_labels" or found.get("--text-dtype") == found.get("--dtype"):
        found.pop("--text-dtype", None)
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
            found += [word for one in (value if isinstance(value, list) else [value]) for word in (name, str(one))]
    return found


def _leaves(value: Json, at: str) -> Iterator[tuple[str, Json]]:
    """Yield each field below a JSON value that is not an object itself, with dots between keys."""
    if not isinstance(value, dict):
        yield at, value
        return
    for key, inner in value.items():
        yield from _leaves(inner, f"{at}.{key}" if at else key)
