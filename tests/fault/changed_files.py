"""A shard's file truncated under the map of a service, or exchanged for another shard's, while batches are read."""

from __future__ import annotations

import os
from pathlib import Path

from bucketline.errors import BucketlineError, CorruptError
from bucketline.loader import Loader
from tests.fault.forcing import Bench, Ended, goes_on, started, until_error


def _files(path: Path, suffix: str = "lmdb") -> list[Path]:
    return [path / "shards" / f"{shard}.{suffix}" for shard in ("g0", "g1")]


def truncate_under_service(bench: Bench, service: str | None, *, suffix: str, num_bytes: int) -> Ended:
    """Truncate the files that a private service maps: it ends, the caller gets an error, and continues once they are back."""
    path = bench.store()
    with started(Loader(path, bench.config(prefetch_bytes=1), service=service)) as loader:
        batches = loader.forever()
        first = next(batches).step + 1
        whole = {file: file.read_bytes() for file in _files(path, suffix)}
        for file in whole:
            os.truncate(file, num_bytes)
        # one that was not mapped yet is held against its length, and the service lives
        words = rf"has ended without a message|has {num_bytes} bytes, the manifest says"
        ended = until_error(batches, first, BucketlineError, words)
        for file, data in whole.items():
            file.write_bytes(data)
        goes_on(loader)
    return ended


def swap_file(bench: Bench, service: str | None) -> Ended:
    """Exchange two shards' files before they are read by plain reads: an error names the shard; put back, it continues."""
    path = bench.store()
    one, two = _files(path)

    def exchange() -> None:
        one.rename(path / "aside")
        two.rename(one)
        (path / "aside").rename(two)

    exchange()
    with started(Loader(path, bench.config(plain_reads=True), service=service)) as loader:
        ended = until_error(
            loader.forever(), 0, CorruptError, r"g\d.lmdb (has \d+ bytes, the manifest says|belongs to another shard)"
        )
        exchange()
        goes_on(loader)
    return ended
