"""The dtypes of a model in 16 bits: what diffusers keeps in 32 bits stays so, however the model is made."""

from __future__ import annotations

from pathlib import Path

import diffusers
import pytest
import torch
from torch import nn

from bucketline.train.config import Precision
from bucketline.train.models.load import load
from bucketline.train.models.lora import ADAPTER, add_adapters
from tests.unit.families.forms import EVERY_FORM, facts_for, write_form
from tests.unit.train.tiny_run import config


def dtypes(model: nn.Module) -> dict[str, torch.dtype]:
    return {name.replace(".base_layer", ""): one.dtype for name, one in model.named_parameters() if ADAPTER not in name}


@pytest.mark.parametrize("each", EVERY_FORM)  # `form` would mark most of them as slow
def test_a_model_in_16_bits_has_the_dtypes_that_diffusers_gives_it(each: str, tmp_path: Path) -> None:
    """Read, for another rank to fill, at random, and with adapters."""
    folder = write_form(tmp_path, each)
    family, read = load(folder, facts_for(folder), 0, dtype=torch.bfloat16)
    part = folder / family.folder
    wanted = dtypes(getattr(diffusers, family.model_class).from_pretrained(part, torch_dtype=torch.bfloat16))
    _, on_meta = load(folder, facts_for(folder), 0, dtype=torch.bfloat16, on_meta=True)
    assert dtypes(read) == dtypes(on_meta) == wanted
    add_adapters(read, family, config(tmp_path, lora_rank=2, precision=Precision.BF16))
    assert dtypes(read) == wanted
    next(part.glob("*.safetensors")).unlink()
    _, at_random = load(folder, facts_for(folder), 0, dtype=torch.bfloat16)
    assert dtypes(at_random) == wanted
