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
    caption_dropout: float = 0.0  # probability of the empty caption; of a class-conditional store that is the null class
    prefetch_bytes: int = PREFETCH_BYTES  # of batches filled ahead; at least two batches are
    verify: bool = False  # hold every row and caption against its checksum; the first bad one ends the iteration
    # what a row comes with
    flip: float = 0.0  # probability of the mirror image's latent, of a store that was packed with --flip
    pad_to: int | None = None  # tokens of every caption, padding included; None: the longest caption's of the store
    pad_multiple: int | None = None  # instead: the batch's longest caption, rounded up to a multiple; shapes differ then

    def __post_init__(self) -> None:
        for name in ("batch_size", "accumulation", "prefetch_bytes"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} is {getattr(self, name)}, expected 1 or more")
        if self.epochs is not None and self.epochs < 1:
            raise UsageError(f"epochs is {self.epochs}, expected 1 or more")
        if not 0 <= self.seed < 1 << 63:
            raise UsageError(f"seed is {self.seed}, expected 0 to 2^63 - 1")
        if not 0.0 <= self.caption_dropout <= 1.0:
            raise UsageError(f"caption_dropout is {self.caption_dropout}, expected 0 to 1")
        if not 0.0 <= self.flip <= 1.0:
            raise UsageError(f"flip is {self.flip}, expected 0 to 1")
        for name in ("pad_to", "pad_multiple"):
            if (tokens := getattr(self, name)) is not None and tokens < 1:
                raise UsageError(f"{name} is {tokens}, expected 1 or more")
        if self.pad_to is not None and self.pad_multiple is not None:
            raise UsageError(f"pad_to is {self.pad_to} and pad_multiple is {self.pad_multiple}, expected one of them")
