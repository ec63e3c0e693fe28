"""Products in 8-bit floats: which layers, how far off, and where they are refused. Only a GPU shows that they are faster."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bucketline.errors import UsageError
from bucketline.train.config import Precision
from bucketline.train.lowbit.float8 import expect_float8, use_float8
from tests.family_models import tiny_model
from tests.unit.train.tiny_run import config

CPU = torch.device("cpu")


def tiny_flux() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model: nn.Module = tiny_model("flux", attention_head_dim=16, num_attention_heads=4, axes_dims_rope=(4, 6, 6))
    return model


def output(model: nn.Module) -> Tensor:
    """Return what a model makes of five image tokens and three of text, which no 16 divides."""
    draws = torch.Generator().manual_seed(1)
    found: Any = model(
        hidden_states=torch.randn(2, 5, 16, generator=draws),
        encoder_hidden_states=torch.randn(2, 3, 24, generator=draws),
        pooled_projections=torch.randn(2, 8, generator=draws),
        timestep=torch.rand(2, generator=draws),
        img_ids=torch.randint(0, 4, (5, 3), generator=draws).float(),
        txt_ids=torch.zeros(3, 3),
        guidance=torch.ones(2),
        return_dict=False,
    )
    result: Tensor = found[0]
    return result


def test_predictions_and_gradients_are_nearly_those_of_32_bits() -> None:
    plain, eight = tiny_flux(), tiny_flux()
    assert use_float8(eight, emulates=True) == 12 + 5
    assert {name: tensor.shape for name, tensor in eight.state_dict().items()} == {
        name: tensor.shape for name, tensor in plain.state_dict().items()
    }
    expected, found = output(plain), output(eight)
    off = (found - expected).detach().norm() / expected.detach().norm()
    assert 0 < off < 0.1
    for predicted in (expected, found):
        predicted.square().mean().backward()  # type: ignore[no-untyped-call]
    wanted = torch.cat([p.grad.flatten() for p in plain.parameters() if p.grad is not None])
    given = torch.cat([p.grad.flatten() for p in eight.parameters() if p.grad is not None])
    assert torch.cosine_similarity(wanted, given, dim=0) > 0.98


def test_the_linear_layers_of_real_fluxs_blocks_are_converted_but_for_those_of_one_vector_a_sample() -> None:
    from diffusers import FluxTransformer2DModel

    kind: Any = FluxTransformer2DModel
    with torch.device("meta"):
        model = kind(guidance_embeds=True)
    weights = sum(parameter.numel() for parameter in model.parameters())
    assert use_float8(model) == 19 * 12 + 38 * 5
    converted = {name: one for name, one in model.named_modules() if type(one).__name__ == "Float8Linear"}
    assert not [name for name in converted if "norm" in name or "embed" in name]
    assert sum(one.weight.numel() for one in converted.values()) > 0.7 * weights


def test_a_device_or_an_option_that_does_not_suit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = config(tmp_path, precision=Precision.FP8)
    with pytest.raises(UsageError, match="the device is the CPU, expected an H100 or later; use --precision bf16"):
        expect_float8(asked, CPU)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA A100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    with pytest.raises(UsageError, match="the device is NVIDIA A100, expected"):
        expect_float8(asked, torch.device("cuda"))
    with pytest.raises(UsageError, match="--precision is fp8 with --lora-rank 4, expected the full model"):
        expect_float8(config(tmp_path, precision=Precision.FP8, lora_rank=4), CPU)
