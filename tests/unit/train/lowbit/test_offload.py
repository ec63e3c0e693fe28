"""Blocks that wait in host memory, and blocks that recompute: the same losses to the bit, in less memory."""

from __future__ import annotations

import functools
import re
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from bucketline.errors import UsageError
from bucketline.train import model
from bucketline.train.compile import compile_blocks, graphs_compiled, recompute
from bucketline.train.config import Base, Compile, Precision
from bucketline.train.lowbit.offload import Offload
from bucketline.train.parallel import repeated_blocks
from bucketline.train.run import Run, train
from bucketline.train.step import loss_of, train_step
from tests.unit.train.packed_families import FAMILIES
from tests.unit.train.tiny_run import ALONE, built, config, losses, write_unet

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn

    from tests.unit.train.packed_families import Packed

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
    monkeypatch.setattr(model, "compile_blocks", functools.partial(compile_blocks, backend="aot_eager"))
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


def test_compiled_blocks_get_a_budget_instead(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import torch._functorch.config as functorch

    monkeypatch.setattr(functorch, "activation_memory_budget", 1.0)
    model = torch.nn.Module()
    recompute(model, config(tmp_path, recompute=0.75), is_compiled=True)
    assert functorch.activation_memory_budget == 0.25


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"offload_blocks": 4, "recompute": 0.0}, "--offload-blocks is 4, expected --lora-rank and --recompute 1 with it"),
        ({"offload_blocks": 4, "recompute": 0.5, "lora_rank": 2}, "is 4, expected --recompute 1 with it: a backward pass"),
        ({"offload_blocks": 4, "recompute": 1.0}, "is 4, expected --lora-rank with it: only frozen blocks"),
        ({"offload_blocks": -1}, "--offload-blocks is -1"),
        ({"recompute": 1.5}, "--recompute is 1.5, expected 0 to 1"),
        ({"base": Base.NF4}, "--base is nf4, but --lora-rank is not given"),
        ({"base": Base.NF4, "lora_rank": 2, "sharding": "fsdp"}, "a quantised base is not sharded"),
    ],
)
def test_what_does_not_go_together_is_refused(tmp_path: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=re.escape(words)):
        config(tmp_path, **options)
