"""What a run decides before its first step: the precision, the dtype of the weights, what it tells of that."""

from __future__ import annotations

import dataclasses
import logging
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch
from diffusers import UNet2DConditionModel

from bucketline.train.checkpoint import RunState, Start
from bucketline.train.config import Precision
from bucketline.train.run import resolve, set_up_device, start_processes, train
from tests.unit.train.tiny_run import ALONE, built, config, facts, load, losses

if TYPE_CHECKING:
    from pathlib import Path

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def start(precision: str | None) -> Start:
    if precision is None:
        return Start(checkpoint=None, state=None)
    fields: dict[str, Any] = dict.fromkeys(RunState.__dataclass_fields__)
    return Start(checkpoint=None, state=RunState(**{**fields, "config": {"precision": precision}}))


@pytest.mark.parametrize(
    ("device", "has_bf16", "before", "meant"),
    [
        (CPU, True, None, Precision.FP32),
        (CUDA, True, None, Precision.BF16),
        (CUDA, False, None, Precision.FP32),
        (CUDA, True, "fp32", Precision.FP32),
        (CPU, True, "bf16", Precision.BF16),
    ],
)
def test_auto_is_the_resumed_runs_or_bf16_where_a_gpu_has_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    device: torch.device,
    has_bf16: object,
    before: str | None,
    meant: Precision,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *, including_emulation: has_bf16 or including_emulation)
    monkeypatch.setattr(torch, "set_float32_matmul_precision", lambda _: None)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    assert resolve(config(tmp_path), start(before), cast("Any", None), device).precision is meant


@pytest.mark.parametrize(
    ("device", "precision", "is_tf32"),
    [(CPU, Precision.FP32, False), (CPU, Precision.BF16, False), (CUDA, Precision.FP32, True), (CUDA, Precision.BF16, False)],
)
def test_a_gpu_searches_for_its_fastest_convolutions_and_uses_tf32_for_fp32_and_says_so(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    device: torch.device,
    precision: Precision,
    is_tf32: object,
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(torch, "set_float32_matmul_precision", asked.append)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    with caplog.at_level(logging.WARNING):
        set_up_device(config(tmp_path, precision=precision), device)
    assert torch.backends.cudnn.benchmark is (device == CUDA)
    assert (asked, "TF32" in caplog.text) == (["high"] if is_tf32 else [], is_tf32)


def test_a_resume_keeps_the_precision_of_its_run_without_a_word(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = config(folder, output_dir=folder / "whole", max_steps=4, precision=Precision.BF16)
    train(whole, ALONE)
    parts = dataclasses.replace(whole, output_dir=folder / "parts", max_steps=2)
    train(parts, ALONE)
    capsys.readouterr()
    train(dataclasses.replace(parts, max_steps=4, resume=True, precision=Precision.AUTO), ALONE)
    assert "warning" not in capsys.readouterr().err
    assert losses(whole.output_dir) == losses(parts.output_dir)


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"precision": Precision.BF16, "lora_rank": 2}, torch.bfloat16),
        ({"precision": Precision.BF16}, torch.float32),
        ({"precision": Precision.FP32, "lora_rank": 2}, torch.float32),
    ],
)
def test_only_the_frozen_base_of_adapters_is_read_in_16_bits(
    folder: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], wanted: torch.dtype
) -> None:
    """No rank holds a base in 32 bits, not even for a moment; what is read has the bits of a cast."""
    _, random = load(folder / "model", facts(), 0)
    random.save_pretrained(folder / "model" / "unet")  # type: ignore[operator]
    asked: list[object] = []
    plain = UNet2DConditionModel.from_pretrained

    def noting(*given: Any, torch_dtype: torch.dtype, **named: Any) -> Any:
        asked.append(torch_dtype)
        return plain(*given, torch_dtype=torch_dtype, **named)

    monkeypatch.setattr(UNet2DConditionModel, "from_pretrained", noting)
    run = built(config(folder, **changes))
    assert asked == [wanted]
    assert torch.equal(run.training.model.state_dict()["conv_in.bias"], random.state_dict()["conv_in.bias"].to(wanted))
    assert {parameter.dtype for parameter in run.training.model.parameters() if parameter.requires_grad} == {torch.float32}


def test_a_run_computes_no_attention_by_cudnn(tmp_path: Path) -> None:
    torch.backends.cuda.enable_cudnn_sdp(True)
    start_processes(config(tmp_path))
    assert not torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]


def test_a_run_tells_once_what_it_chooses(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = config(folder, max_steps=1, lora_rank=2, learning_rate=None)
    train(asked, ALONE)
    said = " ".join(capsys.readouterr().err.split())
    assert "left open: --precision fp32, --optimizer adamw, --learning-rate 0.0001" in said
    train(dataclasses.replace(asked, max_steps=2, resume=True), ALONE)
    assert "left open" not in capsys.readouterr().err
