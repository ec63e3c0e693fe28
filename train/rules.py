"""What a run is refused for before its first step: a table of rules, looked at in order, before anything is written.

What options alone rule out, `TrainConfig` refuses; what a model or a plan rules out by itself, those who read it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from bucketline.command_line import counted
from bucketline.errors import BucketlineError, ModelError, StateError, UsageError
from bucketline.files.paths import Overlap, overlap
from bucketline.files.run_marker import CHECKPOINTS, is_run
from bucketline.loader.commands.batch_options import BatchSize
from bucketline.loader.config import LoaderConfig
from bucketline.loader.mixture import StoreId, parse_stores
from bucketline.option_types import OnResume, options_on_resume
from bucketline.option_value import as_option
from bucketline.store.format.columns import FLIPPED
from bucketline.train.config import Objective
from bucketline.train.load import checked, facts_of, locate, refuse_other_encoders, schedule_of, store_channels
from bucketline.train.log import has_steps
from bucketline.train.run_file import config_as_json, preset_names
from bucketline.train.values import Weighting
from bucketline.weight_files import LORA_FILE, PEFT_FILE

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from bucketline.families.family import Family
    from bucketline.loader import WeightedStore
    from bucketline.store import Store
    from bucketline.train.checkpoint import RunState, Start
    from bucketline.train.config import TrainConfig

IDS_OF_A_BUCKET = 4
BESIDE_A_RUN = (".log", ".out", ".err", ".tmp")
"""Suffixes allowed in a folder before its run starts: logs of a shell or scheduler, temporary files that a full disk left."""
_OF_ADAPTERS = "-lora"  # how a preset's name ends
_FAMILY_OF_PRESET = {"dit": "class_labels"}  # of another name; pixart_alpha and pixart_sigma share pixart

Found = dict[str, Any] | bool | None
"""Whether a rule refuses a run, or more values for its message."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What is known of a run before its first step."""

    config: TrainConfig
    world_size: int = 1
    start: Start | None = None  # None: only the folder is looked at
    shares: Sequence[WeightedStore] = ()  # open, at the generations that are read

    @property
    def output(self) -> Path:
        return self.config.output_dir

    @property
    def is_new(self) -> bool:
        return not self.config.resume

    @property
    def resumed(self) -> RunState | None:
        return None if self.start is None else self.start.state

    @property
    def stores(self) -> list[Store]:
        return [share.store for share in self.shares]

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


class Rule(NamedTuple):
    """A reason to refuse a run."""

    name: str
    finds: Callable[[Facts], Found]
    message: str  # with `output`, `config`, `objective`, `folder` (the checkpoint's), and what was found
    error: type[BucketlineError] = UsageError


def refuse(rules: Sequence[Rule], facts: Facts) -> None:
    """Look at rules in order; raise the error of the first one that refuses the run."""
    for rule in rules:
        if found := rule.finds(facts):
            known = {"output": facts.output, "config": facts.config, "folder": facts.start and facts.start.checkpoint}
            known |= {"objective": facts.objective} if "{objective}" in rule.message else {}
            raise rule.error(rule.message.format(**known | (found if isinstance(found, dict) else {})))


# ---------------------------------------------------------------------------------------------- the folder


def _near_store(facts: Facts) -> Found:
    """Find a store on a disk; one in object storage has no folder here."""
    how = {Overlap.SAME: "is", Overlap.INSIDE: "is inside", Overlap.AROUND: "contains"}
    for path in [one.path for one in parse_stores(facts.config.store, "--store") if isinstance(one.path, Path)]:
        if facts.is_new and (found := overlap(facts.output, path)):
            return {"how": how[found], "path": path}
    return None


def _among_images(facts: Facts) -> Found:
    """Find a folder around the output in which a store's samples are: it has no source path, but ids are image paths in it."""
    for store in facts.stores if facts.is_new else ():
        for bucket in store.buckets() if isinstance(store.place, Path) else ():  # others' ids would have to be fetched
            ids = bucket.sample_ids(np.arange(min(IDS_OF_A_BUCKET, bucket.num_rows)))
            if any(Path(name).is_absolute() or ".." in Path(name).parts for name in ids):
                continue
            for folder in (facts.output, *Path(os.path.realpath(facts.output)).parents):
                if all(os.path.isfile(folder / name) for name in ids):  # noqa: PTH113 - an id may be no name of a file at all
                    return {"around": folder, "name": ids[0], "store": store.place}
    return None


def _other_files(facts: Facts) -> Found:
    if not facts.is_new or not facts.output.is_dir() or is_run(facts.output):
        return None
    names = sorted(p.name for p in facts.output.iterdir() if not p.name.startswith(".") and p.suffix not in BESIDE_A_RUN)
    return {"name": names[0]} if names else None


# ---------------------------------------------------------------------------------------------- a resume


def _past(facts: Facts) -> Found:
    steps, state = facts.config.max_steps, facts.resumed
    return {"done": state.steps_done} if state and steps is not None and state.steps_done > steps else None


def _changed(facts: Facts) -> Found:
    """Find an option that may not change. A new plan may have another seed, or flips."""
    config, state = facts.config, facts.resumed
    assert facts.start is not None
    present, defaults = config_as_json(config), {one.name: one.default for one in fields(config)}
    for name in options_on_resume(type(config), OnResume.FIXED) if state else ():
        assert state is not None
        before = state.config.get(name, defaults[name])
        is_open = name == "optimizer" and config.optimizer is None  # the checkpoint's is taken
        if is_open or before == present[name] or (config.new_plan and name in LoaderConfig.__dataclass_fields__):
            continue
        option, is_given = as_option(name), before is not None and before is not False
        remedy = f"use {option} {before}".removesuffix(" True") if is_given else f"leave out {option}"
        begun = _begun_from(facts.start.checkpoint) if name == "optimizer" else ""
        return {"option": option, "now": present[name], "before": before, "remedy": remedy, "begun": begun}
    return None


def _begun_from(folder: Path | None) -> str:
    """Return the option that starts a run from a checkpoint's weights, averaged if it has an average."""
    assert folder is not None
    files = [folder / f"lora{average}" / name for average in ("_ema", "") for name in (LORA_FILE, PEFT_FILE)]
    adapters = [file for file in files if file.exists()]
    return f" from its weights, with {f'--lora-from {adapters[0]}' if adapters else f'--model {folder}'},"


def _other_batch(facts: Facts) -> Found:
    """Find a bucket that has other rows a step than in the run that is resumed, unless it takes a new plan."""
    config, state = facts.config, facts.resumed
    if state is None or config.new_plan:
        return None
    before = str(state.config["batch"]), int(str(state.config["accumulation"])), state.world_size
    now = str(config.batch), config.accumulation, facts.world_size
    sizes = [LoaderConfig(**BatchSize.parse(batch, "--batch").sizes()) for batch, *_ in (before, now)]  # type: ignore[arg-type]
    buckets = [bucket for store in facts.stores for bucket in store.buckets("train")]
    for bucket in () if before == now else buckets if any(size.batch_size is None for size in sizes) else [None]:
        rows = [
            (size.rows_of(bucket) if bucket else size.batch_size or 0) * times * ranks
            for size, (_, times, ranks) in zip(sizes, (before, now), strict=True)
        ]
        if rows[0] != rows[1]:
            was, given = (
                f"--batch {batch} --accumulation {n} on {counted(ranks, 'rank')}" for batch, n, ranks in (before, now)
            )
            where = f" of {bucket.name}" if bucket else ""
            return {"given": given, "now": rows[1], "was": was, "before": rows[0], "where": where}
    return None


def _other_store(facts: Facts) -> Found:
    """Find a store that is not the checkpoint's, unless the run takes a new plan."""
    if (state := facts.resumed) is None or facts.config.new_plan:
        return None
    pairs = zip(state.stores, map(StoreId.of, facts.shares), strict=False)
    return next(({"was": was, "now": now} for was, now in pairs if replace(now, path=was.path) != was), None)


# ---------------------------------------------------------------------------------------------- the stores and the model


def _ignored(facts: Facts) -> Found:
    """Find what this trainer would ignore of a store, and train on something else."""
    for store in facts.stores:
        store_channels(store)
        vae: Any = store.manifest.encoders.get("vae")
        if len(store.text.delivered.tokens) != 1:
            tokens = ", ".join(store.manifest.text.tokens)
            return {"store": store.place, "field": "text.tokens", "found": tokens, "expected": "one column"}
        if (shift := vae.get("shift_factor")) and vae.get("latents_mean"):
            more = "none in addition to latents_mean"
            return {"store": store.place, "field": "encoders.vae.shift_factor", "found": shift, "expected": more}
    return None


def _no_flips(facts: Facts) -> Found:
    for store in facts.stores if facts.config.flip else ():
        for bucket in store.buckets("train"):
            if FLIPPED not in {column.name for column in bucket.columns}:
                return {"store": store.place, "column": FLIPPED, "bucket": bucket.name}
    return None


def _no_adapters_file(facts: Facts) -> Found:
    if (path := facts.config.lora_from) is None or not facts.is_new:
        return None
    try:
        with path.open("rb") as file:
            size, begin = int.from_bytes(file.read(8), "little"), file.read(1)
            is_one = begin == b"{" and size <= path.stat().st_size - 8
    except OSError as error:
        return {"reason": error.strerror}
    return None if is_one else {"reason": "it does not begin with a header"}


def _other_preset(facts: Facts) -> Found:
    kinds = {name: name.removesuffix(_OF_ADAPTERS) for name in preset_names()} if facts.is_new else {}
    families, family = {one: _FAMILY_OF_PRESET.get(one, one) for one in kinds.values()}, facts.family
    own = next((one for one, of in families.items() if family.name == of or family.name.startswith(f"{of}_")), None)
    for given in filter(kinds.get, facts.config.files):
        if own not in (None, kinds[given]):
            of_adapters = f"{own}{_OF_ADAPTERS}"
            better = of_adapters if given.endswith(_OF_ADAPTERS) and of_adapters in kinds else own
            return {"given": given, "family": kinds[given], "kind": family.model_class, "own": own, "better": better}
    return None


def _unguidable(facts: Facts) -> Found:
    guidance, family = facts.config.image_guidance, facts.family
    is_refused = guidance is not None and guidance > family.no_guidance and not family.is_guidable
    return {"pipeline": family.pipelines[0]} if is_refused else None


def _other_weighting(facts: Facts) -> Found:
    name = facts.config.loss_weight.name
    of_a_flow = name is not Weighting.MIN_SNR
    if name is Weighting.NONE or of_a_flow is (facts.objective is Objective.FLOW):
        return None
    return {"others": "min-snr:GAMMA" if of_a_flow else "cosmap, sigma-sqrt or sigma-squared"}


FOLDER_RULES = (
    Rule(
        "no run",
        lambda facts: not facts.is_new and not is_run(facts.output) and not (facts.output / CHECKPOINTS).exists(),
        "there is no run in {output}; give the --output-dir of one, or leave out --resume to begin one there",
    ),
    Rule("near a store", _near_store, "--output-dir {output} {how} the store {path}; choose a separate folder for the run"),
    Rule(
        "a file",
        lambda facts: facts.output.exists() and not facts.output.is_dir(),
        "--output-dir {output} is a file; choose a path that does not exist",
    ),
    Rule(
        "taken",
        lambda facts: facts.is_new and any((facts.output / CHECKPOINTS).glob("step-*")),
        "{output} already has a run; continue it with --resume, or choose another --output-dir",
    ),
    Rule(
        "taken, without a checkpoint",
        lambda facts: facts.is_new and has_steps(facts.output),
        "{output} already has a run; it ended before its first checkpoint: remove the folder, or choose another --output-dir",
    ),
)
"""Rules of the run's folder, which are looked at again once it is locked."""

RULES = (
    Rule("steps", _past, "--max-steps is {config.max_steps}, and {folder} is already at step {done}; use that many or more"),
    Rule(
        "option",
        _changed,
        "{option} is {now}, and {folder} was trained with {before}; {remedy}, or start a new run{begun} in another "
        "--output-dir",
    ),
    Rule(
        "batch",
        _other_batch,
        "{given} is {now} rows a step{where}, and {output} was trained with {was}, {before} rows a step; give the same number, "
        "or continue with --new-plan",
    ),
    Rule(
        "store",
        _other_store,
        "{folder} was trained on the store {was.store_id} ({was.path}), generation {was.generation} with digest {was.digest}, "
        "{was.repeats} times a pass; {now.path} is {now.store_id} with digest {now.digest}, {now.repeats} times a pass; name "
        "the --store of the run, or continue with --new-plan",
        StateError,
    ),
    Rule(
        "among images",
        _among_images,
        "--output-dir {output} is in {around}, where the store's samples came from (it has {name!r}); the run's images would "
        "become samples of {store}: choose a folder outside it",
    ),
    Rule(
        "other files",
        _other_files,
        "--output-dir {output} is not empty (it has {name!r}) and not a run of this trainer; choose a path that does not exist",
    ),
    Rule(
        "ignored",
        _ignored,
        "{store}: its manifest has {field} {found!s:.100}, expected {expected}; this trainer would ignore it and train on "
        "something else: pack the source again without it",
        ModelError,
    ),
    Rule(
        "flip",
        _no_flips,
        "--flip is {config.flip}, and {store} has no {column} in {bucket}; expected 0, or a store that was packed with --flip",
    ),
    Rule(
        "adapters",
        _no_adapters_file,
        "--lora-from {config.lora_from} cannot be read as a .safetensors file of adapters: {reason}",
        ModelError,
    ),
    Rule(
        "preset",
        _other_preset,
        "the preset {given} is for a model of the family {family}, and {config.model} is a {kind} of {own}; use the preset "
        "{better}, or make {given} your own by `bucketline train presets {given} > own.toml`",
    ),
    Rule(
        "guidance",
        _unguidable,
        "image_guidance is {config.image_guidance}, and {pipeline} guides by a second model, which is not trained; leave it "
        "out: images are drawn without guidance",
    ),
    Rule(
        "loss weight",
        _other_weighting,
        "--loss-weight is {config.loss_weight}, and the objective is {objective}; use {others}",
    ),
    Rule(
        "noise offset",
        lambda facts: facts.objective is Objective.FLOW and bool(facts.config.noise_offset),
        "--noise-offset is {config.noise_offset}, and the objective is a flow, which ends in plain noise: leave it out",
    ),
)
"""Rules of a run whose stores are open."""
RULES_OF_A_GENERATION = [rule for rule in RULES if rule.name == "ignored"]
"""Those of them that a later generation of the stores is looked at by, while the run goes on."""
