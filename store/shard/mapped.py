"""One address range over many files (a store's shards), for one call to gather a batch; and the budget of maps.

The range is reserved without memory; a file is mapped into its place on first use. The range begins with zero pages, which
the indices of padding tokens point to.

A file that is truncated while mapped kills the process (SIGBUS), whatever the code does. On unreliable media, use
`FileGather`, which raises an error instead. A range of small files (sidecars) may be filled by plain reads instead of
mapping; errors are then raised when a file is read.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from bucketline.errors import StoreError
from bucketline.forks import ForkSafeLock

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from numpy.typing import NDArray


_HUGE_PAGE_BYTES = 2 << 20
ZERO_BYTES = 1 << 20  # at the start of the range; must hold one padding row
_MAX_BYTES = 1 << 47
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
_PROT_NONE = 0
_PROT_READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE
_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def distinct(values: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the different values, ascending. The first `np.unique` of a process takes 55 ms to import `numpy.ma`."""
    ordered = np.sort(values)
    return ordered[np.diff(ordered, prepend=ordered[:1] - 1) > 0]


class MapRefusedError(StoreError):
    """The system refused a memory map; plain reads still work."""


def _mmap(address: int | None, num_bytes: int, prot: int, flags: int, fd: int) -> int:
    found = _libc.mmap(address, num_bytes, prot, flags, fd, 0)
    if found is None or found == _FAILED:
        raise MapRefusedError(f"{num_bytes} bytes of addresses cannot be mapped: {os.strerror(ctypes.get_errno())}")
    return int(found)


def _reserve(num_bytes: int, unit: int, prot: int, flags: int) -> int:
    """Reserve addresses that begin at a multiple of `unit`, a multiple of a page."""
    if unit == mmap.PAGESIZE:
        return _mmap(None, num_bytes, prot, flags, -1)
    found = _mmap(None, num_bytes + unit, prot, flags, -1)
    base = -(-found // unit) * unit
    for begin, end in ((found, base), (base + num_bytes, found + num_bytes + unit)):
        if end > begin:
            _libc.munmap(begin, end - begin)
    return base


def map_file(fd: int, num_bytes: int, *, writable: bool = False) -> memoryview:
    """Return a map of a file. Unlike Python's `mmap`, it keeps no descriptor open: stores may have thousands."""
    base = _mmap(None, num_bytes, _PROT_READ_WRITE if writable else mmap.PROT_READ, mmap.MAP_SHARED, fd)
    buffer = _owning_buffer(base, num_bytes)
    whole = memoryview(buffer).cast("B")
    return whole if writable else whole.toreadonly()


def _owning_buffer(base: int, num_bytes: int) -> ctypes.Array[ctypes.c_uint8]:
    """Return a range of addresses as a buffer, unmapped when its last view is gone."""
    buffer = (ctypes.c_uint8 * num_bytes).from_address(base)
    # not at exit: a thread may still be reading, and the process is about to free its memory anyway
    weakref.finalize(buffer, _libc.munmap, base, num_bytes).atexit = False
    return buffer


class AddressRange:
    """An address range of many files; `bytes_view` returns it as one byte array."""

    def __init__(
        self,
        num_bytes: Sequence[int],
        opened: Callable[[int], AbstractContextManager[int]],
        *,
        read: Callable[[int, int, memoryview], None] | None = None,
    ) -> None:
        """Reserve the range for files of these lengths; only the zero pages are mapped yet.

        `opened` opens a file by its number and yields its descriptor. If `read` is given, files are read into the range
        instead of mapped; the range is then private memory, a single map. `read` takes a file's number, its descriptor and
        the memory to fill.
        """
        self._sizes, self._opened, self._fill = num_bytes, opened, read
        # a file that is in the page cache in huge pages is mapped by them where its place begins at a multiple of one
        unit = _HUGE_PAGE_BYTES if read is None and max(num_bytes, default=0) >= _HUGE_PAGE_BYTES else mmap.PAGESIZE
        self._places = places = [-(-size // unit) * unit for size in num_bytes]
        if sum(places) >= _MAX_BYTES:
            raise StoreError(f"{sum(places)} bytes of addresses cannot be mapped: a process has {_MAX_BYTES}")
        zero_bytes = -(-ZERO_BYTES // unit) * unit
        self.first_byte = np.cumsum([zero_bytes, *places], dtype=np.int64)  # [files + 1] begin of each file in the range
        self.num_bytes = int(self.first_byte[-1])
        private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        self._base = _reserve(self.num_bytes, unit, _PROT_NONE if read is None else _PROT_READ_WRITE, private)
        self._buffer = _owning_buffer(self._base, self.num_bytes)
        self.is_mapped = np.array([size == 0 for size in num_bytes], dtype=bool)
        if read is None:
            _mmap(self._base, zero_bytes, mmap.PROT_READ, private | _MAP_FIXED, -1)
            promise(self)

    @property
    def num_unmapped(self) -> int:
        return len(self.is_mapped) - int(np.count_nonzero(self.is_mapped))

    def map(self, ordinals: NDArray[np.int64]) -> None:
        """Map files into their places (or read them there), unless already done."""
        if self.is_mapped[ordinals].all():
            return
        for ordinal in distinct(ordinals[~self.is_mapped[ordinals]]).tolist():
            with self._opened(ordinal) as fd:  # the map outlasts the descriptor
                begin = int(self.first_byte[ordinal])
                if self._fill is None:  # map its complete place: a gap would be another map
                    _mmap(self._base + begin, self._places[ordinal], mmap.PROT_READ, mmap.MAP_SHARED | _MAP_FIXED, fd)
                else:
                    self._fill(ordinal, fd, memoryview(self._buffer).cast("B")[begin : begin + self._sizes[ordinal]])
            self.is_mapped[ordinal] = True

    def ask_ahead(self, begin: NDArray[np.int64], num_bytes: NDArray[np.int64] | int) -> None:
        """Ask the kernel to read byte ranges of the address range ahead, `[B]`; return at once."""
        first = begin // mmap.PAGESIZE * mmap.PAGESIZE
        for address, length in zip((self._base + first).tolist(), (begin - first + num_bytes).tolist(), strict=True):
            _libc.madvise(address, length, mmap.MADV_WILLNEED)

    def is_resident(self, begin: NDArray[np.int64], num_bytes: NDArray[np.int64] | int) -> bool:
        """Return whether all of some ranges are in the page cache, each from a byte of the range, `[B]`.

        Of files that this user may not write the kernel says that they are.
        """
        first = begin // mmap.PAGESIZE * mmap.PAGESIZE
        for address, length in zip((self._base + first).tolist(), (begin - first + num_bytes).tolist(), strict=True):
            pages = (ctypes.c_uint8 * -(-length // mmap.PAGESIZE))()
            if _libc.mincore(address, length, pages) or not all(page & 1 for page in pages):
                return False
        return True

    def bytes_view(self) -> NDArray[np.uint8]:
        """Return the complete range as bytes, `[num_bytes]`. Access only mapped parts. Views keep the range alive."""
        return np.frombuffer(memoryview(self._buffer), dtype=np.uint8)


# ------------------------------------------------------------------------------------------------------------------ map budget
# Budget of memory maps: Linux limits them per process (`vm.max_map_count`), and a store needs one per file.
#
# At the limit, other operations fail too: starting a thread, a large allocation. Address ranges therefore reserve maps for all
# their files in advance, including those that they map later.


class FilesToMap(Protocol):
    """Files that will be mapped, one map each."""

    @property
    def num_unmapped(self) -> int:
        """Number of files not mapped yet."""


SPARE_MAPS = 4096  # for other maps of the process: libraries, threads, large allocations, GPU drivers
_USUAL_MAX_MAPS = 65530
_FEW = 1024  # maps allowed without counting those in use, which takes a millisecond
_ranges: weakref.WeakSet[FilesToMap] = weakref.WeakSet()
_changing = ForkSafeLock()  # threads may open shards at the same time


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
