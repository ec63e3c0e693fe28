"""The store that is imported into: on a disk, or in object storage, to which each shard is sent as it is sealed."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

from bucketline.ingest.packing.target import newest_store, working_store
from bucketline.store.commands.progress import bar_of_bytes
from bucketline.store.read.info import disk_bytes
from bucketline.store.read.lost_files import files_of
from bucketline.store.write.newest import newest_manifest
from bucketline.store.write.part_writer import PartWriter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from bucketline.ingest.importers.config import ImportConfig
    from bucketline.store import Manifest, Store, StoreWriter
    from bucketline.store.transfer.sender import ShardSender


class Destination:
    """The store of an import, on one rank."""

    def __init__(self, config: ImportConfig) -> None:
        self._config, self.path = config, config.store
        self._shard_bytes = config.shard_size_mib << 20
        self._working = working_store(config)

    def held(self) -> AbstractContextManager[None]:
        """Let `path` stand for the newest generation of a store in object storage. On rank 0, before it is read.

        Raises:
            LockedError, StoreError: as `WorkingStore.held`.
        """
        return nullcontext() if self._working is None else self._working.held()

    def newest(self) -> Store | None:
        """Return the newest generation of the store, after `held` if it is not a dry run; None if there is none.

        Raises:
            StoreError: as `newest_store`.
        """
        if self._working is None or self._config.dry_run:
            return newest_store(self._config)
        manifest = newest_manifest(self.path)
        return None if manifest is None else self._working.open(manifest)

    def adopt(self, manifest: Manifest) -> None:
        """Send the shards that an interrupted run has left. On rank 0."""
        if self._working is not None:
            self._working.send_left(manifest, lambda total: bar_of_bytes("send", total))

    @contextmanager
    def part(self, writer: StoreWriter, run: str, *, is_first: bool, check: Callable[[], None]) -> Iterator[PartWriter]:
        """Yield the writer of a rank's shards, which are called by `run` and a number; send what it seals.

        Raises:
            StoreError: if a shard cannot be sealed or sent; it stays for the next run.
        """
        names = f"{run}-{{:04d}}"
        if self._working is None:
            with PartWriter(self.path, writer._form, names, self._shard_bytes) as part:
                yield part
            return
        manifest = newest_manifest(self.path)
        assert manifest is not None
        with self._working.sender(manifest, run, is_first=is_first) as sender:
            with _SentPart(writer, names, self._shard_bytes, sender, check) as part:
                yield part
            with bar_of_bytes("send", sender.bytes_left) if is_first else nullcontext(lambda _: None) as on_bytes:
                sender.finish(check, on_bytes)

    def commit(self, published: Manifest) -> tuple[Manifest, int]:
        """Commit a generation of `path` where the store is; return it as it is there, and the store's bytes.

        Raises:
            StoreError, FingerprintError: as `WorkingStore.commit`.
        """
        committed = published if self._working is None else self._working.commit(published)
        return committed, self.disk_bytes(committed)

    def disk_bytes(self, manifest: Manifest) -> int:
        """Return the size of the store's files."""
        if self._working is None:
            return disk_bytes(self.path)
        return sum(file.num_bytes for entry in manifest.shards for _, file in files_of(self.path, entry))


class _SentPart(PartWriter):
    """Has each shard sent once it is sealed, and begins another only when few wait."""

    def __init__(
        self, writer: StoreWriter, names: str, shard_bytes: int, sender: ShardSender, check: Callable[[], None]
    ) -> None:
        super().__init__(writer.path, writer._form, names, shard_bytes)
        self._sender, self._check = sender, check

    def seal(self) -> None:
        num_sealed = len(self.sealed)
        super().seal()
        for name in self.sealed[num_sealed:]:
            self._sender.put(name)
            self._sender.wait_for_room(self._check)
