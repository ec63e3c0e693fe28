"""The loader: batches of one shape, in an order that is a pure function of the step."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bucketline.loader.batch import Batch, LatentKind
    from bucketline.loader.config import LoaderConfig
    from bucketline.loader.loader import Loader
    from bucketline.loader.numpy_batch import NumpyBatch, numpy_batches
    from bucketline.loader.plan import Plan, Remainder, make_plan
    from bucketline.loader.row_order import Shuffle
    from bucketline.loader.stores import StoreShare
    from bucketline.loader.torch_dataset import BatchDataset

__all__ = [
    "Batch",
    "BatchDataset",
    "LatentKind",
    "Loader",
    "LoaderConfig",
    "NumpyBatch",
    "Plan",
    "Remainder",
    "Shuffle",
    "StoreShare",
    "make_plan",
    "numpy_batches",
]

_PLACES = {
    "Batch": "batch",
    "BatchDataset": "torch_dataset",
    "LatentKind": "batch",
    "Loader": "loader",
    "LoaderConfig": "config",
    "NumpyBatch": "numpy_batch",
    "Plan": "plan",
    "Remainder": "plan",
    "Shuffle": "row_order",
    "StoreShare": "stores",
    "make_plan": "plan",
    "numpy_batches": "numpy_batch",
}


def __getattr__(name: str) -> object:
    """Import a public name when it is first used: `loader plan` does not pay for torch."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"{__name__}.{_PLACES[name]}"), name)
