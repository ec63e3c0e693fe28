"""A sample taken out of a store is a safetensors file of a row's shapes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from bucketline.errors import CorruptError, StoreError
from bucketline.store import Store
from bucketline.store.export.sample_file import write_sample
from tests.kit import Sample, embedding, make_sample, make_store


def test_any_tool_opens_the_file_and_finds_the_sample(store: Store, samples: list[list[Sample]], tmp_path: Path) -> None:
    for n, sample in enumerate(samples[0][:25:6] + samples[1][:3]):
        report = write_sample(store, sample.id, tmp_path / f"{n}.safetensors")
        found = load_file(tmp_path / f"{n}.safetensors")
        assert np.array_equal(found["latent"], sample.latent)
        assert found["original_size"].tolist() == list(sample.record.original_size)
        for k, text in enumerate(sample.captions):
            assert np.array_equal(found[f"caption.{k}.tokens"], embedding(text))
        assert len([name for name in found if name.startswith("caption.")]) == max(1, len(sample.captions))
        with safe_open(tmp_path / f"{n}.safetensors", framework="numpy") as file:
            assert json.loads(file.metadata()["record"]) == json.loads(json.dumps(report))
        assert (report["id"], report["captions"]) == (sample.id, sample.captions)


def test_bfloat16_is_written_as_such(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file as load_torch

    sample = make_sample("a.png", "train/64x64", dtype="BF16")
    store = make_store(tmp_path / "s", [sample], dtype="BF16")
    write_sample(store, "a.png", tmp_path / "a.safetensors")
    latent = load_torch(tmp_path / "a.safetensors")["latent"]
    assert latent.dtype is torch.bfloat16
    assert np.array_equal(latent.view(torch.uint16).numpy(), sample.latent)


def test_a_damaged_row_is_not_given_away(store: Store, tmp_path: Path) -> None:
    shutil.copytree(store.path, tmp_path / "s")
    opened = Store.open(tmp_path / "s")
    bucket = opened.bucket("train/64x64")
    path = opened.shards[0].paths.lmdb
    data = bytearray(path.read_bytes())
    data[int(bucket.locate(np.array([0])).offsets(bucket.spec, "latent")[0])] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptError, match=r"sample 'first/train/64x64/0.png': the row's bytes do not match"):
        write_sample(opened, "first/train/64x64/0.png", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_sample_that_is_not_there_writes_nothing(store: Store, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="has no sample"):
        write_sample(store, "nothing.png", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
