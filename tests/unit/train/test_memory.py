"""The trial before the first step: what it turns on as memory ends, and that it changes nothing else."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch

from bucketline.errors import UsageError
from bucketline.train import checkpoint, memory
from bucketline.train.checkpoint import Start
from bucketline.train.compile import forward_backward
from bucketline.train.config import Base, parse
from bucketline.train.data import open_loader, open_stores
from bucketline.train.memory import built_to_fit, decided, largest_batch, savings_of, try_step
from bucketline.train.model import build_training
from bucketline.train.run import resolve, train
from bucketline.train.values import Ema, EmaPlace
from tests.unit.train.forked import fork_ranks
from tests.unit.train.tiny_run import ALONE, config, losses, write_unet

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from bucketline.loader import Batch, Loader
    from bucketline.train.config import TrainConfig
    from bucketline.train.models.weights import Weights
    from bucketline.train.parallel import TrainRanks
    from bucketline.train.step import Training

CPU = torch.device("cpu")
NEW = Start(checkpoint=None, state=None)
NO_LOADER: Any = None  # none is needed where the length is given
WHOLE = ("--recompute 0.25", "--recompute 0.5", "--recompute 0.75", "--recompute 1.0", "--ema 0.9999:cpu:10")
MOMENTS = ("--optimizer adamw-8bit",)
ADAPTERS = (*WHOLE[:4], "--base int8", "--base nf4", "--offload-blocks 99")


def names(asked: TrainConfig, world_size: int = 1) -> tuple[str, ...]:
    return tuple(map(str, savings_of(asked, world_size)))


def test_what_saves_memory_is_tried_in_order_of_cost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert names(config(tmp_path)) == (*WHOLE, *MOMENTS)
    assert names(config(tmp_path, lora_rank=8)) == ADAPTERS
    assert names(config(tmp_path, sharding="fsdp"), world_size=8) == WHOLE
    assert names(config(tmp_path, sharding="fsdp", lora_rank=8), world_size=8) == WHOLE[:4]
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)  # torchao
    assert names(config(tmp_path)) == WHOLE
    assert names(config(tmp_path, lora_rank=8)) == (*WHOLE[:4], ADAPTERS[6])


@pytest.mark.parametrize(
    ("given", "left"),
    [
        ({"recompute": 0.0}, (WHOLE[4], *MOMENTS)),
        ({"ema": Ema()}, (*WHOLE[:4], *MOMENTS)),
        ({"ema": Ema(decay=0.99, place=EmaPlace.CPU)}, (*WHOLE[:4], *MOMENTS)),
        ({"optimizer": "adamw"}, WHOLE),
        ({"optimizer": "muon", "recompute": 0.5}, (WHOLE[4],)),
        ({"lora_rank": 8, "base": "off"}, (*ADAPTERS[:4], ADAPTERS[6])),
        ({"lora_rank": 8, "base": Base.FP8, "offload_blocks": 0}, ADAPTERS[:4]),
        ({"lora_rank": 8, "offload_blocks": 3}, ADAPTERS[4:6]),
        ({"lora_rank": 8, "recompute": 0.5}, ADAPTERS[4:6]),
    ],
)
def test_a_given_option_wins(tmp_path: Path, given: dict[str, Any], left: tuple[str, ...]) -> None:
    asked = config(tmp_path, **given)
    assert names(asked) == left
    assert {name: getattr(decided(asked), name) for name in given} == {
        **given,
        **({"base": None} if given.get("base") == "off" else {}),
    }


def built(asked: TrainConfig, ranks: TrainRanks = ALONE) -> tuple[Loader, Callable[[TrainConfig], tuple[Training, Weights]]]:
    loader = open_loader(asked, ranks, open_stores(asked, ranks, NEW), CPU)
    return loader, lambda one: build_training(one, ranks, NEW, loader)


def ends_unless(monkeypatch: pytest.MonkeyPatch, fits: Callable[[TrainConfig], bool]) -> None:
    """Let memory end in the backward pass of a trial, as on a GPU."""

    def passes(training: Training, batch: Batch) -> None:
        forward_backward(training, batch)
        if not fits(training.config):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 8.00 GiB")

    monkeypatch.setattr(memory, "forward_backward", passes)


@pytest.mark.parametrize("lora_rank", [None, 2])
def test_a_run_turns_on_what_it_needs_says_so_and_is_the_one_that_has_it_given(
    folder: Path, lora_rank: int | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = config(folder, output_dir=folder / "fitted", max_steps=1, memory="24GiB", lora_rank=lora_rank)
    with monkeypatch.context() as short:
        ends_unless(short, lambda one: (one.recompute or 0) >= 0.5)
        train(asked, ALONE)
    said = re.sub(r"\s+", " ", capsys.readouterr().err)
    assert "memory is short for a step of 2 rows of train/192x128: trying --recompute 0.25; up to 8% more time" in said
    assert "trying --recompute 0.5; up to 17% more time, and the same losses" in said
    assert "0.75" not in said
    assert recompute_of(folder / "fitted") == 0.5
    train(dataclasses.replace(asked, output_dir=folder / "given", memory=None, recompute=0.5), ALONE)
    assert losses(folder / "fitted") == losses(folder / "given")

    with monkeypatch.context() as unused:  # it was tried in the first part
        unused.setattr(memory, "try_step", None)
        train(dataclasses.replace(asked, max_steps=2, resume=True), ALONE)
    assert recompute_of(folder / "fitted") == 0.5
    train(dataclasses.replace(asked, memory=None, recompute=0.0, max_steps=3, resume=True), ALONE)
    assert recompute_of(folder / "fitted") == 0


@pytest.mark.parametrize(("more", "fits"), [({}, "recompute"), ({"recompute": 1.0}, "ema"), ({"lora_rank": 2}, "recompute")])
def test_a_run_that_is_resumed_by_its_folder_with_less_memory_is_fitted_again(
    folder: Path, more: dict[str, Any], fits: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = config(folder, max_steps=1, memory="24GiB", **more)
    train(asked, ALONE)
    before = checkpoint.read_state(checkpoint.last_whole(asked.output_dir)).config
    for steps, memory_now in enumerate(("24GiB", "8GiB", "8GiB"), 2):
        with monkeypatch.context() as short:
            ends_unless(short, lambda one: (one.recompute or 0) >= 0.5 if fits == "recompute" else one.ema.every == 10)
            train(parse(["--resume", str(asked.output_dir), "--memory", memory_now, f"--max-steps={steps}"], "train"), ALONE)
        now = checkpoint.read_state(checkpoint.last_whole(asked.output_dir)).config
        changed = {} if memory_now == "24GiB" else {"recompute": 0.5} if fits == "recompute" else {"ema": "0.9999:cpu:10"}
        assert now == {**before, "max_steps": steps, "resume": True, "memory": now["memory"], **changed}


def recompute_of(run: Path) -> float:
    """Return the share that a run has recorded."""
    recorded = checkpoint.read_state(checkpoint.last_whole(run)).config["recompute"]
    assert isinstance(recorded, float)
    return recorded


def test_a_model_that_cannot_be_placed_is_tried_with_less(folder: Path) -> None:
    asked = config(folder, memory="1GiB", lora_rank=2, recompute=1.0)
    loader, build_one = built(asked)
    tried: list[tuple[Any, Any]] = []

    def placed(one: TrainConfig) -> tuple[Training, Weights]:
        tried.append((one.base, one.offload_blocks))
        if one.base is not Base.NF4:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return build_one(one)

    with loader:
        training, _ = built_to_fit(asked, ALONE, NEW, loader, placed, lambda _: None)
    assert training.config.base is Base.NF4
    assert tried == [(None, 0), (Base.INT8, 0), (Base.NF4, 0)]


def test_a_run_that_never_fits_is_refused_and_another_error_is_its_own(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = config(folder, memory="1GiB", recompute=0.0, optimizer="adamw", ema="off")
    loader, build_one = built(asked)
    with loader:
        ends_unless(monkeypatch, lambda _: False)
        with pytest.raises(UsageError, match=r"short for a step of 2 rows of .*: CUDA out of memory.* Use a smaller --batch"):
            built_to_fit(asked, ALONE, NEW, loader, build_one, lambda _: None)
        monkeypatch.setattr(memory, "try_step", lambda *_: (_ for _ in ()).throw(RuntimeError("a bug")))
        with pytest.raises(RuntimeError, match="a bug"):
            built_to_fit(asked, ALONE, NEW, loader, build_one, lambda _: None)


def test_nothing_is_tried_on_a_cpu_without_a_memory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = config(folder)
    loader, build_one = built(asked)
    monkeypatch.setattr(memory, "try_step", None)
    with loader:
        for given in (None, "off"):
            built_to_fit(config(folder, memory=given), ALONE, NEW, loader, build_one, lambda _: None)
        with pytest.raises(TypeError):
            built_to_fit(config(folder, memory="3GiB"), ALONE, NEW, loader, build_one, lambda _: None)
    with pytest.raises(UsageError, match="--memory is 'much', expected off, or 1MiB or more"):
        config(folder, memory="much")


OPTIMIZERS = ("adamw", "muon", "prodigy", "torch.optim:NAdam", pytest.param("adamw-8bit", marks=pytest.mark.slow))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_trial_changes_no_number(folder: Path, name: str) -> None:
    write_unet(folder / "model", block_out_channels=[8, 32])  # moments of 8 bits are for weights of 4096 values
    asked = config(folder, optimizer=name, max_steps=2, learning_rate=None, lora_dropout=0.1, lora_rank=2)
    asked = resolve(
        asked if name == "prodigy" else dataclasses.replace(asked, lora_rank=None, lora_dropout=0.0), NEW, NO_LOADER, CPU
    )
    loader, build_one = built(asked)
    with loader:
        training, _ = build_one(decided(asked))
        before = [tensor.clone() for tensor in training.model.state_dict().values()]
        groups = [{**group, "params": None} for group in training.optimizer.param_groups]
        torch.manual_seed(3)
        expected = torch.rand(4)
        torch.manual_seed(3)
        try_step(training, largest_batch(asked, ALONE, loader), None)
        assert torch.equal(torch.rand(4), expected)
    assert not training.optimizer.state
    assert [{**group, "params": None} for group in training.optimizer.param_groups] == groups
    assert [one for group in training.optimizer.param_groups for one in group["params"]]
    assert all(one.grad is None for one in training.trained)
    for tensor, own in zip(before, training.model.state_dict().values(), strict=True):
        assert torch.equal(tensor, own)
    for run, limit in (("plain", "off"), ("tried", "64GiB")):
        train(dataclasses.replace(config(folder, memory=limit), **options_of(asked), output_dir=folder / run), ALONE)
    assert losses(folder / "plain") == losses(folder / "tried")


def options_of(asked: TrainConfig) -> dict[str, Any]:
    return {name: getattr(asked, name) for name in ("optimizer", "max_steps", "learning_rate", "lora_dropout", "lora_rank")}


def test_a_trial_has_the_state_of_a_later_step_and_gradients_of_an_earlier_micro_batch(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = resolve(config(folder, accumulation=3), NEW, NO_LOADER, CPU)
    loader, build_one = built(asked)
    seen: list[tuple[int, bool]] = []

    def passes(training: Training, batch: Batch) -> None:
        seen.append((len(training.optimizer.state), training.trained[0].grad is not None))
        forward_backward(training, batch)

    monkeypatch.setattr(memory, "forward_backward", passes)
    with loader:
        training, _ = build_one(decided(asked))
        try_step(training, largest_batch(asked, ALONE, loader), None)
    assert seen == [(len(training.trained), False), (len(training.trained), True)]


def test_the_largest_batch_is_of_the_largest_bucket_with_the_longest_captions(folder: Path) -> None:
    asked = config(folder)
    loader, _ = built(asked)
    with loader:
        batch = largest_batch(asked, ALONE, loader)
    assert batch.bucket == "train/192x128"
    assert batch.latents.shape[2:] == (24, 16)
    assert batch.tokens.shape[:2] == batch.token_mask.shape == (2, 12)
    assert batch.token_mask[:, -1].all()


def test_a_rank_that_has_memory_enough_chooses_what_another_needs(folder: Path) -> None:
    def body(ranks: TrainRanks) -> None:
        asked = config(folder, memory="1GiB", accumulation=1)
        with pytest.MonkeyPatch.context() as patched:
            ends_unless(patched, lambda one: ranks.rank == 0 or one.recompute == 1)
            loader, build_one = built(resolve(asked, NEW, NO_LOADER, CPU), ranks)
            with loader:
                training, _ = built_to_fit(resolve(asked, NEW, NO_LOADER, CPU), ranks, NEW, loader, build_one, lambda _: None)
        assert training.config.recompute == 1

    fork_ranks(folder, body)


def test_a_gpu_is_capped_and_tried_without_a_memory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a device that is none: the calls to torch's allocator are those of a GPU."""
    fractions: list[float] = []
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=80 << 30))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda share, _: fractions.append(share))
    tried: list[int | None] = []
    monkeypatch.setattr(memory, "try_step", lambda _training, _batch, limit: tried.append(limit))
    monkeypatch.setattr(memory, "largest_batch", lambda *_: None)
    loader = cast("Loader", SimpleNamespace(device=torch.device("cuda")))
    for given in (None, "off", "20GiB", "90GiB"):
        asked = config(folder, memory=given)
        built_to_fit(asked, ALONE, NEW, loader, lambda _: cast("Any", (None, None)), lambda _: None)
    assert fractions == [0.25, 1.0]
    assert tried == [None, 20 << 30, 90 << 30]


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        yield
