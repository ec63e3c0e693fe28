"""Check the store's folder outside the newest generation: older generations, their files, and strays."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

import xxhash

from bucketline.errors import CorruptError, StoreError
from bucketline.store.format.manifest import MANIFEST, MAX_MANIFEST_BYTES, Manifest, dump_manifest, parse_manifest
from bucketline.store.format.manifest_entries import COLUMN_SHARD_NAME
from bucketline.store.read.lost_files import files_of
from bucketline.store.remote.generations import generation_name, listed_generations
from bucketline.store.remote.retries import asked_again
from bucketline.store.verify.faults import Fault, Faults, mismatch
from bucketline.store.write.attempts import ATTEMPTS_FOLDER, KEPT_CAPTIONS, RANKS_FOLDER
from bucketline.store.write.column_shard import MAKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from bucketline.store.folder import Folder
    from bucketline.store.format.manifest_entries import DroppedEntry, FileEntry

_KNOWN = ("rejects.jsonl", "without_caption.jsonl", "long_captions.jsonl")  # see FORMAT.md
_COLUMN = "values of a column that is being added, or that a killed call left"
_PART_BYTES = 8 << 20  # of a file that is read in parts
_NEXT = "on a disk the next pack adopts it if it is complete, in a bucket `store compact --gc` removes it after a day"
_DECODING = "decoding"  # folder of the packer's notes about images that crash their decoder


@dataclass(frozen=True, slots=True, kw_only=True)
class Stray:
    """A file that belongs to no generation, or one that an older generation lacks. Not a fault."""

    path: str  # relative to the store's folder
    what: str


class FolderCheck:
    """Checks everything in a store's folder, on a disk or in object storage, except the newest generation's shards."""

    def __init__(self, folder: Folder, newest: Manifest, on_bytes: Callable[[int], None]) -> None:
        """Read nothing yet; `on_bytes` is called with 0 between files, so that it can end the check by raising."""
        self._folder, self._newest, self._on_bytes = folder, newest, on_bytes
        self._faults = Faults(None)
        self._strays: list[Stray] = []

    @property
    def faults(self) -> tuple[Fault, ...]:
        return self._faults.found

    @property
    def strays(self) -> tuple[Stray, ...]:
        return tuple(sorted(self._strays, key=lambda stray: stray.path))

    def run(self) -> None:
        """Check the manifests' bytes, then files listed only by older generations, then look for strays.

        On a web server, whose folders cannot be listed, only the newest generation's files are known.
        """
        self._own_documents()
        known = set(_files_of(self._newest))
        for manifest in [] if self._folder.is_read_only else self._older():
            own = {name: expected for name, expected in _files_of(manifest).items() if name not in known}
            known |= own.keys()
            for (name, expected), num_bytes in zip(own.items(), self._folder.sizes(list(own)), strict=True):
                self._compare(name, num_bytes, expected, manifest.generation)
        if not self._folder.is_read_only:
            self._look_for_strays(known)

    def _own_documents(self) -> None:
        """Check that both manifest files of the newest generation have exactly the bytes that a writer writes."""
        own = generation_name(self._newest.generation)
        for name in (MANIFEST, own):
            with self._reporting(f"; copy {MANIFEST} to {self._folder.place(own)}"):
                self._document(name, self._newest.generation)

    def _older(self) -> Iterator[Manifest]:
        for number in listed_generations(self._folder):
            if number != self._newest.generation:
                self._on_bytes(0)
                with self._reporting("; a run that was planned on that generation cannot resume"):
                    yield self._document(generation_name(number), number)

    def _document(self, name: str, generation: int) -> Manifest:
        """Return a manifest that is one of this store's, and has exactly the bytes that a writer writes."""

        def read() -> Manifest:
            data, place = self._folder.read(name, MAX_MANIFEST_BYTES), self._folder.place(name)
            found = parse_manifest(data, place)
            if found.store_id != self._newest.store_id or (name != MANIFEST and found.generation != generation):
                raise CorruptError(f"{place} is generation {found.generation} of store {found.store_id}; move it away")
            if data != dump_manifest(found):
                raise CorruptError(f"{place} differs in its bytes from what was written, though its content is the same")
            return found  # of `manifest.json`, another one may have been published meanwhile

        return asked_again(read, self._folder.deadline_s, most_wrong=2)

    def _compare(self, name: str, num_bytes: int | None, expected: FileEntry | DroppedEntry, generation: int) -> None:
        """Compare a file, of this many bytes, with what an older generation says of it."""
        self._on_bytes(0)
        if num_bytes is None:
            self._strays.append(Stray(path=name, what=f"missing; only generation {generation} and older ones list it"))
            return

        def compare() -> None:
            digest = self._digest(name, num_bytes) if num_bytes == expected.num_bytes else None
            if fault := mismatch(name, num_bytes, digest, expected, f"generation {generation}"):
                raise CorruptError(fault)

        with self._reporting(""):
            asked_again(compare, self._folder.deadline_s, most_wrong=2)

    def _digest(self, name: str, num_bytes: int) -> str:
        state = xxhash.xxh3_128()
        for begin in range(0, num_bytes, _PART_BYTES):
            self._on_bytes(0)
            state.update(self._folder.read_range(name, begin, min(begin + _PART_BYTES, num_bytes)))
        return state.hexdigest()

    def _look_for_strays(self, known: set[str]) -> None:
        for file in self._folder.names():
            parts = tuple(file.name.split("/"))
            if file.name not in known and parts[-2:-1] != (_DECODING,):
                suffix = PurePosixPath(file.name).suffix
                if (what := _what_is(parts, suffix)) is not None:
                    self._strays.append(Stray(path=file.name, what=what))

    @contextmanager
    def _reporting(self, advice: str) -> Iterator[None]:
        """Report what a file cannot be read for, or is not."""
        try:
            yield
        except StoreError as error:
            self._faults.of_file(f"{error}{advice}")


def _files_of(manifest: Manifest) -> dict[str, FileEntry | DroppedEntry]:
    """Return the files that a generation lists, by name."""
    return {path.as_posix(): expected for entry in manifest.shards for path, expected in files_of(Path(), entry)}


_IN_PENDING = {
    ATTEMPTS_FOLDER: "belongs to a shard that a worker is making, or that an interrupted run left; the next pack removes it",
    RANKS_FOLDER: "is a message between the ranks of a pack, or what a killed one left; the next pack of several removes it",
    KEPT_CAPTIONS: "belongs to captions that a pack has encoded before its images; the next pack uses them, and removes them",
}


def _what_is(parts: tuple[str, ...], suffix: str) -> str | None:  # noqa: PLR0911 - one return per kind of file
    """Return a description of a file that no generation lists; None if it belongs there."""
    match parts:
        case (name,) if name in (MANIFEST, *_KNOWN):
            return None
        case ("generations", name) if suffix == ".json" and name.removesuffix(suffix).isdecimal():
            return None
        case ("pending", folder, *_) if folder in _IN_PENDING and len(parts) > 2:
            return _IN_PENDING[folder]
        case ("pending", _) if suffix in (".lock", ".lmdb"):
            what = "a shard that is being written, or that an interrupted run left; the next pack adopts it"
            return what if suffix == ".lmdb" else None
        case ("pending", _) if suffix == MAKING:
            return f"{_COLUMN}; the next writer removes it once nobody writes it"
        case ("pending", _) if not suffix:
            return "a note of the shards that a writer sends, or that one left; `store compact --gc` removes it after a day"
        case ("shards", name) if COLUMN_SHARD_NAME.fullmatch(name.removesuffix(suffix)):
            return f"{_COLUMN}; the same call takes it, or `store compact --gc` removes it"
        case ("shards", _) if suffix in (".lmdb", ".extents", ".index"):
            return f"belongs to a shard that no generation lists; {_NEXT}"
    return "not one of the store's files"
