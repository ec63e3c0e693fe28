"""The plan that a command looks at: of stores, with its options, or of a run, which has recorded them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from bucketline.errors import StateError, UsageError
from bucketline.loader.commands.batch_options import BatchOptions
from bucketline.loader.config import OrderOptions, Remainder
from bucketline.option_value import ONE_OR_MORE, FieldForm, OptionValue
from bucketline.options import Arg, Positional

if TYPE_CHECKING:
    from typing import Self

    from bucketline.loader.config import LoaderConfig
    from bucketline.loader.mixture import WeightedStore

_OF_A_RUN = ("batch", "accumulation", "seed", "window", "world_size", "split", "caption_dropout", "flip")
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

    stores: Positional[tuple[str, ...]] = ()
    """Folders or URLs of the stores. Write `photos.store:3` to read a store's rows three times per pass,
    and `photos.store:0.5` to read half of them, others in each.
    A folder packed from a data set file stands for its stores and their repeats. With --run: only if they have moved."""
    of_run: Annotated[Path | None, Arg(name="run", metavar="RUN")] = None
    """Folder of a run, a checkpoint in it, or a loader's state as JSON: take stores, seed, batch, ranks and all that
    decides the order from it."""
    world_size: WorldSize = ONE_RANK
    """Number of training ranks, such as 8; with their machines, such as 64@8: a window then deals its shards to these."""
    split: SplitRows = TRAIN_ROWS
    """Split to read: train or val; and how to handle rows that do not fill a global batch, by carry (the default), drop or
    partial, such as val:partial."""

    def __post_init__(self) -> None:
        BatchOptions.__post_init__(self)
        if not self.stores and self.of_run is None:
            raise UsageError("no store is given; name one or more, or a run: --run RUN")

    def _expect_batch(self) -> None:
        if self.of_run is None:
            BatchOptions._expect_batch(self)

    @classmethod
    def complete(cls, options: Self, given: frozenset[str]) -> Self:
        """Return the options."""
        for name in _OF_A_RUN if options.of_run is not None else ():
            if name in given:
                raise UsageError(
                    f"{cls._named(name)} is {getattr(options, name)} with --run {options.of_run}, which decides it; leave out "
                    "one of them"
                )
        return options

    def planned(self, step: int | None = None, **others: Any) -> tuple[tuple[WeightedStore, ...], LoaderConfig, int, int]:  # noqa: ANN401
        """Return the open stores, the configuration with `others`, the number of ranks, and the plan's own number of `step`.

        `step`: that of a run of which the plan is wanted, since it may have changed; None: the last one, with the number 0.
        """
        from dataclasses import replace

        from bucketline.loader.mixture import open_shares

        if self.of_run is None:
            machines = self.world_size.machines
            mixes = self.window or (self.window is None and self.cache_bytes is not None)
            lanes = {"lanes": machines} if mixes and machines is not None else {}
            rows = {"split": self.split.split, "remainder": self.split.remainder}
            config = self.for_loader(**rows, **lanes, **others)
            return open_shares(self.stores, self.remote()), config, self.world_size.ranks, step or 0
        from bucketline.loader.recorded_run import open_plan, read_run

        run = read_run(self.of_run, "--run")
        remote = self.remote()
        try:
            line = run.line_of(run.steps if step is None else step)
            found = open_plan(run, line, run.given(self.stores, remote), remote)
        except StateError as error:
            raise StateError(f"--run {self.of_run}: {error}") from error
        number = 0 if step is None else step - line.shift
        return found.shares, replace(found.config, **others), line.state.world_size, number
