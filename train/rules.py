"""What a run is refused for before anything is written: the place of its folder, and `RULES`, which are looked at in order.

What options alone rule out, `TrainConfig` refuses; what a model or a plan rules out by itself, those who read it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open

from bucketline.errors import ModelError, UsageError
from bucketline.files.paths import overlap
from bucketline.files.run_marker import CHECKPOINTS, is_run
from bucketline.loader.config import LoaderConfig
from bucketline.loader.mixture import parse_stores
from bucketline.option_types import OnResume, options_on_resume
from bucketline.option_value import as_option
from bucketline.store.format.columns import FLIPPED
from bucketline.train.config import Objective
from bucketline.train.load import checked, facts_of, locate, refuse_other_encoders, schedule_of, store_channels
from bucketline.train.log import has_steps
from bucketline.train.run_file import config_as_json
from bucketline.train.values import Weighting

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bucketline.families.family import Family
    from bucketline.store import Store
    from bucketline.train.checkpoint import Start
    from bucketline.train.config import TrainConfig

BESIDE_A_RUN = (".log", ".out", ".err", ".tmp")
"""Suffixes allowed in a folder before its run starts: logs of a shell or scheduler, temporary files that a full disk left."""


def refuse_place(config: TrainConfig) -> None:
    """Refuse a new run's folder that is a store's, or that has files which are not a run's."""
    output = config.output_dir
    for path in [one.path for one in parse_stores(config.store, "--store") if isinstance(one.path, Path)]:
        if overlap(output, path):
            raise UsageError(f"--output-dir {output} and the store {path} overlap; choose a separate folder for the run")
    if output.is_dir() and not is_run(output):
        names = sorted(p.name for p in output.iterdir() if not p.name.startswith(".") and p.suffix not in BESIDE_A_RUN)
        if names:
            raise UsageError(
                f"--output-dir {output} is not empty (it has {names[0]!r}) and not a run of this trainer; choose a path that "
                "does not exist"
            )


def refuse_former_run(output: Path) -> None:
    """Refuse a new run's folder that has a run with steps; of one without, validations and images are replaced."""
    if any((output / CHECKPOINTS).glob("step-*")) or has_steps(output):
        raise UsageError(f"{output} already has a run; continue it with --resume, or choose another --output-dir")


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What is known of a run before its first step."""

    config: TrainConfig
    start: Start
    stores: Sequence[Store]  # open, at the generations that are read

    @cached_property
    def family(self) -> Family:
        """The model's family, by its configuration, which is checked against the first store; its buckets are checked later."""
        folder, file = locate(self.config.model, self.config.model_config)
        _, _, family = checked(folder, facts_of(self.stores[0], ()), file)
        refuse_other_encoders(folder, self.stores[0].manifest.encoders, reads=False)
        return family

    @cached_property
    def objective(self) -> Objective:
        folder, _ = locate(self.config.model, self.config.model_config)
        return schedule_of(self.config, folder, self.family, torch.device("cpu")).objective


def _past(facts: Facts) -> None:
    steps, start = facts.config.max_steps, facts.start
    if steps is not None and start.steps_done > steps:
        raise UsageError(
            f"--max-steps is {steps}, and {start.checkpoint} is already at step {start.steps_done}; use that many or more"
        )


def _changed(facts: Facts) -> None:
    """Refuse another value of an option that may not change. A new plan may have another seed, or flips."""
    config, state = facts.config, facts.start.state
    if state is None:
        return
    present, defaults = config_as_json(config), {one.name: one.default for one in fields(config)}
    for name in options_on_resume(type(config), OnResume.FIXED):
        before = state.config.get(name, defaults[name])
        is_open = name == "optimizer" and config.optimizer is None  # the checkpoint's is taken
        if is_open or before == present[name] or (config.new_plan and name in LoaderConfig.__dataclass_fields__):
            continue
        option = as_option(name)
        is_given = before is not None and before is not False
        remedy = f"use {option} {before}".removesuffix(" True") if is_given else f"leave out {option}"
        raise UsageError(
            f"{option} is {present[name]}, and {facts.start.checkpoint} was trained with {before}; {remedy}, or start a new "
            "run in another --output-dir"
        )


def _ignored(facts: Facts) -> None:
    """Refuse what this trainer would ignore of a store, and train on something else."""
    for store in facts.stores:
        store_channels(store)
        vae: Any = store.manifest.encoders.get("vae")
        found = ""
        if len(store.text.delivered.tokens) != 1:
            found = f"text.tokens {', '.join(store.manifest.text.tokens)}, expected one column"
        elif (shift := vae.get("shift_factor")) and vae.get("latents_mean"):
            found = f"encoders.vae.shift_factor {shift}, expected none in addition to latents_mean"
        if found:
            raise ModelError(f"{store.place}: its manifest has {found}; pack the source again without it")


def _no_flips(facts: Facts) -> None:
    for store in facts.stores if facts.config.flip else ():
        for bucket in store.buckets("train"):
            if FLIPPED not in {column.name for column in bucket.columns}:
                raise UsageError(
                    f"--flip is {facts.config.flip}, and {store.place} has no {FLIPPED} in {bucket.name}; expected 0, or a "
                    "store that was packed with --flip"
                )


def _no_adapters(facts: Facts) -> None:
    if (path := facts.config.lora_from) is not None and facts.start.state is None:
        try:
            with safe_open(path, "pt"):
                pass
        except (OSError, SafetensorError) as error:
            raise ModelError(f"--lora-from {path} cannot be read as a .safetensors file of adapters: {error}") from error


def _unguidable(facts: Facts) -> None:
    guidance, family = facts.config.image_guidance, facts.family
    if guidance is not None and guidance > family.no_guidance and not family.is_guidable:
        raise UsageError(
            f"image_guidance is {guidance}, and {family.pipelines[0]} guides by a second model, which is not trained; leave it "
            "out: images are drawn without guidance"
        )


def _other_objective(facts: Facts) -> None:
    """Refuse a weighting or an offset of noise that is not of the model's objective."""
    config, is_flow = facts.config, facts.objective is Objective.FLOW
    name = config.loss_weight.name
    if name is not Weighting.NONE and is_flow is (name is Weighting.MIN_SNR):
        others = "cosmap, sigma-sqrt or sigma-squared" if is_flow else "min-snr:GAMMA"
        raise UsageError(f"--loss-weight is {config.loss_weight}, and the objective is {facts.objective}; use {others}")
    if is_flow and config.noise_offset:
        raise UsageError(
            f"--noise-offset is {config.noise_offset}, and the objective is a flow, which ends in plain noise: leave it out"
        )


Rule = Callable[[Facts], None]
RULES: tuple[Rule, ...] = (_past, _changed, _ignored, _no_flips, _no_adapters, _unguidable, _other_objective)
"""Rules of a run whose stores are open; each raises what it refuses."""
RULES_OF_A_GENERATION: tuple[Rule, ...] = (_ignored,)
"""Those of them by which a later generation of the stores is looked at while the run continues."""
