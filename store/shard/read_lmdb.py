"""Open a shard's file through LMDB, which follows pointers in it: to seal it, or once its digest has been compared."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import lmdb

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@contextmanager
def read_lmdb(path: Path, *, readahead: bool = True) -> Iterator[tuple[Any, Any]]:
    """Open a shard's file through LMDB; yield the environment and a transaction whose values are views of the file."""
    with (
        lmdb.open(str(path), subdir=False, lock=False, readonly=True, create=False, readahead=readahead) as env,
        env.begin(buffers=True) as txn,
    ):
        yield env, txn
