"""Refusals that need only a run's options and its stores' manifests: in one order, before torch is imported."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from bucketline.command_line import counted, printable
from bucketline.errors import DeliveryError, ModelError, PlanError, StateError, StoreError, UsageError
from bucketline.files.paths import Overlap, overlap
from bucketline.files.run_marker import CHECKPOINTS, is_run
from bucketline.loader.commands.batch_options import BatchSize
from bucketline.loader.commands.stats import stats_of
from bucketline.loader.config import LoaderConfig
from bucketline.loader.mixture import join, open_shares, parse_stores
from bucketline.loader.plan.make_plan import make_plan
from bucketline.model_file import single_file
from bucketline.option_types import OnResume, options_on_resume
from bucketline.option_value import as_option
from bucketline.store import Bucket, Store
from bucketline.store.format.columns import FLIPPED
from bucketline.store.format.manifest import MANIFEST
from bucketline.train.checkpoint import checkpoint_folders, damage, last_whole, read_state
from bucketline.train.optim import refuse_combinations
from bucketline.train.run_file import config_as_json
from bucketline.weight_files import LORA_FILE, PEFT_FILE

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from bucketline.loader import WeightedStore
    from bucketline.loader.plan.plan import Plan
    from bucketline.train.checkpoint import RunState
    from bucketline.train.config import TrainConfig

IDS_OF_A_BUCKET = 4
SERVICE_STARTS_S = 10  # a `loader serve` in the background, until it listens
DENOISER_FOLDERS = ("unet", "transformer")  # folders of a model
BESIDE_A_RUN = (".log", ".out", ".err", ".tmp")
"""Suffixes allowed in a folder before its run starts: logs of a shell or scheduler, temporary files that a full disk left."""


def refuse_early(config: TrainConfig, world_size: int) -> None:
    """Check a run before anything that takes seconds is imported. Stores in object storage are checked when they are opened.

    Raises:
        BucketlineError: if options exclude each other, the output folder cannot be a run's, or a store cannot be trained on.
    """
    refuse_combinations(config, world_size)
    if config.resume:
        refuse_taken(config)
        if world_size == 1:  # several ranks refuse it together: one that ended by itself would leave the others waiting
            _refuse_resume(config)
            _refuse_no_service(config)
        return  # its stores are at the generations of its checkpoint, which has passed all this
    paths = [one.path for one in parse_stores(config.store, "--store")]
    local = [path for path in paths if isinstance(path, Path)]
    if config.follow and not all((path / MANIFEST).exists() for path in local):
        return  # they are waited for
    refuse_place(config)
    refuse_taken(config)
    if single_file(config.model) is None:
        refuse_no_model(config.model)
    if config.lora_from is not None:
        _refuse_other_file(config.lora_from)
    if len(local) == len(paths):
        shares = open_shares(local)
        refuse_stores(shares)
        _refuse_flip(config, shares)
        if config.epochs is not None:
            steps_of_epochs(make_plan(join(shares), config.for_loader(epochs=None), world_size=world_size), config.epochs)
    if world_size == 1:
        _refuse_no_service(config)


def steps_of_epochs(plan: Plan, epochs: float) -> int:
    """Return the steps of so many passes over a plan's rows.

    Raises:
        PlanError: if they have none.
    """
    whole, part = divmod(epochs, 1)
    first, after = (plan.steps_before(int(whole) + n) for n in range(2))
    if (steps := first + round(part * (after - first))) == 0:
        raise PlanError(plan.without_step())
    return steps


def refuse_taken(config: TrainConfig) -> None:
    """Reject a new run where there is one that has a checkpoint, and a resume where there is no run.

    Raises:
        UsageError: if it is so.
    """
    output = config.output_dir
    if not config.resume and any((output / CHECKPOINTS).glob("step-*")):
        raise UsageError(f"{output} already has a run; continue it with --resume, or choose another --output-dir")
    if config.resume and not is_run(output) and not (output / CHECKPOINTS).exists():
        raise UsageError(f"there is no run in {output}; give the --output-dir of one, or leave out --resume to begin one there")


def _refuse_resume(config: TrainConfig) -> None:
    """Check a resume by the newest checkpoint that seems complete.

    Raises:
        UsageError: if an option is another than its own, and may not be.
        TrainError, StateError: if there is no checkpoint, or it cannot be resumed.
    """
    for folder in checkpoint_folders(config.output_dir).values():
        if damage(folder, reads=False) is None:
            try:
                state = read_state(folder)
                refuse_changes(config, state, folder)
                refuse_other_batch(config, state, 1, _local_buckets(config, state))
            except (StateError, UsageError):
                if damage(folder) is None:  # else the run takes the one before it
                    raise
            else:
                return
    last_whole(config.output_dir)  # which says that there is none


def refuse_changes(config: TrainConfig, state: RunState, folder: Path) -> None:
    """Compare a resumed run's options with those of its checkpoint `folder`. A new plan may have another seed, or flips.

    Raises:
        UsageError: if the checkpoint is past `--max-steps`, or has another value of an option that may not change; the message
            names both values.
    """
    if config.max_steps is not None and state.steps_done > config.max_steps:
        raise UsageError(
            f"--max-steps is {config.max_steps}, and {folder} is already at step {state.steps_done}; use that many or more"
        )
    present = config_as_json(config)
    defaults = {one.name: one.default for one in fields(config)}
    for name in options_on_resume(type(config), OnResume.FIXED):
        before = state.config.get(name, defaults[name])
        is_open = name == "optimizer" and config.optimizer is None  # the checkpoint's is taken
        if is_open or before == present[name] or (config.new_plan and name in LoaderConfig.__dataclass_fields__):
            continue
        option = as_option(name)
        remedy = (
            f"use {option} {before}".removesuffix(" True")
            if before is not None and before is not False
            else f"leave out {option}"
        )
        begun = _begun_from(folder) if name == "optimizer" else ""
        raise UsageError(
            f"{option} is {present[name]}, and {folder} was trained with {before}; {remedy}, "
            f"or start a new run{begun} in another --output-dir"
        )


def _begun_from(folder: Path) -> str:
    """Return the option that starts a run from a checkpoint's weights, averaged if it has an average."""
    files = [folder / f"lora{average}" / name for average in ("_ema", "") for name in (LORA_FILE, PEFT_FILE)]
    adapters = [file for file in files if file.exists()]
    return f" from its weights, with {f'--lora-from {adapters[0]}' if adapters else f'--model {folder}'},"


def refuse_other_batch(config: TrainConfig, state: RunState, world_size: int, buckets: Iterable[Bucket]) -> None:
    """Compare the rows of a step in each bucket with those of the run that is resumed, unless it takes a new plan.

    Raises:
        UsageError: if one differs; the message names both sizes.
    """
    before = str(state.config["batch"]), int(str(state.config["accumulation"])), state.world_size
    now = str(config.batch), config.accumulation, world_size
    if config.new_plan or before == now:
        return
    sizes = [LoaderConfig(**BatchSize.parse(batch, "--batch").sizes()) for batch, *_ in (before, now)]  # type: ignore[arg-type]
    for bucket in buckets if any(size.batch_size is None for size in sizes) else [None]:
        rows = [
            (size.rows_of(bucket) if bucket else size.batch_size or 0) * times * ranks
            for size, (_, times, ranks) in zip(sizes, (before, now), strict=True)
        ]
        if rows[0] != rows[1]:
            was, given = (
                f"--batch {batch} --accumulation {times} on {counted(ranks, 'rank')}" for batch, times, ranks in (before, now)
            )
            where = f" of {bucket.name}" if bucket else ""
            raise UsageError(
                f"{given} is {rows[1]} rows a step{where}, and {config.output_dir} was trained with {was}, {rows[0]} rows a "
                "step; give the same number, or continue with --new-plan"
            )


def _local_buckets(config: TrainConfig, state: RunState) -> Iterator[Bucket]:
    """Yield the buckets of a resumed run, of its stores on a disk; what is wrong with a store is said when it is read."""
    for given, recorded in zip(parse_stores(config.store, "--store"), state.stores, strict=False):
        if isinstance(given.path, Path):
            with contextlib.suppress(StoreError):
                yield from Store.open(given.path, recorded.generation).buckets("train")


def _refuse_no_service(config: TrainConfig) -> None:
    """Check that a service of this machine can be reached; one that was started just before has a moment to begin."""
    address, ends = config.service_address(), 0.0
    while address is not None and address.path is not None:
        try:
            stats_of(address)
            break
        except DeliveryError:
            if not ends:
                ends = time.monotonic() + SERVICE_STARTS_S
                where = printable(str(address.path))
                print(f"waiting {SERVICE_STARTS_S} s for a service at {where}", file=sys.stderr, flush=True)
            if time.monotonic() > ends:
                raise
            time.sleep(0.1)


def refuse_no_model(folder: Path) -> None:
    """Reject a folder without a denoiser.

    Raises:
        ModelError: if it has neither of the two that a model may have.
    """
    if not any((folder / name / "config.json").exists() for name in DENOISER_FOLDERS):
        kind = "is a file" if folder.is_file() else "has neither unet/config.json nor transformer/config.json"
        raise ModelError(
            f"{folder} {kind}; --model must be a folder in diffusers' layout with one of unet/ and transformer/ (a "
            "configuration without weights starts at random), or a .safetensors file"
        )


def _refuse_flip(config: TrainConfig, shares: Sequence[WeightedStore]) -> None:
    for store in [share.store for share in shares] if config.flip else ():
        for bucket in store.buckets("train"):
            if FLIPPED not in {column.name for column in bucket.columns}:
                raise UsageError(
                    f"--flip is {config.flip}, and {store.place} has no {FLIPPED} in {bucket.name}; expected 0, or a store "
                    "that was packed with --flip"
                )


def _refuse_other_file(path: Path) -> None:
    """Reject a file that cannot be one of safetensors, by its first bytes."""
    try:
        with path.open("rb") as file:
            size, begin = int.from_bytes(file.read(8), "little"), file.read(1)
            reason = "" if begin == b"{" and size <= path.stat().st_size - 8 else "it does not begin with a header"
    except OSError as error:
        reason = str(error.strerror)
    if reason:
        raise ModelError(f"--lora-from {path} cannot be read as a .safetensors file of adapters: {reason}")


def refuse_place(config: TrainConfig) -> None:
    """Reject an output folder inside or around a store, in the source folder of a store, or with foreign files.

    Raises:
        UsageError: if it is one of these; the message names what is in the way.
    """
    output = config.output_dir
    # a store in object storage has no folder here, and its ids would have to be fetched
    paths = [store.path for store in parse_stores(config.store, "--store") if isinstance(store.path, Path)]
    for path in paths:
        found = {Overlap.SAME: "is", Overlap.INSIDE: "is inside", Overlap.AROUND: "contains"}
        if how := overlap(output, path):
            raise UsageError(f"--output-dir {output} {found[how]} the store {path}; choose a separate folder for the run")
    # a store has no source path, but sample ids are image paths in it
    for store in map(Store.open, paths):
        for bucket in store.buckets():
            ids = bucket.sample_ids(np.arange(min(IDS_OF_A_BUCKET, bucket.num_rows)))
            if any(Path(name).is_absolute() or ".." in Path(name).parts for name in ids):
                continue
            for folder in (output, *Path(os.path.realpath(output)).parents):
                if all(os.path.isfile(folder / name) for name in ids):  # noqa: PTH113 - an id may be no name of a file at all
                    raise UsageError(
                        f"--output-dir {output} is in {folder}, where the store's samples came from (it has {ids[0]!r}); the "
                        f"run's images would become samples of {store.path}: choose a folder outside it"
                    )
    if output.exists() and not output.is_dir():
        raise UsageError(f"--output-dir {output} is a file; choose a path that does not exist")
    if not output.is_dir() or is_run(output):
        return
    strange = sorted(p.name for p in output.iterdir() if not p.name.startswith(".") and p.suffix not in BESIDE_A_RUN)
    if strange:
        raise UsageError(
            f"--output-dir {output} is not empty (it has {strange[0]!r}) and not a run of this trainer; "
            "choose a path that does not exist"
        )


def refuse_stores(shares: Sequence[WeightedStore]) -> None:
    """Reject stores that this trainer cannot train on, or would misread.

    Raises:
        ModelError: if one lacks the VAE's channels, or has a column or field that would be ignored; the message names the
            field, its value and what is expected.
    """
    for store in [share.store for share in shares]:
        store_channels(store)
        manifest, vae = store.manifest, store.manifest.encoders.get("vae")
        assert isinstance(vae, dict)
        both = vae.get("shift_factor") and vae.get("latents_mean")
        for field, found, is_known, expected in (
            ("text.tokens", ", ".join(manifest.text.tokens), len(store.text.delivered.tokens) == 1, "one column"),
            ("encoders.vae.shift_factor", vae.get("shift_factor"), not both, "none in addition to latents_mean"),
        ):
            if not is_known:
                raise ModelError(
                    f"{store.path}: its manifest has {field} {found!s:.100}, expected {expected}; this trainer would ignore it "
                    "and train on something else: pack the source again without it"
                )


def store_channels(store: Store) -> int:
    """Return the number of channels of a store's latents; if it has moments, of a latent drawn from them.

    Raises:
        ModelError: if its manifest does not say.
    """
    vae = store.manifest.encoders.get("vae")
    channels = vae.get("latent_channels") if isinstance(vae, dict) else None
    if not isinstance(channels, int):
        raise ModelError(
            f"{store.place}: its manifest has no number encoders.vae.latent_channels, so it is not known which model its "
            "latents fit; pack or import the source again with the model's VAE"
        )
    return channels
