"""Linear layers with weights in 8 or 4 bits: quantised once by torchao, dequantised wherever a layer runs.

The formats are torchao's, a test holds both directions to the bit. A layer keeps its tensors as plain buffers, since torchao's
tensor subclasses pass neither DistributedDataParallel nor a copy from pinned memory; its backward pass dequantises again, where
autograd would keep the dequantised weight. Source: Dettmers et al. 2023, "QLoRA" (arXiv 2305.14314), for nf4.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.functional import linear

from bucketline.dtype_names import WeightFormat

if TYPE_CHECKING:
    from torch import Tensor

NF4_GROUP = 64  # weights that share a scale
NF4_SCALES = 256  # scales that share a scale of their own


def quantise_layers(
    root: nn.Module, form: WeightFormat, device: torch.device, kind: type[QuantisedLinear] | None = None
) -> None:
    """Quantise the frozen linear layers below a module, one at a time on the device, to layers of `kind`.

    Biases and everything else stay as they are. So does a layer that does not fit the format: of all zeros, or for nf4 one
    whose number of weights 64 does not divide.
    """
    # not the linear layers themselves, of which a list would keep all weights
    for parent in [module for module in root.modules() if type(module) is not nn.Linear]:
        for name, layer in list(parent.named_children()):
            if type(layer) is nn.Linear and not layer.weight.requires_grad:
                setattr(parent, name, _quantised(layer, form, device, kind or QuantisedLinear))


def _quantised(layer: nn.Linear, form: WeightFormat, device: torch.device, kind: type[QuantisedLinear]) -> nn.Module:
    weight = layer.weight.detach()
    if (form is WeightFormat.NF4 and weight.numel() % NF4_GROUP) or not (weight.is_meta or weight.any()):
        return layer
    tensors = quantise_weight(weight.to(device).float(), form)
    return kind(layer, form, {name: tensor.to(weight.device) for name, tensor in tensors.items()})


def quantise_weight(weight: Tensor, form: WeightFormat) -> dict[str, Tensor]:
    """Return a weight's tensors in a format of torchao, [out, in] float32; float8 as uint8, which every backend sends."""
    from torchao.quantization import Float8Tensor, Int8Tensor, NF4Tensor, PerRow

    quantised: Any
    if form is WeightFormat.NF4:
        quantised = NF4Tensor.from_tensor(weight, NF4_GROUP, math.gcd(weight.numel() // NF4_GROUP, NF4_SCALES))
        names = {
            "values": "quantized_data",
            "scales": "quantized_scalers",
            "factors": "quantization_factor",
            "mean": "scaler_mean",
            "levels": "nf4",
        }
        return {name: getattr(quantised, theirs) for name, theirs in names.items()}
    quantised = (Int8Tensor if form is WeightFormat.INT8 else Float8Tensor).from_hp(weight, granularity=PerRow())
    values = quantised.qdata.view(torch.uint8) if form is WeightFormat.FP8 else quantised.qdata
    return {"values": values, "scales": quantised.scale}


def _dequantise(tensors: dict[str, Tensor], form: WeightFormat, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Return a quantised weight in a dtype, [out, in]; computed in 32 bits."""
    values, scales = tensors["values"], tensors["scales"]
    if form is not WeightFormat.NF4:
        plain = values.view(torch.float8_e4m3fn) if form is WeightFormat.FP8 else values
        return (plain.float() * scales).to(dtype)
    factors = tensors["factors"]
    scales = (scales.view(len(factors), -1) / factors[:, None]).flatten() + tensors["mean"]
    levels = torch.stack((values >> 4, values & 15), -1).flatten().int()
    found = tensors["levels"].index_select(0, levels).view(len(scales), NF4_GROUP)
    return (found * scales[:, None]).to(dtype).view(shape)


class QuantisedLinear(nn.Module):
    """A frozen linear layer with a quantised weight."""

    def __init__(self, layer: nn.Linear, form: WeightFormat, tensors: dict[str, Tensor]) -> None:
        """Take the bias of `layer`, and the result of `quantise_weight`."""
        super().__init__()
        self.in_features, self.out_features, self.form = layer.in_features, layer.out_features, form
        self.bias = layer.bias
        self.names = tuple(tensors)
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor, persistent=False)

    @property
    def weight(self) -> Tensor:
        """The dequantised weight, [out, in] float32."""
        tensors = {name: getattr(self, name) for name in self.names}
        return _dequantise(tensors, self.form, (self.out_features, self.in_features), torch.float32)

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output, [..., out], in the dtype of the input or of autocast."""
        tensors = (getattr(self, name) for name in self.names)
        output: Tensor = _Product.apply(x, self.bias, self, *tensors)  # type: ignore[no-untyped-call]
        return output


class _Product(torch.autograd.Function):
    """A linear layer whose backward pass dequantises the weight again; there is a gradient for the input only."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, layer: QuantisedLinear, *tensors: Tensor) -> Tensor:  # noqa: ANN401
        ctx.save_for_backward(*tensors)
        ctx.how = layer.names, layer.form, (layer.out_features, layer.in_features)
        return linear(x, _weight(ctx.how, tensors, x.dtype), bias if bias is None else bias.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401 - torch's
        (grad,), tensors = grads, ctx.saved_tensors  # which checkpointing gives out once
        return grad @ _weight(ctx.how, tensors, grad.dtype), *(None,) * (2 + len(tensors))


def _weight(
    how: tuple[tuple[str, ...], WeightFormat, tuple[int, int]], tensors: tuple[Tensor, ...], dtype: torch.dtype
) -> Tensor:
    names, form, shape = how
    return _dequantise(dict(zip(names, tensors, strict=True)), form, shape, dtype)
