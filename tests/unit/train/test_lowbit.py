"""Low bits and less memory: products in 8-bit floats, a quantised base, blocks in host memory, blocks that recompute."""

from __future__ import annotations

import functools
import re
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.functional import linear
from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig, quantize_
from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import linear_nf4, to_nf4

from bucketline.errors import UsageError
from bucketline.model_file import LORA_FILE, PEFT_FILE
from bucketline.quantised_linear import QuantisedLinear, quantise_weight
from bucketline.train import compile as compile_module
from bucketline.train.compile import compile_blocks
from bucketline.train.config import Base, Compile, Precision
from bucketline.train.log import graphs_compiled, read_metrics
from bucketline.train.lowbit import Offload, expect_float8, quantise_base, recompute, use_float8
from bucketline.train.parallel import repeated_blocks
from bucketline.train.run import Run, train
from bucketline.train.step import loss_of, train_step
from tests.family_models import tiny_model
from tests.unit.train.packed_families import FAMILIES, pack_family
from tests.unit.train.tiny_run import ALONE, UNET, built, config, losses, write_unet

if TYPE_CHECKING:
    from pathlib import Path

    from tests.unit.train.packed_families import Packed

CPU = torch.device("cpu")


def tiny_flux() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model: nn.Module = tiny_model("flux", attention_head_dim=16, num_attention_heads=4, axes_dims_rope=(4, 6, 6))
    return model


def output(model: nn.Module) -> Tensor:
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
    with pytest.raises(UsageError, match="--base is fp8, and the device is NVIDIA A100, expected"):
        quantise_base(nn.Module(), Base.FP8, torch.device("cuda"))
    with pytest.raises(UsageError, match="--precision is fp8 with --lora-rank 4, expected the full model"):
        expect_float8(config(tmp_path, precision=Precision.FP8, lora_rank=4), CPU)


# A quantised base.

BITS = {Base.INT8: 8.2, Base.FP8: 8.2, Base.NF4: 4.2}  # a weight, with its share of the scales


def plain_layer() -> torch.nn.Linear:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return torch.nn.Linear(256, 512).requires_grad_(requires_grad=False)


def ours(layer: torch.nn.Linear, base: Base) -> QuantisedLinear:
    return QuantisedLinear(layer, base, quantise_weight(layer.weight, base))


def theirs(layer: torch.nn.Linear, base: Base, x: Tensor) -> tuple[Tensor, Tensor]:
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


# Blocks in host memory, and blocks that recompute.

A_FEW = [pytest.param(family, marks=() if family == "sd" else pytest.mark.slow) for family in FAMILIES]
LORA: dict[str, Any] = {"lora_rank": 2, "learning_rate": 1e-2}


def assembled(packed: Packed, output: Path, **changes: Any) -> Run:
    asked = packed.config(output, **changes)
    return built(asked)


def steps(trainer: Run, number: int = 2) -> list[tuple[float, float]]:
    with trainer.loader as loader:
        batches = loader.forever()
        outcomes = [train_step(trainer.training, batches, step) for step in range(number)]
    return [(float(outcome.loss), float(outcome.grad_norm)) for outcome in outcomes]


@pytest.mark.parametrize("packed", A_FEW, indirect=True)
@pytest.mark.parametrize("number", [2, 99])
def test_offloaded_blocks_compute_the_same_to_the_bit(packed: Packed, tmp_path: Path, number: int) -> None:
    saving = {**LORA, "recompute": 1.0, "precision": Precision.BF16}
    plain = assembled(packed, tmp_path, **saving)
    offloaded = assembled(packed, tmp_path, **saving, offload_blocks=number)
    gone = [
        sum(parameter.numel() for parameter in model.parameters() if not parameter.requires_grad)
        for model in (plain.training.model, offloaded.training.model)
    ]
    assert (gone[1] < gone[0]) == (packed.family != "dit")  # whose one block is read from outside
    assert steps(plain) == steps(offloaded)


def test_a_run_with_everything_that_saves_memory_is_the_plain_one(folder: Path) -> None:
    asked = {**LORA, "max_steps": 3, "accumulation": 1, "num_images": 1, "base": Base.INT8, "validate_every": 2}
    plain = config(folder, output_dir=folder / "plain", **asked)
    train(plain, ALONE)
    saving = config(folder, output_dir=folder / "saving", **asked, recompute=1.0, offload_blocks=3)
    train(saving, ALONE)
    assert losses(plain.output_dir) == losses(saving.output_dir)
    some = config(folder, output_dir=folder / "some", **asked, recompute=0.5)
    train(some, ALONE)
    assert losses(plain.output_dir) == losses(some.output_dir)
    grids = [(asked.output_dir / "images.png").read_bytes() for asked in (plain, saving)]
    assert grids[0] == grids[1]


def test_two_blocks_at_a_time_are_on_the_device_and_each_arrives_ahead(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weak: Any = StorageWeakRef
    fetched: list[tuple[nn.Module, list[Any]]] = []
    most, late = 0, []
    plain_fetch, plain_run = Offload._fetch, Offload._run

    def fetch(self: Offload, block: nn.Module) -> None:
        nonlocal most
        is_new = block not in self._arriving
        plain_fetch(self, block)
        if is_new:
            copies, _ = self._arriving[block]
            storages: list[Any] = [weak(copy.untyped_storage()) for copy in copies]
            fetched.append((block, storages))
            most = max(most, len({one for one, refs in fetched if not all(ref.expired() for ref in refs)}))

    def run(self: Offload, block: nn.Module, *args: Any, **named: Any) -> Any:
        late.append(block not in self._arriving)
        return plain_run(self, block, *args, **named)

    monkeypatch.setattr(Offload, "_fetch", fetch)
    monkeypatch.setattr(Offload, "_run", run)
    write_unet(folder / "model", mid_block_type="UNetMidBlock2DCrossAttn", up_block_types=["CrossAttnUpBlock2D", "UpBlock2D"])
    asked = config(folder, **LORA, accumulation=1, recompute=1.0, offload_blocks=99)
    trainer = built(asked)
    num_blocks = len(repeated_blocks(trainer.training.model))
    with trainer.loader as loader:
        batches = loader.forever()
        train_step(trainer.training, batches, 0)
        late.clear()
        train_step(trainer.training, batches, 1)
    assert num_blocks >= 8
    assert most <= 3  # the next, the one that runs, and one whose gradients are computed
    # Nothing before the first block is trained, and diffusers does not recompute the middle's first: neither is foreseen.
    assert sum(late) <= 2, f"{sum(late)} of {len(late)} runs began before their block was fetched"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of torch's own compiler
@pytest.mark.parametrize("packed", ["flux"], indirect=True)
def test_compiled_blocks_take_part(packed: Packed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same losses, and no graph that the warm-up has not made."""
    import torch._dynamo as dynamo

    kept = {name: getattr(dynamo.config, name) for name in ("automatic_dynamic_shapes", "optimize_ddp", "recompile_limit")}
    kept |= {name: getattr(dynamo.config, name) for name in ("accumulated_recompile_limit", "fail_on_recompile_limit_hit")}
    monkeypatch.setattr(compile_module, "compile_blocks", functools.partial(compile_blocks, backend="aot_eager"))
    asked = {**LORA, "accumulation": 1, "base": Base.NF4, "recompute": 1.0, "offload_blocks": 4}
    found = []
    with dynamo.config.patch(**kept):
        for compiled in (Compile.OFF, Compile.ON):
            trainer = assembled(packed, tmp_path, **asked, compile=compiled)
            before = graphs_compiled()
            found.append(steps(trainer, 3))
            assert graphs_compiled() == before
    dynamo.reset()
    for plain, compiled_too in zip(*found, strict=True):
        assert compiled_too == pytest.approx(plain, rel=1e-4)


def test_recomputing_keeps_fewer_activations(folder: Path) -> None:
    kept = {}
    found = []
    for share in (1.0, 0.5, 0.0):
        asked = config(folder, accumulation=1, recompute=1 - share)
        trainer = built(asked)
        sizes: dict[int, int] = {}

        def pack(tensor: torch.Tensor, sizes: dict[int, int] = sizes) -> torch.Tensor:
            sizes[tensor.data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with trainer.loader as loader, torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = loss_of(trainer.training, next(loader.forever()))
        kept[share] = sum(sizes.values())
        loss.backward()  # type: ignore[no-untyped-call]
        found.append([parameter.grad for parameter in trainer.training.model.parameters()])
    assert kept[0.0] < 0.8 * kept[0.5] < 0.8 * 0.9 * kept[1.0]
    for first, second, third in zip(*found, strict=True):
        assert torch.equal(first, second)
        assert torch.equal(first, third)


def test_compiled_blocks_get_a_budget_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch._functorch.config as functorch

    monkeypatch.setattr(functorch, "activation_memory_budget", 1.0)
    model = torch.nn.Module()
    recompute(model, 0.75, is_compiled=True)
    assert functorch.activation_memory_budget == 0.25


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"offload_blocks": 4, "recompute": 0.5, "lora_rank": 2}, "is 4, expected --recompute 1 with it: a backward pass"),
        ({"offload_blocks": 4, "recompute": 1.0}, "--offload-blocks is 4, but --lora-rank is not given"),
        ({"offload_blocks": -1}, "--offload-blocks is -1"),
        ({"recompute": 1.5}, "--recompute is 1.5, expected 0 to 1"),
        ({"base": Base.NF4}, "--base is nf4, but --lora-rank is not given"),
        ({"base": Base.NF4, "lora_rank": 2, "sharding": "fsdp"}, "--base is nf4, and --sharding is fsdp"),
    ],
)
def test_what_does_not_go_together_is_refused(tmp_path: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=re.escape(words)):
        config(tmp_path, **options)
