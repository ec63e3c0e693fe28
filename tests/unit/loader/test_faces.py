"""Batches for those who are not in a loop of their own over torch tensors: numpy, torch's `DataLoader`."""

from __future__ import annotations

import gc
import pickle
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from bucketline.errors import UsageError
from bucketline.loader import Batch, BatchDataset, LatentKind, Loader, LoaderConfig, NumpyBatch, numpy_batches
from bucketline.store import Store
from tests.conditioned import Form, conditioned_store


def read(store: Store, config: LoaderConfig) -> list[Batch]:
    with Loader(store, config) as loader:
        return list(loader.forever())


@pytest.mark.parametrize("dtype", ["F16", "F32", "BF16"])
def test_numpy_arrays_are_the_tensors_own_memory(tmp_path: Path, dtype: str) -> None:
    store, _ = conditioned_store(tmp_path / "s", Form(dtype=dtype))
    for batch in read(store, LoaderConfig(batch_size=3, epochs=1, flip=0.5)):
        found = batch.numpy()
        assert (found.step, found.bucket, found.latent_kind) == (batch.step, batch.bucket, LatentKind.MODE)
        assert found.arrays.keys() == found.dtypes.keys() == batch.by_name().keys()
        for name, tensor in batch.by_name().items():
            array = found.arrays[name]
            assert array.ctypes.data == tensor.data_ptr()
            assert array.shape == tensor.shape
            halves = tensor.dtype is torch.bfloat16
            assert (array.dtype.name, found.dtypes[name]) == (("uint16", "BF16") if halves else (array.dtype.name,) * 2)
            assert np.array_equal(found.float32(name), tensor.float().numpy())
        assert found.dtypes["latents"] == {"F16": "float16", "F32": "float32", "BF16": "BF16"}[dtype]
        assert found.dtypes["keys"] == "int64"


def test_numpy_batches_stay_valid_while_one_of_their_arrays_is_held(store: Store) -> None:
    config = LoaderConfig(batch_size=2, epochs=2, prefetch_bytes=1)
    expected = [batch.latents.numpy().copy() for batch in read(store, config)]
    with Loader(store, config) as loader:
        held = [batch.arrays["latents"] for batch in numpy_batches(loader.forever())]
    assert all(np.array_equal(one, other) for one, other in zip(held, expected, strict=True))


def test_numpy_batches_are_a_loaders_own_and_count_as_consumed(store: Store) -> None:
    with Loader(store, LoaderConfig(batch_size=2, epochs=1)) as loader:
        batches = numpy_batches(loader)
        assert isinstance(next(batches), NumpyBatch)
        assert loader.state_dict()["step"] == 1
        num_batches = len(loader)
        assert 1 + len(list(batches)) == num_batches


def test_a_batch_on_a_device_has_no_numpy_arrays(store: Store) -> None:
    batch = read(store, LoaderConfig(batch_size=2, epochs=1))[0].to("meta")
    with pytest.raises(UsageError, match="a batch on meta has no numpy arrays"):
        batch.numpy()


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
        found = [batch.ids.tolist() for _, batch in zip(range(7), DataLoader(dataset, batch_size=None), strict=False)]
        state = dataset.state_dict()
        assert state == loader.state_dict()
        assert state["step"] == 7
    with Loader(store, config) as loader:
        dataset = BatchDataset(loader)
        dataset.load_state_dict(state)
        found += [batch.ids.tolist() for batch in DataLoader(dataset, batch_size=None)]
    assert found == expected


def test_the_length_of_a_dataset_is_that_of_an_epoch(store: Store) -> None:
    with Loader(store, LoaderConfig(batch_size=1)) as loader:
        assert len(BatchDataset(loader)) == len(loader) == sum(bucket.num_rows for bucket in store.buckets("train"))


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_worker_processes_are_refused_with_what_to_do(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.1
    )  # how long it waits for a worker that failed: 5 s
    with Loader(store, LoaderConfig(batch_size=1, epochs=1)) as loader:
        batches = DataLoader(BatchDataset(loader), batch_size=None, num_workers=2, multiprocessing_context="fork")
        with pytest.raises(UsageError, match=r"a DataLoader with 2 workers cannot read .* num_workers=0"):
            next(iter(batches))
        with pytest.raises(UsageError, match=r"cannot be sent to a worker process; .* num_workers=0"):
            pickle.dumps(BatchDataset(loader))
        del batches
        gc.collect()  # its iterator ends here, and not in another test
