"""Measure which stage of packing is the bottleneck: decoding, encoding or writing."""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

DECODE, ENCODE, WRITE = "decode", "encode", "write"
HELD_UP = 0.1  # share of the time spent waiting for a stage, above which that stage is the slowest
HELD_UP_ON_SHARED_CORES = 0.5  # higher: there, decoding takes its time from encoding anyway
FADE_S = 10.0  # time constant: older measurements count for little


class StageTimer:
    """Time that the encoding thread spends waiting for decoded images, encoding, and waiting for the writer."""

    def __init__(self, *, on_shared_cores: Callable[[], bool]) -> None:
        """`on_shared_cores`: whether the encoders run on the same cores as the decoders, once they are loaded."""
        self.on_shared_cores = on_shared_cores
        self.seconds = dict.fromkeys((DECODE, ENCODE, WRITE), 0.0)  # waiting, encoding, waiting
        self._recent = dict(self.seconds)

    @contextmanager
    def spent(self, stage: str) -> Iterator[None]:
        """Add the time spent inside the `with` block to a stage."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.add(stage, time.perf_counter() - begin)

    def add(self, stage: str, seconds: float) -> None:
        self.seconds[stage] += seconds
        kept = max(0.0, 1.0 - seconds / FADE_S)
        for name in self._recent:
            self._recent[name] *= kept
        self._recent[stage] += seconds

    @property
    def slowest(self) -> str:
        """The stage that is currently the bottleneck."""
        return slowest_of(self._recent, on_shared_cores=self.on_shared_cores())


def slowest_of(seconds: dict[str, float], *, on_shared_cores: bool) -> str:
    """Return the slowest stage, judged by how the encoding thread spent its time.

    >>> slowest_of({"decode": 0.5, "encode": 3.0, "write": 0.1}, on_shared_cores=False)
    'decode'
    >>> slowest_of({"decode": 0.5, "encode": 3.0, "write": 0.1}, on_shared_cores=True)
    'encode'
    """
    limit = (HELD_UP_ON_SHARED_CORES if on_shared_cores else HELD_UP) * sum(seconds.values())
    waited = max((DECODE, WRITE), key=lambda stage: seconds.get(stage, 0.0))
    return waited if seconds.get(waited, 0.0) > limit else ENCODE
