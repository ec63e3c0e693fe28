"""The manifest's document in each version of the format. A `Manifest` has the fields of version 3.

Version 1 is for rows of images: a bucket has a height and a width, and columns have no entries of their own. Version 2 is the
compact form of version 1, for stores of very many shards and buckets: four numbers per group and no whitespace. A group takes
about 30 bytes instead of about 110: 2,900 shards of 1,026 buckets take 87 MiB instead of 311 MiB. Version 3 is always compact.
Version 4 is any of these with added columns, always compact: its `base_version` is the version without them, which is a
`Manifest`'s `format_version`.
"""

from __future__ import annotations

from typing import Any

from bucketline.store.format.block import IMAGE_AXES
from bucketline.typed_json import TypedJsonError

FIRST_VERSION = 1
COMPACT_VERSION = 2
COLUMNS_VERSION = 3  # columns of any role, buckets of any axes
ADDED_VERSION = 4  # columns that were added to rows
_GROUP = ("rows", "blocks", "first_block", "dropped")


def shard_version(version: int) -> int:
    """Return the version of the shards of a store of a version: the compact form of a manifest changes nothing in them."""
    return version if version >= COLUMNS_VERSION else FIRST_VERSION


def to_version(document: dict[str, Any], version: int) -> dict[str, Any]:
    """Return the document of a `Manifest`'s fields in the form of a version that can hold them."""
    if version >= COMPACT_VERSION or document["added"]:
        document = _with_groups(document, lambda group: [group[field] for field in _GROUP])
    if document["added"]:
        document = {**document, "format_version": ADDED_VERSION, "base_version": version}
    else:
        document = _without(document, "added")
    if not document["ragged"]:  # the field is only where there are such groups
        document = _without(document, "ragged")
    if version < COLUMNS_VERSION:
        document = _without(_without(document, "columns"), "text_error")
        document["buckets"] = [_with_sizes(bucket) for bucket in document["buckets"]]
    return document


def _without(document: dict[str, Any], field: str) -> dict[str, Any]:
    """Return a document without a field of its own and of its shards."""
    shards = [{name: value for name, value in shard.items() if name != field} for shard in document["shards"]]
    return {**{name: value for name, value in document.items() if name != field}, "shards": shards}


def from_version(document: dict[str, Any], version: int) -> dict[str, Any]:
    """Return a document of a version with the fields of a `Manifest`; the inverse of `to_version`. Values are not checked.

    Raises:
        TypedJsonError: if it has a field of another version, lacks one, or a group is not a list of four.
    """
    is_compact = version >= COMPACT_VERSION
    if version == ADDED_VERSION:
        version = document["base_version"]
        if version not in (FIRST_VERSION, COMPACT_VERSION, COLUMNS_VERSION) or not document["added"]:
            raise TypedJsonError(f"its base_version is {version!r:.40}, or it has no added column")
        document = {name: value for name, value in document.items() if name != "base_version"} | {"format_version": version}
    else:
        document = _with_empty(document, "added")
    if is_compact:
        document = _with_groups(document, _group_fields)
    if version < COLUMNS_VERSION or "ragged" not in document:
        document = _with_empty(document, "ragged")
    elif not document["ragged"]:
        raise TypedJsonError("ragged has no group; the field is only where there are some")
    if version < COLUMNS_VERSION:
        if "columns" in document:
            raise TypedJsonError("Manifest has an unknown field 'columns'")
        document = {
            **document,
            "columns": {},
            "buckets": [_with_axes(bucket) for bucket in document["buckets"]],
            "shards": _with_text_error(document["shards"]),
        }
    return document


def _group_fields(group: object) -> dict[str, Any]:
    if not isinstance(group, list) or len(group) != len(_GROUP):
        raise TypedJsonError(f"it is {group!r:.80}, expected four numbers: {', '.join(_GROUP)}")
    return dict(zip(_GROUP, group, strict=True))


def _with_groups(document: dict[str, Any], change: Any) -> dict[str, Any]:  # noqa: ANN401 - a group converter
    shards = []
    for shard in document["shards"]:
        groups = {}
        for name, group in shard["groups"].items():
            try:
                groups[name] = change(group)
            except TypedJsonError as error:
                raise TypedJsonError(f"the group {name[:80]} is invalid: {error}") from error
        added = {name: _with_groups({"shards": [own]}, change)["shards"][0] for name, own in shard.get("added", {}).items()}
        shards.append({**shard, "groups": groups, **({"added": added} if "added" in shard else {})})
    return {**document, "shards": shards}


def _with_empty(document: dict[str, Any], field: str) -> dict[str, Any]:
    """Return the document of a store without ragged groups, or without added columns, with the fields for them.

    Raises:
        TypedJsonError: if it, or a shard, has such a field already.
    """
    shards = document["shards"]
    if field in document or (isinstance(shards, list) and any(field in shard for shard in shards)):
        raise TypedJsonError(f"the unknown field {field!r}")
    shards = [{**shard, field: {}} for shard in shards] if isinstance(shards, list) else shards
    return {**document, field: {}, "shards": shards}


def _with_text_error(shards: Any) -> Any:  # noqa: ANN401 - what is not a list is refused when it is decoded
    """Return version 1's shards with the field for the error of quantised text.

    Raises:
        TypedJsonError: if one has the field already.
    """
    if not isinstance(shards, list):
        return shards
    for shard in shards:
        if "text_error" in shard:
            raise TypedJsonError(f"shard {shard.get('name')!r:.80} has an unknown field 'text_error'")
    return [{**shard, "text_error": None} for shard in shards]


def _with_sizes(bucket: dict[str, Any]) -> dict[str, Any]:
    sizes = {axis["name"]: axis["size"] for axis in bucket["axes"]}
    return {**{name: value for name, value in bucket.items() if name != "axes"}, **sizes}


def _with_axes(bucket: dict[str, Any]) -> dict[str, Any]:
    if "axes" in bucket:
        raise TypedJsonError("a bucket has an unknown field 'axes'")
    if missing := [name for name in IMAGE_AXES if name not in bucket]:
        raise TypedJsonError(f"a bucket lacks the field {missing[0]!r}")
    rest = {name: value for name, value in bucket.items() if name not in IMAGE_AXES}
    return {**rest, "axes": [{"name": name, "size": bucket[name]} for name in IMAGE_AXES]}
