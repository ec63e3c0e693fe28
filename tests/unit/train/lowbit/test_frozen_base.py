"""A quantised base computes what torchao's own layers compute, and a run on it is one like any other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import linear
from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig, quantize_
from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import linear_nf4, to_nf4

from bucketline.errors import UsageError
from bucketline.quantised_linear import QuantisedLinear, quantise_weight
from bucketline.train.config import Base, Precision
from bucketline.train.log import read_metrics
from bucketline.train.lowbit.frozen_base import quantise_base
from bucketline.train.run import train
from bucketline.weight_files import LORA_FILE, PEFT_FILE
from tests.unit.train.packed_families import pack_family
from tests.unit.train.tiny_run import ALONE, UNET

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from tests.unit.train.packed_families import Packed

CPU = torch.device("cpu")
BITS = {Base.INT8: 8.2, Base.FP8: 8.2, Base.NF4: 4.2}  # a weight, with its share of the scales


def plain_layer() -> torch.nn.Linear:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return torch.nn.Linear(256, 512).requires_grad_(requires_grad=False)


def ours(layer: torch.nn.Linear, base: Base) -> QuantisedLinear:
    return QuantisedLinear(layer, base, quantise_weight(layer.weight, base))


def theirs(layer: torch.nn.Linear, base: Base, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return torchao's dequantised weight, and the output of its own layer."""
    if base is Base.NF4:
        weight: Any = to_nf4(layer.weight, 64, 256)
        return weight.get_original_weight(), linear_nf4(x, weight) + layer.bias
    quantize_(layer, Int8WeightOnlyConfig() if base is Base.INT8 else Float8WeightOnlyConfig())
    quantised: Any = layer.weight
    return quantised.dequantize(), linear(x, quantised, layer.bias)


@pytest.mark.parametrize("base", Base)
def test_a_layer_is_that_of_torchao(base: Base) -> None:
    layer, x = plain_layer(), torch.randn(6, 256, generator=torch.Generator().manual_seed(0)).requires_grad_()
    quantised = ours(layer, base)
    output = quantised(x)
    output.square().sum().backward()
    weight, wanted = theirs(plain_layer(), base, x)
    assert torch.equal(quantised.weight, weight)
    torch.testing.assert_close(output, wanted)
    torch.testing.assert_close(x.grad, 2 * output.detach() @ weight)
    bits = 8 * sum(tensor.numel() * tensor.element_size() for tensor in quantised.buffers()) / weight.numel()
    assert bits < BITS[base]
    error = float((weight - layer.weight).norm() / layer.weight.norm())
    assert 0.001 < error < (0.1 if base is Base.NF4 else 0.03)


@pytest.mark.parametrize("base", Base)
def test_the_backward_pass_keeps_no_dequantised_weight(base: Base) -> None:
    quantised = ours(plain_layer(), base)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):  # type: ignore[func-returns-value, redundant-expr]
        quantised(torch.ones(2, 256, requires_grad=True))
    own = {tensor.data_ptr() for tensor in quantised.buffers()}
    assert {tensor.data_ptr() for tensor in kept} == own


def test_what_fits_no_format_stays_as_it_is() -> None:
    from diffusers import UNet2DConditionModel

    kind: Any = UNet2DConditionModel
    model = kind.from_config(UNET).requires_grad_(requires_grad=False)
    attention = model.down_blocks[1].attentions[0].transformer_blocks[0].attn1
    zeroed = attention.to_q
    zeroed.weight.zero_()
    quantise_base(model, Base.NF4, CPU)
    assert attention.to_q is zeroed
    assert isinstance(attention.to_k, QuantisedLinear)
    assert not any(isinstance(layer, QuantisedLinear) for layer in model.time_embedding.modules())


def test_float8_on_a_gpu_without_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 6))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a card")
    with pytest.raises(UsageError, match="a card has compute capability"):
        quantise_base(torch.nn.Module(), Base.FP8, torch.device("cuda"))


@pytest.mark.parametrize(
    ("family", "base"),
    [
        ("sd", Base.INT8),
        pytest.param("flux", Base.FP8, marks=pytest.mark.slow),
        pytest.param("dit", Base.NF4, marks=pytest.mark.slow),
    ],
)
def test_a_run_learns_on_a_quantised_base_and_resumes_to_the_last_bit(family: str, base: Base, tmp_path: Path) -> None:
    packed: Packed = pack_family(tmp_path, family)
    more = {"lora_rank": 4, "learning_rate": 1e-2, "max_steps": 6, "base": base, "precision": Precision.BF16}
    whole = train(packed.config(tmp_path / "whole", **more, num_images=1), ALONE)
    train(packed.config(tmp_path / "parts", **{**more, "max_steps": 3}), ALONE)
    parts = train(packed.config(tmp_path / "parts", **more, resume=True), ALONE)
    assert len(whole.images) == 2
    found = [line["val_loss"] for line in read_metrics(tmp_path / "whole") if "val_loss" in line]
    assert found[-1] < found[0]  # type: ignore[operator]
    for folder in ("lora", "lora_ema"):
        name = PEFT_FILE if family == "dit" else LORA_FILE
        first, second = (load_file(one.checkpoint / folder / name) for one in (whole, parts))
        assert first
        assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # of torch's own compiler
@pytest.mark.parametrize("base", Base)
def test_a_compiled_layer_is_one_graph(base: Base) -> None:
    quantised = ours(plain_layer(), base)
    compiled: Any = torch.compile(quantised.forward, fullgraph=True, dynamic=False, backend="aot_eager")
    found = []
    for forward in (quantised.forward, compiled):
        x = torch.linspace(-1, 1, 512).view(2, 256).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            output = forward(x)
        assert output.dtype == torch.bfloat16
        output.sum().backward()
        found.append((output, x.grad))
    torch.testing.assert_close(*found)
