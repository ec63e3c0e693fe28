"""What a loader is told."""

from __future__ import annotations

from dataclasses import dataclass

from bucketline.errors import UsageError
from bucketline.loader.plan import Remainder

PREFETCH_BYTES = 256 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderConfig:
    """The batches that a loader gives: how large, in what order, with which captions."""

    batch_size: int  # rows of a micro-batch, per rank
    accumulation: int = 1  # micro-batches of one optimizer step, all of one bucket
    seed: int = 0
    split: str = "train"
    remainder: Remainder = Remainder.CARRY
    epochs: int | None = None  # None: without end
    caption_dropout: float = 0.0  # probability of the empty caption
    prefetch_bytes: int = PREFETCH_BYTES  # of batches filled ahead; at least two batches are
    verify: bool = False  # hold every row and caption against its checksum; the first bad one ends the iteration
    threads: int = 1  # that fill ahead; two overlap one's Python with the other's copying (`bench/delivery.py`)
    plain_reads: bool = False  # read with `preadv`, not out of a memory map: slower; what a bad medium does is then an error

    def __post_init__(self) -> None:
        for name in ("batch_size", "accumulation", "prefetch_bytes", "threads"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} is {getattr(self, name)}, expected 1 or more")
        if self.epochs is not None and self.epochs < 1:
            raise UsageError(f"epochs is {self.epochs}, expected 1 or more")
        if not 0 <= self.seed < 1 << 63:
            raise UsageError(f"seed is {self.seed}, expected 0 to 2^63 - 1")
        if not 0.0 <= self.caption_dropout <= 1.0:
            raise UsageError(f"caption_dropout is {self.caption_dropout}, expected 0 to 1")
