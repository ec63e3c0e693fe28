"""Size and order of the batches as options: given, such as `8` rows, `4MP` or `16ktok`; or those that a run has recorded."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from bucketline.errors import StateError, UsageError
from bucketline.loader.config import SIZES, LoaderConfig, OrderOptions, Remainder
from bucketline.option_value import ONE_OR_MORE, FieldForm, OptionValue, in_units
from bucketline.options import Arg, Positional

if TYPE_CHECKING:
    from typing import Self

    from bucketline.loader.mixture import WeightedStore


@dataclass(frozen=True, kw_only=True)
class BatchSize(OptionValue):
    """The size of a batch, by the fields of `LoaderConfig` that set it.

    >>> BatchSize.parse("1.5MP/8", "--batch-size").sizes(), str(BatchSize(batch_tokens=16384))
    ({'batch_pixels': 1572864, 'batch_multiple': 8}, '16ktok')
    """

    FORMS = ("BATCH_SIZE", "BATCH_PIXELS[/BATCH_MULTIPLE]", "BATCH_TOKENS[/BATCH_MULTIPLE]")
    METAVAR = "N|4MP"
    EXPECTED = "rows, such as 8, or as many as fit 4MP (of 1024 x 1024 px) or 16ktok (of 1024); in multiples of 8 rows: 4MP/8"
    LIMITS: ClassVar = dict.fromkeys((*SIZES, "batch_multiple"), ONE_OR_MORE)

    batch_size: int | None = None
    batch_pixels: Annotated[int | None, in_units({"px": 1, "MP": 1 << 20})] = None
    batch_tokens: Annotated[int | None, in_units({"tok": 1, "ktok": 1 << 10})] = None
    batch_multiple: int = 1

    def sizes(self) -> dict[str, int]:
        """Return the fields of `LoaderConfig` that it sets."""
        return {option.name: value for option in fields(self) if (value := getattr(self, option.name)) != option.default}


@dataclass(frozen=True, kw_only=True)
class BatchOptions(OrderOptions):
    """Size and order of the batches: the options that `loader plan`, `loader peek` and the trainer share."""

    SECTION = OrderOptions.SECTION

    batch_size: BatchSize | None = None
    """Batch size per GPU: rows; or as many rows of a bucket as fit 4MP (megapixels of 1024 x 1024 px) or 16ktok (1024 latent
    positions, h x w, each), at least one. 4MP/8: in multiples of 8 rows. The global batch is GPUs x this x --accumulation."""

    def sizes(self) -> dict[str, int]:
        """Return the size as the fields of `LoaderConfig`."""
        assert self.batch_size is not None
        return self.batch_size.sizes()

    def for_loader(self, **others: object) -> LoaderConfig:
        """Return a loader's configuration with the options that both have, and with the `others`."""
        names = [option.name for option in fields(self) if option.name in LoaderConfig.__dataclass_fields__]
        return LoaderConfig(**{**{name: getattr(self, name) for name in names}, "batch_size": None, **self.sizes(), **others})


_OF_A_RUN = ("batch_size", "accumulation", "seed", "window", "world_size", "split", "caption_dropout", "flip")
"""Fields that a run decides."""


@dataclass(frozen=True, kw_only=True)
class WorldSize(OptionValue):
    """The number of ranks, and of their machines."""

    FORMS = ("RANKS[@MACHINES]",)
    EXPECTED = "1 rank or more, such as 8, or a multiple of its machines, such as 64@8"
    LIMITS: ClassVar = {"ranks": ONE_OR_MORE, "machines": ONE_OR_MORE}

    ranks: int = 1
    machines: int | None = None  # None: not told

    def fault(self) -> str | None:
        """Return that the ranks are not as many on each machine, if it is so."""
        return "not a multiple" if self.ranks % (self.machines or 1) else None


@dataclass(frozen=True, kw_only=True)
class SplitRows(OptionValue):
    """A split, and how to handle its rows that do not fill a global batch."""

    FORMS = ("SPLIT[:REMAINDER]",)
    METAVAR = "SPLIT[:REMAINDER]"
    EXPECTED = f"a split, such as val, or with {' or '.join(Remainder)}: val:partial"

    split: Annotated[str, FieldForm(r"[^:]+", str)]
    remainder: Remainder = Remainder.CARRY


ONE_RANK, TRAIN_ROWS = WorldSize(), SplitRows(split="train")


@dataclass(frozen=True, kw_only=True)
class PlannedOptions(BatchOptions):
    """Stores, size and order of the batches: given, or those of a run."""

    SECTION = OrderOptions.SECTION
    ONE_OF = (("stores", "of_run"), ("batch_size", "of_run"))

    stores: Positional[tuple[str, ...]] = ()
    """Folders or URLs of the stores. Write `photos.store:3` to read a store's rows three times per pass,
    and `photos.store:0.5` to read half of them, others in each.
    A folder packed from a data set file stands for its stores and their repeats. With --run: only if they have moved."""
    of_run: Annotated[Path | None, Arg(name="run", metavar="RUN")] = None
    """Folder of a run, a checkpoint in it, or a loader's state as JSON: take stores, seed, batch, ranks and all that
    decides the order from it."""
    world_size: WorldSize = ONE_RANK
    """Number of training ranks, such as 8; with their machines, such as 64@8: a window then deals its shards to these."""
    split: Annotated[SplitRows, Arg(words=("train", "val"))] = TRAIN_ROWS
    """Split to read: train or val; and how to handle rows that do not fill a global batch, by carry (the default), drop or
    partial, such as val:partial."""

    @classmethod
    def complete(cls, options: Self, names: frozenset[str]) -> Self:
        for name in _OF_A_RUN if options.of_run is not None else ():
            if name in names:
                raise UsageError(
                    f"{cls._named(name)} is {getattr(options, name)} with --run {options.of_run}, which decides it; leave out "
                    "one of them"
                )
        return options

    def planned(self, step: int | None = None, **others: Any) -> tuple[tuple[WeightedStore, ...], LoaderConfig, int, int]:  # noqa: ANN401
        """Return the open stores, the configuration with `others`, the number of ranks, and the plan's own number of `step`.

        `step`: that of a run of which the plan is wanted, since it may have changed; None: the last one, with the number 0.
        """
        from bucketline.loader.mixture import open_weighted

        if self.of_run is None:
            machines = self.world_size.machines
            mixes = self.window or (self.window is None and self.cache_bytes is not None)
            lanes = {"lanes": machines} if mixes and machines is not None else {}
            rows = {"split": self.split.split, "remainder": self.split.remainder}
            config = self.for_loader(**rows, **lanes, **others)
            return open_weighted(self.stores, self.remote()), config, self.world_size.ranks, step or 0
        from bucketline.loader.seen import open_plan, read_run

        run = read_run(self.of_run, "--run")
        remote = self.remote()
        try:
            line = run.line_of(run.steps if step is None else step)
            recorded = open_plan(line, run.given(self.stores, remote), remote)
        except StateError as error:
            raise StateError(f"--run {self.of_run}: {error}") from error
        number = 0 if step is None else step - line.shift
        return recorded.stores, replace(recorded.config, **others), line.state.world_size, number
