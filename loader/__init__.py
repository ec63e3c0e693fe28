"""The loader: fixed-shape batches, in an order that is a pure function of the step."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bucketline.loader.batch import Batch, LatentScale, RaggedBatch
    from bucketline.loader.config import LoaderConfig, Remainder, TextForm
    from bucketline.loader.loader import Loader
    from bucketline.loader.mixture import WeightedStore
    from bucketline.loader.plan.plan import Plan, make_plan
    from bucketline.loader.service.sockets import ServiceAddress
    from bucketline.loader.torch_dataset import BatchDataset
    from bucketline.store.format.block import LatentKind

__all__ = [
    "Batch",
    "BatchDataset",
    "LatentKind",
    "LatentScale",
    "Loader",
    "LoaderConfig",
    "Plan",
    "RaggedBatch",
    "Remainder",
    "ServiceAddress",
    "TextForm",
    "WeightedStore",
    "make_plan",
]

_PLACES = {
    "Batch": "batch",
    "BatchDataset": "torch_dataset",
    "LatentKind": "batch",
    "LatentScale": "batch",
    "Loader": "loader",
    "LoaderConfig": "config",
    "Plan": "plan.plan",
    "RaggedBatch": "batch",
    "Remainder": "config",
    "ServiceAddress": "service.sockets",
    "TextForm": "config",
    "WeightedStore": "mixture",
    "make_plan": "plan.plan",
}


def __getattr__(name: str) -> object:
    """Import a public name on first use, so that `loader plan` does not import torch."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    from bucketline.extensions import extra_named

    with extra_named("loader"):
        return getattr(importlib.import_module(f"{__name__}.{_PLACES[name]}"), name)


def __dir__() -> list[str]:
    """Return the module's names with all public ones, also those that were not used yet."""
    return sorted({*globals(), *__all__})
