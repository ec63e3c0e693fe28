"""What a run is refused for before its first step: a table of rules, looked at in order, before anything is written.

What options alone rule out, `TrainConfig` refuses; what a model or a plan rules out by itself, those who read it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from bucketline.command_line import counted
from bucketline.errors import BucketlineError, ModelError, StateError, UsageError
from bucketline.files.paths import Overlap, overlap
from bucketline.files.run_marker import CHECKPOINTS, is_run
from bucketline.loader.commands.batch_options import BatchSize
from bucketline.loader.config import LoaderConfig
from bucketline.loader.history import StoreId
from bucketline.loader.mixture import parse_stores
from bucketline.option_types import OnResume, options_on_resume
from bucketline.option_value import as_option
from bucketline.store.format.columns import FLIPPED
from bucketline.train.log import has_steps
from bucketline.train.models.load import checked, facts_of, locate, refuse_other_encoders, schedule_of, store_channels
from bucketline.train.run_file import config_as_json, preset_names
from bucketline.train.values import Weighting
from bucketline.weight_files import LORA_FILE, PEFT_FILE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from bucketline.families.family import Family
    from bucketline.loader import WeightedStore
    from bucketline.store import Store
    from bucketline.train.checkpoint import Start
    from bucketline.train.config import TrainConfig
    from bucketline.train.noise import ModelSchedule

IDS_OF_A_BUCKET = 4
BESIDE_A_RUN = (".log", ".out", ".err", ".tmp")
"""Suffixes allowed in a folder before its run starts: logs of a shell or scheduler, temporary files that a full disk left."""
_OF_ADAPTERS = "-lora"  # how a preset's name ends
_FAMILY_OF_PRESET = {"dit": "class_labels"}  # of another name; pixart_alpha and pixart_sigma share pixart

Found = dict[str, Any] | None
"""The values of a message, if a rule refuses a run."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What is known of a run before its first step."""

    config: TrainConfig
    world_size: int = 1
    start: Start | None = None  # None: only the folder is looked at
    shares: Sequence[WeightedStore] = ()  # open, at the generations that are read

    @cached_property
    def stores(self) -> list[Store]:
        return [share.store for share in self.shares]

    @cached_property
    def family(self) -> Family:
        """The model's family, by its configuration; its buckets are checked later.

        Raises:
            ModelError, UsageError: if its parts are not of one model, or the first store was packed for another.
        """
        folder, file = locate(self.config.model, self.config.model_config)
        _, _, family = checked(folder, facts_of(self.stores[0], ()), file)
        refuse_other_encoders(folder, self.stores[0].manifest.encoders, reads=False)
        return family

    @cached_property
    def schedule(self) -> ModelSchedule:
        folder, _ = locate(self.config.model, self.config.model_config)
        return schedule_of(self.config, folder, self.family, torch.device("cpu"))


class Rule(NamedTuple):
    """A reason to refuse a run."""

    name: str
    finds: Callable[[Facts], Found]
    message: str  # with the values that were found
    error: type[BucketlineError] = UsageError


def refuse(rules: Sequence[Rule], facts: Facts) -> None:
    """Look at rules in order.

    Raises:
        BucketlineError: the error of the first one that refuses the run.
    """
    for rule in rules:
        if (found := rule.finds(facts)) is not None:
            raise rule.error(rule.message.format(**found))


def _when(is_refused: object, **found: object) -> Found:
    return found if is_refused else None


# ---------------------------------------------------------------------------------------------- the folder


def _begun(facts: Facts) -> Found:
    output = facts.config.output_dir
    return _when(not facts.config.resume and any((output / CHECKPOINTS).glob("step-*")), output=output)


def _ended_early(facts: Facts) -> Found:
    return _when(not facts.config.resume and has_steps(facts.config.output_dir), output=facts.config.output_dir)


def _absent(facts: Facts) -> Found:
    output = facts.config.output_dir
    return _when(facts.config.resume and not is_run(output) and not (output / CHECKPOINTS).exists(), output=output)


def _strange_files(facts: Facts) -> Found:
    output = facts.config.output_dir
    if facts.config.resume or not output.is_dir() or is_run(output):
        return None
    names = sorted(p.name for p in output.iterdir() if not p.name.startswith(".") and p.suffix not in BESIDE_A_RUN)
    return _when(names, output=output, name=(names or [""])[0])


def _near_store(facts: Facts) -> Found:
    """Find a store on a disk; one in object storage has no folder here."""
    how = {Overlap.SAME: "is", Overlap.INSIDE: "is inside", Overlap.AROUND: "contains"}
    output = facts.config.output_dir
    for path in [one.path for one in parse_stores(facts.config.store, "--store") if isinstance(one.path, Path)]:
        if not facts.config.resume and (found := overlap(output, path)):
            return {"output": output, "how": how[found], "path": path}
    return None


# ---------------------------------------------------------------------------------------------- a resume


def _past(facts: Facts) -> Found:
    for state, folder in _resumed(facts):
        steps = facts.config.max_steps
        return _when(steps is not None and state.steps_done > steps, steps=steps, folder=folder, done=state.steps_done)
    return None


def _changed(facts: Facts) -> Found:
    """Find an option that may not change. A new plan may have another seed, or flips."""
    config, present = facts.config, config_as_json(facts.config)
    defaults = {one.name: one.default for one in fields(config)}
    for state, folder in _resumed(facts):
        for name in options_on_resume(type(config), OnResume.FIXED):
            before = state.config.get(name, defaults[name])
            is_open = name == "optimizer" and config.optimizer is None  # the checkpoint's is taken
            if is_open or before == present[name] or (config.new_plan and name in LoaderConfig.__dataclass_fields__):
                continue
            option, is_given = as_option(name), before is not None and before is not False
            remedy = f"use {option} {before}".removesuffix(" True") if is_given else f"leave out {option}"
            begun = _begun_from(folder) if name == "optimizer" else ""
            found = {"now": present[name], "before": before, "remedy": remedy, "begun": begun}
            return {"option": option, "folder": folder, **found}
    return None


def _begun_from(folder: Path) -> str:
    """Return the option that starts a run from a checkpoint's weights, averaged if it has an average."""
    files = [folder / f"lora{average}" / name for average in ("_ema", "") for name in (LORA_FILE, PEFT_FILE)]
    adapters = [file for file in files if file.exists()]
    return f" from its weights, with {f'--lora-from {adapters[0]}' if adapters else f'--model {folder}'},"


def _other_batch(facts: Facts) -> Found:
    """Find a bucket that has other rows a step than in the run that is resumed, unless it takes a new plan."""
    config = facts.config
    for state, _ in _resumed(facts):
        before = str(state.config["batch"]), int(str(state.config["accumulation"])), state.world_size
        now = str(config.batch), config.accumulation, facts.world_size
        if config.new_plan or before == now:
            return None
        sizes = [LoaderConfig(**BatchSize.parse(batch, "--batch").sizes()) for batch, *_ in (before, now)]  # type: ignore[arg-type]
        buckets = [bucket for store in facts.stores for bucket in store.buckets("train")]
        for bucket in buckets if any(size.batch_size is None for size in sizes) else [None]:
            rows = [
                (size.rows_of(bucket) if bucket else size.batch_size or 0) * times * ranks
                for size, (_, times, ranks) in zip(sizes, (before, now), strict=True)
            ]
            if rows[0] != rows[1]:
                was, given = (
                    f"--batch {batch} --accumulation {times} on {counted(ranks, 'rank')}"
                    for batch, times, ranks in (before, now)
                )
                where = f" of {bucket.name}" if bucket else ""
                found = {"given": given, "now": rows[1], "was": was, "before": rows[0], "where": where}
                return {"output": config.output_dir, **found}
    return None


def _resumed(facts: Facts) -> Iterator[Any]:
    """Yield the state and the folder of the checkpoint that is resumed, if one is."""
    if facts.start is not None and facts.start.state is not None:
        yield facts.start.state, facts.start.checkpoint


def _other_store(facts: Facts) -> Found:
    """Find a store that is not the checkpoint's, unless the run takes a new plan."""
    for state, folder in _resumed(facts):
        for was, share in zip(state.stores, () if facts.config.new_plan else facts.shares, strict=False):
            now = StoreId.of(share)
            if replace(now, path=was.path) != was:
                return {"folder": folder, "was": was, "now": now}
    return None


# ---------------------------------------------------------------------------------------------- the stores


def _ids_of_images(facts: Facts) -> Found:
    """Find a folder around the output in which a store's samples are: it has no source path, but ids are image paths in it."""
    output = facts.config.output_dir
    for store in facts.stores if not facts.config.resume else ():
        if not isinstance(store.place, Path):
            continue  # its ids would have to be fetched
        for bucket in store.buckets():
            ids = bucket.sample_ids(_first(min(IDS_OF_A_BUCKET, bucket.num_rows)))
            if any(Path(name).is_absolute() or ".." in Path(name).parts for name in ids):
                continue
            for folder in (output, *Path(os.path.realpath(output)).parents):
                if all(os.path.isfile(folder / name) for name in ids):  # noqa: PTH113 - an id may be no name of a file at all
                    return {"output": output, "folder": folder, "name": ids[0], "store": store.place}
    return None


def _first(count: int) -> Any:  # noqa: ANN401 - an array
    import numpy as np

    return np.arange(count)


def _ignored(facts: Facts) -> Found:
    """Find what this trainer would ignore of a store, and train on something else."""
    for store in facts.stores:
        store_channels(store)
        manifest, vae = store.manifest, store.manifest.encoders.get("vae")
        assert isinstance(vae, dict)
        tokens, shift = manifest.text.tokens, vae.get("shift_factor")
        if len(store.text.delivered.tokens) != 1:
            return {"store": store.place, "field": "text.tokens", "found": ", ".join(tokens), "expected": "one column"}
        if shift and vae.get("latents_mean"):
            more = "none in addition to latents_mean"
            return {"store": store.place, "field": "encoders.vae.shift_factor", "found": shift, "expected": more}
    return None


def _no_flips(facts: Facts) -> Found:
    for store in facts.stores if facts.config.flip else ():
        for bucket in store.buckets("train"):
            if FLIPPED not in {column.name for column in bucket.columns}:
                return {"flip": facts.config.flip, "store": store.place, "column": FLIPPED, "bucket": bucket.name}
    return None


# ---------------------------------------------------------------------------------------------- the model


def _no_adapters_file(facts: Facts) -> Found:
    if (path := facts.config.lora_from) is None or facts.config.resume:
        return None
    try:
        with path.open("rb") as file:
            size, begin = int.from_bytes(file.read(8), "little"), file.read(1)
            is_one = begin == b"{" and size <= path.stat().st_size - 8
    except OSError as error:
        return {"path": path, "reason": error.strerror}
    return _when(not is_one, path=path, reason="it does not begin with a header")


def _other_preset(facts: Facts) -> Found:
    config = facts.config
    kinds = {} if config.resume else {name: name.removesuffix(_OF_ADAPTERS) for name in preset_names()}
    families, family = {one: _FAMILY_OF_PRESET.get(one, one) for one in kinds.values()}, facts.family
    own = next((one for one, of in families.items() if family.name == of or family.name.startswith(f"{of}_")), None)
    for given in filter(kinds.get, config.files):
        if own not in (None, kinds[given]):
            of_adapters = f"{own}{_OF_ADAPTERS}"
            better = of_adapters if given.endswith(_OF_ADAPTERS) and of_adapters in kinds else own
            named = {"model": config.model, "kind": family.model_class, "own": own, "better": better}
            return {"given": given, "family": kinds[given], **named}
    return None


def _unguidable(facts: Facts) -> Found:
    guidance, family = facts.config.image_guidance, facts.family
    is_refused = guidance is not None and guidance > family.no_guidance and not family.is_guidable
    return _when(is_refused, guidance=guidance, pipeline=family.pipelines[0])


def _other_weighting(facts: Facts) -> Found:
    weight, objective = facts.config.loss_weight, facts.schedule.objective
    of_a_flow, is_flow = weight.name is not Weighting.MIN_SNR, objective == "flow"
    others = "min-snr:GAMMA" if of_a_flow else "cosmap, sigma-sqrt or sigma-squared"
    return _when(
        weight.name is not Weighting.NONE and of_a_flow is not is_flow, weight=weight, objective=objective, others=others
    )


def _offset_of_flow(facts: Facts) -> Found:
    offset = facts.config.noise_offset
    return _when(offset and facts.schedule.objective == "flow", offset=offset)


FOLDER_RULES = (
    Rule(
        "no run",
        _absent,
        "there is no run in {output}; give the --output-dir of one, or leave out --resume to begin one there",
    ),
    Rule("inside a store", _near_store, "--output-dir {output} {how} the store {path}; choose a separate folder for the run"),
    Rule(
        "a file",
        lambda facts: _when(
            facts.config.output_dir.exists() and not facts.config.output_dir.is_dir(), output=facts.config.output_dir
        ),
        "--output-dir {output} is a file; choose a path that does not exist",
    ),
    Rule("taken", _begun, "{output} already has a run; continue it with --resume, or choose another --output-dir"),
    Rule(
        "taken, without a checkpoint",
        _ended_early,
        "{output} already has a run; it ended before its first checkpoint: remove the folder, or choose another --output-dir",
    ),
)
"""Rules of the run's folder, which are looked at again once it is locked."""

RULES = (
    Rule("steps", _past, "--max-steps is {steps}, and {folder} is already at step {done}; use that many or more"),
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
        _ids_of_images,
        "--output-dir {output} is in {folder}, where the store's samples came from (it has {name!r}); the run's images would "
        "become samples of {store}: choose a folder outside it",
    ),
    Rule(
        "other files",
        _strange_files,
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
        "--flip is {flip}, and {store} has no {column} in {bucket}; expected 0, or a store that was packed with --flip",
    ),
    Rule(
        "adapters",
        _no_adapters_file,
        "--lora-from {path} cannot be read as a .safetensors file of adapters: {reason}",
        ModelError,
    ),
    Rule(
        "preset",
        _other_preset,
        "the preset {given} is for a model of the family {family}, and {model} is a {kind} of {own}; use the preset {better}, "
        "or make {given} your own by `bucketline train presets {given} > own.toml`",
    ),
    Rule(
        "guidance",
        _unguidable,
        "image_guidance is {guidance}, and {pipeline} guides by a second model, which is not trained; leave it out: images are "
        "drawn without guidance",
    ),
    Rule("loss weight", _other_weighting, "--loss-weight is {weight}, and the objective is {objective}; use {others}"),
    Rule(
        "noise offset",
        _offset_of_flow,
        "--noise-offset is {offset}, and the objective is a flow, which ends in plain noise: leave it out",
    ),
)
"""Rules of a run whose stores are open."""
