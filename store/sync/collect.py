"""Garbage collection in object storage, where any number of writers may be uploading.

What no generation lists may be another writer's upload, so it is left alone for a day, and longer while a running process
notes that it sends it.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from bucketline.store.change.garbage_collect import Collected, Unlisted, collect_from
from bucketline.store.remote.generations import newest_generation
from bucketline.store.transfer.sender import pending_shards
from bucketline.store.transfer.upload import FRESH_S

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from bucketline.store.remote.objects import ObjectFolder

UNLISTED_S = 2 * FRESH_S  # an object that no generation lists is left alone for this time


def collect_objects(objects: ObjectFolder, older_than_s: float, *, dry_run: bool = False) -> Collected:
    """Collect garbage as `collect_from` does, also what interrupted uploads left. All times are the server's.

    Raises:
        StoreError: if the store cannot be listed, or a generation to keep is damaged: what it lists is unknown.
    """

    @contextmanager
    def rule(now: float) -> Iterator[Callable[[Unlisted], bool]]:
        being_sent, stale = pending_shards(objects, UNLISTED_S, now)

        def may_go(found: Unlisted) -> bool:
            return found.shard not in being_sent and (found.is_retired or now - found.file.modified_s >= UNLISTED_S)

        yield may_go
        if not dry_run:
            objects.remove(stale)

    return collect_from(objects, newest_generation(objects, lists=True), older_than_s, rule, dry_run=dry_run)
