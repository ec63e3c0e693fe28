"""A service gives what a loader's own threads give, of several stores and with everything that a row comes with."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from bucketline.loader import Loader, LoaderConfig
from bucketline.loader.mixture import WeightedStore
from tests.building import make_store, samples_of
from tests.conditioned import Form, conditioned_store

if TYPE_CHECKING:
    from pathlib import Path

    from bucketline.loader.mixture import Stores


def read(stores: Stores, config: LoaderConfig, service: str | None) -> list[dict[str, torch.Tensor]]:
    with Loader(stores, config, service=service) as loader:
        return [{name: tensor.clone() for name, tensor in batch.by_name().items()} for batch in loader.forever()]


def same(stores: Stores, config: LoaderConfig) -> int:
    """Compare what threads and a private service give; say how many batches there were."""
    own, served = (read(stores, config, service) for service in (None, "auto"))
    for one, other in zip(own, served, strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())
    return len(own)


def test_flips_pooled_embeddings_and_lengths_that_differ_are_served(tmp_path: Path) -> None:
    store, _ = conditioned_store(tmp_path / "s", Form())
    assert same(store, LoaderConfig(batch_size=2, epochs=2, flip=0.5, caption_dropout=0.3, pad_multiple=2)) > 20


def test_several_stores_are_served_as_one_each_as_often_as_asked_for(tmp_path: Path) -> None:
    first, second = (
        make_store(tmp_path / name, samples_of({"train/64x64": 11, "train/96x64": 5}, name)) for name in ("a", "b")
    )
    assert same([first, WeightedStore(store=second, repeats=2)], LoaderConfig(batch_size=3, epochs=2)) == 32
