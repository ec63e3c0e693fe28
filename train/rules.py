"""What a run is refused for before anything is written: the place of its folder, and what does not suit its stores or model.

What options alone rule out, `TrainConfig` refuses; what a model or a plan rules out by itself, those who read it.
"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open

from bucketline.errors import ModelError, UsageError
from bucketline.files.paths import is_run, overlap
from bucketline.loader.config import LoaderConfig
from bucketline.loader.mixture import parse_stores
from bucketline.option_value import OnResume, as_option, options_on_resume
from bucketline.store.format.block import FLIPPED
from bucketline.train.checkpoint import checkpoint_folders
from bucketline.train.config import Objective
from bucketline.train.log import has_steps
from bucketline.train.model import checked, facts_of, open_model_config, refuse_other_encoders, schedule_of, store_channels
from bucketline.train.run_file import config_as_json

if TYPE_CHECKING:
    from collections.abc import Sequence

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
    if checkpoint_folders(output) or has_steps(output):
        first = "continue it with --resume, or " if checkpoint_folders(output) else ""
        raise UsageError(f"{output} already has a run; {first}choose another --output-dir")


def refuse_run(config: TrainConfig, start: Start, stores: Sequence[Store]) -> None:
    """Refuse a run whose options, start, stores and model do not suit each other; the stores are open."""
    _refuse_changes(config, start)
    refuse_ignored(stores)
    _refuse_flips(config, stores)
    if config.lora_from is not None and start.state is None:
        try:
            with safe_open(config.lora_from, "pt"):
                pass
        except (OSError, SafetensorError) as error:
            raise ModelError(
                f"--lora-from {config.lora_from} cannot be read as a .safetensors file of adapters: {error}"
            ) from error
    _refuse_model(config, stores[0])


def _refuse_changes(config: TrainConfig, start: Start) -> None:
    """Refuse another value of an option that may not change. A new plan may have another seed, or flips."""
    if start.state is None:
        return
    present, defaults = config_as_json(config), {one.name: one.default for one in fields(config)}
    for name in options_on_resume(type(config), OnResume.FIXED):
        before = start.state.config.get(name, defaults[name])
        is_open = name == "optimizer" and config.optimizer is None  # the checkpoint's is taken
        if is_open or before == present[name] or (config.new_plan and name in LoaderConfig.__dataclass_fields__):
            continue
        option = as_option(name)
        is_given = before is not None and before is not False
        remedy = f"use {option} {before}".removesuffix(" True") if is_given else f"leave out {option}"
        raise UsageError(
            f"{option} is {present[name]}, and {start.checkpoint} was trained with {before}; {remedy}, or start a new run in "
            "another --output-dir"
        )


def refuse_ignored(stores: Sequence[Store]) -> None:
    """Refuse what this trainer would ignore of a store, and train on something else; also of a later generation."""
    for store in stores:
        store_channels(store)
        vae: Any = store.manifest.encoders.get("vae")
        found = ""
        if len(store.text.delivered.tokens) != 1:
            found = f"text.tokens {', '.join(store.manifest.text.tokens)}, expected one column"
        elif (shift := vae.get("shift_factor")) and vae.get("latents_mean"):
            found = f"encoders.vae.shift_factor {shift}, expected none in addition to latents_mean"
        if found:
            raise ModelError(f"{store.place}: its manifest has {found}; pack the source again without it")


def _refuse_flips(config: TrainConfig, stores: Sequence[Store]) -> None:
    for store in stores if config.flip else ():
        for bucket in store.buckets("train"):
            if FLIPPED not in {column.name for column in bucket.columns}:
                raise UsageError(
                    f"--flip is {config.flip}, and {store.place} has no {FLIPPED} in {bucket.name}; expected 0, or a store "
                    "that was packed with --flip"
                )


def _refuse_model(config: TrainConfig, store: Store) -> None:
    """Refuse a model of another kind than the store's, and options that are not for it; its buckets are checked later."""
    model = open_model_config(config.model, config.model_config)
    family = checked(model, facts_of(store, ()))
    guidance = config.image_guidance
    if guidance is not None and guidance > family.no_guidance and not family.is_guidable:
        raise UsageError(
            f"image_guidance is {guidance}, and {family.pipelines[0]} guides by a second model, which is not trained; leave it "
            "out: images are drawn without guidance"
        )
    objective = schedule_of(config, model, family, torch.device("cpu")).objective
    name, is_flow = config.loss_weight.name, objective is Objective.FLOW
    if name != "none" and is_flow is (name == "min-snr"):
        others = "cosmap, sigma-sqrt or sigma-squared" if is_flow else "min-snr:GAMMA"
        raise UsageError(f"--loss-weight is {config.loss_weight}, and the objective is {objective}; use {others}")
    if is_flow and config.noise_offset:
        raise UsageError(
            f"--noise-offset is {config.noise_offset}, and the objective is a flow, which ends in plain noise: leave it out"
        )
    refuse_other_encoders(model, store.manifest.encoders)  # last, since it reads the VAE
