"""The pauses between two tries of a request."""

from __future__ import annotations

import random

FIRST_S, LONGEST_S = 0.1, 5.0


def pause_after(tries: int) -> float:
    """Return the seconds to wait after so many tries: exponential backoff with full jitter."""
    return random.uniform(0.0, min(LONGEST_S, FIRST_S * 2.0 ** min(tries, 16)))  # noqa: S311 - nothing secret
