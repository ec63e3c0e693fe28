"""The trial before the first step: what it turns on as memory ends, and that it changes nothing else."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
import shutil
import weakref
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch

from bucketline.errors import StoreError, UsageError
from bucketline.option_value import as_option
from bucketline.train import checkpoint, memory
from bucketline.train.checkpoint import Start
from bucketline.train.compile import forward_backward
from bucketline.train.config import Base, Ema, EmaPlace
from bucketline.train.data import open_loader, open_stores
from bucketline.train.memory import built_to_fit, decided, largest_batch, savings_of, stepped_optimizer, try_step
from bucketline.train.model import build_training
from bucketline.train.run import resolve, train
from tests.unit.train.forked import fork_ranks
from tests.unit.train.tiny_run import ALONE, config, losses, write_unet

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from bucketline.loader import Batch, Loader
    from bucketline.train.config import TrainConfig
    from bucketline.train.parallel import TrainRanks
    from bucketline.train.step import Training

CPU = torch.device("cpu")
NEW = Start(checkpoint=None, state=None)
NO_LOADER: Any = None  # none is needed where the length is given
WHOLE = ("--recompute 0.25", "--recompute 0.5", "--recompute 0.75", "--recompute 1.0", "--ema 0.9999:cpu:10")
MOMENTS = ("--optimizer adamw-8bit",)
ADAPTERS = (*WHOLE[:4], "--base int8", "--base nf4", "--offload-blocks 99")


def names(asked: TrainConfig, world_size: int = 1) -> tuple[str, ...]:
    return tuple(
        " ".join(f"{as_option(name)} {value}" for name, value in options.items())
        for options, _ in savings_of(asked, world_size)
    )


def test_what_saves_memory_is_tried_in_order_of_cost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert names(config(tmp_path)) == (*WHOLE, *MOMENTS)
    assert names(config(tmp_path, lora_rank=8)) == ADAPTERS
    assert names(config(tmp_path, sharding="fsdp"), world_size=8) == WHOLE
    for world_size in (1, 8):  # a quantised or waiting base is refused with fsdp on any number of processes
        assert names(config(tmp_path, sharding="fsdp", lora_rank=8), world_size=world_size) == WHOLE[:4]
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


def opened(asked: TrainConfig, ranks: TrainRanks = ALONE) -> Loader:
    return open_loader(asked, ranks, open_stores(asked, ranks, NEW), CPU)


def fitted(asked: TrainConfig, loader: Loader, ranks: TrainRanks = ALONE) -> TrainConfig:
    return built_to_fit(asked, ranks, NEW, loader, lambda _: None)[0].config


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
    assert "out of memory in a step of 2 samples of train/192x128; next try: --recompute 0.25 (up to 8 % more time" in said
    assert "next try: --recompute 0.5 (up to 17 % more time, same losses)" in said
    assert "0.75" not in said
    assert recompute_of(folder / "fitted") == 0.5
    train(dataclasses.replace(asked, output_dir=folder / "given", memory=None, recompute=0.5), ALONE)
    assert losses(folder / "fitted") == losses(folder / "given")

    train(dataclasses.replace(asked, max_steps=2, resume=True), ALONE)
    assert recompute_of(folder / "fitted") == 0.5
    with monkeypatch.context() as short:
        ends_unless(short, lambda one: one.recompute == 1)
        with pytest.raises(UsageError, match=r"memory in a step .* --recompute 1,"):
            train(dataclasses.replace(asked, max_steps=3, resume=True), ALONE)
    train(dataclasses.replace(asked, memory=None, recompute=0.0, max_steps=3, resume=True), ALONE)
    assert recompute_of(folder / "fitted") == 0


def recompute_of(run: Path) -> float:
    recorded = checkpoint.read_state(checkpoint.last_whole(run)).config["recompute"]
    assert isinstance(recorded, float)
    return recorded


def test_a_model_that_cannot_be_placed_is_tried_with_less(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = config(folder, memory="1GiB", lora_rank=2, recompute=1.0)
    tried: list[tuple[Any, Any]] = []

    def placed(one: TrainConfig, *given: Any) -> Any:
        tried.append((one.base, one.offload_blocks))
        if one.base is not Base.NF4:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return build_training(one, *given)

    monkeypatch.setattr(memory, "build_training", placed)
    with opened(asked) as loader:
        assert fitted(asked, loader).base is Base.NF4
    assert tried == [(None, 0), (Base.INT8, 0), (Base.NF4, 0)]


def test_a_run_that_never_fits_is_refused_and_another_error_is_its_own(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = config(folder, memory="1GiB", recompute=0.0, optimizer="adamw", ema="off")
    with opened(asked) as loader:
        ends_unless(monkeypatch, lambda _: False)
        with pytest.raises(
            UsageError, match=r"memory in a step of 2 samples of .*: CUDA out of memory.* Use a smaller --batch-size"
        ):
            fitted(asked, loader)
        monkeypatch.setattr(memory, "try_step", lambda *_: (_ for _ in ()).throw(RuntimeError("a bug")))
        with pytest.raises(RuntimeError, match="a bug"):
            fitted(asked, loader)


@pytest.mark.parametrize(
    ("device", "given", "share", "limit"),
    [
        ("cpu", None, [], []),
        ("cpu", "off", [], []),
        ("cpu", "3GiB", [], [3 << 30]),
        ("cuda", None, [], [None]),
        ("cuda", "off", [], []),
        ("cuda", "20GiB", [0.25], [20 << 30]),
        ("cuda", "90GiB", [1.0], [90 << 30]),
    ],
)
def test_what_is_tried_and_how_a_gpu_is_capped(
    folder: Path, monkeypatch: pytest.MonkeyPatch, device: str, given: str | None, share: list[float], limit: list[int | None]
) -> None:
    """By a device that is none: the calls to torch's allocator are those of a GPU."""
    shares: list[float] = []
    limits: list[int | None] = []
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=80 << 30))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda given, _: shares.append(given))
    monkeypatch.setattr(memory, "try_step", lambda _training, _batch, given: limits.append(given))
    monkeypatch.setattr(memory, "largest_batch", lambda *_: None)
    monkeypatch.setattr(memory, "build_training", lambda *_: (None, None))
    loader = cast("Loader", SimpleNamespace(device=torch.device(device)))
    built_to_fit(config(folder, memory=given), ALONE, NEW, loader, lambda _: None)
    assert (shares, limits) == (share, limit)


OPTIMIZERS = ("adamw", "muon", "prodigy", "torch.optim:NAdam", pytest.param("adamw-8bit", marks=pytest.mark.slow))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_trial_changes_no_number(folder: Path, name: str) -> None:
    write_unet(folder / "model", block_out_channels=[8, 32])  # moments of 8 bits are for weights of 4096 values
    asked = config(folder, optimizer=name, max_steps=2, learning_rate=None, lora_rank=2)
    asked = resolve(asked if name == "prodigy" else dataclasses.replace(asked, lora_rank=None), NEW, NO_LOADER, CPU)
    with opened(asked) as loader:
        training, _ = build_training(decided(asked), ALONE, NEW, loader)
        before = [tensor.clone() for tensor in training.model.state_dict().values()]
        groups = [{**group, "params": None} for group in training.optimizer.param_groups]
        torch.manual_seed(3)
        expected = torch.rand(4)
        torch.manual_seed(3)
        try_step(training, largest_batch(ALONE, loader), None)
        assert torch.equal(torch.rand(4), expected)
    assert not training.optimizer.state
    assert [{**group, "params": None} for group in training.optimizer.param_groups] == groups
    assert all(one.grad is None for one in training.trained)
    for tensor, own in zip(before, training.model.state_dict().values(), strict=True):
        assert torch.equal(tensor, own)
    for run, limit in (("plain", "off"), ("tried", "64GiB")):
        train(dataclasses.replace(config(folder, memory=limit), **options_of(asked), output_dir=folder / run), ALONE)
    assert losses(folder / "plain") == losses(folder / "tried")


def options_of(asked: TrainConfig) -> dict[str, Any]:
    return {name: getattr(asked, name) for name in ("optimizer", "max_steps", "learning_rate", "lora_rank")}


def test_a_trial_has_the_state_of_a_later_step_and_gradients_of_an_earlier_micro_batch(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = resolve(config(folder, accumulation=3), NEW, NO_LOADER, CPU)
    seen: list[tuple[int, bool]] = []
    made: list[weakref.ref[Any]] = []

    def stepped(training: Training) -> Any:
        optimizer = stepped_optimizer(training)
        made.append(weakref.ref(optimizer))
        return optimizer

    def passes(training: Training, batch: Batch) -> None:
        (optimizer,) = (one() for one in made)
        assert optimizer is not None
        seen.append((len(optimizer.state), training.trained[0].grad is not None))
        forward_backward(training, batch)

    monkeypatch.setattr(memory, "stepped_optimizer", stepped)
    monkeypatch.setattr(memory, "forward_backward", passes)
    with opened(asked) as loader:
        training, _ = build_training(decided(asked), ALONE, NEW, loader)
        try_step(training, largest_batch(ALONE, loader), None)
    assert seen == [(len(training.trained), False), (len(training.trained), True)]


def test_the_largest_batch_is_of_the_largest_bucket_with_the_longest_captions(folder: Path) -> None:
    asked = config(folder)
    with opened(asked) as loader:
        batch = largest_batch(ALONE, loader)
    assert batch.bucket == "train/192x128"
    assert batch.latents.shape[2:] == (24, 16)
    assert batch.tokens.shape[:2] == batch.token_mask.shape == (2, 12)
    assert batch.token_mask[:, -1].all()


def test_a_rank_that_has_memory_enough_chooses_what_another_needs(folder: Path) -> None:
    def body(ranks: TrainRanks) -> None:
        asked = resolve(config(folder, memory="1GiB", accumulation=1), NEW, NO_LOADER, CPU)
        with pytest.MonkeyPatch.context() as patched, opened(asked, ranks) as loader:
            ends_unless(patched, lambda one: ranks.rank == 0 or one.recompute == 1)
            assert fitted(asked, loader, ranks).recompute == 1

    fork_ranks(folder, body)


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        yield


@pytest.mark.parametrize("ema", ["0.9999", "off"])
def test_a_disk_without_room_for_a_checkpoint_is_refused_before_the_first_step(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], ema: str
) -> None:
    asked = config(folder, max_steps=2, save_every=1, ema=ema)
    made = train(dataclasses.replace(asked, output_dir=folder / "measured"), ALONE).checkpoint
    size = sum(path.stat().st_size for path in made.rglob("*.safetensors"))
    usage = shutil.disk_usage(folder)

    def with_room_for(checkpoints: float) -> None:
        monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=int(checkpoints * size)))

    with_room_for(0.7)
    with pytest.raises(StoreError, match=r"a checkpoint needs about .* MiB are free; make room, .*or choose another"):
        train(asked, ALONE)
    assert not (asked.output_dir / "metrics.jsonl").exists()
    for room, is_warned in ((1, True), (3, False)):
        capsys.readouterr()
        with_room_for(room)
        train(dataclasses.replace(asked, output_dir=folder / f"room {room}"), ALONE)
        assert ("room for 1 of 3 (--keep 2, and the one that is being written); use a" in capsys.readouterr().err) is is_warned
