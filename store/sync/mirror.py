"""A folder on a disk that stands for a store in object storage while the store is changed.

It is laid out like the store, and the code that changes stores on a disk works on it. Manifest, indexes and lists of dropped
rows are copies; other files of the bucket's shards are only as long as their objects, unless their data was requested. Such
shards are marked by `shards/NAME.remote`; what has no mark was made here.
"""

from __future__ import annotations

import dataclasses
from contextlib import contextmanager
from typing import TYPE_CHECKING

from bucketline.command_line import counted
from bucketline.errors import BucketlineError, StoreError
from bucketline.files.atomic_write import explaining, write_or_explain
from bucketline.files.sparse_file import make_sparse
from bucketline.store.change.commit import drawn_number
from bucketline.store.format.layout import shard_paths
from bucketline.store.format.manifest import (
    MANIFEST,
    dump_manifest,
    finished,
    generation_path,
    generations,
    read_manifest,
)
from bucketline.store.read.lost_files import files_of, files_of_column
from bucketline.store.remote.generations import (
    commit,
    complete_first,
    find_newest,
)
from bucketline.store.transfer.download import Downloader
from bucketline.store.transfer.sender import forget_sent, lost_objects_of, noted, sent_shards
from bucketline.store.transfer.upload import Uploader
from bucketline.store.write.describe import sent_note
from bucketline.store.write.publish import prepare_store

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from bucketline.store.format.manifest import Manifest
    from bucketline.store.format.manifest_entries import ShardEntry
    from bucketline.store.remote.objects import ObjectFolder


SIDECARS_AT_ONCE = 16


class Mirror:
    """A folder that stands for the store in `objects`."""

    def __init__(self, objects: ObjectFolder, path: Path) -> None:
        """Read and request nothing yet."""
        self.objects, self.path = objects, path
        self._downloader = Downloader(objects, jobs=SIDECARS_AT_ONCE)
        self.base: Manifest | None = None  # the bucket's newest generation at the last refresh

    def refresh(self, *, keeps_copies: bool = False) -> Manifest | None:
        """Make the folder stand for the newest generation in the bucket; return it, None if there is no store yet.

        What was made here stays, but for its manifests: sealed shards are then listed by none. `keeps_copies`: those of shards
        that the newest generation no longer lists stay, for readers of an earlier one.
        """
        self.base = newest = find_newest(self.objects, lists=True)
        with explaining(self.path):
            prepare_store(self.path)
            kept = {} if newest is None else {entry.name: entry for entry in newest.shards}
            was_copy = not keeps_copies and self._forget(kept)
            if newest is not None or was_copy:
                (self.path / MANIFEST).unlink(missing_ok=True)
                for number in generations(self.path):
                    generation_path(self.path, number).unlink()
            if newest is None:
                return None
            complete_first(self.objects, newest)
            for entry in newest.shards:
                if self._is_made_here(entry):
                    continue
                self._mark(entry)
                for path, expected in files_of(self.path, entry):
                    if not path.exists() and not _is_copied(path):
                        make_sparse(path, expected.num_bytes)
            files = (file for entry in newest.shards for file in files_of(self.path, entry))
            self._downloader.get(file for file in files if _is_copied(file[0]))
            self._write_manifest(newest)
        return newest

    def _write_manifest(self, manifest: Manifest) -> None:
        data = dump_manifest(manifest)
        write_or_explain(generation_path(self.path, manifest.generation), data)
        write_or_explain(self.path / MANIFEST, data)

    def _marker(self, name: str) -> Path:
        return self.path / "shards" / f"{name}.remote"

    def _mark(self, entry: ShardEntry) -> None:
        self._marker(entry.name).write_text(entry.lmdb.digest, encoding="ascii")

    def _is_made_here(self, entry: ShardEntry) -> bool:
        return not self._marker(entry.name).exists() and shard_paths(self.path, entry.name).lmdb.exists()

    def _forget(self, kept: Mapping[str, ShardEntry]) -> bool:
        """Remove the copies of shards that the bucket's newest generation does not list. Return whether there were copies."""
        markers = list((self.path / "shards").glob("*.remote"))
        for marker in markers:
            name = marker.name.removesuffix(".remote")
            if name not in kept or marker.read_text(encoding="ascii") not in (
                "",
                kept[name].lmdb.digest,
            ):  # earlier versions: ""
                for path in sorted((self.path / "shards").glob(f"{name}.*"), key=lambda path: path == marker):
                    path.unlink()
        return bool(markers)

    def forget_lost(self) -> None:
        """Remove what is left of shards that were sent and never committed, if garbage collection has removed their objects."""
        known = self.base.known_shards if self.base else set[str]()
        with explaining(self.path):
            sent = [entry for name, entry in sent_shards(self.path).items() if name not in known]
            self._forget_sent(lost_objects_of(self.objects, sent))

    def _forget_sent(self, lost: list[str]) -> None:
        if lost and self.base is None:  # a generation that was never committed may list them
            self._return_to_before(set(lost))
        forget_sent(self.path, lost)

    def _return_to_before(self, lost: set[str]) -> None:
        """Remove the folder's generations that list a lost shard; the first lists none."""
        found = [read_manifest(self.path, number) for number in generations(self.path)]
        kept = [manifest for manifest in found if not lost & {entry.name for entry in manifest.shards}]
        self._write_manifest(kept[-1])
        for manifest in found[len(kept) :]:
            generation_path(self.path, manifest.generation).unlink()

    def commit(self, changed: Manifest) -> Manifest | None:
        """Send what a changed manifest lists and commit it as the next generation; None if another writer has committed first.

        Lists of dropped rows get drawn names: another writer may be preparing a generation of the same number.
        """
        base, sent = self.base, sent_shards(self.path)
        before = {entry.name: entry for entry in base.shards} if base else dict[str, "ShardEntry"]()
        to_send = {
            entry.name for entry in changed.shards if entry.name not in before or entry.added != before[entry.name].added
        }
        with noted(self.objects, "change", to_send - sent.keys()):
            uploader = Uploader(self.objects)
            uploader.look(base, set(sent))
            manifest, data = self._prepared(changed, before, uploader)
            new = [entry for entry in manifest.shards if entry != before.get(entry.name)]
            self._refuse_lost([entry for entry in new if entry.name in sent], uploader)
            uploader.send(self.path, new)
            if not commit(self.objects, manifest.generation, data, is_first=base is None):
                return None
        self.base = manifest
        self._write_manifest(manifest)
        return manifest

    def _prepared(self, changed: Manifest, before: Mapping[str, ShardEntry], uploader: Uploader) -> tuple[Manifest, bytes]:
        """Return what is committed for a changed manifest, and its bytes."""
        base, drawn = self.base, drawn_number()
        shards = tuple(self._with_drawn_list(entry, before, drawn) for entry in changed.shards)
        known = changed.known_shards | (base.known_shards if base else set())
        unlisted = known - {entry.name for entry in shards}
        return finished(
            dataclasses.replace(
                changed,
                store_id=base.store_id if base else changed.store_id,
                generation=base.generation + 1 if base else changed.generation,
                shards=shards,
                retired=tuple(sorted(name for name in unlisted if uploader.has_any_of(name))),
            ),
            self.objects.url,
        )

    def _refuse_lost(self, sent: list[ShardEntry], uploader: Uploader) -> None:
        """Check that what had been sent is still there. What is not is forgotten here, so that the next run makes it again.

        Raises:
            StoreError: if a shard is not there.
        """
        lost = [entry.name for entry in sent if uploader.lacking(self.path, [entry], lists=False)]
        if lost:
            self._forget_sent(lost)
            raise StoreError(
                f"{self.objects.url}: {counted(len(lost), 'shard')} that had been sent is no longer there, {lost[0]} first: "
                "somebody has removed what no generation listed; nothing was committed: rerun the command, which packs it again"
            )

    def _with_drawn_list(self, entry: ShardEntry, before: Mapping[str, ShardEntry], drawn: int) -> ShardEntry:
        is_listed = entry.name in before and entry.dropped == before[entry.name].dropped
        if entry.dropped is None or is_listed:
            return entry
        paths = shard_paths(self.path, entry.name)
        write_or_explain(paths.dropped(drawn), paths.dropped(entry.dropped.generation).read_bytes())
        return dataclasses.replace(entry, dropped=dataclasses.replace(entry.dropped, generation=drawn))

    def let_go(self) -> None:
        """Keep only the length of shards that were made here and are in the bucket's newest generation."""
        assert self.base is not None
        for entry in self.base.shards:
            if self._is_made_here(entry):
                self._mark(entry)
                make_sparse(shard_paths(self.path, entry.name).lmdb, entry.lmdb.num_bytes)
                self.let_columns_go(entry)
                sent_note(self.path, entry.name).unlink(missing_ok=True)

    def let_columns_go(self, entry: ShardEntry) -> None:
        """Keep only the length of the files of a shard's added columns."""
        for column in entry.added:
            for path, expected in files_of_column(self.path, entry, column):
                make_sparse(path, expected.num_bytes)


def _is_copied(path: Path) -> bool:
    """Return whether a mirror has a copy of a file of the bucket's shards, and not only its length."""
    return path.suffix == ".index" or path.suffix.startswith(".dropped-")


@contextmanager
def naming(objects: ObjectFolder, path: Path) -> Iterator[None]:
    """Let errors name the URL, not the folder that stands for it."""
    try:
        yield
    except BucketlineError as error:
        raise type(error)(str(error).replace(str(path), objects.url)) from error
