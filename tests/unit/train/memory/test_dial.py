"""The dial `--memory`: what it chooses, what it refuses, and that its count is what steps really take."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch

from bucketline.errors import UsageError
from bucketline.loader import Loader, LoaderConfig
from bucketline.option_value import ByteSize
from bucketline.train import checkpoint
from bucketline.train.commands.memory import TrainMemory
from bucketline.train.config import Base, Compile
from bucketline.train.memory.activations import BatchSizes
from bucketline.train.memory.dial import (
    LEAST_COMPILED,
    SPARE,
    Choice,
    choose,
    fitted,
    largest_batch,
    refusal,
    savings_of,
)
from bucketline.train.memory.table import CountedModel, label, run_of
from bucketline.train.memory_choice import decided, memory_to_fit
from bucketline.train.models.load import read_model_config
from bucketline.train.trainer import train
from bucketline.train.values import Ema, EmaPlace, MemoryLimit
from tests.step_memory import NARROW, measured_on_ranks, measured_steps
from tests.unit.train.forked import fork_ranks
from tests.unit.train.tiny_run import ALONE, config

if TYPE_CHECKING:
    from pathlib import Path

    from bucketline.train.config import TrainConfig
    from bucketline.train.parallel import TrainRanks

CPU = torch.device("cpu")
SIZES = BatchSizes(images=8, height=16, width=16, tokens=32)
WITHIN = 0.15
WHOLE = ("--recompute 0.25", "--recompute 0.5", "--recompute 0.75", "--recompute 1", "--ema 0.9999:cpu:10")
MOMENTS = ("--optimizer adamw-8bit",)
ADAPTERS = (*WHOLE[:4], "--base int8", "--base nf4", "--offload-blocks 99")


@functools.cache
def counting_of(name: str) -> CountedModel:
    """Return a narrow model, counted once for all tests."""
    return CountedModel(NARROW[name])


@pytest.fixture
def counting() -> CountedModel:
    return counting_of("pixart")


def names(asked: TrainConfig, ranks: int = 1) -> tuple[str, ...]:
    return tuple(label(one.options).strip("`") for one in savings_of(asked, ranks))


def room_for(need: int) -> int:
    """Return the memory into which so many bytes just fit."""
    return int(need / (1 - SPARE)) + 1


@pytest.mark.parametrize("options", [{}, {"recompute": 1.0}, {"lora_rank": 8}], ids=label)
@pytest.mark.parametrize(
    "name", [one if one in ("dit", "pixart") else pytest.param(one, marks=pytest.mark.slow) for one in NARROW]
)
def test_the_count_is_the_peak_of_the_allocator(name: str, options: dict[str, Any]) -> None:
    sizes = BatchSizes(images=1, height=16, width=16)
    found = measured_steps(NARROW[name], options, sizes, CPU)
    counted = counting_of(name).need(run_of(options), sizes)
    assert counted == pytest.approx(found["peak"], rel=WITHIN)


@pytest.mark.parametrize("options", [{}, {"recompute": 1.0}], ids=label)
def test_gradients_of_earlier_micro_batches_are_counted(options: dict[str, Any]) -> None:
    sizes, config = BatchSizes(images=1, height=16, width=16), NARROW["pixart"]
    found = {number: measured_steps(config, {**options, "accumulation": number}, sizes, CPU)["peak"] for number in (1, 2)}
    counting = counting_of("pixart")
    needs = {number: counting.need(run_of({**options, "accumulation": number}), sizes) for number in (1, 2)}
    assert needs == pytest.approx(found, rel=WITHIN)
    assert needs[2] - needs[1] == pytest.approx(found[2] - found[1], rel=WITHIN)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"recompute": 1.0}, {"lora_rank": 8}], ids=label)
@pytest.mark.parametrize("sharding", ["ddp", "fsdp"])
@pytest.mark.parametrize("name", ["dit", "sd", "flux"])
def test_the_count_is_the_peak_of_each_of_two_ranks(name: str, sharding: str, options: dict[str, Any], tmp_path: Path) -> None:
    """Of blocks of one kind, of a UNet's, of two kinds in turn; one rank has tried the others' activations."""
    given, sizes = {**options, "sharding": sharding}, BatchSizes(images=1, height=16, width=16)
    counted = counting_of(name).need(run_of(given), sizes, ranks=2)

    def body(ranks: TrainRanks) -> None:
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")  # Flux's; nothing writes to it
        found = measured_on_ranks(NARROW[name], given, sizes, ranks)
        for _ in range(4):  # on a busy machine, gloo's threads let go of tensors late: they only ever add
            if counted < (1 - WITHIN) * found:
                found = min(found, measured_on_ranks(NARROW[name], given, sizes, ranks))
        assert counted == pytest.approx(found, rel=WITHIN)

    fork_ranks(tmp_path, body)


def test_what_saves_memory_is_tried_in_order_of_cost() -> None:
    assert names(run_of({})) == (*WHOLE, *MOMENTS)
    assert names(run_of({"lora_rank": 8})) == ADAPTERS


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
def test_a_given_option_wins(given: dict[str, Any], left: tuple[str, ...]) -> None:
    asked = run_of(given)
    assert names(asked) == left
    assert {name: getattr(decided(asked), name) for name in given} == {
        **given,
        **({"base": None} if given.get("base") == "off" else {}),
    }


def test_several_ranks_choose_only_what_can_be_sharded() -> None:
    assert names(run_of({"sharding": "fsdp"}), ranks=8) == WHOLE
    assert names(run_of({"sharding": "fsdp", "lora_rank": 8}), ranks=8) == WHOLE[:4]


@pytest.mark.slow
@pytest.mark.parametrize("given", [{}, {"lora_rank": 8}], ids=label)
def test_the_first_that_fits_is_chosen(given: dict[str, Any], counting: CountedModel) -> None:
    asked = run_of(given)
    options: dict[str, Any] = {}
    needs = [counting.need(decided(asked), SIZES)]
    for saving in savings_of(asked):
        options |= saving.options
        needs.append(counting.need(dataclasses.replace(decided(asked), **options), SIZES))
    for number, need in enumerate(needs):
        found = choose(asked, counting, SIZES, room_for(need))
        assert found.fits
        assert (found.plain, found.need) == (needs[0], needs[len(found.savings)])
        assert found.need <= need
        assert len(found.savings) <= number
        if found.savings:
            assert re.search(rf"with .*{label(found.savings[-1].options).strip('`')}: ", str(found))
    if not given:  # a block that adapters recompute can need more than it kept
        assert needs[:5] == sorted(needs[:5], reverse=True)
        assert [len(choose(asked, counting, SIZES, room_for(need)).savings) for need in needs[:5]] == [0, 1, 2, 3, 4]
    assert not choose(asked, counting, SIZES, min(needs) // 2).fits


def test_blocks_that_are_compiled_are_left_as_they_are_where_they_may_fit(counting: CountedModel) -> None:
    asked = run_of({})
    need = counting.need(decided(asked), SIZES)
    assert choose(asked, counting, SIZES, need, compiled=True).savings == ()
    assert choose(asked, counting, SIZES, need).savings != ()


def refused(asked: TrainConfig, counting: CountedModel, sizes: BatchSizes, memory: int) -> tuple[str, Choice]:
    choice = choose(asked, counting, sizes, memory)
    assert not choice.fits
    return refusal(asked, counting, sizes, memory, choice), choice


@pytest.mark.slow
def test_a_refusal_has_the_largest_batch_that_fits(counting: CountedModel) -> None:
    asked = run_of({"memory": "1GiB", "optimizer": "adamw"})
    least = dataclasses.replace(decided(asked), recompute=1.0, ema=Ema(decay=0.9999, place=EmaPlace.CPU, every=10))
    needs = {images: counting.need(least, dataclasses.replace(SIZES, images=images)) for images in (63, 64, 1024)}
    assert needs[64] > needs[63]
    said, _ = refused(asked, counting, dataclasses.replace(SIZES, images=1024), room_for(needs[63]))
    assert re.search(
        r"^--memory is 1GiB, and the run needs [\d.]+ MiB for a batch of 1024 with latents of 16 by 16, with --recompute 1 "
        r"--ema 0.9999:cpu:10; 5% of the memory stay free; what fits: --batch 63 or --memory [\d.]+GiB$",
        said,
    )
    gigabytes = float(re.findall(r"([\d.]+)GiB$", said)[0])
    assert choose(asked, counting, dataclasses.replace(SIZES, images=1024), int(gigabytes * (1 << 30))).fits


@pytest.mark.slow
def test_a_refusal_of_one_image_has_adapters_if_they_fit(counting: CountedModel) -> None:
    one = dataclasses.replace(SIZES, images=1)
    adapters = run_of({"lora_rank": 16})
    memory = room_for(counting.need(decided(adapters), one))
    said, _ = refused(run_of({"memory": "1MiB"}), counting, one, memory)
    assert "what fits: --lora-rank 16 or --memory" in said
    said, _ = refused(run_of({"memory": "1MiB"}), counting, one, memory // 50)
    assert "what fits: --memory" in said


def test_nothing_is_counted_on_a_cpu_without_a_memory(folder: Path) -> None:
    found = [memory_to_fit(config(folder, memory=given), None, CPU) for given in (None, "off", "3GiB")]
    assert found == [None, None, 3 << 30]
    with pytest.raises(UsageError, match="--memory is 'much', expected off, or a number of bytes above 0"):
        config(folder, memory="much")


def test_a_run_says_what_it_chose_and_a_resumed_one_keeps_it(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = config(folder, max_steps=1, memory="1MiB", lora_rank=2)
    with pytest.raises(
        UsageError, match=r"--memory is 99KiB, and the run needs .* for a batch of 2 with latents of .*, with --rec"
    ):
        train(dataclasses.replace(asked, memory=MemoryLimit(num_bytes=99 << 10)), ALONE)
    assert not (folder / "run" / "checkpoints").exists()
    train(asked, ALONE)
    said = re.sub(r"\s+", " ", capsys.readouterr().err)
    assert re.search(r"memory: .* are needed, and .* with --recompute [\d.]+: up to \d+% more time, and the same losses", said)
    chosen = recompute_of(folder)
    assert chosen > 0
    train(dataclasses.replace(asked, max_steps=2, resume=True), ALONE)
    assert recompute_of(folder) == chosen
    assert "memory: " not in capsys.readouterr().err  # it was counted in the first part
    train(dataclasses.replace(asked, memory=None, recompute=0.0, max_steps=3, resume=True), ALONE)
    assert recompute_of(folder) == 0


@pytest.mark.slow
def test_a_run_that_may_fit_since_it_is_compiled_is_not_refused(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    asked = config(folder, memory="1MiB", lora_rank=2, compile=Compile.ON)
    counting = CountedModel(read_model_config(asked.model)[1])
    said: list[str] = []
    with Loader(folder / "tiny.store", LoaderConfig(batch_size=2), rank=0, world_size=1, device=CPU) as loader:
        every = choose(asked, counting, largest_batch(loader), 1)
        held = counting.held(dataclasses.replace(decided(asked), **every.options)).total
        memory = room_for(int(held + (LEAST_COMPILED + 0.25) * (every.need - held)))
        found = fitted(asked, ALONE, loader, memory, said.append)
        with pytest.raises(UsageError, match=r"--memory is 1MiB, and the run needs"):
            fitted(dataclasses.replace(asked, compile=Compile.OFF), ALONE, loader, memory, said.append)
        with pytest.raises(UsageError, match=r"--memory is 1MiB, and the run needs"):
            fitted(asked, ALONE, loader, held, said.append)
    assert {name: getattr(found, name) for name in every.options} == every.options
    assert "compiled blocks take less, so it may fit all the same" in caplog.text
    assert re.fullmatch(r"memory: .* are needed, and .*; counted uncompiled: compiled blocks take less", said[0])


def recompute_of(folder: Path) -> float:
    """Return the share that a run has recorded."""
    recorded = checkpoint.read_state(checkpoint.last_whole(folder / "run")).config["recompute"]
    assert isinstance(recorded, float)
    return recorded


@pytest.mark.slow
def test_the_command_prints_what_a_memory_chooses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tmp_path / "model" / "transformer"
    model.mkdir(parents=True)
    (model / "config.json").write_text(json.dumps(NARROW["dit"]), encoding="utf-8")
    assert TrainMemory(models=(tmp_path / "model",), lora_rank=4, memory=ByteSize(num_bytes=80 << 20), images=16).run() == 0
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in capsys.readouterr().out.splitlines()]
    assert rows[0][0] == "GB, of 80MiB, for a batch of 16"
    assert [row[0] for row in rows[2:]] == ["all weights", "chosen", "then", "`--lora-rank 4`", "chosen", "then"]
    assert rows[3][1].startswith("`--recompute")
    assert float(rows[2][1]) > float(rows[4][1]) < 80 * 2**20 / 1e9
