"""The loader's configuration."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import TYPE_CHECKING, Literal, TypeAlias

from bucketline.errors import UsageError
from bucketline.option_value import DECIDES_NOTHING, RESUME_FIXED, RESUME_FREE, check_fields
from bucketline.options import ONLY_IN_FILE
from bucketline.store.remote.urls import RemoteArguments

if TYPE_CHECKING:
    from collections.abc import Callable

    from bucketline.store import Bucket
    from bucketline.typed_json import Json


USUAL_WINDOW, LEAST_WINDOW = 4096, 16  # rows
MOST_WINDOW_BYTES = 1 << 30  # limit on a window: the lines of two windows of each lane are in use at a time
SHARDS_AT_ONCE = 16  # shards that a lane reads at a time, or more if they are small


class Remainder(StrEnum):
    """How to handle the rows of a pass that do not fill a global batch.

    `carry`: they start the next batch, and the next pass completes it. No row is dropped, and none repeats within a pass.
    After E epochs every row has been delivered E times, short by fewer than G deliveries in the bucket; with finite `epochs`,
    the last epoch completes these batches with rows of weight 0, and none is short. A bucket smaller than a batch has one batch
    in some epochs and none in others. A batch that spans two passes may hold a row twice.

    `drop`: a pass has floor(n / G) batches of distinct rows and leaves n mod G rows out. Each pass leaves out different rows,
    unless the order is the stored one. A bucket smaller than a batch is never read.

    `partial`: a pass has ceil(n / G) batches, and each row once with weight 1. The last batch is padded to full shape with
    the first rows of the pass, repeated as needed, at weight 0. A rank may get a micro-batch that has only weight 0, but
    never one of another shape.
    """

    CARRY = "carry"
    DROP = "drop"
    PARTIAL = "partial"


class TextForm(StrEnum):
    """How quantised tokens are delivered. Other stores' tokens are delivered as stored in any case."""

    DEQUANTISED = "dequantised"  # as float16, computed by the prefetch threads
    STORED = "stored"  # as stored, with `Batch.tokens_scale`: half the bytes; `Batch.dequantised` computes float16


if TYPE_CHECKING:  # the types of fields that take a word, too; at run time the enum, from which commands make their choices
    RemainderWord: TypeAlias = Remainder | Literal["carry", "drop", "partial"]
    TextFormWord: TypeAlias = TextForm | Literal["dequantised", "stored"]
else:
    RemainderWord, TextFormWord = Remainder, TextForm

PREFETCH_BYTES = 256 << 20
_MAX_THREADS = 256  # prefetch threads: a client of a service may request them

SIZES = ("batch_size", "batch_pixels", "batch_tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderOptions(RemoteArguments):
    """Accumulation and order of the batches: the options that a loader, `loader plan` and the trainer share."""

    SECTION = "batches: size and order of the batches"

    accumulation: int = field(default=1, metadata=DECIDES_NOTHING)
    """Gradient accumulation: micro-batches per optimizer step, all from one bucket."""
    seed: int = field(default=0, metadata=RESUME_FIXED)
    """Seed of the sample order and, in training, of every other random draw."""
    window: int | None = field(default=None, metadata=RESUME_FREE)
    """Rows that are mixed at a time, of a few shards that each machine reads in one go: for slow disks and object storage.
    Default: all rows; of a URL whose store --cache-bytes does not hold, as many as fit. 0: the stored order.
    On resume, the saved number."""

    def __post_init__(self) -> None:
        """Validate the options."""
        RemoteArguments.__post_init__(self)  # `super()` does not work in a dataclass with slots
        check_fields(self, OrderOptions, self._named)
        self._expect_at_least(1, "accumulation")
        self._expect(f"{LEAST_WINDOW} or more, or 0", lambda rows: rows == 0 or rows >= LEAST_WINDOW, "window")
        if not 0 <= self.seed < 1 << 63:
            raise UsageError(f"{self._named('seed')} is {self.seed}, expected 0 to 2^63 - 1")

    def _take_word(self, field: str, kind: type[StrEnum]) -> None:
        """Convert a plain string to the enum member that it names."""
        try:
            object.__setattr__(self, field, kind(getattr(self, field)))
        except ValueError as error:
            message = f"{self._named(field)} is {getattr(self, field)!r:.80}, expected {' or '.join(kind)}"
            raise UsageError(message) from error

    def _expect_at_least(self, least: int, *names: str) -> None:
        self._expect(f"{least} or more", lambda value: value >= least, *names)

    def _expect_share(self, *names: str) -> None:
        self._expect("0 to 1", lambda value: 0 <= value <= 1, *names)

    def _expect(self, expected: str, is_met: Callable[[float], bool], *names: str) -> None:
        """Check the options that are given: their values are finite numbers, and meet what is expected."""
        for name in names:
            if (value := getattr(self, name)) is not None and not (math.isfinite(value) and is_met(value)):
                raise UsageError(f"{self._named(name)} is {value}, expected {expected}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions(OrderOptions):
    """How batches are read and conditioned: the options that a loader and the trainer share."""

    SECTION = "reading: captions, flips, checksums, prefetching"

    caption_dropout: float = field(default=0.0, metadata=RESUME_FIXED)
    """Probability of replacing a caption with the empty one (the null class in a class-conditional store)."""
    flip: float = field(default=0.0, metadata=RESUME_FIXED)
    """Probability of a horizontal flip; requires a store packed with --flip."""
    verify: bool = field(default=False, metadata=RESUME_FREE | DECIDES_NOTHING)
    """Verify the checksum of every row and caption that is read; the first mismatch ends the run."""
    # two overlap one's Python with the other's copying (`bench/cases/hot.py`)
    threads: int = field(default=1, metadata=ONLY_IN_FILE | RESUME_FREE | DECIDES_NOTHING)
    """Prefetch threads."""
    prefetch_bytes: int = field(default=PREFETCH_BYTES, metadata=ONLY_IN_FILE | RESUME_FREE | DECIDES_NOTHING)
    """Limit on prefetched batches per rank, in bytes, used up only once the caller had to wait; at least two batches."""

    def __post_init__(self) -> None:
        OrderOptions.__post_init__(self)
        check_fields(self, ReadOptions, self._named)
        self._expect_at_least(1, "prefetch_bytes", "threads")
        if self.threads > _MAX_THREADS:
            raise UsageError(f"{self._named('threads')} is {self.threads}, expected at most {_MAX_THREADS}; 1 to 4 are enough")
        self._expect_share("caption_dropout", "flip")


# A state resumes only if every field that decides has the same value. The four batch fields and the accumulation matter by the
# global batch, which a state holds. The others that decide nothing affect only how and how long batches are delivered, and
# which columns of the same rows.
@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderConfig(ReadOptions):
    """Size, order and captions of the batches that a loader delivers. Set one of the three sizes; the rest has defaults.

    Size of a batch:
        batch_size: Rows of a rank's micro-batch. The global batch is ranks x this x `accumulation`.
        batch_pixels: Instead: as many rows of a bucket as fit this many pixels (height x width x rows, of video x frames; of
            edit pairs the references' pixels count too).
        batch_tokens: Instead: as many rows of a bucket as fit this many latent positions (h x w x rows, references included).
        batch_multiple: Round the rows of `batch_pixels` and `batch_tokens` down to a multiple of this, which is also the least.
        accumulation: Micro-batches of an optimizer step, all of one bucket.

    Rows and their order:
        split: The split to read: "train", or "val" for the held-out rows.
        epochs: Number of epochs in all. The last one completes its batches with rows of weight 0, so that each row was
            delivered as often as there are epochs; a `for` after it is an error. None: no end.
        rewind: Each `for` reads the same epoch from its first batch, with the same draws, also after a break: for validation.
        remainder: What becomes of rows that do not fill a global batch: "carry" (they open the next epoch), "drop", or
            "partial" (padded with weight 0 in each epoch); see `Remainder`.
        seed: Seed of the order and of every draw.
        window: Rows that each lane mixes at a time, of a few shards, for slow disks and object storage. None: all rows are
            shuffled, unless a store at a URL is larger than `cache_bytes`, by which the window is chosen then. 0: as stored.
        lanes: Equal parts of each global batch that a window deals the shards to. None: one for each machine.
        row_weights: `batch.weight` of each store's rows, in the order of the stores. (): 1.

    What a row has:
        caption_dropout: Probability that a caption is replaced by the empty one (of classes: the null class).
        flip: Probability of the mirrored image, of a store that was packed with flips.
        columns: Roles of the columns to read. The others are not read. (): the target, its references and its mask, as far as
            the stores have them.
        ragged: Names of the ragged groups to read. The others are not read.
        pad_to: Tokens of each caption, padding included. None: the store's longest caption.
        pad_multiple: Instead: round each batch's longest caption up to a multiple of this, and its longest entry of each ragged
            group; shapes then vary.
        text: Quantised tokens "dequantised" to float16 by the prefetch threads, or as "stored"; see `TextForm`.

    Reading:
        verify: Compare the checksum of every row and caption that is read; the first mismatch raises `CorruptError`.
        plain_reads: Read with `preadv` instead of a memory map: slower, but a failing disk raises an error.
        threads: Prefetch threads; 1 or 2 are enough.
        prefetch_bytes: Limit on prefetched batches, in bytes, used up only once the caller had to wait; at least two batches.
        cache: Folder that caches stores in object storage. None: BUCKETLINE_CACHE, or the user's cache directory.
        cache_bytes: Size of that cache, all of its stores together, such as "500GiB". None: 80 % of the free space.
        endpoint: Address of an S3-compatible service. None: BUCKETLINE_ENDPOINT, or that of the URL's kind.
        store_option: "KEY=VALUE" pairs for the client of object storage, such as "region=eu-central-1".
        deadline: Seconds after which an unanswered request to object storage fails. None: BUCKETLINE_DEADLINE, or 60.
    """

    batch_size: int | None = field(default=None, metadata=DECIDES_NOTHING)
    batch_pixels: int | None = field(default=None, metadata=DECIDES_NOTHING)
    batch_tokens: int | None = field(default=None, metadata=DECIDES_NOTHING)
    batch_multiple: int = field(default=1, metadata=DECIDES_NOTHING)
    split: str = "train"
    remainder: RemainderWord = Remainder.CARRY
    epochs: int | None = field(default=None, metadata=DECIDES_NOTHING)
    rewind: bool = field(default=False, metadata=DECIDES_NOTHING)
    lanes: int | None = None
    plain_reads: bool = field(default=False, metadata=DECIDES_NOTHING)
    columns: tuple[str, ...] = field(default=(), metadata=DECIDES_NOTHING)
    ragged: tuple[str, ...] = field(default=(), metadata=DECIDES_NOTHING)
    pad_to: int | None = None
    pad_multiple: int | None = None
    row_weights: tuple[float, ...] = field(default=(), metadata=DECIDES_NOTHING)
    text: TextFormWord = field(default=TextForm.DEQUANTISED, metadata=DECIDES_NOTHING)

    def __post_init__(self) -> None:
        ReadOptions.__post_init__(self)
        check_fields(self, LoaderConfig, self._named)
        self._take_word("remainder", Remainder)
        self._take_word("text", TextForm)
        if not all(math.isfinite(weight) and weight >= 0 for weight in self.row_weights):
            raise UsageError(f"{self._named('row_weights')} is {self.row_weights}, expected numbers, 0 or more")
        self._expect_at_least(1, *SIZES, "batch_multiple", "epochs", "lanes", "pad_to", "pad_multiple")
        sizes = [f"{self._named(name)} {value}" for name in SIZES if (value := getattr(self, name)) is not None]
        if not sizes:
            *others, last = map(self._named, SIZES)
            raise UsageError(f"no batch size given: pass {', '.join(others)} or {last}")
        if len(sizes) > 1:
            raise UsageError(
                f"the batch size is set by {' and '.join(sizes)}, expected exactly one of {', '.join(map(self._named, SIZES))}"
            )
        if self.batch_size is not None and self.batch_multiple != 1:
            raise UsageError(
                f"{self._named('batch_multiple')} is {self.batch_multiple} with a {self._named('batch_size')} of "
                f"{self.batch_size}; it is only for {self._named('batch_pixels')} or {self._named('batch_tokens')}: "
                f"set {self._named('batch_size')} itself"
            )
        if self.lanes is not None and not self.window and (self.window == 0 or self.cache_bytes is None):
            raise UsageError(
                f"lanes is {self.lanes} with window {self.window}; only rows that are mixed in windows have lanes: leave them "
                f"out, or set window={USUAL_WINDOW}"
            )
        if self.pad_to is not None and self.pad_multiple is not None:
            raise UsageError(f"pad_to is {self.pad_to} and pad_multiple is {self.pad_multiple}, expected one of them")

        if self.rewind and self.epochs not in (None, 1):
            raise UsageError(f"rewind is set and epochs is {self.epochs}; each `for` reads the same epoch, so leave out epochs")

    @staticmethod
    def _named(field: str) -> str:
        return field

    @property
    def num_epochs(self) -> int | None:
        """Return the number of epochs after which the plan ends; None if it is endless."""
        return 1 if self.rewind else self.epochs

    def rows_of(self, bucket: Bucket) -> int:
        """Return the number of rows in a rank's micro-batch of a bucket; it never varies."""
        if self.batch_size is not None:
            return self.batch_size
        from bucketline.store.format.block import LATENT, REFERENCE_AXIS, is_reference  # numpy, which --help does not wait for

        if self.batch_pixels is not None:
            of_references = [size for axis, size in bucket.axes.items() if REFERENCE_AXIS.fullmatch(axis)]
            own = math.prod(size for axis, size in bucket.axes.items() if not REFERENCE_AXIS.fullmatch(axis))
            sides = zip(of_references[::2], of_references[1::2], strict=True)
            budget, cost = self.batch_pixels, own + sum(height * width for height, width in sides)
        else:
            assert self.batch_tokens is not None
            if LATENT not in {column.name for column in bucket.columns}:
                raise UsageError(
                    f"{self._named('batch_tokens')} is set, and {bucket.name} has no column target; set another size"
                )
            counted = [column for column in bucket.spec.columns if column.name == LATENT or is_reference(column.name)]
            budget, cost = self.batch_tokens, sum(math.prod(column.shape[1:]) for column in counted)
        return max(1, budget // cost // self.batch_multiple) * self.batch_multiple

    def sizing(self) -> dict[str, Json]:
        """Return the option that sizes the batches, and a multiple other than 1, as JSON values."""
        values: dict[str, Json] = {name: value for name in SIZES if (value := getattr(self, name)) is not None}
        return values if self.batch_multiple == 1 else {**values, "batch_multiple": self.batch_multiple}

    def deciding(self) -> dict[str, Json]:
        """Return the fields that decide what is delivered, besides the global batch, as JSON values."""
        values: dict[str, Json] = {
            option.name: getattr(self, option.name) for option in fields(self) if option.metadata.get("decides", True)
        }
        if not self.window:
            del values["lanes"]
        return {name: str(value) if isinstance(value, str) else value for name, value in values.items()}
