"""The generations of a store: which is the newest, and how the next one is committed in object storage.

`generations/G.json` by put-if-absent is the commit of a generation; `manifest.json`, written after it, tells readers where to
begin. The first generation that a store has in the bucket is committed by creating `manifest.json` itself, so that of two
stores that are pushed to one place at the same time, one wins. No lock, and no other conditional request.
"""

from __future__ import annotations

import secrets
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from bucketline.errors import CorruptError, StoreError
from bucketline.store.folder import DeniedError, ExistsError, MissingObjectError
from bucketline.store.format.manifest import MANIFEST, MAX_MANIFEST_BYTES, dump_manifest, parse_manifest
from bucketline.store.remote.objects import asked_again

FEW_AHEAD = 10  # generations after that of `manifest.json`: it lacks those whose writers died before they wrote it
_PROBE_BYTES = 1 << 20  # of a manifest that is put to see whether the storage honours put-if-absent
MAX_AHEAD = 1000  # of them, and no more than are found within the deadline once there are not few

if TYPE_CHECKING:
    from collections.abc import Callable

    from bucketline.store.folder import Folder, ListedFile
    from bucketline.store.format.manifest import Manifest
    from bucketline.store.remote.objects import ObjectFolder


class ForeignError(CorruptError):
    """A generation that belongs to another store, or has another number than its name."""


def generation_name(generation: int) -> str:
    return f"generations/{generation}.json"


def newest_generation(
    folder: Folder, on_hint: Callable[[Manifest], None] | None = None, *, lists: bool = False, may_be_late: bool = False
) -> Manifest:
    """Return the newest generation: what `manifest.json` says, or the last of those that follow without a gap.

    `on_hint` is called with what `manifest.json` says, before newer ones are looked for: there is hardly ever one. `lists` and
    `may_be_late`: as in `newest_after`.
    """
    found = find_newest(folder, on_hint, lists=lists, may_be_late=may_be_late)
    if found is None:
        if advice := _advice(folder):
            raise MissingObjectError(f"{folder.place(MANIFEST)} is missing; {advice}")
        raise MissingObjectError(
            f"{folder.place('')} is not a store: it has no {MANIFEST}; check the URL, or `store push` one there"
        )
    return found


def find_newest(
    folder: Folder, on_hint: Callable[[Manifest], None] | None = None, *, lists: bool = False, may_be_late: bool = False
) -> Manifest | None:
    """Return the newest generation as `newest_generation` does; None if there is no store.

    If only generations are left and no `manifest.json`, it is the newest intact one, for writers (`lists`).
    """
    try:
        hint = _read(folder, MANIFEST)
    except MissingObjectError:
        return _newest_left(folder) if lists else None
    except CorruptError as error:
        raise CorruptError(f"{error}; {_advice(folder) or 'restore it'}") from error
    if on_hint is not None:
        on_hint(hint)
    return newest_after(folder, hint, lists=lists, may_be_late=may_be_late)


def _newest_left(folder: Folder) -> Manifest | None:
    """Return the newest intact generation of a folder without `manifest.json`; None if there is none."""
    for number in reversed(listed_generations(folder)):
        with suppress(CorruptError):
            return _read(folder, generation_name(number))
    return None


def _advice(folder: Folder) -> str:
    """Return how to fix a missing or damaged `manifest.json`; empty if no generation is left, or none can be listed."""
    with suppress(StoreError):  # a web server's folders cannot be listed
        if (left := _newest_left(folder)) is not None:
            return f"copy {folder.place(generation_name(left.generation))} to {folder.place(MANIFEST)}"
    return ""


def newest_after(folder: Folder, hint: Manifest, *, lists: bool, may_be_late: bool = False) -> Manifest:
    """Return the newest generation, given what `manifest.json` says: readers look for the next one until there is none.

    Writers look at the listing too (`lists`). An older `manifest.json`, which was put back or came late, may be followed by a
    gap, since garbage collection has removed the generations between; continuing from it would restore dropped samples.
    `may_be_late`: the listing is enough, to one whose commit fails if there is a newer generation that it does not show yet.
    """
    newest = hint
    if lists and (last := max(listed_generations(folder), default=0)) > hint.generation:
        newest = _newer(folder, hint, last)
    if lists and may_be_late:
        return newest
    end, count = time.monotonic() + folder.deadline_s, 0
    for count in range(MAX_AHEAD):
        if count > FEW_AHEAD and time.monotonic() > end:
            break
        try:
            newest = _newer(folder, newest, newest.generation + 1)
        except (MissingObjectError, DeniedError):  # without the right to list a bucket, what is missing is denied
            return newest
    raise CorruptError(
        f"{folder.place('')} has {count} or more generations after that of {MANIFEST}, which is written again at each commit; "
        f"if it is a store of yours, copy {folder.place(generation_name(newest.generation))} over {folder.place(MANIFEST)}"
    )


def _newer(folder: Folder, before: Manifest, generation: int) -> Manifest:
    name = generation_name(generation)
    try:
        return _checked(folder, name, _read(folder, name), before.store_id, generation)
    except ForeignError:
        raise
    except CorruptError as error:
        raise CorruptError(
            f"{folder.place(name)} is newer than {folder.place(MANIFEST)}, generation {before.generation}, and damaged, so its "
            f"shards and dropped samples are unknown ({error}); restore it, or move it elsewhere if what only it lists may be "
            "packed again"
        ) from error


def read_generation(folder: Folder, generation: int, newest: Manifest) -> Manifest:
    """Return an older generation of the store."""
    if generation == newest.generation:
        return newest
    name = generation_name(generation)
    try:
        return _checked(folder, name, _read(folder, name), newest.store_id, generation)
    except MissingObjectError:
        raise StoreError(f"{folder.place('')} has no generation {generation} any more; open the newest one") from None


def listed_generations(folder: Folder) -> dict[int, ListedFile]:
    """Return the generations' manifests that are there by number, ascending, by a listing."""
    stems = ((file.name.removeprefix("generations/").removesuffix(".json"), file) for file in folder.names("generations"))
    return dict(sorted((int(stem), file) for stem, file in stems if stem.isdecimal()))


def complete_first(folder: Folder, newest: Manifest) -> int:
    """Write the newest generation's own file if the interrupted commit of a first one left only `manifest.json`.

    Return the generation that `manifest.json` names now; 0 if it is missing. An older one gets no file of its own
    again: garbage collection has removed it.
    """
    try:
        data = folder.read(MANIFEST, MAX_MANIFEST_BYTES)
    except MissingObjectError:
        return 0
    generation = parse_manifest(data, folder.place(MANIFEST)).generation
    name = generation_name(generation)
    if generation == newest.generation and folder.look_up(name) is None:
        _create_own(folder, name, data)
    return generation


def commit(folder: ObjectFolder, generation: int, data: bytes, *, is_first: bool) -> bool:
    """Commit a generation's manifest, whose objects are all there. Return False if another writer has committed first.

    `is_first`: the store is new in the bucket.
    """
    if is_first:
        if folder.look_up(name := generation_name(generation)) is not None and folder.look_up(MANIFEST) is None:
            raise _foreign(folder, name)
        if not _is_created(folder, MANIFEST, data):
            return False
        _create_own(folder, name, data)
        return True
    if not _is_created(folder, generation_name(generation), data):
        return False
    with suppress(StoreError):  # it is committed; readers look further than an older hint
        folder.write(MANIFEST, data)
    return True


def refuse_without_put_if_absent(folder: ObjectFolder, newest: Manifest | None = None) -> None:
    """Check that the storage honours put-if-absent, which commits rely on: a name is created twice, the second must fail.

    It is enough that the `newest` generation's own file cannot be created again: a request instead of three. It is put with the
    bytes that it has, so that storage which ignores the condition changes nothing, and is there afterwards in any case.
    """
    data = b"" if newest is None else dump_manifest(newest)
    is_small = newest is not None and len(data) <= _PROBE_BYTES
    if newest is not None and is_small and not folder.is_put_if_absent(generation_name(newest.generation), data):
        return
    name = f"probe-{secrets.token_hex(8)}"
    try:
        if not _is_created(folder, name, b"1"):
            raise StoreError(
                f"{folder.place(name)} exists, although its name was drawn just now; the storage cannot be relied on"
            )
        if _is_created(folder, name, b"2"):
            raise StoreError(
                f"{folder.url} does not honour put-if-absent (If-None-Match: *): two writers could destroy each other's work. "
                "Use storage that does (S3, GCS, Azure, MinIO, Ceph from 19), or update the server"
            )
    finally:
        with suppress(DeniedError):  # a bucket that nothing may be removed from keeps an object of a byte
            folder.remove([name])


def _is_created(folder: Folder, name: str, data: bytes) -> bool:
    """Create an object. Return False if there is another of this name."""
    try:
        folder.create(name, data)
    except ExistsError:
        return False
    return True


def _create_own(folder: Folder, name: str, data: bytes) -> None:
    if not _is_created(folder, name, data):
        raise _foreign(folder, name)


def _foreign(folder: Folder, name: str) -> StoreError:
    return StoreError(
        f"{folder.place(name)} belongs to another store, or an earlier one at this place; remove all of "
        f"{folder.place('')} if nobody needs it, or choose another URL"
    )


def _checked(folder: Folder, name: str, found: Manifest, store_id: str, generation: int) -> Manifest:
    if (found.store_id, found.generation) != (store_id, generation):
        raise ForeignError(
            f"{folder.place(name)} belongs to another store or generation: it says generation {found.generation} of store "
            f"{found.store_id}, expected {generation} of {store_id}; move it elsewhere and "
            "rerun the command"
        )
    return found


def _read(folder: Folder, name: str) -> Manifest:
    """Return a manifest, requested again if the answer was cut or damaged; one that is missing is not."""

    def read() -> Manifest | MissingObjectError:
        try:
            return parse_manifest(folder.read(name, MAX_MANIFEST_BYTES), folder.place(name))
        except MissingObjectError as error:
            return error

    found = asked_again(read, folder.deadline_s, most_wrong=2)
    if isinstance(found, MissingObjectError):
        raise found
    return found
