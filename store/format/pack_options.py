"""The options of `ingest pack` that a store was made with, from its manifest's encoders and rules."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from bucketline.typed_json import Json

Values: TypeAlias = "tuple[str, ...]"
"""The values of an option, one for each time that it is given: none if it is left out, FLAG if it takes no value."""

FLAG = ""
_VAE, _TEXT = "encoders.vae", "encoders.text_encoder"
_PARTS = tuple(f"{_TEXT}.parts.text_encoder{number}" for number in ("", "_2", "_3"))
PLAIN_FAMILY = "transformers"
"""The family of captions that are stored as the last hidden state of a model's only text encoder."""
_FIXED_LENGTH = ("sd", "sdxl", "class_labels")  # families without `--max-tokens`
_LENGTH = "--max-tokens"  # stands for a field: what the option said, derived from the recorded lengths


def _plain(recorded: Json) -> Values:
    return () if recorded is None else (str(recorded),)


def _above_0(recorded: Json) -> Values:
    return (str(recorded),) if recorded else ()


def _flag(recorded: Json) -> Values:
    return (FLAG,) if recorded else ()


def _each(recorded: Json) -> Values:
    return tuple(map(str, recorded)) if isinstance(recorded, list) else ()


# Of each option, the fields that it sets, and how its value is written; the first field that is recorded tells it.
_OPTIONS: dict[str, tuple[tuple[str, ...], Callable[[Json], Values]]] = {
    "--grid": (("rules.grid",), _plain),
    "--crop": (("rules.crop",), _plain),
    "--max-upscale": (("rules.max_upscale",), _plain),
    "--max-crop": (("rules.max_crop",), lambda recorded: _plain(recorded) or ("1",)),
    "--min-size-px": (("rules.min_size_px",), _plain),
    "--background": (("rules.background",), _plain),
    "--jpeg-draft": (("rules.jpeg_draft",), _flag),
    "--flip": (("rules.flip",), _flag),
    "--val-fraction": (("rules.split.val_fraction",), _plain),
    "--split-by": (("rules.split.by",), _plain),
    "--latents": ((f"{_VAE}.latents",), _plain),
    "--dtype": ((f"{_VAE}.stored_dtype", f"{_TEXT}.stored_dtype"), _plain),
    "--text-dtype": ((f"{_TEXT}.stored_dtype",), _plain),
    "--text": ((f"{_TEXT}.family",), lambda recorded: ("plain",) if recorded == PLAIN_FAMILY else ()),
    # the VAE's comes last, since some VAEs compute in F32 whatever the option says
    "--encode-dtype": ((f"{_TEXT}.dtype", *(f"{part}.dtype" for part in _PARTS), f"{_VAE}.dtype"), _plain),
    "--max-tokens": ((_LENGTH, f"{_TEXT}.max_tokens", *(f"{part}.max_tokens" for part in _PARTS)), _plain),
    "--max-captions": (("max_captions",), _plain),
    "--trigger-word": (("rules.captions.trigger_word",), _plain),
    "--caption-template": (("rules.captions.templates",), _each),
    "--shuffle-tags": (("rules.captions.shuffle_tags",), _above_0),
    "--keep-tokens": (("rules.captions.keep_tokens",), _above_0),
    "--shuffle-seed": (("rules.captions.shuffle_seed",), _above_0),
}
CAPTION_OPTIONS = frozenset(name for name, (fields, _) in _OPTIONS.items() if fields[0].startswith("rules.captions."))


def fields_of(option: str) -> tuple[str, ...]:
    """Return the fields of `encoders`, `rules` and `max_captions` that an option sets, with dots between keys."""
    return _OPTIONS[option][0]


def pack_options(made: Mapping[str, Json]) -> dict[str, Values]:
    """Return the options that a store's `encoders`, `rules` and `max_captions` record; those that it does not are missing.

    >>> pack_options({"rules": {"grid": "sd15", "crop": "center", "max_upscale": None, "flip": True}})
    {'--grid': ('sd15',), '--crop': ('center',), '--max-upscale': (), '--max-crop': ('1',), '--flip': ('',)}
    """
    recorded = dict(_leaves(dict(made), ""))
    if "rules.grid" in recorded:
        recorded.setdefault("rules.max_crop", None)  # as in stores that were made before there was a limit
    length, family = recorded.pop(f"{_TEXT}.max_tokens", None), recorded.get(f"{_TEXT}.family")
    first = recorded.get(f"{_PARTS[0]}.max_tokens")
    if isinstance(length, int) and family not in _FIXED_LENGTH:
        # in SD3 the T5's tokens follow the CLIPs', even if zeros stand for the T5
        recorded[_LENGTH] = length - first if family == "sd3" and isinstance(first, int) else length
    found = {}
    for name, (fields, words) in _OPTIONS.items():
        own = (_LENGTH,) if name == "--max-tokens" else fields
        if (field := next((field for field in own if field in recorded), None)) is not None:
            found[name] = words(recorded[field])
    if family == "class_labels" or found.get("--text-dtype") == found.get("--dtype"):
        found.pop("--text-dtype", None)
    return found


def as_arguments(options: Mapping[str, Values]) -> list[str]:
    """Return the arguments of a command with these options.

    >>> as_arguments({"--crop": ("random",), "--max-upscale": (), "--flip": ("",)})
    ['--crop', 'random', '--flip']
    """
    return [word for name, values in options.items() for value in values for word in (name, value) if word]


def _leaves(value: Json, at: str) -> Iterator[tuple[str, Json]]:
    """Yield each field below a JSON value that is not an object itself, with dots between keys."""
    if not isinstance(value, dict):
        yield at, value
        return
    for key, inner in value.items():
        yield from _leaves(inner, f"{at}.{key}" if at else key)
