"""The sets of prompts next to a store's shards, on a disk or in object storage: list, read, write and copy them.

No generation lists them, so that plans and checkpoints do not depend on them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bucketline.errors import CorruptError, StoreError, UsageError
from bucketline.store.folder import DeniedError, LocalFolder, MissingObjectError, as_folder
from bucketline.store.prompts.prompt_file import decode_prompts, proof_bytes, refuse_other_file
from bucketline.store.side_files import SideFiles

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from bucketline.store.folder import Folder
    from bucketline.store.format.manifest import Manifest
    from bucketline.store.prompts.prompt_file import PromptSet
    from bucketline.store.side_files import Place

_FOLDER, _SUFFIX = "prompts", ".safetensors"
DEFAULT = "default"  # name of a set; the only one that is found on a web server unless it is named
MAX_BYTES = 2 << 30
LARGE_BYTES = 1 << 20  # of one that is looked at before it is read whole, in object storage
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribedSet:
    """A set of prompts, as `store info` shows it."""

    name: str
    num_bytes: int
    prompts: int | None  # how many; None if it is damaged or cannot be read
    problem: str | None  # why not


def is_set_name(name: str) -> bool:
    """Return True if a set of prompts may be called so."""
    return _NAME.fullmatch(name) is not None


def checked_name(name: str) -> str:
    """Return the name of a set.

    Raises:
        UsageError: if it cannot be one.
    """
    if not is_set_name(name):
        raise UsageError(f"{name!r:.80} is not the name of a set of prompts; expected up to 64 letters, digits, _ and -")
    return name


def set_names(place: Place) -> list[str]:
    """Return the names of the sets, sorted. Where folders cannot be listed, such as on a web server, DEFAULT if it is there.

    Raises:
        StoreError: if the place cannot be reached.
    """
    folder = as_folder(place)
    try:
        found = [] if folder.is_read_only else [file.name for file in folder.names(_FOLDER)]
        if folder.is_read_only and folder.look_up(file_of(DEFAULT)) is not None:
            found = [file_of(DEFAULT)]
    except DeniedError:
        found = [] if _read(folder, DEFAULT) is None else [file_of(DEFAULT)]
    names = (name.removeprefix(f"{_FOLDER}/").removesuffix(_SUFFIX) for name in found if name.endswith(_SUFFIX))
    return sorted(name for name in names if _NAME.fullmatch(name))


def read_set(place: Place, manifest: Manifest, name: str) -> PromptSet | None:
    """Return a set of prompts of a store; None if there is none of that name.

    Raises:
        CorruptError: if it is damaged.
        FingerprintError: if other encoders made it.
        StoreError: if it cannot be read.
    """
    folder = as_folder(place)
    data = _read(folder, name)
    return None if data is None else decode_prompts(manifest, data, folder.place(file_of(name)))


def write_set(place: Place, name: str, data: bytes) -> None:
    """Write a set of prompts; one of the same name is replaced, at once and whole.

    Raises:
        UsageError: if it is longer than readers accept.
        StoreError: if it cannot be written; the previous set is kept.
    """
    if len(data) > MAX_BYTES:
        raise UsageError(f"the set {name!r} has {len(data)} bytes, at most {MAX_BYTES} are read; take fewer or shorter prompts")
    as_folder(place).write(file_of(name), data)


def copy_sets(source: Place, target: Place, manifest: Manifest) -> int:
    """Copy all sets of a store that the target does not have in the same form, and replace those of the same name.

    Return their bytes. `manifest`: of the source.

    Raises:
        CorruptError: if one is damaged; those before it are there.
        StoreError: if one cannot be read or written.
    """
    copied, own, other = 0, as_folder(source), as_folder(target)
    for name in set_names(own):
        data = _read(own, name)
        if data is None:
            continue  # removed meanwhile
        decode_prompts(manifest, data, own.place(file_of(name)))
        if not _has(other, name, data):
            write_set(target, name, data)
            copied += len(data)
    return copied


def merge_sets(sources: list[tuple[Place, Manifest]], target: Path) -> None:
    """Copy the sets of several stores; of different ones of one name, the later ones get a number: `NAME-2`.

    Raises:
        CorruptError, StoreError: as `copy_sets`.
    """
    taken: dict[str, bytes] = {}
    for source, manifest in sources:
        folder = as_folder(source)
        for name in set_names(folder):
            data = _read(folder, name)
            if data is None or data in taken.values():
                continue
            decode_prompts(manifest, data, folder.place(file_of(name)))
            candidates = (name, *(f"{name[:60]}-{number}" for number in range(2, 2 + len(sources))))
            own = next(candidate for candidate in candidates if candidate not in taken)
            write_set(target, own, data)
            taken[own] = data


def describe_sets(place: Place, manifest: Manifest) -> Iterator[DescribedSet]:
    """Read all sets of a store and yield what they are, and what is wrong with them."""
    folder = as_folder(place)
    for name in set_names(folder):
        data = None
        try:
            data = _read(folder, name)
            if data is None:
                continue
            found, problem = len(decode_prompts(manifest, data, folder.place(file_of(name))).prompts), None
        except StoreError as error:
            found, problem = None, str(error)
        yield DescribedSet(name=name, num_bytes=len(data or b""), prompts=found, problem=problem)


def check_sets(place: Place, manifest: Manifest) -> Iterator[tuple[str, str | None]]:
    """Read all sets of a store and yield the names of their files; of one with a fault, that and a remedy."""
    for found in describe_sets(place, manifest):
        remedy = f"rerun `ingest prompts --name {found.name}`, or remove the file"
        yield file_of(found.name), None if found.problem is None else f"{found.problem}; {remedy}"


PROMPT_SETS = SideFiles(copy=copy_sets, merge=merge_sets, check=check_sets)


def file_of(name: str) -> str:
    """Return the name of a set's file in the store's folder."""
    return f"{_FOLDER}/{name}{_SUFFIX}"


def _read(folder: Folder, name: str) -> bytes | None:
    """Return a set's file; None if there is none."""
    file, where = file_of(checked_name(name)), folder.place(file_of(name))
    try:
        found = folder.look_up(file)  # whose length the answer is held to
        if found is None:
            return None
        if found.num_bytes > MAX_BYTES:
            raise CorruptError(f"{where} has {found.num_bytes} bytes, at most {MAX_BYTES} are accepted")
        if found.num_bytes > LARGE_BYTES:
            refuse_other_file(folder.read_range(file, 0, LARGE_BYTES), where)
        return folder.read(file, found.num_bytes)
    except (MissingObjectError, DeniedError):
        return None


def _has(folder: Folder, name: str, data: bytes) -> bool:
    """Return whether a folder has exactly this file; of object storage by its length, and the checksums at its beginning."""
    num_bytes = len(data) if isinstance(folder, LocalFolder) else proof_bytes(data, name)
    try:
        found = folder.look_up(file_of(name))
        if found is None or found.num_bytes != len(data):
            return False
        return bytes(folder.read_range(file_of(name), 0, num_bytes)) == data[:num_bytes]
    except StoreError:
        return False
