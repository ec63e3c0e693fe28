"""Training steps against diffusers' scripts: loss and gradient norm, of every family, in full and by adapters, by option.

`pytest -m "" tests/unit/families/test_training_scripts.py` prints the largest differences, relative to the scripts' values.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model

from bucketline.train.config import Objective
from bucketline.train.step import train_step
from tests.family_models import FORMS
from tests.unit.families.conftest import QUICK
from tests.unit.families.forms import Packed
from tests.unit.families.test_whole_pipelines import trainer_of
from tests.unit.families.training_scripts import Script
from tests.unit.train.packed_families import Packed as PackedFamily
from tests.unit.train.packed_families import pack_family

Worst = dict[str, tuple[float, str]]

MOST = {
    "loss": 8e-6,
    "gradient norm": 1e-6,  # 6.1e-7 seen on one kind of processor, less on others
    "gradient norm with a shift by size": 1e-5,  # by an equal formula: a sinusoid of 1000 sigma magnifies sigma's last bit
    "second gradient norm": 1e-5,  # AdamW's first step is as long for the smallest gradient as for the largest
}
PRIOR = 0.25  # weight of a prior's loss
SPREAD = {"timesteps": "logit-normal:0.5,1.5"}
OF_NOISE: dict[str, dict[str, Any]] = {
    "min-snr": {"loss_weight": "min-snr:5"},
    "v-prediction": {"objective": Objective.V_PREDICTION},
    "v-prediction min-snr": {"objective": Objective.V_PREDICTION, "loss_weight": "min-snr:5"},
    "flow": {"objective": Objective.FLOW, "shift": 3.0},
    "logit-normal": SPREAD,
    "noise offset": {"noise_offset": 0.1},
    "betas": {"betas": "0.8,0.95,1e-6"},
    "accumulation": {"accumulation": 2},
    "prior": {"prior": PRIOR},
}
OF_FLOW: dict[str, dict[str, Any]] = {
    "logit-normal": SPREAD,
    "mode": {"timesteps": "mode"},
    "sigma-sqrt": {"loss_weight": "sigma-sqrt"},
    "cosmap": {"loss_weight": "cosmap", **SPREAD},
    "shift": {"shift": 1.7},
    "guidance": {"guidance": 3.5},
    "recomputed": {"recompute": 1.0},
    "prior": {"prior": PRIOR, "loss_weight": "sigma-sqrt"},
}
OPTIONS: dict[str, dict[str, dict[str, Any]]] = {
    **{form: {"": {}} for form in FORMS},
    **{form: {"": {}, **OF_NOISE} for form in ("sd", "sdxl")},
    **{form: {"": {}, **OF_FLOW} for form in ("sd3", "flux")},
}
MODES: dict[str, dict[str, Any]] = {"full": {}, "LoRA": {"lora_rank": 2, "lora_alpha": 6.0}}
CASES = [
    pytest.param(
        form,
        {**options, **MODES[mode]},
        id=" ".join(filter(None, (form, name, mode))),
        marks=() if mode == "full" and form in QUICK else pytest.mark.slow,
    )
    for form, every in OPTIONS.items()
    for name, options in every.items()
    # each kind of objective has its options on two families: of one all weights are trained, of the other adapters
    for mode in (MODES if not name else ("full",) if form in ("sd", "sd3") else ("LoRA",))
]


@pytest.fixture(scope="module")
def worst(pytestconfig: pytest.Config) -> Iterator[Worst]:
    """The largest differences so far, by what differs, and in which test they were; printed at the end."""
    found: Worst = {}
    yield found
    if (printer := pytestconfig.pluginmanager.get_plugin("terminalreporter")) is not None:
        for what, (difference, item) in sorted(found.items()):
            printer.write_line(f"\n{what}: at most {difference:.1e} from diffusers' script, {item}")


@pytest.mark.parametrize(("form", "options"), CASES, indirect=["form"], scope="session")  # a form's pipeline is packed once
def test_two_steps_are_those_of_diffusers_script(
    packed: Packed, options: dict[str, Any], tmp_path: Path, worst: Worst, request: pytest.FixtureRequest
) -> None:
    assert_same_steps(packed, tmp_path, options, request.node.name, worst)


@pytest.mark.parametrize("mode", MODES)
def test_two_steps_of_a_dit_are_those_of_such_a_script(mode: str, tmp_path: Path, worst: Worst) -> None:
    assert_same_steps(pack_family(tmp_path, "dit"), tmp_path / "run", MODES[mode], f"dit {mode}", worst)


def assert_same_steps(packed: Packed | PackedFamily, output: Path, options: dict[str, Any], item: str, worst: Worst) -> None:
    """Take two steps of the trainer, and of a script with torch's optimizer."""
    options, prior = dict(options), options.get("prior")
    options.pop("prior", None)
    with trainer_of(packed, output, clip_norm=0.5, learning_rate=1e-3, **options) as trainer:
        config, training = trainer.config, trainer.training
        script = Script(folder=packed.model, kind=training.family, asked=config)
        own = {name: one for name, one in training.model.named_parameters() if one.requires_grad}
        if config.lora_rank is not None:
            adapters = LoraConfig(r=2, lora_alpha=6.0, target_modules=list(training.family.lora_targets))
            inject_adapter_in_model(adapters, script.model.requires_grad_(requires_grad=False))
            with torch.no_grad():  # begin with the same adapters
                for name, one in own.items():
                    script.model.get_parameter(name).copy_(one)
        trained = [one for one in script.model.parameters() if one.requires_grad]
        assert len(trained) == len(own)
        if prior is not None:  # of a half of each batch
            training = replace(training, mean_weight=(1 + prior) / 2)
        asked = config.betas
        optimizer = torch.optim.AdamW(trained, lr=1e-3, weight_decay=0.01, betas=(asked.beta1, asked.beta2), eps=asked.eps)
        batches = trainer.loader.forever()
        for step in range(2):
            taken = [next(batches) for _ in range(config.accumulation)]
            if prior is not None:
                taken = [replace(one, weight=torch.tensor([1.0, prior])) for one in taken]
            wanted = script.step(taken, prior)
            optimizer.step()
            optimizer.zero_grad()
            found = train_step(training, iter(taken), step)
            assert min(wanted) > 0
            of_norm = "second gradient norm" if step else "gradient norm" + " with a shift by size" * script.shifts_by_size
            for what, ours, theirs in zip(("loss", of_norm), (found.loss, found.grad_norm), wanted, strict=True):
                # a script adds the losses of a prior and of its own images, the trainer takes their mean
                difference = abs(float(ours) * (1 + (prior or 0)) / theirs - 1)
                worst[what] = max(worst.get(what, (0.0, "")), (difference, item))
                assert difference <= MOST[what], what
