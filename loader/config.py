"""What a loader is told."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from bucketline.errors import UsageError
from bucketline.loader.plan import SHUFFLE_WINDOW, Remainder
from bucketline.loader.row_order import WINDOW_BLOCKS, Shuffle

if TYPE_CHECKING:
    from bucketline.store import Bucket
    from bucketline.store.typed_json import Json

PREFETCH_BYTES = 256 << 20
LATENT = "latent"

# Every field decides what is delivered, so that a state goes on with the same value only, but for these. The four of the
# batch and the accumulation decide it by the global batch, which a state holds; the others only how and how long.
_DECIDE_NOTHING_ALONE = frozenset(
    {
        *("batch_size", "batch_pixels", "batch_tokens", "batch_multiple", "accumulation"),
        *("epochs", "prefetch_bytes", "verify", "threads", "plain_reads"),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderConfig:
    """The batches that a loader gives: how large, in what order, with which captions.

    A micro-batch of a rank has `batch_size` rows; or, by a budget, as many as fit it: rows x height x width of the bucket at
    most `batch_pixels`, or rows x latent positions (h x w of the stored latent, whatever the channels) at most
    `batch_tokens`, rounded down to a multiple of `batch_multiple`, and that many at the least. (A model that takes patches
    of 2 x 2 positions, as most transformers do, sees a quarter as many tokens beside its text.) Exactly one of the three is
    given.
    """

    batch_size: int | None = None  # rows of a micro-batch, per rank
    accumulation: int = 1  # micro-batches of one optimizer step, all of one bucket
    seed: int = 0
    split: str = "train"
    remainder: Remainder = Remainder.CARRY
    epochs: int | None = None  # None: without end
    caption_dropout: float = 0.0  # probability of the empty caption; of a class-conditional store that is the null class
    prefetch_bytes: int = PREFETCH_BYTES  # of batches filled ahead; at least two batches are
    verify: bool = False  # hold every row and caption against its checksum; the first bad one ends the iteration
    threads: int = 1  # that fill ahead; two overlap one's Python with the other's copying (`bench/delivery.py`)
    plain_reads: bool = False  # read with `preadv`, not out of a memory map: slower; what a bad medium does is then an error
    # what a row comes with
    flip: float = 0.0  # probability of the mirror image's latent, of a store that was packed with --flip
    pad_to: int | None = None  # tokens of every caption, padding included; None: the longest caption's of the store
    pad_multiple: int | None = None  # instead: the batch's longest caption, rounded up to a multiple; shapes differ then

    # the order, and batches by a budget
    shuffle: Shuffle = Shuffle.FULL
    shuffle_window: int = SHUFFLE_WINDOW  # rows that `blocks` mixes, in 16 blocks of neighbours; see `row_order.rows_of`
    batch_pixels: int | None = None  # px of a micro-batch, per rank
    batch_tokens: int | None = None  # latent positions of a micro-batch, per rank
    batch_multiple: int = 1  # what the rows of a batch by a budget are a multiple of

    def __post_init__(self) -> None:
        self._take_words()
        for name in (
            "batch_size",
            "batch_pixels",
            "batch_tokens",
            "batch_multiple",
            "accumulation",
            "prefetch_bytes",
            "threads",
        ):
            if (value := getattr(self, name)) is not None and value < 1:
                raise UsageError(f"{name} is {value}, expected 1 or more")
        sizes = {name: getattr(self, name) for name in ("batch_size", "batch_pixels", "batch_tokens")}
        given = [f"{name} {value}" for name, value in sizes.items() if value is not None]
        if len(given) != 1:
            raise UsageError(
                f"the size of a batch is given by {' and '.join(given) or 'nothing'}, expected one of {', '.join(sizes)}"
            )
        if self.batch_size is not None and self.batch_multiple != 1:
            raise UsageError(
                f"batch_multiple is {self.batch_multiple} with a batch_size of {self.batch_size}; it goes with batch_pixels or "
                "batch_tokens: give the batch_size wanted"
            )
        if self.shuffle_window < WINDOW_BLOCKS:
            raise UsageError(f"shuffle_window is {self.shuffle_window}, expected {WINDOW_BLOCKS} or more")
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

    def _take_words(self) -> None:
        """Take plain words as the choices that they name."""
        for name, kind in (("shuffle", Shuffle), ("remainder", Remainder)):
            try:
                object.__setattr__(self, name, kind(getattr(self, name)))
            except ValueError as error:
                raise UsageError(f"{name} is {getattr(self, name)!r:.80}, expected {' or '.join(kind)}") from error

    def rows_of(self, bucket: Bucket) -> int:
        """Give the rows of a rank's micro-batch of a bucket: the same number each time."""
        if self.batch_size is not None:
            return self.batch_size
        if self.batch_pixels is not None:
            budget, cost = self.batch_pixels, bucket.height_px * bucket.width_px
        else:
            assert self.batch_tokens is not None
            budget, cost = self.batch_tokens, math.prod(bucket.spec.column(LATENT).shape[-2:])
        return max(1, budget // cost // self.batch_multiple) * self.batch_multiple

    def deciding(self) -> dict[str, Json]:
        """Give the fields that decide what is delivered, besides the global batch, as JSON takes them."""
        values: dict[str, Json] = {
            field.name: getattr(self, field.name) for field in fields(self) if field.name not in _DECIDE_NOTHING_ALONE
        }
        if self.shuffle is not Shuffle.BLOCKS:
            del values["shuffle_window"]
        return {name: str(value) if isinstance(value, str) else value for name, value in values.items()}
