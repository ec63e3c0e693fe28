"""The differences between two golden results, by name."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any


def differences(first: Any, second: Any, *, rel: float = 0.0, name: str = "") -> Iterator[str]:
    """Yield a line for each value that differs; numbers differ if they do by more than `rel` of the larger one."""
    if isinstance(first, dict) and isinstance(second, dict):
        for key in dict.fromkeys([*first, *second]):
            where = f"{name} / {key}" if name else key
            if key not in second:
                yield f"{where}: only in the first"
            elif key not in first:
                yield f"{where}: only in the second"
            else:
                yield from differences(first[key], second[key], rel=rel, name=where)
    elif isinstance(first, list) and isinstance(second, list) and len(first) == len(second):
        for n, (one, other) in enumerate(zip(first, second, strict=True)):
            yield from differences(one, other, rel=rel, name=f"{name}[{n}]")
    elif not _are_equal(first, second, rel):
        yield f"{name}: {_shown(first)} != {_shown(second)}"


def _are_equal(first: Any, second: Any, rel: float) -> bool:
    if isinstance(first, float) and isinstance(second, float) and rel:
        return math.isclose(first, second, rel_tol=rel)
    return first == second and type(first) is type(second)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 160 else f"{text[:160]}…"
