"""Ranks that wait for one another, and a model of which only rank 0 has the weights: whole, or in shards of some copies."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.nn.parallel import distributed
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bucketline.errors import ModelError
from bucketline.families.stable_diffusion import StableDiffusion
from bucketline.files.paths import CHECKPOINTS
from bucketline.loader.ranks import DISK_TIME, OtherRankFailedError, fail_together, host_group
from bucketline.train.checkpoint import copied, folder_of_step, layout_of, load_optimizer, write
from bucketline.train.config import Precision
from bucketline.train.lora import add_adapters
from bucketline.train.model import place_model, replicated
from bucketline.train.optim import Average
from bucketline.train.parallel import (
    TrainRanks,
    fill_from_rank_zero,
    free_gathered,
    from_rank_zero,
    repeated_blocks,
    separate_blocks,
    shard,
    tensors_of,
    without_sync,
)
from bucketline.train.parallel import whole as whole_tensor
from bucketline.train.step import train_step
from tests.unit.families.forms import EVERY_FORM, batch_of_lengths, facts_for, write_form
from tests.unit.families.forms import predicted as predicted_of
from tests.unit.train.forked import fork_ranks
from tests.unit.train.outputs.test_checkpoint import state
from tests.unit.train.tiny_run import config, facts, load, make_batch, make_training, write_unet

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor, nn

    from bucketline.families.family import Family
    from bucketline.loader import Batch

CPU = torch.device("cpu")


def expect_same(found: dict[str, Any], expected: dict[str, Any], *parts: str) -> None:
    for part in parts:
        one, other = found[part], expected[part]
        assert one.keys() == other.keys()
        assert all(torch.equal(whole_tensor(tensor), other[name]) for name, tensor in one.items())


def make_moved(model: nn.Module) -> torch.optim.Optimizer:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, fused=True)
    for parameter in trained:
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return optimizer


@pytest.mark.slow
@pytest.mark.parametrize("lora_rank", [None, 4])
def test_a_checkpoint_is_the_same_to_the_bit_under_any_sharding(tmp_path: Path, lora_rank: int | None) -> None:
    """Saved by one rank; loaded and saved by four with a copy each, a quarter each, and half of one of two copies each."""
    write_unet(tmp_path / "model")
    asked = config(tmp_path, lora_rank=lora_rank, precision=Precision.BF16)

    def loaded(*, on_meta: bool) -> tuple[Family, nn.Module]:
        dtype = torch.float32 if lora_rank is None else torch.bfloat16
        family, model = load(tmp_path / "model", facts(), 0, dtype=dtype, on_meta=on_meta)
        if lora_rank is not None:
            add_adapters(model, family, asked)
        return family, model

    family, model = loaded(on_meta=False)
    frozen = {name: tensor.clone() for name, tensor in tensors_of(model).items() if tensor.dtype is torch.bfloat16}
    weights, average = layout_of(family, adapters=lora_rank is not None), Average(model, 0.9)
    saved = copied(weights, model, average, make_moved(model))
    folder = tmp_path / CHECKPOINTS / folder_of_step(1)
    write(folder, weights, weights.config(model), saved, state(1), card="", keep=1)

    def body(ranks: TrainRanks) -> None:
        for sharding, part in (("ddp", 1), ("fsdp", 4)):
            asked = config(tmp_path, sharding=sharding, precision=Precision.BF16)
            _, model = loaded(on_meta=not ranks.is_main)
            assert all(tensor.is_meta is not ranks.is_main for tensor in tensors_of(model).values())
            average = place_model(model, asked, ranks, CPU, weights, folder)
            for parameter in model.parameters():
                assert isinstance(parameter, DTensor) is (part > 1)
                own = parameter.to_local() if isinstance(parameter, DTensor) else parameter
                assert own.numel() <= -(-parameter.shape[0] // part) * parameter[0].numel()
            optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], fused=True)
            load_optimizer(folder, model, optimizer)
            again = copied(weights, model, average, optimizer, keeps=ranks.is_main)
            expect_same(again, saved, "optimizer", *(("last", "average") if ranks.is_main else ()))
            found = tensors_of(model)
            assert all(torch.equal(whole_tensor(found[name]), tensor) for name, tensor in frozen.items())

    fork_ranks(tmp_path, body, num=4)


def sharded(folder: Path, ranks: TrainRanks) -> tuple[Family, nn.Module]:
    """Load a model whose configuration is in a folder, in shards that are gathered in 16 bits."""
    made, model = load(folder, facts(), 0, on_meta=not ranks.is_main)
    whole = tensors_of(model)
    torch.nn.Module.to(model, "meta")
    shard(model, CPU, torch.bfloat16)
    model.to_empty(device="cpu")
    fill_from_rank_zero(tensors_of(model), whole)
    return made, model


def predicted(family: Family, model: nn.Module, batch: Batch) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return family.predict(model, batch.latents.float(), batch.keys % 1000, batch).float()


def test_rank_zero_fills_a_sharded_model_that_the_other_has_no_weights_of(tmp_path: Path) -> None:
    """Weights are gathered in 16 bits; their shards and gradients keep 32, and no rank holds whole gradients meanwhile."""

    def body(ranks: TrainRanks) -> None:
        family, model = sharded(tmp_path / "model", ranks)
        _, expected = load(tmp_path / "model", facts(), 0)
        for name, tensor in tensors_of(model).items():
            assert tensor.dtype is torch.float32
            assert torch.equal(whole_tensor(tensor), tensors_of(expected)[name])
        seen: set[torch.dtype] = set()
        for block in repeated_blocks(model):
            block.register_forward_pre_hook(lambda one, _: seen.update(p.dtype for p in one.parameters()), prepend=False)
        batch = make_batch()
        for is_last in (False, True):
            with without_sync(model, is_last=is_last):
                predicted(family, model, batch).square().mean().backward()  # type: ignore[no-untyped-call]
            assert all(isinstance(p.grad, DTensor) and p.grad.dtype is torch.float32 for p in model.parameters())
        assert seen == {torch.bfloat16}
        with torch.no_grad():
            found, wanted = (predicted(family, one, batch) for one in (model, expected))
        torch.testing.assert_close(found, wanted, rtol=0.05, atol=0.02)

    write_unet(tmp_path / "model")
    fork_ranks(tmp_path, body)


class Collectives(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the collectives of a step by name, those within operations on shards as well."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(one, DTensor) for one in types):
            return NotImplemented  # its own operations come here
        if "c10d" in func.namespace and "wait" not in func.name():
            self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def test_a_sharded_step_gathers_the_root_and_reduces_the_norm_once(tmp_path: Path) -> None:
    """Blocks are gathered for either pass; what is outside them once for both."""

    def body(ranks: TrainRanks) -> None:
        family, model = sharded(tmp_path / "model", ranks)
        training = make_training(tmp_path, loaded=(family, model), is_bf16=True, clip_norm=0.01)
        for step in range(2):
            with Collectives() as seen:
                outcome = train_step(training, iter([dataclasses.replace(make_batch(2), step=step)]), step)
            counts = seen.counts
            blocks = len(separate_blocks(model))
            gathered = sum(count for name, count in counts.items() if "allgather" in name)
            reduced = sum(count for name, count in counts.items() if "all_reduce" in name)
            assert type(outcome.grad_norm) is torch.Tensor
            assert (gathered, reduced) == (2 * blocks + 1, 1), counts

    write_unet(tmp_path / "model")
    fork_ranks(tmp_path, body)


def test_ranks_that_have_the_weights_are_not_sent_them_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def body(ranks: TrainRanks) -> None:
        family, model = load(tmp_path / "model", facts(), 0, on_meta=not ranks.is_main)
        asked = config(tmp_path, ema="off")
        weights = layout_of(StableDiffusion({}, facts()), adapters=False)
        place_model(model, asked, ranks, CPU, weights, None)
        sent: list[object] = []
        monkeypatch.setattr(distributed, "_sync_module_states", lambda **given: sent.append(given))
        wrapped = replicated(model, family, asked, CPU)
        assert sent == []
        more: dict[str, Any] = {"lora_rank": 2, "recompute": 1.0, "offload_blocks": 2}
        replicated(model, family, config(tmp_path, **more), CPU)
        assert len(sent) == 1, "ranks that have each read a model for themselves make sure"
        _, expected = load(tmp_path / "model", facts(), 0)
        wanted = tensors_of(expected)
        assert all(torch.equal(tensor, wanted[name]) for name, tensor in tensors_of(wrapped.module).items())

    write_unet(tmp_path / "model")
    fork_ranks(tmp_path, body)


def test_weights_that_stay_gathered_are_those_of_the_shards_by_the_next_forward_pass(tmp_path: Path) -> None:
    """A validation has no backward pass, which would free them: with the averages, the next step ran on the averages."""

    def body(ranks: TrainRanks) -> None:
        family, model = sharded(tmp_path / "model", ranks)
        training, batch = make_training(tmp_path, loaded=(family, model), is_bf16=True), make_batch()
        with torch.no_grad():
            before = predicted(family, model, batch)
            free_gathered(model)
            for parameter in model.parameters():
                parameter.mul_(1.1)
            after = predicted(family, model, batch)
            assert not torch.equal(before, after)
            free_gathered(model)
            with training.averaged() as averaged:
                assert torch.equal(predicted(family, averaged, batch), before)
            assert torch.equal(predicted(family, model, batch), after)

    write_unet(tmp_path / "model")
    fork_ranks(tmp_path, body)


def placed(folder: Path, ranks: TrainRanks, sharding: str, output: Path) -> tuple[Family, nn.Module]:
    family, model = load(folder, facts_for(folder), 0, on_meta=not ranks.is_main)
    asked = config(output, sharding=sharding, ema="off")
    place_model(model, asked, ranks, CPU, layout_of(family, adapters=False), None)
    return family, model if asked.is_sharded(ranks.world_size) else replicated(model, family, asked, CPU)


def test_no_tensor_of_a_placed_model_of_any_form_is_left_on_the_meta_device(tmp_path: Path) -> None:
    """Tables of positions are neither parameters nor buffers in some models, and a model on the meta device computes none."""

    def body(ranks: TrainRanks) -> None:
        for folder in folders:
            _, model = placed(folder, ranks, "ddp", tmp_path)
            held = [(path, *one) for path, module in model.named_modules() for one in vars(module).items()]
            tensors = [(*names, one) for *names, value in held for one in tree_leaves(value) if isinstance(one, torch.Tensor)]
            assert [names for *names, one in tensors if one.is_meta] == [], folder.name

    folders = [write_form(tmp_path, form) for form in EVERY_FORM]
    fork_ranks(tmp_path, body)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Grad strides do not match")  # of Sana's convolutions of one channel, which are as fast
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view")  # which would be wrong gradients, if it mattered
@pytest.mark.parametrize("sharding", ["ddp", "fsdp"])
def test_two_ranks_have_the_predictions_and_gradients_of_one_in_every_form(tmp_path: Path, sharding: str) -> None:
    def body(ranks: TrainRanks) -> None:
        for folder in folders:
            family, model = placed(folder, ranks, sharding, tmp_path)
            _, expected = load(folder, facts_for(folder), 0)
            first, lengths = 2 * ranks.rank, (5, 9, 2, 7)
            found = of_batch(family, model, batch_of_lengths(family, lengths[first : first + 2], 9, first=first))
            wanted = of_batch(family, expected, batch_of_lengths(family, lengths, 9))
            torch.testing.assert_close(found, wanted[first : first + 2], rtol=1e-4, atol=1e-5)
            gradients = [one.grad for one in model.parameters()]
            for (name, one), gradient in zip(expected.named_parameters(), gradients, strict=True):
                item = f"{folder.name} {name}"
                assert (gradient is None) == (one.grad is None), item
                if one.grad is not None and gradient is not None:
                    assert torch.allclose(whole_tensor(gradient), one.grad, rtol=1e-3, atol=1e-5), item

    def of_batch(family: Family, model: nn.Module, batch: Batch) -> Tensor:
        prediction = predicted_of(family, model, batch)
        prediction.square().mean().backward()  # type: ignore[no-untyped-call]
        return prediction.detach()

    folders = [write_form(tmp_path, form) for form in EVERY_FORM]
    fork_ranks(tmp_path, body)


def test_decisions_and_waits_go_over_a_group_of_their_own_that_waits_for_disks(tmp_path: Path) -> None:
    def body(ranks: TrainRanks) -> None:
        (backend,) = {host_group()._get_backend(device) for device in host_group()._device_types}
        assert (dist.get_backend(host_group()), backend.options._timeout) == ("gloo", DISK_TIME)
        groups: list[object] = []
        plain: Any = dist.all_gather_object

        def noting(*given: Any, group: object, **named: Any) -> None:
            groups.append(group)
            plain(*given, group=group, **named)

        dist.all_gather_object = noting  # type: ignore[assignment]
        assert from_rank_zero(ranks, lambda: "rank 0's") == "rank 0's"
        assert set(groups) == {host_group()}

    fork_ranks(tmp_path, body)


def test_what_fails_on_one_rank_ends_the_other_as_well(tmp_path: Path) -> None:
    """Only rank 0 reads a model's weights, so only it sees that they are damaged."""

    def body(ranks: TrainRanks) -> None:
        @fail_together()
        def read(failing: int) -> None:
            if ranks.rank == failing:
                raise ModelError("damaged")

        for failing in (0, 1):
            with pytest.raises(ModelError if ranks.rank == failing else OtherRankFailedError):
                read(failing)
        with pytest.raises(ZeroDivisionError if ranks.is_main else OtherRankFailedError):
            from_rank_zero(ranks, lambda: 1 // 0)
        read(2)

    fork_ranks(tmp_path, body)
