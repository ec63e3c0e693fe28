"""Options whose one word has parts: when to save, over how many processes to shard, which repository to push to."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from bucketline.command_line import duration_s
from bucketline.dtype_names import dtype_name
from bucketline.errors import UsageError
from bucketline.files.redact import redacted

if TYPE_CHECKING:
    from collections.abc import Mapping

    from bucketline.typed_json import Json

DDP, OF_A_MACHINE = "ddp", "machine"
EXPORTS = "exports"
_USUAL_MINUTES = 30.0  # between checkpoints, also if a run was recorded before that was an option
_SHARDING = re.compile(rf"fsdp(?::({OF_A_MACHINE}|[0-9]+))?")
_REPOSITORY = re.compile(rf"((?:[\w.-]+/)?[\w.-]+)(:{EXPORTS})?")


def save_times(text: str) -> tuple[int | None, float | None]:
    """Return the steps and the seconds between checkpoints that `--save-every` gives; None: not by these.

    Raises:
        UsageError: if it gives neither, or one of them twice.

    >>> save_times("1000"), save_times("30m"), save_times("1000,30m")
    ((1000, None), (None, 1800.0), (1000, 1800.0))
    """
    parts = [part.strip() for part in text.split(",")]
    steps = [int(part) for part in parts if part.isdecimal()]
    try:
        seconds = [duration_s(part) for part in parts if not part.isdecimal()]
    except UsageError:
        seconds = [0.0]
    if len(steps) > 1 or len(seconds) > 1 or not all([*steps, *seconds]):
        raise UsageError(f"--save-every is {text:.80}, expected steps, such as 1000, a time, such as 30m, or both: 1000,30m")
    return next(iter(steps), None), next(iter(seconds), None)


def shard_ranks(text: str) -> int | str | None:
    """Return over how many processes `--sharding` shards the model: a number, those `OF_A_MACHINE`, or None, which is all.

    Raises:
        UsageError: if it is not a way to shard.

    >>> shard_ranks("fsdp:8"), shard_ranks("fsdp:machine"), shard_ranks("fsdp")
    (8, 'machine', None)
    """
    match = _SHARDING.fullmatch(text)
    if text != DDP and (match is None or match[1] in ("0", "1")):
        instead = "; hsdp is fsdp:machine or fsdp:RANKS now" if text == "hsdp" else ""
        raise UsageError(f"--sharding is {text:.80}, expected ddp, fsdp, fsdp:machine, or fsdp:RANKS from 2 on{instead}")
    ranks = match[1] if match else None
    return int(ranks) if ranks and ranks.isdecimal() else ranks


def repository_of(text: str) -> tuple[str, bool]:
    """Return the repository that `--push-to-hub` names, and whether each export is pushed as well.

    Raises:
        UsageError: if it is not the name of a repository.

    >>> repository_of("user/name:exports")
    ('user/name', True)
    """
    match = _REPOSITORY.fullmatch(text)
    if match is None:
        raise UsageError(f"--push-to-hub is {redacted(text):.80}, expected the name of a repository, such as user/name")
    return match[1], match[2] is not None


def as_words(options: Mapping[str, Json]) -> dict[str, Json]:
    """Return options that an earlier version has recorded by their parts, as words.

    >>> as_words({"checkpoint_every": 4, "checkpoint_minutes": 30.0, "sharding": "hsdp", "shard_ranks": None})
    {'sharding': 'fsdp:machine', 'save_every': '4,30m'}
    """
    given = dict(options)
    steps, minutes = given.pop("checkpoint_every", None), given.pop("checkpoint_minutes", _USUAL_MINUTES)
    if "checkpoint_every" in options:
        times = [str(steps)] * (steps is not None) + ([f"{minutes:g}m"] if isinstance(minutes, float | int) else [])
        given["save_every"] = ",".join(times) or None
    if "keep_checkpoints" in given:
        given["keep"] = given.pop("keep_checkpoints")
    ranks = given.pop("shard_ranks", None)
    if given.get("sharding") == "hsdp":
        given["sharding"] = f"fsdp:{ranks or OF_A_MACHINE}"
    rows, run = given.pop("wait_rows", None), given.pop("follow_schedule", None)
    if isinstance(follows := given.get("follow"), bool):
        given["follow"] = (rows or 1) if follows else run
    if given.pop("push_exports", False):
        given["push_to_hub"] = f"{given['push_to_hub']}:{EXPORTS}"
    if weights := given.pop("store_weight", None):
        assert isinstance(weights, list)
        stores = given["store"]
        assert isinstance(stores, list)
        given["store"] = [f"{store}@{weight:g}" for store, weight in zip(stores, weights, strict=False)]
    if isinstance(dtype := given.get("export_dtype"), str):
        given["export_dtype"] = dtype_name(dtype)
    return given
