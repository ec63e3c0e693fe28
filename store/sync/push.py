"""Push a store to object storage: what is not there yet is sent, then its newest generation is committed."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bucketline.command_line import counted
from bucketline.errors import StoreError
from bucketline.store.folder import LocalFolder
from bucketline.store.format.manifest import dump_manifest, finished, generations, read_manifest
from bucketline.store.read.lost_files import refuse_lost_shards
from bucketline.store.remote.generations import commit, complete_first, find_newest, refuse_without_put_if_absent
from bucketline.store.transfer.files import Uploader, send_lists
from bucketline.store.transfer.sender import noted
from bucketline.store.write.change_base import existing_manifest

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from bucketline.store.format.manifest import Manifest
    from bucketline.store.remote.objects import ObjectFolder

_ROUNDS = 3  # of sending what is gone when it should be committed


@dataclass(frozen=True, slots=True, kw_only=True)
class Pushed:
    """Result of a push."""

    generation: int  # newest in the bucket
    samples: int
    is_committed: bool  # False if the bucket had it
    files: int  # that were sent
    num_bytes: int  # of these


def push(
    store: Path,
    folder: ObjectFolder,
    *,
    jobs: int = 4,
    on_total: Callable[[int], None] = lambda _: None,
    on_bytes: Callable[[int], None] = lambda _: None,
) -> Pushed:
    """Send a store's newest generation to a folder in object storage, and commit it.

    Nothing is visible to readers before the commit. An interrupted push is continued by the same call. `on_total` is called
    with the bytes to send, then `on_bytes` with those read, from several threads.
    """
    folder.refuse_read_only()
    manifest = existing_manifest(store)
    refuse_lost_shards(LocalFolder(store), manifest)
    remote = find_newest(folder, lists=True)
    if remote is not None:
        _refuse_other(store, manifest, folder, remote)
    refuse_without_put_if_absent(folder)
    if remote is not None:
        complete_first(folder, remote)
    names = {entry.name for entry in manifest.shards}
    with noted(folder, "push", names - ({entry.name for entry in remote.shards} if remote else set())):
        uploader = Uploader(folder, jobs=jobs, on_bytes=on_bytes)
        uploader.look(remote)
        on_total(uploader.missing_bytes(store, manifest.shards))
        files, num_bytes = uploader.send(store, manifest.shards)
        send_lists(folder, store)
        _make_sure(store, folder, manifest, uploader, remote)
        first = manifest.generation if remote is None else remote.generation + 1
        for number in range(first, manifest.generation + 1):  # without a gap, or readers would not find the last
            if not commit(folder, number, dump_manifest(_as_number(manifest, number)), is_first=remote is None):
                raise StoreError(_moved_on(store, folder, find_newest(folder, lists=True)))
    return Pushed(
        generation=manifest.generation,
        samples=manifest.samples,
        is_committed=first <= manifest.generation,
        files=files,
        num_bytes=num_bytes,
    )


def _make_sure(store: Path, folder: ObjectFolder, manifest: Manifest, uploader: Uploader, remote: Manifest | None) -> None:
    """Look whether everything is there, and send again what has been removed."""
    lacking: list[str] = []
    for _ in range(_ROUNDS):
        uploader.look(remote, {entry.name for entry in manifest.shards})
        lacking = uploader.lacking(store, manifest.shards)
        if not lacking:
            return
        uploader.send(store, manifest.shards)
    raise StoreError(
        f"{folder.place(lacking[0])} was sent, and is not there ({counted(len(lacking), 'object')}): something removes "
        "objects that no generation lists yet, such as a rule of the bucket; nothing was committed: change that and push again"
    )


def _refuse_other(store: Path, manifest: Manifest, folder: ObjectFolder, remote: Manifest) -> None:
    """Check that the bucket's newest generation is one of this store's."""
    if remote.store_id != manifest.store_id:
        raise StoreError(
            f"{folder.url} holds another store ({counted(remote.samples, 'sample')}, id {remote.store_id}, not "
            f"{manifest.store_id}); choose another URL"
        )
    if remote.digest == manifest.digest:
        return
    for number in generations(store):
        if remote.generation <= number and remote.generation < manifest.generation:
            try:
                own = read_manifest(store, number)
            except StoreError:
                continue
            if remote.digest == _as_number(own, remote.generation).digest:
                return
    raise StoreError(_moved_on(store, folder, remote))


def _as_number(manifest: Manifest, number: int) -> Manifest:
    """Return a generation as it is committed under a number: the bucket may lack generations before it."""
    if number == manifest.generation:
        return manifest
    return finished(dataclasses.replace(manifest, generation=number), "the store")[0]


def _moved_on(store: Path, folder: ObjectFolder, remote: Manifest | None) -> str:
    about = f"generation {remote.generation} with {counted(remote.samples, 'sample')}" if remote else "another state"
    return (
        f"{folder.url} has {about}, which is not a generation of {store}: it was changed there, or `store compact --gc` has "
        f"removed it here; nothing was committed. `store pull {folder.url} NEW.store` and make your changes there, or make "
        "them at the URL itself (`ingest pack`, `store drop` and others take it), or push to another URL"
    )
