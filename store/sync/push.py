"""Push a store to object storage: what is not there yet is sent, then its generations are committed."""

from __future__ import annotations

import dataclasses
import json
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bucketline.command_line import counted
from bucketline.errors import StoreError
from bucketline.files.atomic_write import write_or_explain
from bucketline.files.regular_file import read_regular
from bucketline.store.folder import LocalFolder
from bucketline.store.format.manifest import dump_manifest, finished, generations, read_manifest
from bucketline.store.read.lost_files import lost_shards, refuse_lost_shards
from bucketline.store.remote.generations import (
    commit,
    complete_first,
    find_newest,
    read_generation,
    refuse_without_put_if_absent,
)
from bucketline.store.transfer.sender import noted
from bucketline.store.transfer.upload import Uploader, send_lists
from bucketline.store.write.newest import existing_manifest

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from bucketline.store.format.manifest import Manifest
    from bucketline.store.remote.objects import ObjectFolder
    from bucketline.store.transfer.upload import Sent

PUSHED = "pushed.json"  # next to the manifest: which generation is at which URL, for when this store has removed it
_MAX_NOTE_BYTES = 1 << 20
_ROUNDS = 3  # of sending what is gone when it should be committed


@dataclass(frozen=True, slots=True, kw_only=True)
class Pushed:
    """Result of a push."""

    generation: int  # newest in the bucket afterwards
    samples: int
    committed: tuple[int, ...]  # generations; none if the bucket had them all
    is_ahead: bool  # the bucket has a newer generation than this store
    sent: Sent


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

    Raises:
        StoreError: if a file of the store is lost, the folder holds another store or has generations that this store does not
            know, or the storage does not honour put-if-absent.
        CorruptError: if a file differs from the manifest; nothing is committed then.
    """
    folder.refuse_read_only()
    manifest = existing_manifest(store)
    refuse_lost_shards(LocalFolder(store), manifest)
    remote = find_newest(folder, lists=True)
    is_ahead = remote is not None and _relation(store, manifest, folder, remote)
    uploader = Uploader(folder, jobs=jobs, on_bytes=on_bytes)
    if is_ahead:
        assert remote is not None
        note_pushed(store, folder.url, remote)
        sent = uploader.send(store, ())
        return Pushed(generation=remote.generation, samples=remote.samples, committed=(), is_ahead=True, sent=sent)
    refuse_without_put_if_absent(folder)
    if remote is not None:
        complete_first(folder, remote)
    first = manifest.generation if remote is None else remote.generation + 1
    own = {number: _own_generation(store, manifest, number) for number in range(first, manifest.generation + 1)}
    names = {entry.name for document in own.values() if document for entry in document.shards}
    with noted(folder, "push", names - ({entry.name for entry in remote.shards} if remote else set())):
        uploader.look(remote)
        on_total(uploader.missing_bytes(store, manifest.shards))
        sent = uploader.send(store, manifest.shards)
        send_lists(folder, store)
        documents = [_document(manifest, number, found, uploader) for number, found in own.items()]
        _make_sure(store, documents, uploader, remote, names)
        before = remote
        for document in documents:
            note_pushed(store, folder.url, before, document)  # the commit may be the last that this process does
            if not commit(folder, document.generation, dump_manifest(document), is_first=remote is None):
                raise StoreError(_moved_on(store, folder, find_newest(folder, lists=True)))
            before = document
    note_pushed(store, folder.url, manifest)
    return Pushed(generation=manifest.generation, samples=manifest.samples, committed=tuple(own), is_ahead=False, sent=sent)


def _make_sure(
    store: Path, documents: list[Manifest], uploader: Uploader, remote: Manifest | None, noted_names: set[str]
) -> None:
    """Send the other generations' files, then look whether everything is there, and send again what has been removed.

    Raises:
        StoreError: if an object is not there however often it is sent.
    """
    lacking: list[str] = []
    for _ in range(_ROUNDS):
        for document in documents:
            uploader.send(store, document.shards)
        uploader.look(remote, noted_names)
        lacking = [name for document in documents for name in uploader.lacking(store, document.shards)]
        if not lacking:
            return
    raise StoreError(
        f"{uploader.place(lacking[0])} was sent, and is not there ({counted(len(lacking), 'object')}): something removes "
        "objects that no generation lists yet, such as a rule of the bucket; nothing was committed: change that and push again"
    )


def _relation(store: Path, manifest: Manifest, folder: ObjectFolder, remote: Manifest) -> bool:
    """Return whether the bucket's newest generation is a descendant of this store's; it may be an ancestor otherwise.

    Raises:
        StoreError: if it is neither.
    """
    if remote.store_id != manifest.store_id:
        raise StoreError(
            f"{folder.url} holds another store ({counted(remote.samples, 'sample')}, id {remote.store_id}, not "
            f"{manifest.store_id}); choose another URL, or join the two with `store merge`"
        )
    if remote.generation > manifest.generation:
        try:
            is_known = read_generation(folder, manifest.generation, remote).digest == manifest.digest
        except StoreError:  # removed there
            is_known = (manifest.generation, manifest.digest) in _noted(store, folder.url)
        if not is_known:
            raise StoreError(_moved_on(store, folder, remote))
        return True
    if remote.digest != manifest.digest and not _is_ancestor(store, manifest, remote, folder.url):
        raise StoreError(_moved_on(store, folder, remote))
    return False


def _is_ancestor(store: Path, manifest: Manifest, remote: Manifest, url: str) -> bool:
    """Return whether the bucket's generation is an earlier one of this store, or stands for one in an interrupted push."""
    if remote.generation == manifest.generation:
        return False
    if (remote.generation, remote.digest) in _noted(store, url):
        return True
    for number in generations(store):
        if number >= remote.generation:
            try:
                own = read_manifest(store, number)
            except StoreError:
                continue
            if remote.digest in (own.digest, _standing_in(own, remote.generation).digest):
                return True
    return False


def _own_generation(store: Path, manifest: Manifest, number: int) -> Manifest | None:
    """Return a generation of the store if it is there and has all its files."""
    if number == manifest.generation:
        return manifest
    try:
        own = read_manifest(store, number)
        return own if own.store_id == manifest.store_id and not lost_shards(LocalFolder(store), own.shards) else None
    except StoreError:
        return None


def _document(manifest: Manifest, number: int, own: Manifest | None, uploader: Uploader) -> Manifest:
    """Return the manifest to commit as generation `number`: the store's own, unless shards would be sent only for it.

    Generations follow without a gap, or readers would not find the last. One that the store has removed, or whose shards
    later ones have rewritten, is stood for by the newest under its number.
    """
    if own is None or not all(uploader.has(f"shards/{entry.name}.lmdb") for entry in own.shards):
        return _standing_in(manifest, number)
    return own


def _standing_in(manifest: Manifest, number: int) -> Manifest:
    return finished(dataclasses.replace(manifest, generation=number), "the store")[0]


def _moved_on(store: Path, folder: ObjectFolder, remote: Manifest | None) -> str:
    about = f"generation {remote.generation} with {counted(remote.samples, 'sample')}" if remote else "another state"
    return (
        f"{folder.url} has moved on: it has {about}, which {store} does not descend from; nothing was committed. "
        f"`store pull {folder.url} NEW.store` and make your changes there, or make them at the URL itself (`ingest pack`, "
        "`store drop` and others take it), or push to another URL"
    )


def _notes(store: Path) -> dict[str, Any]:
    try:
        notes = json.loads(read_regular(store / PUSHED, _MAX_NOTE_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    return notes if isinstance(notes, dict) else {}


def _noted(store: Path, url: str) -> list[tuple[object, object]]:
    """Return generations and digests of what was pushed to a URL, or was just about to be."""
    note = _notes(store).get(url)
    both = (note, note.get("next")) if isinstance(note, dict) else ()
    return [(one.get("generation"), one.get("digest")) for one in both if isinstance(one, dict)]


def note_pushed(store: Path, url: str, manifest: Manifest | None, upcoming: Manifest | None = None) -> None:
    """Note next to a store which generation of it is at a URL, and which one is about to be.

    The note is a hint: the store may have removed its own copy.
    """
    notes = _notes(store)
    note: dict[str, object] = {} if manifest is None else _as_noted(manifest)
    if upcoming is not None:
        note["next"] = _as_noted(upcoming)
    if notes.get(url) != note:
        with suppress(StoreError):  # a store may be read-only
            write_or_explain(store / PUSHED, json.dumps({**notes, url: note}, indent=1, sort_keys=True).encode() + b"\n")


def _as_noted(manifest: Manifest) -> dict[str, object]:
    return {"generation": manifest.generation, "digest": manifest.digest}
