"""The device that a rank encodes on."""

from __future__ import annotations

import pytest
import torch

from bucketline.errors import UsageError
from bucketline.ingest.pipeline.model.device import chosen_device


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


def test_more_ranks_than_gpus_share_them(two_gpus: None) -> None:
    assert [chosen_device("auto", rank).index for rank in range(4)] == [0, 1, 0, 1]


def test_a_gpu_that_is_not_there_is_refused_with_those_that_are(two_gpus: None) -> None:
    assert chosen_device("cuda:1", 0).index == 1
    with pytest.raises(UsageError, match="this machine has 2 CUDA devices, expected cuda:0 to cuda:1"):
        chosen_device("cuda:7", 0)
