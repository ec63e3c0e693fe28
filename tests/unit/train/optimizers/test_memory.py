"""The documented bytes a weight of each optimizer, counted from its tensors."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn

from bucketline.train.config import WeightDtype
from bucketline.train.optim import ADAMWS, NAMED, make_optimizer
from tests.commands import ROOT
from tests.unit.train.tiny_run import config

DOCS = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
ROW = re.compile(r"^\| `([a-z][a-z0-9-]*)`[^|]*\|[^|]*\| ([0-9.]+) \| ([0-9.]+) \| ([0-9.]+) \| ([0-9.]+|—) \|", re.MULTILINE)
TABLE = {name: values for name, *values in ROW.findall(DOCS)}


class MatrixBlock(nn.Linear):
    """A block of a transformer, by its name."""


def counted(folder: Path, name: str, weights: nn.Module, dtype: WeightDtype) -> tuple[str, str]:
    """Return the bytes a weight of the state, and with weights and gradients."""
    weights = weights.to(torch.bfloat16 if dtype is WeightDtype.BF16 else torch.float32)
    model = nn.Sequential(weights)
    asked = config(folder, optimizer=name, weights=dtype, learning_rate=1e-4)
    optimizer = make_optimizer(asked, model, compiled=False)
    (parameter,) = model.parameters()
    parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    tensors = [value for value in optimizer.state_dict()["state"][0].values() if isinstance(value, torch.Tensor)]
    state = sum(tensor.nbytes for tensor in tensors) / parameter.numel()
    return f"{state:.1f}", f"{state + 2 * parameter.element_size():.1f}"


def test_the_table_has_every_named_optimizer() -> None:
    assert set(TABLE) == set(NAMED)


@pytest.mark.parametrize("name", NAMED)
def test_the_bytes_in_the_table_are_those_of_the_tensors(tmp_path: Path, name: str) -> None:
    matrix, convolution = MatrixBlock(512, 512, bias=False), nn.Conv2d(128, 128, 3, bias=False)
    state, together = counted(tmp_path, name, matrix, WeightDtype.FP32)
    of_convolution, _ = counted(tmp_path, name, convolution, WeightDtype.FP32)
    rounded = counted(tmp_path, name, matrix, WeightDtype.BF16)[1] if name in ADAMWS else "—"
    assert TABLE[name] == [state, of_convolution, together, rounded]
