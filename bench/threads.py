"""Work shared out among threads that leave Python's lock alone."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


def in_threads(num_threads: int, work: Callable[[int], None]) -> None:
    """Call `work` with 0 to `num_threads` - 1, each in a thread of its own; the first failure is raised here."""
    if num_threads == 1:
        work(0)
        return
    with ThreadPoolExecutor(num_threads) as pool:
        list(pool.map(work, range(num_threads)))
