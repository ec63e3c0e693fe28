"""Refusals that need only a run's options and its stores' manifests: in one order, before torch is imported."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from bucketline.command_line import counted
from bucketline.errors import ModelError, StateError, UsageError
from bucketline.files.paths import Overlap, overlap
from bucketline.files.redact import redacted
from bucketline.files.run_marker import CHECKPOINTS, is_run
from bucketline.loader.mixture import open_shares, parse_stores
from bucketline.loader.recorded_run import read_run
from bucketline.model_file import single_file
from bucketline.store import Store
from bucketline.store.format.columns import FLIPPED
from bucketline.store.format.manifest import MANIFEST
from bucketline.train.optim import refuse_combinations

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bucketline.loader import WeightedStore
    from bucketline.train.config import TrainConfig

IDS_OF_A_BUCKET = 4
DENOISER_FOLDERS = ("unet", "transformer")  # folders of a model
STORED_CAPTIONS = "captions"  # instead of prompts, in --image-prompts
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
            _refuse_other_batch(config)
        return  # its stores are at the generations of its checkpoint, which has passed all this
    paths = [one.path for one in parse_stores(config.store)]
    local = [path for path in paths if isinstance(path, Path)]
    if config.wait_rows is not None and not all((path / MANIFEST).exists() for path in local):
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
        refuse_unknown_sets(config.image_prompts, shares)


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


def _refuse_other_batch(config: TrainConfig) -> None:
    """Check the rows of a step against those of the run that is resumed, if both are given as rows."""
    if config.new_plan:
        return
    try:
        state = read_run(config.output_dir).state
    except StateError:
        return  # of an older checkpoint, if the newest is damaged; what is wrong is said when it is read
    before, now = state.batch.get("batch_size"), config.sizes().get("batch_size")
    if not isinstance(before, int) or now is None:
        return
    steps = (before, state.accumulation, state.world_size), (now, config.accumulation, 1)
    if math.prod(steps[0]) != math.prod(steps[1]):
        was, given = (f"--batch {rows} --accumulation {times} on {counted(ranks, 'rank')}" for rows, times, ranks in steps)
        raise UsageError(
            f"{given} is {math.prod(steps[1])} rows a step, and {config.output_dir} was trained with {was}, "
            f"{math.prod(steps[0])} rows a step; give the same number, or continue with --new-plan"
        )


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


def refuse_unknown_sets(names: Sequence[str], shares: Sequence[WeightedStore]) -> None:
    """Reject the name of a set of prompts that no store has.

    Raises:
        UsageError: if there is one.
    """
    from bucketline.store.prompts.prompt_sets import is_set_name, read_set

    for name in () if STORED_CAPTIONS in names else filter(is_set_name, names):
        if not any(read_set(share.store.folder, share.store.manifest, name) for share in shares):
            where = ", ".join(redacted(str(share.store.place)) for share in shares)
            raise UsageError(
                f"--image-prompts {name}: {where} has no such set of prompts; `ingest prompts` writes one; a text of one word "
                "can be drawn from a file"
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
    paths = [store.path for store in parse_stores(config.store) if isinstance(store.path, Path)]
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
        ModelError: if one lacks the VAE's channels, or has a column or field that would be ignored.
    """
    for share in shares:
        store_channels(share.store)
    refuse_unread_columns(shares)


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


def refuse_unread_columns(shares: Sequence[WeightedStore]) -> None:
    """Reject stores with fields that this trainer would ignore or misread.

    Raises:
        ModelError: if there is one; the message names the field, its value and what is expected.
    """
    for store in [share.store for share in shares]:
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
