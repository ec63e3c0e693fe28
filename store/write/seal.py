"""Seal a shard: rewrite it in key order, locate and verify every block's byte range, write extents and index.

`python -m bucketline.store.write.seal STORE NAME` seals a shard that an interrupted run left. It is a separate process because
LMDB follows pointers in a file that has not been checked yet: if that crashes, only this process dies.
"""

from __future__ import annotations

import contextlib
import os
import signal
import struct
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lmdb

from bucketline.errors import BucketlineError, CorruptError, LockedError, StoreError
from bucketline.files.atomic_write import CREATE, FILE_MODE, move_durably, write_durably
from bucketline.files.disk_space import remedy_for_failed_write
from bucketline.files.locks import FileLock
from bucketline.store.format.layout import pending_path, shard_paths
from bucketline.store.write.shard_contents import ShardContents, read_contents, read_lmdb, refusing, walked

_NOT_LMDB = (lmdb.InvalidError, lmdb.CorruptedError, lmdb.VersionMismatchError, lmdb.PageNotFoundError)
SPARE_BYTES = 1 << 24  # for the new file's map: only addresses
SEALING = ".sealing"  # the suffix of what becomes a sealed shard, in `pending/`
TRANSACTION_BYTES = 32 << 20  # memory that LMDB holds while appending
MIN_PAGE_BYTES = 4096  # of supported systems
_MAX_PAGE_BYTES = 1 << 15  # that LMDB takes
_PAGE_HEAD = struct.Struct("=16x I 20x I")  # page 0 in the LMDB 0.9 format: magic number and page size
_MAGIC = 0xBEEFC0DE
_FAILED, _LOCKED, _DAMAGED = 1, 3, 4  # exit codes of the sealing process
_FROM_OUTSIDE = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)  # signals that are not caused by the file

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from bucketline.store.format.layout import ShardPaths


def seal(store: Path, name: str) -> bool:
    """Seal the pending shard `name`, which its writer has closed. Return False if it was empty and was removed.

    The order makes every crash harmless: the sidecars are written first, the shard's file last, and only a shard's file under
    `shards/` makes a shard. If it exists already, a crash came before the pending file was removed; it is removed now.
    """
    pending, paths = pending_path(store, name), shard_paths(store, name)
    copy = pending.with_suffix(SEALING)
    if os.path.lexists(paths.lmdb):
        if os.path.lexists(pending):  # if not, a sealer that outlived its command has just finished
            _refuse_another(pending, paths, name)
            _remove(pending)
        return True
    try:
        paths.folder.mkdir(exist_ok=True)
        _write_anew(pending, copy)
        lines = read_contents(copy, found := refusing(name))
        if not found.samples:
            _remove(pending, copy)
            return False
        extents, index = found.extents(lines), found.index()
        write_durably(paths.extents, extents)
        write_durably(paths.index, index)
        move_durably(copy, paths.lmdb)
        _remove(pending)
    except _NOT_LMDB as error:
        _remove_if_possible(copy)
        raise CorruptError(f"{pending} is damaged: {error}") from error
    except (lmdb.Error, OSError) as error:
        remedy = remedy_for_failed_write(pending.parent)  # before the copy is removed, which frees space
        _remove_if_possible(copy)
        raise StoreError(f"{pending} cannot be sealed: {error}; {remedy}") from error
    return True


def may_have_commits(pending: Path) -> bool:
    """Return whether a pending shard may hold a sample: False if it ends with LMDB's first two pages, which are written first.

    The page size is read from the file: another machine may have written it. If it is unreadable, the smallest page size is
    assumed, and sealing then reports the damage; unless all bytes are 0, as a power failure leaves what was not synced.
    """
    with pending.open("rb") as file:
        head = file.read(2 * _MAX_PAGE_BYTES)
        num_bytes = os.fstat(file.fileno()).st_size
    page_bytes = MIN_PAGE_BYTES
    if len(head) >= _PAGE_HEAD.size:
        magic, said = _PAGE_HEAD.unpack_from(head)
        page_bytes = max(said, MIN_PAGE_BYTES) if magic == _MAGIC else MIN_PAGE_BYTES
    return num_bytes > 2 * page_bytes and (num_bytes > len(head) or any(head))


def _refuse_another(pending: Path, paths: ShardPaths, name: str) -> None:
    """Check that the sealed shard of the same name holds every block, record and caption of a pending one."""
    is_same = False
    with contextlib.suppress(*_NOT_LMDB, lmdb.Error, OSError, StoreError):
        has_sidecars = paths.extents.is_file() and paths.index.is_file()
        is_same = has_sidecars and paths.lmdb.is_file() and _walk_file(paths.lmdb, name) == _walk_file(pending, name)
    if not is_same:
        raise StoreError(
            f"{paths.lmdb} exists and differs from what {pending} would become; a sealed shard never changes: "
            f"rename the pending file to {pending.with_stem(f'{name}-2').name}, or another name that no shard has, and rerun "
            "the command, which adopts it as a shard of its own"
        )


def _walk_file(path: Path, name: str) -> ShardContents:
    """Walk a shard's file without its offsets, which may differ for equal keys and values."""
    with read_lmdb(path) as (_, txn):
        return walked(((bytes(key), value, 0) for key, value in txn.cursor()), refusing(name))


def seal_apart(store: Path, name: str) -> None:
    """Seal a shard that another run left, in a separate process. Its pending file is gone afterwards."""
    command = [sys.executable, "-P", "-m", "bucketline.store.write.seal", str(store), name]  # -P: ignore the current folder
    done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    pending = pending_path(store, name)
    if done.returncode == 0 and not os.path.lexists(pending):  # the sealing process removes it last
        return
    reason = (done.stderr.strip().splitlines() or [f"the process ended with {done.returncode}"])[-1]
    if done.returncode == _LOCKED:
        raise LockedError(reason)
    if done.returncode == _FAILED:
        raise StoreError(reason)
    if done.returncode == 0 or -done.returncode in _FROM_OUTSIDE:
        raise StoreError(
            f"{pending} is not sealed: the process for it ended with {done.returncode}; the file is unchanged: "
            "rerun the command"
        )
    raise CorruptError(
        f"{pending}, left by an interrupted run, cannot be sealed: {reason}; "
        "move that file elsewhere and rerun the command, which packs its samples again"
    )


def rebuilt_sidecars(path: Path) -> tuple[bytes, bytes]:
    """Return the contents of a sealed shard's extents and index, rebuilt from its file; the caller has verified its digest."""
    found, lines = _read(path, path.stem)
    if not found.samples:
        raise CorruptError(f"{path} holds no sample")
    return found.extents(lines), found.index()


def column_extents(path: Path, name: str, about: Mapping[str, object]) -> bytes:
    """Return the contents of the extents of an added column's file, with `about` in their metadata."""
    found, lines = _read(path, name)
    if not found.blocks:
        raise CorruptError(f"{path} holds no block")
    return found.extents(lines, about)


def _read(path: Path, name: str) -> tuple[ShardContents, list[int]]:
    try:
        return (found := refusing(name)), read_contents(path, found)
    except lmdb.Error as error:
        raise CorruptError(f"{path} cannot be opened by LMDB: {error}") from error


def _write_anew(pending: Path, copy: Path) -> None:
    """Rewrite a shard's values to a new file in key order.

    LMDB's own compacting copy keeps leaf pages as full as random-order writes left them, two thirds; appending in key order
    fills them: 1.6 % of the payload at rows of 8 KiB.
    """
    copy.unlink(missing_ok=True)
    os.close(os.open(copy, CREATE, FILE_MODE))
    map_bytes = 2 * pending.stat().st_size + SPARE_BYTES
    with (
        read_lmdb(pending) as (_, reading),
        lmdb.open(str(copy), subdir=False, lock=False, map_size=map_bytes, sync=False) as target,
    ):
        items = reading.cursor().iternext()
        while _append(target, items):
            pass
        target.sync(True)


def _append(target: Any, items: Iterator[tuple[memoryview, memoryview]]) -> bool:  # noqa: ANN401 - lmdb has no types
    """Append some items in one transaction. Return False if none is left."""
    num_bytes = 0
    with target.begin(write=True) as writing:
        for key, value in items:
            writing.put(key, value, append=True)
            num_bytes += len(value)
            if num_bytes >= TRANSACTION_BYTES:
                return True
    return False


def _remove(*paths: Path) -> None:
    for path in paths:
        path.unlink(missing_ok=True)


def _remove_if_possible(path: Path) -> None:
    with contextlib.suppress(OSError):  # otherwise the next run removes it
        path.unlink(missing_ok=True)


def main() -> int:
    """Seal one shard under its lock; the last line of stderr is the error."""
    store, name = Path(sys.argv[1]), sys.argv[2]
    lock_path = pending_path(store, name).with_suffix(".lock")
    try:
        with FileLock(lock_path):
            seal(store, name)
            lock_path.unlink(missing_ok=True)
    except BucketlineError as error:
        print(error, file=sys.stderr)
        if isinstance(error, LockedError):
            return _LOCKED
        return _DAMAGED if isinstance(error, CorruptError) else _FAILED
    return 0


if __name__ == "__main__":
    sys.exit(main())
