"""Merge stores into a new one in object storage, by way of a temporary folder."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from bucketline.errors import UsageError
from bucketline.store.change.merge import merge
from bucketline.store.remote.generations import find_newest, refuse_without_put_if_absent
from bucketline.store.sync.push import push

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from bucketline.store.change.merge import Merged
    from bucketline.store.remote.objects import ObjectFolder


def merge_to_url(
    out: ObjectFolder,
    sources: Sequence[ObjectFolder | Path],
    *,
    replace: bool = False,
    dry_run: bool = False,
    on_bytes: Callable[[int, int], None] = lambda done, total: None,  # noqa: ARG005
) -> Merged:
    """Create the store `out` from all live samples of `sources`, as `merge` does.

    Raises:
        UsageError: if there is a store at `out`; what `merge` and `push` raise.
    """
    if find_newest(out) is not None:
        raise UsageError(f"{out.url} holds a store; choose another URL")
    if not dry_run:
        refuse_without_put_if_absent(out)
    with tempfile.TemporaryDirectory(prefix="bucketline-", ignore_cleanup_errors=True) as folder:
        made = Path(folder) / "out.store"
        done = merge(made, sources, replace=replace, dry_run=dry_run, on_bytes=on_bytes)
        if not dry_run:
            push(made, out)
    return done
