"""Which stage of packing holds the others up: decoding, encoding or writing."""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

DECODE, ENCODE, WRITE = "decode", "encode", "write"
HELD_UP = 0.1  # of the time spent waiting for a stage: it is the slowest
HELD_UP_ON_SHARED_CORES = 0.5  # there, what decoding takes is taken from encoding, so that waiting for it costs nothing more
FADE_S = 10.0  # what was longer ago than this counts for little


class Stages:
    """How the thread that encodes spends its time: it waits for decoded pictures, encodes, or waits to hand rows over."""

    def __init__(self, *, on_shared_cores: bool) -> None:
        """`on_shared_cores`: the encoders compute on the cores that decode as well."""
        self.on_shared_cores = on_shared_cores
        self.seconds = dict.fromkeys((DECODE, ENCODE, WRITE), 0.0)  # waited for, spent, waited for
        self._recent = dict(self.seconds)

    @contextmanager
    def spent(self, stage: str) -> Iterator[None]:
        """Count the time within to a stage."""
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
        """Name the stage that the others wait for at present."""
        return slowest_of(self._recent, on_shared_cores=self.on_shared_cores)


def slowest_of(seconds: dict[str, float], *, on_shared_cores: bool) -> str:
    """Name the slowest stage by how the encoding thread spent its time.

    >>> slowest_of({"decode": 0.5, "encode": 3.0, "write": 0.1}, on_shared_cores=False)
    'decode'
    >>> slowest_of({"decode": 0.5, "encode": 3.0, "write": 0.1}, on_shared_cores=True)
    'encode'
    """
    limit = (HELD_UP_ON_SHARED_CORES if on_shared_cores else HELD_UP) * sum(seconds.values())
    waited = max((DECODE, WRITE), key=lambda stage: seconds.get(stage, 0.0))
    return waited if seconds.get(waited, 0.0) > limit else ENCODE
