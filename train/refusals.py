"""Refusals that need only a run's options and its stores' manifests: in one order, before torch is imported."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from bucketline.errors import ModelError, UsageError
from bucketline.files.paths import Overlap, overlap
from bucketline.files.run_marker import is_run
from bucketline.loader.mixture import open_shares, parse_stores
from bucketline.store import Store
from bucketline.store.format.manifest import MANIFEST
from bucketline.train.optim import refuse_combinations

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bucketline.loader import WeightedStore
    from bucketline.train.config import TrainConfig

IDS_OF_A_BUCKET = 4
BESIDE_A_RUN = (".log", ".out", ".err", ".tmp")
"""Suffixes allowed in a folder before its run starts: logs of a shell or scheduler, temporary files that a full disk left."""


def refuse_early(config: TrainConfig, world_size: int) -> None:
    """Check a run before anything that takes seconds is imported. Stores in object storage are checked when they are opened.

    Raises:
        BucketlineError: if options exclude each other, the output folder cannot be a run's, or a store cannot be trained on.
    """
    refuse_combinations(config, world_size)
    if config.resume:
        return  # its stores are at the generations of its checkpoint, which has passed all this
    paths = [one.path for one in parse_stores(config.store)]
    local = [path for path in paths if isinstance(path, Path)]
    if config.wait_rows is not None and not all((path / MANIFEST).exists() for path in local):
        return  # they are waited for
    refuse_place(config)
    if len(local) == len(paths):
        refuse_stores(open_shares(local))


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
