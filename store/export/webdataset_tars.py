"""Export as WebDataset tars: `000000.tar` and so on, three members per sample.

KEY.safetensors is the sample's file, KEY.json its record, KEY.txt its first caption. KEY is the digest of the sample id: an
id never becomes a path. Tars are reproducible: they contain no times or owners.
"""

from __future__ import annotations

import importlib.util
import json
import tarfile
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Any

from bucketline.command_line import human_bytes
from bucketline.errors import StoreError, UsageError
from bucketline.store.export.exporter import Exporter
from bucketline.store.export.sample_file import record_as_json
from bucketline.store.format.hashing import sample_digest, text_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from bucketline.store.export.exporter import ExportedSample, ExportRequest
    from bucketline.store.read.store import Store


class TarExporter(Exporter):
    """Writes the tars, one after another."""

    options = frozenset({"shard_bytes"})

    def __init__(self, store: Store, request: ExportRequest) -> None:
        super().__init__(store, request)
        if importlib.util.find_spec("webdataset") is None:
            raise StoreError("the package webdataset is not installed; install it with: pip install 'bucketline[export]'")

    def write(self, samples: Iterable[ExportedSample], folder: Path) -> None:
        most = self.request.shard_bytes or self.shard_bytes
        tar: Any = None
        number, taken = -1, most  # of the last tar, and the bytes of its members
        with ExitStack() as last:
            for record, data in samples:
                text = record.captions[0] if record.captions else ""
                as_json = json.dumps(record_as_json(record)).encode("ascii")
                members = {"safetensors": data, "json": as_json, "txt": text_bytes(text)}
                own = sum(tarfile.BLOCKSIZE + _rounded(len(member), tarfile.BLOCKSIZE) for member in members.values())
                if _tar_bytes(own) > most:
                    raise UsageError(
                        f"--shard-size is {human_bytes(most)}, a tar with only the sample {record.id[:80]!r} has "
                        f"{_tar_bytes(own)} bytes; give --shard-size {_tar_bytes(own)} or more"
                    )
                if _tar_bytes(taken + own) > most:
                    last.close()
                    number, taken = number + 1, 0
                    tar = last.enter_context(_tar(folder / f"{number:06d}.tar"))
                tar.write({"__key__": sample_digest(record.id).hex(), **members})
                taken += own


@contextmanager
def _tar(path: Path) -> Iterator[Any]:
    from webdataset import TarWriter

    with path.open("wb") as file:
        tar: Any = TarWriter(file, user="", group="", mode=0o644, encoder=False, mtime=0, compress=False)
        try:
            yield tar
        except BaseException:
            with suppress(OSError):  # on a full disk, writing the end of the tar fails too
                tar.close()
            raise
        tar.close()


def _tar_bytes(members_bytes: int) -> int:
    """Return a tar's length: its members, two zero blocks, and padding to a complete record."""
    return _rounded(members_bytes + 2 * tarfile.BLOCKSIZE, tarfile.RECORDSIZE)


def _rounded(num_bytes: int, unit: int) -> int:
    return -(-num_bytes // unit) * unit
