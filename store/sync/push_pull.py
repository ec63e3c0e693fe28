"""Push a store to object storage, and pull one: what is not there yet is sent, then the newest generation appears."""

from __future__ import annotations

import dataclasses
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bucketline.command_line import counted
from bucketline.errors import CorruptError, StoreError, UsageError
from bucketline.files.atomic_write import refuse_existing, refuse_too_little_disk, staged_folder, write_or_explain
from bucketline.store.folder import LocalFolder, MissingObjectError
from bucketline.store.format.block import file_digest
from bucketline.store.format.manifest import (
    DROPPED_SUFFIX,
    MANIFEST,
    dump_manifest,
    finished,
    generation_path,
    generations,
    read_manifest,
    shard_paths,
)
from bucketline.store.read.files import all_files, files_of, list_of, refuse_lost_shards
from bucketline.store.remote.generations import (
    commit,
    complete_first,
    find_newest,
    newest_generation,
    read_generation,
    refuse_without_put_if_absent,
)
from bucketline.store.transfer import LISTS, MAX_LIST_BYTES, Downloader, Uploader, is_there, noted, send_dropped, send_lists
from bucketline.store.write.publish import changing, existing_manifest, prepare_store

if TYPE_CHECKING:
    from collections.abc import Callable

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
    refuse_without_put_if_absent(folder, remote)
    if remote is not None:
        complete_first(folder, remote)
    names = {entry.name for entry in manifest.shards}
    with noted(folder, "push", names - ({entry.name for entry in remote.shards} if remote else set())):
        uploader = Uploader(folder, jobs=jobs, on_bytes=on_bytes)
        uploader.look(remote)
        on_total(uploader.missing_bytes(store, manifest.shards))
        files, num_bytes = uploader.send(store, manifest.shards)
        if manifest.dropped != (remote.dropped if remote else None):
            sent = send_dropped(folder, store, manifest)
            files, num_bytes = files + (sent > 0), num_bytes + sent
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


NOTE = ".pulling"  # the id of the store that an unfinished pull is of


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulled:
    """Result of a pull."""

    generation: int  # of the store on the disk
    samples: int
    shards: int
    num_bytes: int  # received
    is_update: bool  # an older generation of the store was there


def pull(
    folder: ObjectFolder,
    out: Path,
    *,
    jobs: int = 4,
    on_total: Callable[[int], None] = lambda _: None,
    on_bytes: Callable[[int], None] = lambda _: None,
) -> Pulled:
    """Write the newest generation of a store in object storage to the store `out` on a disk.

    If `out` is an older generation of the same store, only what it lacks is sent. If it is interrupted, the same call
    continues.
    """
    out = Path(os.path.abspath(out))  # noqa: PTH100 - keeps its links unresolved
    manifest = newest_generation(folder)
    received = [0]

    def counted_bytes(num_bytes: int) -> None:
        received[0] += num_bytes
        on_bytes(num_bytes)

    downloader = Downloader(folder, jobs=jobs, on_bytes=counted_bytes)
    is_update = (out / MANIFEST).is_file()
    if is_update:
        manifest = _update(folder, out, manifest, downloader, on_total)
    else:
        refuse_existing(out, "path")
        with staged_folder(out, resumable=True) as partial:
            _begin(partial, manifest)
            _get(folder, partial, manifest, downloader, on_total)
            _remove_others(partial, manifest)
            (partial / NOTE).unlink()
    return Pulled(
        generation=manifest.generation,
        samples=manifest.samples,
        shards=len(manifest.shards),
        num_bytes=received[0],
        is_update=is_update,
    )


def _begin(partial: Path, manifest: Manifest) -> None:
    """Note of which store the pull is; remove what another pull left, and files of other shards of the same names."""
    note = partial / NOTE
    if not (note.is_file() and note.read_text(encoding="ascii", errors="replace") == manifest.store_id):
        shutil.rmtree(partial)
        partial.mkdir()
        write_or_explain(note, manifest.store_id.encode("ascii"))
    prepare_store(partial)
    for entry in manifest.shards:
        meta = shard_paths(partial, entry.name).meta
        if meta.exists() and file_digest(meta)[1] != entry.meta.digest:
            for path, _ in files_of(partial, entry):
                path.unlink(missing_ok=True)


def _get(
    folder: ObjectFolder, store: Path, manifest: Manifest, downloader: Downloader, on_total: Callable[[int], None]
) -> None:
    files = [list(files_of(store, entry)) for entry in manifest.shards]
    num_bytes = sum(expected.num_bytes for own in files for path, expected in own if not is_there(path, expected))
    refuse_too_little_disk(store, num_bytes, f"pulling {folder.url}")
    on_total(num_bytes)
    downloader.get([*list_of(store, manifest), *(file for own in files for file in own[1:])])
    downloader.get(own[0] for own in files)  # a writer never adopts a shard without its sidecars
    get_lists(folder, store)
    data = dump_manifest(manifest)
    write_or_explain(generation_path(store, manifest.generation), data)
    write_or_explain(store / MANIFEST, data)


def get_lists(folder: ObjectFolder, store: Path) -> None:
    """Get what the packer noted next to a store."""
    for name in LISTS:
        try:
            data = folder.read(name, MAX_LIST_BYTES)
        except (MissingObjectError, CorruptError):  # none, or too long
            continue
        write_or_explain(store / name, data)


def _remove_others(store: Path, manifest: Manifest) -> None:
    """Remove what an earlier, interrupted pull got and the generation does not list (it was of an older one)."""
    listed = {path for path, _ in all_files(store, manifest)}
    for path in (*(store / "shards").iterdir(), *(store / "generations").glob(f"*{DROPPED_SUFFIX}")):
        if path not in listed:
            path.unlink()


def _update(
    folder: ObjectFolder, store: Path, manifest: Manifest, downloader: Downloader, on_total: Callable[[int], None]
) -> Manifest:
    """Bring an older generation of the store on the disk to the newest one. Under the store's lock."""
    with changing(store, adopting=False) as own:
        if own.store_id != manifest.store_id:
            raise UsageError(f"{store} is another store than {folder.url}; choose a path where there is nothing")
        if own.digest == manifest.digest:
            return own
        try:
            is_older = (
                own.generation < manifest.generation and read_generation(folder, own.generation, manifest).digest == own.digest
            )
        except StoreError as error:
            raise StoreError(
                f"generation {own.generation} of {store} is no longer in {folder.url}, so that nothing tells whether "
                f"{store} has changes of its own; pull into a path where there is nothing ({error})"
            ) from None
        if not is_older:
            raise StoreError(
                f"{store}, generation {own.generation}, has changes that {folder.url}, generation {manifest.generation}, does "
                "not have; push them, or pull into a path where there is nothing"
            )
        shards = {entry.name: entry.lmdb.digest for entry in own.shards}
        if other := [entry.name for entry in manifest.shards if shards.get(entry.name, entry.lmdb.digest) != entry.lmdb.digest]:
            raise StoreError(
                f"{store} has another shard {other[0]} than {folder.url}, where the name was used again; "
                "pull into a path where there is nothing"
            )
        _get(folder, store, manifest, downloader, on_total)
    return manifest
