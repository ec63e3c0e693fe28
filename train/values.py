"""The values of training's options that have several parts: each is a word on the command line and in a file."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, ClassVar, Literal

from bucketline.option_value import A_SHARE, ABOVE_0, IN_BYTES, IN_SECONDS, ONE_OR_MORE, FieldForm, OptionValue

MAX_MODE_SCALE = 1.75  # 2 / (π - 2), rounded down: beyond, two numbers would be the same timestep
_SHARE = r"[0-9]{1,9}(?:\.[0-9]{1,20})?(?:e-?[0-9]{1,3})?"
_RULES = rf"(?:{_SHARE}:[0-9]{{1,12}},)+{_SHARE}"
_BELOW_1 = "0 to below 1", lambda value: 0 <= value < 1

EmaPlace = StrEnum("EmaPlace", ["DEVICE", "CPU"])
"""The place of the moving average of the weights."""


@dataclass(frozen=True, kw_only=True)
class Timesteps(OptionValue):
    """A distribution of training timesteps.

    Source: Esser et al. 2024 (arXiv 2403.03206), equations 19 and 20.
    """

    FORMS = ("uniform", "logit-normal[:MEAN,STD]", "mode[:SCALE]")
    EXAMPLE = "logit-normal:0,1"
    LIMITS: ClassVar = {
        "std": ABOVE_0,
        "scale": (f"-1 to {MAX_MODE_SCALE}", lambda value: -1 <= value <= MAX_MODE_SCALE),
    }

    name: Literal["uniform", "logit-normal", "mode"] = "uniform"
    mean: float = 0.0  # above 0 favours noisier timesteps
    std: float = 1.0
    scale: float = 1.29  # above 0 favours timesteps in the middle, below 0 those at both ends


@dataclass(frozen=True, kw_only=True)
class TimestepRange(OptionValue):
    """The lowest and highest timestep to train, as shares of all; 0 is the least noise."""

    FORMS = ("LOW:HIGH",)
    EXAMPLE = "0.2:0.9"
    LIMITS: ClassVar = {"low": A_SHARE, "high": A_SHARE}

    low: float = 0.0
    high: float = 1.0

    def fault(self) -> str | None:
        """Return that the range is empty, if it is."""
        return None if self.low < self.high else f"low is {self.low}, expected less than high, {self.high}"


@dataclass(frozen=True, kw_only=True)
class LossWeight(OptionValue):
    """The weight of each sample in the loss, by its noise."""

    FORMS = ("none", "min-snr:GAMMA", "cosmap", "sigma-sqrt", "sigma-squared")
    EXAMPLE = "min-snr:5"
    LIMITS: ClassVar = {"gamma": ABOVE_0}

    name: Literal["none", "min-snr", "cosmap", "sigma-sqrt", "sigma-squared"] = "none"
    gamma: float | None = None


@dataclass(frozen=True, kw_only=True)
class LrSchedule(OptionValue):
    """The course of the learning rate after the warm-up, down to its floor.

    Source: cosine, with and without restarts: Loshchilov and Hutter 2017 (arXiv 1608.03983); wsd, warm-up, stable, decay: Hu et
    al. 2024 (arXiv 2404.06395).
    """

    FORMS = (
        *("constant", "cosine[:FLOOR][@END]", "cosine-restarts:CYCLES[:FLOOR][@END]", "linear[:FLOOR][@END]"),
        *("wsd[:STEPS[:FLOOR]][@END]", "polynomial:POWER[:FLOOR][@END]", "piecewise-constant:RULES"),
    )
    EXAMPLE = "cosine:0.1@20000"
    METAVAR = "constant|cosine|cosine-restarts:CYCLES|linear|wsd[:STEPS]|polynomial:POWER|piecewise-constant:RULES"
    LIMITS: ClassVar = {
        "floor": A_SHARE,
        "cycles": ONE_OR_MORE,
        "steps": ONE_OR_MORE,
        "end": ONE_OR_MORE,
        "power": ABOVE_0,
    }

    name: Literal["constant", "cosine", "cosine-restarts", "linear", "wsd", "polynomial", "piecewise-constant"] = "constant"
    floor: float = 0.0  # of the learning rate, as a share
    cycles: int | None = None  # of a cosine, each from the whole rate
    steps: int | None = None  # in which wsd falls; None: a fifth of those up to the end
    power: float | None = None  # of the share of steps that is left
    rules: Annotated[str | None, FieldForm(_RULES, str, shown="SHARE:STEP,…,SHARE")] = None  # shares, and until which step
    end: int | None = None  # step from which the rate stays at its floor; None: that of the resumed run, else the run's last

    def fault(self) -> str | None:
        """Return that a share is 0, or that the steps of the rules do not rise, if it is so."""
        if not all(share > 0 for share, _ in self.pieces):
            return f"the shares of {self.rules} are expected to be above 0: other steps would change nothing"
        ends = [end for _, end in self.pieces]
        return None if ends == sorted({*ends}) else f"the steps of {self.rules} are expected to rise"

    @property
    def pieces(self) -> list[tuple[float, float]]:
        """Shares of the learning rate, and the step before which each holds; the last one holds to the end."""
        parts = (one.partition(":") for one in (self.rules or "1").split(","))
        return [(float(share), float(end or "inf")) for share, _, end in parts]

    @property
    def ends(self) -> bool:
        """True if it depends on its last step."""
        return self.name not in ("constant", "piecewise-constant")


@dataclass(frozen=True, kw_only=True)
class Betas(OptionValue):
    """AdamW's shares of the moments that each step keeps, and what is added to the root of the second."""

    FORMS = ("BETA1,BETA2[,EPS]",)
    EXAMPLE = "0.9,0.999"
    LIMITS: ClassVar = {"beta1": _BELOW_1, "beta2": _BELOW_1, "eps": ABOVE_0}

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8


@dataclass(frozen=True, kw_only=True)
class Ema(OptionValue):
    """The moving average of the weights: its decay, its place, and the optimizer steps between two updates."""

    FORMS = ("off", "DECAY[:PLACE][:EVERY]")
    EXAMPLE = "0.9999:cpu:10"
    LIMITS: ClassVar = {"decay": A_SHARE, "every": ONE_OR_MORE}

    decay: float | None = None  # None: there is no average
    place: EmaPlace | None = None  # None: not chosen, which is the device
    every: int = 1


@dataclass(frozen=True, kw_only=True)
class MemoryLimit(OptionValue):
    """The memory of each device that a run may take."""

    FORMS = ("off", "NUM_BYTES")
    EXPECTED = "off, or 1MiB or more, such as 24GiB (of 2^30 bytes, also 24G) or 24GB (of 10^9)"
    LIMITS: ClassVar = {"num_bytes": ("1MiB or more", lambda value: value >= 1 << 20)}  # 24 would be bytes, and a slip

    num_bytes: Annotated[int | None, IN_BYTES] = None  # None: nothing is chosen


@dataclass(frozen=True, kw_only=True)
class SaveTimes(OptionValue):
    """The steps and the seconds between checkpoints; None: not by these."""

    FORMS = ("STEPS[,SECONDS]", "SECONDS[,STEPS]")
    METAVAR = "N|30m"
    EXPECTED = "steps, such as 1000, a time, such as 30m, or both: 1000,30m"
    LIMITS: ClassVar = {"steps": ONE_OR_MORE, "seconds": ABOVE_0}

    steps: int | None = None
    seconds: Annotated[float | None, IN_SECONDS] = None


@dataclass(frozen=True, kw_only=True)
class Sharding(OptionValue):
    """The way in which several processes hold the model."""

    FORMS = ("ddp", "fsdp", "fsdp:machine", "fsdp:RANKS")
    METAVAR = "ddp|fsdp[:RANKS]"
    EXPECTED = "ddp, fsdp, fsdp:machine, or fsdp:RANKS from 2 on"
    LIMITS: ClassVar = {"ranks": ("2 or more", lambda value: value >= 2)}

    name: Literal["ddp", "fsdp", "fsdp:machine"] = "ddp"
    ranks: int | None = None  # that share one copy; None: all, or those of a machine


UNIFORM, WHOLE_RANGE, UNWEIGHTED = Timesteps(), TimestepRange(), LossWeight()
CONSTANT_RATE, ADAMS_BETAS, USUAL_EMA = LrSchedule(), Betas(), Ema(decay=0.9999)
DDP, USUAL_SAVES = Sharding(), SaveTimes(seconds=1800.0)
