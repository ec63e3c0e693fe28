"""Manifests of versions 1 to 4, which earlier releases wrote, with the fields that a manifest has today.

The only place that knows of these versions; what they were is in `FORMAT.md`, *Older versions*.
"""

from __future__ import annotations

from typing import Any

from bucketline.store.format.block import IMAGE_AXES
from bucketline.store.format.compact_groups import expanded
from bucketline.typed_json import TypedJsonError

_ANY_COLUMNS, _ADDED_COLUMNS = 3, 4  # the versions that began to have columns of any kind, and columns added to rows


def layout_of(version: object) -> dict[str, Any]:
    """Return the options of `json.dumps` that give a document's bytes, for its digest."""
    return {"indent": 1} if version == 1 else {"separators": (",", ":")}


def upgraded(document: dict[str, Any]) -> dict[str, Any]:
    """Return a document of version 1 to 4 with today's fields and its groups' numbers by name. Values are not checked."""
    version = base = document["format_version"]
    if version == _ADDED_COLUMNS:
        base = document["base_version"]
        if base not in (1, 2, _ANY_COLUMNS) or not document["added"]:
            raise TypedJsonError(f"its base_version is {base!r:.40}, or it has no added column")
        document = {name: value for name, value in document.items() if name != "base_version"}
    else:
        document = _with_fields(document, {"added": {}}, {"added": {}})
    if version > 1:
        document = expanded(document)
    document = _with_fields(document, {}, {"line_checksums": base == _ANY_COLUMNS})
    if base < _ANY_COLUMNS:
        document = _with_fields(document, {"columns": {}, "ragged": {}}, {"text_error": None, "ragged": {}})
        return {**document, "buckets": [_with_axes(bucket) for bucket in document["buckets"]]}
    if "ragged" not in document:
        return _with_fields(document, {"ragged": {}}, {"ragged": {}})
    if not document["ragged"]:
        raise TypedJsonError("ragged has no group; the field is only where there are some")
    return document


def _with_fields(document: dict[str, Any], own: dict[str, Any], of_shards: dict[str, Any]) -> dict[str, Any]:
    """Return a document with more fields of its own and of its shards; one that is there already is another version's."""
    for fields, present in ((own, document), *((of_shards, shard) for shard in document["shards"])):
        if strange := sorted(fields.keys() & present.keys()):
            raise TypedJsonError(f"it, or a shard, has an unknown field {strange[0]!r}")
    return {**document, **own, "shards": [{**shard, **of_shards} for shard in document["shards"]]}


def _with_axes(bucket: dict[str, Any]) -> dict[str, Any]:
    if "axes" in bucket:
        raise TypedJsonError("a bucket has an unknown field 'axes'")
    if missing := [name for name in IMAGE_AXES if name not in bucket]:
        raise TypedJsonError(f"a bucket lacks the field {missing[0]!r}")
    rest = {name: value for name, value in bucket.items() if name not in IMAGE_AXES}
    return {**rest, "axes": [{"name": name, "size": bucket[name]} for name in IMAGE_AXES]}
