"""`store info --rules`: a data set file that packs an equal store."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bucketline.errors import StoreError
from bucketline.pack_options import CAPTION_OPTIONS, as_settings, pack_options

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from bucketline.store.format.manifest import Manifest
    from bucketline.typed_json import Json

_FRACTION = "--val-fraction"
_OF_ENCODING = frozenset({"--encode-dtype"})
_SPLIT = {"0.0": "train", "1.0": "val"}
_HEAD = """\
# `ingest pack FILE STORE --model MODEL` packs an equal store from the same images and captions.
# A store does not record where these were: set `path`, and `caption`, `captions_from`, `dataset_splits` where they were used.
"""


def dataset_file(manifest: Manifest, place: str, path: str) -> str:
    """Return a data set file of one source at `path`, with the rules of a store."""
    rules = _rules_of(manifest, place)
    source = {"--path": path, **{name: value for name, value in rules.items() if name in CAPTION_OPTIONS}}
    return "\n".join([_HEAD, *_table("[source]", source), *_tables(rules)])


def dataset_file_of(members: Sequence[tuple[str, int, Manifest]], place: str, path: str) -> str:
    """Return a data set file with a source for each store of a data set's folder: its name, its repeats, its manifest."""
    each = [(name, repeats, _rules_of(manifest, f"{place}/{name}")) for name, repeats, manifest in members]
    fractions = [str(rules.get(_FRACTION)) for _, _, rules in each]
    common = next((one for one in fractions if one not in _SPLIT), max(fractions, key=fractions.count))
    lines, first = [_HEAD], each[0]
    for (name, repeats, rules), fraction in zip(each, fractions, strict=True):
        if (fraction != common and fraction not in _SPLIT) or _shared(rules) != _shared(first[2]):
            raise StoreError(f"{place}: {first[0]} and {name} have other rules; ask each of the stores for its own")
        own: dict[str, Json] = {"--path": f"{path}/{name.removesuffix('.store')}", "--repeats": repeats}
        if fraction != common:
            own["--split"] = _SPLIT[fraction]
        lines += _table("[[source]]", {**own, **{key: value for key, value in rules.items() if key in CAPTION_OPTIONS}})
    return "\n".join([*lines, *_tables({**first[2], _FRACTION: common})])


def _rules_of(manifest: Manifest, place: str) -> dict[str, Json]:
    if "grid" not in manifest.rules or "import" in manifest.rules:
        raise StoreError(f"{place} was not packed from images by `ingest pack`, so that no data set file makes it")
    return pack_options({"encoders": manifest.encoders, "rules": manifest.rules, "max_captions": manifest.max_captions})


def _shared(rules: Mapping[str, Json]) -> dict[str, Json]:
    return {name: value for name, value in rules.items() if name not in CAPTION_OPTIONS and name != _FRACTION}


def _tables(rules: Mapping[str, Json]) -> Iterator[str]:
    """Yield the lines of the tables that all sources share."""
    shared = {name: value for name, value in rules.items() if name not in CAPTION_OPTIONS}
    yield from _table("[rules]", {name: value for name, value in shared.items() if name not in _OF_ENCODING})
    yield from _table("[encoding]", {name: value for name, value in shared.items() if name in _OF_ENCODING})


def _table(head: str, options: Mapping[str, Json]) -> Iterator[str]:
    settings = as_settings(options)
    if settings:
        yield head
        yield from (f"{name} = {value}" for name, value in settings.items())
        yield ""
