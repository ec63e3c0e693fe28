"""The sets of prompts next to a store's shards, on a disk or in object storage: list, read, write and copy them.

No generation lists them, so that plans and checkpoints do not depend on them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from bucketline.errors import CorruptError, StoreError, UsageError
from bucketline.files.atomic_write import explaining, write_or_explain
from bucketline.files.regular_file import read_regular
from bucketline.store.folder import DeniedError, MissingObjectError
from bucketline.store.prompts.prompt_file import decode_prompts, proof_bytes, refuse_other_file

if TYPE_CHECKING:
    from collections.abc import Iterator

    from bucketline.store.format.manifest import Manifest
    from bucketline.store.prompts.prompt_file import PromptSet
    from bucketline.store.remote.objects import ObjectFolder

_FOLDER, _SUFFIX = "prompts", ".safetensors"
DEFAULT = "default"  # name of a set; the only one that is found on a web server unless it is named
MAX_BYTES = 2 << 30
LARGE_BYTES = 1 << 20  # of one that is looked at before it is read whole, in object storage
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
Place: TypeAlias = "Path | ObjectFolder"


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribedSet:
    """A set of prompts, as `store info` shows it."""

    name: str
    num_bytes: int
    prompts: int | None  # how many; None if it is damaged or cannot be read
    problem: str | None  # why not


def checked_name(name: str) -> str:
    """Return the name of a set.

    Raises:
        UsageError: if it cannot be one.
    """
    if not _NAME.fullmatch(name):
        raise UsageError(f"{name!r:.80} is not the name of a set of prompts; expected up to 64 letters, digits, _ and -")
    return name


def set_names(place: Place) -> list[str]:
    """Return the names of the sets, sorted. Where folders cannot be listed, such as on a web server, DEFAULT if it is there.

    Raises:
        StoreError: if the place cannot be reached.
    """
    if isinstance(place, Path):
        with explaining(place / _FOLDER):
            found = [path.name for path in (place / _FOLDER).iterdir()] if (place / _FOLDER).is_dir() else []
    else:
        found = [name.removeprefix(f"{_FOLDER}/") for name in _objects(place)]
    names = (name.removesuffix(_SUFFIX) for name in found if name.endswith(_SUFFIX))
    return sorted(name for name in names if _NAME.fullmatch(name))


def read_set(place: Place, manifest: Manifest, name: str) -> PromptSet | None:
    """Return a set of prompts of a store; None if there is none of that name.

    Raises:
        CorruptError: if it is damaged.
        FingerprintError: if other encoders made it.
        StoreError: if it cannot be read.
    """
    data = _read(place, name)
    return None if data is None else decode_prompts(manifest, data, _where(place, name))


def write_set(place: Place, name: str, data: bytes) -> None:
    """Write a set of prompts; one of the same name is replaced, at once and whole.

    Raises:
        UsageError: if it is longer than readers accept.
        StoreError: if it cannot be written; the previous set is kept.
    """
    if len(data) > MAX_BYTES:
        raise UsageError(f"the set {name!r} has {len(data)} bytes, at most {MAX_BYTES} are read; take fewer or shorter prompts")
    if not isinstance(place, Path):
        place.write(file_of(name), data)
        return
    folder = place / _FOLDER
    if folder.is_symlink():
        raise StoreError(f"{folder} is a link; a store is changed only where its folders are its own: replace it by the folder")
    with explaining(folder):
        folder.mkdir(exist_ok=True)
    write_or_explain(place / file_of(name), data)


def copy_sets(source: Place, target: Place, manifest: Manifest) -> int:
    """Copy all sets of a store that the target does not have in the same form, and replace those of the same name.

    Return their bytes. `manifest`: of the source.

    Raises:
        CorruptError: if one is damaged; those before it are there.
        StoreError: if one cannot be read or written.
    """
    copied = 0
    for name in set_names(source):
        data = _read(source, name)
        if data is None:
            continue  # removed meanwhile
        decode_prompts(manifest, data, _where(source, name))
        if not _has(target, name, data):
            write_set(target, name, data)
            copied += len(data)
    return copied


def merge_sets(sources: list[tuple[Path, Manifest]], target: Path) -> None:
    """Copy the sets of several stores; of different ones of one name, the later ones get a number: `NAME-2`.

    Raises:
        CorruptError, StoreError: as `copy_sets`.
    """
    taken: dict[str, bytes] = {}
    for source, manifest in sources:
        for name in set_names(source):
            data = _read(source, name)
            if data is None or data in taken.values():
                continue
            decode_prompts(manifest, data, _where(source, name))
            candidates = (name, *(f"{name[:60]}-{number}" for number in range(2, 2 + len(sources))))
            own = next(candidate for candidate in candidates if candidate not in taken)
            write_set(target, own, data)
            taken[own] = data


def describe_sets(place: Place, manifest: Manifest) -> Iterator[DescribedSet]:
    """Read all sets of a store and yield what they are, and what is wrong with them."""
    for name in set_names(place):
        data = None
        try:
            data = _read(place, name)
            if data is None:
                continue
            found, problem = len(decode_prompts(manifest, data, _where(place, name)).prompts), None
        except StoreError as error:
            found, problem = None, str(error)
        yield DescribedSet(name=name, num_bytes=len(data or b""), prompts=found, problem=problem)


def _objects(folder: ObjectFolder) -> list[str]:
    """Return the names of the objects in the folder `prompts`; without the right to list it, DEFAULT's if it is there."""
    try:
        if not folder.is_read_only:
            return [file.name for file in folder.names(_FOLDER)]
        return [] if folder.size(file_of(DEFAULT)) is None else [file_of(DEFAULT)]
    except DeniedError:
        return [] if _read(folder, DEFAULT) is None else [file_of(DEFAULT)]


def file_of(name: str) -> str:
    """Return the name of a set's file in the store's folder."""
    return f"{_FOLDER}/{name}{_SUFFIX}"


def _where(place: Place, name: str) -> str:
    return str(place / file_of(name)) if isinstance(place, Path) else place.place(file_of(name))


def _read(place: Place, name: str) -> bytes | None:
    """Return a set's file; None if there is none."""
    checked_name(name)
    if not isinstance(place, Path):
        try:
            num_bytes = place.size(file_of(name))  # which the answer is held to
            if num_bytes is None:
                return None
            if num_bytes > MAX_BYTES:
                raise CorruptError(f"{_where(place, name)} has {num_bytes} bytes, at most {MAX_BYTES} are accepted")
            if num_bytes > LARGE_BYTES:
                refuse_other_file(place.read_range(file_of(name), 0, LARGE_BYTES), _where(place, name))
            return place.read(file_of(name), num_bytes)
        except (MissingObjectError, DeniedError):  # without the right to list a bucket, what is missing is denied
            return None
    try:
        data = read_regular(place / file_of(name), MAX_BYTES)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StoreError(f"{_where(place, name)} cannot be read: {error.strerror}; fix this and rerun the command") from error
    if len(data) > MAX_BYTES:
        raise CorruptError(f"{_where(place, name)} has more than {MAX_BYTES} bytes, at most these are accepted")
    return data


def _has(target: Place, name: str, data: bytes) -> bool:
    """Return whether a place has exactly this file: by its length, and by the checksums at its beginning."""
    if isinstance(target, Path):
        try:
            return _read(target, name) == data
        except StoreError:
            return False
    proof = data[: proof_bytes(data, name)]
    return target.size(file_of(name)) == len(data) and bytes(target.read_range(file_of(name), 0, len(proof))) == proof
