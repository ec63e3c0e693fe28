"""The loader: batches of one shape, in an order that is a pure function of the step."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bucketline.loader.batch import Batch
    from bucketline.loader.config import LoaderConfig
    from bucketline.loader.loader import Loader
    from bucketline.loader.plan import Plan, Remainder, make_plan
    from bucketline.loader.row_order import Shuffle
    from bucketline.loader.stores import StoreShare

__all__ = ["Batch", "Loader", "LoaderConfig", "Plan", "Remainder", "Shuffle", "StoreShare", "make_plan"]

_PLACES = {
    "Batch": "batch",
    "Loader": "loader",
    "LoaderConfig": "config",
    "Plan": "plan",
    "Remainder": "plan",
    "Shuffle": "row_order",
    "StoreShare": "stores",
    "make_plan": "plan",
}


def __getattr__(name: str) -> object:
    """Import a public name when it is first used: `loader plan` does not pay for torch."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"{__name__}.{_PLACES[name]}"), name)
