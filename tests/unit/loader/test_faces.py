"""Batches for those who are not in a loop of their own over torch tensors: numpy, torch's `DataLoader`."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import cast

import pytest
import torch
from torch.utils.data import DataLoader

from bucketline.errors import UsageError
from bucketline.loader import Batch, BatchDataset, Loader, LoaderConfig
from bucketline.store import Store
from bucketline.torch_dtypes import as_stored
from tests.conditioned import Form, conditioned_store


def read(store: Store, config: LoaderConfig) -> list[Batch]:
    with Loader(store, config) as loader:
        return list(loader.forever())


@pytest.mark.parametrize("dtype", ["F16", "F32", "BF16"])
def test_numpy_arrays_are_the_tensors_own_memory_while_one_of_them_is_held(tmp_path: Path, dtype: str) -> None:
    store, _ = conditioned_store(tmp_path / "s", Form(dtype=dtype))
    config = LoaderConfig(batch_size=3, epochs=1, flip=0.5, prefetch_bytes=1)
    expected = [batch.latents.clone() for batch in read(store, config)]
    held = []
    with Loader(store, config) as loader:
        for batch in loader:
            found = batch.numpy()
            for name, tensor in batch.by_name().items():
                assert found[name].ctypes.data == tensor.data_ptr()
                assert found[name].shape == tensor.shape
                assert (found[name].dtype == "uint16") == (tensor.dtype is torch.bfloat16)
            held.append(found["latents"])
            del batch, found
    assert all(one.tobytes() == as_stored(other).tobytes() for one, other in zip(held, expected, strict=True))
    with pytest.raises(UsageError, match="a batch on meta"):
        read(store, config)[0].to("meta").numpy()


def test_torchs_dataloader_gives_the_loaders_own_batches(store: Store) -> None:
    config = LoaderConfig(batch_size=2, epochs=2, caption_dropout=0.5)
    expected = read(store, config)
    with Loader(store, config) as loader:
        batches = DataLoader(BatchDataset(loader), batch_size=None)
        found = cast("list[Batch]", [batch for _ in range(2) for batch in batches])
    for one, other in zip(found, expected, strict=True):
        assert isinstance(one, Batch)
        assert all(torch.equal(tensor, other.by_name()[name]) for name, tensor in one.by_name().items())


def test_the_datasets_state_is_the_loaders_and_counts_what_the_dataloader_gave(store: Store) -> None:
    config = LoaderConfig(batch_size=1, epochs=1)
    expected = [batch.ids.tolist() for batch in read(store, config)]
    with Loader(store, config) as loader:
        dataset = BatchDataset(loader)
        assert len(dataset) == len(loader) == len(expected)
        found = [batch.ids.tolist() for _, batch in zip(range(7), DataLoader(dataset, batch_size=None), strict=False)]
        state = dataset.state_dict()
        assert state == loader.state_dict()
        assert state["step"] == 7
    with Loader(store, config) as loader:
        dataset = BatchDataset(loader)
        dataset.load_state_dict(state)
        found += [batch.ids.tolist() for batch in DataLoader(dataset, batch_size=None)]
    assert found == expected


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_worker_processes_are_refused_with_what_to_do(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.1
    )  # how long it waits for a worker that failed: 5 s
    with Loader(store, LoaderConfig(batch_size=1, epochs=1)) as loader:
        batches = DataLoader(BatchDataset(loader), batch_size=None, num_workers=2, multiprocessing_context="fork")
        with pytest.raises(UsageError, match=r"a DataLoader with 2 workers cannot read .* num_workers=0"):
            next(iter(batches))
        del batches
        gc.collect()  # its iterator ends here, and not in another test
