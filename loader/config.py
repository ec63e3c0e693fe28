"""The loader's configuration."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import TYPE_CHECKING

from bucketline.errors import UsageError

if TYPE_CHECKING:
    from bucketline.store import Bucket
    from bucketline.typed_json import Json


class Shuffle(StrEnum):
    """Order of the rows in a pass and of the steps in an epoch."""

    FULL = "full"  # any row at any position, any bucket at any step
    BLOCKS = "blocks"  # reads stay within one window of rows at a time; buckets take turns in proportion
    NONE = "none"  # stored order, one bucket after the other


WINDOW_BLOCKS = 16  # blocks of neighbouring rows that one shuffle window mixes


class Remainder(StrEnum):
    """How to handle the rows of a pass that do not fill a global batch.

    `carry`: they start the next batch, and the next pass completes it. No row is dropped, and none repeats within a pass.
    After E epochs every row has been delivered E times, short by fewer than G deliveries in the bucket. A bucket smaller than
    a batch has one batch in some epochs and none in others. A batch that spans two passes may hold a row twice.

    `drop`: a pass has floor(n / G) batches of distinct rows and leaves n mod G rows out. Each pass leaves out different rows,
    unless the order is `none`. A bucket smaller than a batch is never read.

    `partial`: a pass has ceil(n / G) batches, and each row once with weight 1. The last batch is padded to full shape with
    the first rows of the pass, repeated as needed, at weight 0. A rank may get a micro-batch that has only weight 0, but
    never one of another shape.
    """

    CARRY = "carry"
    DROP = "drop"
    PARTIAL = "partial"


SHUFFLE_WINDOW = 4096  # rows


PREFETCH_BYTES = 256 << 20
MAX_THREADS = 256  # prefetch threads: a client of a service may request them
LATENT = "latent"

# A state resumes only if every other field has the same value, because each of those decides what is delivered. The four
# batch fields and the accumulation matter through the global batch, which a state holds. The rest affect only how and how
# long batches are delivered.
_DECIDE_NOTHING_ALONE = frozenset(
    {
        *("batch_size", "batch_pixels", "batch_tokens", "batch_multiple", "accumulation"),
        *("epochs", "prefetch_bytes", "verify", "threads", "plain_reads"),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderConfig:
    """Size, order and captions of the batches that a loader delivers.

    A rank's micro-batch has `batch_size` rows, or as many as fit a budget. `batch_pixels` limits rows x height x width of the
    bucket. `batch_tokens` limits rows x latent positions (h x w of the stored latent, whatever the channels). A budget is
    rounded down to a multiple of `batch_multiple` rows, which is also the minimum. (A model that takes patches of 2 x 2
    positions, as most transformers do, sees a quarter as many image tokens.) Set exactly one of the three.
    """

    batch_size: int | None = None  # rows of a micro-batch, per rank
    accumulation: int = 1  # micro-batches per optimizer step, all of one bucket
    seed: int = 0
    split: str = "train"
    remainder: Remainder = Remainder.CARRY
    epochs: int | None = None  # None: endless
    caption_dropout: float = 0.0  # probability of the empty caption (the null class in a class-conditional store)
    prefetch_bytes: int = PREFETCH_BYTES  # of batches filled ahead at most, once the caller had to wait; at least two batches
    verify: bool = False  # check every row and caption against its checksum; the first bad one ends the iteration
    threads: int = 1  # prefetch threads; two overlap one's Python with the other's copying (`bench/loader/delivery.py`)
    plain_reads: bool = False  # read with `preadv` instead of a memory map: slower, but a failing disk raises an error
    # conditioning
    flip: float = 0.0  # probability of the mirror image's latent; needs a store packed with --flip
    pad_to: int | None = None  # tokens per caption, padding included; None: the store's longest caption
    pad_multiple: int | None = None  # instead of `pad_to`: round each batch's longest caption up to this; shapes then vary

    # order, and batch size by a budget
    shuffle: Shuffle = Shuffle.FULL
    shuffle_window: int = SHUFFLE_WINDOW  # rows that `blocks` mixes, in 16 blocks of neighbours; see `plan.order.rows_of`
    batch_pixels: int | None = None  # px of a micro-batch, per rank
    batch_tokens: int | None = None  # latent positions of a micro-batch, per rank
    batch_multiple: int = 1  # round the rows of a budgeted batch down to a multiple of this

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
        if self.threads > MAX_THREADS:
            raise UsageError(f"threads is {self.threads}, expected at most {MAX_THREADS}; 1 to 4 are enough")
        sizes = {name: getattr(self, name) for name in ("batch_size", "batch_pixels", "batch_tokens")}
        given = [f"{name} {value}" for name, value in sizes.items() if value is not None]
        if len(given) != 1:
            raise UsageError(
                f"expected exactly one of {', '.join(sizes)}, got {' and '.join(given) or 'none'}: set the batch size by one"
            )
        if self.batch_size is not None and self.batch_multiple != 1:
            raise UsageError(
                f"batch_multiple is {self.batch_multiple} with a batch_size of {self.batch_size}; it is only for batch_pixels "
                "or batch_tokens: set batch_size itself"
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
        self._check_padding()

    def _check_padding(self) -> None:
        for name in ("pad_to", "pad_multiple"):
            if (tokens := getattr(self, name)) is not None and tokens < 1:
                raise UsageError(f"{name} is {tokens}, expected 1 or more")
        if self.pad_to is not None and self.pad_multiple is not None:
            raise UsageError(f"pad_to is {self.pad_to} and pad_multiple is {self.pad_multiple}, expected one of them")

    def _take_words(self) -> None:
        """Convert plain strings to the enum members that they name."""
        for name, kind in (("shuffle", Shuffle), ("remainder", Remainder)):
            try:
                object.__setattr__(self, name, kind(getattr(self, name)))
            except ValueError as error:
                raise UsageError(f"{name} is {getattr(self, name)!r:.80}, expected {' or '.join(kind)}") from error

    def rows_of(self, bucket: Bucket) -> int:
        """Return the number of rows in a rank's micro-batch of a bucket; it never varies."""
        if self.batch_size is not None:
            return self.batch_size
        if self.batch_pixels is not None:
            budget, cost = self.batch_pixels, bucket.height_px * bucket.width_px
        else:
            assert self.batch_tokens is not None
            budget, cost = self.batch_tokens, math.prod(bucket.spec.column(LATENT).shape[-2:])
        return max(1, budget // cost // self.batch_multiple) * self.batch_multiple

    def deciding(self) -> dict[str, Json]:
        """Return the fields that decide what is delivered, besides the global batch, as JSON values."""
        values: dict[str, Json] = {
            field.name: getattr(self, field.name) for field in fields(self) if field.name not in _DECIDE_NOTHING_ALONE
        }
        if self.shuffle is not Shuffle.BLOCKS:
            del values["shuffle_window"]
        return {name: str(value) if isinstance(value, str) else value for name, value in values.items()}
