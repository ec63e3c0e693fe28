"""`examples/own_encoder.py` as it stands: what it packs, it reads back in three ways, and a second run finds it all there."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bucketline.store import Store
from bucketline.store.verify.verify import verify
from tests.commands import ROOT


def test_spectrograms_are_packed_and_read_back_in_three_ways(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    example: dict[str, Any] = runpy.run_path(str(ROOT / "examples" / "own_encoder.py"))
    path = str(tmp_path / "s")
    for _ in range(2):
        example["main"](path)
        assert capsys.readouterr().out == (
            "48 recordings packed\n42 read by the loader, 42 by numpy, 42 by torch's DataLoader\n"
        )
    store = Store.open(path)
    assert store.manifest.generation == 1
    assert not verify(store, lambda _: None, 1).corrupt
    for bucket in store.buckets():
        names = bucket.sample_ids(np.arange(bucket.num_rows))
        for name, stored in zip(names, bucket.read(np.arange(bucket.num_rows), "latent"), strict=True):
            expected = example["encode"](example["record"](int(name[7:10])))["target"]
            assert stored.tobytes() == expected.contiguous().numpy().tobytes()
        for row, name in enumerate(names):
            number, beats = int(name[7:10]), bucket.read_ragged(row, "beats")
            assert (beats is None) == (number % 4 == 0)
            assert beats is None or beats["at_s"].tolist() == [n / 8 for n in range(number % 5)]
