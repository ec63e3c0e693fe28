"""The data of a run: its stores and loaders; and what is refused before anything is written, since it suits no run.

What options alone rule out, `TrainConfig` refuses; what a model or a plan rules out by itself, those who read it.
"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open

from bucketline.errors import ModelError, StateError, StoreError, UsageError
from bucketline.files.paths import is_run, overlap
from bucketline.loader import Loader, Remainder, TextForm, WeightedStore
from bucketline.loader.config import LoaderConfig
from bucketline.loader.iteration import parse_state
from bucketline.loader.mixture import open_weighted, parse_stores
from bucketline.loader.ranks import fail_together
from bucketline.option_value import OnResume, as_option, options_on_resume
from bucketline.store import Store
from bucketline.store.format.block import MASK, is_reference
from bucketline.train.checkpoint import checkpoint_folders
from bucketline.train.config import PLAIN_MASKS, Objective
from bucketline.train.log import has_steps
from bucketline.train.model import checked, facts_of, open_model_config, refuse_other_encoders, schedule_of, store_channels
from bucketline.train.run_file import config_as_json
from bucketline.train.step import store_weights

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bucketline.train.checkpoint import Start
    from bucketline.train.config import TrainConfig
    from bucketline.train.parallel import TrainRanks


def open_stores(config: TrainConfig, ranks: TrainRanks, start: Start) -> tuple[WeightedStore, ...]:
    """Open each store once: at its newest generation, or if the checkpoint's plan continues, at that one's.

    Rank 0 opens them first, and alone says what is wrong; the loader of several ranks reads the generations that rank 0 has.
    """
    asked = parse_stores(config.store, "--store")
    planned = () if start.state is None or config.new_plan else parse_state(start.state.loader).stores
    numbers: list[int | None] = [None] * len(asked)
    if len(planned) == len(asked):  # else the loader's state refuses the number of stores
        numbers = [one.generation for one in planned]

    def opened() -> tuple[WeightedStore, ...]:
        pairs, remote = zip(asked, numbers, strict=True), config.remote()
        try:
            return open_weighted([WeightedStore(Store.open(a.path, n, remote=remote), repeats=a.repeats) for a, n in pairs])
        except StoreError as error:
            if not planned:
                raise
            raise StateError(
                f"{start.checkpoint}: {error}; if the generation of its plan was garbage-collected, continue with --resume "
                "--new-plan, which keeps weights, averages and optimizer"
            ) from error

    with fail_together():
        stores = opened() if ranks.is_main else ()
    with fail_together():
        return stores or opened()


def open_loader(config: TrainConfig, ranks: TrainRanks, stores: Sequence[WeightedStore], device: torch.device) -> Loader:
    """Open the training loader, which never ends; the noising step dequantises quantised tokens."""
    asked = config.for_loader(epochs=None, text=TextForm.STORED, row_weights=store_weights(config))
    return Loader(
        stores,
        asked,
        rank=ranks.rank,
        world_size=ranks.world_size,
        device=device,
        service=config.service_address(),
        follow=config.follow,
    )


def open_val_loader(config: TrainConfig, ranks: TrainRanks, stores: Sequence[WeightedStore], device: torch.device) -> Loader:
    """Open a loader of each held-out sample once; it accumulates like training, for the same captions on any ranks."""
    asked = config.for_loader(
        split="val", remainder=Remainder.PARTIAL, epochs=1, caption_dropout=0.0, flip=0.0, text=TextForm.STORED
    )
    each = [weighted.store for weighted in stores]
    return Loader(each, asked, rank=ranks.rank, world_size=ranks.world_size, device=device)


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
    if config.lora_from is not None and start.state is None:
        try:
            with safe_open(config.lora_from, "pt"):
                pass
        except (OSError, SafetensorError) as error:
            raise ModelError(
                f"--lora-from {config.lora_from} cannot be read as a .safetensors file of adapters: {error}"
            ) from error
    has_masks = any(MASK in {*store.manifest.columns, *store.manifest.added} for store in stores)
    if config.mask_loss != PLAIN_MASKS and not has_masks:
        named = ", ".join(str(store.place) for store in stores)
        raise UsageError(
            f"--mask-loss is {config.mask_loss}, and {named} has no masks: leave it out, or pack the source with mask = …"
        )
    _refuse_model(config, stores)


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
        elif optional := [name for name, column in store.manifest.columns.items() if column.optional and _is_read(name)]:
            found = f"columns.{optional[0]}.optional true, expected false: of a row without it, zeros would be trained on"
        elif (shift := vae.get("shift_factor")) and vae.get("latents_mean"):
            found = f"encoders.vae.shift_factor {shift}, expected none in addition to latents_mean"
        if found:
            raise ModelError(f"{store.place}: its manifest has {found}; pack the source again without it")


def _is_read(role: str) -> bool:
    """Return whether training reads a column of a role."""
    return role == MASK or is_reference(role)


def _refuse_model(config: TrainConfig, stores: Sequence[Store]) -> None:
    """Refuse a model of another kind than the stores', and options that are not for it."""
    model = open_model_config(config.model, config.model_config)
    family, *_ = [checked(model, facts_of(store, store.buckets())) for store in stores]
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
    refuse_other_encoders(model, stores[0].manifest.encoders)  # last, since it reads the VAE
