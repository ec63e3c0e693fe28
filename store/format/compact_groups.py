"""The compact manifest form, for stores with very many shards and buckets: four numbers per group and no whitespace.

A group takes about 30 bytes instead of about 110: 2,900 shards of 1,026 buckets take 87 MiB instead of 311 MiB.
"""

from __future__ import annotations

from typing import Any

from bucketline.typed_json import TypedJsonError

FIELDS = ("rows", "blocks", "first_block", "dropped")


def compacted(document: dict[str, Any]) -> dict[str, Any]:
    """Return a manifest document with each group as a list of its numbers."""

    def numbers(group: dict[str, Any]) -> list[Any]:
        return [group[field] for field in FIELDS]

    return _with_groups(document, numbers)


def expanded(document: dict[str, Any]) -> dict[str, Any]:
    """Return a compact document in the usual form; the inverse of `compacted`. Values are not checked.

    Raises:
        TypedJsonError: if a group is not a list of four.
    """

    def fields(group: object) -> dict[str, Any]:
        if not isinstance(group, list) or len(group) != len(FIELDS):
            raise TypedJsonError(f"it is {group!r:.80}, expected four numbers: {', '.join(FIELDS)}")
        return dict(zip(FIELDS, group, strict=True))

    return _with_groups(document, fields)


def _with_groups(document: dict[str, Any], change: Any) -> dict[str, Any]:  # noqa: ANN401 - a group converter
    shards = []
    for shard in document["shards"]:
        groups = {}
        for name, group in shard["groups"].items():
            try:
                groups[name] = change(group)
            except TypedJsonError as error:
                raise TypedJsonError(f"the group {name[:80]} is invalid: {error}") from error
        shards.append({**shard, "groups": groups})
    return {**document, "shards": shards}
