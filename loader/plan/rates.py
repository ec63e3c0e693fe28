"""The rates of a bill: bandwidth, the seconds of a step, and prices."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from bucketline.errors import UsageError

_RATES = "bandwidth=10Gbit,step=0.4 (seconds), requests=0.0004 (for 1000 of them) and egress=0.09 (for a GB)"
_PAIRS = (("bandwidth", "step"), ("requests", "egress"))  # one means nothing without the other
_BANDWIDTH = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([KMGT]?)(bit|B|iB)(?:/s)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """Prices of an object store."""

    per_1000_gets: float
    per_gb_out: float  # of 10^9 bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """The bytes that a machine may fetch in a step, and the prices of fetching; None: not told."""

    step_bytes: float | None = None
    prices: Prices | None = None


def parse_rates(text: str, option: str) -> Rates:
    """Return the rates of a text such as `bandwidth=10Gbit,step=0.4,requests=0.0004,egress=0.09`, or of either half of it.

    >>> parse_rates("bandwidth=10Gbit,step=0.4", "--bill")
    Rates(step_bytes=500000000.0, prices=None)
    >>> parse_rates("requests=0.0004, egress=0.09", "--bill").prices
    Prices(per_1000_gets=0.0004, per_gb_out=0.09)
    """

    def refusal(found: str) -> UsageError:
        return UsageError(f"{option} has {found:.80}, expected {_RATES}")

    given: dict[str, str] = {}
    for one in filter(None, text.split(",")):
        key, _, value = (word.strip() for word in one.partition("="))
        if key in given or key not in (name for pair in _PAIRS for name in pair):
            raise refusal(repr(one))
        given[key] = value
    for pair in _PAIRS:
        if len(one_of := [name for name in pair if name in given]) == 1:
            raise refusal(f"{one_of[0]}={given[one_of[0]]} by itself")
    numbers = {key: _number(value) if key != "bandwidth" else _bytes_per_s(value) for key, value in given.items()}
    for key, number in numbers.items():
        if number is None or (number == 0 and key in _PAIRS[0]):
            raise refusal(f"{key}={given[key]}")
    step_bytes = None if "step" not in given else (numbers["bandwidth"] or 0.0) * (numbers["step"] or 0.0)
    prices = (
        Prices(per_1000_gets=numbers["requests"] or 0.0, per_gb_out=numbers["egress"] or 0.0) if "egress" in given else None
    )
    return Rates(step_bytes=step_bytes, prices=prices)


def _number(text: str) -> float | None:
    return float(text) if re.fullmatch(r"[0-9]+(\.[0-9]+)?", text) and math.isfinite(float(text)) else None


def _bytes_per_s(text: str) -> float | None:
    if (match := _BANDWIDTH.fullmatch(text)) is None:
        return None
    base = 1024 if match[3] == "iB" else 1000
    unit: int = base ** " KMGT".index(match[2] or " ")
    return float(match[1]) * unit / (8 if match[3] == "bit" else 1)
