"""Check the store's folder outside the newest generation: older generations, their files, and strays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from bucketline.errors import StoreError
from bucketline.files.regular_file import read_regular
from bucketline.store.format.hashing import file_digest
from bucketline.store.format.manifest import MANIFEST, MAX_MANIFEST_BYTES, Manifest, dump_manifest, read_manifest
from bucketline.store.format.manifest_entries import COLUMN_SHARD_NAME
from bucketline.store.prompts.prompt_sets import describe_sets, file_of
from bucketline.store.read.lost_files import files_of
from bucketline.store.verify.faults import Fault, Faults, mismatch
from bucketline.store.write.attempts import ATTEMPTS_FOLDER, KEPT_CAPTIONS
from bucketline.store.write.column_shard import MAKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from bucketline.store.format.manifest_entries import DroppedEntry, FileEntry
    from bucketline.store.read.store import Store

_KNOWN = ("rejects.jsonl", "without_caption.jsonl", "long_captions.jsonl", "pushed.json", "packed_model.json")  # see FORMAT.md
_COLUMN = "values of a column that is being added, or that a killed call left"
_DECODING = "decoding"  # folder of the packer's notes about images that crash their decoder


@dataclass(frozen=True, slots=True, kw_only=True)
class Stray:
    """A file that belongs to no generation, or one that an older generation lacks. Not a fault."""

    path: str  # relative to the store's folder
    what: str


class FolderCheck:
    """Checks everything in a store's folder except the newest generation's shards."""

    def __init__(self, store: Store, on_bytes: Callable[[int], None]) -> None:
        """Read nothing yet; `on_bytes` is called with 0 between files, so that it can end the check by raising."""
        self._store, self._on_bytes = store, on_bytes
        self._faults = Faults(None)
        self._strays: list[Stray] = []

    @property
    def faults(self) -> tuple[Fault, ...]:
        return self._faults.found

    @property
    def strays(self) -> tuple[Stray, ...]:
        return tuple(sorted(self._strays, key=lambda stray: stray.path))

    def run(self) -> None:
        """Check the manifests' bytes, then files listed only by older generations, then look for strays."""
        self._own_documents()
        known = {path for entry in self._store.manifest.shards for path, _ in files_of(self._store.path, entry)}
        for manifest in self._older():
            for path, expected in (file for entry in manifest.shards for file in files_of(self._store.path, entry)):
                if path not in known:
                    known.add(path)
                    self._compare(path, expected, manifest.generation)
        for found in describe_sets(self._store.path, self._store.manifest):
            self._on_bytes(0)
            known.add(self._store.path / file_of(found.name))
            if found.problem is not None:
                self._faults.of_file(f"{found.problem}; rerun `ingest prompts --name {found.name}`, or remove the file")
        self._look_for_strays(known)

    def _own_documents(self) -> None:
        """Check that both manifest files of the newest generation have exactly the bytes that a writer writes."""
        manifest = self._store.manifest
        own = self._store.path / "generations" / f"{manifest.generation}.json"
        advice = f"copy {MANIFEST} to {own}"
        for path in (self._store.path / MANIFEST, own):
            try:
                same = read_regular(path, MAX_MANIFEST_BYTES) == dump_manifest(manifest)
            except OSError as error:
                self._faults.of_file(f"{path} cannot be read: {error.strerror}; {advice}")
                continue
            if not same and self._is_of(path, manifest.generation):
                self._faults.of_file(
                    f"{path} differs in its bytes from what was written, though its content is the same; {advice}"
                )

    def _is_of(self, path: Path, generation: int) -> bool:
        """Return whether a manifest has this generation: a newer one may have been published meanwhile."""
        if path.name != MANIFEST:
            return True
        try:
            return read_manifest(self._store.path).generation == generation
        except StoreError:
            return True

    def _older(self) -> Iterator[Manifest]:
        for path in sorted((self._store.path / "generations").glob("*.json")):
            if not path.stem.isdecimal() or int(path.stem) == self._store.manifest.generation:
                continue
            self._on_bytes(0)
            try:
                manifest = read_manifest(self._store.path, int(path.stem))
                same = read_regular(path, MAX_MANIFEST_BYTES) == dump_manifest(manifest)
            except (StoreError, OSError) as error:
                what = f"{path} cannot be read: {error.strerror}" if isinstance(error, OSError) else str(error)
                self._faults.of_file(f"{what}; a run that was planned on that generation cannot resume")
                continue
            if manifest.store_id != self._store.manifest.store_id or manifest.generation != int(path.stem):
                self._faults.of_file(f"{path} is generation {manifest.generation} of store {manifest.store_id}; move it away")
            elif not same:
                self._faults.of_file(f"{path} differs in its bytes from what was written, though its content is the same")
            else:
                yield manifest

    def _compare(self, path: Path, expected: FileEntry | DroppedEntry, generation: int) -> None:
        self._on_bytes(0)
        name = path.relative_to(self._store.path)
        try:
            size = path.stat().st_size
            digest = file_digest(path)[1] if size == expected.num_bytes else None
        except FileNotFoundError:
            self._strays.append(Stray(path=str(name), what=f"missing; only generation {generation} and older ones list it"))
            return
        except OSError as error:
            self._faults.of_file(f"{name} cannot be read: {error.strerror}")
            return
        if fault := mismatch(name, size, digest, expected, f"generation {generation}"):
            self._faults.of_file(fault)

    def _look_for_strays(self, known: set[Path]) -> None:
        for path in sorted(self._store.path.rglob("*")):
            if path in known or path.is_dir() or path.parent.name == _DECODING:
                continue
            name = path.relative_to(self._store.path)
            if (what := _what_is(name.parts, path.suffix)) is not None:
                self._strays.append(Stray(path=str(name), what=what))


_IN_PENDING = {
    ATTEMPTS_FOLDER: "belongs to a shard that a worker is making, or that an interrupted run left; the next pack removes it",
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
            return f"{_COLUMN}; the next `add_column` removes it"
        case ("shards", name) if COLUMN_SHARD_NAME.fullmatch(name.removesuffix(suffix)):
            return f"{_COLUMN}; the same call takes it, or `store compact --gc` removes it"
        case ("shards", _) if suffix in (".lmdb", ".extents", ".index"):
            return "belongs to a shard that no generation lists; the next pack adopts it if it is complete"
    return "not one of the store's files"
