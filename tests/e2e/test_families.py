"""Each family through the real commands: packed, trained, an adapter of it trained, and read again by diffusers or peft."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest
import torch
from peft import PeftModel

from bucketline.families.registry import family_of_pipeline
from bucketline.train import main as trainer
from tests.commands import call
from tests.family_models import FORMS, Form, open_pipeline, write_pipeline
from tests.models import png
from tests.unit.families.oracle import one_step

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow
TEXTS = ("a red cat", "a blue dog of the house", "", "the green house")


def train(store: Path, model: Path, output: Path, *more: object) -> Path:
    """Train for three steps and return the checkpoint's folder."""
    asked: dict[str, object] = {"--store": store, "--model": model, "--output-dir": output, "--batch": 2, "--max-steps": 3}
    few = output.with_name(f"{output.name}.toml")
    few.write_text("image_steps = 2\n", encoding="utf-8")
    asked |= {"--warmup-steps": 0, "--learning-rate": 1e-2, "--ema": "off", "--num-images": 1}
    given = [str(few), *(str(part) for pair in asked.items() for part in pair)]
    trainer.main([*given, "--caption-dropout", "0.5", *map(str, more)])
    (found,) = output.glob("checkpoints/*3")
    return found


@pytest.mark.parametrize("name", FORMS)
def test_a_family_is_packed_and_trained_and_so_are_adapters(name: str, tmp_path: Path) -> None:
    form = FORMS[name]
    height, width = form.size
    images, store, model = tmp_path / "images", tmp_path / "store", tmp_path / re.sub(r"\W", "-", name)
    images.mkdir()
    for n in range(8):
        (images / f"{n}.png").write_bytes(png(height, width, seed=n))
        (images / f"{n}.txt").write_text(TEXTS[n % 4], encoding="utf-8")
    write_pipeline(model, name)
    call("ingest", "scan", images, "--model", model, "--grid", f"{height}x{width}", "--min-size-px", 8, "--json").done()
    packed = call(
        "ingest", "pack", images, store, "--model", model, "--grid", f"{height}x{width}", "--min-size-px", 8, "--json"
    ).done()
    assert packed.json["packed"] == 8

    whole = train(store, model, tmp_path / "whole")
    pipeline = open_pipeline(model, name)
    part = "unet" if hasattr(pipeline, "unet") else "transformer"
    before = getattr(pipeline, part)
    after = type(before).from_pretrained(whole / part)
    assert before.state_dict().keys() == after.state_dict().keys()
    assert any(not torch.equal(one, two) for one, two in zip(before.parameters(), after.parameters(), strict=True))

    adapters = train(store, model, tmp_path / "adapters", "--lora-rank", 2, "--recompute", 1) / "lora"
    plain = _prediction(pipeline, form)
    family = family_of_pipeline(form.pipeline)
    assert family is not None
    if family.has_lora_loader:
        pipeline.load_lora_weights(str(adapters))
    else:
        setattr(pipeline, part, PeftModel.from_pretrained(before, str(adapters)).base_model.model)
    assert not torch.allclose(_prediction(pipeline, form), plain)


@torch.no_grad()
def _prediction(pipeline: Any, form: Form) -> torch.Tensor:
    height, width = form.size
    recorded = one_step(pipeline, ["a red cat"], height=height, width=width, **form.call)
    found: torch.Tensor = recorded.prediction
    return found
