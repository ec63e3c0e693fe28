"""Budget of memory maps: Linux limits them per process (`vm.max_map_count`), and a store needs one per file.

At the limit, other operations fail too: starting a thread, a large allocation. Address ranges therefore reserve maps for all
their files in advance, including those that they map later.
"""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Protocol

from bucketline.forks import ForkSafeLock


class FilesToMap(Protocol):
    """Files that will be mapped, one map each."""

    @property
    def num_unmapped(self) -> int:
        """Number of files not mapped yet."""


SPARE_MAPS = 4096  # for other maps of the process: libraries, threads, large allocations, GPU drivers
_USUAL_MAX_MAPS = 65530
_FEW = 1024  # maps allowed without counting those in use, which takes a millisecond
_SINGLE_SHARE = 4  # share of maps for files mapped individually (indexes); further ones are read
_ranges: weakref.WeakSet[FilesToMap] = weakref.WeakSet()
_changing = ForkSafeLock()  # threads may open shards at the same time
_single: set[int] = set()  # addresses of individually mapped files


def max_maps() -> int:
    """Return the system's limit per process."""
    try:
        return int(Path("/proc/sys/vm/max_map_count").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return _USUAL_MAX_MAPS


def promise(files: FilesToMap) -> None:
    """Reserve maps for the files of a range."""
    with _changing:
        _ranges.add(files)


def fits(num_files: int) -> bool:
    """Return whether this many more files fit next to those mapped or reserved."""
    promised = num_files + _num_promised()
    return promised + SPARE_MAPS <= max_maps() and (promised <= _FEW or promised + _in_use() + SPARE_MAPS <= max_maps())


def may_map_one() -> bool:
    """Return whether one more file may be mapped individually: a store has one index per shard and may keep all open."""
    return len(_single) < max_maps() // _SINGLE_SHARE


def note_one(owner: object, address: int) -> None:
    """Count an individually mapped file while `owner` is alive."""
    _single.add(address)
    weakref.finalize(owner, _single.discard, address).atexit = False


def advice(num_files: int) -> str:
    """Return how many maps are missing for this many files, and which setting to raise."""
    needed = num_files + _num_promised() + _in_use() + SPARE_MAPS
    wanted = 1 << (needed - 1).bit_length()
    return (
        f"it needs {num_files} memory maps, {needed} with the other maps of this process, but vm.max_map_count allows "
        f"{max_maps()}; set it to {wanted} (as root: sysctl -w vm.max_map_count={wanted}) to read at full speed"
    )


def _num_promised() -> int:
    with _changing:
        ranges = list(_ranges)
    return sum(files.num_unmapped for files in ranges)


def _in_use() -> int:
    try:
        with Path("/proc/self/maps").open("rb") as maps:
            return sum(1 for _ in maps)
    except OSError:
        return 0
